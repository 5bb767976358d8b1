"""What of an agent's memory changes by approved patches only, as ``PHIONYX_LETTA_PROPOSE_ONLY`` names agents, tags, labels and blocks.

Looked up in Letta's own database when a tool of the agent starts, and kept for a few seconds: an agent that is not named pays one
query in that time. A block is held with the agent that has it, whoever writes it: a sleeptime agent writes the blocks of its agent,
and a conversation may have its own copy of a block.
"""

from __future__ import annotations

import shlex
import time
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text

from phionyx_letta.memory.wording import in_latin

__all__ = ["Chosen", "Hold"]

#: So long what was looked up is believed, s; and of so many agents.
KEPT, _MOST = 5.0, 10_000


@dataclass(frozen=True)
class Hold:
    """What of one agent's memory is held."""

    chosen: frozenset[str]
    """The names of the setting, as `alike` makes them."""
    everything: bool = False
    blocks: frozenset[str] = frozenset()
    """Held ones, by id."""
    known: frozenset[str] = frozenset()
    """All that were looked at, by id."""

    def anything(self) -> bool:
        """Whether any of it is held."""
        return self.everything or bool(self.blocks)

    def holds(self, block_id: str | None, label: str | None) -> bool:
        """Whether a write of this block has to wait; of a block that is not ``known`` only its id and label can tell."""
        return self.everything or block_id in self.blocks or bool(self.chosen & {alike(block_id), alike(label)})

    def unsure(self, block_id: str) -> bool:
        """Whether the block came to the agent after this was looked up."""
        return not self.everything and block_id not in self.known


def alike(name: str | None) -> str | None:
    """What is left of a name where case, spaces, look-alike letters and empty steps of a path (``./policy``) do not tell two apart."""
    if name is None:
        return None
    plain = in_latin(unicodedata.normalize("NFKC", name)).casefold()
    return "/".join(step for step in map(str.strip, plain.split("/")) if step not in ("", "."))


class Chosen:
    """The setting, and what it means for the agents that were asked about last."""

    def __init__(self, named: str) -> None:
        """Take the setting's words."""
        self._named = frozenset(filter(None, map(alike, shlex.split(named))))
        self._found: dict[str, tuple[float, Hold]] = {}
        self.session: Callable[[], AbstractAsyncContextManager[Any]] | None = None
        """Opens a session of Letta's."""

    async def of(self, agent_id: str | None) -> Hold:
        """What of this agent's memory is held.

        Raises:
            Exception: Letta's database does not answer, or whatever else its session raises.
        """
        if agent_id is None or self._named & {"*", alike(agent_id)}:
            return Hold(self._named, everything="*" in self._named or agent_id is not None)
        until, hold = self._found.get(agent_id, (0.0, None))
        if hold is not None and until > time.monotonic():
            return hold
        hold = self._hold(await self._asked(agent_id, None))
        if len(self._found) >= _MOST:
            self._found.clear()
        self._found[agent_id] = (time.monotonic() + KEPT, hold)
        return hold

    async def holds_now(self, agent_id: str | None, block_id: str) -> bool:
        """Whether a block that was not the agent's when it was looked at is held."""
        return self._hold(await self._asked(agent_id, block_id)).holds(block_id, None)

    def holds_in(self, connection: Connection, agent_id: str | None, block_id: str) -> bool:
        """The same, asked where a transaction of Letta's is under way."""
        return self._hold(connection.execute(_NAMES, _of(agent_id, block_id)).all()).holds(block_id, None)

    def everything(self) -> Hold:
        """For an agent of which nothing could be learnt."""
        return Hold(self._named, everything=True)

    async def _asked(self, agent_id: str | None, block_id: str | None) -> Sequence[Any]:
        if self.session is None:
            raise LookupError("Letta's database is not known yet")
        async with self.session() as session:
            return list((await session.execute(_NAMES, _of(agent_id, block_id))).all())

    def _hold(self, rows: Sequence[Any]) -> Hold:
        named = [row.block_id for row in rows if alike(row.name) in self._named]
        known = frozenset(row.block_id for row in rows if row.block_id is not None)
        return Hold(self._named, None in named, frozenset(filter(None, named)), known)


def _of(agent_id: str | None, block_id: str | None) -> dict[str, str | None]:
    return {"agent": agent_id, "block": block_id}


#: All names by which an agent (then the block is null) or one of its blocks, or a block that is asked for, may be meant. A
#: conversation's own copy of a block goes by the names of the block it stands for, too.
_NAMES = text(
    """
    with one as (
        select block_id as id, block_id as stands_for from blocks_agents where agent_id = cast(:agent as text)
        union select cast(:block as text), cast(:block as text) where cast(:block as text) is not null
        union select i.block_id, b.block_id from blocks_conversations i join conversations c on c.id = i.conversation_id
            left join blocks_agents b on b.agent_id = c.agent_id and b.block_label = i.block_label
            where c.agent_id = cast(:agent as text) or i.block_id = cast(:block as text)
    ), had as (
        select o.id, a.agent_id from one o join blocks_agents a on a.block_id = o.stands_for
    )
    select cast(null as text) as block_id, 'tag:' || tag as name from agents_tags where agent_id = cast(:agent as text)
    union select id, id from one
    union select id, stands_for from one
    union select o.id, b.label from one o join block b on b.id = o.id
    union select id, agent_id from had
    union select h.id, 'tag:' || t.tag from had h join agents_tags t on t.agent_id = h.agent_id
    """
)
