"""Where a new line belongs in a Markdown file: sections as a real parser sees them, and blank lines as a person would leave them.

Only headings of the document itself count: none in code fences, quotes, lists or front matter. The result is parsed again, so
that what was added is never swallowed by a fence or a comment that was left open.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

__all__ = ["place"]

PATH = " > "
_LIST_ITEM = re.compile(r" {0,3}(?:[-*+]|\d{1,9}[.)])(?:\s|$)")
_SWALLOWS = ("fence", "html_block")


@dataclass(frozen=True)
class _Heading:
    level: int
    title: str
    start: int
    """Its first line, from 0."""
    end: int
    """The line after it; a setext heading takes two."""


def place(text: str, addition: str, section: str | None = None) -> str:
    """Return `text` with `addition` at the end of the section, or of the document where no section is named.

    A section is named by its title, or by several from the outside in ("Tools > Python"); of several with one title the first is
    taken. One that does not exist is made at the end, at the level its siblings have. Line endings are those of the text, and it
    ends with a newline if it did before.
    """
    newline = "\r\n" if text.count("\r\n") * 2 > text.count("\n") else "\n"
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    added = addition.replace("\r\n", "\n").replace("\r", "\n").strip("\n").split("\n")
    final = not text or lines[-1] == ""
    if final:
        lines.pop()
    placed = _placed(lines, added, " ".join((section or "").split()).lstrip("#").strip())
    kept = _with_old_endings(text, placed, newline)
    return kept if final else kept.removesuffix(newline)


def _placed(lines: list[str], added: list[str], section: str) -> list[str]:
    headings = _headings(lines)
    if not section:
        start = headings[-1].end if headings else 0
        return _inserted(lines, added, start, len(lines))
    found = _find(headings, section)
    if found is None:
        title = f"{'#' * _level_of_new(headings)} {section.rpartition(PATH)[2].strip()}"
        return _inserted(lines, [title, "", *added], len(lines), len(lines), apart=True)
    after = [one.start for one in headings if one.start >= found.end]
    return _inserted(lines, added, found.end, after[0] if after else len(lines))


def _inserted(lines: list[str], added: list[str], start: int, end: int, *, apart: bool = False) -> list[str]:
    """Insert at the end of `lines[start:end]`, before the blank lines there; above every block that would swallow it."""
    placed, line = _inserted_at(lines, added, _end_of(lines, start, end), start, apart)
    while (swallowed := _swallowed_by(placed, line)) is not None:  # each is further up than the one before
        placed, line = _inserted_at(lines, added, _end_of(lines, min(start, swallowed), swallowed), start, apart)
    return placed


def _inserted_at(lines: list[str], added: list[str], at: int, start: int, apart: bool) -> tuple[list[str], int]:
    """Insert before `lines[at]` and say at which line the addition now begins."""
    above = [""] if at and lines[at - 1].strip() and _apart(lines[at - 1], added[0], at == start, apart) else []
    below = [""] if at < len(lines) and lines[at].strip() else []
    return [*lines[:at], *above, *added, *below, *lines[at:]], at + len(above)


def _end_of(lines: list[str], start: int, end: int) -> int:
    """The line before the blank ones at the end; where there is nothing else below a heading, one of them stays above."""
    at = end
    while at > start and not lines[at - 1].strip():
        at -= 1
    return at + 1 if at == start and at < end and start else at


def _apart(above: str, added: str, below_heading: bool, always: bool) -> bool:
    """Whether a blank line belongs between two lines: not in a list, not directly below a heading."""
    if always:
        return True
    if below_heading:
        return False
    inside_list = _LIST_ITEM.match(above) or above.startswith((" ", "\t"))
    return not (inside_list and _LIST_ITEM.match(added))


def _swallowed_by(lines: list[str], at: int) -> int | None:
    """The first line of a fence or of raw HTML that was left open above this line and so takes it in."""
    for token in _parsed("\n".join(_without_front_matter(lines))):
        if token.type in _SWALLOWS and token.map is not None and token.map[0] < at < token.map[1]:
            return token.map[0]
    return None


def _headings(lines: list[str]) -> list[_Heading]:
    tokens = _parsed("\n".join(_without_front_matter(lines)))
    return [
        _Heading(int(token.tag[1:]), _plain(tokens[number + 1]), *token.map)
        for number, token in enumerate(tokens)
        if token.type == "heading_open" and token.level == 0 and token.map is not None
    ]


def _find(headings: list[_Heading], section: str) -> _Heading | None:
    """The first heading of this title; for a path, the one whose parents are the others."""
    wanted = _folded(section)
    for heading in headings:
        if _folded(heading.title) == wanted:
            return heading
    titles = [_folded(part) for part in section.split(PATH.strip())]
    parents: list[_Heading] = []
    for heading in headings:
        parents = [*(one for one in parents if one.level < heading.level), heading]
        if len(titles) > 1 and [_folded(one.title) for one in parents][-len(titles) :] == titles:
            return heading
    return None


def _level_of_new(headings: list[_Heading]) -> int:
    """The level of the sections there are: below a single title, that of the headings under it."""
    if not headings:
        return 2
    counted = Counter(one.level for one in headings)
    top = min(counted)
    if counted[top] > 1:
        return top
    below = [level for level in counted if level > top]
    return min(below) if below else min(top + 1, 6)


def _without_front_matter(lines: list[str]) -> list[str]:
    """Blank out YAML front matter, which Markdown would read as a heading."""
    if not lines or lines[0].rstrip() != "---":
        return lines
    for number, line in enumerate(lines[1:], start=1):
        if line.rstrip() in ("---", "..."):
            return [""] * (number + 1) + lines[number + 1 :]
    return lines


def _with_old_endings(text: str, placed: list[str], newline: str) -> str:
    """Join the lines with `newline`, but those that were there keep the ending they had."""
    if "\r" not in text:
        return "\n".join([*placed, ""])
    old = text.split("\n")
    out, at = [], 0
    for line in placed:
        here = old[at].removesuffix("\r") == line if at < len(old) else False
        if here and at < len(old) - 1:
            out.append(old[at] + "\n")
        else:
            out.append(line + newline)
        at += here
    return "".join(out)


def _plain(token: Token) -> str:
    """The text of a heading without its markup."""
    return "".join(child.content for child in token.children or () if child.type in ("text", "code_inline"))


def _folded(title: str) -> str:
    return " ".join(title.casefold().split())


def _parsed(text: str) -> list[Token]:
    return _parser().parse(text)


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark")
