"""The process that proposes: closes sessions, claims them, asks a model what to remember, and queues patches of the agent's blocks.

Each armed worker has one (``proposing_process``); its end of the pipe is the worker's life. What a session leads to (counts of facts,
patches, the session's own state) is committed together, so a process killed anywhere leaves a session as it was or done.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

from phionyx_letta.errors import PhionyxError, ProposerUnavailable
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.memory.blocks import AgentBlocks, BlockRouter
from phionyx_letta.memory.living import LivingMemory
from phionyx_letta.memory.patches import MemoryPatch
from phionyx_letta.memory.store_sql import SqlOccurrenceTracker, SqlPatchStore, in_one_transaction
from phionyx_letta.plugin.letta_sessions import Agent, read_agent, read_records, read_runs, said_by_user
from phionyx_letta.plugin.runtime import PluginKey, load_key, logger
from phionyx_letta.plugin.session_queue import Claim, ClaimLost, SessionQueue
from phionyx_letta.settings import Settings, load_settings

#: How often the queue is looked at, runs are swept, and claims are renewed, s.
POLL, _SWEEP, _RENEW = 1.0, 10.0, 15.0
#: Wait after a failure of the database, s.
_RETRY = 2.0


class Pipe:
    """The way to the worker, which asks agents' models for this process."""

    def __init__(self) -> None:
        """Use the standard input and output of this process."""
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ended = threading.Event()

    def listen(self, loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
        """Begin to read answers; ``stopped`` is set at the end of the input."""
        self._loop = loop

        def read() -> None:
            for line in sys.stdin:
                loop.call_soon_threadsafe(self._answered, json.loads(line))
            self.ended.set()
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stopped.set)

        threading.Thread(target=read, daemon=True).start()

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and wait for its answer."""
        number = next(self._numbers)
        assert self._loop is not None
        answer = self._waiting[number] = self._loop.create_future()
        print(json.dumps({"id": number, **request}), flush=True)
        try:
            given: dict[str, Any] = await answer
        finally:
            del self._waiting[number]
        return given

    def _answered(self, answer: dict[str, Any]) -> None:
        future = self._waiting.get(answer.get("id", 0))
        if future is not None and not future.done():
            future.set_result(answer)


class AgentsModel:
    """A proposer: the agent's own model, asked by the worker."""

    def __init__(self, pipe: Pipe, agent: Agent) -> None:
        """Take the way to the worker, and whose model it is."""
        self._pipe = pipe
        self._agent = agent
        self.tokens = 0
        self.model = agent.model

    async def agenerate(self, prompt: str) -> str:
        """Return the model's answer.

        Raises:
            ProposerUnavailable: there was none.
        """
        agent = self._agent
        answer = await self._pipe.ask(
            {
                "prompt": prompt,
                "llm_config": dict(agent.llm_config or {}),
                "organization_id": agent.organization_id,
                "user_id": agent.user_id,
            }
        )
        if "error" in answer:
            raise ProposerUnavailable(str(answer["error"]), "the session is tried again later")
        self.tokens += int(answer.get("tokens") or 0)
        return str(answer.get("text") or "")


class WithinBudget:
    """A proposer that is asked no more once the agent's tokens of the day are spent: what the session says after that is not read."""

    def __init__(self, proposer: Any, left: int | None) -> None:
        """Take what is asked, and the tokens it may still take; None for no limit."""
        self._proposer = proposer
        self._left = left
        self.unread = 0
        """Questions that were not asked."""

    @property
    def model(self) -> Any:
        """The name of the model."""
        return self._proposer.model

    @property
    def tokens(self) -> int:
        """What was spent so far."""
        return int(getattr(self._proposer, "tokens", 0))

    async def agenerate(self, prompt: str) -> str:
        """Return the model's answer, or one that proposes nothing.

        Raises:
            ProposerUnavailable: there was none.
        """
        if self._left is not None and self.tokens >= self._left:
            self.unread += 1
            return '{"proposals": []}'
        return str(await self._proposer.agenerate(prompt))


