"""Guarded reads: what Letta loads of blocks, their checkpoints and system messages has to be what was recorded (design, decision 7).

Session events see every load, whichever manager, route, agent or tool asks, in the transaction of the load; wrapping the readers
one by one would miss the ones nobody thought of. A step sends the stored system message without loading a block, so each step
asks for that one besides. What does not agree is refused (``reject``) or told (``report``).
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from sqlalchemy import event
from sqlalchemy.orm import ORMExecuteState, Session
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.util import await_only
from sqlalchemy.util.concurrency import in_greenlet

from phionyx_letta.errors import ReadRefused
from phionyx_letta.plugin.evidence import Mismatch, Reader
from phionyx_letta.plugin.mutation import RECORDED, BlockColumns, prompt_digest

if TYPE_CHECKING:
    from phionyx_letta.plugin.runtime import Runtime

__all__ = ["OWN", "Guard"]

#: Key of ``Session.info``: (block or message id, nonce) of what capture wrote in this transaction.
OWN = "phionyx_own"
#: The same, but it stays when a savepoint is rolled back: rows of the outbox may be this transaction's own.
DIRTY = "phionyx_dirty"
#: (message id, digest) of the system messages among them.
PROMPTS = "phionyx_prompts"
_LOADED = "phionyx_loaded"
_SEEN = "_phionyx_prompt"
#: How long a read waits at the start for the log to be read, and for the baseline to reach what it reads, s.
_PATIENCE = 30.0
#: After the start; later nothing is taken into a baseline.
_BASELINE_TIME = 120.0
_PAUSE = 0.05
_REMEMBERED = 20_000


class Guard:
    """The events, and what was found; one per process."""

    def __init__(self, runtime: Runtime, orm: Any) -> None:
        """Take the models from the imported module ``letta.orm``."""
        self._runtime = runtime
        self._rejects = runtime.settings.guard == "reject"
        self._block, self._message, self._history = orm.Block, orm.Message, orm.BlockHistory
        self._models = {orm.Block, orm.Message, orm.BlockHistory}
        self._error: type[ReadRefused] | None = None
        self._listeners: list[tuple[Any, str, Callable[..., Any]]] = [
            *((model, name, self._on_load) for model in self._models for name in ("load", "refresh")),
            (Session, "do_orm_execute", self._on_statement),
            (Session, "after_commit", self._after_commit),
            (Session, "after_soft_rollback", self._after_rollback),
            (Session, "after_transaction_end", self._after_end),
        ]
        self.restart()

    def restart(self) -> None:
        """Forget what was known: at start, and in the child after a fork. Reads wait until ``use``."""
        self._reader: Reader | None = None
        self._ready = threading.Event()
        self._started = time.monotonic()
        self._verified: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._bad: set[str] = set()

    def use(self, reader: Reader) -> None:
        """The log was read: checks can begin."""
        self._reader = reader
        self._ready.set()

    def install(self) -> None:
        """Start listening."""
        for target, name, listener in self._listeners:
            event.listen(target, name, listener)

    def uninstall(self) -> None:
        """Stop listening."""
        for target, name, listener in self._listeners:
            event.remove(target, name, listener)

    # -- loads ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _on_load(target: Any, context: Any, *_: Any) -> None:
        context.session.info.setdefault(_LOADED, []).append(target)

    def _on_statement(self, state: ORMExecuteState) -> Any:
        """Run a SELECT of what is guarded, whole, and check what it loaded before anybody sees it."""
        if not state.is_select:
            return None
        asked = {mapper.class_ for mapper in state.all_mappers} & self._models
        if not asked:
            return None
        started, info = time.monotonic(), state.session.info
        outer = info.pop(_LOADED, None)  # of the statement whose relationships this one loads
        result = state.invoke_statement().freeze()
        loaded = info.pop(_LOADED, None)
        if outer:
            info[_LOADED] = outer
        if loaded:
            self._check_loaded(state.session, loaded, self._history in asked, started)
        return result()

    def _check_loaded(self, session: Session, loaded: Sequence[Any], with_history: bool, since: float) -> None:
        own = {block_id for block_id, _ in session.info.get(OWN, ())}  # locked by this transaction until its end
        states: dict[str, str | None] = {}
        histories: list[str] = []
        for item in loaded:
            if isinstance(item, self._block):
                states[item.id] = _block_state(item)
            elif isinstance(item, self._message):
                held = item.__dict__
                if (
                    held.get("role") == "system"
                    and "content" in held
                    and "content" not in instance_state(item).committed_state
                ):
                    states[item.id] = prompt_digest(held["content"], held.get("text"))
            elif with_history:
                histories.append(item.block_id)
        states = {one: state for one, state in states.items() if one not in own}
        histories = [one for one in dict.fromkeys(histories) if one not in own]
        if states or histories:
            self._check(session, states, histories, since)

    def _check(
        self,
        session: Session,
        states: Mapping[str, str | None],
        histories: Sequence[str],
        since: float,
        *,
        need_prompts: bool = False,
    ) -> None:
        """Compare, wait for a baseline where one may come, and act on what differs."""
        try:
            found = self._compared(session, states, histories, since, need_prompts)
        except ReadRefused:
            raise
        except Exception as error:
            found = [Mismatch(None, f"what is recorded cannot be read: {type(error).__name__}: {error}", None, None)]
        self._runtime.read_checked()
        wrong = {one.block_id for one in found}
        for one, state in states.items():
            if one not in wrong and None not in wrong:
                self._bad.discard(one)
                if state is not None and one.startswith("message-"):
                    self._remember(one, state)
        if found:
            self._bad.update(one for one in wrong if one is not None)
            self._act(found)

    def _compared(
        self,
        session: Session,
        states: Mapping[str, str | None],
        histories: Sequence[str],
        since: float,
        need_prompts: bool,
    ) -> list[Mismatch]:
        patience = time.monotonic() + _PATIENCE
        while self._reader is None:
            if time.monotonic() > patience:
                return [Mismatch(None, "the log has not been read since the start of this process", None, None)]
            _sleep(_PAUSE)
        while True:
            remember = DIRTY not in session.info
            if self._rejects:
                found = self._reader.check(session.connection(), states, histories, since=since, remember=remember)
            else:
                with (
                    session.connection().begin_nested() as savepoint
                ):  # a failure of ours must not abort Letta's transaction
                    found = self._reader.check(savepoint.connection, states, histories, since=since, remember=remember)
            if not need_prompts:  # only the one at the head of a prompt has to have a record
                found = [one for one in found if one.recorded or not str(one.block_id).startswith("message-")]
            now = time.monotonic()
            young = now - self._started < _BASELINE_TIME and self._runtime.settings.baseline == "auto"
            if not (found and young and now < patience and all(one.block_id and one.recorded is None for one in found)):
                return found
            _sleep(_PAUSE * 2)

    # -- the system message of a step ----------------------------------------------------------------------------

    def around_step(
        self, wrapped: Callable[..., AsyncIterator[Any]], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncIterator[Any]:
        """``_step`` of LettaAgentV2 and V3: the system message it is given has to be the recorded one."""

        async def guarded() -> AsyncIterator[Any]:
            await self._require(instance, kwargs["messages"] if "messages" in kwargs else args[0])
            async with aclosing(wrapped(*args, **kwargs)) as steps:  # type: ignore[type-var]
                async for item in steps:
                    yield item

        return guarded()

    async def _require(self, agent: Any, messages: Sequence[Any]) -> None:
        first = messages[0] if messages else None
        if first is None or getattr(first.role, "value", first.role) != "system":
            return
        digest = prompt_digest(first.content)
        held = {first.id, *(block.id for block in agent.agent_state.memory.blocks)}
        # what a long run holds in memory may be overtaken meanwhile: it was checked when the run began
        seen = agent.__dict__.get(_SEEN) == (first.id, digest) or (first.id, digest) in self._verified
        if not seen or held & self._bad:
            states: dict[str, str | None] = {first.id: digest, **dict.fromkeys(held & self._bad - {first.id})}
            async with sys.modules["letta.server.db"].db_registry.async_session() as session:
                await session.run_sync(self._check, states, (), time.monotonic(), need_prompts=True)
        agent.__dict__[_SEEN] = (first.id, digest)

    def _remember(self, message_id: str, digest: str) -> None:
        self._verified[message_id, digest] = None
        self._verified.move_to_end((message_id, digest))
        while len(self._verified) > _REMEMBERED:
            self._verified.popitem(last=False)

    # -- own writes ----------------------------------------------------------------------------------------------

    def _after_commit(self, session: Session) -> None:
        if session.get_nested_transaction() is not None or self._reader is None:
            return
        for block_id, nonce in session.info.pop(OWN, ()):
            self._reader.committed(block_id, nonce)
        for message_id, digest in session.info.pop(PROMPTS, ()):
            self._remember(message_id, digest)

    @staticmethod
    def _after_rollback(session: Session, _previous: Any) -> None:
        for key in (OWN, PROMPTS, _LOADED):
            session.info.pop(key, None)

    @staticmethod
    def _after_end(session: Session, transaction: Any) -> None:
        if transaction.parent is None:
            for key in (OWN, PROMPTS, DIRTY):
                session.info.pop(key, None)

    # -- what was found ------------------------------------------------------------------------------------------

    def _act(self, found: Iterable[Mismatch]) -> None:
        said = [describe(one) for one in found]
        for message, remedy in said:
            self._runtime.read_refused(f"{message}; {remedy}", refused=self._rejects)
        if self._rejects:
            raise self._refusal()(*said[0])

    def _refusal(self) -> type[ReadRefused]:
        if self._error is None:
            errors = sys.modules.get("letta.errors")
            self._error = _error_of_lettas(errors.LettaError) if errors is not None else ReadRefused
        return self._error


def _error_of_lettas(base: type[Exception]) -> type[ReadRefused]:
    """The refusal as one of Letta's errors too: only those reach the reader of a stream with their text."""

    class Refusal(ReadRefused, base):  # type: ignore[misc, valid-type]
        def __init__(self, message: str, remedy: str) -> None:
            super().__init__(message, remedy)
            self.code = None
            self.details: dict[str, str] = {}

    Refusal.__name__ = Refusal.__qualname__ = "ReadRefused"
    return Refusal


def describe(one: Mismatch) -> tuple[str, str]:
    """What is wrong, and what to do about it."""
    if one.block_id is None:
        return f"no memory is served: {one.what}", (
            "`phionyx-letta verify --checkpoint` says more; once it is resolved (after a legitimate restore: `phionyx-letta reconcile"
            " --accept-rollback`), start the servers anew"
        )
    message = f"{one.block_id} is not served: {one.what}; recorded {one.recorded or 'nothing'}, found {one.found or 'nothing'}"
    return (
        message,
        "run `phionyx-letta reconcile`: --restore puts back what was recorded, --adopt records what is there",
    )


def _block_state(block: Any) -> str | None:
    """Digest of what was loaded; None where not all of it was, or something was changed in memory since."""
    values = {name: block.__dict__.get(name, ...) for name in RECORDED}
    if ... in values.values() or instance_state(block).committed_state.keys() & set(RECORDED):
        return None
    return BlockColumns(**values).digest()


def _sleep(seconds: float) -> None:
    if in_greenlet():
        await_only(asyncio.sleep(seconds))
    else:
        time.sleep(seconds)
