"""Imports Letta once, then forks writers on Letta's own managers and kills each with SIGKILL at a random moment.

Arguments: how many kills, how many writers at once. Prints one JSON object: kills, and how many writes were acknowledged.
"""

import asyncio
import gc
import json
import os
import random
import signal
import sys
import time
from typing import Any

from letta.schemas.block import Block as NewBlock
from letta.schemas.block import BlockUpdate
from letta.server import db
from letta.services.block_manager import BlockManager
from letta.services.organization_manager import OrganizationManager
from letta.services.user_manager import UserManager

KILLS, WRITERS = int(sys.argv[1]), int(sys.argv[2])
#: Of a writer, from its first acknowledged write to its end, s.
LONGEST_LIFE = 0.5
SHARED = 3
blocks = BlockManager()


async def prepare() -> tuple[Any, list[str]]:
    await OrganizationManager().create_default_organization_async()
    user = await UserManager().create_default_actor_async()
    shared = [
        await blocks.create_or_update_block_async(NewBlock(label="human", value=f"s{n}"), user) for n in range(SHARED)
    ]
    await blocks.update_block_async(
        shared[0].id, BlockUpdate(value="warm"), user
    )  # what a writer needs is compiled once
    await db.engine.dispose()
    return user, [block.id for block in shared]


async def write_for_ever(name: str, user: Any, shared: list[str], say: int) -> None:
    """Two tasks at once in each writer: the shared blocks are fought over, own ones are created, written and deleted."""
    await asyncio.gather(own(name, user, say), fight(name, user, shared, say), together(name, user, shared, say))


async def own(name: str, user: Any, say: int) -> None:
    number = 0
    while True:
        block = await blocks.create_or_update_block_async(NewBlock(label="human", value=f"{name} own {number}"), user)
        os.write(say, b"w")
        for step in range(4):
            await blocks.update_block_async(
                block.id, BlockUpdate(value=f"{name} own {number} {step}" * (1 + step * 20)), user
            )
            os.write(say, b"w")
        if number % 2:
            await blocks.delete_block_async(block.id, user)
            os.write(say, b"w")
        number += 1


async def fight(name: str, user: Any, shared: list[str], say: int) -> None:
    number = 0
    while True:
        number += 1
        if await attempt(blocks.update_block_async(random.choice(shared), BlockUpdate(value=f"{name} {number}"), user)):
            os.write(say, b"w")


async def together(name: str, user: Any, shared: list[str], say: int) -> None:
    """Several blocks in one transaction: what is killed in between leaves none of them."""
    number = 0
    while True:
        number += 1
        await attempt(blocks.bulk_update_block_values_async({i: f"{name} bulk {number} {i}" for i in shared}, user))
        await asyncio.sleep(0.01)


async def attempt(work: Any) -> bool:
    """False when another writer was faster, which Letta answers with a conflict (or PostgreSQL with a deadlock)."""
    try:
        await work
    except Exception:
        return False
    return True


def fork_writer(number: int, user: Any, shared: list[str]) -> tuple[int, int]:
    """Its process id, and where it says that it has written."""
    listen, say = os.pipe()
    pid = os.fork()
    if pid:
        os.close(say)
        return pid, listen
    try:
        os.close(listen)
        db.engine.sync_engine.dispose(close=False)
        random.seed(number)
        asyncio.run(write_for_ever(f"w{number}", user, shared, say))
    finally:
        os._exit(1)


def main() -> None:
    user, shared = asyncio.run(prepare())
    gc.freeze()  # a child that collects would copy all of Letta's memory
    choose = random.Random(20250101)
    alive: dict[int, tuple[int, float | None]] = {}
    forked, killed, acknowledged, died = 0, 0, 0, 0
    while killed < KILLS:
        while len(alive) < WRITERS:
            pid, listen = fork_writer(forked, user, shared)
            os.set_blocking(listen, False)
            alive[pid] = (listen, None)
            forked += 1
        for pid, (listen, end) in list(alive.items()):
            said = read(listen)
            acknowledged += said
            if said and end is None:
                alive[pid] = (listen, time.monotonic() + choose.uniform(0, LONGEST_LIFE))
            elif end is not None and time.monotonic() >= end:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                killed += os.WIFSIGNALED(status)
                died += not os.WIFSIGNALED(status)
                acknowledged += read(listen)
                os.close(listen)
                del alive[pid]
        time.sleep(0.001)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(json.dumps({"kills": killed + len(alive), "acknowledged": acknowledged, "died by themselves": died}))


def read(listen: int) -> int:
    try:
        return len(os.read(listen, 65536))
    except BlockingIOError:
        return 0


if __name__ == "__main__":
    main()
