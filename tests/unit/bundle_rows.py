"""A captured change put into the outbox of any ledger."""

from __future__ import annotations

from phionyx_letta.ledger import tables
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.plugin.attribution import Attribution
from phionyx_letta.plugin.mutation import BlockColumns, block_change
from phionyx_letta.plugin.outbox import OutboxKey


def put_row(ledger: SqlLedger, key: OutboxKey, block: str, value: str = "hello", agent: str = "agent-a") -> None:
    """A block that an agent creates."""
    change = block_change(
        block, None, BlockColumns(value, "human", None, 5000, False), Attribution(agent_id=agent), organization_id="org"
    )
    assert change is not None
    payload, mac = key.seal(change)
    with ledger.engine.begin() as connection:
        connection.execute(tables.outbox.insert().values(payload=payload, mac=mac))
