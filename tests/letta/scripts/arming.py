"""Arms and disarms in code around real writes; prints what was captured and whether every original came back."""

import asyncio
import json
import sys
from importlib import import_module
from typing import Any

import letta.server.rest_api.app as app
from letta.schemas.block import Block as NewBlock
from letta.schemas.block import BlockUpdate
from letta.server.db import db_registry
from sqlalchemy import event, text

from phionyx_letta.plugin import activation, install, mutation_context, uninstall
from phionyx_letta.plugin.targets import TARGETS

server = app.server


def originals() -> dict[str, int]:
    found = {}
    for target in TARGETS:
        owner, method = target.path.split(".")
        found[target.name] = id(getattr(import_module(target.module), owner).__dict__[method])
    return found


def listening(capture: Any) -> int:
    return sum(event.contains(*listener) for listener in capture._listeners)


async def rows() -> list[str]:
    async with db_registry.async_session() as session:
        if (await session.execute(text("select to_regclass('phionyx_outbox')"))).scalar() is None:
            return []
        pending = (await session.execute(text("select payload from phionyx_outbox order by id"))).scalars().all()
        return [json.loads(payload)["event"] for payload in pending]


async def main() -> None:
    server.default_org = await server.organization_manager.create_default_organization_async()
    user = await server.user_manager.create_default_actor_async()
    before = originals()
    answers: dict[str, Any] = {"middleware before": len(app.app.user_middleware)}
    block = await server.block_manager.create_or_update_block_async(NewBlock(label="a", value="1"), user)

    async def write(value: str) -> None:
        await server.block_manager.update_block_async(block.id, BlockUpdate(value=value), user)

    answers["not armed"] = await rows()
    install()
    install()
    armed = originals()
    answers["wrapped"] = sum(before[name] != armed[name] for name in before)
    answers["targets"] = len(before)
    capture = activation.worker()._capture
    answers["listeners armed"] = listening(capture)
    await write("2")
    answers["armed twice"] = await rows()
    uninstall()
    uninstall()
    answers["restored"] = originals() == before
    answers["listeners disarmed"] = listening(capture)
    answers["middleware after"] = len(app.app.user_middleware)
    await write("3")
    answers["disarmed"] = await rows()
    install()
    with mutation_context(parent_envelope="sha256:" + "cd" * 32, forgetting_reason="retention_policy"):
        await write("")
    answers["armed again"] = await rows()
    async with db_registry.async_session() as session:
        last = (await session.execute(text("select payload from phionyx_outbox order by id desc limit 1"))).scalar()
    answers["context"] = {name: json.loads(last)[name] for name in ("parent", "reason", "kind")}
    try:
        with mutation_context(parent_envelope="nonsense"):
            answers["malformed"] = "accepted"
    except ValueError as error:
        answers["malformed"] = str(error)
    uninstall()
    print(json.dumps(answers))
    sys.stdout.flush()


asyncio.run(main())
