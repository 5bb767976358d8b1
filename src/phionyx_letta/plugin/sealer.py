"""Turns outbox rows into signed, chained envelopes: one sealer at a time, in the order of the writes.

Each batch is one transaction under the ledger's lock: rows out of the outbox, envelopes into the ledger, heads advanced.
Killed at any point, the batch either happened or did not (design, decision 2). Rows are deleted, no cursor is kept, so a
transaction that commits late is not skipped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Integer,
    Select,
    bindparam,
    delete,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.errors import PhionyxError, SigningKeyError
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.bulk import among, finite
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.ledger.statements import refuse_retired
from phionyx_letta.ledger.tree import LogWriter
from phionyx_letta.ledger.writer import LedgerWriter
from phionyx_letta.plugin.checkpointing import CheckpointPolicy, CheckpointSigner
from phionyx_letta.plugin.drafting import Candidate, add_draft, preload
from phionyx_letta.plugin.forgetting import Forgetting
from phionyx_letta.plugin.outbox import authentic, open_payload
from phionyx_letta.plugin.runtime import PluginKey, logger

#: A row that another host's key authenticates waits for that host while it was seen this recently; then it is passed over.
FOREIGN_KEY_PATIENCE = timedelta(seconds=30)
#: How often refused rows are looked at again, s: an attacker may have marked a genuine one.
REFUSED_INTERVAL = 30.0
#: Most bytes of payloads read at once (one row is always read): forged ones may be as large as the database takes.
BATCH_BYTES = 32_000_000


@dataclass
class SealReport:
    """What one pass did."""

    sealed: int = 0
    refused: int = 0
    waiting: int = 0
    busy: bool = False
    refusals: list[str] = field(default_factory=list)
    more: bool = False
    """The batch was full: there may be more to seal."""
    checkpoint: tuple[Checkpoint, str] | None = None
    """The newest that was signed, and its note."""


class Sealer:
    """Seals what one key can authenticate. Holds no state of the ledger between two passes."""

    def __init__(
        self,
        ledger: SqlLedger,
        key: PluginKey,
        *,
        batch: int = 500,
        checkpoints: CheckpointPolicy | None = None,
        trusted: Sequence[str] = (),
    ) -> None:
        """Seal into ``ledger`` with ``key``, at most ``batch`` rows in a transaction; no checkpoints by default.

        ``trusted`` are the public keys of other hosts on the same database: checkpoints cover what they sealed as well.
        """
        self._trusted = trusted
        self._checkpoints = CheckpointSigner(checkpoints, key.signer) if checkpoints else None
        self._log: LogWriter | None = None  # the log's end after what this batch wrote
        self._ledger = ledger
        self._key = key
        self._batch = batch
        self._refused_looked_at = float("-inf")
        self._refused_after: int | None = None  # where the look through the refused rows stands; None: at its end

    def due(self) -> bool:
        """Whether refused rows are to be looked at, though nothing else may wait."""
        looking = self._refused_after is not None or time.monotonic() - self._refused_looked_at >= REFUSED_INTERVAL
        return looking or (self._checkpoints is not None and self._checkpoints.overdue())

    def seal_pending(self) -> SealReport:
        """Seal until nothing is left that this key can seal, or another sealer is at work."""
        total = SealReport()
        while True:
            report = self.seal_batch()
            total.sealed += report.sealed
            total.refused += report.refused
            total.refusals += report.refusals
            total.checkpoint = report.checkpoint or total.checkpoint
            total.waiting, total.busy = report.waiting, report.busy
            if not report.more or report.waiting:
                return total

    def seal_batch(self) -> SealReport:
        """Seal one batch in one transaction.

        Raises:
            LedgerUnavailable: the database does not answer; nothing was changed.
            SigningKeyError: the key was replaced; the rows wait for the new one.
        """
        self._log = None
        with self._ledger.writing(wait=False) as connection:
            if connection is None:
                return SealReport(busy=True)
            refuse_retired(connection, self._key.signer)
            rows, more = self._rows(connection)
            again = self._refused_rows(connection)
            report = self._seal(connection, sorted([*again, *rows], key=lambda row: row.id))
            report.more = more or self._refused_after is not None
            report.checkpoint = self._checkpoint(connection)
        if self._log is not None:
            self._ledger.known_log = self._log.known
        if self._checkpoints is not None and report.checkpoint is not None:
            self._checkpoints.committed(report.checkpoint[0])
        return report

    def sign_last(self) -> tuple[Checkpoint, str] | None:
        """Sign a checkpoint of all that is sealed, if the newest does not cover it: at the end of the process.

        Raises:
            LedgerUnavailable: the database does not answer.
        """
        if self._checkpoints is None:
            return None
        with self._ledger.writing(wait=False) as connection:
            if connection is None:  # whoever is sealing signs too
                return None
            return self._checkpoints.sign(connection, self._writer(connection).log)

    def _writer(self, connection: Connection) -> LedgerWriter:
        return LedgerWriter(connection, self._key.signer, known=self._ledger.known_log, trusted=self._trusted)

    def _checkpoint(self, connection: Connection) -> tuple[Checkpoint, str] | None:
        """Sign the log as this transaction leaves it, where that is due."""
        if self._checkpoints is None or (self._log is None and not self._checkpoints.overdue()):
            return None
        return self._checkpoints.sign_due(connection, self._log or self._writer(connection).log)

    def _rows(self, connection: Connection, *, refused_after: int | None = None) -> tuple[Sequence[Any], bool]:
        """The next rows in the order of their ids, as many as a batch may hold, and whether there may be more.

        Args:
            connection: holding the ledger's lock.
            refused_after: take refused rows with a greater id instead of those that wait.
        """
        query = _next_rows(connection.dialect.name, refused_after is not None)
        values = {"batch": self._batch, "bytes": BATCH_BYTES, "after": refused_after}
        rows = connection.execute(query, values).all()
        return rows, bool(rows) and (rows[0].found == self._batch or len(rows) < rows[0].found)

    def _refused_rows(self, connection: Connection) -> Sequence[Any]:
        """The next refused rows to look at again; none before the interval has passed."""
        if not self.due():
            return []
        if self._refused_after is None:
            self._refused_looked_at, self._refused_after = time.monotonic(), -(2**63)
        rows, more = self._rows(connection, refused_after=self._refused_after)
        self._refused_after = rows[-1].id if more else None
        return rows

    def _seal(self, connection: Connection, rows: Sequence[Any]) -> SealReport:
        report = SealReport()
        candidates: list[tuple[Any, dict[str, Any]]] = []
        for row in rows:
            fields = open_payload(row.payload)
            if fields is not None and fields["key_id"] != self._key.outbox.key_id and self._alive(connection, fields):
                if row.refused is not None:
                    continue  # that host looks at it again itself
                report.waiting = 1  # rows behind it wait too: a block's history keeps its order
                break
            reason = self._reason_to_refuse(row, fields)
            if reason is None:
                assert fields is not None
                candidates.append((row, fields))
            else:
                self._refuse(connection, row, reason, report)
        fresh = self._unsealed(connection, candidates, report) if candidates else []
        if fresh:
            report.sealed = self._write(connection, fresh, report)
        return report

    def _reason_to_refuse(self, row: Any, fields: dict[str, Any] | None) -> str | None:
        if fields is None:
            return "the payload is not one this version of the plugin writes"
        if fields["key_id"] != self._key.outbox.key_id:
            return f"it is authenticated with the key {fields['key_id'][:80]!r}, which no running worker has"
        if not authentic(self._key.outbox, row.payload, row.mac):
            return "its MAC does not match: the row was forged or changed in the database"
        return None

    @staticmethod
    def _alive(connection: Connection, fields: dict[str, Any]) -> bool:
        """By the database's clock, which all hosts share; a sign of life from the future is a forged one."""
        worker, key_id = tables.worker.c, fields["key_id"]
        if not key_id.isprintable():  # no key has such a name, and the database could not look for all of them
            return False
        now = connection.execute(select(func.now())).scalar_one()
        recent = worker.seen_at.between(now - FOREIGN_KEY_PATIENCE, now + FOREIGN_KEY_PATIENCE)
        return (
            connection.execute(select(worker.worker_id).where(worker.key_id == key_id, recent).limit(1)).first()
            is not None
        )

    @staticmethod
    def _refuse(connection: Connection, row: Any, reason: str, report: SealReport) -> None:
        if row.refused is not None:
            return  # reported when it was refused
        reason = (
            reason.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
        )  # it may quote what was forged
        connection.execute(update(tables.outbox).where(tables.outbox.c.id == row.id).values(refused=reason))
        report.refused += 1
        report.refusals.append(f"outbox row {row.id} was not sealed: {reason}")
        logger.error("phionyx-letta: %s", report.refusals[-1])

    def _unsealed(
        self, connection: Connection, candidates: list[tuple[Any, dict[str, Any]]], report: SealReport
    ) -> list[Candidate]:
        """Without the copies of rows that are sealed already, in the ledger or in this batch."""
        envelope = tables.envelope.c
        nonces = [fields["nonce"] for _, fields in candidates]
        numbers = [row.id for row, _ in candidates]
        known = select(envelope.nonce, envelope.outbox_id).where(
            or_(among(connection, envelope.nonce, nonces), among(connection, envelope.outbox_id, numbers))
        )
        found = connection.execute(known).all()
        seen, used = {row.nonce for row in found}, {row.outbox_id for row in found}
        fresh = []
        for row, fields in candidates:
            if fields["nonce"] in seen:
                self._refuse(connection, row, "it is a copy of a row that was sealed before", report)
                continue
            seen.add(fields["nonce"])
            if row.id in used:
                logger.error(
                    "phionyx-letta: outbox row %s has the number of a sealed one: the sequence was set back", row.id
                )
            fresh.append(Candidate(row, fields, None if row.id in used else row.id))
        return fresh

    def _write(self, connection: Connection, candidates: list[Candidate], report: SealReport) -> int:
        """All together; where that fails, in halves, so that a row that cannot be sealed does not hold up the others."""
        try:
            with connection.begin_nested():
                written = self._write_together(connection, candidates)
        except Exception as error:
            if not _is_fault_of_a_row(error):
                raise
            if len(candidates) == 1:
                self._refuse(
                    connection, candidates[0].row, f"no envelope can be made of it: {_described(error)}", report
                )
                return 0
        else:
            return written
        middle = len(candidates) // 2
        return self._write(connection, candidates[:middle], report) + self._write(
            connection, candidates[middle:], report
        )

    def _write_together(self, connection: Connection, candidates: list[Candidate]) -> int:
        writer = self._writer(connection)
        preload(writer, candidates)
        forgetting = Forgetting(connection, [(candidate.row.id, candidate.fields) for candidate in candidates])
        for candidate in candidates:
            add_draft(writer, self._key.signer.key_id, candidate, forgetting)
        written = writer.flush()
        forgetting.flush()
        self._log = writer.log
        rows = [candidate.row for candidate in candidates]
        connection.execute(delete(tables.outbox).where(among(connection, tables.outbox.c.id, [row.id for row in rows])))
        for row in rows:
            if row.refused is not None:
                logger.warning(
                    "phionyx-letta: outbox row %s was marked refused but is genuine; it is sealed now", row.id
                )
        return written


