"""The thread behind guarded reads: reads the whole log at the start, then asks git for checkpoints and keeps what was found."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, select

from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.errors import PhionyxError
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.lineage import OwnKeys
from phionyx_letta.ledger.rollback import current_origin
from phionyx_letta.ledger.rollback_sql import accepted_rollbacks
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.ledger.tree import default_origin, stored_checkpoint
from phionyx_letta.plugin.evidence import Reader
from phionyx_letta.plugin.logview import LogView
from phionyx_letta.plugin.outside import OutsideCheckpoints
from phionyx_letta.plugin.runtime import logger

if TYPE_CHECKING:
    from phionyx_letta.plugin.guard import Guard
    from phionyx_letta.plugin.runtime import Runtime

__all__ = ["LogWatch", "open_view"]

_INTERVAL = 1.0
_ROWS = 1000


class LogWatch:
    """Reads for one guard."""

    def __init__(self, url: str, runtime: Runtime, guard: Guard) -> None:
        """Nothing is read yet. ``url`` is the ledger's."""
        self._url, self._runtime, self._guard = url, runtime, guard
        self._stop = threading.Event()
        self._view: LogView | None = None
        self._outside: OutsideCheckpoints | None = None
        self._seconds: float | None = None
        self._thread = threading.Thread(target=self._run, name="phionyx-letta-guard", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def describe(self) -> dict[str, Any]:
        """How the log stands in this process, for `doctor`."""
        view, outside = self._view, self._outside
        held = view.outside if view is not None else None
        return {
            "size": view.size if view is not None else None,
            "fault": view.fault if view is not None else None,
            "disbelieved": view.disbelieved if view is not None else 0,
            "read_in_s": self._seconds,
            "outside_size": held.size if held is not None else None,
            "outside_readable": outside.any if outside is not None else False,
            "outside_problem": outside.problem if outside is not None else None,
        }

    def _run(self) -> None:
        ledger: SqlLedger | None = None
        failing = ""
        while not self._stop.is_set():
            try:
                ledger = ledger or SqlLedger(self._url)
                if self._seconds is None:
                    self._load(ledger)
                if self._outside is not None:
                    self._outside.ask_repositories()
                self._tell(ledger)
                failing = ""
            except Exception as error:  # whatever it is, it is tried again; reads wait meanwhile
                message = f"{type(error).__name__}: {error}"
                if message != failing:
                    logger.error("phionyx-letta: guarded reads wait for the ledger: %s", message)
                failing = message
            self._stop.wait(_INTERVAL)
        if ledger is not None:
            try:
                self._tell(ledger)
            except PhionyxError as error:
                logger.warning("phionyx-letta: findings of guarded reads were not kept: %s", error)
            ledger.close()

    def _load(self, ledger: SqlLedger) -> None:
        started = time.monotonic()
        key = self._runtime.key
        assert key is not None
        settings = self._runtime.settings
        with ledger.engine.connect() as connection:
            keys = OwnKeys(connection, key.signer, settings.trusted_keys.split())
            accepted = accepted_rollbacks(connection, keys.verifies)
        origin = current_origin(settings.log_origin or default_origin(str(key.signer.key_id)), accepted)
        public = keys.public_keys
        self._outside = OutsideCheckpoints(settings.sinks, origin, public)
        self._outside.ask_repositories()
        self._view = LogView(keys.verifies)
        taken_over = keys.rotations[0].checkpoint if keys.rotations else None
        open_view(self._view, ledger, self._outside.newest(), origin, public, taken_over=taken_over)
        self._seconds = round(time.monotonic() - started, 3)
        if self._view.fault is not None:
            logger.error("phionyx-letta: guarded reads refuse everything: %s", self._view.fault)
        self._guard.use(Reader(self._view, key.outbox, self._outside.newest))

    def _tell(self, ledger: SqlLedger) -> None:
        """Keep what was found where `log` shows it."""
        rows = []
        while self._runtime.untold:
            finding = self._runtime.untold.popleft()
            rows.append({"at": finding["at"], "info": json.dumps({**finding, "worker": self._runtime.worker_id})})
        if rows:
            with ledger.engine.begin() as connection:
                connection.execute(insert(tables.finding), rows)


def open_view(
    view: LogView,
    ledger: SqlLedger,
    outside: Checkpoint | None,
    origin: str,
    public_keys: list[str],
    *,
    taken_over: Checkpoint | None = None,
) -> None:
    """Take the whole log into a view, in flat memory, and hold it to the newest checkpoint there is.

    What a checkpoint covers need not be verified one by one: its root shows that all of it is as it was signed. So the one in
    the database serves where none is outside; it may be an old one, which then only covers less. So does the state of the log
    where this process's key took over from another, which it signed itself.
    """
    with ledger.engine.connect() as connection:
        stored = stored_checkpoint(connection, origin, public_keys)
        points = [one for one in (outside, taken_over, stored and stored[0]) if one is not None]
        for point in points:
            view.expect(point)
        envelope = tables.envelope.c
        rows = connection.execution_options(stream_results=True, yield_per=_ROWS).execute(
            select(envelope.seq, envelope.body).order_by(envelope.seq)
        )
        for part in rows.partitions(_ROWS):
            view.extend((row.seq, row.body) for row in part)
    least = max((point.size for point in points), default=0)
    if view.size < least:
        view.shorter(view.size, least)
