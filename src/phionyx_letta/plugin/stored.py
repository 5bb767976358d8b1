"""What capture records beside the blocks: Letta's checkpoints of them, and the system messages that were compiled from them.

Guarded reads need both. Checkpoints are recorded always, system messages only while reads are guarded: that is an envelope for
each compilation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from sqlalchemy import Connection, bindparam, text
from sqlalchemy.orm import PassiveFlag
from sqlalchemy.orm.attributes import get_history
from sqlalchemy.types import String

from phionyx_letta.plugin.attribution import Attribution
from phionyx_letta.plugin.evidence import HISTORY_SQL, history_digest
from phionyx_letta.plugin.mutation import history_change, prompt_change, prompt_digest

__all__ = ["compiled_prompts", "stored_checkpoints", "stored_histories", "stored_history"]

_HISTORY = text(HISTORY_SQL.format(block=":block_id")).bindparams(bindparam("block_id", type_=String))


def stored_history(connection: Connection, block_id: str) -> str:
    """Digest of a block's checkpoints as they stand."""
    return history_digest(connection.execute(_HISTORY, {"block_id": block_id}).scalars())


def stored_histories(connection: Connection, block_ids: Collection[str]) -> dict[str, str]:
    """Digests of the checkpoints of these blocks, of those that have some."""
    if connection.execute(text("select to_regclass('block_history')")).scalar() is None:
        return {}
    having = text("select distinct block_id from block_history where block_id = any(:ids)")
    found = connection.execute(having, {"ids": list(block_ids)}).scalars().all()
    return {block_id: stored_history(connection, block_id) for block_id in found}


def stored_checkpoints(connection: Connection, rows: Iterable[Any], who: Attribution) -> list[dict[str, Any]]:
    """The mutations for rows of ``block_history`` that a flush added, changed or removed: one a block.

    Args:
        connection: of the session that flushed.
        rows: of Letta's model ``BlockHistory``.
        who: attribution now.
    """
    by_block = {row.block_id: row for row in rows}
    return [
        history_change(
            block_id, row.label, stored_history(connection, block_id), who, organization_id=row.organization_id
        )
        for block_id, row in by_block.items()
    ]


def compiled_prompts(new: Iterable[Any], dirty: Iterable[Any], who: Attribution) -> list[dict[str, Any]]:
    """The mutations for system messages that a flush stored.

    Args:
        new: of Letta's model ``Message``, inserted.
        dirty: the same, updated.
        who: attribution now.
    """
    stored = [message for message in new if message.role == "system"]
    stored += [
        message
        for message in dirty
        if message.role == "system"
        and any(
            get_history(message, name, PassiveFlag.PASSIVE_NO_INITIALIZE).added for name in ("content", "text", "role")
        )
    ]
    return [
        prompt_change(
            message.id,
            prompt_digest(message.content, message.text),
            message.agent_id,
            who,
            organization_id=message.organization_id,
        )
        for message in stored
    ]
