"""Appending to the SQL ledger inside one transaction: heads, turns and block states are read once and written once.

The caller holds the ledger's lock (``SqlLedger.writing``); this module does no locking and no signing of its own.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from phionyx_letta._canonical import JSON_ERRORS
from phionyx_letta.envelope import CONTENT_UNKNOWN, GENESIS_HASH, DraftEnvelope, Signs, canonical_json, envelope_line
from phionyx_letta.errors import InvalidMutation, StaleHeadError
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.bulk import among, insert_rows, upsert_rows
from phionyx_letta.ledger.salts import hand_over_salts
from phionyx_letta.ledger.tree import KnownLog, LogWriter, derived_key
from phionyx_letta.signing import sign_all

_STATE_PURPOSE = "phionyx-letta/block-state/v1"


@dataclass
class ChainState:
    """Where a chain stands: its head's hash, how many envelopes and how many turns it has."""

    head: str = GENESIS_HASH
    length: int = 0
    turns: int = 0


@dataclass
class BlockState:
    """What the ledger last recorded of a block."""

    after_hash: str | None  # None: nothing that can be relied on is recorded of its content
    after_size: int
    chars: int
    label: str
    agents: Sequence[str] | None  # None: not known
    seq: int
    salt: str | None = None  # name of the one its hash was made with
    forgotten: bool = False  # that salt was destroyed


