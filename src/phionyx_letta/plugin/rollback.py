"""Accepting that a database was set back on purpose: what is given up is found by comparing the log with checkpoints outside."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from sqlalchemy import Connection, insert

from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.diff import compute_memory_diff
from phionyx_letta.envelope import CONTENT_UNKNOWN
from phionyx_letta.errors import ProofError
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.rollback import (
    EVENT,
    LOG_BLOCK,
    AcceptedRollback,
    GivenUp,
    belongs,
    excuses,
)
from phionyx_letta.ledger.rollback_sql import own_rollbacks
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.ledger.tree import sql_nodes
from phionyx_letta.merkle import root_at
from phionyx_letta.plugin.adoption import PRODUCER, Operator
from phionyx_letta.plugin.mutation import operator_change
from phionyx_letta.plugin.runtime import PluginKey

__all__ = ["accept_rollback", "given_up"]


def given_up(
    connection: Connection, key: PluginKey, base: str, outside: Sequence[Checkpoint]
) -> AcceptedRollback | None:
    """What an acceptance would record; None where the log leads on from every checkpoint that was not given up before.

    Args:
        connection: in one snapshot.
        key: of the log.
        base: the log's name in the settings.
        outside: checkpoints of this key, from outside the database.
    """
    accepted = own_rollbacks(connection, key.signer)
    ours = [one for one in outside if belongs(one.origin, base) and not excuses(accepted, one)]
    nodes = sql_nodes(connection)

    def agrees(point: Checkpoint) -> bool:
        try:
            return root_at(nodes, point.size) == point.root
        except ProofError:  # the log is shorter
            return False

    agreeing = [one.size for one in ours if agrees(one)]
    lost: dict[str, list[Checkpoint]] = {}
    for one in sorted(ours, key=lambda one: one.size):
        if not agrees(one):
            lost.setdefault(one.origin, []).append(one)
    if not lost:
        return None
    ends = [
        GivenUp(
            origin, points[-1].size, points[-1].root.hex(), max((n for n in agreeing if n < points[0].size), default=0)
        )
        for origin, points in sorted(lost.items())
    ]
    return AcceptedRollback(base, f"{base}/restored-{secrets.token_hex(4)}", tuple(ends))


def accept_rollback(ledger: SqlLedger, key: PluginKey, rollback: AcceptedRollback, operator: Operator) -> None:
    """Record it; it waits in the outbox, and the log goes on under its new origin once it is sealed."""
    nothing = compute_memory_diff("", "")
    details = {"content": CONTENT_UNKNOWN, "rollback": rollback.to_dict()}
    mutation = operator_change(
        LOG_BLOCK,
        "log",
        "write",
        EVENT,
        nothing,
        details,
        producer=PRODUCER,
        operator=operator.name,
        reason=operator.reason,
    )
    payload, mac = key.outbox.seal({**mutation, "worker": PRODUCER})
    with ledger.engine.begin() as connection:
        connection.execute(insert(tables.outbox).values(payload=payload, mac=mac))
