"""The blocks of Letta agents inside the server's own process: a program there needs no REST API to apply a patch.

Letta's managers belong to the server's event loop, so this is for another thread. The write is the one that REST makes, with the
same compare-and-swap in its transaction and the same evidence (``capture``). Where the server has a policy, a reviewer has to sign
here too; without one a claim needs no signature, for whoever runs in this process has the server's key anyhow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from sqlalchemy import select

from phionyx_letta.decisions import decide, signed_text
from phionyx_letta.diff import content_hash
from phionyx_letta.errors import TargetRefused, UntrustedPatch
from phionyx_letta.memory.blocks import BlockName, parse_block_name
from phionyx_letta.memory.policy import PolicyFile, Reviewer
from phionyx_letta.plugin import attribution
from phionyx_letta.settings import load_settings
from phionyx_letta.signing import Signer, UnsignedSigner

__all__ = ["ServerBlocks"]

_PAGE = 1000
#: Longest wait for Letta's own loop, s.
_LONGEST = 60.0


class ServerBlocks:
    """``Targets``: all blocks of the Letta server of this process."""

    def __init__(
        self,
        manager: Any,
        actor: Any,
        loop: asyncio.AbstractEventLoop,
        *,
        signer: Signer | None = None,
        read_only: bool = False,
    ) -> None:
        """Nothing is read yet.

        Args:
            manager: Letta's ``BlockManager``.
            actor: Letta's user in whose name is read and written.
            loop: the server's event loop; it must not be the caller's.
            signer: the reviewer's; his signature goes into the evidence.
            read_only: whether blocks that are read-only may be written.
        """
        named = load_settings().reviewers
        self._policy = PolicyFile(named) if named else None
        self._signer = signer or UnsignedSigner()
        self.manager = manager
        self.actor = actor
        self.read_only = read_only
        self._loop = loop

    def names(self) -> list[str]:
        """Return none: patches name their blocks, nobody goes through all of a server's."""
        return []

    def about(self, name: str) -> str:
        """Return the description of a block."""
        return str(getattr(self.resolve(name).fetched(), "description", None) or "")

    def resolve(self, name: str) -> _ServerBlock:
        """Return the block of this name.

        Raises:
            TargetRefused: it does not name a block.
        """
        return _ServerBlock(self, name, parse_block_name(name))

    def decided(
        self, cause: Mapping[str, Any], block_id: str, expected: str, wrote: str
    ) -> tuple[dict[str, Any], Reviewer | None]:
        """Return the claim on a write, and the reviewer who makes it, where there is a policy.

        Raises:
            UntrustedPatch: there is a policy, and no reviewer of it signs here in his own name.
        """
        claim = decide(cause, block_id, expected, wrote, self._signer, self._signer.key_id)
        if self._policy is None:
            return claim, None
        reviewer = self._policy.current().signed_by(signed_text(claim), str(claim.get("signature")))
        if reviewer is None or reviewer.name != cause.get("reviewer"):
            raise UntrustedPatch(
                f"no reviewer of this server has signed, in his own name, that patch {cause.get('patch_id')} is applied",
                "give ServerBlocks the signer of a reviewer whom PHIONYX_LETTA_REVIEWERS lists",
            )
        return claim, reviewer

    def wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Have the server's loop do it, and wait."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_LONGEST)


class _ServerBlock:
    """A ``Target``: one block of one agent."""

    def __init__(self, server: ServerBlocks, name: str, parts: BlockName) -> None:
        self._server = server
        self._agent_id = parts.agent_id
        self.name = name
        self.identity = parts.block_id
        self.label = parts.label
        self.records_itself = True

    @property
    def limit(self) -> int | None:
        limit = getattr(self.fetched(), "limit", None)
        return limit if isinstance(limit, int) else None

    def notes(self) -> list[str]:
        others = sorted(set(self._agents()) - {self._agent_id})
        return [f"shared: it is also the memory of {', '.join(others)}"] if others else []

    def fetched(self) -> Any:
        """Return Letta's block.

        Raises:
            TargetRefused: it was deleted.
        """
        found = self._server.wait_for(self._server.manager.get_block_by_id_async(self.identity, self._server.actor))
        if found is None:
            raise TargetRefused(f"the block {self.label} ({self.identity}) does not exist any more", "reject the patch")
        return found

    def read(self) -> str | None:
        found = self.fetched()
        if self._agent_id not in self._agents() and not self._server.wait_for(self._a_conversations()):
            raise TargetRefused(
                f"the block {self.label} ({self.identity}) is not attached to {self._agent_id} any more",
                "attach it again, or reject the patch: it was meant for that agent's memory",
            )
        if found.read_only and not self._server.read_only:
            raise TargetRefused(f"the block {self.label} ({self.identity}) is read-only", "make it writable")
        return str(found.value or "")

    def write(self, expected: str | None, text: str, cause: Mapping[str, Any] | None = None) -> str | None:
        limit = self.limit
        if limit is not None and len(text) > limit:
            raise TargetRefused(
                f"the block {self.label} may hold {limit} characters, and would hold {len(text)}", "trim the patch"
            )
        hashes = content_hash(expected or ""), content_hash(text)
        self._server.wait_for(self._written(text, *self._server.decided(cause or {}, self.identity, *hashes)))
        return None

    async def _written(self, text: str, claim: Mapping[str, Any], reviewer: Reviewer | None) -> None:
        from letta.schemas.block import BlockUpdate

        with attribution.attributed(claim=claim, reviewer=reviewer):
            update = BlockUpdate(value=text)
            await self._server.manager.update_block_async(
                block_id=self.identity, block_update=update, actor=self._server.actor
            )

    async def _a_conversations(self) -> bool:
        """Whether it is the copy of a block that one of the agent's conversations has for itself."""
        from letta.orm import Conversation
        from letta.orm.blocks_conversations import BlocksConversations
        from letta.server.db import db_registry

        query = (
            select(BlocksConversations.block_id)
            .join(Conversation, Conversation.id == BlocksConversations.conversation_id)
            .where(BlocksConversations.block_id == self.identity, Conversation.agent_id == self._agent_id)
        )
        async with db_registry.async_session() as session:
            return (await session.execute(query)).first() is not None

    def _agents(self) -> list[str]:
        """All agents that have the block, a thousand at a time."""
        found: list[str] = []
        while True:
            page = self._server.manager.get_agents_for_block_async(
                block_id=self.identity, actor=self._server.actor, after=found[-1] if found else None, limit=_PAGE
            )
            ids = [agent.id for agent in self._server.wait_for(page)]
            found += ids
            if len(ids) < _PAGE:
                return found