@lru_cache(maxsize=8)
def _next_rows(dialect: str, refused: bool) -> Select[Any]:
    """See ``Sealer._rows``; making this statement anew cost a sixth of sealing a few rows."""
    outbox = tables.outbox.c
    chosen: ColumnElement[bool] = outbox.refused.is_(None)
    if refused:
        chosen = outbox.refused.is_not(None) & (outbox.id > bindparam("after"))
    columns = (outbox.id, outbox.payload, outbox.mac, outbox.refused)
    batch = select(*columns).where(chosen).order_by(outbox.id).limit(bindparam("batch", type_=Integer)).subquery()
    length = func.octet_length if dialect == "postgresql" else func.length
    size = length(batch.c.payload)
    measured = select(
        batch, (func.sum(size).over(order_by=batch.c.id) - size).label("before"), func.count().over().label("found")
    ).subquery()
    return select(measured).where(measured.c.before < bindparam("bytes", type_=BigInteger)).order_by(measured.c.id)


_OF_A_ROW = (PhionyxError, ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


def _is_fault_of_a_row(error: Exception) -> bool:
    """What this row holds, or what the ledger holds of its chain and block, is the reason; else it is the database."""
    if isinstance(error, SigningKeyError):  # a signing command that fails: every row can wait
        return False
    if isinstance(error, DBAPIError):
        state = getattr(error.orig, "sqlstate", None)
        if state is None:  # the driver refused a value, or the connection is gone
            return not isinstance(error, OperationalError | InterfaceError)
        return bool(state[:2] in ("22", "23"))  # data exception, integrity constraint violation
    return isinstance(error, _OF_A_ROW)


def _described(error: Exception) -> str:
    """In one line and without the values, which may be content."""
    cause: BaseException = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    first = next(iter(str(cause).splitlines()), "")
    return str(error) if isinstance(error, PhionyxError) else f"{type(cause).__name__}: {first[:200]}"


def pending(connection: Connection) -> dict[str, Any]:
    """How the outbox stands: rows that wait and the age of the oldest in seconds, rows that were refused and why."""
    outbox = tables.outbox.c
    waiting, oldest = connection.execute(
        select(func.count(), func.min(outbox.created_at).filter(finite(connection, outbox.created_at))).where(
            outbox.refused.is_(None)
        )
    ).one()
    refused = connection.execute(
        select(outbox.id, outbox.refused).where(outbox.refused.is_not(None)).order_by(outbox.id).limit(20)
    )
    if oldest is not None and oldest.tzinfo is None:  # SQLite keeps no zone; what it keeps is UTC
        oldest = oldest.replace(tzinfo=UTC)
    age = (datetime.now(UTC) - oldest).total_seconds() if oldest else 0.0
    return {
        "waiting": waiting,
        "oldest_s": max(0.0, age),
        "refused": [{"id": row.id, "why": row.refused} for row in refused],
    }
