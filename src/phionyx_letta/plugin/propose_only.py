"""Agents that propose only: what their memory tools would write becomes a pending patch, and the tool's answer says so.

Every tool of Letta's that changes the text of a block, and a sandboxed tool that changes the agent's state, ends in
``BlockManager.update_block_async`` while the tool is executed. There the write is taken out and queued; where that fails the tool
fails, and nothing is written. What is not a change of text (making, renaming, attaching and detaching blocks) cannot be a patch, so
it is refused. Nothing but tools is touched: a person, and an approved patch, write as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import text

from phionyx_letta.diff import content_hash
from phionyx_letta.errors import TargetRefused
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.memory.blocks import block_name
from phionyx_letta.memory.merging import FileDiffEngine
from phionyx_letta.memory.patches import MemoryPatch, transition
from phionyx_letta.memory.pii import MemoryPIIFilter
from phionyx_letta.memory.store_sql import SqlPatchStore
from phionyx_letta.memory.trimming import over_limit
from phionyx_letta.memory.twins import save_once
from phionyx_letta.plugin import attribution
from phionyx_letta.plugin.runtime import Runtime, logger
from phionyx_letta.plugin.targets import TARGETS, Target

__all__ = ["ProposeOnly"]

UNSEEN = "an agent's own tool asked for it; what it rests on was not looked up"
_Call = Callable[..., Awaitable[Any]]
_Arguments = tuple[Any, ...]
_Named = dict[str, Any]


@dataclass(frozen=True)
class _Queued:
    """A write that became a patch."""

    block_id: str
    label: str
    held: str
    wanted: str
    patch_id: str


#: The writes that were queued in the tool that runs now; None outside of tools.
_queued: ContextVar[list[_Queued] | None] = ContextVar("phionyx_letta_queued", default=None)


class ProposeOnly:
    """Whose memory changes by approved patches only, as ``PHIONYX_LETTA_PROPOSE_ONLY`` says."""

    def __init__(self, runtime: Runtime) -> None:
        """Nothing is connected yet."""
        self._runtime = runtime
        self._chosen = frozenset(runtime.settings.propose_only.split())
        self._pii = MemoryPIIFilter()
        self._store: tuple[int, SqlPatchStore] | None = None
        self.url: str | None = None

    def targets(self) -> tuple[Target, ...]:
        """Those of the plugin's targets that do more in this mode, in place of what they do."""
        inner = {
            "ToolExecutionManager.execute_tool_async": self._tool,
            "BlockManager.update_block_async": self._update,
            "BlockManager.create_or_update_block_async": self._refuse_creation,
            "AgentManager.attach_block_async": self._refuse_attachment,
            "AgentManager.detach_block_async": self._refuse_attachment,
        }
        return tuple(
            replace(one, wrapper=_within(one.wrapper, inner[one.path])) for one in TARGETS if one.path in inner
        )

    # -- what is wrapped -----------------------------------------------------------------------------------------

    async def _tool(self, wrapped: _Call, instance: Any, args: _Arguments, kwargs: _Named) -> Any:
        queued: list[_Queued] = []
        token = _queued.set(queued)
        try:
            result = await wrapped(*args, **kwargs)
        finally:
            _queued.reset(token)
        if queued:
            for state in (getattr(instance, "agent_state", None), getattr(result, "agent_state", None)):
                _put_back(state, queued)
            failed = (
                getattr(result, "status", None) == "error"
            )  # part of it was refused: the agent has to know that too
            result.func_return = f"{result.func_return}\n{_said(queued)}" if failed else _said(queued)
        return result

    async def _update(self, wrapped: _Call, instance: Any, args: _Arguments, kwargs: _Named) -> Any:
        queued = _queued.get()
        given = dict(zip(("block_id", "block_update", "actor"), args, strict=False)) | kwargs
        if queued is None:
            return await wrapped(*args, **kwargs)
        block = await instance.get_block_by_id_async(given["block_id"], given["actor"])
        if block is None or not await self._applies(block.id, block.label):
            return await wrapped(*args, **kwargs)
        wanted = given["block_update"].model_dump(exclude_unset=True, exclude_none=True)
        others = sorted(
            name for name, value in wanted.items() if name != "value" and getattr(block, name, None) != value
        )
        if others:
            raise _refused(f"a change of the {' and '.join(others)} of {block.label}")
        # a tool of several steps sends what it queued before again
        again = any(one.block_id == block.id and one.wanted == wanted.get("value") for one in queued)
        if "value" in wanted and wanted["value"] != block.value and not again:
            patch = await asyncio.to_thread(self._propose, block, wanted["value"], attribution.current())
            queued.append(_Queued(block.id, block.label, block.value, wanted["value"], patch.patch_id))
        return block

    async def _refuse_creation(self, wrapped: _Call, _instance: Any, args: _Arguments, kwargs: _Named) -> Any:
        block = kwargs.get("block", args[0] if args else None)
        if _queued.get() is not None and await self._applies(None, getattr(block, "label", None)):
            raise _refused(f"a new block {getattr(block, 'label', '?')}")
        return await wrapped(*args, **kwargs)

    async def _refuse_attachment(self, wrapped: _Call, _instance: Any, args: _Arguments, kwargs: _Named) -> Any:
        block_id = kwargs.get("block_id", args[1] if len(args) > 1 else None)
        if _queued.get() is not None and await self._applies(block_id, None):
            raise _refused("attaching or detaching a block")
        return await wrapped(*args, **kwargs)

    # -- whose, and what ------------------------------------------------------------------------------------------

    async def _applies(self, block_id: str | None, label: str | None) -> bool:
        """Whether this block, one of the agents that have it, or the agent whose tool runs, is named by the setting."""
        agent_id = attribution.current().agent_id
        if self._chosen & {"*", block_id, label, agent_id}:
            return True
        return await asyncio.to_thread(self._named_otherwise, block_id, agent_id)

    def _named_otherwise(self, block_id: str | None, agent_id: str | None) -> bool:
        """By its label, another agent that has it, or an agent's tag: a sleeptime agent writes the blocks of its agent."""
        with self._patches().ledger.engine.connect() as connection:
            found = connection.execute(_NAMES, {"block": block_id, "agent": agent_id}).scalars()
            return not self._chosen.isdisjoint(found)

    def _propose(self, block: Any, wanted: str, who: attribution.Attribution) -> MemoryPatch:
        """Queue it.

        Raises:
            TargetRefused: there is no key to sign it with, or no agent to name.
            LedgerUnavailable: the database does not take it.
        """
        key, agent_id = self._runtime.key, who.agent_id
        if key is None or agent_id is None:
            raise TargetRefused("this write cannot be queued for approval", "run `phionyx-letta doctor` on this host")
        name = block_name(agent_id, block.id, block.label)
        before = block.value or ""
        filtered = self._pii.filter_new(before, wanted)
        after = filtered.filtered_content
        diff = FileDiffEngine.generate_unified_diff(before, after, name)
        patch = MemoryPatch(
            file_path=name,
            before_content=before,
            after_content=after,
            unified_diff=diff,
            rationale=f"The agent's tool {who.tool} would have written it.",
            author=agent_id,
            metadata={
                "proposed_from": _origin(who),
                "found": content_hash(before),
                "untrusted": UNSEEN,
                "pii": dict(filtered.counts),
                "diff_stats": FileDiffEngine.count_changed_lines(diff),
                **_over(over_limit(before, after, block.limit)),
            },
        )
        transition(patch, "pending", by=agent_id, signer=key.signer)
        return save_once(patch, self._patches(), key.verifier())

    def _patches(self) -> SqlPatchStore:
        """The store, opened once in each process."""
        if self._store is None or self._store[0] != os.getpid():
            if self.url is None:
                raise TargetRefused("Letta's database is not known yet", "try again")
            self._store = (os.getpid(), SqlPatchStore(SqlLedger(self.url)))
        return self._store[1]

    def close(self) -> None:
        """Let go of the database."""
        if self._store is not None and self._store[0] == os.getpid():
            with contextlib.suppress(Exception):
                self._store[1].ledger.close()
        self._store = None


