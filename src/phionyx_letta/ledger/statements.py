"""Statements about keys in the SQL ledger: kept beside the envelopes, and what a rotation has to carry over to the new key.

They prove themselves by their signatures; who edits the table can take one away, which is why revocations also go to the sinks
and by hand to whoever verifies.
"""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import Connection, func, or_, select

from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.errors import SigningKeyError, StoreError
from phionyx_letta.keys import ROTATION, Statement, issue_rotation, statements_in
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.ledger.writer import LedgerWriter
from phionyx_letta.signing import Signer, key_id_of

__all__ = ["refuse_retired", "rotate", "store_statement"]


def store_statement(connection: Connection, note: str) -> None:
    """Keep a statement.

    Raises:
        NoteError: it is none.
    """
    said = Statement.parse(note)
    row = {"kind": said.kind, "signer": said.signer, "subject": said.subject, "note": note}
    connection.execute(tables.key_statement.insert().values(**row, at=datetime.now(UTC).isoformat()))


def rotate(ledger: SqlLedger, old: Signer, new: Signer, origin: str) -> str:
    """Let ``new`` take over from ``old`` where the log stands, in one transaction; return the signed statement.

    The states of blocks and the end of the log are authenticated anew, for the new key.

    Raises:
        StoreError: rows of the outbox still wait for the old key, or envelopes are missing from the sealing order.
        SigningKeyError: the old key was replaced before, the new one was in use before, or one has no Ed25519 key.
        LedgerUnavailable: the database does not answer; nothing was changed.
    """
    with ledger.writing() as connection:
        assert connection is not None
        refuse_retired(connection, old)
        _refuse_known(connection, new)
        outbox = tables.outbox.c
        waiting = connection.execute(select(func.count()).where(outbox.refused.is_(None))).scalar_one()
        if waiting:
            raise StoreError(
                f"{waiting} rows of the outbox wait for the old key",
                "stop the servers and run `phionyx-letta seal` first",
            )
        writer = LedgerWriter(connection, old)
        if not writer.log.whole:
            raise StoreError(
                f"the sealing order has a hole after {writer.log.size} envelopes: some were removed, or put in by hand",
                "restore the ledger from a backup first; `phionyx-letta verify` names what is missing",
            )
        point = Checkpoint(origin, writer.log.size, writer.log.root())
        note = issue_rotation(point, old, new, datetime.now(UTC))
        store_statement(connection, note)
        writer.hand_over(new)
        return note


def _refuse_known(connection: Connection, signer: Signer) -> None:
    column, public = tables.key_statement.c, getattr(signer, "public_key_hex", None)
    query = select(column.id).where(or_(column.signer == public, column.subject == public)).limit(1)
    if connection.execute(query).first() is not None:
        raise SigningKeyError(
            f"the key {signer.key_id} was in use before", "make a new one: `phionyx-letta keygen FILE`"
        )


def refuse_retired(connection: Connection, signer: Signer) -> None:
    """Make sure that the key was not replaced: what it seals from then on is believed by nobody.

    Raises:
        SigningKeyError: it was.
    """
    public = getattr(signer, "public_key_hex", None)
    column = tables.key_statement.c
    query = select(column.note).where(column.kind == ROTATION, column.signer == public)
    notes = connection.execute(query).scalars().all() if public is not None else ()
    for said in statements_in(notes):
        if said.signer != public or not said.signed():
            continue  # the database's owner may write what he likes, and the key has signed nothing
        raise SigningKeyError(
            f"the signing key {signer.key_id} was replaced by {key_id_of(said.subject)}",
            "start this server with the new key, and the others too",
        )
