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
from typing import Any

from sqlalchemy import Connection, delete, func, select, update

from phionyx_letta import __version__
from phionyx_letta.diff import MemoryDiff
from phionyx_letta.envelope import MemoryConsolidationAudit, MemoryMutationContext, build_memory_envelope
from phionyx_letta.errors import PhionyxError
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.ledger.writer import LedgerWriter
from phionyx_letta.plugin.outbox import authentic, open_payload
from phionyx_letta.plugin.runtime import PluginKey, logger

#: A row that another host's key authenticates waits for that host while it was seen this recently; then it is passed over.
FOREIGN_KEY_PATIENCE = timedelta(seconds=30)
#: How often refused rows are looked at again, s: an attacker may have marked a genuine one.
REFUSED_INTERVAL = 30.0


@dataclass
class SealReport:
    """What one pass did."""

    sealed: int = 0
    refused: int = 0
    waiting: int = 0
    busy: bool = False
    refusals: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Candidate:
    row_id: int
    fields: dict[str, Any]


class Sealer:
    """Seals what one key can authenticate. Holds no state of the ledger between two passes."""

    def __init__(self, ledger: SqlLedger, key: PluginKey, *, batch: int = 100) -> None:
        """Seal into ``ledger`` with ``key``, at most ``batch`` rows in a transaction."""
        self._ledger = ledger
        self._key = key
        self._batch = batch
        self._refused_looked_at = float("-inf")

    def seal_pending(self) -> SealReport:
        """Seal until nothing is left that this key can seal, or another sealer is at work."""
        total = SealReport()
        while True:
            report = self.seal_batch()
            total.sealed += report.sealed
            total.refused += report.refused
            total.refusals += report.refusals
            total.waiting, total.busy = report.waiting, report.busy
            if report.sealed + report.refused < self._batch or report.busy:
                return total

    def seal_batch(self) -> SealReport:
        """Seal one batch in one transaction.

        Raises:
            LedgerUnavailable: the database does not answer; nothing was changed.
        """
        with self._ledger.writing(wait=False) as connection:
            if connection is None:
                return SealReport(busy=True)
            if time.monotonic() - self._refused_looked_at > REFUSED_INTERVAL:
                self._refused_looked_at = time.monotonic()
                self._reconsider_refused(connection)
            rows = self._rows(connection, refused=False)
            return self._seal(connection, rows) if rows else SealReport()

    def _rows(self, connection: Connection, *, refused: bool) -> Sequence[Any]:
        outbox = tables.outbox.c
        chosen = outbox.refused.is_not(None) if refused else outbox.refused.is_(None)
        query = select(outbox.id, outbox.payload, outbox.mac).where(chosen).order_by(outbox.id).limit(self._batch)
        return connection.execute(query).all()

    def _seal(self, connection: Connection, rows: Sequence[Any]) -> SealReport:
        report = SealReport()
        candidates: list[_Candidate] = []
        for row in rows:
            fields = open_payload(row.payload)
            if fields is not None and fields["key_id"] != self._key.outbox.key_id and self._alive(connection, fields):
                report.waiting = 1  # rows behind it wait too: a block's history keeps its order
                break
            reason = self._reason_to_refuse(row, fields)
            if reason is None:
                assert fields is not None
                candidates.append(_Candidate(row.id, fields))
            else:
                self._refuse(connection, row.id, reason, report)
        candidates = self._unsealed(connection, candidates, report)
        if candidates:
            report.sealed = self._write(connection, candidates, report)
        return report

    def _reason_to_refuse(self, row: Any, fields: dict[str, Any] | None) -> str | None:
        if fields is None:
            return "the payload is not one this version of the plugin writes"
        if fields["key_id"] != self._key.outbox.key_id:
            return f"it is authenticated with the key {fields['key_id']!r}, which no running worker has"
        if not authentic(self._key.outbox, row.payload, row.mac):
            return "its MAC does not match: the row was forged or changed in the database"
        return None

    @staticmethod
    def _alive(connection: Connection, fields: dict[str, Any]) -> bool:
        worker = tables.worker.c
        recent = datetime.now(UTC) - FOREIGN_KEY_PATIENCE
        found = select(worker.worker_id).where(worker.key_id == str(fields["key_id"]), worker.seen_at > recent).limit(1)
        return connection.execute(found).first() is not None

    @staticmethod
    def _refuse(connection: Connection, row_id: int, reason: str, report: SealReport) -> None:
        connection.execute(update(tables.outbox).where(tables.outbox.c.id == row_id).values(refused=reason))
        report.refused += 1
        report.refusals.append(f"outbox row {row_id} was not sealed: {reason}")
        logger.error("phionyx-letta: %s", report.refusals[-1])

    def _unsealed(self, connection: Connection, candidates: list[_Candidate], report: SealReport) -> list[_Candidate]:
        """Without the copies of rows that are sealed already, in the ledger or in this batch."""
        nonces = [candidate.fields["nonce"] for candidate in candidates]
        envelope = tables.envelope.c
        seen = set(connection.execute(select(envelope.nonce).where(envelope.nonce.in_(nonces))).scalars())
        fresh = []
        for candidate in candidates:
            if candidate.fields["nonce"] in seen:
                self._refuse(connection, candidate.row_id, "it is a copy of a row that was sealed before", report)
            else:
                seen.add(candidate.fields["nonce"])
                fresh.append(candidate)
        return fresh

    def _reconsider_refused(self, connection: Connection) -> None:
        for row in self._rows(connection, refused=True):
            fields = open_payload(row.payload)
            if self._reason_to_refuse(row, fields) is None and fields is not None:
                sealed = select(tables.envelope.c.seq).where(tables.envelope.c.nonce == fields["nonce"])
                if connection.execute(sealed).first() is None:
                    connection.execute(update(tables.outbox).where(tables.outbox.c.id == row.id).values(refused=None))
                    logger.warning(
                        "phionyx-letta: outbox row %s was marked refused but is genuine; it is sealed now", row.id
                    )

    def _write(self, connection: Connection, candidates: list[_Candidate], report: SealReport) -> int:
        writer = LedgerWriter(connection)
        _preload(writer, candidates)
        sealed = []
        for candidate in candidates:
            try:
                self._add(writer, candidate)
            except PhionyxError as error:  # one row that cannot be built must not hold up the others
                self._refuse(connection, candidate.row_id, f"no envelope can be built from it: {error}", report)
            else:
                sealed.append(candidate.row_id)
        written = writer.flush()
        connection.execute(delete(tables.outbox).where(tables.outbox.c.id.in_(sealed)))
        return written

    def _add(self, writer: LedgerWriter, candidate: _Candidate) -> None:
        fields = candidate.fields
        block = writer.block(fields["block_id"])
        agents = _agents_after(fields, block.agents if block else [])
        letta = dict(fields["letta"])
        diff = _diff(fields["diff"])
        if diff is None:  # attach and detach: the content as it stands at this place in the order
            if block is None:
                letta["content"] = "not recorded: the block is older than the plugin and has no baseline"
            diff = _unchanged(block.after_hash, block.after_size, block.chars) if block else _NOTHING
        elif block is not None and block.after_hash != diff.before_hash:
            logger.error(
                "phionyx-letta: block %s was last recorded as %s but this write found %s: a change in between was not recorded",
                fields["block_id"],
                block.after_hash,
                diff.before_hash,
            )
        trace_id = _trace(fields, agents)
        chain = writer.chain(trace_id)
        audit = fields.get("audit")
        envelope = build_memory_envelope(
            MemoryMutationContext(
                trace_id=trace_id,
                turn_index=writer.turn(trace_id, letta.get("run_id")),
                producer=fields["producer"],
                block_id=fields["block_id"],
                block_label=fields["block_label"],
                mutation_kind=fields["kind"],
                diff=diff,
                consolidation_audit=MemoryConsolidationAudit(**audit) if audit else None,
                forgetting_reason=fields.get("reason"),
                metadata={"letta": letta},
            ),
            previous_hash=chain.head,
            package_version=__version__,
            signer=self._key.signer,
            memory_audit_parent_ref=fields.get("parent"),
            position=chain.length,
            timestamp_utc=fields["at"],
            organization_id=fields.get("organization_id"),
        )
        writer.add(envelope, trace_id=trace_id, outbox_id=candidate.row_id, nonce=fields["nonce"], agents=agents)


