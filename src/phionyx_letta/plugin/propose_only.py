"""Agents that propose only: what their memory tools would write becomes a pending patch, and the tool's answer says so.

Every tool of Letta's that changes the text of a block, and a sandboxed tool that changes the agent's state, ends in
``BlockManager.update_block_async`` while the tool is executed; Letta's batch API writes in ``_bulk_rethink_memory_async``. There the
write is taken out and queued; where that fails the tool fails, and nothing is written. What is not a change of text (making, renaming,
attaching and detaching blocks) cannot be a patch, so it is refused. Whatever else would change a held block while such a tool runs is
refused in its transaction (``check``). Nothing but tools is touched: a person, and an approved patch, write as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import Connection

from phionyx_letta.diff import content_hash
from phionyx_letta.errors import PhionyxError, TargetRefused
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.memory.blocks import block_name
from phionyx_letta.memory.merging import FileDiffEngine
from phionyx_letta.memory.patches import MemoryPatch, transition
from phionyx_letta.memory.pii import MemoryPIIFilter
from phionyx_letta.memory.store_sql import SqlPatchStore
from phionyx_letta.memory.trimming import over_limit
from phionyx_letta.memory.twins import save_once
from phionyx_letta.plugin import attribution
from phionyx_letta.plugin.held import Chosen, Hold
from phionyx_letta.plugin.runtime import Runtime, logger
from phionyx_letta.plugin.targets import TARGETS, Target

if TYPE_CHECKING:
    from phionyx_letta.plugin.capture import Change

__all__ = ["ProposeOnly"]

UNSEEN = "an agent's own tool asked for it; what it rests on was not looked up"
_Call = Callable[..., Awaitable[Any]]
_Arguments = tuple[Any, ...]
_Named = dict[str, Any]


class _Queued(NamedTuple):
    """A write that became a patch."""

    block_id: str
    label: str
    wanted: str
    patch_id: str


@dataclass
class _Tool:
    """A tool that runs now: what of its agent's memory is held, and which of its writes were queued."""

    agent_id: str | None
    hold: Hold
    queued: list[_Queued] = field(default_factory=list)


_running: ContextVar[_Tool | None] = ContextVar("phionyx_letta_tool", default=None)


