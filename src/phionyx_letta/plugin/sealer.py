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

from phionyx_letta import __version__
from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.diff import MemoryDiff
from phionyx_letta.envelope import (
    CONTENT_UNKNOWN,
    MemoryConsolidationAudit,
    MemoryMutationContext,
    ParsedJson,
    draft_memory_envelope,
)
from phionyx_letta.errors import PhionyxError, SigningKeyError
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.bulk import among, finite
from phionyx_letta.ledger.lineage import own_keys
from phionyx_letta.ledger.rollback import current_origin
from phionyx_letta.ledger.rollback_sql import own_rollbacks
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.ledger.statements import refuse_retired
from phionyx_letta.ledger.tree import LogWriter, default_origin, stored_checkpoint
from phionyx_letta.ledger.writer import BlockState, LedgerWriter
from phionyx_letta.plugin.forgetting import Forgetting
from phionyx_letta.plugin.outbox import authentic, open_payload
from phionyx_letta.plugin.runtime import PluginKey, logger
from phionyx_letta.settings import Settings
from phionyx_letta.signing import load_verifier

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


@dataclass(frozen=True)
class CheckpointPolicy:
    """When a checkpoint of the log is signed; always in the transaction of a batch, or in one of its own."""

    origin: str
    public_key: str
    """Of the sealer's key: what is stored under the origin counts if this key signed it."""
    every: int = 1
    """Envelopes."""
    seconds: float | None = None
    """The longest a grown log goes without one."""


def checkpoint_policy(key: PluginKey, settings: Settings) -> CheckpointPolicy | None:
    """When this key signs checkpoints; None for a key that cannot, which is not one of Ed25519."""
    if key.public_key is None:
        return None
    origin = settings.log_origin or default_origin(str(key.signer.key_id))
    return CheckpointPolicy(origin, key.public_key, settings.checkpoint_every, settings.checkpoint_seconds)


def trusted_hosts(settings: Settings) -> list[str]:
    """Public keys of the other hosts on the database; one that is none is named in the log and left out."""
    found = []
    for name in settings.trusted_keys.split():
        try:
            found.append(load_verifier(name).public_key_hex)
        except SigningKeyError as error:
            logger.error("phionyx-letta: a key of PHIONYX_LETTA_TRUSTED_KEYS is not used: %s", error)
    return found


@dataclass(frozen=True)
class _Candidate:
    row: Any
    fields: dict[str, Any]
    number: int | None
    """The row's id; None if a sealed row had it already (the sequence was set back)."""


