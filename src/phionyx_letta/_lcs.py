"""Length of the longest common subsequence of two texts, exact up to a bound and never expensive beyond it.

Rule (design, decision 5): common ends are trimmed; the rest is exact while the product of the two middles is at most
`EXACT_CELLS`; beyond that, lines that occur once in both texts are anchors (patience diff), hunks between them are exact while a
total of `EXACT_CELLS` lasts, smallest first, and what is left counts as replaced. Measured: plain LCS on a 300 kB rewrite held
the interpreter for 1.7 s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from operator import mul

__all__ = ["EXACT_CELLS", "common_length", "common_prefix", "common_suffix", "line_anchors"]

EXACT_CELLS = 400_000_000
"""Cells of the comparison table (product of two lengths) that one call may fill: about 8 ms of bit-parallel work."""

MAX_ANCHOR_LINES = 20_000
"""Lines of both middles together beyond which they are not looked at one by one."""

_HUNK_OVERHEAD = 100_000  # cells' worth of time that comparing one more hunk costs whatever its size
_WIDE_CELLS = 40_000_000  # rapidfuzz is ten times slower on wide alphabets; above this, use the interruptible method
_CHUNK = 1 << 16


def common_length(before: str, after: str) -> tuple[int, str]:
    """Return the number of code points in common and the method: `"lcs"` (exact) or `"lines"` (anchored, a lower bound)."""
    start = common_prefix(before, after)
    end = common_suffix(before, after, start)
    old, new = before[start : len(before) - end], after[start : len(after) - end]
    if not old or not new:
        return start + end, "lcs"
    if len(old) * len(new) <= EXACT_CELLS:
        return start + end + _lcs(old, new), "lcs"
    return start + end + _by_lines(old, new), "lines"


def common_prefix(a: str, b: str) -> int:
    """Return the length of the common prefix, by bisection over slices (no loop over characters)."""
    low, high = 0, min(len(a), len(b))
    step = 64  # gallop first: most differences of short texts are near the front
    while low < high:
        mid = min(high, low + step)
        if a[low:mid] == b[low:mid]:
            low, step = mid, step * 2
        else:
            high = mid - 1
            step = max(1, (high - low + 1) // 2)
    return low


def common_suffix(a: str, b: str, prefix: int = 0) -> int:
    """Return the length of the common suffix that does not overlap the first `prefix` characters."""
    low, high = 0, min(len(a), len(b)) - prefix
    step = 64
    while low < high:
        mid = min(high, low + step)
        if a[len(a) - mid : len(a) - low] == b[len(b) - mid : len(b) - low]:
            low, step = mid, step * 2
        else:
            high = mid - 1
            step = max(1, (high - low + 1) // 2)
    return low


def line_anchors(old: list[str], new: list[str]) -> list[tuple[int, int]]:
    """Return pairs of positions of lines that occur once in both lists, in increasing order on both sides (patience)."""
    once_old, once_new = _singles(old), _singles(new)
    common = once_old & once_new
    if not common:
        return []
    where = {line: j for j, line in enumerate(new) if line in common}
    return _longest_increasing([(i, where[line]) for i, line in enumerate(old) if line in common])


def _singles(lines: list[str]) -> set[str]:
    return {line for line, count in Counter(lines).items() if count == 1}


def _longest_increasing(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest subsequence of `pairs` (ordered by i, j distinct) that increases in j too."""
    from bisect import bisect_left

    tails: list[int] = []  # the smallest j that ends an increasing run of each length
    at: list[int] = []  # the index in pairs of that end
    back: list[int] = []
    for index, (_, j) in enumerate(pairs):
        k = bisect_left(tails, j)
        back.append(at[k - 1] if k else -1)
        if k == len(tails):
            tails.append(j)
            at.append(index)
        else:
            tails[k], at[k] = j, index
    out: list[tuple[int, int]] = []
    index = at[-1] if at else -1
    while index >= 0:
        out.append(pairs[index])
        index = back[index]
    return out[::-1]


