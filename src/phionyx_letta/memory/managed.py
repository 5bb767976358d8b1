"""Which files are managed: plain paths and globs (`**` for any depth), and nothing that a link or `..` makes look like one.

As in a shell, a wildcard matches no name that begins with a dot. The folders in front of the first wildcard may be links, since
whoever configures them chose them; below, no link is followed.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phionyx_letta.errors import TargetRefused
from phionyx_letta.memory.files import FileTarget

__all__ = ["ManagedFiles"]

_MAGIC = re.compile(r"[*?[]")
_LITERAL = re.compile(r"\[([*?[])\]")  # what `glob.escape` writes
_PIECES = re.compile(r"\*+|\?|\[!?\]?[^\]/]*\]|.", re.DOTALL)


@dataclass(frozen=True)
class _Pattern:
    """One given path: its real folder, and what must follow below it."""

    given: str
    folder: str
    rest: re.Pattern[str]
    top: str
    """The folder as it was given."""
    depth: int | None
    """How many folders deep a match can be; None for any."""
    hidden: bool
    """Whether a match can be in a hidden folder."""

    def names(self) -> Iterator[str]:
        """Yield the names that match, spelt as the path was given. Links to folders are not entered: they may lead in circles."""
        for folder, below, files in os.walk(self.top or "."):
            inside = os.path.relpath(folder, self.top or ".")
            parts = [] if inside == "." else inside.split("/")
            if self.depth is not None and len(parts) >= self.depth:
                below.clear()
            if not self.hidden:
                below[:] = [one for one in below if not one.startswith(".")]
            for name in files:
                if self.rest.fullmatch("/".join([*parts, name])):
                    yield os.path.join(self.top, *parts, name)


class ManagedFiles:
    """The files behind a `LivingMemory`; relative paths are those of the folder it was made in."""

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        """Take paths and globs; an existing folder stands for all Markdown files in it.

        Raises:
            TargetRefused: one of them is empty or holds a NUL.
        """
        self._patterns = [_pattern(os.fspath(path)) for path in paths]

    def names(self) -> list[str]:
        """Return the existing managed files as the given paths spell them, sorted, each once."""
        found: dict[str, str] = {}
        for pattern in self._patterns:
            for name in pattern.names():
                real = os.path.realpath(name)
                if os.path.isfile(real) and self._allows(real):
                    found.setdefault(real, name)
        return sorted(found.values())

    def resolve(self, name: str) -> FileTarget:
        """Return the file of this name, whether it exists yet or not.

        Raises:
            TargetRefused: it is not managed, be it through `..`, a link or an absolute path.
        """
        if not name or "\0" in name:
            raise TargetRefused(f"{name!r} is not a path", "give the path of a managed file")
        real = os.path.realpath(name)
        if not self._allows(real):
            through = f" (it is {real})" if real != os.path.abspath(name) else ""
            raise TargetRefused(
                f"{name} is outside the managed paths{through}",
                "add it to the managed paths if it is a memory file; links and `..` do not count",
            )
        return FileTarget(name, real)

    def _allows(self, real: str) -> bool:
        for one in self._patterns:
            below = real.removeprefix(one.folder.rstrip("/") + "/")
            if below != real and one.rest.fullmatch(below):
                return True
        return False


def _pattern(given: str) -> _Pattern:
    if not given or "\0" in given:
        raise TargetRefused(f"{given!r} is not a path to manage", "give a file or a glob such as ./memory/**/*.md")
    if Path(given).is_dir():
        given = os.path.join(glob.escape(given), "**", "*.md")
    elif os.path.lexists(given):  # a name may hold what would be wildcards
        given = glob.escape(given)
    parts = os.path.abspath(given).split("/")
    wild = (number for number, part in enumerate(parts) if _MAGIC.search(_LITERAL.sub("", part)))
    fixed = next(wild, len(parts) - 1)
    folder = os.path.realpath(_LITERAL.sub(r"\1", "/".join(parts[:fixed])) or "/")
    rest, spelt = parts[fixed:], given.split("/")
    wild = (number for number, part in enumerate(spelt) if _MAGIC.search(_LITERAL.sub("", part)))
    top = _LITERAL.sub(r"\1", "/".join(spelt[: next(wild, len(spelt) - 1)]))
    return _Pattern(
        given,
        folder,
        re.compile(_expression(rest)),
        top=top or ("/" if given.startswith("/") else ""),
        depth=None if "**" in rest else len(rest) - 1,
        hidden=any(part.startswith(".") for part in rest),
    )


def _expression(parts: list[str]) -> str:
    """The regular expression of glob parts, for paths relative to the folder before them."""
    out = ""
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            out += r"(?:[^/.][^/]*/)*" + (r"[^/.][^/]*" if last else "")
        else:
            visible = r"(?!\.)" if part[:1] in "*?[" else ""
            out += visible + "".join(map(_piece, _PIECES.findall(part))) + ("" if last else "/")
    return out


def _piece(piece: str) -> str:
    if piece[0] == "*":
        return "[^/]*"
    if piece == "?":
        return "[^/]"
    if piece[0] == "[" and len(piece) > 1:
        negated, inside = piece[1] == "!", re.sub(r"([\\^\[\]&~|])", r"\\\1", piece[1:-1].removeprefix("!"))
        return f"(?!/)[{'^' if negated else ''}{inside}]"
    return re.escape(piece)