class Sealer:
    """Seals what one key can authenticate. Holds no state of the ledger between two passes but the size last signed."""

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
        self._policy = checkpoints
        self._origin = checkpoints.origin if checkpoints else ""  # of the log since the last accepted rollback
        self._signed_size: int | None = None  # of the log in its newest checkpoint; None: not asked yet
        self._grown_since: float | None = None  # when the log outgrew it
        self._went_back = False  # it was seen shorter than in a checkpoint: signing on would fork it
        self._log: LogWriter | None = None  # the log's end after what this batch wrote
        self._ledger = ledger
        self._key = key
        self._batch = batch
        self._refused_looked_at = float("-inf")
        self._refused_after: int | None = None  # where the look through the refused rows stands; None: at its end

    def due(self) -> bool:
        """Whether refused rows are to be looked at, though nothing else may wait."""
        looking = self._refused_after is not None or time.monotonic() - self._refused_looked_at >= REFUSED_INTERVAL
        return looking or self._overdue()

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
        if report.checkpoint is not None:
            self._signed_size, self._grown_since = report.checkpoint[0].size, None
        return report

    def sign_last(self) -> tuple[Checkpoint, str] | None:
        """Sign a checkpoint of all that is sealed, if the newest does not cover it: at the end of the process.

        Raises:
            LedgerUnavailable: the database does not answer.
        """
        if self._policy is None:
            return None
        with self._ledger.writing(wait=False) as connection:
            if connection is None:  # whoever is sealing signs too
                return None
            return self._issued(connection, self._writer(connection).log, self._policy, every=1)

    def _writer(self, connection: Connection) -> LedgerWriter:
        return LedgerWriter(connection, self._key.signer, known=self._ledger.known_log, trusted=self._trusted)

    def _overdue(self) -> bool:
        seconds, since = self._policy.seconds if self._policy else None, self._grown_since
        return seconds is not None and since is not None and time.monotonic() - since >= seconds

    def _checkpoint(self, connection: Connection) -> tuple[Checkpoint, str] | None:
        """Sign the log as this transaction leaves it, where that is due."""
        overdue = self._overdue()
        if self._policy is None or (self._log is None and not overdue):
            return None
        log = self._log or self._writer(connection).log
        signed = self._issued(connection, log, self._policy, every=1 if overdue else self._policy.every)
        if signed is None and self._grown_since is None:
            self._grown_since = time.monotonic()
        return signed

    def _issued(
        self, connection: Connection, log: LogWriter, policy: CheckpointPolicy, *, every: int
    ) -> tuple[Checkpoint, str] | None:
        origin = current_origin(policy.origin, own_rollbacks(connection, self._key.signer))
        if origin != self._origin:
            logger.warning("phionyx-letta: a rollback was accepted: the log goes on as %r", origin)
            self._origin, self._signed_size, self._went_back = origin, None, False
        if self._signed_size is None:
            stored = stored_checkpoint(connection, origin, own_keys(connection, policy.public_key))
            self._signed_size = stored[0].size if stored else 0
        if not log.whole:
            return None  # it was said why
        if log.size < self._signed_size and not self._went_back:
            self._went_back = True
            logger.error(
                "phionyx-letta: the log had %s envelopes in its last checkpoint and has %s now: the database was set back, or "
                "envelopes were removed. No checkpoint is signed until that is resolved: `phionyx-letta verify` says more; after "
                "a restore that was meant, `phionyx-letta reconcile --accept-rollback`",
                self._signed_size,
                log.size,
            )
        if self._went_back or log.size < self._signed_size + every:
            return None
        return log.issue(self._key.signer, origin)

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
    ) -> list[_Candidate]:
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
            fresh.append(_Candidate(row, fields, None if row.id in used else row.id))
        return fresh

    def _write(self, connection: Connection, candidates: list[_Candidate], report: SealReport) -> int:
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

    def _write_together(self, connection: Connection, candidates: list[_Candidate]) -> int:
        writer = self._writer(connection)
        _preload(writer, candidates)
        forgetting = Forgetting(connection, [(candidate.row.id, candidate.fields) for candidate in candidates])
        for candidate in candidates:
            self._add(writer, candidate, forgetting)
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

    def _add(self, writer: LedgerWriter, candidate: _Candidate, forgetting: Forgetting) -> None:
        fields = candidate.fields
        block = writer.block(fields["block_id"])
        agents = agents_after(fields, block)
        # the nonce is signed: a row sealed twice shows, whatever the columns say
        letta = {**fields["letta"], "nonce": fields["nonce"]}
        diff = _diff(fields["diff"])
        if diff is None:  # attach and detach: the content as it stands at this place in the order
            if block is None or block.after_hash is None:
                letta["content"] = CONTENT_UNKNOWN
                diff = _NOTHING
            else:
                diff = _unchanged(block)
                if block.salt is not None:
                    letta["salt"] = block.salt
        elif block is not None and not block.forgotten and block.after_hash not in (None, diff.before_hash):
            logger.error(
                "phionyx-letta: block %s was last recorded as %s but this write found %s: a change in between was not recorded",
                fields["block_id"],
                block.after_hash,
                diff.before_hash,
            )
        destroyed = forgetting.settle(candidate.row.id, fields, block, agents)
        if destroyed is not None:
            letta["salt_destroyed"] = destroyed
        trace_id = _trace(fields, block)
        chain = writer.chain(trace_id)
        audit = fields.get("audit")
        draft = draft_memory_envelope(
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
                metadata=ParsedJson(letta=letta),
            ),
            previous_hash=chain.head,
            package_version=__version__,
            key_id=self._key.signer.key_id,
            memory_audit_parent_ref=fields.get("parent"),
            position=chain.length,
            timestamp_utc=fields["at"],
            organization_id=fields.get("organization_id"),
        )
        writer.add_draft(draft, outbox_id=candidate.number, nonce=fields["nonce"], agents=agents)


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


def _preload(writer: LedgerWriter, candidates: list[_Candidate]) -> None:
    """Read heads, turns and block states of a whole batch in three statements."""
    writer.load_blocks(candidate.fields["block_id"] for candidate in candidates)
    traces = [_trace(candidate.fields, writer.block(candidate.fields["block_id"])) for candidate in candidates]
    writer.load_chains(traces)
    runs = [candidate.fields["letta"].get("run_id") for candidate in candidates]
    writer.load_runs((trace, run) for trace, run in zip(traces, runs, strict=True) if run)


_EMPTY_HASH = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
_NOTHING = MemoryDiff(_EMPTY_HASH, _EMPTY_HASH, 0, 0, 0, 0, 0)


def _diff(fields: dict[str, Any] | None) -> MemoryDiff | None:
    return MemoryDiff(**fields) if fields is not None else None


def _unchanged(block: BlockState) -> MemoryDiff:
    same, size = str(block.after_hash), block.after_size
    commitment = "sha256" if block.salt is None else "hmac-sha256"
    return MemoryDiff(same, same, size, size, 0, 0, block.chars, commitment=commitment)


def agents_after(fields: dict[str, Any], block: BlockState | None) -> Sequence[str] | None:
    """Who has the block after this mutation; None if that cannot be known."""
    event = fields["event"]
    if event in ("baseline", "adopt", "restore"):
        return sorted(fields.get("agents", []))
    if fields["kind"] == "delete":
        return []
    agents = block.agents if block else []
    if agents is None:
        return None
    if event == "attach":
        return sorted({*agents, fields["attached_agent"]})
    if event == "detach":
        return [agent for agent in agents if agent != fields["attached_agent"]]
    return agents


def _trace(fields: dict[str, Any], block: BlockState | None) -> str:
    """The chain: the agent it is attributed to; else the one agent that has the block; else the block (decision 3)."""
    owner = fields.get("agent_id") or fields.get("attached_agent")
    if owner:
        return str(owner)
    agents = agents_after(fields, block)
    return agents[0] if agents and len(agents) == 1 else str(fields["block_id"])


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
