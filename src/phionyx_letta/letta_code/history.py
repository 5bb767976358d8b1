"""How the memory branch came from one commit to another, as steps whose differences link.

Along the first parents where that leads from one to the other; else along the ancestry that does; else back to where both histories
meet and on from there. So a rewritten history is a step back that says so, and then its commits one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from phionyx_letta.errors import StoreError
from phionyx_letta.letta_code.errors import ObjectUnreadable
from phionyx_letta.letta_code.objects import Commit, Objects
from phionyx_letta.letta_code.repository import HEAD_LOG, LogEntry, LogPlace, LogRead, Snapshot

__all__ = ["Back", "Forward", "Move", "merged", "moves", "steps"]

#: Commits an envelope names one by one; of more their number is recorded.
NAMED = 100


class Node(NamedTuple):
    """A commit and its first parent: no more is kept of a long history, of which each commit can have thousands."""

    oid: str
    parent: str | None
    merge: bool

    @classmethod
    def of(cls, commit: Commit) -> Node:
        """What of a commit is kept."""
        return cls(commit.oid, next(iter(commit.parents), None), len(commit.parents) > 1)


@dataclass(frozen=True, slots=True)
class Move:
    """The memory branch stood at `old` and then at `new` (None: at nothing)."""

    old: str | None
    new: str | None
    entry: LogEntry | None
    """What the reflog says of it; None where only the tip shows it."""
    places: dict[str, LogPlace]
    """How far the logs are read once it is recorded."""
    seen_by: str = "tip"
    """`reflog`: a line says it came there; `reflog_old`: a line only says it went from there; `tip`: HEAD stood there."""
    log_lost: bool = False
    """The reflog does not go on where it was read last."""


@dataclass(frozen=True, slots=True)
class Forward:
    """One commit on the branch."""

    commit: str
    parent: str | None
    """The commit it is compared with: what the branch held until then. None: nothing."""
    cut: bool = False
    """Its parents are not in the repository: a shallow clone, or they vanished."""


@dataclass(frozen=True, slots=True)
class Back:
    """The branch stood at `old` and goes on from `base`, which is no descendant of it."""

    old: str
    base: str | None
    """None: nothing in common that is known."""
    dropped: tuple[str, ...] = ()
    dropped_total: int = 0
    vanished: bool = False
    """What `old` held cannot be read any more."""


def moves(cursor: str | None, snapshot: Snapshot, ref: str | None, places: dict[str, LogPlace]) -> Iterator[Move]:
    """Where the branch stood, one after the other, since it stood at `cursor`.

    Args:
        cursor: the last recorded commit.
        snapshot: HEAD and its logs now.
        ref: the branch HEAD stood for when `cursor` was recorded, None if nothing was recorded yet.
        places: how far the logs were read then.
    """
    name = _followed(snapshot, ref)
    log = snapshot.logs[name]
    lost = cursor is not None and (not log.found or name not in places)
    here, reached = cursor, dict(places)
    apart = name != HEAD_LOG and cursor is not None and HEAD_LOG not in places  # then HEAD's log begins too early
    for entry, read in _told(snapshot, name, ref, log if not lost else _after_loss(cursor, log), cursor, apart=apart):
        if entry.old is not None and entry.old not in (here, entry.new):
            yield Move(here, entry.old, None, dict(reached), "reflog_old", lost)
            here = entry.old
        reached.update(read)
        if entry.new != here and entry.new is not None:
            yield Move(here, entry.new, entry, dict(reached), "reflog", lost)
            here = entry.new
    ends = {one: read.end for one, read in snapshot.logs.items() if read.end.length}
    if snapshot.tip != here or ends != places:
        yield Move(here, snapshot.tip, None, ends, "tip", lost)


def _followed(snapshot: Snapshot, ref: str | None) -> str:
    """The log to follow: the branch's, which all work trees write, unless HEAD went elsewhere meanwhile."""
    branch = snapshot.logs.get(snapshot.ref)
    if branch is None or not branch.exists or (ref is not None and ref != snapshot.ref):
        return HEAD_LOG
    head = snapshot.logs[HEAD_LOG]
    known = set(map(_pair, branch.entries))
    stood = {oid for pair in known for oid in pair}
    wandered = any(
        _pair(entry) not in known for entry in head.entries if entry.old != entry.new or entry.new not in stood
    )
    return HEAD_LOG if wandered and head.found else snapshot.ref


