"""Runs inside a process with Letta and guarded reads (reject): writers that change, read, undo and attach blocks at once.

``guard_stress.py SEED WRITERS SECONDS``: several of these processes work on the same blocks and agents. Errors that Letta itself
gives to writers that compete are counted and no fault; a refused read is. Prints one JSON object.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from typing import Any

import letta.server.rest_api.app as app
from letta.schemas.agent import CreateAgent
from letta.schemas.block import Block, BlockUpdate
from letta.schemas.embedding_config import EmbeddingConfig
from letta.schemas.llm_config import LLMConfig
from letta.server.db import engine
from letta.services.block_manager import BlockManager
from sqlalchemy import text

from phionyx_letta.errors import EvidenceRefused, ReadRefused
from phionyx_letta.plugin import activation

SEED, WRITERS, SECONDS = (int(argument) for argument in sys.argv[1:4])
LEAST = 400  # acts, however slow the machine is
server = app.server
blocks, agents = BlockManager(), server.agent_manager
done: Counter[str] = Counter()
refusals: list[str] = []


async def shared(user: Any) -> tuple[list[str], list[str]]:
    """Blocks and agents of all processes: the first that comes makes them."""
    async with engine.begin() as connection:
        await connection.execute(text("create table if not exists stress (id text primary key)"))
    async with engine.begin() as connection:
        await connection.execute(text("lock table stress in access exclusive mode"))
        if not (await connection.execute(text("select count(*) from stress"))).scalar():
            for _ in range(4):
                block = await blocks.create_or_update_block_async(Block(label="human", value="0"), user)
                for _ in range(3):
                    await blocks.checkpoint_block_async(block.id, user)
                await connection.execute(text("insert into stress values (:id)"), {"id": block.id})
                agent = await agents.create_agent_async(_agent(block.id), user)
                await connection.execute(text("insert into stress values (:id)"), {"id": agent.id})
        ids = list((await connection.execute(text("select id from stress order by id"))).scalars())
    return [i for i in ids if i.startswith("block")], [i for i in ids if i.startswith("agent")]


def _agent(block_id: str) -> CreateAgent:
    model = LLMConfig(
        model="m", model_endpoint_type="openai", model_endpoint="http://127.0.0.1:9/v1", context_window=9000
    )
    embedding = EmbeddingConfig.default_config(provider="openai")
    return CreateAgent(llm_config=model, embedding_config=embedding, include_base_tools=False, block_ids=[block_id])


async def act(chance: random.Random, user: Any, block_ids: list[str], agent_ids: list[str]) -> str:
    block_id, agent_id = chance.choice(block_ids), chance.choice(agent_ids)
    name = chance.choice(
        ["write"] * 4
        + ["read", "agent", "list", "undo", "redo", "checkpoint", "by label", "rebuild", "new", "message", "bulk"]
    )
    if name == "write":
        change = {chance.choice(["value", "description"]): f"{SEED} {chance.random()}"}
        await blocks.update_block_async(block_id, BlockUpdate(**change), user)
    elif name == "read":
        assert await blocks.get_block_by_id_async(block_id, user) is not None
    elif name == "agent":
        await agents.get_agent_by_id_async(agent_id, actor=user)
    elif name == "list":
        await blocks.get_all_blocks_by_ids_async(block_ids, user)
    elif name == "undo":
        await blocks.undo_checkpoint_block(block_id, user)
    elif name == "redo":
        await blocks.redo_checkpoint_block(block_id, user)
    elif name == "checkpoint":
        await blocks.checkpoint_block_async(block_id, user)
    elif name == "by label":
        await agents.modify_block_by_label_async(agent_id, "human", BlockUpdate(value=str(chance.random())), user)
    elif name == "rebuild":
        await agents.rebuild_system_prompt_async(agent_id, user, force=True)
    elif name == "message":
        assert await agents.get_in_context_messages(agent_id=agent_id, actor=user)
    elif name == "bulk":
        await blocks.bulk_update_block_values_async({i: f"bulk {chance.random()}" for i in block_ids[:2]}, user)
    else:
        block = await blocks.create_or_update_block_async(Block(label="own", value="x"), user)
        await agents.attach_block_async(agent_id, block.id, user)
        await agents.detach_block_async(agent_id, block.id, user)
        await blocks.delete_block_async(block.id, user)
    return name


async def write(number: int, user: Any, block_ids: list[str], agent_ids: list[str], end: float) -> None:
    chance = random.Random(f"{SEED} {number}")
    while time.monotonic() < end or (sum(done.values()) < LEAST and time.monotonic() < end + 10 * SECONDS):
        try:
            done[await act(chance, user, block_ids, agent_ids)] += 1
        except (ReadRefused, EvidenceRefused) as error:
            refusals.append(str(error))
        except Exception as error:
            done[f"Letta: {type(error).__name__}"] += 1


async def main() -> None:
    await server.init_async()
    user = await server.user_manager.get_actor_or_default_async(None)
    block_ids, agent_ids = await shared(user)
    end = time.monotonic() + SECONDS
    await asyncio.gather(*(write(number, user, block_ids, agent_ids, end) for number in range(WRITERS)))


asyncio.run(main())
worker = activation.worker()
assert worker is not None
counts = worker.runtime.counts
told = [finding["what"] for finding in worker.runtime.refused]  # also what Letta swallowed
print(
    json.dumps(
        {
            "done": done,
            "refusals": refusals[:5],
            "told": told,
            "refused": counts["reads_refused"],
            "checked": counts["reads_checked"],
        }
    )
)
