"""What a command prints: one JSON object, or a page for people. Pages go through rich, which is imported when one is printed.

Everything that comes out of a ledger is shown through `safe`: whoever wrote it must not command the reader's terminal.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from phionyx_letta.errors import said
from phionyx_letta.invisible import INVISIBLE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["STYLES", "WORDS", "answer", "complain", "page", "safe", "short", "stderr", "stdout", "styled"]

STYLES = {
    "ok": "green",
    "valid": "bold green",
    "warn": "yellow",
    "not_measured": "yellow",
    "fail": "bold red",
    "failed": "bold red",
}
WORDS = {"not_measured": "not measured"}
_INVISIBLE = re.compile(f"[{INVISIBLE}]")


def stdout() -> Console:
    """The console of standard output: colour on a terminal only, never with NO_COLOR."""
    return _console()


def stderr() -> Console:
    """The console of standard error, for progress and complaints."""
    return _console(to_stderr=True)


def _console(*, to_stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=to_stderr, highlight=False, markup=False, emoji=False)


def answer(result: Mapping[str, Any], *, as_json: bool, show: Callable[[Console], None]) -> None:
    """Print a command's result."""
    if as_json:
        page(result)
    else:
        show(stdout())


def page(result: Mapping[str, Any]) -> None:
    """Print one JSON object; ASCII, so that no encoding of the output can break it."""
    print(json.dumps(result, indent=2 if sys.stdout.isatty() else None))


def complain(message: str, remedy: str, *, as_json: bool) -> None:
    """Print an error: one line on standard error, or the one JSON object on standard output."""
    if as_json:
        page({"error": message, "remedy": remedy})
        return
    from rich.text import Text

    line = Text("error: ", "bold red")
    line.append(said(safe(message, lines=True), safe(remedy)), "default")
    stderr().print(line, soft_wrap=True)


def safe(text: object, *, lines: bool = False) -> str:
    """The text with everything but printable characters, and what is printed blank, made visible.

    ``lines`` keeps line breaks and tabs: for texts of our own only, since a value with a line break could forge a line.
    """
    kept = "\n\t" if lines else ""
    shown = _INVISIBLE.sub(lambda found: _escaped(found[0]), str(text))
    return "".join(char if char.isprintable() or char in kept else _escaped(char) for char in shown)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def short(digest: str, digits: int = 8) -> str:
    """The first digits of a hash, enough for `show`."""
    return safe(digest.removeprefix("envelope://").removeprefix("sha256:")[:digits])


def styled(status: str, width: int = 0) -> Text:
    """A status word in its colour."""
    from rich.text import Text

    return Text(WORDS.get(status, status).ljust(width), STYLES.get(status, ""))