Told = tuple[LogEntry, dict[str, LogPlace]]
"""A move, and how far the logs are read with it."""


def _told(
    snapshot: Snapshot, name: str, ref: str | None, log: LogRead, cursor: str | None, *, apart: bool
) -> list[Told]:
    """The moves of the followed log, and among them those of the other one that it knows nothing of.

    Another work tree moves the branch without a word in this one's HEAD log. Where both tell of one move they are in step, so that
    either can be read on where the other is gone; what only the branch tells goes before what HEAD's log dates later. All of it
    is claims: what is told too late costs a detour, nothing else.
    """
    other = HEAD_LOG if name != HEAD_LOG else snapshot.ref if ref is None else ref
    own = list(zip(log.entries, ({name: place} for place in log.places), strict=True))
    beside = snapshot.logs.get(other)
    if apart or other == name or beside is None or (other == HEAD_LOG and not beside.found):
        return own
    if not beside.found:
        beside = _after_loss(cursor, beside)
    pairs = set(map(_pair, log.entries))
    visited = {oid for pair in pairs for oid in pair}
    waiting = deque(zip(beside.entries, ({other: place} for place in beside.places), strict=True))
    found: list[Told] = []

    def take() -> dict[str, LogPlace]:
        entry, place = waiting.popleft()
        if entry.new not in visited:
            found.append((entry, place))
        return place

    for entry, place in own:
        while waiting and _pair(waiting[0][0]) not in pairs and waiting[0][0].at <= entry.at:
            place = {**place, **take()}
        if waiting and _pair(waiting[0][0]) == _pair(entry):
            place = {**place, **take()}
        found.append((entry, place))
    while waiting:
        take()
    return found


def _pair(entry: LogEntry) -> tuple[str | None, str | None]:
    return entry.old, entry.new


def _after_loss(cursor: str | None, log: LogRead) -> LogRead:
    """The line read last is gone. What follows the recorded commit, else a log that begins with the branch's birth, else nothing."""
    entries = log.entries
    for index in range(len(entries) - 1, -1, -1):
        if entries[index].new == cursor:
            return replace(log, entries=entries[index + 1 :], places=log.places[index + 1 :])
    if entries and entries[0].old is None:
        return log
    return replace(log, entries=[], places=[])


def steps(objects: Objects, move: Move, recorded: Callable[[Sequence[str]], str | None]) -> Iterator[Forward | Back]:
    """The steps of one move.

    Args:
        objects: of the repository.
        move: from where to where; `new` must be readable.
        recorded: the first of these commits that the ledger has; asked only where nothing else tells where to go on.

    Raises:
        ObjectUnreadable: the new commit cannot be read.
    """
    if move.new is None:
        if move.old is not None:
            yield Back(move.old, None, vanished=not _readable(objects, move.old))
        return
    if move.old is None:
        yield from _forward(objects, _chain(objects, move.new, None))
        return
    newest = objects.commit(move.new)
    if newest.parents[:1] == (move.old,) and _readable(objects, move.old):
        yield from _forward(objects, [Node.of(newest)])
        return
    yield from _between(objects, move.old, move.new, recorded)


def _between(
    objects: Objects, old: str, new: str, recorded: Callable[[Sequence[str]], str | None]
) -> Iterator[Forward | Back]:
    vanished = not _readable(objects, old)
    met, ahead, behind = (None, [], []) if vanished else _meeting(objects, old, new)
    if met == old:
        yield from _forward(objects, ahead)
        return
    if not vanished and any(commit.merge for commit in ahead):
        path = _ancestry(objects, old, new)
        if path is not None:
            yield from path
            return
    if met is None:
        ahead = _chain(objects, new, recorded)
        before = ahead[0].parent if ahead else new
        met = before if before is not None and recorded([before]) and _readable(objects, before) else None
    yield Back(old, met, tuple(behind[:NAMED]), len(behind), vanished)
    yield from _forward(objects, ahead)


