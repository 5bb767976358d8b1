"""Which recorded change brought each line of a block's text.

Envelopes hold hashes, and text only where it was asked for. So a text counts here only when its hash is a recorded one: it is
replayed from the diffs that were kept, forwards and backwards, from every text that is known anyhow (what the block holds now, what
its patches and checkpoints hold). Between two texts that are known a line may come from any of the changes there, and that is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from phionyx_letta._unified import apply_unified, revert_unified
from phionyx_letta.diff import content_hash

__all__ = ["Blame", "Line", "blame"]


@dataclass(frozen=True)
class Line:
    """One line of the text and where it comes from."""

    text: str
    changes: tuple[int, ...]
    """The change that brought it, by its index in the history; several where it was one of them."""
    unrecorded: bool
    """Whether it may be older than the history, or come from a change that nobody recorded."""


@dataclass(frozen=True)
class Blame:
    """What is known of a block's text."""

    lines: list[Line] | None
    """None where the text after the last change is not known."""
    unrecorded: bool
    """Whether the block holds something else than what the last change left."""


@dataclass
class _State:
    """The block between two changes."""

    digest: str
    change: int | None
    """What led here; None for the beginning, and for what nobody recorded."""
    text: str | None = None


def blame(diffs: Sequence[Mapping[str, Any]], *, current: str | None, known: Iterable[str] = ()) -> Blame:
    """Attribute the lines of a block.

    Args:
        diffs: `mutation.diff` of each of its changes, in their order; with bare hashes.
        current: what it holds now, where that can be read.
        known: texts it may have held.
    """
    states = _states(diffs)
    unrecorded = current is not None and (not states or states[-1].digest != content_hash(current))
    if unrecorded and current is not None:
        states.append(_State(content_hash(current), None))
    _fill(states, diffs, {content_hash(text): text for text in ("", *known, *([] if current is None else [current]))})
    lines = _attributed(states, diffs) if states and states[-1].text is not None else None
    return Blame(lines, unrecorded)


def _states(diffs: Sequence[Mapping[str, Any]]) -> list[_State]:
    states: list[_State] = []
    for number, diff in enumerate(diffs):
        before, after = str(diff.get("before_hash")), str(diff.get("after_hash"))
        if not states or states[-1].digest != before:
            states.append(_State(before, None))
        states.append(_State(after, number))
    return states


def _fill(states: list[_State], diffs: Sequence[Mapping[str, Any]], texts: dict[str, str]) -> None:
    """Find the texts; each one found may be that of other states too, so as long as there are new ones."""
    found = -1
    while found != len(texts):
        found = len(texts)
        for state in states:
            state.text = texts.get(state.digest)
        for here, there in pairwise(states):
            _replayed(here, there, diffs, texts, apply_unified)
        for there, here in pairwise(states[::-1]):
            _replayed(there, here, diffs, texts, revert_unified)


def _replayed(
    start: _State, end: _State, diffs: Sequence[Mapping[str, Any]], texts: dict[str, str], replay: Any
) -> None:
    change = end.change if replay is apply_unified else start.change
    kept = diffs[change].get("diff_text") if change is not None else None
    if start.text is None or end.text is not None or not isinstance(kept, str):
        return
    text = replay(start.text, kept)
    if text is not None and content_hash(text) == end.digest:
        end.text = texts[end.digest] = text


def _attributed(states: Sequence[_State], diffs: Sequence[Mapping[str, Any]]) -> list[Line]:
    lines: list[Line] = []
    since = 0
    for number, state in enumerate(states):
        if state.text is None:
            continue
        between = states[since : number + 1]
        changes = tuple(one.change for one in between if one.change is not None and _changes(diffs[one.change]))
        unrecorded = any(one.change is None for one in between)
        texts = state.text.split("\n") if state.text else []
        lines = _carried(lines, [Line(text, changes, unrecorded) for text in texts])
        since = number + 1
    return lines


def _changes(diff: Mapping[str, Any]) -> bool:
    """Whether it changed the text: one that only takes away makes new lines too."""
    return bool(diff.get("before_hash") != diff.get("after_hash"))


def _carried(old: list[Line], new: list[Line]) -> list[Line]:
    """The new lines, each that was there already as it was."""
    from rapidfuzz.distance import LCSseq

    ids: dict[str, int] = {}
    numbered = [[ids.setdefault(line.text, len(ids)) for line in lines] for lines in (old, new)]
    carried = list(new)
    for block in LCSseq.editops(*numbered).as_matching_blocks():
        carried[block.b : block.b + block.size] = old[block.a : block.a + block.size]
    return carried
