"""Turns between the memories of a run, so that one that names much, or a git that is silent, holds up the others by a turn at most."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phionyx_letta.letta_code.ingest import AgentReport, Recorder
from phionyx_letta.letta_code.turns import ENVELOPES, SECONDS, Turn, TurnOver

__all__ = ["Slow", "Waiting", "record_in_turn"]

#: s without a byte from git: at first, all first ones of a round, and then; under load an honest git answers in less.
_FIRST, _ALL_FIRST, _LEAST = 2.0, 20.0, 0.5
#: s that those share who were silent before, and after which an object that does not come is unreadable.
_SHARED, _VERDICT = 30.0, 15.0
_LONGEST = 80.0  # s

Waiting = tuple[str, Path]
"""An agent, and its memory's folder."""


@dataclass
class Slow:
    """Which memories did not come to their end in their turn; kept from run to run by who runs again soon."""

    longest: float = _LONGEST
    """s of a turn, however often the ones before did not get on."""
    long: dict[str, int] = field(default_factory=dict)
    """Turns that did not get on: the next one is twice as long."""
    silent: dict[str, None] = field(default_factory=dict)
    """Whose git said nothing: these are read last, and for longer; who waits longest comes first."""
    heard: str | None = None
    """Which of them has half of what they share in this round, and so comes to its verdict however many they are."""
    lost: float = 0.0
    """s of this round in which git said nothing."""

    def ordered(self, waiting: Sequence[Waiting]) -> list[Waiting]:
        """One round."""
        self.lost = 0.0
        places = {agent: place for place, agent in enumerate(self.silent)}
        found = sorted(waiting, key=lambda one: places.get(one[0], -1))
        self.heard = next((agent for agent, _ in found if agent in places), None)
        return found

    def turn(self, agent: str, *, alone: bool) -> Turn:
        """The agent's next turn; who holds up nobody has no limit."""
        again = agent in self.silent
        silence = _FIRST if self.lost < _ALL_FIRST else _LEAST
        if again or alone:
            others = 1 if agent == self.heard else len(self.silent) - 1
            silence = max(_LEAST, min(_VERDICT, _SHARED / 2 / max(1, others)))
        final = silence >= _VERDICT
        if alone:
            return Turn(silence=silence, final=final)
        seconds = self._seconds(agent)
        return Turn(max(seconds, 2 * silence) if again else seconds, ENVELOPES, silence, final=final)

    def last_if_heard(self, agent: str) -> None:
        """After its turn: the next round hears another one."""
        if agent == self.heard and agent in self.silent:
            self.silent[agent] = self.silent.pop(agent)

    def at_longest(self, agent: str) -> bool:
        """Whether the agent's next turn is as long as any can be."""
        return self._seconds(agent) >= self.longest

    def _seconds(self, agent: str) -> float:
        return min(SECONDS * 2.0 ** self.long.get(agent, 0), self.longest)


def record_in_turn(recorder: Recorder, agent: str, path: Path, slow: Slow, *, alone: bool) -> AgentReport:
    """Give one agent its turn; `unfinished` of the report says whether it needs another.

    Raises:
        TurnOver: git said nothing.
        PhionyxError: as `Recorder.record`.
    """
    began = time.monotonic()
    try:
        report = recorder.record(agent, path, slow.turn(agent, alone=alone))
    except BaseException as error:
        slow.lost += time.monotonic() - began
        if isinstance(error, TurnOver):
            slow.silent.setdefault(agent)
        slow.last_if_heard(agent)
        raise
    slow.silent.pop(agent, None)
    if not report.unfinished:
        slow.long.pop(agent, None)
    elif not report.advanced and not slow.at_longest(agent):
        slow.long[agent] = slow.long.get(agent, 0) + 1
    return report
