"""Appending to the SQL ledger inside one transaction: heads, turns and block states are read once and written once.

The caller holds the ledger's lock (``SqlLedger.writing``); this module does no locking and no signing of its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, func, select

from phionyx_letta.envelope import CONTENT_UNKNOWN, GENESIS_HASH, envelope_line
from phionyx_letta.errors import InvalidMutation, StaleHeadError
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.bulk import among, insert_rows, upsert_rows


@dataclass
class ChainState:
    """Where a chain stands: its head's hash, how many envelopes and how many turns it has."""

    head: str = GENESIS_HASH
    length: int = 0
    turns: int = 0


@dataclass
class BlockState:
    """What the ledger last recorded of a block."""

    after_hash: str | None  # None: only attachments of the block are recorded, nothing of its content
    after_size: int
    chars: int
    label: str
    agents: list[str] = field(default_factory=list)
    seq: int = -1


class LedgerWriter:
    """Collects envelopes and writes them, with the heads they lead to, in a handful of statements."""

    def __init__(self, connection: Connection) -> None:
        """Read where the ledger ends.

        Args:
            connection: in a transaction that holds the ledger's lock.
        """
        self._connection = connection
        self._chains: dict[str, ChainState] = {}
        self._blocks: dict[str, BlockState | None] = {}
        self._runs: dict[tuple[str, str], int | None] = {}
        self._changed_chains: set[str] = set()
        self._changed_blocks: set[str] = set()
        self._rows: list[dict[str, Any]] = []
        last = connection.execute(select(func.max(tables.envelope.c.seq))).scalar()
        self._next_seq: int = 0 if last is None else last + 1

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
            self._blocks[row.block_id] = BlockState(
                row.after_hash, row.after_size, row.chars, row.label, _agents(row), row.seq
            )

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

    def add(
        self,
        envelope: Mapping[str, Any],
        *,
        trace_id: str | None = None,
        outbox_id: int | None = None,
        nonce: str | None = None,
        agents: list[str] | None = None,
    ) -> None:
        """Put one envelope at the end of its chain.

        Args:
            envelope: built with this chain's head and length.
            trace_id: the chain; ``subject.trace_id`` by default.
            outbox_id: row it was sealed from.
            nonce: of that row.
            agents: the agents the block is attached to afterwards; None leaves what is recorded.

        Raises:
            StaleHeadError: the envelope does not continue the chain.
            InvalidMutation: the envelope says it belongs to another chain.
        """
        subject, mutation, integrity = envelope["subject"], envelope["mutation"], envelope["integrity"]
        claimed = subject.get("trace_id", trace_id)
        trace_id = claimed if trace_id is None else trace_id
        if trace_id is None or claimed != trace_id:
            raise InvalidMutation(
                f"the envelope belongs to the chain {claimed!r}, not to {trace_id!r}",
                remedy="append it under the trace id it was built with",
            )
        chain = self.chain(trace_id)
        if integrity["previous"] != chain.head:
            raise StaleHeadError(
                f"the envelope continues {integrity['previous']}, but the chain {trace_id!r} ends with {chain.head}",
                remedy="read head() again and build the envelope on it, or let emit() do both under the store's lock",
            )
        letta = subject["metadata"].get("letta")
        letta = letta if isinstance(letta, dict) else {}  # a library user's own metadata may use the name
        run_id = letta.get("run_id")
        self._rows.append(
            {
                "seq": self._next_seq,
                "trace_id": trace_id,
                "position": chain.length,
                "current_hash": integrity["current"],
                "outbox_id": outbox_id,
                "nonce": nonce,
                "turn_index": subject["turn_index"],
                "at": subject["timestamp_utc"],
                "block_id": mutation["block_id"],
                "block_label": mutation["block_label"],
                "kind": mutation["mutation_kind"],
                "event": letta.get("event"),
                "agent_id": letta.get("agent_id"),
                "run_id": run_id,
                "body": envelope_line(envelope),
            }
        )
        chain.head = integrity["current"]
        chain.length += 1
        chain.turns = max(chain.turns, subject["turn_index"] + 1)
        self._changed_chains.add(trace_id)
        if run_id is not None:
            self._runs[trace_id, run_id] = subject["turn_index"]
        self._note_block(mutation, agents, unknown=letta.get("content") == CONTENT_UNKNOWN)
        self._next_seq += 1

    def _note_block(self, mutation: Mapping[str, Any], agents: list[str] | None, *, unknown: bool) -> None:
        known = self.block(mutation["block_id"])
        diff = mutation["diff"]
        self._blocks[mutation["block_id"]] = BlockState(
            None if unknown else diff["after_hash"],
            diff["after_size_bytes"],
            diff["added_chars"] + diff["unchanged_chars"],
            mutation["block_label"],
            agents if agents is not None else (known.agents if known else []),
            self._next_seq,
        )
        self._changed_blocks.add(mutation["block_id"])

    def flush(self) -> int:
        """Write all that was added; the caller commits.

        Returns:
            How many envelopes were written.
        """
        if not self._rows:
            return 0
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
        written = len(self._rows)
        self._rows = []
        self._changed_chains.clear()
        self._changed_blocks.clear()
        return written

    def _block_row(self, block_id: str) -> dict[str, Any]:
        state = self._blocks[block_id]
        assert state is not None
        return {
            "block_id": block_id,
            "after_hash": state.after_hash,
            "after_size": state.after_size,
            "chars": state.chars,
            "label": state.label,
            "agents": json.dumps(state.agents),
            "seq": state.seq,
        }


def _agents(row: Any) -> list[str]:
    """The recorded agents of a block; none where the column was damaged, so that one value cannot stop the sealing of others."""
    try:
        agents = json.loads(row.agents)
    except (ValueError, TypeError, RecursionError):
        agents = None
    if not isinstance(agents, list) or not all(isinstance(agent, str) for agent in agents):
        logging.getLogger("phionyx_letta").error(
            "phionyx-letta: the recorded agents of block %r were damaged", row.block_id
        )
        return []
    return agents
