"""How long one memory is read before the next has its turn: a small repository can name many changes, and a git can be silent.

What a turn recorded stays recorded, in whole commits with the cursor; the next turn goes on there.
"""

from __future__ import annotations

import math
import time

from phionyx_letta.errors import PhionyxError

__all__ = ["ENVELOPES", "OVER", "PATIENCE", "SECONDS", "Turn", "TurnOver"]

#: Of a turn, whichever comes first; one commit is never divided.
SECONDS, ENVELOPES = 10.0, 5_000
PATIENCE = 60.0  # s without a byte from git: an object can be a named pipe

OVER = "reading it takes longer than one turn"


class TurnOver(PhionyxError):
    """The memory's turn is over before its end; it has another."""

    def __init__(self, message: str, *, silent: bool = False) -> None:
        """Take what took so long, and whether git said nothing at all."""
        super().__init__(message, "it is tried again in the next run; look for named pipes and slow disks")
        self.silent = silent


class Turn:
    """The limits of one memory's turn, which begins when this is made."""

    def __init__(
        self,
        seconds: float = math.inf,
        envelopes: float = math.inf,
        silence: float | None = None,
        *,
        final: bool = True,
    ) -> None:
        """Without arguments there is no limit but for a silent git.

        Args:
            seconds: of reading.
            envelopes: after which no further commit is begun.
            silence: s without a byte from git.
            final: what does not answer is unreadable; else it is for another turn.
        """
        self._ends, self._envelopes = time.monotonic() + seconds, envelopes
        self.silence, self.final = PATIENCE if silence is None else silence, final

    def left(self) -> float:
        """Seconds until the end.

        Raises:
            TurnOver: none.
        """
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TurnOver(OVER)
        return left

    def check(self, envelopes: int) -> None:
        """Between two commits: may the next one begin?

        Raises:
            TurnOver: no.
        """
        if envelopes >= self._envelopes:
            raise TurnOver("more is to be recorded than in one turn")
        self.left()
