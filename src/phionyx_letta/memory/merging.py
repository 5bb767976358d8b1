"""Comparing and merging texts by lines: the seed's `FileDiffEngine`, three-way merges and their reverse.

Texts keep their line endings as they are; only `\\n` ends a line. Nothing here reads or writes, but for the two helpers of the
seed that take a path.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from merge3 import Merge3

__all__ = ["FileDiffEngine", "both_added", "merge", "reverse_merge", "same_but_whitespace"]

Edit = tuple[int, int, Sequence[str]]
"""Lines `[start, end)` of the base are replaced by these."""


class FileDiffEngine:
    """The seed's static helpers around diffs."""

    @staticmethod
    def generate_unified_diff(before: str, after: str, file_path: str = "memory.md", *, context_lines: int = 3) -> str:
        """Return a unified diff that `patch` can read, with `file_path` in its headers."""
        name = file_path.removeprefix("./").lstrip("/")
        lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{name}", f"b/{name}", n=max(0, context_lines))
        return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)

    @staticmethod
    def count_changed_lines(unified_diff: str) -> dict[str, int]:
        """Return how many lines a diff adds and removes: `added`, `removed` and their difference, `net`."""
        body, added, removed = False, 0, 0
        for line in unified_diff.split("\n"):
            body = body or line.startswith("@@")
            added += body and line.startswith("+")
            removed += body and line.startswith("-")
        return {"added": added, "removed": removed, "net": added - removed}

    @staticmethod
    def validate_patch_applicable(file_path: str | Path, expected_before: str) -> tuple[bool, str]:
        """Return whether the file still holds `expected_before`, whitespace aside, and if not, why.

        Raises:
            TargetRefused: the file is not UTF-8 text.
        """
        from phionyx_letta.memory.files import read_text

        current = read_text(Path(file_path))
        if current is None:
            return (False, f"{file_path} does not exist") if expected_before else (True, "")
        if same_but_whitespace(expected_before, current):
            return True, ""
        return False, f"{file_path} has diverged since the patch was made"

    @staticmethod
    def apply_patch(file_path: str | Path, after_content: str) -> str:
        """Write `after_content` to the file, atomically, and return it.

        Raises:
            TargetRefused: the file cannot be written.
        """
        from phionyx_letta.memory.files import write_text

        write_text(Path(file_path), after_content)
        return after_content

    @staticmethod
    def revert_to_content(file_path: str | Path, before_content: str) -> str:
        """Write `before_content` to the file, atomically, and return it; unlike `LivingMemory.revert` it keeps no later edit.

        Raises:
            TargetRefused: the file cannot be written.
        """
        return FileDiffEngine.apply_patch(file_path, before_content)

    @staticmethod
    def compute_similarity(before: str, after: str) -> float:
        """Return how alike two texts are, from 0 to 1: twice the longest common subsequence over both lengths."""
        from rapidfuzz.distance import Indel

        return Indel.normalized_similarity(before, after)


def same_but_whitespace(one: str, other: str) -> bool:
    """Return whether two texts differ in nothing but the amount of whitespace between their words.

    The words stay in the lines they were in: two lines that became one are a change.
    """
    return one == other or _words(one) == _words(other)


def merge(before: str, after: str, current: str) -> str | None:
    """Bring the change from `before` to `after` into `current`; None where both changed the same lines.

    Where `current` differs from `before` only in whitespace, its lines stay as they are but for those the change itself touches.
    """
    if same_but_whitespace(before, current):
        return _joined(_onto(_lines(before), _lines(after), _lines(current)))
    merged: list[str] = []
    for kind, lines, theirs, ours in _regions(before, after, current):
        both: Sequence[str] | None = lines
        if kind == "conflict":
            both = _onto(lines, theirs, ours) if _drifted(lines, ours) else None
        if both is None:
            return None
        merged += both
    return _joined(merged)


def both_added(before: str, after: str, current: str) -> str | None:
    """Bring lines that `after` adds to `before` into `current`, which may have added others in the same place: they come after those.

    None where `after` does more than add lines, or where `current` changed the lines around.
    """
    ended = [text if not text or text.endswith("\n") else text + "\n" for text in (before, after, current)]
    if any(end > start for start, end, _ in _edits(_lines(ended[0]), _lines(ended[1]))):
        return None
    merged: list[str] = []
    for kind, lines, theirs, ours in _regions(*ended):
        if kind == "conflict" and lines:
            return None
        merged += [*ours, *theirs] if kind == "conflict" else lines
    text = "".join(merged)
    return text if after.endswith("\n") or current.endswith("\n") else text.removesuffix("\n")


def reverse_merge(before: str, after: str, current: str) -> str | None:
    """Take the change from `before` to `after` out of `current`, keeping every later edit; None where that is not possible.

    Later edits may touch the change: a line added directly below it stays. Only lines both of them changed are a conflict.
    """
    if same_but_whitespace(after, current):
        return _joined(_onto(_lines(after), _lines(before), _lines(current)))
    merged: list[str] = []
    for kind, lines, theirs, ours in _regions(after, before, current):
        both: Sequence[str] | None = lines
        if kind == "conflict":
            both = (_onto if _drifted(lines, ours) else _without_overlap)(lines, theirs, ours)
        if both is None:
            return None
        merged += both
    return _joined(merged)


