"""One Letta process of the write benchmarks: its own managers on PostgreSQL, driven line by line from outside.

The same script runs with the plugin off and on; only PHIONYX_LETTA_ENABLE differs. What is timed is
``BlockManager.update_block_async`` alone.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measuring import say

_LINE = "lorem ipsum dolor sit amet\n"


class Writer:
    """Updates blocks, one after the other or many at once."""

    def __init__(self, server: Any) -> None:
        """``server`` is Letta's; ``start`` first."""
        self._server = server
        self._blocks: dict[str, list[str]] = {}
        self._actor: Any = None
        self._number = 0

    async def start(self) -> None:
        """Make the organization and the user."""
        self._server.default_org = await self._server.organization_manager.create_default_organization_async()
        self._actor = await self._server.user_manager.create_default_actor_async()

    async def writes(self, size: int, attached: bool, tasks: int, count: int) -> dict[str, float]:
        """``count`` updates of each of ``tasks`` blocks, the tasks side by side.

        Gives the median seconds of one update, and those of the whole round.
        """
        blocks = await self._some_blocks("attached" if attached else "free", tasks)
        gc.collect()
        gc.freeze()
        gc.disable()
        start = time.perf_counter()
        taken = await asyncio.gather(*(self._update(block, size, count) for block in blocks))
        total = time.perf_counter() - start
        gc.enable()
        return {"median": statistics.median(one for times in taken for one in times), "total": total}

    async def paced(self, per_second: float, count: int) -> int:
        """Updates of 100 blocks in turn at a steady pace, whether or not the last one is done."""
        blocks = await self._some_blocks("paced", 100)
        start, running = time.perf_counter(), []
        for number in range(count):
            await asyncio.sleep(max(0.0, start + number / per_second - time.perf_counter()))
            running.append(asyncio.create_task(self._update(blocks[number % len(blocks)], 2_000, 1)))
        await asyncio.gather(*running)
        return count

    async def cpu(self, count: int, captured: bool) -> float:
        """Seconds of this thread's CPU per update of a 2 kB block, with capture's listeners taken out or in."""
        _listen(captured)
        (block,) = await self._some_blocks("cpu", 1)
        await self._update(block, 2_000, 2)  # SQLAlchemy rebuilds what it keeps per engine when listeners change
        gc.collect()
        gc.freeze()
        gc.disable()
        start = time.thread_time()
        await self._update(block, 2_000, count)
        taken = time.thread_time() - start
        gc.enable()
        return taken / count

    async def _update(self, block_id: str, size: int, count: int) -> list[float]:
        from letta.schemas.block import BlockUpdate

        body, taken = _LINE * (size // len(_LINE)), []
        for _ in range(count):
            self._number += 1
            change = BlockUpdate(value=body + f"line {self._number}")
            start = time.perf_counter()
            await self._server.block_manager.update_block_async(block_id, change, self._actor)
            taken.append(time.perf_counter() - start)
        return taken

    async def _some_blocks(self, kind: str, count: int) -> list[str]:
        """The first ``count`` blocks of a kind, made when first needed; an attached one has an agent to itself."""
        from letta.schemas.block import Block

        have = self._blocks.setdefault(kind, [])
        while len(have) < count:
            block = await self._server.block_manager.create_or_update_block_async(
                Block(label="human", value="x", limit=50_000), self._actor
            )
            if kind == "attached":
                await self._create_agent(block.id)
            have.append(block.id)
        return have[:count]

    async def _create_agent(self, block_id: str) -> None:
        from letta.schemas.agent import CreateAgent
        from letta.schemas.embedding_config import EmbeddingConfig
        from letta.schemas.llm_config import LLMConfig

        self._number += 1
        agent = CreateAgent(
            name=f"bench-{os.getpid()}-{self._number}",
            llm_config=LLMConfig(
                model="scripted",
                model_endpoint_type="openai",
                model_endpoint="http://127.0.0.1:9/v1",
                context_window=32_000,
            ),
            embedding_config=EmbeddingConfig.default_config(provider="openai"),
            block_ids=[block_id],
            include_base_tools=False,
        )
        await self._server.agent_manager.create_agent_async(agent, self._actor)


def _listen(captured: bool) -> None:
    """Take capture's listeners out or in; the wrapped functions stay."""
    from sqlalchemy import event

    from phionyx_letta.plugin import activation

    worker = activation.worker()
    assert worker is not None
    capture = worker._capture
    assert capture is not None
    listening = event.contains(*capture._listeners[0])
    if listening and not captured:
        capture.uninstall()
    elif captured and not listening:
        capture.install()


async def main() -> None:
    """Answer questions until the input ends."""
    sys.argv.append("--no-generation")  # importing Letta's app writes a large file without it
    import letta.server.rest_api.app as app

    writer = Writer(app.server)
    await writer.start()
    say("ready")
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        question = json.loads(line)
        say(await getattr(writer, question.pop("do"))(**question))


if __name__ == "__main__":
    asyncio.run(main())
