"""The accepted rollbacks in a ledger's database."""

from __future__ import annotations

import json
from collections.abc import Callable

from sqlalchemy import Connection, select

from phionyx_letta.ledger import tables
from phionyx_letta.ledger.rollback import LOG_BLOCK, AcceptedRollback, read_accepted
from phionyx_letta.ledger.statements import own_keys
from phionyx_letta.signing import Ed25519Verifier, Signer, load_verifier

__all__ = ["accepted_rollbacks", "own_rollbacks"]


def own_rollbacks(connection: Connection, signer: Signer) -> list[AcceptedRollback]:
    """Those that this key accepted, or one that it took over from."""
    public: str | None = getattr(signer, "public_key_hex", None)
    if public is None:  # a shared secret: signing again tells
        return accepted_rollbacks(connection, lambda signed, signature: signer.sign(signed) == signature)
    keys: list[Ed25519Verifier] = []

    def verify(signed: str, signature: str) -> bool:
        if not keys:  # most ledgers have nothing to ask about
            keys.extend(load_verifier(one) for one in own_keys(connection, public))
        return any(one.verify(signed, signature) for one in keys)

    return accepted_rollbacks(connection, verify)


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
