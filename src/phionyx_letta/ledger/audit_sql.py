"""Verifying a whole SQL ledger: every chain, the linkage of blocks across chains, and what the database says beside the envelopes.

The dimension `database` is about the latter: columns that are copies of what an envelope says, heads and block states, and the
sealing order without holes. Whoever edits the database can edit these too: it adds to the evidence of the envelopes, no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from sqlalchemy import Connection, Row, func, select
from sqlalchemy.exc import SQLAlchemyError

from phionyx_letta._lines import read_envelope
from phionyx_letta._shape import find_fault
from phionyx_letta.decisions import Reviewers
from phionyx_letta.envelope import CONTENT_UNKNOWN
from phionyx_letta.errors import LedgerUnavailable
from phionyx_letta.keys import Keyring, statements_in
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.audit import SEALED_TWICE, Audit, AuditReport, Progress
from phionyx_letta.ledger.audit_log import EpochAudit, LogAudit, Outside
from phionyx_letta.ledger.lineage import stored_statements
from phionyx_letta.ledger.log.nodes import grow
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.merkle import Frontier, Node, leaf_hash
from phionyx_letta.signing import Verifier
from phionyx_letta.verification import BlockHead

__all__ = ["snapshot", "verify_ledger"]

DATABASE = "database"
_BATCH = 500


class LiveFeed(Protocol):
    """What compares the memory that is there with what was recorded of it; see `plugin.live.LiveAudit`."""

    def feed(self, envelope: dict[str, Any], /) -> None:
        """Take the next envelope of the right shape."""
        ...

    def finish(self, connection: Connection, audit: Audit, /) -> None:
        """Say what was found, in the snapshot of the audit."""
        ...


def verify_ledger(
    ledger: SqlLedger,
    *,
    verifier: Verifier | None,
    trace_id: str | None = None,
    outside: Outside | None = None,
    live: LiveFeed | None = None,
    reviewers: Reviewers | None = None,
    progress: Progress | None = None,
) -> AuditReport:
    """Verify everything in a ledger, in sealing order and in one snapshot, or one chain of it.

    Args:
        ledger: open for reading.
        verifier: the trusted key or keys; without one nothing is valid.
        trace_id: only this chain; linkage with other chains' writes is then not measured, nor is the sealing order.
        outside: checkpoints of the log, from outside the database; a whole ledger is compared with them.
        reviewers: whose decisions about patches count.
        live: compares what is there now with the newest envelopes; a whole ledger only.
        progress: called every few hundred envelopes with how many were checked.

    Raises:
        LedgerUnavailable: the database does not answer.
    """
    whole = trace_id is None
    with snapshot(ledger) as connection:
        if isinstance(verifier, Keyring):
            verifier = verifier.extended(statements_in(stored_statements(connection)))
        audit = Audit(verifier, block_heads={} if whole else None, nonces_elsewhere=whole, reviewers=reviewers)
        audit.measured(DATABASE)
        log = LogAudit(audit, outside) if outside is not None and whole else None
        epochs = EpochAudit(audit, verifier) if isinstance(verifier, Keyring) and whole else None
        tree = _StoredTree(audit) if whole else None
        last_of_block, unknown = _check_rows(audit, connection, trace_id, tree, log, epochs, live, progress)
        if epochs is not None:
            epochs.finish()
        if log is not None:
            log.finish()
        if live is not None and trace_id is None:
            live.finish(connection, audit)
        if tree is not None:
            tree.finish(connection)
        _check_nonces(audit, connection)
        _check_heads(audit, connection, trace_id)
        if audit.block_heads is not None:
            _check_blocks(audit, connection, audit.block_heads, last_of_block, unknown)
    return audit.report()


@contextmanager
def snapshot(ledger: SqlLedger) -> Iterator[Connection]:
    """Open one transaction that sees one state, whatever is sealed meanwhile; rows come a few hundred at a time.

    Raises:
        LedgerUnavailable: the database does not answer.
    """
    options: dict[str, Any] = {"stream_results": True, "yield_per": _BATCH}
    if ledger.engine.dialect.name == "postgresql":
        options["isolation_level"] = "REPEATABLE READ"
    try:
        with ledger.engine.connect().execution_options(**options) as connection:
            yield connection
    except SQLAlchemyError as error:
        where = ledger.url.set(query={}).render_as_string(hide_password=True)
        raise LedgerUnavailable(
            f"the ledger at {where} cannot be read: {type(error).__name__}",
            "check that the database answers and has the ledger's tables",
        ) from error


def _check_rows(
    audit: Audit,
    connection: Connection,
    trace_id: str | None,
    tree: _StoredTree | None,
    log: LogAudit | None,
    epochs: EpochAudit | None,
    live: LiveFeed | None,
    progress: Progress | None,
) -> tuple[dict[str, int], set[str]]:
    """Feed every envelope; return the sealing place of each block's last one, and the blocks whose content that one left open."""
    columns = tables.envelope.c
    query = select(tables.envelope).order_by(columns.seq)
    if trace_id is not None:
        query = select(tables.envelope).where(columns.trace_id == trace_id).order_by(columns.position)
    last_of_block: dict[str, int] = {}
    unknown: set[str] = set()
    expected_seq = 0
    for row in connection.execute(query):
        if trace_id is None and row.seq != expected_seq:
            _report_hole(audit, row, expected_seq)
        expected_seq = row.seq + 1
        envelope, hashed = _read(audit, row)
        _check_columns(audit, row, envelope)
        audit.feed(row.trace_id, envelope, hashed=hashed, place=row.seq if epochs is not None else None)
        if epochs is not None:
            epochs.feed(row.body if isinstance(row.body, str) else "")
        if tree is not None:
            tree.feed(row)
        if log is not None:
            log.feed(row.body if isinstance(row.body, str) else "")
        if live is not None and isinstance(envelope, dict) and find_fault(envelope) is None:
            live.feed(envelope)
        last_of_block[row.block_id] = row.seq
        (unknown.add if _content_unknown(envelope) else unknown.discard)(row.block_id)
        if progress and audit.seen % _BATCH == 0:
            progress(audit.seen)
    return last_of_block, unknown