def _by_lines(old: str, new: str) -> int:
    """Return a lower bound of the LCS: anchored lines, and exact counts in the hunks that fit."""
    if old.count("\n") + new.count("\n") > MAX_ANCHOR_LINES:
        return 0
    old_lines, new_lines = old.split("\n"), new.split("\n")
    anchors = line_anchors(old_lines, new_lines)
    if not anchors:
        return 0
    old_at = [0, *accumulate(len(line) + 1 for line in old_lines)]
    new_at = [0, *accumulate(len(line) + 1 for line in new_lines)]
    total = sum(len(old_lines[i]) for i, _ in anchors)
    spans = list(_gaps(anchors, old_at, new_at, len(old), len(new)))
    return total + sum(_affordable(old, new, spans))


def _gaps(
    anchors: Iterable[tuple[int, int]], old_at: list[int], new_at: list[int], old_end: int, new_end: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the character spans between anchored lines; the newline that ends an anchor belongs to the span after it."""
    p = q = 0
    for i, j in anchors:
        yield p, old_at[i], q, new_at[j]
        p, q = old_at[i + 1] - 1, new_at[j + 1] - 1
    yield p, old_end, q, new_end


def _affordable(old: str, new: str, spans: list[tuple[int, int, int, int]]) -> Iterator[int]:
    """Yield the exact LCS of spans, smallest first, until the budget is used."""
    left = EXACT_CELLS
    for p, p_end, q, q_end in sorted(spans, key=_cells):
        if p == p_end or q == q_end:
            continue
        a, b = old[p:p_end], new[q:q_end]
        if a == b:
            yield len(a)
            continue
        left -= mul(len(a), len(b)) + _HUNK_OVERHEAD
        if left < 0:
            return
        yield _lcs(a, b)


def _cells(span: tuple[int, int, int, int]) -> int:
    return (span[1] - span[0]) * (span[3] - span[2])


def _lcs(a: str, b: str) -> int:
    """Return the exact LCS length of two non-empty texts."""
    from rapidfuzz.distance import LCSseq  # 0.1 s to import, and an append never needs it

    narrow = _as_bytes(a, b)
    if narrow is not None:
        return int(LCSseq.similarity(*narrow))
    if len(a) * len(b) <= _WIDE_CELLS and len(a) + len(b) <= _CHUNK:
        return int(LCSseq.similarity(a, b))
    return _lcs_by_integers(a, b)


def _as_bytes(a: str, b: str) -> tuple[bytes, bytes] | None:
    """Return both texts over an alphabet of bytes with the same LCS, or None if they share more than 254 characters."""
    try:
        return a.encode("latin-1"), b.encode("latin-1")
    except UnicodeEncodeError:
        pass
    in_a, in_b = _alphabet(a), _alphabet(b)
    common = in_a & in_b
    if len(common) > 254:
        return None
    table = dict.fromkeys(map(ord, in_a - common), 0) | dict.fromkeys(map(ord, in_b - common), 1)
    table |= {ord(c): n for n, c in enumerate(common, start=2)}  # 0 and 1 occur on one side only: they never match
    return _translate(a, table), _translate(b, table)


def _alphabet(text: str) -> set[str]:
    out: set[str] = set()
    for at in range(0, len(text), _CHUNK):  # in chunks, so that other threads may run between them
        out.update(text[at : at + _CHUNK])
    return out


def _translate(text: str, table: dict[int, int]) -> bytes:
    chunks = (text[at : at + _CHUNK].translate(table) for at in range(0, len(text), _CHUNK))
    return b"".join(chunk.encode("latin-1") for chunk in chunks)


def _lcs_by_integers(a: str, b: str) -> int:
    """Return the LCS length by Hyyrö's bit-vector method on Python integers: interruptible, indifferent to the alphabet."""
    if len(a) < len(b):
        a, b = b, a
    masks: dict[str, int] = dict.fromkeys(b, 0)
    for position, character in enumerate(a):
        if character in masks:
            masks[character] |= 1 << position
    full = (1 << len(a)) - 1
    row = full
    for character in b:
        match = row & masks[character]
        if match:
            row = ((row + match) | (row - match)) & full
    return len(a) - row.bit_count()
