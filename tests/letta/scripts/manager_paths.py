"""Runs inside a process with Letta and the armed plugin: changes blocks in every way Letta's managers and models offer.

Each case is one coroutine; what the ledger gained by it is collected once the outbox is empty. Prints one JSON object:
the cases' envelopes, and the ids the test needs to know what was meant.
"""

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import letta.server.rest_api.app as app
from letta.orm import Agent, Block, BlocksAgents
from letta.schemas.agent import CreateAgent, UpdateAgent
from letta.schemas.block import Block as NewBlock
from letta.schemas.block import BlockUpdate
from letta.schemas.conversation import CreateConversation
from letta.schemas.embedding_config import EmbeddingConfig
from letta.schemas.group import GroupCreate, RoundRobinManager
from letta.schemas.llm_config import LLMConfig
from letta.server.db import db_registry, engine
from letta.services.block_manager_git import GitEnabledBlockManager
from letta.services.conversation_manager import ConversationManager
from letta.services.group_manager import GroupManager
from sqlalchemy import delete, insert, text, update
from sqlalchemy.dialects.postgresql import insert as pg_insert

server = app.server
blocks, agents = server.block_manager, server.agent_manager
cases: dict[str, Any] = {}
ids: dict[str, str] = {}


async def recorded(after: int) -> list[Any]:
    while True:
        async with engine.connect() as connection:
            if not (await connection.execute(text("select count(*) from phionyx_outbox"))).scalar():
                query = text("select seq, body from phionyx_envelope where seq > :after order by seq")
                return [json.loads(row.body) for row in await connection.execute(query, {"after": after})]
        await asyncio.sleep(0.02)


async def case(name: str, work: Awaitable[Any]) -> Any:
    await recorded(2**62)  # what came before this case is sealed
    async with engine.connect() as connection:
        before = (await connection.execute(text("select coalesce(max(seq), -1) from phionyx_envelope"))).scalar()
    error, result = None, None
    try:
        result = await work
    except Exception as caught:
        error = type(caught).__name__
    cases[name] = {"envelopes": await recorded(before), "error": error}
    return result


async def in_session(action: Any) -> Any:
    async with db_registry.async_session() as session:
        return await action(session)


async def new_block(label: str, value: str, user: Any) -> Any:
    return await blocks.create_or_update_block_async(NewBlock(label=label, value=value), user)


async def new_agent(user: Any, **more: Any) -> Any:
    model = LLMConfig(
        model="gpt-4o-mini", model_endpoint_type="openai", model_endpoint="http://127.0.0.1:9/v1", context_window=32000
    )
    embedding = EmbeddingConfig.default_config(provider="openai")
    new = CreateAgent(llm_config=model, embedding_config=embedding, include_base_tools=False, **more)
    return await agents.create_agent_async(new, user)


async def managers(user: Any) -> None:
    block = await case("create", new_block("human", "a", user))
    ids["block"] = block.id
    for name, change in {
        "append": {"value": "ab"},
        "no change": {"value": "ab"},
        "write": {"value": "xyz"},
        "clear": {"value": ""},
        "None is no change": {"value": None},
        "rename": {"label": "renamed"},
        "description": {"description": "about"},
        "limit": {"limit": 4321},
        "read only": {"read_only": True},
        "several columns": {"value": "one", "label": "human", "read_only": False},
    }.items():
        await case(name, blocks.update_block_async(block.id, BlockUpdate(**change), user))
    await case("bulk update", blocks.bulk_update_block_values_async({block.id: "bulk"}, user))
    await case("checkpoint", blocks.checkpoint_block_async(block.id, user))
    await blocks.update_block_async(block.id, BlockUpdate(value="two"), user)
    await blocks.checkpoint_block_async(block.id, user)
    await case("undo", blocks.undo_checkpoint_block(block.id, user))
    await case("redo", blocks.redo_checkpoint_block(block.id, user))
    pair = [NewBlock(label="p", value="1"), NewBlock(label="q", value="2")]
    made = await case("batch create", blocks.batch_create_blocks_async(pair, user))
    ids["first of batch"], ids["second of batch"] = made[0].id, made[1].id
    await case("delete unattached", blocks.delete_block_async(made[0].id, user))


async def statements(user: Any) -> None:
    block = await new_block("bulk", "start", user)
    ids["bulk"] = block.id

    async def attribute(session: Any) -> None:
        (await session.get(Block, block.id)).value = "attribute"

    async def two_flushes(session: Any) -> None:
        row = await session.get(Block, block.id)
        row.value = "first"
        await session.flush()
        row.value = "second"
        await session.flush()

    async def rolled_back(session: Any) -> None:
        (await session.get(Block, block.id)).value = "never"
        await session.flush()
        raise RuntimeError("roll back")

    async def savepoint_rolled_back(session: Any) -> None:
        nested = await session.begin_nested()
        (await session.get(Block, block.id)).value = "never"
        await session.flush()
        await nested.rollback()

    async def expired(session: Any) -> None:
        row = await session.get(Block, block.id)
        session.expire(row)
        row.value = "after expiry"

    await case("plain attribute", in_session(attribute))
    await case("two flushes in one transaction", in_session(two_flushes))
    await case("rolled back after a flush", in_session(rolled_back))
    await case("rolled back to a savepoint", in_session(savepoint_rolled_back))
    await case("old value not loaded", in_session(expired))
    table = Block.__table__
    where = Block.id == block.id
    for name, statement in {
        "update(Block)": update(Block).where(where).values(value="orm"),
        "update(table)": update(table).where(table.c.id == block.id).values(value="core"),
        "update that matches nothing": update(Block).where(Block.id == "block-none").values(value="x"),
        "update to the same": update(Block).where(where).values(value="core"),
    }.items():
        await case(name, in_session(lambda session, statement=statement: session.execute(statement)))

    async def by_primary_key(session: Any) -> None:
        version = (await session.get(Block, block.id)).version
        await session.execute(update(Block), [{"id": block.id, "value": "by key", "version": version}])

    await case("update by primary key", in_session(by_primary_key))
    row = {"id": "block-00000000-0000-4000-8000-00000000abcd", "label": "inserted", "value": "v", "limit": 10}
    row |= {"is_template": False, "read_only": False, "version": 1, "organization_id": user.organization_id}
    ids["inserted"] = row["id"]
    await case("insert(table)", in_session(lambda session: session.execute(insert(table).values(**row))))
    again = pg_insert(table).values(**row).on_conflict_do_nothing()
    await case("insert that conflicts", in_session(lambda session: session.execute(again)))
    await case("delete(Block)", in_session(lambda session: session.execute(delete(Block).where(Block.id == row["id"]))))