def _preload(writer: LedgerWriter, candidates: list[_Candidate]) -> None:
    """Read heads, turns and block states of a whole batch in three statements."""
    writer.load_blocks(candidate.fields["block_id"] for candidate in candidates)
    traces = []
    for candidate in candidates:
        block = writer.block(candidate.fields["block_id"])
        traces.append(_trace(candidate.fields, _agents_after(candidate.fields, block.agents if block else [])))
    writer.load_chains(traces)
    runs = [candidate.fields["letta"].get("run_id") for candidate in candidates]
    writer.load_runs((trace, run) for trace, run in zip(traces, runs, strict=True) if run)


_EMPTY_HASH = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
_NOTHING = MemoryDiff(_EMPTY_HASH, _EMPTY_HASH, 0, 0, 0, 0, 0)


def _diff(fields: dict[str, Any] | None) -> MemoryDiff | None:
    return MemoryDiff(**fields) if fields is not None else None


def _unchanged(content_hash: str, size: int, chars: int) -> MemoryDiff:
    return MemoryDiff(content_hash, content_hash, size, size, 0, 0, chars)


def _agents_after(fields: dict[str, Any], agents: list[str]) -> list[str]:
    """Who has the block after this mutation."""
    if fields["event"] == "baseline":
        return sorted(fields.get("agents", []))
    if fields["event"] == "attach":
        return sorted({*agents, fields["attached_agent"]})
    if fields["event"] == "detach":
        return [agent for agent in agents if agent != fields["attached_agent"]]
    return [] if fields["event"] == "delete" else agents


def _trace(fields: dict[str, Any], agents: list[str]) -> str:
    """The chain: the agent it is attributed to; else the one agent that has the block; else the block (decision 3)."""
    owner = fields.get("agent_id") or fields.get("attached_agent")
    if owner:
        return str(owner)
    return agents[0] if len(agents) == 1 else str(fields["block_id"])


def pending(connection: Connection) -> dict[str, Any]:
    """How the outbox stands: rows that wait and the age of the oldest in seconds, rows that were refused and why."""
    outbox = tables.outbox.c
    waiting, oldest = connection.execute(
        select(func.count(), func.min(outbox.created_at)).where(outbox.refused.is_(None))
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