class _StoredTree:
    """The hashes of the log that are stored, from which proofs are made and which guarded reads look at."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._frontier = Frontier()
        self._kept: dict[Node, bytes] = {}
        self._hole = False

    def feed(self, row: Row[Any]) -> None:
        """Take the next row of the sealing order."""
        leaf = leaf_hash(row.body.encode("utf-8", "surrogatepass") if isinstance(row.body, str) else b"")
        if row.leaf != leaf:
            message = "the column leaf is not the hash of the envelope: parts of this ledger cannot be shown"
            _fail_row(self._audit, row, message, leaf.hex(), _hex(row.leaf))
        self._hole = self._hole or row.seq != self._frontier.size
        if not self._hole:
            self._kept.update(grow(self._frontier, [leaf]))

    def finish(self, connection: Connection) -> None:
        """Compare the kept subtrees; behind a hole nothing can be said of them."""
        if self._hole:
            return
        for row in connection.execute(select(tables.log_node)):
            expected = self._kept.pop((row.level, row.place), None)
            if row.hash != expected:
                self._fail(row.level, row.place, expected, row.hash)
        for (level, place), expected in self._kept.items():
            self._fail(level, place, expected, None)

    def _fail(self, level: int, place: int, expected: bytes | None, found: object) -> None:
        message = f"the stored hash of subtree {place} of level {level} is not that of its envelopes"
        self._audit.fail(DATABASE, message, expected=_hex(expected), found=_hex(found))


def _hex(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else "nothing" if value is None else repr(value)


def _content_unknown(envelope: object) -> bool:
    try:
        return bool(envelope["subject"]["metadata"]["letta"]["content"] == CONTENT_UNKNOWN)  # type: ignore[index]
    except (TypeError, KeyError):
        return False


def _check_nonces(audit: Audit, connection: Connection) -> None:
    """Each column was compared with its envelope; the database is asked for repeats, whether or not its index stands."""
    nonce = tables.envelope.c.nonce
    repeated = select(nonce).where(nonce.is_not(None)).group_by(nonce).having(func.count() > 1).limit(10)
    for value in connection.execute(repeated).scalars():
        audit.fail("continuity", SEALED_TWICE, found=value)


def _report_hole(audit: Audit, row: Row[Any], expected: int) -> None:
    last = row.seq - 1
    which = f"envelope {expected} is" if last == expected else f"envelopes {expected} to {last} are"
    audit.fail(DATABASE, f"{which} missing in the sealing order", expected=f"seq {expected}", found=f"seq {row.seq}")


def _read(audit: Audit, row: Row[Any]) -> tuple[object, bool]:
    try:
        return read_envelope(row.body, signature_checked=audit.verifier is not None)
    except (ValueError, TypeError, AttributeError, RecursionError):
        _fail_row(audit, row, "the stored envelope is not JSON any more, or repeats a key", None, None)
        return None, False


def _check_columns(audit: Audit, row: Row[Any], envelope: object) -> None:
    """The columns are copies: queries use them, so they must say what the envelope says."""
    if find_fault(envelope) is not None or not isinstance(envelope, dict):
        return  # the chain's own check names it
    subject, mutation, integrity = envelope["subject"], envelope["mutation"], envelope["integrity"]
    letta = subject["metadata"].get("letta")
    letta = letta if isinstance(letta, dict) else {}
    said = {
        "trace_id": subject.get("trace_id", row.trace_id),
        "position": subject.get("position", row.position),
        "current_hash": integrity["current"],
        "turn_index": subject["turn_index"],
        "at": subject["timestamp_utc"],
        "block_id": mutation["block_id"],
        "block_label": mutation["block_label"],
        "kind": mutation["mutation_kind"],
        "event": letta.get("event"),
        "agent_id": letta.get("agent_id"),
        "run_id": letta.get("run_id"),
        "nonce": letta.get("nonce"),
    }
    for name, value in said.items():
        stored = getattr(row, name)
        if stored != value:
            _fail_row(audit, row, f"the column {name} does not say what the envelope says", value, stored)


def _fail_row(audit: Audit, row: Row[Any], message: str, expected: object, found: object) -> None:
    audit.fail(
        DATABASE,
        message,
        trace_id=row.trace_id,
        position=row.position,
        block_id=row.block_id,
        expected=expected,
        found="nothing" if found is None and expected is not None else found,
    )


def _check_heads(audit: Audit, connection: Connection, trace_id: str | None) -> None:
    query = select(tables.chain)
    if trace_id is not None:
        query = query.where(tables.chain.c.trace_id == trace_id)
    known = dict(audit.chains())
    for row in connection.execute(query):
        chain = known.pop(row.trace_id, None)
        if chain is None:
            message = f"the chain has {row.length} envelopes by its head, and none is there"
            audit.fail(DATABASE, message, trace_id=row.trace_id, position=0, expected=row.head, found="nothing")
            continue
        if chain.seen != row.length:
            message = "the number of envelopes is not what the chain's head says: its end was cut or added to"
            position = min(chain.seen, row.length)
            audit.fail(
                DATABASE, message, trace_id=row.trace_id, position=position, expected=row.length, found=chain.seen
            )
        elif chain.head != row.head:
            message = "the chain does not end in the recorded head"
            audit.fail(
                DATABASE,
                message,
                trace_id=row.trace_id,
                position=chain.seen - 1,
                expected=row.head,
                found=chain.head or "nothing",
            )
    for trace, chain in known.items():
        audit.fail(
            DATABASE, "the chain's head is not recorded", trace_id=trace, position=chain.seen - 1, expected=chain.head
        )


def _check_blocks(
    audit: Audit, connection: Connection, heads: dict[str, BlockHead], last: dict[str, int], unknown: set[str]
) -> None:
    heads = dict(heads)
    for row in connection.execute(select(tables.block)):
        state = heads.pop(row.block_id, None)
        if row.after_hash is None and row.block_id in unknown:
            continue
        if state is None:
            audit.fail(
                DATABASE,
                "a state is recorded for this block, but no envelope",
                block_id=row.block_id,
                expected=row.after_hash,
            )
        elif state.after_hash != row.after_hash:
            message = "the recorded state of this block is not what its last envelope says"
            audit.fail(DATABASE, message, block_id=row.block_id, expected=state.after_hash, found=row.after_hash)
        elif last.get(row.block_id, row.seq) != row.seq:
            message = "the recorded last envelope of this block is another one"
            audit.fail(
                DATABASE, message, block_id=row.block_id, expected=f"seq {last[row.block_id]}", found=f"seq {row.seq}"
            )
    for block_id, state in heads.items():
        audit.fail(DATABASE, "no state is recorded for this block", block_id=block_id, expected=state.after_hash)
