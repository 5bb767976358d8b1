"""Aligning two texts at a bounded cost: exact counts where they are affordable, common passages where they are not.

Rule: common ends are trimmed; the middles are compared exactly while their product is at most 4e8 (two rewritten texts
of 20 000 characters) over alphabets of up to 256 characters, 4e7 over wider ones, which cost ten times as much per cell.
Beyond that, lines and other passages that occur in both texts split them, and the parts are compared exactly, smallest
first, while half such a budget lasts; the rest counts as replaced. Everything is decided by lengths, never by a clock, so
the same texts always give the same counts. Measured: plain LCS on a 300 kB rewrite held the interpreter for 1.7 s.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterator

__all__ = ["Gap", "common_length", "differing_gaps", "trimmed"]

Gap = tuple[int, int, int, int]
"""`old[a:b]` became `new[c:d]`; at least one of the two is not empty."""

WORK = 480_000_000
"""Budget of one call in cells of the comparison table over narrow alphabets: about 20 picoseconds each, so about 10 ms."""

_PARTS_WORK = WORK // 2  # the search for passages has cost time by then

# Costs measured in cells: per character of the two texts, and per cell over a wide alphabet.
_PLAIN_CHARACTER, _RECODED_CHARACTER, _WIDE_CHARACTER, _WIDE_CELL = 250, 1500, 4000, 10
_CALL = 100_000
_TRIVIAL = 1_000_000  # cells below which finding out how wide the alphabet is costs more than it saves

# Characters that searching for common passages may read: 2 ms in prose, 25 ms in text made to be slow.
_SCAN = 6_000_000
_LOOK = 8_000  # what looking for one passage costs in characters, however short the span
_PASSAGE = 32  # length of a passage; shorter ones recur by chance, longer ones miss unchanged text between edits
_FIRST_STEP, _GROWTH = 64, 4  # of the slices that are compared at common ends
_LINE = range(4, 200)  # lengths of a line worth looking for, its two newlines included
# Where passages are taken from, as fractions of the span.
_PLACES = ((1, 2), (1, 4), (3, 4), (1, 8), (3, 8), (5, 8), (7, 8))


def common_length(before: str, after: str) -> tuple[int, str]:
    """Return the number of code points in common, and how it was found: `lcs` (exact) or `passages` (a lower bound)."""
    gap = trimmed(before, after, (0, len(before), 0, len(after)))
    p, p_end, q, q_end = gap
    outside = p + len(before) - p_end
    old, new = before[p:p_end], after[q:q_end]
    if not old or not new:
        return outside, "lcs"
    found = _affordable_lcs(old, new, WORK)
    if found is not None:
        return outside + found[0], "lcs"
    # if every part is cut down to this product, all of them together can be compared exactly
    share = (_PARTS_WORK // max(len(old), len(new))) ** 2
    gaps = differing_gaps(old, new, lambda m, n: m * n <= share)
    matched = len(old) - sum(b - a for a, b, _, _ in gaps)
    return outside + matched + _exact_in_gaps(old, new, gaps), "passages"


def trimmed(old: str, new: str, gap: Gap) -> Gap:
    """Return the gap without what its two sides have in common at their starts and ends."""
    p, p_end, q, q_end = gap
    start = _common_prefix(old, new, gap)
    end = _common_suffix(old, new, (p + start, p_end, q + start, q_end))
    return p + start, p_end - end, q + start, q_end - end


def differing_gaps(old: str, new: str, small: Callable[[int, int], bool]) -> list[Gap]:
    """Return the spans that differ, in order; between them the texts are equal.

    Spans are split at common passages until `small(length, length)` holds, nothing more is found, or the search budget is used.
    """
    done: list[Gap] = []
    # first come, first split: the parts shrink together, and none takes all the budget
    queue = deque([trimmed(old, new, (0, len(old), 0, len(new)))])
    budget = _SCAN
    while queue:
        gap = queue.popleft()
        p, p_end, q, q_end = gap
        if p == p_end or q == q_end or small(p_end - p, q_end - q):
            if p < p_end or q < q_end:
                done.append(gap)
            continue
        found, scanned = _passage(old, new, gap, budget)
        budget -= scanned
        if found is None:
            done.append(gap)
            continue
        i, j = found
        queue.append(trimmed(old, new, (p, i, q, j)))
        queue.append(trimmed(old, new, (i, p_end, j, q_end)))
    return sorted(done)


def _passage(old: str, new: str, gap: Gap, budget: int) -> tuple[tuple[int, int] | None, int]:
    """Return where a passage of the old span occurs once in the new one, and how many characters that took to read.

    It is looked for where it should be if the span was edited evenly; a passage of the middle then in the whole span.
    """
    p, p_end, q, q_end = gap
    scanned = 0
    for part, parts in _PLACES:
        at = p + (p_end - p) * part // parts
        expected, reach = q + (q_end - q) * part // parts, max(_PASSAGE, (q_end - q) // 8)
        near = max(q, expected - reach), min(q_end, expected + reach)
        bounds = [(near, end) for end in _candidates(old, at, p, p_end)]
        if (part, parts) == _PLACES[-1]:
            middle = (p + p_end) // 2
            bounds.append(((q, q_end), (middle, min(middle + _PASSAGE, p_end))))
        for (low, high), (i, end) in bounds:
            if scanned >= budget:
                return None, scanned
            passage = old[i:end]
            j = new.find(passage, low, high)
            scanned += high - low + _LOOK
            if j >= 0 and new.find(passage, j + 1, high) < 0:
                return (i, j), scanned
    return None, scanned


def _candidates(old: str, at: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of passages near `at`: whole lines, since edits leave whole lines alone, then some characters."""
    newline, following = old.rfind("\n", max(start, at - _LINE.stop), at + 1), at
    for _ in range(2):
        following = old.find("\n", max(newline + 1, following), min(at + 2 * _LINE.stop, end))
        if following < 0:
            break
        if newline >= 0 and following - newline + 1 in _LINE:
            yield newline, following + 1
        newline = following
    yield at, min(at + _PASSAGE, end)


