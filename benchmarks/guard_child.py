"""One Letta process of the benchmarks of guarded reads: real agents whose model is scripted, and reads of blocks.

The same script runs with reads guarded and not; only PHIONYX_LETTA_GUARD differs. The agent, its run and its message are made
before the clock starts; what is timed is what a request does: loading the agent, and one step of it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measuring import say

_BLOCK = "lorem ipsum dolor sit amet\n" * 75
_LOADED = ["memory", "multi_agent_group", "sources", "tool_exec_environment_variables", "tools", "tags"]


class Reader:
    """Steps agents and reads blocks."""

    def __init__(self, server: Any) -> None:
        """``server`` is Letta's; ``start`` first."""
        self._server = server
        self._actor: Any = None
        self._agent = ""
        self._blocks: list[str] = []

    async def start(self) -> None:
        """Make the user, twenty blocks and an agent that has five of them and forgets each conversation."""
        from letta.schemas.agent import CreateAgent
        from letta.schemas.block import Block
        from letta.schemas.embedding_config import EmbeddingConfig
        from letta.schemas.llm_config import LLMConfig

        self._server.default_org = await self._server.organization_manager.create_default_organization_async()
        self._actor = await self._server.user_manager.create_default_actor_async()
        for number in range(20):
            block = Block(label=f"label_{number}", value=_BLOCK + str(number), limit=50_000)
            made = await self._server.block_manager.create_or_update_block_async(block, self._actor)
            self._blocks.append(made.id)
        agent = CreateAgent(
            name=f"bench-{os.getpid()}",
            agent_type="letta_v1_agent",
            llm_config=LLMConfig(
                model="gpt-4o-mini",
                model_endpoint_type="openai",
                model_endpoint=os.environ["OPENAI_API_BASE"],
                context_window=32_000,
            ),
            embedding_config=EmbeddingConfig.default_config(provider="openai"),
            block_ids=self._blocks[:5],
            include_base_tools=False,
            message_buffer_autoclear=True,
        )
        self._agent = (await self._server.agent_manager.create_agent_async(agent, self._actor)).id

    async def steps(self, count: int) -> float:
        """Median seconds of a step that answers in words."""
        return await self._timed(count, self._step)

    async def reads(self, count: int) -> float:
        """Median seconds of a read of the twenty blocks."""
        return await self._timed(count, self._read)

    async def _timed(self, count: int, work: Callable[[], Awaitable[float]]) -> float:
        gc.collect()
        gc.freeze()
        gc.disable()
        taken = [await work() for _ in range(count)]
        gc.enable()
        return statistics.median(taken)

    async def _step(self) -> float:
        from letta.agents.agent_loop import AgentLoop
        from letta.schemas.message import MessageCreate
        from letta.schemas.run import Run

        run = await self._server.run_manager.create_run(Run(agent_id=self._agent, background=False), self._actor)
        message = MessageCreate(role="user", content="hello")
        start = time.perf_counter()
        state = await self._server.agent_manager.get_agent_by_id_async(
            self._agent, self._actor, include_relationships=_LOADED
        )
        loop = AgentLoop.load(agent_state=state, actor=self._actor)
        answer = await loop.step([message], max_steps=1, run_id=run.id)
        taken = time.perf_counter() - start
        if not answer.messages:
            raise RuntimeError("the agent did not answer")
        return taken

    async def _read(self) -> float:
        start = time.perf_counter()
        found = await self._server.block_manager.get_all_blocks_by_ids_async(self._blocks, self._actor)
        taken = time.perf_counter() - start
        if len(found) != len(self._blocks):
            raise RuntimeError("not all blocks were read")
        return taken


async def main() -> None:
    """Answer questions until the input ends."""
    sys.argv.append("--no-generation")  # importing Letta's app writes a large file without it
    import letta.server.rest_api.app as app

    reader = Reader(app.server)
    await reader.start()
    say("ready")
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        question = json.loads(line)
        say(await getattr(reader, question.pop("do"))(**question))


if __name__ == "__main__":
    asyncio.run(main())
