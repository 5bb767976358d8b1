"""The accepted rollbacks in a ledger's database."""

from __future__ import annotations

import json
from collections.abc import Callable

from sqlalchemy import Connection, select

from phionyx_letta.ledger import tables
from phionyx_letta.ledger.rollback import LOG_BLOCK, AcceptedRollback, read_accepted

__all__ = ["accepted_rollbacks"]


def accepted_rollbacks(connection: Connection, verify: Callable[[str, str], bool]) -> list[AcceptedRollback]:
    """All that the ledger holds, oldest first; one indexed look-up."""
    envelope = tables.envelope.c
    rows = connection.execute(select(envelope.body).where(envelope.block_id == LOG_BLOCK).order_by(envelope.seq))
    found = (read_accepted(_parsed(body), verify) for body in rows.scalars())
    return [one for one in found if one is not None]


def _parsed(body: object) -> object:
    try:
        return json.loads(body) if isinstance(body, str) else None
    except (ValueError, RecursionError):
        return None
