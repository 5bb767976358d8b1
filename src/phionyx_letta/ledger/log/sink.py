"""What a sink of checkpoints is: a place the database's owner cannot rewrite together with the database.

A sink that remembers takes only what its newest checkpoint leads to, by a consistency proof. So a log that was forked or
went back is named when it is next sealed, not when somebody verifies it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from phionyx_letta.checkpoint import Checkpoint, open_checkpoint
from phionyx_letta.errors import NoteError, ProofError, SinkConflict
from phionyx_letta.merkle import verify_consistency
from phionyx_letta.notes import parse_note

__all__ = ["Published", "Sink", "follows", "largest"]

_AT_ONCE = 1000


@dataclass(frozen=True)
class Published:
    """A checkpoint as it is offered to sinks."""

    checkpoint: Checkpoint
    note: str
    """The checkpoint signed by the log."""
    prove: Callable[[int, int], Sequence[bytes]]
    """The consistency proof between two sizes of the log as it is now; called in a sink's thread.

    Raises ProofError if the log has no such sizes, LedgerUnavailable if its store does not answer.
    """


class Sink(Protocol):
    """A place for checkpoints; used by one thread at a time, and by other processes too."""

    @property
    def name(self) -> str:
        """What `doctor` calls it; holds no secret."""
        ...

    @property
    def interval(self) -> float:
        """Least time between two deliveries, s; what comes in between is skipped but for the newest."""
        ...

    def deliver(self, offered: Published, /) -> str | None:
        """Take the checkpoint durably, unless it has one that this one leads to.

        Returns:
            The note with a witness's cosignatures, where the sink is one.

        Raises:
            SinkConflict: what the sink holds and the log cannot both be true.
            SinkError: it was not taken.
        """
        ...


def follows(held: Checkpoint | None, offered: Published, name: str) -> bool:
    """Return whether what is offered is newer than what the sink `name` holds of the log; False for the same or older.

    With several sealers, one may offer late what another has gone past: then the log proves that it did.

    Raises:
        SinkConflict: one is not the past of the other.
        LedgerUnavailable: no proof can be had now.
    """
    if held is None:
        return True
    old, new = sorted((held, offered.checkpoint), key=lambda one: one.size)
    try:
        proof = offered.prove(old.size, new.size) if old.size < new.size else ()
    except ProofError:
        proof = None
    if proof is None or not verify_consistency(old.size, old.root, new.size, new.root, list(proof)):
        raise SinkConflict(
            f"{name} holds a checkpoint of {held.size} envelopes that the log, at {offered.checkpoint.size}, does not agree with",
            "the database was set back, the log was rewritten, or the sink was changed: verify the ledger against the sink",
        )
    if old.size == new.size:
        return bool(offered.checkpoint.extensions) and offered.checkpoint.extensions != held.extensions  # about a key
    return new is offered.checkpoint


def largest(
    notes: Iterable[bytes | None], origin: str, public_keys: Sequence[str], known: Checkpoint | None = None
) -> Checkpoint | None:
    """Return the largest checkpoint of the log among these notes and ``known``; unsigned ones and other logs' do not count.

    The largest, not the last: whoever can add to a sink could add an old one again, and so hide that the log went back.
    Of a thousand notes only the largest is verified, so that a long history is read in seconds.
    """
    left = iter(notes)
    while some := list(islice(left, _AT_ONCE)):
        found = [(point.size, note) for note in some if note and (point := _claimed(note, origin))]
        for size, note in sorted(found, key=lambda one: one[0], reverse=True):
            if known is not None and size <= known.size:
                break
            with contextlib.suppress(NoteError):
                known = open_checkpoint(note, public_keys, origin=origin).checkpoint
    return known


def _claimed(note: bytes, origin: str) -> Checkpoint | None:
    with contextlib.suppress(NoteError):
        point = Checkpoint.parse(parse_note(note).text)
        return point if point.origin == origin else None
    return None
