"""Comparing and merging texts by lines: the seed's `FileDiffEngine`, three-way merges and their reverse.

Texts keep their line endings as they are; only `\\n` ends a line. Nothing here reads or writes, but for the two helpers of the
seed that take a path.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from merge3 import Merge3

__all__ = ["FileDiffEngine", "merge", "reverse_merge", "same_but_whitespace"]

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

    Where `current` differs from `before` only in whitespace, the lines of `after` win.
    """
    merged: list[str] = []
    for kind, lines, theirs, ours in _regions(before, after, current):
        if kind != "conflict":
            merged += lines
        elif same_but_whitespace("".join(lines), "".join(ours)):
            merged += theirs
        else:
            return None
    return "".join(merged)


def reverse_merge(before: str, after: str, current: str) -> str | None:
    """Take the change from `before` to `after` out of `current`, keeping every later edit; None where that is not possible.

    Later edits may touch the change: a line added directly below it stays. Only lines both of them changed are a conflict.
    """
    merged: list[str] = []
    for kind, lines, theirs, ours in _regions(after, before, current):
        if kind != "conflict":
            merged += lines
        elif same_but_whitespace("".join(lines), "".join(ours)):
            merged += theirs
        else:
            both = _without_overlap(lines, theirs, ours)
            if both is None:
                return None
            merged += both
    return "".join(merged)


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
    merged: list[str] = []
    done = 0
    for number, (start, end, lines) in enumerate(edits):
        if start < done or (number and edits[number - 1][:2] == (start, end)):
            return None
        merged += [*base[done:start], *lines]
        done = end
    return [*merged, *base[done:]]


def _edits(base: Sequence[str], changed: Sequence[str]) -> Iterator[Edit]:
    matcher = difflib.SequenceMatcher(None, base, changed, autojunk=False)
    for tag, start, end, first, last in matcher.get_opcodes():
        if tag != "equal":
            yield start, end, changed[first:last]


def _words(text: str) -> list[list[str]]:
    return [words for line in text.split("\n") if (words := line.split())]


def _lines(text: str) -> list[str]:
    """Split after newlines (`str.splitlines` knows a dozen other separators)."""
    lines = [line + "\n" for line in text.split("\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines
