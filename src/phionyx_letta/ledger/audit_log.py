"""Comparing a ledger with checkpoints of its log that were kept outside: what a chain alone cannot show.

The tree is computed anew from the envelopes as they stand, and its root compared with every checkpoint on the way. So a cut
end, a removed chain, a rewritten past and a database set back all show, whoever did it and whatever keys they had, as far as
the newest checkpoint reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.errors import NoteError
from phionyx_letta.keys import Keyring
from phionyx_letta.ledger.audit import Audit
from phionyx_letta.ledger.log.layout import Envelopes
from phionyx_letta.ledger.log.reading import CheckpointRecord, read_checkpoints
from phionyx_letta.ledger.log.walk import LogWalk, Point
from phionyx_letta.ledger.rollback import AcceptedRollback, accepted_in, excuses
from phionyx_letta.merkle import MAX_SIZE, Frontier, leaf_hash

__all__ = ["EpochAudit", "LogAudit", "Outside", "read_outside"]

CHECKPOINT, KEY_TRUST = "checkpoint", "key_trust"


@dataclass(frozen=True)
class Outside:
    """The checkpoints that were found and where, by size, and what was no checkpoint."""

    checkpoints: list[tuple[Checkpoint, str]]
    problems: list[CheckpointRecord]


def read_outside(sources: Iterable[str], public_keys: Sequence[str], ring: Keyring | None = None) -> Outside:
    """Read every source (a file, a folder, a git repository) and sort what is in them.

    Args:
        sources: where checkpoints are.
        public_keys: of the log, each as 64 hex digits.
        ring: knows which of them was to sign at which size of the log, where that is known.

    Raises:
        StoreError: a source is not there or cannot be read.
    """
    found: dict[Checkpoint, str] = {}
    problems = []
    for source in sources:
        for record in read_checkpoints(source, public_keys):
            if record.signed is None:
                problems.append(record)
                continue
            point = record.signed.checkpoint
            try:
                if ring is not None:
                    ring.check_checkpoint(point, record.signed.note)
            except NoteError as error:
                problems.append(CheckpointRecord(record.place, None, error, record.origin))
            else:
                found.setdefault(record.signed.checkpoint, record.place)
    return Outside(sorted(found.items(), key=lambda one: (one[0].size, one[0].root)), problems)


class LogAudit:
    """Takes the envelopes of a whole ledger, as stored, in sealing order."""

    def __init__(self, audit: Audit, outside: Outside) -> None:
        """Findings go to ``audit``, as its dimension `checkpoint`."""
        self._audit = audit
        audit.needed.add(CHECKPOINT)
        self._outside = outside
        self._next = 0  # place in the list of the checkpoint that comes next
        self._tree = Frontier()
        self._agreed: int | None = None  # size of the newest checkpoint that agreed
        self._disagreeing: list[tuple[Checkpoint, str]] = []
        self._accepted: list[AcceptedRollback] = []
        self._compare()

    def feed(self, body: str | bytes) -> None:
        """Take the next envelope."""
        data = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
        self._tree.append(leaf_hash(data))
        self._compare()
        accepted = accepted_in(data, self._audit.verifier, self._tree.size - 1)
        if accepted is not None:
            self._accepted.append(accepted)

    def _compare(self) -> None:
        points = self._outside.checkpoints
        while self._next < len(points) and points[self._next][0].size == self._tree.size:
            point, place = points[self._next]
            self._next += 1
            if self._tree.root() == point.root:
                self._agreed = point.size
            else:
                self._disagreeing.append((point, place))

    def finish(self) -> None:
        """Say what the checkpoints show; those that were given up with an accepted rollback are no fault."""
        for record in self._outside.problems:
            said = record.problem.message if record.problem else "it is no checkpoint"
            self._audit.note(CHECKPOINT, f"{record.place}: {said}")
        broken = [one for one in self._disagreeing if not excuses(self._accepted, one[0])]
        beyond = [one for one in self._outside.checkpoints[self._next :] if not excuses(self._accepted, one[0])]
        if broken:
            self._say_rewritten(*broken[0], len(broken))
        if beyond:
            self._say_cut(*beyond[-1])
        if self._agreed is not None and not beyond and not broken:
            self._audit.measured(CHECKPOINT)
        self._audit.covered = self._agreed

    def _say_rewritten(self, point: Checkpoint, place: str, disagreeing: int) -> None:
        size = point.size
        good = max((one.size for one, _ in self._outside.checkpoints if one.size < size), default=0)
        message = "what was sealed was rewritten, removed, inserted or moved: the log is not the one that was signed"
        if self._agreed is not None and self._agreed >= size:
            message = "two signed checkpoints contradict each other: the log was forked, by whoever had its key"
        self._audit.fail(
            CHECKPOINT,
            f"{message} (envelopes {good} to {size - 1} in the sealing order)",
            expected=f"the root signed at {size} envelopes ({place})",
            found=f"another; {disagreeing} checkpoints disagree",
        )

    def _say_cut(self, point: Checkpoint, place: str) -> None:
        message = "the end is missing: envelopes were cut off, a chain was removed, or the database was set back to an older state"
        self._audit.fail(
            CHECKPOINT,
            message,
            expected=f"{point.size} envelopes at least ({place})",
            found=f"{self._tree.size} envelopes",
        )


class EpochAudit:
    """Makes sure that the log had the root that was signed wherever a key was replaced or revoked, as `key_trust`.

    Otherwise whoever stole a key could move the place from which on it seals.
    """

    def __init__(self, audit: Audit, ring: Keyring) -> None:
        """Findings go to ``audit``."""
        self._audit = audit
        self._conflicts = ring.conflicts
        points = [
            Point(one.checkpoint.size, one.checkpoint.root, f"the {one.kind.split('/')[0]} of {one.at}")
            for one in ring.statements
        ]
        self._walk = LogWalk(iter([Envelopes(MAX_SIZE)]), points) if points else None

    def feed(self, body: str) -> None:
        """Take the next envelope."""
        if self._walk is not None:
            self._walk.place()
            self._walk.feed(body.encode("utf-8", "surrogatepass"))

    def finish(self) -> None:
        """Say what was found."""
        for conflict in self._conflicts:
            self._audit.fail(KEY_TRUST, conflict)
        for point in [*self._walk.broken, *self._walk.beyond] if self._walk is not None else ():
            self._audit.fail(
                KEY_TRUST,
                "a key was replaced or revoked at another state of the log than this",
                expected=f"the root signed at {point.size} envelopes ({point.place})",
                found=f"another, in a log of {self._walk.size}" if self._walk is not None else None,
            )
