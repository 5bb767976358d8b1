"""A unified diff of two texts that `patch` can apply, whatever their line endings and final newlines, in bounded time.

Only `\\n` separates lines, as for `patch`. Difference is found by lines: anchored on lines that occur once in both, exact between
anchors while that is cheap, else replaced as a whole. It is valid in every case, and minimal in ordinary ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from phionyx_letta._lcs import MAX_ANCHOR_LINES, common_prefix, common_suffix, line_anchors

__all__ = ["unified_diff"]

CONTEXT = 3
_EXACT_CELLS = 4_000_000  # lines times lines that one diff may compare exactly (0.5 MB, a few ms)
_HUNK_CELLS = 20_000  # what comparing one more gap costs whatever its size
_NO_NEWLINE = "\n\\ No newline at end of file\n"

_Change = tuple[int, int, int, int]  # lines [a, b) of the old text become lines [c, d) of the new


def unified_diff(before: str, after: str) -> str:
    """Return the diff with headers `--- before` and `+++ after`; the empty text where nothing differs."""
    if before == after:
        return ""
    start, old_end, new_end = _differing_lines(before, after)
    old, new = before[start:old_end], after[start:new_end]
    if old.count("\n") + new.count("\n") > MAX_ANCHOR_LINES:
        return _whole(before, after, start, old_end, new_end)
    context, first = _context_before(before, start)
    old_lines = context + _lines(old) + _lines_after(before, old_end)
    new_lines = context + _lines(new) + _lines_after(after, new_end)
    hunks = _grouped(list(_changes(old_lines, new_lines)))
    return "--- before\n+++ after\n" + "".join(_hunk(hunk, old_lines, new_lines, first) for hunk in hunks)


def _differing_lines(before: str, after: str) -> tuple[int, int, int]:
    """Return where the differing whole lines start in both and where they end in each."""
    prefix = common_prefix(before, after)
    start = before.rfind("\n", 0, prefix) + 1
    suffix = common_suffix(before, after, start)
    if suffix < min(len(before), len(after)) - start or len(before) != len(after):
        # only whole lines are common: what precedes the common end must end a line in both
        at = before.find("\n", len(before) - suffix)
        for text in (before, after):
            if len(text) == suffix + start:
                continue
        suffix = _whole_line_suffix(before, after, suffix, start, at)
    return start, len(before) - suffix, len(after) - suffix


def _whole_line_suffix(before: str, after: str, suffix: int, start: int, at: int) -> int:
    def begins_line(text: str, offset: int) -> bool:
        return offset == start or text[offset - 1] == "\n"

    if begins_line(before, len(before) - suffix) and begins_line(after, len(after) - suffix):
        return suffix
    return len(before) - at - 1 if at >= 0 else 0


def _context_before(text: str, start: int) -> tuple[list[str], int]:
    """Return up to three lines that end at `start`, and the 0-based number of the first of them."""
    at = start
    for _ in range(CONTEXT):
        if at == 0:
            break
        at = text.rfind("\n", 0, at - 1) + 1
    return _lines(text[at:start]), text.count("\n", 0, at)


def _lines_after(text: str, end: int) -> list[str]:
    """Return up to three lines that start at `end`."""
    at = end
    for _ in range(CONTEXT):
        found = text.find("\n", at)
        at = len(text) if found < 0 else found + 1
    return _lines(text[end:at])


def _lines(text: str) -> list[str]:
    """Split at newlines, keeping them (`str.splitlines` knows a dozen other separators)."""
    lines = [line + "\n" for line in text.split("\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def _changes(old: list[str], new: list[str]) -> Iterator[_Change]:
    """Yield the changed spans, in order, never two that touch."""
    budget = _EXACT_CELLS
    i = j = 0
    pending: _Change | None = None
    for i_end, j_end in [*line_anchors(old, new), (len(old), len(new))]:
        while i < i_end and j < j_end and old[i] == new[j]:
            i, j = i + 1, j + 1
        p, q = i_end, j_end
        while p > i and q > j and old[p - 1] == new[q - 1]:
            p, q = p - 1, q - 1
        if i < p or j < q:
            cells = (p - i) * (q - j)
            budget -= cells + _HUNK_CELLS
            exact = cells and budget >= 0
            for change in _exact(old, new, i, p, j, q) if exact else [(i, p, j, q)]:
                if pending and pending[1] == change[0] and pending[3] == change[2]:
                    change = (pending[0], change[1], pending[2], change[3])
                elif pending:
                    yield pending
                pending = change
        i, j = i_end, j_end
    if pending:
        yield pending


def _exact(old: list[str], new: list[str], i: int, i_end: int, j: int, j_end: int) -> Iterator[_Change]:
    from rapidfuzz.distance import LCSseq

    ids: dict[str, int] = {}
    a = [ids.setdefault(line, len(ids)) for line in old[i:i_end]]
    b = [ids.setdefault(line, len(ids)) for line in new[j:j_end]]
    p = q = 0
    for block in LCSseq.editops(a, b).as_matching_blocks():
        if p < block.a or q < block.b:
            yield i + p, i + block.a, j + q, j + block.b
        p, q = block.a + block.size, block.b + block.size


def _grouped(changes: list[_Change]) -> Iterator[list[_Change]]:
    """Yield the changes of each hunk: those whose context would touch belong together."""
    group: list[_Change] = []
    for change in changes:
        if group and change[0] - group[-1][1] > 2 * CONTEXT:
            yield group
            group = []
        group.append(change)
    if group:
        yield group


def _hunk(changes: list[_Change], old: list[str], new: list[str], first: int) -> str:
    start = max(0, changes[0][0] - CONTEXT)
    end = min(len(old), changes[-1][1] + CONTEXT)
    new_start = changes[0][2] - (changes[0][0] - start)
    new_end = changes[-1][3] + (end - changes[-1][1])
    out = [_header(first + start, end - start, first + new_start, new_end - new_start)]
    at = start
    for i, i_end, j, j_end in changes:
        out.extend(_marked(" ", line) for line in old[at:i])
        out.extend(_marked("-", line) for line in old[i:i_end])
        out.extend(_marked("+", line) for line in new[j:j_end])
        at = i_end
    out.extend(_marked(" ", line) for line in old[at:end])
    return "".join(out)


def _header(start: int, count: int, new_start: int, new_count: int) -> str:
    return f"@@ -{_span(start, count)} +{_span(new_start, new_count)} @@\n"


def _span(start: int, count: int) -> str:
    """Return a line range: 1-based, and for an empty one the line before it."""
    return f"{start + 1 if count else start},{count}"


def _marked(mark: str, line: str) -> str:
    return mark + line if line.endswith("\n") else mark + line + _NO_NEWLINE


def _whole(before: str, after: str, start: int, old_end: int, new_end: int) -> str:
    """Return one hunk that replaces every differing line, without looking at lines one by one."""
    context, first = _context_before(before, start)
    trailing = _lines_after(before, old_end)
    sizes = [_count_lines(text) + len(context) + len(trailing) for text in (before[start:old_end], after[start:new_end])]
    return "".join(
        [
            "--- before\n+++ after\n",
            _header(first, sizes[0], first, sizes[1]),
            *(_marked(" ", line) for line in context),
            _block("-", before[start:old_end]),
            _block("+", after[start:new_end]),
            *(_marked(" ", line) for line in trailing),
        ]
    )


def _count_lines(text: str) -> int:
    return text.count("\n") + (0 if text.endswith("\n") or not text else 1)


def _block(mark: str, text: str) -> str:
    if not text:
        return ""
    body = text[:-1] if text.endswith("\n") else text
    return mark + body.replace("\n", "\n" + mark) + ("\n" if text.endswith("\n") else _NO_NEWLINE)
