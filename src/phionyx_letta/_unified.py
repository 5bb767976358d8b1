"""A unified diff of two texts that `patch` can apply, whatever their line endings and final newlines, in bounded time.

Only `\\n` separates lines, as for `patch`. Spans that differ are found as in `_align`, widened to whole lines, and compared
line by line where that is cheap, else replaced as a whole: the diff is valid in every case, and minimal in ordinary ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from phionyx_letta._align import Gap, differing_gaps

__all__ = ["apply_unified", "revert_unified", "unified_diff"]

CONTEXT = 3
_SPLIT_CELLS = 4_000_000  # characters times characters below which a span is not split further
_LINE_BUDGET = 20_000_000  # cells (lines times lines) that all spans together may compare: a few ms
_LINE = 5_000  # what one line costs in cells, whatever it is compared with
_CHUNK = 1 << 16  # characters handled in one step, so that other threads may run between steps
_NO_NEWLINE = "\n\\ No newline at end of file\n"
_HUNK = re.compile(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@", re.ASCII)


def unified_diff(before: str, after: str) -> str:
    """Return the diff with headers `--- before` and `+++ after`; the empty text where nothing differs."""
    gaps = _refined(before, after, _line_gaps(before, after))
    if not gaps:
        return ""
    out = ["--- before\n+++ after\n"]
    counted = old_line = new_line = 0  # lines before old[counted] in both texts, counted once on the way
    for hunk in _grouped(before, gaps):
        start, end = _back(before, hunk[0][0]), _forth(before, hunk[-1][1])
        between = before.count("\n", counted, start)
        old_line, new_line = old_line + between, new_line + between
        body, old_count, new_count = _body(before, after, hunk, start, end)
        out.append(f"@@ -{_span(old_line, old_count)} +{_span(new_line, new_count)} @@\n{body}")
        counted, old_line, new_line = end, old_line + old_count, new_line + new_count
    return "".join(out)


def apply_unified(before: str, patch: str) -> str | None:
    """Return the text after, given the text before and what `unified_diff` made of both; None where they do not fit."""
    lines, out, at = _lines(before), [], 0
    for start, old, new in _hunks(patch):
        if start < at or lines[start : start + len(old)] != old:
            return None
        out += [*lines[at:start], *new]
        at = start + len(old)
    return "".join([*out, *lines[at:]])


def revert_unified(after: str, patch: str) -> str | None:
    """Return the text before, given the text after and what `unified_diff` made of both; None where they do not fit."""
    lines, out, at, shift = _lines(after), [], 0, 0
    for start, old, new in _hunks(patch):
        begin = start + shift
        if begin < at or lines[begin : begin + len(new)] != new:
            return None
        out += [*lines[at:begin], *old]
        at, shift = begin + len(new), shift + len(new) - len(old)
    return "".join([*out, *lines[at:]])


def _hunks(patch: str) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield where each hunk starts (0-based line) and its lines before and after."""
    start, old, new, last = -1, [], [], ""  # type: int, list[str], list[str], str
    for line in patch.split("\n")[2:]:
        header = _HUNK.fullmatch(line)
        if header is not None:
            if start >= 0:
                yield start, old, new
            start, old, new = int(header[1]) - (1 if int(header[2]) else 0), [], []
            continue
        if line[:1] != "\\":
            last = line[:1]
        for side, marks in ((old, " -"), (new, " +")):
            if last and last in marks and line[:1] == "\\":
                side[-1:] = [one.removesuffix("\n") for one in side[-1:]]
            elif line and last in marks:
                side.append(line[1:] + "\n")
    if start >= 0:
        yield start, old, new


def _line_gaps(before: str, after: str) -> list[Gap]:
    """Return the differing spans widened to whole lines."""
    gaps = differing_gaps(before, after, lambda m, n: m * n <= _SPLIT_CELLS)
    out: list[Gap] = []
    p = q = i = j = 0  # the open span starts at (p, q); the equal stretch at (i, j)
    for a, b, c, d in [*gaps, (len(before), len(before), len(after), len(after))]:
        first = _line_start(before, after, i, j, a)
        last = a if a == len(before) and c == len(after) else before.rfind("\n", i, a) + 1
        if first is not None and last > first:
            if p < first or q < j + first - i:
                out.append((p, first, q, j + first - i))
            p, q = last, j + last - i
        i, j = b, d
    if p < len(before) or q < len(after):
        out.append((p, len(before), q, len(after)))
    return out


