"""Runs inside a process with Letta and the armed plugin: patches of blocks are applied and reverted without REST.

Prints one JSON object: what the block held, what was raised, and the envelopes with a patch behind them.
"""

import asyncio
import json
import os
import time
from typing import Any

import letta.server.rest_api.app as app
from letta.schemas.agent import CreateAgent
from letta.schemas.block import BlockUpdate, CreateBlock
from letta.schemas.conversation import CreateConversation
from letta.schemas.embedding_config import EmbeddingConfig
from letta.schemas.llm_config import LLMConfig
from letta.server.db import engine
from letta.services.conversation_manager import ConversationManager
from sqlalchemy import text

from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.memory.blocks import block_name
from phionyx_letta.memory.living import LivingMemory
from phionyx_letta.memory.patches import MemoryPatch, transition
from phionyx_letta.memory.store_sql import SqlOccurrenceTracker, SqlPatchStore
from phionyx_letta.plugin.block_server import ServerBlocks
from phionyx_letta.plugin.own_model import OwnModel
from phionyx_letta.signing import get_signer

server = app.server
blocks, agents = server.block_manager, server.agent_manager
signer = get_signer()
found: dict[str, Any] = {}


def patch_of(name: str, before: str, after: str) -> MemoryPatch:
    patch = MemoryPatch(name, before, after, "", "a test")
    transition(patch, "pending", by="a test", signer=signer)
    return patch


def review(living: LivingMemory, name: str, block_id: str, run: Any) -> None:
    """In a thread, as a reviewer's program of this process would."""

    def value() -> str:
        return str(run(blocks.get_block_by_id_async(block_id, found["user"])).value)

    first = living.store.save(patch_of(name, "Ada", "Ada\nLikes tea."))
    living.apply(first, by="ada")
    found["applied"] = value()
    living.revert(first, by="ada")
    found["reverted"] = value()
    second = living.store.save(patch_of(name, "Ada", "Ada\nLikes coffee."))
    target = living.targets.resolve(name)
    held = target.read()
    run(blocks.update_block_async(block_id, BlockUpdate(value="Eve"), found["user"]))
    for what, act in {
        "raced": lambda: target.write(
            held, "Ada\nLikes coffee.", {"event": "apply", "patch_id": "p", "reviewer": "ada"}
        ),
        "conflict": lambda: living.apply(second, by="ada"),
        "too long": lambda: target.write("Eve", "x" * 10_000),
        "no such": lambda: living.targets.resolve(block_name("agent-none", block_id, "human")).read(),
    }.items():
        try:
            act()
        except Exception as error:
            found[what] = [type(error).__name__, str(error)]
    found["at last"] = value()


async def no_key(agent: Any, user: Any) -> None:
    """The key a user brought along is asked for where nobody answers."""
    model = OwnModel(timeout=0.5)
    model.loop = asyncio.new_event_loop()  # it never runs
    config = {**agent.llm_config.model_dump(mode="json"), "provider_category": "byok", "provider_name": "mine"}
    began = time.monotonic()
    try:
        await model.ask({"prompt": "x", "llm_config": config, "organization_id": user.organization_id})
    except Exception as error:
        found["no key"] = [type(error).__name__, time.monotonic() - began]
    model.loop.close()


async def conversations_copy(agent: Any, user: Any, targets: ServerBlocks) -> None:
    """A block that a conversation has for itself is the agent's too."""
    create = CreateConversation(isolated_block_labels=["human"])
    [copy] = (await ConversationManager().create_conversation(agent.id, create, user)).isolated_block_ids
    target = targets.resolve(block_name(agent.id, copy, "human"))
    found["copy"] = [await asyncio.to_thread(target.read)]
    await asyncio.to_thread(target.write, found["copy"][0], "copied", {})
    found["copy"].append(await asyncio.to_thread(target.read))


async def main() -> None:
    server.default_org = await server.organization_manager.create_default_organization_async()
    user = found["user"] = await server.user_manager.create_default_actor_async()
    model = LLMConfig(
        model="gpt-4o-mini", model_endpoint_type="openai", model_endpoint="http://127.0.0.1:9/v1", context_window=32000
    )
    new = CreateAgent(
        llm_config=model,
        embedding_config=EmbeddingConfig.default_config(provider="openai"),
        include_base_tools=False,
        memory_blocks=[CreateBlock(label="human", value="Ada", limit=500)],
    )
    agent = await agents.create_agent_async(new, user)
    [block] = agent.memory.blocks
    loop = asyncio.get_running_loop()
    ledger = SqlLedger(os.environ["LETTA_PG_URI"])
    targets = ServerBlocks(blocks, user, loop)
    living = LivingMemory(
        [],
        store=SqlPatchStore(ledger),
        occurrences=SqlOccurrenceTracker(ledger),
        targets=targets,
        signer=signer,
        verifier=signer.verifier(),
    )
    name = block_name(agent.id, block.id, "human")
    await no_key(agent, user)
    await asyncio.to_thread(review, living, name, block.id, targets.wait_for)
    await conversations_copy(agent, user, targets)
    async with engine.connect() as connection:
        while (await connection.execute(text("select count(*) from phionyx_outbox"))).scalar():
            await asyncio.sleep(0.05)
        rows = await connection.execute(
            text("select body from phionyx_envelope where block_id = :block order by seq"), {"block": block.id}
        )
        bodies = [json.loads(row.body)["subject"]["metadata"] for row in rows]
    found["behind"] = [one["living_memory"] for one in bodies if "living_memory" in one]
    del found["user"]
    ledger.close()
    print(json.dumps(found))


asyncio.run(main())
