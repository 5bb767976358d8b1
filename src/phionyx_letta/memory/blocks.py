"""The core-memory blocks of a Letta agent as targets of patches: how they are named, and reading them from Letta's database.

A patch names agent, block and label: the block's id counts, the label is for people, and the agent is whose memory the patch is
meant for, so that a block that was detached from it meanwhile is not written. Writing goes through Letta (`block_rest`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import text

from phionyx_letta.errors import TargetRefused
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.memory.routing import MemoryFileCategory, MemoryFileRouter

__all__ = ["PREFIX", "AgentBlocks", "BlockName", "BlockRouter", "block_name", "parse_block_name"]

PREFIX = "letta:"


class BlockName(NamedTuple):
    """What the name of a block's target says."""

    agent_id: str
    block_id: str
    label: str


def block_name(agent_id: str, block_id: str, label: str) -> str:
    """Return the name of a target, as patches keep it."""
    return f"{PREFIX}{agent_id}/{block_id}/{label}"


def parse_block_name(name: str) -> BlockName:
    """Read it.

    Raises:
        TargetRefused: it is none.
    """
    parts = name.removeprefix(PREFIX).split("/", 2)
    if not name.startswith(PREFIX) or len(parts) != 3 or not all(parts):
        raise TargetRefused(f"{name!r} does not name a block of an agent", f"it is {PREFIX}AGENT/BLOCK/LABEL")
    return BlockName(*parts)


class BlockRouter(MemoryFileRouter):
    """The seed's router for blocks, which are named by their labels."""

    def __init__(self, labels: Mapping[str, str], *, fallback: Iterable[str] = ("human",)) -> None:
        """Take the label of each category, and the labels for all else, the first that is there."""
        super().__init__(dict(labels))
        self._fallback = tuple(fallback)

    def resolve_target_path(self, category: MemoryFileCategory | str, managed_paths: Iterable[str]) -> str:
        """Return the label of a category: the configured one, one that begins with the category, or a fallback."""
        managed = list(managed_paths)
        wanted = self.path_map.get(category)
        begins = [label for label in managed if label.casefold().startswith(category.casefold())]
        for label in (wanted, *begins, *self._fallback):
            if label in managed:
                return str(label)
        others = [label for label in managed if label != "persona"]  # who the agent is, is not for others to say
        return (others or managed or [wanted or category])[0]


@dataclass(frozen=True)
class _Row:
    block_id: str
    label: str
    value: str
    limit: int | None
    read_only: bool
    description: str


class AgentBlocks:
    """The blocks of one agent, for proposing: read from Letta's database, written by nobody here. Their names are their labels."""

    def __init__(self, ledger: SqlLedger, agent_id: str, *, read_only: bool = False) -> None:
        """Use the database of the ledger, which is Letta's own; `read_only` blocks are targets only where allowed."""
        self._ledger = ledger
        self._agent_id = agent_id
        self._allowed = read_only

    def names(self) -> list[str]:
        """Return the labels of the blocks attached to the agent that may be written, sorted."""
        return sorted(row.label for row in self._rows())

    def about(self, name: str) -> str:
        """Return the block's description."""
        return next((row.description for row in self._rows() if row.label == name), "")

    def resolve(self, name: str) -> _StoredBlock:
        """Return the block with this label, or with this name.

        Raises:
            TargetRefused: the agent has no such block, or it may not be written.
        """
        wanted = parse_block_name(name).block_id if name.startswith(PREFIX) else None
        for row in self._rows():
            if row.block_id == wanted if wanted else row.label == name:
                return _StoredBlock(self._agent_id, row)
        raise TargetRefused(
            f"the agent {self._agent_id} has no block {name!r} that may be written", "attach it, or choose another"
        )

    def agents_of(self, block_id: str) -> list[str]:
        """Return the agents that have this block, sorted."""
        with self._ledger.engine.connect() as connection:
            return list(connection.execute(_AGENTS, {"block": block_id}).scalars())

    def _rows(self) -> list[_Row]:
        with self._ledger.engine.connect() as connection:
            rows = connection.execute(_BLOCKS, {"agent": self._agent_id}).all()
        found = [_Row(r.id, r.label, r.value or "", r.limit, bool(r.read_only), r.description or "") for r in rows]
        return [row for row in found if self._allowed or not row.read_only]


class _StoredBlock:
    """A `Target`: one block as the database has it."""

    def __init__(self, agent_id: str, row: _Row) -> None:
        self._row = row
        self.name = block_name(agent_id, row.block_id, row.label)
        self.identity = row.block_id
        self.label = row.label
        self.limit = row.limit
        self.records_itself = True

    def notes(self) -> list[str]:
        return []

    def read(self) -> str | None:
        return self._row.value

    def write(self, expected: str | None, text: str, cause: Mapping[str, Any] | None = None) -> str | None:
        raise TargetRefused(f"{self.name} is written through Letta only", "`phionyx-letta memory apply` does that")


_BLOCKS = text(
    """
    select b.id, b.label, b.value, b."limit", b.read_only, b.description
    from block b join blocks_agents p on p.block_id = b.id
    where p.agent_id = :agent and not coalesce(b.is_deleted, false)
    """
)
_AGENTS = text("select agent_id from blocks_agents where block_id = :block order by agent_id")
