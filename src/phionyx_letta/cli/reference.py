"""The reference of all commands, written from the commands themselves: ``python -m phionyx_letta.cli.reference > docs/cli.md``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

__all__ = ["reference"]

_HEAD = """# The command line

Written by `python -m phionyx_letta.cli.reference > docs/cli.md` from the commands themselves; a test keeps it current.

Exit codes: 0 ok, 1 something is wrong, 2 not measured or used wrongly. With `--json` every command prints exactly one JSON object on
standard output, errors too: `{"error": …, "remedy": …}`. Colour appears on a terminal only, and never where `NO_COLOR` is set.
"""


def reference(app: typer.Typer) -> str:
    """Return the whole reference as Markdown."""
    group: Any = typer.main.get_command(app)
    parts = [_HEAD]
    for name, command in group.commands.items():
        parts.append("\n".join(_command(name, command)))
        for below, one in getattr(command, "commands", {}).items():
            parts.append("\n".join(_command(f"{name} {below}", one)))
    return "\n".join(parts)


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    usage = " ".join(_argument(one) for one in arguments) or ("COMMAND" if hasattr(command, "commands") else "")
    rest = " -- COMMAND [ARGUMENT]..." if command.context_settings.get("allow_extra_args") else ""
    yield f"## {name}\n"
    yield f"```\nphionyx-letta {name}{' [OPTIONS]' if options else ''}{' ' + usage if usage else ''}{rest}\n```\n"
    yield _paragraphs(command.help or "")
    if arguments or options:
        yield "\n| | |\n|---|---|"
    for one in arguments:
        yield f"| `{one.metavar or one.name.upper()}` | {_cell(one.help)} |"
    for one in options:
        yield f"| `{', '.join(one.opts)}{_value(one)}` | {_cell(one.help)}{_default(one)} |"
    yield ""


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _value(option: Any) -> str:
    return "" if option.is_flag else f" {option.metavar or 'N'}"


def _default(option: Any) -> str:
    return f" Default: {option.default}." if not option.is_flag and option.default is not None else ""


def _paragraphs(text: str) -> str:
    return "\n\n".join(re.sub(r"\s+", " ", part).strip() for part in inspect.cleandoc(text).split("\n\n"))


def _cell(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").replace("|", "\\|")


if __name__ == "__main__":
    from phionyx_letta.cli.app import app

    print(reference(app), end="")