Region = tuple[str, Sequence[str], Sequence[str], Sequence[str]]


def _regions(base: str, theirs: str, ours: str) -> Iterator[Region]:
    """Yield ("settled", lines, [], []) or ("conflict", base lines, their lines, our lines), in order."""
    base_lines, their_lines, our_lines = _lines(base), _lines(theirs), _lines(ours)
    regions: Iterator[tuple[Any, ...]] = Merge3(base_lines, our_lines, their_lines).merge_regions()
    for region in regions:
        kind, (first, last) = region[0], region[1:3]
        if kind == "conflict":
            _, base_first, base_last, our_first, our_last, their_first, their_last = region
            base_part = base_lines[base_first:base_last] if base_first is not None else []
            yield kind, base_part, their_lines[their_first:their_last], our_lines[our_first:our_last]
        else:
            settled = {"unchanged": base_lines, "b": their_lines}.get(kind, our_lines)
            yield "settled", settled[first:last], [], []


def _without_overlap(base: Sequence[str], theirs: Sequence[str], ours: Sequence[str]) -> list[str] | None:
    """Merge two sets of edits that touch but do not overlap; None where they do, or where their order is open."""
    edits = sorted([*_edits(base, theirs), *_edits(base, ours)], key=lambda edit: edit[:2])
    for one, other in pairwise(edits):
        if other[0] < one[1] or other[:2] == one[:2]:
            return None
    return _edited(base, edits)


def _drifted(base: Sequence[str], ours: Sequence[str]) -> bool:
    return same_but_whitespace("".join(base), "".join(ours))


def _onto(base: Sequence[str], theirs: Sequence[str], ours: Sequence[str]) -> list[str] | None:
    """Make the change from `base` to `theirs` in `ours`, which differs from `base` in whitespace only.

    What was changed in `ours` stays, byte for byte. A line that `theirs` replaces gives way if nothing but its end was changed in
    `ours`, one that it removes in any case; else None.
    """
    changes = list(_edits(base, theirs))
    ranked: list[tuple[int, int, int, Sequence[str]]] = [(start, end, 1, lines) for start, end, lines in changes]
    for start, end, lines in _drift(base, ours):
        over = next((one for one in changes if one[0] <= start < one[1] and (end > start or one[0] < start)), None)
        if over is None:  # new blank lines come after new text, but where there are blank lines above it already
            ranked.append((start, end, 0 if start and not base[start - 1].strip() else 2, lines))
        elif over[2] and [line.rstrip() for line in lines] not in ([], [base[start].rstrip()], [""]):
            return None
    return _edited(base, [(start, end, lines) for start, end, _, lines in sorted(ranked, key=lambda one: one[:3])])


def _drift(base: Sequence[str], ours: Sequence[str]) -> Iterator[Edit]:
    """The edits from `base` to `ours` where they differ in whitespace only: one for each line, none taken for another."""
    words, our_words = ([*(at for at, line in enumerate(text) if line.strip()), len(text)] for text in (base, ours))
    start = first = 0
    for at, our_at in zip(words, our_words, strict=True):
        blank, our_blank = base[start:at], ours[first:our_at]
        for offset, line in enumerate(blank):
            now = our_blank[offset : offset + 1]
            if now != [line]:
                yield start + offset, start + offset + 1, now
        if len(our_blank) > len(blank):
            yield at, at, our_blank[len(blank) :]
        if base[at : at + 1] != ours[our_at : our_at + 1]:
            yield at, at + 1, ours[our_at : our_at + 1]
        start, first = at + 1, our_at + 1


def _edited(base: Sequence[str], edits: Iterable[Edit]) -> list[str]:
    """Make edits, which are in order and do not overlap."""
    edited: list[str] = []
    done = 0
    for start, end, lines in edits:
        edited += [*base[done:start], *lines]
        done = end
    return [*edited, *base[done:]]


def _edits(base: Sequence[str], changed: Sequence[str]) -> Iterator[Edit]:
    """The fewest edits, so that a mere addition removes nothing; `difflib` does not promise that where lines repeat."""
    from rapidfuzz.distance import LCSseq

    numbers: dict[str, int] = {}
    one, other = ([numbers.setdefault(line, len(numbers)) for line in lines] for lines in (base, changed))
    edits: list[Edit] = []
    for code in LCSseq.opcodes(one, other):
        if code.tag == "equal":
            continue
        start, end, lines = code.src_start, code.src_end, changed[code.dest_start : code.dest_end]
        if edits and edits[-1][1] == start:  # a replacement comes as a removal and an addition
            edits[-1] = edits[-1][0], end, [*edits[-1][2], *lines]
        else:
            edits.append((start, end, lines))
    yield from edits


def _words(text: str) -> list[list[str]]:
    return [words for line in text.split("\n") if (words := line.split())]


def _lines(text: str) -> list[str]:
    """Split after newlines (`str.splitlines` knows a dozen other separators)."""
    lines = [line + "\n" for line in text.split("\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def _joined(lines: Sequence[str] | None) -> str | None:
    """Join lines; one that was the last of its text and had no newline gets one if others follow now."""
    if not lines:
        return None if lines is None else ""
    newline = "\r\n" if lines[0].endswith("\r\n") else "\n"
    return "".join([*(line if line.endswith("\n") else line + newline for line in lines[:-1]), lines[-1]])
