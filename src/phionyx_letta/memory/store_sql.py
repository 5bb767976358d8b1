"""Patches and occurrences in the ledger's database: SQLite, or PostgreSQL for several hosts.

A row is one state of a patch, nothing is overwritten; the newest of a patch is marked, so lists read no content. Locks are
advisory on PostgreSQL, lock files beside a SQLite database, and not the ledger's, so that envelopes are written meanwhile. The
store's own is held while rows are compared and written; who acts on a target, which may take as long as a server does, holds that
target's. Nobody waits for either longer than `LONGEST_WAIT`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, func, select, text
from sqlalchemy.exc import DBAPIError

from phionyx_letta._canonical import JSON_ERRORS
from phionyx_letta.errors import InvalidPatch, LedgerUnavailable, PatchNotFound
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.memory.occurrences import OccurrenceRecord, TrackerBase, read_record
from phionyx_letta.memory.once import warn_once
from phionyx_letta.memory.patches import MemoryPatch
from phionyx_letta.memory.store import LONGEST_WAIT, exclusive_file
from phionyx_letta.memory.stored import HEAD, PatchSummary, patch_json

__all__ = ["SqlOccurrenceTracker", "SqlPatchStore", "in_one_transaction"]

_log = logging.getLogger(__name__)
_columns = tables.patch.c


class _Database:
    """A ledger, and one lock in it."""

    def __init__(self, ledger: SqlLedger | str, lock: str) -> None:
        self.ledger = SqlLedger(ledger) if isinstance(ledger, str) else ledger
        self._lock = lock
        self._mutex = threading.RLock()
        self._depth = 0
        self._own = threading.local()  # of a thread that joined a transaction: another must not write into it

    @property
    def _joined(self) -> Connection | None:
        found: Connection | None = getattr(self._own, "joined", None)
        return found

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock, among all processes; may be entered again by the thread that holds it."""
        with self._mutex, contextlib.ExitStack() as held:
            if self._depth == 0:
                held.enter_context(self.locked(self._lock))
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    @contextlib.contextmanager
    def joined(self, connection: Connection) -> Iterator[None]:
        """Do everything in the caller's transaction, under the lock."""
        with self._mutex:
            if self.ledger.engine.dialect.name == "postgresql":
                self._take(connection, _key(self._lock), self._lock)
            self._depth, self._own.joined = self._depth + 1, connection
            try:
                yield
            finally:
                self._depth, self._own.joined = self._depth - 1, None

    @contextlib.contextmanager
    def locked(self, lock: str, target: str = "") -> Iterator[None]:
        """Hold a lock among all processes: one of each kind, on PostgreSQL one of each kind and target.

        Raises:
            LedgerUnavailable: another process has held it for `LONGEST_WAIT`.
        """
        engine = self.ledger.engine
        if engine.dialect.name == "postgresql":
            with contextlib.ExitStack() as held:
                with self._translated():
                    connection = engine.connect()
                    held.callback(_let_go, connection)
                    self._take(connection, _key(lock, target), lock)
                yield
        elif engine.url.database in (None, "", ":memory:"):
            yield
        else:
            with exclusive_file(Path(f"{engine.url.database}.{lock}.lock")):
                yield

    def _take(self, connection: Connection, key: int, lock: str) -> None:
        """Take an advisory lock until the transaction ends, which the server notices soon where this host is gone."""
        connection.execute(_PATIENCE, {"wait": f"{LONGEST_WAIT * 1000:.0f}"})
        try:
            connection.execute(select(func.pg_advisory_xact_lock(key)))
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != _LOCK_TIMEOUT:
                raise
            with self.ledger.engine.connect() as other:
                holders = [str(pid) for pid in other.execute(_HOLDERS, {"key": key}).scalars()]
            named = holders[0] if holders else "PID"
            raise LedgerUnavailable(
                f"another process has held the {lock} in the database for {LONGEST_WAIT:.0f} s (server process {named}); "
                "nothing was done",
                f"wait for it, or end its hold with `select pg_terminate_backend({named})`; nothing is lost by that",
            ) from error

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction of its own that commits at the end, or the one that was joined."""
        if self._joined is not None:
            with self._translated():
                yield self._joined
            return
        with (
            self._translated(),
            self.ledger.engine.connect().execution_options(phionyx_write=True) as connection,
            connection.begin(),
        ):
            yield connection

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection to read with."""
        if self._joined is not None:
            with self._translated():
                yield self._joined
            return
        with self._translated(), self.ledger.engine.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            cause = str(error.orig).strip().splitlines()
            raise LedgerUnavailable(
                f"the patches in the database cannot be used: {cause[0] if cause else type(error).__name__}",
                "check that the database answers and that this user may read and write its phionyx_ tables",
            ) from error


class SqlPatchStore:
    """A store of patches in the ledger's database."""

    def __init__(self, ledger: SqlLedger | str) -> None:
        """Use an open ledger, or open the one at a database URL; missing tables are made.

        Raises:
            StoreError: the URL is not one of a database this store can live in, or it does not answer.
        """
        self._database = _Database(ledger, "patches")
        self.ledger = self._database.ledger

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Hold the store alone, among all processes; may be entered again by the thread that holds it."""
        return self._database.exclusive()

    def acting(self, target: str) -> contextlib.AbstractContextManager[None]:
        """Be alone with those who act on a target, see `Patches.acting`."""
        return self._database.locked("acts", target)

    def save(self, patch: MemoryPatch) -> MemoryPatch:
        """Add a patch; it is durable on return.

        Raises:
            InvalidPatch: its id is taken, or it is not JSON.
            LedgerUnavailable: the database does not take it.
        """
        row = _row(patch)
        with self.exclusive(), self._database.writing() as connection:
            if connection.execute(_newest(select(_columns.seq), patch.patch_id)).first() is not None:
                raise InvalidPatch(f"there is a patch {patch.patch_id} already", "use update() for a new state of it")
            connection.execute(tables.patch.insert(), row)
        return patch

    def update(self, patch: MemoryPatch) -> None:
        """Record a new state of a patch; it is durable on return. Signing it is the caller's.

        Raises:
            PatchNotFound: it was never saved.
            LedgerUnavailable: the database does not take it.
        """
        row = _row(patch)
        with self.exclusive(), self._database.writing() as connection:
            of_it = _columns.patch_id == patch.patch_id
            was = connection.execute(tables.patch.update().where(of_it, _columns.newest).values(newest=False))
            if not was.rowcount:
                raise PatchNotFound(f"Patch '{patch.patch_id}' not found", "save() it first")
            connection.execute(tables.patch.insert(), row)

    def get(self, patch_id: str) -> MemoryPatch | None:
        """Return the newest state of a patch that can be read, or None; damaged rows are named in the log."""
        query = select(_columns.seq, _columns.status, _columns.body).where(_columns.patch_id == patch_id)
        with self._database.reading() as connection:
            for row in connection.execute(query.order_by(_columns.seq.desc())):
                patch = _patch(row)
                if patch is not None and patch.patch_id == patch_id:
                    return patch
        return None

    def find(self, prefix: str) -> list[str]:
        """Return the ids that begin with this text."""
        begins = _columns.patch_id.startswith(prefix, autoescape=True)
        with self._database.reading() as connection:
            return list(
                connection.execute(
                    select(_columns.patch_id).where(_columns.newest, begins).order_by(_columns.seq)
                ).scalars()
            )

    def first(self) -> str | None:
        """Return the id of the oldest patch, by which the store is known, or None where it is empty."""
        with self._database.reading() as connection:
            return connection.execute(select(_columns.patch_id).order_by(_columns.seq).limit(1)).scalar()

    @property
    def folder(self) -> str | None:
        """The real path of a SQLite database's folder; None for a server's, and in memory."""
        url = self.ledger.engine.url
        if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
            return None
        return os.path.realpath(Path(str(url.database)).parent)

    def status(self, patch_id: str) -> str | None:
        """Return a patch's status without reading its content, or None where there is no such patch."""
        with self._database.reading() as connection:
            return connection.execute(_newest(select(_columns.status), patch_id)).scalar()

    def summaries(self, status: str | None = None, *, limit: int | None = None) -> list[PatchSummary]:
        """Return what lists show, without reading content; the newest `limit` of them, oldest first."""
        with self._database.reading() as connection:
            rows = connection.execute(_listed(select(*(_columns[name] for name in HEAD)), status, limit)).all()
        return [PatchSummary(**row._mapping) for row in reversed(rows)]

    def list_by_status(self, status: str | None = None, *, limit: int | None = None) -> list[MemoryPatch]:
        """Return patches in this status now, or all; the newest `limit` of them, oldest first."""
        columns = select(_columns.seq, _columns.status, _columns.body)
        with self._database.reading() as connection:
            rows = connection.execute(_listed(columns, status, limit)).all()
        return [patch for row in reversed(rows) if (patch := _patch(row)) is not None]

    def pending_patches(self) -> list[MemoryPatch]:
        """Return the patches that wait for a decision."""
        return self.list_by_status("pending")

    def count(self, status: str | None = None) -> int:
        """Return how many patches are in this status now, or all."""
        query = select(func.count()).select_from(tables.patch).where(*_wanted(status))
        with self._database.reading() as connection:
            return int(connection.execute(query).scalar_one())