def _within(outer: Callable[..., Any], inner: _Call) -> Callable[..., Any]:
    """A wrapper that first does what another does."""

    async def wrapper(wrapped: _Call, instance: Any, args: _Arguments, kwargs: _Named) -> Any:
        async def call(*given: Any, **named: Any) -> Any:
            return await inner(wrapped, instance, given, named)

        return await outer(call, instance, args, kwargs)

    return wrapper


def _put_back(state: Any, queued: list[_Queued]) -> None:
    """The agent's state in this process holds what the tool wanted; what is stored is something else."""
    for block in _blocks(state):
        held = next((one.held for one in queued if one.block_id == block.id), None)
        if held is not None:
            block.value = held


def _blocks(state: Any) -> Iterator[Any]:
    yield from getattr(getattr(state, "memory", None), "blocks", None) or ()


def _said(queued: list[_Queued]) -> str:
    named = ", ".join(f"{one.patch_id} (block {one.label})" for one in queued)
    logger.info("phionyx-letta: a tool's write waits for review as patch %s", named)
    return (
        f"Nothing was written. The memory of this agent changes only after a person approved it: your change waits for review as "
        f"patch {named}. Do not repeat it."
    )


def _refused(what: str) -> TargetRefused:
    return TargetRefused(
        f"the memory of this agent changes only after a person approved it, and {what} cannot wait for that",
        "change the text of a block, or ask a person",
    )


def _origin(who: attribution.Attribution) -> Mapping[str, Any]:
    found = {
        "agent_id": who.agent_id,
        "conversation_id": who.conversation_id,
        "runs": [who.run_id] if who.run_id else None,
        "tool": who.tool,
        "tool_call_id": who.tool_call_id,
    }
    return {name: value for name, value in found.items() if value is not None}


def _over(found: dict[str, Any] | None) -> dict[str, Any]:
    return {} if found is None else {"over_limit": found}


_NAMES = text(
    """
    with concerned as (
        select cast(:agent as text) as id union select agent_id from blocks_agents where block_id = cast(:block as text)
    )
    select id from concerned where id is not null
    union select 'tag:' || t.tag from agents_tags t join concerned c on c.id = t.agent_id
    union select label from block where id = cast(:block as text)
    """
)
