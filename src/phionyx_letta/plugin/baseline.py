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
from phionyx_letta.plugin.mutation import (
    RECORDED,
    BlockColumns,
    Commitment,
    block_change,
    prompt_change,
    prompt_digest,
)
from phionyx_letta.plugin.outbox import OutboxKey
from phionyx_letta.plugin.stored import stored_histories

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
# only what stands at the head of an agent's or a conversation's context
_PROMPTS = text(
    f"""select m.id, m.agent_id, m.organization_id, m.content, m.text from messages m
    where m.role = 'system' and m.id in (
        select message_ids ->> 0 from agents where json_typeof(message_ids) = 'array'
        union all select message_id from conversation_messages where in_context and position = 0)
    and not exists (select 1 from phionyx_block p where p.block_id = m.id)
    and not exists (select 1 from phionyx_outbox where {tables.OUTBOX_BLOCK} = m.id)
    order by m.id limit :limit for update of m skip locked"""
)
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
    prompts: bool = False,
) -> int:
    """Record one batch.

    Args:
        ledger: of Letta's own database.
        key: authenticates the rows.
        worker_id: noted in them.
        salts: encrypts the salts of a salted ledger.
        salted: make it one. A ledger that has salts stays salted.
        limit: most blocks in one transaction.
        prompts: also the system messages that guarded reads ask for.

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
            histories = {} if made else stored_histories(connection, [row.id for row in fresh])
            _record(
                connection, key, [_mutation(row, attached, histories, worker_id, made.get(row.id)) for row in fresh]
            )
        messages = connection.execute(_PROMPTS, {"limit": limit}).all() if prompts else ()
        _record(connection, key, [_prompt(row, worker_id) for row in messages])
        return 0 if not (rows or messages or unrecorded_blocks(connection)) else max(1, len(rows), len(messages))


def _record(connection: Connection, key: OutboxKey, mutations: list[dict[str, Any]]) -> None:
    if mutations:
        sealed = [key.seal(mutation) for mutation in mutations]
        connection.execute(insert(tables.outbox), [{"payload": payload, "mac": mac} for payload, mac in sealed])


def _waiting(connection: Connection) -> set[str]:
    """Blocks with a write in the outbox: their record begins with it. An attach or detach says nothing of the content."""
    return set(connection.execute(_WAITING).scalars())


def _mutation(row: Any, attached: Any, histories: dict[str, str], worker_id: str, salt: Salt | None) -> dict[str, Any]:
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
    if row.id in histories:
        mutation["letta"]["history"] = histories[row.id]
    agents = [pair.agent_id for pair in attached if pair.block_id == row.id]
    return {**mutation, "producer": PRODUCER, "agents": agents, "worker": worker_id}


def _prompt(row: Any, worker_id: str) -> dict[str, Any]:
    mutation = prompt_change(
        row.id,
        prompt_digest(row.content, row.text),
        row.agent_id,
        Attribution(),
        organization_id=row.organization_id,
        event="baseline",
    )
    return {**mutation, "producer": PRODUCER, "worker": worker_id, "agents": [row.agent_id] if row.agent_id else []}
