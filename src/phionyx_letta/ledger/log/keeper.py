"""Brings each checkpoint to every sink, each in a thread of its own, so that none can hold up the sealing or another sink.

Only the newest checkpoint waits for a sink: it covers all before it. What fails is tried again, later and later; how each sink
stands can be read at any time. Nothing is kept on disk: a sink that remembers is asked what it holds, one that does not is told
the newest again after a start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from phionyx_letta.errors import PhionyxError
from phionyx_letta.ledger.log.sink import Published, Sink

__all__ = ["SinkKeeper", "SinkState"]

_log = logging.getLogger("phionyx_letta")

Cosigned = Callable[[Published, str], None]


@dataclass(frozen=True)
class SinkState:
    """How a sink stands; every field can be shown."""

    name: str
    delivered_size: int | None = None
    """Size of the log in the newest checkpoint the sink is known to hold or to be past; None before the first."""
    waiting_size: int | None = None
    """Of the one that waits for it; None if none does."""
    delivered: int = 0
    """Checkpoints taken since the start."""
    failures: int = 0
    """Failed tries since the start."""
    failing_since: str | None = None
    """UTC, ISO 8601; None while the last try did not fail."""
    last_ok: str | None = None
    """UTC, ISO 8601."""
    last_error: str | None = None
    last_error_at: str | None = None


class SinkKeeper:
    """Delivers to several sinks at once."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        cosigned: Cosigned | None = None,
        retry: tuple[float, float] = (1.0, 60.0),
    ) -> None:
        """Start a thread for each sink.

        Args:
            sinks: where checkpoints go.
            cosigned: called, in the sink's thread, with what was offered and the note with a witness's cosignatures.
            retry: the first and the longest pause after a failure, s; it doubles in between.
        """
        self._couriers = [_Courier(sink, cosigned, retry) for sink in sinks]

    def publish(self, published: Published) -> None:
        """Offer a checkpoint to every sink; returns at once and never fails."""
        for courier in self._couriers:
            courier.offer(published)

    def states(self) -> list[SinkState]:
        """Return how each sink stands."""
        return [courier.state() for courier in self._couriers]

    def close(self, timeout: float = 5.0) -> bool:
        """Try once more to deliver what waits and end the threads.

        Returns:
            Whether every sink has the newest checkpoint; False also where one was still busy after ``timeout`` seconds.
        """
        for courier in self._couriers:
            courier.finish()
        end = time.monotonic() + timeout
        for courier in self._couriers:
            courier.join(max(0.0, end - time.monotonic()))
        return all(state.waiting_size is None for state in self.states())


class _Courier:
    """One sink, its thread, and the one checkpoint that waits for it."""

    def __init__(self, sink: Sink, cosigned: Cosigned | None, retry: tuple[float, float]) -> None:
        self._sink = sink
        self._cosigned = cosigned
        self._first_pause, self._longest_pause = retry
        self._changed = threading.Condition()
        self._waiting: Published | None = None
        self._not_before = 0.0  # monotonic: a wall clock that steps must neither hurry nor stop us
        self._pause = 0.0
        self._finishing = False
        self._state = SinkState(sink.name)
        self._thread = threading.Thread(target=self._run, name=f"phionyx {sink.name}", daemon=True)
        self._thread.start()

    def offer(self, published: Published) -> None:
        with self._changed:
            self._waiting = published
            self._changed.notify()

    def finish(self) -> None:
        with self._changed:
            self._finishing = True
            self._changed.notify()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def state(self) -> SinkState:
        with self._changed:
            return replace(self._state, waiting_size=self._waiting.checkpoint.size if self._waiting else None)

    def _run(self) -> None:
        while True:
            with self._changed:
                while (pause := self._to_wait()) != 0:
                    self._changed.wait(pause)
                offered, last = self._waiting, self._finishing
            if offered is not None:
                self._deliver(offered)
            if last:
                return

    def _to_wait(self) -> float | None:
        """Seconds until there is something to do; None: until told."""
        if self._finishing:
            return 0
        if self._waiting is None:
            return None
        return max(0.0, self._not_before - time.monotonic())

    def _deliver(self, offered: Published) -> None:
        try:
            note = self._sink.deliver(offered)
            if note is not None and self._cosigned is not None:
                self._cosigned(offered, note)
        except Exception as error:  # whatever a sink does, it costs no other and no sealing
            self._failed(error)
        else:
            self._taken(offered)

    def _taken(self, offered: Published) -> None:
        with self._changed:
            if self._waiting is offered:
                self._waiting = None
            self._pause = 0.0
            self._not_before = time.monotonic() + self._sink.interval
            if self._state.failing_since is not None:
                _log.warning("phionyx-letta: %s takes checkpoints again", self._sink.name)
            self._state = replace(
                self._state,
                delivered_size=offered.checkpoint.size,
                delivered=self._state.delivered + 1,
                failing_since=None,
                last_ok=_now(),
            )

    def _failed(self, error: Exception) -> None:
        # of another error only the kind: its text may hold anything
        said = str(error) if isinstance(error, PhionyxError) else f"{self._sink.name} failed: {type(error).__name__}"
        with self._changed:
            self._pause = min(max(self._first_pause, self._pause * 2), self._longest_pause)
            self._not_before = time.monotonic() + self._pause
            if said != self._state.last_error or self._state.failing_since is None:
                _log.error("phionyx-letta: a checkpoint was not delivered: %s", said)
            self._state = replace(
                self._state,
                failures=self._state.failures + 1,
                failing_since=self._state.failing_since or _now(),
                last_error=said,
                last_error_at=_now(),
            )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