def _line_start(before: str, after: str, i: int, j: int, end: int) -> int | None:
    """Return the first offset from `i` on where a line starts in both texts within an equal stretch up to `end`."""
    if (i == 0 or before[i - 1] == "\n") and (j == 0 or after[j - 1] == "\n"):
        return i
    newline = before.find("\n", i, end)
    return newline + 1 if newline >= 0 else None


def _refined(before: str, after: str, gaps: list[Gap]) -> list[Gap]:
    """Return the spans split at their common lines, where comparing line by line is affordable."""
    budget = _LINE_BUDGET
    out: list[Gap] = []
    for p, p_end, q, q_end in gaps:
        removed, added = before.count("\n", p, p_end), after.count("\n", q, q_end)
        cost = removed * added + _LINE * (removed + added)
        if not removed or not added or cost > budget:
            out.append((p, p_end, q, q_end))
            continue
        budget -= cost
        out.extend(_by_lines(before, after, (p, p_end, q, q_end)))
    return out


def _by_lines(before: str, after: str, gap: Gap) -> Iterator[Gap]:
    from rapidfuzz.distance import LCSseq

    p, p_end, q, q_end = gap
    old, new = _lines(before[p:p_end]), _lines(after[q:q_end])
    ids: dict[str, int] = {}
    numbered = [[ids.setdefault(line, len(ids)) for line in lines] for lines in (old, new)]
    i = j = 0
    for block in LCSseq.editops(*numbered).as_matching_blocks():
        p_next, q_next = p + sum(map(len, old[i : block.a])), q + sum(map(len, new[j : block.b]))
        if p < p_next or q < q_next:
            yield p, p_next, q, q_next
        equal = sum(map(len, old[block.a : block.a + block.size]))
        p, q, i, j = p_next + equal, q_next + equal, block.a + block.size, block.b + block.size


def _grouped(before: str, gaps: list[Gap]) -> Iterator[list[Gap]]:
    """Yield the spans of each hunk: those whose context would touch belong together."""
    group: list[Gap] = []
    for gap in gaps:
        if group and before.count("\n", group[-1][1], gap[0]) > 2 * CONTEXT:
            yield group
            group = []
        group.append(gap)
    if group:
        yield group


def _body(before: str, after: str, hunk: list[Gap], start: int, end: int) -> tuple[str, int, int]:
    """Return a hunk's text and how many lines of each side it covers; `start` and `end` are offsets in `before`."""
    out, old_count, new_count = [], 0, 0
    at = start
    for p, p_end, q, q_end in [*hunk, (end, end, 0, 0)]:
        same, removed, added = before[at:p], before[p:p_end], after[q:q_end]
        out += [_marked(" ", same), _marked("-", removed), _marked("+", added)]
        old_count += _count(same) + _count(removed)
        new_count += _count(same) + _count(added)
        at = p_end
    return "".join(out), old_count, new_count


def _back(text: str, at: int) -> int:
    """Return the offset three lines before `at`."""
    for _ in range(CONTEXT):
        if at == 0:
            break
        at = text.rfind("\n", 0, at - 1) + 1
    return at


def _forth(text: str, at: int) -> int:
    """Return the offset three lines after `at`."""
    for _ in range(CONTEXT):
        newline = text.find("\n", at)
        at = newline + 1 if newline >= 0 else len(text)
    return at


def _span(start: int, count: int) -> str:
    """Return a line range: 1-based, and for an empty one the line before it."""
    return f"{start + 1 if count else start},{count}"


def _marked(mark: str, text: str) -> str:
    """Return whole lines, each with its mark in front."""
    if not text:
        return ""
    body, end = (text[:-1], "\n") if text.endswith("\n") else (text, _NO_NEWLINE)
    chunks = (body[at : at + _CHUNK].replace("\n", "\n" + mark) for at in range(0, len(body), _CHUNK))
    return f"{mark}{''.join(chunks)}{end}"


def _count(text: str) -> int:
    return text.count("\n") + (1 if text and not text.endswith("\n") else 0)


def _lines(text: str) -> list[str]:
    """Split at newlines, keeping them (`str.splitlines` knows a dozen other separators)."""
    lines = [line + "\n" for line in text.split("\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines
