"""The ledger in a database: PostgreSQL beside Letta's own tables, or SQLite in a file.

Writers are serialised by one lock of the ledger (an advisory lock of the transaction on PostgreSQL, ``BEGIN IMMEDIATE``
on SQLite), so that no chain forks and the sealing order has no holes. Readers take no lock.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Select, create_engine, event, func, select, update
from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from phionyx_letta import __version__
from phionyx_letta.envelope import GENESIS_HASH, MemoryMutationContext, Signs, build_memory_envelope
from phionyx_letta.errors import LedgerUnavailable
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.bulk import upsert_rows
from phionyx_letta.ledger.salts import salts_in_use
from phionyx_letta.ledger.tree import KnownLog, sql_nodes
from phionyx_letta.ledger.writer import LedgerWriter
from phionyx_letta.merkle import consistency_proof

#: Of the whole ledger; any 64-bit number does, as long as nobody else in the database uses it ("phionyx" in ASCII).
LOCK_KEY = int.from_bytes(b"phionyx\0", "big")


class SqlLedger:
    """Envelopes in PostgreSQL or SQLite; an ``EnvelopeStore`` and the sealer's target."""

    def __init__(self, url: str, *, create: bool = True, ping: bool = True) -> None:
        """Open the ledger.

        Args:
            url: of the database; see ``tables.ledger_url``.
            create: make missing tables. False for readers, who may not be allowed to.
            ping: try a pooled connection before each use. False for who polls and tries again anyway.

        Raises:
            StoreError: the URL is not one of a database this ledger can live in.
            LedgerUnavailable: the database does not answer.
        """
        self.known_log: KnownLog | None = None
        """The log as this process last left it; see ``LogWriter``."""
        self.url = tables.ledger_url(url)
        self.engine = create_engine(self.url, pool_size=2, max_overflow=2, pool_pre_ping=ping)
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine, "connect", _prepare_sqlite if create else _prepare_given_sqlite)
            event.listen(self.engine, "begin", _begin_sqlite)
        if create:
            with self._reported():
                self._create_tables()

    def close(self) -> None:
        """Give the connections back."""
        self.engine.dispose()

    def _create_tables(self) -> None:
        with self.engine.connect().execution_options(phionyx_write=True) as connection, connection.begin():
            if self.engine.dialect.name == "postgresql":  # two workers starting at once would race CREATE TABLE
                connection.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))
            tables.metadata.create_all(connection)
            if (
                self.engine.dialect.name == "postgresql"
            ):  # older ledgers have the table, so create_all leaves its indexes out
                connection.exec_driver_sql(tables.OUTBOX_BLOCK_INDEX)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except (OperationalError, ProgrammingError) as error:
            where = self.url.set(query={}).render_as_string(hide_password=True)  # a query may hold a password too
            raise LedgerUnavailable(
                f"the ledger at {where} cannot be used: {_first_line(error)}",
                remedy="check that the database answers and that this user may create and read tables in it",
            ) from error

    @contextmanager
    def writing(self, *, wait: bool = True) -> Iterator[Connection | None]:
        """A transaction that holds the ledger's lock; commits at the end.

        Args:
            wait: False gives None at once when another process holds the lock.
        """
        with (
            self._reported(),
            self.engine.connect().execution_options(phionyx_write=True) as connection,
            connection.begin(),
        ):
            if self.engine.dialect.name != "postgresql" or self._lock(connection, wait):
                yield connection
            else:
                yield None

    @staticmethod
    def _lock(connection: Connection, wait: bool) -> bool:
        if wait:
            connection.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))
            return True
        return bool(connection.execute(select(func.pg_try_advisory_xact_lock(LOCK_KEY))).scalar())

    # -- the EnvelopeStore protocol ------------------------------------------------------------------------------

    def head(self, trace_id: str) -> str:
        """Hash of the newest envelope of a chain; the genesis hash of an empty one."""
        with self._reported(), self.engine.connect() as connection:
            found = connection.execute(select(tables.chain.c.head).where(tables.chain.c.trace_id == trace_id)).scalar()
        return GENESIS_HASH if found is None else found

    def append(self, trace_id: str, envelope: Mapping[str, Any]) -> None:
        """Append a finished envelope.

        Raises:
            StaleHeadError: another writer was faster; build it again on the new head, or use ``emit``.
            InvalidMutation: the envelope says it belongs to another chain.
        """
        with self.writing() as connection:
            assert connection is not None
            writer = LedgerWriter(connection, known=self.known_log)
            writer.add(envelope, trace_id=trace_id)
            writer.flush()
        self.known_log = writer.log.known

    def emit(
        self,
        ctx: MemoryMutationContext,
        *,
        signer: Signs,
        package_version: str = __version__,
        memory_audit_parent_ref: str | None = None,
        timestamp_utc: str | None = None,
        organization_id: str | None = None,
    ) -> dict[str, Any]:
        """Build the next envelope of ``ctx.trace_id`` and append it, under the lock: concurrent writers never fork."""
        with self.writing() as connection:
            assert connection is not None
            writer = LedgerWriter(connection, signer, known=self.known_log)
            chain = writer.chain(ctx.trace_id)
            envelope = build_memory_envelope(
                ctx,
                previous_hash=chain.head,
                package_version=package_version,
                signer=signer,
                memory_audit_parent_ref=memory_audit_parent_ref,
                position=chain.length,
                timestamp_utc=timestamp_utc,
                organization_id=organization_id,
            )
            writer.add(envelope)
            writer.flush()
        self.known_log = writer.log.known
        return envelope

    def probe(self, trace_id: str) -> None:
        """Find out whether the ledger takes a write, and write nothing.

        Raises:
            LedgerUnavailable: it does not.
        """
        with self.writing():
            pass

    def iter_chain(self, trace_id: str) -> Iterator[dict[str, Any]]:
        """The envelopes of one chain, oldest first, in flat memory."""
        columns = tables.envelope.c
        query = select(columns.body).where(columns.trace_id == trace_id).order_by(columns.position)
        return (_parsed(row.body) for row in self._stream(query))

    def traces(self) -> Iterator[str]:
        """The ids of all chains that have an envelope, sorted."""
        columns = tables.envelope.c
        return (row.trace_id for row in self._stream(select(columns.trace_id).distinct().order_by(columns.trace_id)))

    # -- reading across chains -----------------------------------------------------------------------------------

    def iter_all(self) -> Iterator[dict[str, Any]]:
        """Every envelope in sealing order, in flat memory: what block linkage is checked on."""
        query = select(tables.envelope.c.body).order_by(tables.envelope.c.seq)
        return (_parsed(row.body) for row in self._stream(query))

    def select(
        self,
        *,
        after: int = -1,
        limit: int | None = None,
        newest: bool = False,
        **equals: str | None,
    ) -> list[Any]:
        """Rows of the envelope table, in sealing order.

        Args:
            after: only envelopes with a greater ``seq``.
            limit: at most so many.
            newest: the newest ``limit`` of them (still in sealing order).
            equals: column=value; a value of None does not filter. ``since`` and ``until`` bound ``at`` (ISO 8601 UTC).
        """
        columns = tables.envelope.c
        query = select(tables.envelope).where(columns.seq > after)
        for name, value in equals.items():
            if value is None:
                continue
            if name == "since":
                query = query.where(columns.at >= value)
            elif name == "until":
                query = query.where(columns.at < value)
            else:
                query = query.where(columns[name] == value)
        query = query.order_by(columns.seq.desc() if newest else columns.seq).limit(limit)
        with self._reported(), self.engine.connect() as connection:
            rows = list(connection.execute(query))
        return rows[::-1] if newest else rows

    def has_pending(self) -> bool:
        """Whether a row waits in the outbox: what the sealer asks ten times a second, so it takes no lock."""
        query = select(tables.outbox.c.id).where(tables.outbox.c.refused.is_(None)).limit(1)
        with self._reported(), self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            return connection.execute(query).first() is not None

    def salted(self) -> bool:
        """Whether this ledger has salted commitments (then it goes on salting)."""
        with self._reported(), self.engine.connect() as connection:
            return salts_in_use(connection)

    def consistency_proof(self, old: int, new: int) -> list[bytes]:
        """The proof that the log of ``old`` envelopes begins that of ``new`` ones.

        Raises:
            ProofError: the log has no such sizes.
        """
        with self._reported(), self.engine.connect() as connection:
            return consistency_proof(sql_nodes(connection), old, new)

    def tell_sinks(self, key_id: str, infos: Mapping[str, str]) -> None:
        """Write how the sinks of a key's checkpoints stand, for `doctor`, in place of what was told before."""
        name, now = tables.sink.c.name, datetime.now(UTC).isoformat()
        rows = [{"name": f"{key_id} {sink}", "seen_at": now, "info": info} for sink, info in sorted(infos.items())]
        gone = name.startswith(f"{key_id} ", autoescape=True) & name.not_in([row["name"] for row in rows])
        with self._reported(), self.engine.begin() as connection:
            connection.execute(tables.sink.delete().where(gone))
            upsert_rows(connection, tables.sink, "name", rows)

    def keep_cosigned(self, origin: str, note: str, cosigned: str) -> None:
        """Keep a checkpoint with a witness's cosignatures, if it is still the newest."""
        column = tables.checkpoint.c
        newest = (column.origin == origin) & (column.note == note)
        with self._reported(), self.engine.begin() as connection:
            connection.execute(update(tables.checkpoint).where(newest).values(note=cosigned))

    def find(self, reference: str) -> list[Any]:
        """The envelopes whose hash starts with ``reference`` (``envelope://`` and ``sha256:`` may be left out)."""
        digest = reference.removeprefix("envelope://").removeprefix("sha256:")
        columns = tables.envelope.c
        query = select(tables.envelope).where(columns.current_hash.startswith("sha256:" + digest, autoescape=True))
        with self._reported(), self.engine.connect() as connection:
            return list(connection.execute(query.order_by(columns.seq).limit(10)))

    def _stream(self, query: Select[Any]) -> Iterator[Any]:
        with self._reported(), self.engine.connect() as connection:
            yield from connection.execution_options(stream_results=True, yield_per=500).execute(query)


def _parsed(body: str) -> dict[str, Any]:
    """The stored envelope, or the bare text where it is no JSON any more: the verifier then names its position."""
    try:
        envelope = json.loads(body)
    except (ValueError, TypeError, RecursionError):
        return {"unreadable": body}
    return envelope if isinstance(envelope, dict) else {"unreadable": body}


def _first_line(error: SQLAlchemyError) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    return str(cause).strip().splitlines()[0] if str(cause).strip() else type(error).__name__


def _prepare_sqlite(connection: Any, _record: ConnectionPoolEntry) -> None:
    connection.isolation_level = (
        None  # we say BEGIN ourselves: sqlite3's own is deferred and turns a busy writer into an error
    )
    cursor = connection.cursor()
    for pragma in ("busy_timeout=30000", "synchronous=FULL"):
        cursor.execute(f"PRAGMA {pragma}")
    _write_ahead(cursor)
    cursor.close()


def _write_ahead(cursor: sqlite3.Cursor) -> None:
    """Set the journal mode. Where several open a new database at once SQLite does not wait for its turn here, whatever the timeout."""
    deadline = time.monotonic() + 30
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(0.01)


def _prepare_given_sqlite(connection: Any, _record: ConnectionPoolEntry) -> None:
    """Who only reads changes nothing of the file, not even its journal mode: it may be evidence."""
    connection.isolation_level = None
    connection.execute("PRAGMA busy_timeout=30000")


def _begin_sqlite(connection: Connection) -> None:
    write = connection.get_execution_options().get("phionyx_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
