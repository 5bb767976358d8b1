"""What the ledger has of one agent: which commits, and the state each of its files was left in."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select

from phionyx_letta.ledger import tables
from phionyx_letta.ledger.bulk import among
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.ledger.writer import BlockState, read_block_states
from phionyx_letta.letta_code.changes import block_id
from phionyx_letta.signing import Signer

__all__ = ["Known"]

_AT_ONCE = 500


class Known:
    """Reads of one agent's part of the ledger; nothing is kept of them."""

    def __init__(self, ledger: SqlLedger, signer: Signer, agent: str) -> None:
        """Read nothing yet."""
        self._ledger, self._signer, self._agent = ledger, signer, agent

    def commits(self, commits: Sequence[str]) -> set[str]:
        """Which of these commits it has."""
        found: set[str] = set()
        columns = tables.envelope.c
        with self._ledger.engine.connect() as connection:
            for start in range(0, len(commits), _AT_ONCE):
                runs = [f"commit:{oid}" for oid in commits[start : start + _AT_ONCE]]
                query = select(columns.run_id).where(
                    columns.trace_id == self._agent, among(connection, columns.run_id, runs)
                )
                found.update(run.removeprefix("commit:") for run in connection.execute(query).scalars())
        return found

    def files(self) -> dict[str, BlockState]:
        """What it last recorded of each file, by its block; the repository's own history is none."""
        prefix, column = block_id(self._agent, ""), tables.block.c.block_id
        with self._ledger.engine.connect() as connection:
            alike = connection.execute(select(column).where(column.startswith(prefix, autoescape=True))).scalars()
            ids = [one for one in alike if one.startswith(prefix)]  # SQLite's LIKE takes `a` for `A`
            return read_block_states(connection, self._signer, ids)
