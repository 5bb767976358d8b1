"""Runs inside a process with Letta and the armed plugin: the ways an agent's write may take that no REST request reaches.

The tag `asks-first` and the block HELD only propose. Prints one JSON object: what each way answered, and what the blocks hold then.
"""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import letta.server.rest_api.app as app
from letta.agents.letta_agent_batch import LettaAgentBatch, ToolExecutionParams
from letta.schemas.agent import AgentState, CreateAgent
from letta.schemas.block import Block, BlockUpdate, CreateBlock
from letta.schemas.conversation import CreateConversation
from letta.schemas.embedding_config import EmbeddingConfig
from letta.schemas.enums import ToolType
from letta.schemas.llm_config import LLMConfig
from letta.schemas.tool_execution_result import ToolExecutionResult
from letta.server.db import engine
from letta.services.agent_manager import AgentManager
from letta.services.block_manager_git import GitEnabledBlockManager
from letta.services.conversation_manager import ConversationManager
from letta.services.memory_repo import MemfsClient
from letta.services.tool_executor.tool_execution_manager import ToolExecutionManager, ToolExecutorFactory
from sqlalchemy import event, text

from phionyx_letta.plugin import activation

server = app.server
HELD, GIT_LABEL, said = sys.argv[1], "system/human", {}


async def new_agent(user: Any, *tags: str, **more: Any) -> AgentState:
    model = LLMConfig(
        model="gpt-4o-mini", model_endpoint_type="openai", model_endpoint="http://127.0.0.1:9/v1", context_window=32000
    )
    new = CreateAgent(
        llm_config=model,
        embedding_config=EmbeddingConfig.default_config(provider="openai"),
        include_base_tools=False,
        tags=list(tags),
        memory_blocks=[CreateBlock(label="persona", value="I help."), *more.pop("memory_blocks", [])],
        tools=["core_memory_append"],
        **more,
    )
    return await server.agent_manager.create_agent_async(new, user)


async def human(user: Any, *tags: str) -> AgentState:
    return await new_agent(user, *tags, memory_blocks=[CreateBlock(label="human", value="name: Ann")])


async def call(user: Any, state: AgentState, content: str, label: str = "human", manager: Any = None) -> str:
    """The agent's tool, as an agent's step calls it."""
    blocks = manager or server.block_manager
    execution = ToolExecutionManager(
        message_manager=server.message_manager,
        agent_manager=AgentManager(block_manager=blocks),
        block_manager=blocks,
        run_manager=server.run_manager,
        passage_manager=server.passage_manager,
        actor=user,
        agent_state=state,
    )
    tool = next(one for one in state.tools if one.name == "core_memory_append")
    result = await execution.execute_tool_async("core_memory_append", {"label": label, "content": content}, tool)
    return str(result.func_return)


async def value(user: Any, state: AgentState, label: str = "human") -> str:
    block_id = state.memory.get_block(label).id
    return str((await server.block_manager.get_block_by_id_async(block_id, user)).value)


async def patches(agent_id: str) -> list[str]:
    query = text("select body from phionyx_patch where newest and file_path like :name order by seq")
    async with engine.connect() as connection:
        rows = (await connection.execute(query, {"name": f"letta:{agent_id}/%"})).scalars()
        return [json.loads(body)["after_content"] for body in rows]


async def batch(user: Any) -> None:
    asks, free = await human(user, "asks-first"), await human(user)
    managers = ("message_manager", "agent_manager", "block_manager", "passage_manager", "batch_manager")
    agent = LettaAgentBatch(
        **{name: getattr(server, name) for name in (*managers, "sandbox_config_manager", "job_manager")}, actor=user
    )
    arguments = {"target_block_label": "human", "new_memory": "rewritten"}
    params = [
        ToolExecutionParams(one.id, "rethink_memory", arguments, one, user, None, {})  # type: ignore[arg-type]
        for one in (asks, free)
    ]
    answers = dict(await agent._bulk_rethink_memory_async(params))
    said["batch"] = {
        "answers": [answers[one.id].func_return for one in (asks, free)],
        "values": [await value(user, asks), await value(user, free)],
        "patches": await patches(asks.id),
    }


