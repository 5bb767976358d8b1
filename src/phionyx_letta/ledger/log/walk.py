"""A log, walked once: the tree grows by the envelopes and by the subtrees that stand for those that are not there, and its root
is compared with every checkpoint on the way. RFC 6962 does the rest: who changes, moves or removes a leaf changes the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from phionyx_letta.errors import ProofError, TornStoreError
from phionyx_letta.ledger.log.layout import Envelopes, Subtree
from phionyx_letta.merkle import Frontier, leaf_hash

__all__ = ["LogWalk", "Point"]


@dataclass(frozen=True, order=True)
class Point:
    """A checkpoint the log is compared with."""

    size: int
    root: bytes
    place: str
    """Where it was found."""
    signed: bool = True
    """By a trusted key."""
    outside: bool = False
    """It did not come in the bundle."""
    pinned: bool = False
    """A key's epoch ends or begins here: the log has to be shown at this size."""
    origin: str = ""
    """The name of the log it is of."""


class LogWalk:
    """Compares a log with checkpoints as it grows."""

    def __init__(self, pieces: Iterator[Envelopes | Subtree], points: Iterable[Point]) -> None:
        """Start at the log's beginning."""
        self._pieces = pieces
        self._run = 0  # envelopes left in the current piece
        self._points = sorted(points)
        self._next = 0
        self._tree = Frontier()
        self.whole = True
        """No subtree stands for envelopes that are not here."""
        self.last: int | None = None
        """Place of the last envelope."""
        self.agreed: list[Point] = []
        self.broken: list[Point] = []
        self.unseen: list[Point] = []
        """Not compared: a subtree stretches over them."""
        self._compare()

    @property
    def size(self) -> int:
        """How many leaves the log has so far."""
        return self._tree.size

    @property
    def beyond(self) -> list[Point]:
        """Checkpoints of a longer log than this one."""
        return self._points[self._next :]

    def place(self) -> int:
        """Go to the next envelope and return its place in the log.

        Raises:
            TornStoreError: the layout has no more envelopes, or is none.
        """
        while not self._run:
            self._advance(next(self._pieces, None))
        return self._tree.size

    def feed(self, line: bytes) -> None:
        """Take the envelope of that place."""
        self._run -= 1
        self.last = self._tree.size
        self._tree.append(leaf_hash(line))
        self._compare()

    def finish(self) -> None:
        """Take what comes after the last envelope.

        Raises:
            TornStoreError: more envelopes were to come, or the layout is none.
        """
        if self._run:
            raise TornStoreError("the log's layout has more envelopes than the bundle", "export it again")
        for piece in self._pieces:
            if isinstance(piece, Envelopes):
                raise TornStoreError("the log's layout has more envelopes than the bundle", "export it again")
            self._advance(piece)

    def _advance(self, piece: Envelopes | Subtree | None) -> None:
        if piece is None:
            raise TornStoreError("the bundle has more envelopes than the log's layout", "export it again")
        if isinstance(piece, Envelopes):
            self._run = piece.count
            return
        self.whole = False
        try:
            self._tree.append_subtree(piece.level, piece.hash)
        except ProofError as error:
            raise TornStoreError(f"the log's layout is not one: {error.message}", "export it again") from None
        self._compare()

    def _compare(self) -> None:
        points = self._points
        while self._next < len(points) and points[self._next].size <= self._tree.size:
            point = points[self._next]
            self._next += 1
            if point.size < self._tree.size:
                self.unseen.append(point)
            elif self._tree.root() == point.root:
                self.agreed.append(point)
            else:
                self.broken.append(point)