class ProposeOnly:
    """Whose memory changes by approved patches only, as ``PHIONYX_LETTA_PROPOSE_ONLY`` says."""

    def __init__(self, runtime: Runtime) -> None:
        """Nothing is connected yet."""
        self._runtime = runtime
        self._chosen = Chosen(runtime.settings.propose_only)
        self._pii = MemoryPIIFilter()
        self._store: SqlPatchStore | None = None
        self._lock = threading.Lock()
        self._url: str | None = None

    def connect(self, url: str, database: Any) -> None:
        """Letta's database is known: its URL, and the imported module ``letta.server.db``."""
        self._url = url
        self._chosen.session = database.db_registry.async_session

    def targets(self) -> tuple[Target, ...]:
        """Those of the plugin's targets that do more in this mode, in place of what they do, and two of its own."""
        inner = {
            "ToolExecutionManager.execute_tool_async": self._tool,
            "BlockManager.update_block_async": self._update,
            "BlockManager.create_or_update_block_async": self._refuse_creation,
            "AgentManager.attach_block_async": self._refuse_attachment,
            "AgentManager.detach_block_async": self._refuse_attachment,
        }
        git = "letta.services.block_manager_git"  # writes its repository before the database
        return (
            *(replace(one, wrapper=_within(one.wrapper, inner[one.path])) for one in TARGETS if one.path in inner),
            Target(
                git, "GitEnabledBlockManager.update_block_async", ("block_id", "block_update", "actor"), self._update
            ),
            Target(
                "letta.agents.letta_agent_batch", "LettaAgentBatch._bulk_rethink_memory_async", ("params",), self._batch
            ),
        )

    def restart(self) -> None:
        """In the child after a fork: the parent's connections are not ours."""
        self._store, self._lock = None, threading.Lock()

    def close(self) -> None:
        """Let go of the database."""
        with self._lock:
            if self._store is not None:
                with contextlib.suppress(Exception):
                    self._store.ledger.close()
            self._store = None

    # -- what is wrapped -----------------------------------------------------------------------------------------

    async def _tool(self, wrapped: _Call, instance: Any, args: _Arguments, kwargs: _Named) -> Any:
        shared = getattr(instance, "agent_state", None)
        tool = await self._started(getattr(shared, "id", None))
        own = _apart(shared, tool.hold)
        if own is not None:
            instance.agent_state = own
        token = _running.set(tool)
        try:
            result = await wrapped(*args, **kwargs)
        finally:
            _running.reset(token)
            if own is not None:
                instance.agent_state = shared
                _bring_back(shared, own, tool.hold)
        if tool.queued:
            failed = getattr(result, "status", None) == "error"  # part was refused: the agent has to know that too
            result.func_return = f"{result.func_return}\n{_said(tool.queued)}" if failed else _said(tool.queued)
        return result

    async def _update(self, wrapped: _Call, instance: Any, args: _Arguments, kwargs: _Named) -> Any:
        tool = _running.get()
        given = dict(zip(("block_id", "block_update", "actor"), args, strict=False)) | kwargs
        if tool is None:
            return await wrapped(*args, **kwargs)
        block = await instance.get_block_by_id_async(given["block_id"], given["actor"])
        wanted = given["block_update"].model_dump(exclude_unset=True, exclude_none=True)
        renamed = tool.hold.holds(None, wanted.get("label"))  # else a block made under a free name becomes a held one
        if block is None or not (renamed or await self._held(tool, block.id, block.label)):
            return await wrapped(*args, **kwargs)
        others = sorted(
            name for name, value in wanted.items() if name != "value" and getattr(block, name, None) != value
        )
        if others:
            raise _refused(f"a change of the {' and '.join(others)} of {block.label}")
        # a tool of several steps sends what it queued before again
        again = any(one.block_id == block.id and one.wanted == wanted.get("value") for one in tool.queued)
        if "value" in wanted and wanted["value"] != block.value and not again:
            tool.queued.append(await self._queue(block, wanted["value"], attribution.current()))
        return block

    async def _batch(self, wrapped: _Call, _instance: Any, args: _Arguments, kwargs: _Named) -> Any:
        """Of Letta's batch API, whose one memory tool writes for many agents at once."""
        params = kwargs.get("params", args[0] if args else None) or []
        free, answers = [], []
        for one in params:
            tool = await self._started(one.agent_id)
            label, wanted = (one.tool_args.get(name) for name in ("target_block_label", "new_memory"))
            block = next((block for block in one.agent_state.memory.blocks if block.label == label), None)
            if block is None or wanted is None or not await self._held(tool, block.id, label):
                free.append(one)
                continue
            who = attribution.Attribution(agent_id=one.agent_id, tool=one.tool_call_name)
            answers.append((one.agent_id, await self._answered(block, wanted, who)))
        return [*answers, *(await wrapped(free) if free else [])]

    async def _answered(self, block: Any, wanted: str, who: attribution.Attribution) -> Any:
        from letta.schemas.tool_execution_result import ToolExecutionResult

        try:
            return ToolExecutionResult(status="success", func_return=_said([await self._queue(block, wanted, who)]))
        except TargetRefused as error:
            return ToolExecutionResult(status="error", func_return=str(error))

    async def _refuse_creation(self, wrapped: _Call, _instance: Any, args: _Arguments, kwargs: _Named) -> Any:
        block, tool = kwargs.get("block", args[0] if args else None), _running.get()
        label = getattr(block, "label", None)
        if tool is not None and tool.hold.holds(None, label):
            raise _refused(f"a new block {label or '?'}")
        return await wrapped(*args, **kwargs)

    async def _refuse_attachment(self, wrapped: _Call, _instance: Any, args: _Arguments, kwargs: _Named) -> Any:
        block_id, tool = kwargs.get("block_id", args[1] if len(args) > 1 else None), _running.get()
        if tool is not None and await self._held(tool, block_id, None):
            raise _refused("attaching or detaching a block")
        return await wrapped(*args, **kwargs)

    def check(self, connection: Connection, changes: Iterable[Change]) -> None:
        """Whatever way a write of a tool takes, in the transaction that makes it.

        Raises:
            TargetRefused: it changes a block that is held.
        """
        tool = _running.get()
        if tool is None:
            return
        for one in changes:
            labels = [columns.label for columns in (one.before, one.after) if columns is not None]
            held = any(tool.hold.holds(one.block_id, label) for label in (None, *labels))
            if not held and one.before is not None and tool.hold.unsure(one.block_id):
                held = self._chosen.holds_in(connection, tool.agent_id, one.block_id)
            if held:
                raise _refused(f"this write of {' as '.join(dict.fromkeys(labels))}")

    # -- whose, and what ------------------------------------------------------------------------------------------

    async def _started(self, agent_id: str | None) -> _Tool:
        try:
            return _Tool(agent_id, await self._chosen.of(agent_id))
        except (
            Exception
        ) as error:  # Letta's own database does not answer: its own writes fail, and none may slip through
            logger.warning("phionyx-letta: whether %s only proposes cannot be looked up: %s", agent_id, error)
            return _Tool(agent_id, self._chosen.everything())

    async def _held(self, tool: _Tool, block_id: str | None, label: str | None) -> bool:
        """Whether this block, one of the agents that have it, or the agent whose tool runs, is named by the setting."""
        if tool.hold.holds(block_id, label):
            return True
        return (
            block_id is not None
            and tool.hold.unsure(block_id)
            and await self._chosen.holds_now(tool.agent_id, block_id)
        )

    async def _queue(self, block: Any, wanted: str, who: attribution.Attribution) -> _Queued:
        """Queue it.

        Raises:
            TargetRefused: that cannot be done; the agent is told so, without what the database said.
        """
        try:
            patch = await asyncio.to_thread(self._propose, block, wanted, who)
        except TargetRefused:
            raise
        except Exception as error:
            why = error.message if isinstance(error, PhionyxError) else type(error).__name__
            logger.error("phionyx-letta: a write of %s could not be queued, and was not made: %s", block.id, error)
            raise TargetRefused(
                f"nothing was written: the memory of this agent changes only after a person approved it, and the change of "
                f"{block.label} could not be queued for that ({why})",
                "try it again later, or tell a person",
            ) from None
        return _Queued(block.id, block.label, wanted, patch.patch_id)

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
        with self._lock:
            if self._store is None:
                if self._url is None:
                    raise TargetRefused("Letta's database is not known yet", "try again")
                self._store = SqlPatchStore(SqlLedger(self._url))
            return self._store


