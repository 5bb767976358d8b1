"""Up to where a revoked key is still believed: the largest checkpoint from outside that is shown to be old enough."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from phionyx_letta.cli.failures import FAILED, CommandError

if TYPE_CHECKING:
    from phionyx_letta.checkpoint import Checkpoint, SignedCheckpoint
    from phionyx_letta.ledger.sql import SqlLedger

__all__ = ["older_checkpoint"]


def older_checkpoint(
    database: SqlLedger,
    revoked: str,
    at: datetime,
    sources: Sequence[str],
    witnesses: Sequence[str],
    up_to: int | None,
    origin: str,
    *,
    nothing: bool,
) -> Checkpoint:
    """Return the state of the log up to which the key is believed, under the revoking key's origin.

    Raises:
        CommandError: no checkpoint is shown to be older than the date, or the ledger contradicts it.
        StoreError: a source is not there.
    """
    from phionyx_letta.checkpoint import Checkpoint
    from phionyx_letta.ledger.tree import sql_nodes
    from phionyx_letta.merkle import EMPTY_ROOT, root_at

    if nothing:
        return Checkpoint(origin, 0, EMPTY_ROOT)
    found = [one.checkpoint for one in _signed(database, revoked, sources, witnesses) if _older(one, at, up_to)]
    if not found:
        raise CommandError(
            "no checkpoint is shown to be older than that date",
            "give --checkpoint with --witness or --up-to, or --nothing to believe nothing that the key signed",
        )
    point = max(found, key=lambda one: one.size)
    with database.engine.connect() as connection:
        root = root_at(sql_nodes(connection), point.size)
    if root != point.root:
        raise CommandError(
            f"the ledger is not the log of the checkpoint of {point.size} envelopes",
            "`phionyx-letta verify --checkpoint` says more",
            FAILED,
        )
    return Checkpoint(origin, point.size, point.root)


def _signed(
    database: SqlLedger, revoked: str, sources: Sequence[str], witnesses: Sequence[str]
) -> list[SignedCheckpoint]:
    """The checkpoints by the key, or by keys before it."""
    from phionyx_letta.keys import statements_in
    from phionyx_letta.ledger.lineage import stored_statements
    from phionyx_letta.ledger.log.reading import read_checkpoints
    from phionyx_letta.notes import NoteKey

    with database.engine.connect() as connection:
        said = list(statements_in(stored_statements(connection)))
    public = list(dict.fromkeys([revoked, *(one.signer for one in said), *(one.subject for one in said)]))
    known = [NoteKey.parse(one) for one in witnesses]
    return [
        record.signed
        for source in sources
        for record in read_checkpoints(source, public, witnesses=known)
        if record.signed is not None
    ]


def _older(one: SignedCheckpoint, at: datetime, up_to: int | None) -> bool:
    if up_to is not None:
        return one.checkpoint.size == up_to
    return any(0 < cosignature.time() < at.timestamp() for cosignature in one.cosignatures)
