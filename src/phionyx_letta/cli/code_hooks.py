"""`code install`, `uninstall`, `status`: the hooks that note who makes which commit, and the two that are optional."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from phionyx_letta.cli.code import CodeLedger, LettaDir, chosen_memories, code, hooks_of
from phionyx_letta.cli.failures import FAILED, NOT_MEASURED, OK
from phionyx_letta.cli.options import Json
from phionyx_letta.cli.output import answer, safe

if TYPE_CHECKING:
    from rich.console import Console

    from phionyx_letta.letta_code.hooks import HooksState

__all__ = ["code", "install", "status", "uninstall"]


@code.command(short_help="Let hooks note who makes which commit.")
def install(
    gate: Annotated[
        bool | None,
        typer.Option("--gate/--no-gate", help="Refuse whatever takes commits off a branch (amend, reset, force-push)."),
    ] = None,
    report: Annotated[
        bool | None,
        typer.Option(
            "--report/--no-report", help="Report `code verify` to the agent when a session starts in the TUI."
        ),
    ] = None,
    letta_dir: LettaDir = None,
    ledger: CodeLedger = None,
    as_json: Json = False,
) -> int:
    """Put hooks into Letta Code's settings.json and into each memory repository: they note conversation and tool call.

    They only write a small file, and never fail a turn. What is there already is kept and goes on running. Without hooks
    everything is recorded too, but not in which conversation it was done. Agents made later are covered by the next ingest.
    The gate is a guard-rail: who can write to the repository can take it out. The report reads this ledger, with the key that is
    set now; a key given as hex digits is not written down, so Letta Code has to be started with it.
    """
    hooks = hooks_of(letta_dir, ledger)
    return _told(hooks.install(chosen_memories(None, None, letta_dir), gate=gate, report=report), as_json)


@code.command(short_help="Take the hooks out again.")
def uninstall(letta_dir: LettaDir = None, as_json: Json = False) -> int:
    """Take the hooks out, and put back what was there before: byte for byte where nobody changed it since."""
    state = hooks_of(letta_dir).uninstall(chosen_memories(None, None, letta_dir))
    _told(state, as_json)
    return FAILED if state.settings in ("installed", "partly") or "installed" in state.repositories.values() else OK


@code.command(short_help="Show how the hooks stand.")
def status(letta_dir: LettaDir = None, as_json: Json = False) -> int:
    """Show whether the hooks are in place, of which agents, and how many of their notes wait. Exit 2 where one is missing."""
    return _told(hooks_of(letta_dir).state(chosen_memories(None, None, letta_dir)), as_json)


def _told(state: HooksState, as_json: bool) -> int:
    page = vars(state)

    def show(console: Console) -> None:
        console.print(f"settings.json  {page['settings']}")
        for agent, found in state.repositories.items():
            console.print(f"{safe(agent)}  {safe(found)}", soft_wrap=True)
        console.print(
            f"gate {'on' if state.gate else 'off'}, report at the start of a session {'on' if state.report else 'off'}"
        )
        console.print(f"{state.waiting} notes wait for the next ingest")

    answer(page, as_json=as_json, show=show)
    whole = state.settings == "installed" and set(state.repositories.values()) <= {"installed"}
    return OK if whole else NOT_MEASURED