def _within(outer: Callable[..., Any], inner: _Call) -> Callable[..., Any]:
    """A wrapper that first does what another does."""

    async def wrapper(wrapped: _Call, instance: Any, args: _Arguments, kwargs: _Named) -> Any:
        async def call(*given: Any, **named: Any) -> Any:
            return await inner(wrapped, instance, given, named)

        return await outer(call, instance, args, kwargs)

    return wrapper


def _apart(shared: Any, hold: Hold) -> Any:
    """An agent's state in which held blocks are the tool's own; None where none are held.

    The tools of one step share the state, and some run at the same time: what one of them wants must not be taken by another, nor
    by the next prompt, for what there is.
    """
    memory = getattr(shared, "memory", None)
    if memory is None or not hold.anything():
        return None
    blocks = [one.model_copy() if hold.holds(one.id, one.label) else one for one in memory.blocks]
    return shared.model_copy(update={"memory": memory.model_copy(update={"blocks": blocks})})


def _bring_back(shared: Any, own: Any, hold: Hold) -> None:
    """Blocks that are not held and came or went."""
    before, after = ({one.id: one for one in state.memory.blocks} for state in (shared, own))
    gone = {block_id for block_id, one in before.items() if block_id not in after and not hold.holds(one.id, one.label)}
    come = [one for block_id, one in after.items() if block_id not in before and not hold.holds(one.id, one.label)]
    if gone or come:
        shared.memory.blocks = [*(one for one in shared.memory.blocks if one.id not in gone), *come]


def _said(queued: Sequence[_Queued]) -> str:
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