async def attachments(user: Any) -> None:
    shared = await new_block("shared", "s", user)
    ids["shared"] = shared.id
    agent = await case(
        "create agent",
        new_agent(user, name="one", memory_blocks=[{"label": "persona", "value": "p"}], block_ids=[shared.id]),
    )
    ids["agent"] = agent.id
    ids["persona"] = next(block.id for block in agent.memory.blocks if block.label == "persona")
    extra = await new_block("extra", "x", user)
    ids["extra"] = extra.id
    await case("attach", agents.attach_block_async(agent.id, extra.id, user))
    await case("attach again", agents.attach_block_async(agent.id, extra.id, user))
    await case("modify by label", agents.modify_block_by_label_async(agent.id, "extra", BlockUpdate(value="xy"), user))
    await case("write of an attached block", blocks.update_block_async(extra.id, BlockUpdate(value="z"), user))
    await case("update_agent(block_ids)", agents.update_agent_async(agent.id, UpdateAgent(block_ids=[shared.id]), user))
    await case("detach", agents.detach_block_async(agent.id, shared.id, user))
    await agents.attach_block_async(agent.id, extra.id, user)
    await case("delete attached block", blocks.delete_block_async(extra.id, user))
    again = [{"agent_id": agent.id, "block_id": shared.id, "block_label": "shared"}]
    pivot = pg_insert(BlocksAgents.__table__).values(again).on_conflict_do_nothing()
    await case("pivot insert", in_session(lambda session: session.execute(pivot)))
    await case("pivot insert that conflicts", in_session(lambda session: session.execute(pivot)))
    gone = delete(BlocksAgents).where(BlocksAgents.block_id == shared.id)
    await case("pivot delete", in_session(lambda session: session.execute(gone)))

    other = await new_agent(user, name="two")
    ids["other"] = other.id
    group = GroupCreate(
        agent_ids=[agent.id, other.id],
        description="g",
        manager_config=RoundRobinManager(max_turns=1),
        shared_block_ids=[shared.id],
    )
    await case("group with a shared block", GroupManager().create_group_async(group, user))
    await case("write of a block two agents share", blocks.update_block_async(shared.id, BlockUpdate(value="sh"), user))

    conversations = ConversationManager()
    isolated = CreateConversation(isolated_block_labels=["shared"])
    conversation = await case(
        "conversation with an isolated block", conversations.create_conversation(agent.id, isolated, user)
    )
    await case("end of that conversation", conversations.delete_conversation(conversation.id, user))

    git = object.__new__(GitEnabledBlockManager)
    synced = {"label": "synced", "value": "from git", "actor": user, "description": "d"}
    await case("git sync creates", git._sync_block_to_postgres(agent_id=other.id, **synced))
    await case("git sync writes", git._sync_block_to_postgres(agent_id=other.id, **{**synced, "value": "from git 2"}))
    await case("git sync deletes", git._delete_block_from_postgres(other.id, "synced", user))
    await case("delete agent", agents.delete_agent_async(agent.id, user))
    await case("delete(Agent)", in_session(lambda session: session.execute(delete(Agent).where(Agent.id == other.id))))


async def races(user: Any) -> None:
    block = await new_block("race", "r", user)
    ids["race"] = block.id

    async def six() -> None:
        work = [blocks.update_block_async(block.id, BlockUpdate(value=f"r{i}"), user) for i in range(6)]
        done = await asyncio.gather(*work, return_exceptions=True)
        ids["race successes"] = str(sum(not isinstance(one, Exception) for one in done))

    await case("six at once", six())

    async def cancelled() -> None:
        for delay in range(0, 20, 2):
            task = asyncio.create_task(blocks.update_block_async(block.id, BlockUpdate(value=f"c{delay}"), user))
            await asyncio.sleep(delay / 1000)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        ids["race value"] = (await blocks.get_block_by_id_async(block.id, user)).value

    await case("cancelled mid-update", cancelled())


async def main() -> None:
    server.default_org = await server.organization_manager.create_default_organization_async()
    user = await server.user_manager.create_default_actor_async()
    ids["user"] = user.id
    for part in (managers, statements, attachments, races):
        await part(user)
    print(json.dumps({"cases": cases, "ids": ids}))


asyncio.run(main())