def _exact_in_gaps(old: str, new: str, gaps: list[Gap]) -> int:
    """Return the LCS of the gaps together, smallest first, until the budget is used."""
    left, total = _PARTS_WORK, 0
    for p, p_end, q, q_end in sorted(gaps, key=lambda gap: (gap[1] - gap[0]) * (gap[3] - gap[2])):
        if p == p_end or q == q_end:
            continue
        found = _affordable_lcs(old[p:p_end], new[q:q_end], left)
        if found is None:
            break
        total += found[0]
        left -= found[1]
    return total


def _affordable_lcs(a: str, b: str, budget: int) -> tuple[int, int] | None:
    """Return the LCS length of two non-empty texts and its cost, or None where it costs more than `budget`."""
    cells, length = len(a) * len(b), len(a) + len(b)
    if cells + _PLAIN_CHARACTER * length + _CALL > budget:
        return None
    try:
        pair = a.encode("latin-1"), b.encode("latin-1")
        return _lcs(*pair), cells + _PLAIN_CHARACTER * length + _CALL
    except UnicodeEncodeError:
        pass
    wide_cost = _WIDE_CELL * cells + _WIDE_CHARACTER * length + _CALL
    if cells > _TRIVIAL and cells + _RECODED_CHARACTER * length + _CALL <= budget:
        recoded = _recoded(a, b)
        if recoded is not None:
            return _lcs(*recoded), cells + _RECODED_CHARACTER * length + _CALL
    return (_lcs(a, b), wide_cost) if wide_cost <= budget else None


def _lcs(a: str | bytes, b: str | bytes) -> int:
    from rapidfuzz.distance import LCSseq  # 0.1 s to import, and an append never needs it

    return LCSseq.similarity(a, b)


def _recoded(a: str, b: str) -> tuple[bytes, bytes] | None:
    """Return both texts in one byte per character, or None where they have more than 255 different ones."""
    alphabet = {*a, *b} - {"\0"}
    if len(alphabet) > 255:
        return None
    table = codecs.charmap_build("\0" + "".join(alphabet))  # zero first: CPython then builds its quick table
    return codecs.charmap_encode(a, "strict", table)[0], codecs.charmap_encode(b, "strict", table)[0]


def _common_prefix(old: str, new: str, gap: Gap) -> int:
    """Return the length of the common start, by comparing slices that grow, then halve (no loop over characters)."""
    p, p_end, q, q_end = gap
    low, high, step = 0, min(p_end - p, q_end - q), _FIRST_STEP
    while low < high:
        mid = low + step if low + step < high else high
        if old[p + low : p + mid] != new[q + low : q + mid]:
            high = mid - 1
            break
        low, step = mid, step * _GROWTH
    while low < high:
        mid = (low + high + 1) // 2
        if old[p + low : p + mid] == new[q + low : q + mid]:
            low = mid
        else:
            high = mid - 1
    return low


def _common_suffix(old: str, new: str, gap: Gap) -> int:
    """Return the length of the common end, likewise."""
    p, p_end, q, q_end = gap
    low, high, step = 0, min(p_end - p, q_end - q), _FIRST_STEP
    while low < high:
        mid = low + step if low + step < high else high
        if old[p_end - mid : p_end - low] != new[q_end - mid : q_end - low]:
            high = mid - 1
            break
        low, step = mid, step * _GROWTH
    while low < high:
        mid = (low + high + 1) // 2
        if old[p_end - mid : p_end - low] == new[q_end - mid : q_end - low]:
            low = mid
        else:
            high = mid - 1
    return low