async def other_ways(user: Any) -> None:
    """A tool that writes in ways no tool of Letta's does today."""
    state = await human(user, "asks-first")
    block_id = state.memory.get_block("human").id
    blocks, agents = server.block_manager, server.agent_manager
    ways = {
        "bulk": lambda: blocks.bulk_update_block_values_async({block_id: "owned"}, user),
        "by label": lambda: agents.modify_block_by_label_async(state.id, "human", BlockUpdate(value="owned"), user),
        "delete": lambda: blocks.delete_block_async(block_id, user),
    }
    original = ToolExecutorFactory.get_executor
    found = {}
    for name, way in ways.items():

        async def execute(*_: Any, way: Any = way) -> ToolExecutionResult:
            await way()
            return ToolExecutionResult(status="success", func_return="written")

        ToolExecutorFactory.get_executor = lambda *_, execute=execute, **__: SimpleNamespace(execute=execute)
        found[name] = [await call(user, state, ""), await value(user, state)]
    ToolExecutorFactory.get_executor = original
    said["other ways"] = {**found, "patches": await patches(state.id)}


async def parallel(user: Any) -> None:
    state = await human(user, "asks-first")
    wanted = [("a", "human"), ("b", "human"), ("c", "persona")] * 4
    answers = await asyncio.gather(*(call(user, state, f"{text}{n}", label) for n, (text, label) in enumerate(wanted)))
    said["parallel"] = {
        "answers": answers,
        "state": [block.value for block in sorted(state.memory.blocks, key=lambda one: one.label)],
        "patches": sorted(await patches(state.id)),
        "wanted": sorted(
            {"human": "name: Ann", "persona": "I help."}[label] + f"\n{text}{n}"
            for n, (text, label) in enumerate(wanted)
        ),
    }


async def git(user: Any) -> None:
    state = await human(user, "asks-first")
    repository = MemfsClient(local_path=str(Path.cwd() / "memfs"))
    blocks = GitEnabledBlockManager(memory_repo_manager=repository)
    await blocks.enable_git_memory_for_agent(state.id, user)  # labels change with it
    state = await server.agent_manager.get_agent_by_id_async(state.id, user)

    async def head() -> str:
        return str(await repository.git.get_head_sha(agent_id=state.id, org_id=user.organization_id))

    before = await head()
    answer = await call(user, state, "likes tea", GIT_LABEL, manager=blocks)
    unchanged = await head() == before
    held, queued = await value(user, state, GIT_LABEL), await patches(state.id)
    await blocks.update_block_async(state.memory.get_block(GIT_LABEL).id, BlockUpdate(value="a person's"), user)
    said["git"] = {
        "answer": answer,
        "unchanged": unchanged,
        "value": held,
        "patches": queued,
        "a person wrote": await head() != before,
    }


async def isolated(user: Any) -> None:
    """The block is named, and its copy is another block."""
    block = await server.block_manager.create_or_update_block_async(
        Block(id=HELD, label="human", value="name: Ann"), user
    )
    state = await new_agent(user, block_ids=[block.id])
    free = await call(user, state, "more", "persona")  # what is held of the agent is known from now on
    conversations = ConversationManager()
    conversation = await conversations.create_conversation(
        state.id, CreateConversation(isolated_block_labels=["human"]), user
    )
    state = await conversations.apply_isolated_blocks_to_agent_state(state, conversation.id, user)
    copy = state.memory.get_block("human").id
    answer = await call(user, state, "likes tea")
    said["isolated"] = {
        "answers": [free, answer],
        "is a copy": copy != HELD,
        "value": await value(user, state),
        "patches": await patches(state.id),
    }


async def unqueued(user: Any) -> None:
    """The patches' database does not answer."""
    asks, free = await human(user, "asks-first"), await human(user)
    only = activation._worker._propose_only  # type: ignore[union-attr]
    only.close()
    only._url, known = "postgresql://nobody:s3cret@127.0.0.1:9/none?connect_timeout=1", only._url
    said["unqueued"] = {
        "answers": [await call(user, asks, "likes tea"), await call(user, free, "likes tea")],
        "values": [await value(user, asks), await value(user, free)],
    }
    only._url = known
    said["unqueued"]["later"] = await call(user, asks, "likes tea")


async def cost(user: Any) -> None:
    state, asked = await human(user), []

    def count(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        asked.extend(["stands_for"] if "stands_for" in statement else [])

    event.listen(engine.sync_engine, "before_cursor_execute", count)
    for number in range(20):
        await call(user, state, str(number))
    event.remove(engine.sync_engine, "before_cursor_execute", count)
    said["cost"] = {"asked": len(asked), "lines": len((await value(user, state)).splitlines())}


async def main() -> None:
    await server.init_async()
    user = await server.user_manager.create_default_actor_async()
    await server.tool_manager.upsert_base_tools_async(user, allowed_types={ToolType.LETTA_CORE})
    for part in (batch, other_ways, parallel, git, isolated, unqueued, cost):
        await part(user)


asyncio.run(main())
activation.disarm()
print(json.dumps(said))