def _forward(objects: Objects, commits: Sequence[Node]) -> Iterator[Forward]:
    """Oldest first, each compared with its first parent."""
    for commit in commits:
        parent = commit.parent
        cut = parent is not None and commit is commits[0] and not _readable(objects, parent)
        yield Forward(commit.oid, None if cut else parent, cut)


def merged(objects: Objects, commit: Commit, before: str | None) -> list[str]:
    """The commits a merge brought in, at most `NAMED`: along the first parents of its other parents, until those of `before`.

    Args:
        objects: of the repository.
        commit: the merge.
        before: the parent it is compared with; None: the first.
    """
    main, found = set[str](), list[str]()
    before = before or commit.parents[0]
    for one in islice(objects.first_parents(before), 10 * NAMED):
        main.add(one.oid)
    for other in dict.fromkeys(commit.parents):
        for one in objects.first_parents(other):
            if one.oid in main or one.oid in found:
                break
            if len(found) >= NAMED:
                return found
            found.append(one.oid)
    return found


def _first_parents(objects: Objects, oid: str) -> Iterator[Node]:
    return map(Node.of, objects.first_parents(oid))


def _chain(objects: Objects, new: str, recorded: Callable[[Sequence[str]], str | None] | None) -> list[Node]:
    """`new` and its first parents, oldest first, down to the first or to one the ledger has (which is left out)."""
    found: list[Node] = []
    asked = 0
    for commit in _first_parents(objects, new):
        found.append(commit)
        if recorded is not None and len(found) - asked >= 500:
            known, asked = recorded([one.oid for one in found[asked:]]), len(found)
            if known is not None:
                break
    if recorded is not None:
        known = recorded([one.oid for one in found])
        if known is not None:
            found = found[: next(at for at, one in enumerate(found) if one.oid == known)]
    if not found and recorded is None:
        objects.commit(new)
    return found[::-1]


def _meeting(objects: Objects, old: str, new: str) -> tuple[str | None, list[Node], list[str]]:
    """Where the first parents of both meet, what is ahead of it (oldest first) and what is behind (newest first)."""
    ways = (_first_parents(objects, new), _first_parents(objects, old))
    seen: tuple[dict[str, Node], dict[str, Node]] = ({}, {})
    open_ways = [0, 1]
    while open_ways:
        for way in list(open_ways):
            commit = next(ways[way], None)
            if commit is None:
                open_ways.remove(way)
                continue
            seen[way][commit.oid] = commit
            if commit.oid in seen[1 - way]:
                ahead, behind = (_until(one, commit.oid) for one in seen)
                return commit.oid, ahead[::-1], [one.oid for one in behind]
    return None, list(seen[0].values())[::-1], list(seen[1])


def _until(seen: dict[str, Node], oid: str) -> list[Node]:
    found = []
    for commit in seen.values():
        if commit.oid == oid:
            break
        found.append(commit)
    return found


def _ancestry(objects: Objects, old: str, new: str) -> list[Forward] | None:
    """The way from `old` to a `new` that has it among its ancestors, but not its first ones; None if it has not."""
    try:
        said = objects.git("rev-list", "--ancestry-path", f"^{old}", new, "--", failing_is_none=True)
        between, at = {old, *(said or "").split()}, new
        found = list[Forward]()
        while at != old:
            before = next((one for one in objects.commit(at).parents if one in between), None)
            if before is None:
                return None
            found.append(Forward(at, before))
            at = before
    except (StoreError, ObjectUnreadable):  # git takes what is forged for a commit
        return None
    return found[::-1]


def _readable(objects: Objects, oid: str) -> bool:
    try:
        objects.tree(objects.commit(oid).tree)
    except ObjectUnreadable:
        return False
    return True
