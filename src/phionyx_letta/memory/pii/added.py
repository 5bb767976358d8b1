"""Which stretches of a text were there before: the border that ``filter_new`` keeps."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from itertools import takewhile

from rapidfuzz.distance import LCSseq

_TOKENS = re.compile(r"\w+|\s+|[^\w\s]")
#: Largest alignment, in cells of one bit each (50 MB); a hunk beyond it counts as new throughout.
_MOST_CELLS = 400_000_000


class Kept:
    """The stretches of the newer text that were taken over from the older one, each in one piece."""

    def __init__(self, stretches: list[tuple[int, int]]) -> None:
        """Take the stretches, in order."""
        self._stretches = stretches
        self._starts = [start for start, _ in stretches]

    def covers(self, start: int, end: int) -> bool:
        """Whether ``[start, end)`` lies within one stretch."""
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and end <= self._stretches[at][1]


def kept(before: str, after: str) -> Kept:
    """Align `after` with `before`: by lines, and by words inside the lines that changed."""
    blocks: list[tuple[int, int, int]] = []  # offset before, offset after, length
    _align(before, after, 0, 0, blocks, str.splitlines)
    stretches: list[tuple[int, int, int]] = []
    for at_before, at_after, length in blocks:
        if stretches:
            last_before, last_after, last_length = stretches[-1]
            if last_before + last_length == at_before and last_after + last_length == at_after:
                stretches[-1] = (last_before, last_after, last_length + length)
                continue
        stretches.append((at_before, at_after, length))
    return Kept([(start, start + length) for _, start, length in stretches])


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _align(
    before: str,
    after: str,
    at_before: int,
    at_after: int,
    blocks: list[tuple[int, int, int]],
    cut: Callable[..., list[str]],
) -> None:
    """Append the blocks common to both texts; `cut` is how they are taken apart."""
    by_line = cut is str.splitlines
    a, b = (_lines(before), _lines(after)) if by_line else (_TOKENS.findall(before), _TOKENS.findall(after))
    head = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    rest = zip(reversed(a[head:]), reversed(b[head:]), strict=False)
    tail = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], rest))
    middle_a, middle_b = a[head : len(a) - tail], b[head : len(b) - tail]

    def common(items: list[str]) -> None:
        nonlocal at_before, at_after
        length = sum(map(len, items))
        if length:
            blocks.append((at_before, at_after, length))
        at_before, at_after = at_before + length, at_after + length

    def changed(old: list[str], new: list[str]) -> None:
        nonlocal at_before, at_after
        if by_line and old and new:
            _align("".join(old), "".join(new), at_before, at_after, blocks, _TOKENS.findall)
        at_before, at_after = at_before + sum(map(len, old)), at_after + sum(map(len, new))

    common(b[:head])
    if len(middle_a) * len(middle_b) > _MOST_CELLS:
        changed(middle_a, middle_b)
    else:
        _walk(middle_a, middle_b, common, changed)
    common(b[len(b) - tail :])


def _walk(
    a: list[str], b: list[str], common: Callable[[list[str]], None], changed: Callable[[list[str], list[str]], None]
) -> None:
    """Hand the aligned parts on, in order; neighbouring changes as one."""
    done_a = done_b = 0
    for operation in LCSseq.opcodes(a, b):
        if operation.tag != "equal":
            continue
        changed(a[done_a : operation.src_start], b[done_b : operation.dest_start])
        common(b[operation.dest_start : operation.dest_end])
        done_a, done_b = operation.src_end, operation.dest_end
    changed(a[done_a:], b[done_b:])