class LedgerWriter:
    """Collects envelopes and writes them, with the heads they lead to, in a handful of statements."""

    def __init__(
        self,
        connection: Connection,
        signer: Signs | None = None,
        *,
        known: KnownLog | None = None,
        trusted: Sequence[str] = (),
    ) -> None:
        """Read where the ledger ends.

        Args:
            connection: in a transaction that holds the ledger's lock.
            signer: signs drafts, and authenticates the states of blocks: who can edit the database can edit those too,
                and what an attach or detach repeats of them is signed.
            known: the log as this process left it; see ``LogWriter``.
            trusted: public keys of other hosts on the same database.
        """
        self._connection = connection
        self._signer = signer
        self._state_key = _state_key(signer)
        self._chains: dict[str, ChainState] = {}
        self._blocks: dict[str, BlockState | None] = {}
        self._runs: dict[tuple[str, str], int | None] = {}
        self._changed_chains: set[str] = set()
        self._changed_blocks: set[str] = set()
        self._rows: list[dict[str, Any]] = []
        self._drafts: list[tuple[dict[str, Any], DraftEnvelope]] = []
        last = connection.execute(select(func.max(tables.envelope.c.seq))).scalar()
        self._next_seq: int = 0 if last is None else last + 1
        self.log = LogWriter(connection, signer, self._next_seq, known, trusted)

    def load_blocks(self, block_ids: Iterable[str]) -> None:
        """Read the states of these blocks in one statement."""
        wanted = {block_id for block_id in block_ids if block_id not in self._blocks}
        if not wanted:
            return
        self._blocks.update(dict.fromkeys(wanted))
        rows = self._connection.execute(
            select(tables.block).where(among(self._connection, tables.block.c.block_id, wanted))
        )
        for row in rows:
            self._blocks[row.block_id] = _state(self._state_key, row)

    def load_chains(self, trace_ids: Iterable[str]) -> None:
        """Read the heads of these chains in one statement."""
        wanted = {trace_id for trace_id in trace_ids if trace_id not in self._chains}
        if not wanted:
            return
        self._chains.update({trace_id: ChainState() for trace_id in wanted})
        rows = self._connection.execute(
            select(tables.chain).where(among(self._connection, tables.chain.c.trace_id, wanted))
        )
        for row in rows:
            self._chains[row.trace_id] = ChainState(row.head, row.length, row.turns)

    def load_runs(self, runs: Iterable[tuple[str, str]]) -> None:
        """Read which of these (trace, run) pairs have a turn already, in one statement."""
        wanted = {pair for pair in runs if pair not in self._runs}
        if not wanted:
            return
        self._runs.update(dict.fromkeys(wanted))
        columns = tables.envelope.c
        found = self._connection.execute(
            select(columns.trace_id, columns.run_id, func.min(columns.turn_index))
            .where(
                among(self._connection, columns.run_id, {run for _, run in wanted}),
                among(self._connection, columns.trace_id, {trace for trace, _ in wanted}),
            )
            .group_by(columns.trace_id, columns.run_id)
        )
        for trace_id, run_id, turn in found:
            self._runs[trace_id, run_id] = turn

    def chain(self, trace_id: str) -> ChainState:
        """Where this chain stands, with what was added in this transaction."""
        if trace_id not in self._chains:
            self.load_chains([trace_id])
        return self._chains[trace_id]

    def block(self, block_id: str) -> BlockState | None:
        """What is recorded of this block, with what was added in this transaction; None if nothing."""
        if block_id not in self._blocks:
            self.load_blocks([block_id])
        return self._blocks[block_id]

    def turn(self, trace_id: str, run_id: str | None) -> int:
        """The 0-based index of the run within the chain (design, decision 3); a change outside any run is its own turn."""
        chain = self.chain(trace_id)
        if run_id is None:
            return chain.turns
        if (trace_id, run_id) not in self._runs:
            self.load_runs([(trace_id, run_id)])
        known = self._runs[trace_id, run_id]
        return chain.turns if known is None else known

    def add(self, envelope: Mapping[str, Any], *, trace_id: str | None = None) -> None:
        """Put one finished envelope at the end of its chain.

        Args:
            envelope: built with this chain's head and length.
            trace_id: the chain; ``subject.trace_id`` by default.

        Raises:
            StaleHeadError: the envelope does not continue the chain.
            InvalidMutation: the envelope says it belongs to another chain.
        """
        integrity = envelope["integrity"]
        claimed = envelope["subject"].get("trace_id", trace_id)
        trace_id = claimed if trace_id is None else trace_id
        if trace_id is None or claimed != trace_id:
            raise InvalidMutation(
                f"the envelope belongs to the chain {claimed!r}, not to {trace_id!r}",
                remedy="append it under the trace id it was built with",
            )
        self._put(trace_id, envelope, integrity["previous"], integrity["current"], envelope_line(envelope))

    def add_draft(
        self,
        draft: DraftEnvelope,
        *,
        outbox_id: int | None = None,
        nonce: str | None = None,
        agents: Sequence[str] | None = None,
    ) -> None:
        """Put one drafted envelope at the end of its chain; ``flush`` signs it.

        Args:
            draft: made with this chain's head and length.
            outbox_id: row it was sealed from.
            nonce: of that row.
            agents: the agents the block is attached to afterwards; None if that is not known.

        Raises:
            StaleHeadError: the envelope does not continue the chain.
        """
        trace_id = draft.record["subject"]["trace_id"]
        row = self._put(trace_id, draft.record, draft.previous, draft.current, "")
        row["outbox_id"], row["nonce"] = outbox_id, nonce
        self._drafts.append((row, draft))
        self._blocks[row["block_id"]].agents = agents  # type: ignore[union-attr]

    def _put(self, trace_id: str, record: Mapping[str, Any], previous: str, current: str, body: str) -> dict[str, Any]:
        subject, mutation = record["subject"], record["mutation"]
        chain = self.chain(trace_id)
        if previous != chain.head:
            raise StaleHeadError(
                f"the envelope continues {previous}, but the chain {trace_id!r} ends with {chain.head}",
                remedy="read head() again and build the envelope on it, or let emit() do both under the store's lock",
            )
        letta = subject["metadata"].get("letta")
        letta = letta if isinstance(letta, dict) else {}  # a library user's own metadata may use the name
        run_id = letta.get("run_id")
        row = {
            "seq": self._next_seq,
            "trace_id": trace_id,
            "position": chain.length,
            "current_hash": current,
            "outbox_id": None,
            "nonce": None,
            "turn_index": subject["turn_index"],
            "at": subject["timestamp_utc"],
            "block_id": mutation["block_id"],
            "block_label": mutation["block_label"],
            "kind": mutation["mutation_kind"],
            "event": letta.get("event"),
            "agent_id": letta.get("agent_id"),
            "run_id": run_id,
            "body": body,
        }
        self._rows.append(row)
        chain.head = current
        chain.length += 1
        chain.turns = max(chain.turns, subject["turn_index"] + 1)
        self._changed_chains.add(trace_id)
        if run_id is not None:
            self._runs[trace_id, run_id] = subject["turn_index"]
        self._note_block(mutation, letta)
        self._next_seq += 1
        return row

    def _note_block(self, mutation: Mapping[str, Any], letta: Mapping[str, Any]) -> None:
        block_id, diff = mutation["block_id"], mutation["diff"]
        known = self.block(block_id)
        salt = letta.get("salt")
        salt = salt if isinstance(salt, str) else None
        unknown = letta.get("content") == CONTENT_UNKNOWN
        still_forgotten = known is not None and known.forgotten and known.salt == salt
        self._blocks[block_id] = BlockState(
            None if unknown else diff["after_hash"],
            diff["after_size_bytes"],
            diff["added_chars"] + diff["unchanged_chars"],
            mutation["block_label"],
            known.agents if known else None,
            self._next_seq,
            None if unknown else salt,
            salt is not None and (still_forgotten or letta.get("salt_destroyed") == salt),
        )
        self._changed_blocks.add(block_id)

    def flush(self) -> int:
        """Sign the drafts and write all that was added; the caller commits.

        Returns:
            How many envelopes were written.
        """
        if not self._rows:
            return 0
        if self._drafts:  # in a burst: in turn with JSON each finds the processor's cache cold
            assert self._signer is not None
            signatures = sign_all(self._signer, [draft.current for _, draft in self._drafts])
            for (row, draft), signature in zip(self._drafts, signatures, strict=True):
                row["body"] = draft.line(signature)
        heads = [(row["trace_id"], row["current_hash"]) for row in self._rows]
        for row, leaf in zip(self._rows, self.log.append([row["body"] for row in self._rows], heads), strict=True):
            row["leaf"] = leaf
        insert_rows(self._connection, tables.envelope, self._rows)
        upsert_rows(
            self._connection,
            tables.chain,
            "trace_id",
            [
                {"trace_id": trace_id, "head": state.head, "length": state.length, "turns": state.turns}
                for trace_id in sorted(self._changed_chains)
                for state in [self._chains[trace_id]]
            ],
        )
        upsert_rows(
            self._connection,
            tables.block,
            "block_id",
            [self._block_row(block_id) for block_id in sorted(self._changed_blocks)],
        )
        self.log.flush()
        written = len(self._rows)
        self._rows, self._drafts = [], []
        self._changed_chains.clear()
        self._changed_blocks.clear()
        return written

    def hand_over(self, signer: Signs) -> None:
        """Authenticate the states of blocks and the end of the log, and encrypt the salts, for another key; what is not this key's
        is left."""
        key = _state_key(signer)
        rows = []
        for row in self._connection.execute(select(tables.block)).all():
            if _authentic(self._state_key, row):
                values = {name: value for name, value in row._mapping.items() if name != "mac"}
                rows.append({**values, "mac": _mac_of(key, values)})
        upsert_rows(self._connection, tables.block, "block_id", rows)
        hand_over_salts(self._connection, self._signer, signer)
        self.log.hand_over(signer)

    def _block_row(self, block_id: str) -> dict[str, Any]:
        state = self._blocks[block_id]
        assert state is not None
        row = {
            "block_id": block_id,
            "after_hash": state.after_hash,
            "after_size": state.after_size,
            "chars": state.chars,
            "label": state.label,
            "agents": json.dumps(state.agents),
            "seq": state.seq,
            "salt": state.salt,
            "forgotten": state.forgotten,
        }
        return {**row, "mac": _mac_of(self._state_key, row)}


