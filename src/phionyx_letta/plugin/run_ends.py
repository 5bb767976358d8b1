"""Notes the end of every run of Letta's, in the transaction in which its ``completed_at`` turns from NULL to a value.

A run that is cancelled right after it completed ends twice (24 of 25 tries), so the row is keyed by the run and says nothing of
how it ended. It is no evidence: what cannot be noted here costs the agent nothing and is found by the sweep (``session_queue``).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import PassiveFlag, Session
from sqlalchemy.orm.attributes import get_history

from phionyx_letta.plugin.runtime import logger
from phionyx_letta.plugin.simple import run_simple

if TYPE_CHECKING:
    from phionyx_letta.plugin.runtime import Runtime

#: Most runs a worker says it has under way; older ones are forgotten first (they were rolled back, or end elsewhere).
MOST_ACTIVE = 2000
_ROLLBACK = ("rollback to savepoint phionyx_run", "release savepoint phionyx_run")


class RunEnds:
    """What one process sees of runs: those it has under way, and their ends."""

    def __init__(self, runtime: Runtime, orm: Any) -> None:
        """Take the model from the imported module ``letta.orm``."""
        self._runtime = runtime
        self._run = orm.Run
        self._active: dict[str, None] = {}  # in the order they began
        self._lock = threading.Lock()

    def restart(self) -> None:
        """In the child after a fork: the parent's runs are not ours."""
        self._lock = threading.Lock()
        self._active.clear()

    def active(self) -> list[str]:
        """The runs this process has begun and not ended: the sweep leaves them alone."""
        with self._lock:
            return list(self._active)

    def flushed(self, session: Session, new: Sequence[Any], dirty: Sequence[Any]) -> None:
        """Called after every flush with its objects; never raises."""
        begun = [item.id for item in new if isinstance(item, self._run)]
        ended = [item.id for item in (*new, *dirty) if isinstance(item, self._run) and _ends(item)]
        if not begun and not ended:
            return
        with self._lock:
            self._active.update(dict.fromkeys(begun))
            for run_id in ended:
                self._active.pop(run_id, None)
            while len(self._active) > MOST_ACTIVE:
                del self._active[next(iter(self._active))]
        if ended:
            self._note(session, ended)

    def _note(self, session: Session, ended: list[str]) -> None:
        """In a savepoint and without waiting for anybody: Letta's own work is never held up nor undone by this.

        Who notes the same run at this moment (the sweep, a cancellation) would be waited for: the insert gives up instead.
        """
        try:
            connection = session.connection()
            try:
                run_simple(connection, _note_sql(ended))
            except Exception:
                run_simple(connection, _ROLLBACK)
                raise
        except Exception as error:
            self._runtime.counts["run_ends_missed"] += 1
            logger.warning("phionyx-letta: the end of %s was not noted (the sweep will find it): %s", ended, error)


def _ends(run: Any) -> bool:
    history = get_history(run, "completed_at", PassiveFlag.PASSIVE_NO_INITIALIZE)
    return any(value is not None for value in history.added or ()) and not any(history.deleted or ())


def _note_sql(ended: Sequence[str]) -> tuple[str, ...]:
    tag = f"$p{secrets.token_hex(8)}$"
    values = ",".join(f"({tag}{run_id}{tag})" for run_id in ended)
    return (
        "savepoint phionyx_run",
        "lock table phionyx_run in row exclusive mode nowait",
        "select set_config('phionyx.lock_timeout',current_setting('lock_timeout'),true),set_config('lock_timeout','1',true)",
        f"insert into phionyx_run(run_id)values{values}on conflict do nothing",
        "select set_config('lock_timeout',current_setting('phionyx.lock_timeout'),true)",
        "release savepoint phionyx_run",
    )