@contextlib.contextmanager
def in_one_transaction(store: SqlPatchStore, occurrences: SqlOccurrenceTracker) -> Iterator[Connection]:
    """All that is stored in the body, here and with the connection, is committed at its end, or nothing is.

    Not for acts that write a target: what they are about to do must be durable before they do it.

    Raises:
        LedgerUnavailable: the database does not take it.
    """
    with (
        store._database.writing() as connection,
        store._database.joined(connection),
        occurrences._database.joined(connection),
    ):
        yield connection


class SqlOccurrenceTracker(TrackerBase):
    """Occurrences in the ledger's database."""

    def __init__(self, ledger: SqlLedger | str, scope: str = "") -> None:
        """Use an open ledger, or open the one at a database URL; missing tables are made.

        Args:
            ledger: it, or its URL.
            scope: whose facts these are (an agent's id): what one was told counts for no other. Holds no colon.
        """
        self._database = _Database(ledger, "occurrences")
        self._prefix = f"{scope}:" if scope else ""

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, OccurrenceRecord]]:
        with self._database.exclusive():
            before = self._records()
            records = self._records()
            yield records
            with self._database.writing() as connection:
                for key in {*before, *records}:
                    if before.get(key) == records.get(key):
                        continue
                    stored = self._prefix + key
                    connection.execute(tables.occurrence.delete().where(tables.occurrence.c.fact_key == stored))
                    if key in records:
                        body = json.dumps(asdict(records[key]), sort_keys=True)
                        connection.execute(tables.occurrence.insert(), {"fact_key": stored, "body": body})

    def _records(self) -> dict[str, OccurrenceRecord]:
        records = {}
        with self._database.reading() as connection:
            key = tables.occurrence.c.fact_key
            # a normalised key has no colon, so the facts of no scope are those without one
            ours = key.startswith(self._prefix, autoescape=True) if self._prefix else key.not_like("%:%")
            rows = connection.execute(select(tables.occurrence).where(ours).order_by(key)).all()
        for row in rows:
            try:
                record = read_record(row.fact_key.removeprefix(self._prefix), json.loads(row.body))
            except JSON_ERRORS:
                record = None
            if record is None:
                message = "the occurrences of %r cannot be read and are left aside"
                warn_once(_log, message, row.fact_key, about=hash(row.body))
            else:
                records[record.fact_key] = record
        return records


_LOCK_TIMEOUT = "55P03"  # lock_not_available
#: For this transaction: how long to wait for locks; that it may be idle; when the server gives up a client that is gone, s.
_PATIENCE = text(
    """
    select set_config('lock_timeout', :wait, true), set_config('idle_in_transaction_session_timeout', '0', true),
        set_config('tcp_keepalives_idle', '10', true), set_config('tcp_keepalives_interval', '5', true),
        set_config('tcp_keepalives_count', '3', true)
    """
)
_HOLDERS = text(
    """
    select pid from pg_locks where locktype = 'advisory' and granted and objsubid = 1
        and database = (select oid from pg_database where datname = current_database())
        and (classid::bigint << 32) | objid::bigint = cast(:key as bigint)
    """
)


def _key(lock: str, target: str = "") -> int:
    """The number of an advisory lock; the ledger's own is "phionyx" too, with a zero behind it."""
    if not target:
        return int.from_bytes(b"phionyx" + lock[:1].encode(), "big")
    named = f"phionyx/{lock}/{target}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(named).digest()[:8], "big", signed=True)


def _let_go(connection: Connection) -> None:
    """End the transaction of a lock. Where its connection broke meanwhile the lock is gone, and what was done under it is done."""
    try:
        connection.close()
    except DBAPIError:
        _log.warning("a lock on the patches was lost before its end")


def _row(patch: MemoryPatch) -> dict[str, Any]:
    data = patch.to_dict()
    return {**{name: data[name] for name in HEAD}, "newest": True, "body": patch_json(patch)}


def _patch(row: Any) -> MemoryPatch | None:
    try:
        patch = MemoryPatch.from_dict(json.loads(row.body))
    except (*JSON_ERRORS, InvalidPatch) as error:
        message = "row %s of phionyx_patch is not a patch (%s); it is passed over"
        warn_once(_log, message, row.seq, type(error).__name__, about=hash(row.body))
        return None
    if patch.status != row.status:
        warn_once(_log, "row %s of phionyx_patch contradicts itself; it is passed over", row.seq, about=hash(row.body))
        return None
    return patch


def _wanted(status: str | None) -> list[ColumnElement[bool]]:
    newest: ColumnElement[bool] = _columns.newest
    return [newest] if status is None else [newest, _columns.status == status]


def _newest(query: Select[Any], patch_id: str) -> Select[Any]:
    return query.where(_columns.newest, _columns.patch_id == patch_id)


def _listed(query: Select[Any], status: str | None, limit: int | None) -> Select[Any]:
    order = (_columns.created_at.desc(), _columns.seq.desc())
    return query.where(*_wanted(status)).order_by(*order).limit(None if limit is None else max(0, limit))