class Sessions:
    """Drains the queue, a few sessions at a time."""

    def __init__(self, ledger: SqlLedger, key: PluginKey, settings: Settings, name: str, pipe: Pipe) -> None:
        """Take the database, what signs patches, and the way to the worker."""
        self._ledger = ledger
        self._key = key
        self._settings = settings
        self._pipe = pipe
        self._store = SqlPatchStore(ledger)
        self.queue = SessionQueue(ledger, settings, name)
        self._storing = asyncio.Lock()
        self._routes = dict(pair.split("=", 1) for pair in settings.session_blocks.split())

    async def drain(self, stopped: asyncio.Event) -> None:
        """Work until told to stop; what is under way then is given back.

        Raises:
            LedgerUnavailable: the database does not answer; nothing is lost, call again.
        """
        at_work: set[asyncio.Task[None]] = set()
        swept = renewed = float("-inf")
        try:
            while not stopped.is_set():
                now = time.monotonic()
                if now - swept >= _SWEEP:
                    self.queue.sweep()
                    swept = now
                if at_work and now - renewed >= _RENEW:
                    self.queue.renew()
                    renewed = now
                self.queue.close()
                while len(at_work) < self._settings.session_concurrency and (claim := self.queue.claim()) is not None:
                    at_work.add(asyncio.create_task(self._work(claim)))
                waiting = asyncio.create_task(stopped.wait())
                done, _ = await asyncio.wait({waiting, *at_work}, timeout=POLL, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                for task in done & at_work:
                    at_work.discard(task)
                    task.result()
        finally:
            for task in at_work:
                task.cancel()
            await asyncio.gather(*at_work, return_exceptions=True)
            with contextlib.suppress(PhionyxError):
                self.queue.release()

    async def _work(self, claim: Claim) -> None:
        """One session; every outcome is written into the queue, none is raised but a database that is away."""
        proposer: Any = None
        try:
            agent, runs, records = await asyncio.to_thread(
                self._read, claim
            )  # megabytes would stop the renewing of claims
            why = self._leave_out(agent, records)
            if agent is None or why is not None:
                self.queue.settle(claim, "skipped", detail=why)
                return
            later = self.queue.not_yet(agent.agent_id)
            if later is not None:
                self.queue.postpone(claim, *later)
                return
            proposer = WithinBudget(self._proposer(agent), self.queue.tokens_left(agent.agent_id))
            await self._propose(claim, agent, runs, records, proposer)
        except ClaimLost:
            logger.warning("phionyx-letta: another worker took %s; nothing of it was stored here", claim.session_id)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._failed(claim, error, proposer)

    def _read(self, claim: Claim) -> tuple[Agent | None, list[str], list[dict[str, Any]]]:
        with self._ledger.engine.connect() as connection:
            agent = read_agent(connection, claim.agent_id)
            runs = read_runs(connection, claim.session_id)
            return agent, runs, read_records(connection, claim.agent_id, runs) if agent is not None else []

    def _failed(self, claim: Claim, error: Exception, proposer: Any) -> None:
        why = error.message if isinstance(error, PhionyxError) else f"{type(error).__name__}"
        with contextlib.suppress(ClaimLost):
            parked = self.queue.failed(
                claim, why, tokens=getattr(proposer, "tokens", 0), model=getattr(proposer, "model", None)
            )
            said = "is parked" if parked else "is tried again later"
            logger.warning("phionyx-letta: %s %s (attempt %s): %s", claim.session_id, said, claim.attempt, why)

    def _leave_out(self, agent: Agent | None, records: list[dict[str, Any]]) -> str | None:
        if agent is None:
            return "the agent was deleted"
        if self._settings.session_opt_out_tag in agent.tags:
            return f"the agent has the tag {self._settings.session_opt_out_tag}"
        said = said_by_user(records)
        if said < self._settings.session_min_chars or not records:
            return f"the user said {said} characters, fewer than {self._settings.session_min_chars}"
        return None

    def _proposer(self, agent: Agent) -> Any:
        if self._settings.session_proposer == "openai":
            from phionyx_letta.memory.openai_proposer import OpenAIProposer

            return OpenAIProposer()
        if agent.llm_config is None:
            raise ProposerUnavailable("the agent has no model", "set PHIONYX_LETTA_SESSION_PROPOSER=openai")
        return AgentsModel(self._pipe, agent)

    async def _propose(
        self, claim: Claim, agent: Agent, runs: list[str], records: list[dict[str, Any]], proposer: WithinBudget
    ) -> None:
        occurrences = SqlOccurrenceTracker(self._ledger, scope=agent.agent_id)
        living = LivingMemory(
            [],
            proposer,
            targets=AgentBlocks(self._ledger, agent.agent_id, read_only=self._settings.session_read_only),
            store=self._store,
            occurrences=occurrences,
            occurrence_threshold=self._settings.session_threshold,
            file_router=BlockRouter(self._routes),
            signer=self._key.signer,
            verifier=self._key.verifier(),
            provenance={
                "agent_id": agent.agent_id,
                "conversation_id": claim.conversation_id,
                "session": claim.session_id,
                "runs": runs[-50:],
                "model": proposer.model,
            },
        )
        found = await living.ask_about(claim.session_id, session_records=records)
        cost = {"model": proposer.model, "tokens": proposer.tokens}
        unread = "read in part: the agent's tokens of the day are used up" if proposer.unread else None
        if self._settings.sessions == "dry-run":
            self.queue.settle(
                claim,
                "done",
                detail="; ".join(filter(None, (f"dry run: {len(found)} facts were found", unread))),
                **cost,
            )  # no content
            return

        def store() -> list[MemoryPatch]:
            with in_one_transaction(self._store, occurrences) as connection:
                self.queue.hold(connection, claim)
                patches = living.keep(found, claim.session_id)
                detail = None if patches or not found else f"{len(found)} facts were counted; none is due"
                said = "; ".join(filter(None, (detail, unread))) or None
                self.queue.finish(connection, claim, "done", patches=len(patches), detail=said, **cost)
            return patches

        async with self._storing:  # one after the other, and none in the event loop: locks may be waited for
            patches = await asyncio.to_thread(store)
        for patch in patches:
            logger.info("phionyx-letta: patch %s to %s waits for review", patch.patch_id, patch.file_path)


async def _drain_forever(url: str, name: str, pipe: Pipe) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    pipe.listen(loop, stopped)
    settings = load_settings()
    key = load_key(settings)
    failing = ""
    while not stopped.is_set():
        try:
            with contextlib.closing(SqlLedger(url)) as ledger:
                await Sessions(ledger, key, settings, name, pipe).drain(stopped)
        except Exception as error:  # whatever it is, sessions wait in the queue and nothing is lost by trying again
            message = f"{type(error).__name__}: {error}"
            if message != failing:
                logger.error("phionyx-letta: proposals wait for the database: %s", message)
            failing = message
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _RETRY)


def main() -> None:
    """Entry point of the process: one JSON line with the database's URL on standard input, then the worker's answers."""
    logging.basicConfig(format="%(name)s - %(levelname)s - %(message)s")
    with contextlib.suppress(OSError):
        os.nice(10)  # where all cores are busy, the agents go first
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server; its end closes our input
    line = sys.stdin.readline()
    if not line:
        return
    given = json.loads(line)
    asyncio.run(_drain_forever(given["url"], f"{given['name']}/{os.getpid()}", Pipe()))


if __name__ == "__main__":
    main()