def read_block_states(
    connection: Connection, signer: Signs, block_ids: Iterable[str] | None = None
) -> dict[str, BlockState]:
    """What the ledger last recorded of these blocks, or of all; of a row that is not this key's only that there is one."""
    query = select(tables.block)
    if block_ids is not None:
        query = query.where(among(connection, tables.block.c.block_id, set(block_ids)))
    key = _state_key(signer)
    return {row.block_id: _state(key, row) for row in connection.execute(query)}


def _authentic(key: bytes | None, row: Any) -> bool:
    """Whether this key wrote the row."""
    values = dict(row._mapping)
    mac = values.pop("mac")
    try:
        return isinstance(mac, str) and mac.isascii() and hmac.compare_digest(_mac_of(key, values) or "", mac)
    except JSON_ERRORS:  # a column holds something else than what was put there
        return False


def _state(key: bytes | None, row: Any) -> BlockState:
    """What a row says, if this key wrote it; else nothing but its place is known."""
    if _authentic(key, row):
        agents = json.loads(row.agents)
        return BlockState(
            row.after_hash, row.after_size, row.chars, row.label, agents, row.seq, row.salt, row.forgotten
        )
    if key is not None:
        logging.getLogger("phionyx_letta").error(
            "phionyx-letta: the recorded state of block %r is not this key's: it was changed in the database, or a host with"
            " another key wrote it; it is not used",
            row.block_id,
        )
    return BlockState(None, 0, 0, "", None, -1)


def _mac_of(key: bytes | None, row: Mapping[str, Any]) -> str | None:
    return None if key is None else hmac.digest(key, canonical_json(row).encode("ascii"), "sha256").hex()


def _state_key(signer: Signs | None) -> bytes | None:
    return derived_key(signer, _STATE_PURPOSE)
