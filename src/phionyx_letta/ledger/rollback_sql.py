"""The accepted rollbacks in a ledger's database."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from sqlalchemy import Connection, select

from phionyx_letta.ledger import tables
from phionyx_letta.ledger.lineage import OwnKeys
from phionyx_letta.ledger.rollback import LOG_BLOCK, AcceptedRollback, read_accepted
from phionyx_letta.signing import Signer

__all__ = ["accepted_rollbacks", "own_rollbacks"]


def own_rollbacks(connection: Connection, signer: Signer) -> list[AcceptedRollback]:
    """Those that this key accepted, or one that it took over from."""
    keys: list[OwnKeys] = []

    def verify(signed: str, signature: str, place: int) -> bool:
        if not keys:  # most ledgers have nothing to ask about
            keys.append(OwnKeys(connection, signer))
        return keys[0].verifies(signed, signature, place)

    return accepted_rollbacks(connection, verify)


def accepted_rollbacks(connection: Connection, verify: Callable[[str, str, int], bool]) -> list[AcceptedRollback]:
    """All that the ledger holds, oldest first; one indexed look-up. ``verify`` is told the envelope's place in the log as well."""
    envelope = tables.envelope.c
    query = select(envelope.seq, envelope.body).where(envelope.block_id == LOG_BLOCK).order_by(envelope.seq)
    found = [read_accepted(_parsed(row.body), partial(_at, verify, row.seq)) for row in connection.execute(query)]
    return [one for one in found if one is not None]


def _at(verify: Callable[[str, str, int], bool], place: int, signed: str, signature: str) -> bool:
    return verify(signed, signature, place)


def _parsed(body: object) -> object:
    try:
        return json.loads(body) if isinstance(body, str) else None
    except (ValueError, RecursionError):
        return None
