"""What Letta's database knows of a block's text beside the ledger: what it holds now, its checkpoints, and its patches.

Nothing of it is authenticated: a text counts only where its hash is one the ledger recorded (``ledger.blame``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from sqlalchemy import Connection, inspect, select, text

from phionyx_letta.ledger import tables

__all__ = ["KnownTexts", "find_blocks", "read_texts"]


@dataclass
class KnownTexts:
    """What was found."""

    label: str | None = None
    """None where there is no such block (any more)."""
    current: str | None = None
    agents: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rationales: dict[str, str] = field(default_factory=dict)
    """Of its patches, by their id."""


def find_blocks(connection: Connection, agent_id: str, label: str) -> list[str]:
    """The ids of an agent's blocks with this label now; none where this is not Letta's database."""
    if not inspect(connection).has_table("blocks_agents"):
        return []
    return list(connection.execute(_NAMED, {"agent": agent_id, "label": label}).scalars())


def read_texts(connection: Connection, block_id: str) -> KnownTexts:
    """Read all that is there; tables that are missing hold nothing."""
    found, there = KnownTexts(), set(inspect(connection).get_table_names())
    if {"block", "blocks_agents"} <= there:
        row = connection.execute(_BLOCK, {"block": block_id}).first()
        if row is not None:
            found.label, found.current = row.label, row.value or ""
            found.agents = list(connection.execute(_AGENTS, {"block": block_id}).scalars())
    if "block_history" in there:
        found.texts += connection.execute(_CHECKPOINTS, {"block": block_id}).scalars()
    if tables.patch.name in there:
        column = tables.patch.c
        ours = column.newest & column.file_path.contains(f"/{block_id}/", autoescape=True)
        for row in connection.execute(select(column.patch_id, column.rationale, column.body).where(ours)):
            found.rationales[row.patch_id] = row.rationale
            found.texts += _texts_of(row.body)
    return found


def _texts_of(body: str) -> list[str]:
    try:
        patch = json.loads(body)
        return [one for name in ("before_content", "after_content") if isinstance(one := patch[name], str)]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []


_NAMED = text(
    """
    select b.id from block b join blocks_agents p on p.block_id = b.id
    where p.agent_id = :agent and b.label = :label order by b.id
    """
)
_BLOCK = text("select label, value from block where id = :block")
_AGENTS = text("select agent_id from blocks_agents where block_id = :block order by agent_id")
_CHECKPOINTS = text("select value from block_history where block_id = :block and value is not null")
