"""The commands put together, and the one place where errors become an exit code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from phionyx_letta.cli.code_patches import code
from phionyx_letta.cli.demo import demo
from phionyx_letta.cli.doctor import doctor
from phionyx_letta.cli.explain import explain
from phionyx_letta.cli.export import export
from phionyx_letta.cli.failures import FAILED, NOT_MEASURED, exit_code
from phionyx_letta.cli.keys import keygen
from phionyx_letta.cli.log import log
from phionyx_letta.cli.memory import memory
from phionyx_letta.cli.output import complain
from phionyx_letta.cli.receipt import receipt
from phionyx_letta.cli.reconcile import reconcile
from phionyx_letta.cli.rotation import keys
from phionyx_letta.cli.run import run
from phionyx_letta.cli.seal import baseline, seal
from phionyx_letta.cli.session import session
from phionyx_letta.cli.show import show
from phionyx_letta.cli.verify import verify
from phionyx_letta.errors import PhionyxError

__all__ = ["app", "main"]

PROGRAM = "phionyx-letta"


class Commands(TyperGroup):
    """The group of all commands. A command returns its exit code; an error is one line, never a traceback."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run one command line; ends with `SystemExit` unless `standalone_mode` is off."""
        arguments = list(sys.argv[1:] if args is None else args)
        code = self._run(arguments or ["--help"], extra) or (0 if arguments else NOT_MEASURED)
        if standalone_mode:
            sys.exit(code)
        return code

    def _run(self, arguments: list[str], extra: dict[str, Any]) -> int:
        as_json = "--json" in arguments[: arguments.index("--") if "--" in arguments else None]
        try:
            code = super().main(arguments, PROGRAM, standalone_mode=False, **extra)
        except PhionyxError as error:
            complain(error.message, error.remedy, as_json=as_json)
            return exit_code(error)
        except typer.Abort:
            return 130
        except Exception as error:
            if not hasattr(
                error, "format_message"
            ):  # click's errors have it, whether typer brings its own click or not
                what = f"this cannot be worked on: {type(error).__name__}"  # a crafted ledger; its text is not repeated
                complain(what, "the file or the database is damaged, or not a ledger's", as_json=as_json)
                return FAILED
            command = " ".join([PROGRAM, *arguments[:1]]) if arguments[0] in self.commands else PROGRAM
            complain(str(error.format_message()).rstrip("."), f"see `{command} --help`", as_json=as_json)
            return NOT_MEASURED
        return code if isinstance(code, int) else 0


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from phionyx_letta.version import __version__

        print(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Signed, hash-chained evidence for every memory change of a Letta server.

    Exit codes: 0 ok, 1 failed, 2 not measured or used wrongly. Every command takes --json and then prints one JSON object.
    """


_EVERYTHING_AFTER = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

app.command(short_help="Watch it work: a real Letta server, nothing to install.")(demo)
app.command(short_help="Run a command armed: run -- letta server.", context_settings=_EVERYTHING_AFTER)(run)
app.command(short_help="Check everything, and say what to do.")(doctor)
app.command(short_help="Create a signing key.")(keygen)
app.command(short_help="Show what was recorded, newest last.")(log)
app.command(short_help="Show one change: who, when, why, what.")(show)
app.command(short_help="Explain a block: where each of its lines comes from.")(explain)
app.command(short_help="Check that nothing was tampered with.")(verify)
app.command(short_help="Sign and chain what waits in the outbox.")(seal)
app.command(short_help="Record blocks older than the plugin.")(baseline)
app.command(short_help="Find, adopt or undo what was done past the plugin.")(reconcile)
app.command(short_help="Write a receipt for something forgotten.")(receipt)
app.command(short_help="Write chains to a file or a folder.")(export)
app.add_typer(keys, name="keys", short_help="Replace the signing key, or revoke one.")
app.add_typer(session, name="session", short_help="Sessions of agents, and what was proposed from them.")
app.add_typer(code, name="code", short_help="Evidence for the git memory of Letta Code.")
app.add_typer(memory, name="memory", short_help="Memory files and blocks that change by reviewed patches.")


def main() -> None:
    """Run the command line of this process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    app()
