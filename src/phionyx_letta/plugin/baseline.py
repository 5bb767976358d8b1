"""Baseline: blocks older than the plugin get one row that says what they held when recording began (decision 3).

Each batch locks its blocks with SKIP LOCKED, so it waits for nobody; a writer that comes in between waits for one short
transaction, and its own row then follows the baseline.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, insert, text

from phionyx_letta.ledger import tables
from phionyx_letta.ledger.salts import Salt, SaltKey, salt_row, salts_in_use
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.plugin.attribution import Attribution
from phionyx_letta.plugin.mutation import RECORDED, BlockColumns, Commitment, block_change
from phionyx_letta.plugin.outbox import OutboxKey

PRODUCER = "phionyx-letta.baseline"
_COLUMNS = ", ".join(f'b."{name}"' for name in RECORDED)
_UNRECORDED = (
    "from block b where not exists (select 1 from phionyx_block p where p.block_id = b.id and p.after_hash is not null)"
)
_LOCK = text(
    f"select b.id, b.organization_id, {_COLUMNS} {_UNRECORDED} order by b.id limit :limit for update skip locked"
)
_COUNT = text(f"select count(*) {_UNRECORDED}")
# no backslash escapes a quote before the name: it is a key of the payload; and only the id is read of rows that may be huge
_WAITING = text(
    """select substring(payload from '"block_id":"([^"]*)"') from phionyx_outbox
    where refused is null and payload not like :attachment"""
).bindparams(attachment='%"diff":null%')
_AGENTS = text("select block_id, agent_id from blocks_agents where block_id = any(:ids)")


def unrecorded_blocks(connection: Connection) -> int:
    """How many blocks the ledger knows nothing of (rows that wait in the outbox not counted as known)."""
    return int(connection.execute(_COUNT).scalar_one())


def record_baseline(
    ledger: SqlLedger,
    key: OutboxKey,
    worker_id: str,
    *,
    salts: SaltKey | None = None,
    salted: bool = False,
    limit: int = 200,
) -> int:
    """Record one batch.

    Args:
        ledger: of Letta's own database.
        key: authenticates the rows.
        worker_id: noted in them.
        salts: encrypts the salts of a salted ledger.
        salted: make it one. A ledger that has salts stays salted.
        limit: most blocks in one transaction.

    Returns:
        How many blocks are still without a record; 0 when the baseline is complete.
    """
    with ledger.writing(wait=False) as connection:
        if connection is None:
            return 1  # another process seals or takes the baseline; ask again
        rows = connection.execute(_LOCK, {"limit": limit}).all()
        waiting = _waiting(connection)
        fresh = [row for row in rows if row.id not in waiting]
        if fresh:
            attached = connection.execute(_AGENTS, {"ids": [row.id for row in fresh]}).all()
            made: dict[str, Salt] = {}
            if salts is not None and (salted or salts_in_use(connection)):
                made = {row.id: salts.new() for row in fresh}
                connection.execute(insert(tables.salt), [salt_row(salts, row.id, made[row.id]) for row in fresh])
            sealed = [key.seal(_mutation(row, attached, worker_id, made.get(row.id))) for row in fresh]
            connection.execute(insert(tables.outbox), [{"payload": payload, "mac": mac} for payload, mac in sealed])
        return 0 if not rows and not unrecorded_blocks(connection) else max(1, len(rows))


def _waiting(connection: Connection) -> set[str]:
    """Blocks with a write in the outbox: their record begins with it. An attach or detach says nothing of the content."""
    return set(connection.execute(_WAITING).scalars())


def _mutation(row: Any, attached: Any, worker_id: str, salt: Salt | None) -> dict[str, Any]:
    columns = BlockColumns(*row[2:])
    mutation = block_change(
        row.id,
        columns,
        columns,
        Attribution(),
        organization_id=row.organization_id,
        event="baseline",
        commitment=Commitment(salt),
    )
    assert mutation is not None
    agents = [pair.agent_id for pair in attached if pair.block_id == row.id]
    return {**mutation, "producer": PRODUCER, "agents": agents, "worker": worker_id}
