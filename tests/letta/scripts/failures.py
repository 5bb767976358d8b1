"""Runs inside a process with Letta: breaks the outbox, the key, the database's patience, and tries to write memory.

The plugin is armed anew for each group of cases, with the settings the group is about. Prints one JSON object with what
each case found. The table ``proof`` and its trigger were put on Letta's table ``block`` by the test: they say, in the same
transaction, which states were really committed.
"""

import asyncio
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psycopg
from letta.orm import Block
from letta.schemas.block import Block as NewBlock
from letta.schemas.block import BlockUpdate
from letta.server.db import db_registry, engine
from letta.services.block_manager import BlockManager
from letta.services.organization_manager import OrganizationManager
from letta.services.user_manager import UserManager
from sqlalchemy import text, update
from sqlalchemy.exc import DBAPIError

from phionyx_letta.diff import content_hash
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.plugin import activation

URL, GOOD_KEY = os.environ["LETTA_PG_URI"], os.environ["PHIONYX_LETTA_SIGNING_KEY"]
blocks = BlockManager()
cases: dict[str, Any] = {}


@contextlib.contextmanager
def armed(**settings: str) -> Iterator[Any]:
    """The plugin with these settings; gives its runtime."""
    activation.disarm()
    names = [name for name in os.environ if name.startswith("PHIONYX_LETTA_")]
    for name in names:
        del os.environ[name]
    given = {"SIGNING_KEY": GOOD_KEY, "SEALER": "0", "BASELINE": "off", "LOCK_TIMEOUT_MS": "300", **settings}
    os.environ.update({f"PHIONYX_LETTA_{name}": value for name, value in given.items()})
    activation.arm()
    worker = activation.worker()
    assert worker is not None
    yield worker.runtime
    activation.disarm()


def sql(statement: str, *values: object) -> list[Any]:
    with psycopg.connect(URL) as connection:
        done = connection.execute(statement, values or None)
        return done.fetchall() if done.description else []


def value(block: Any) -> str:
    return str(sql("select value from block where id = %s", block.id)[0][0])


def rows(block: Any) -> list[dict[str, Any]]:
    """What the outbox holds about this block."""
    payloads = [json.loads(row[0]) for row in sql("select payload from phionyx_outbox order by id")]
    return [fields for fields in payloads if fields["block_id"] == block.id]


def agrees(block: Any) -> bool:
    """Every state of this block that was committed has exactly one row, in the order of the commits, linked to each other."""
    states = [content_hash(row[0]) for row in sql("select value from proof where id = %s order by seq", block.id)]
    found = [fields["diff"] for fields in rows(block)]
    linked = all(old["after_hash"] == new["before_hash"] for old, new in itertools.pairwise(found))
    return linked and states == [diff["after_hash"] for diff in found]


async def attempt(work: Awaitable[Any]) -> str | None:
    """The error it ended with, as text; None if it ended well."""
    try:
        await work
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


async def new_block(user: Any, text: str = "before", limit: int = 5_000_000) -> Any:
    return await blocks.create_or_update_block_async(NewBlock(label="human", value=text, limit=limit), user)


def write(block: Any, new: str, user: Any) -> Awaitable[Any]:
    return blocks.update_block_async(block.id, BlockUpdate(value=new), user)


async def through(action: Callable[[Any], Awaitable[Any]]) -> Any:
    """An action on one of Letta's sessions, in Letta's own way of committing and rolling back."""
    async with db_registry.async_session() as session:
        return await action(session)


# -- an outbox that does not take rows --------------------------------------------------------------------------------


@contextlib.contextmanager
def locked() -> Iterator[None]:
    with psycopg.connect(URL) as holder:
        holder.execute("lock table phionyx_outbox in access exclusive mode")
        yield
        holder.rollback()


@contextlib.contextmanager
def broken(breaks: str, mends: str) -> Iterator[None]:
    for statement in breaks.split(";;"):
        sql(statement)
    yield
    for statement in mends.split(";;"):
        sql(statement)


@contextlib.contextmanager
def dropped() -> Iterator[None]:
    sql("create table shelf as select id, payload, mac from phionyx_outbox order by id")
    sql("drop table phionyx_outbox")
    yield
    SqlLedger(URL).close()
    sql("insert into phionyx_outbox(payload, mac) select payload, mac from shelf order by id")
    sql("drop table shelf")


def fails(code: str, before: str = "") -> Any:
    return broken(
        f"create function failing() returns trigger language plpgsql as"
        f" $$ begin {before} raise exception 'no room' using errcode = '{code}'; end $$;;"
        "create trigger failing before insert on phionyx_outbox for each row execute function failing()",
        "drop trigger failing on phionyx_outbox;;drop function failing",
    )


TROUBLES: dict[str, Callable[[], Any]] = {
    "locked": locked,
    "renamed": lambda: broken("alter table phionyx_outbox rename to away", "alter table away rename to phionyx_outbox"),
    "dropped": dropped,
    "constrained": lambda: broken(
        "alter table phionyx_outbox add constraint nothing check (false) not valid",
        "alter table phionyx_outbox drop constraint nothing",
    ),
    "disk full": lambda: fails("53100"),
    "deadlocked": lambda: fails("40P01"),
    "not permitted": lambda: fails("42501"),
    "out of memory": lambda: fails("53200"),
    "dropping rows in silence": lambda: broken(
        "create function dropping() returns trigger language plpgsql as $$ begin return null; end $$;;"
        "create trigger dropping before insert on phionyx_outbox for each row execute function dropping()",
        "drop trigger dropping on phionyx_outbox;;drop function dropping",
    ),
}


async def outbox_troubles(mode: str, user: Any) -> None:
    with armed(ON_ERROR=mode) as runtime:
        for name, trouble in TROUBLES.items():
            block = await new_block(user)
            gaps = runtime.counts["gaps"]
            with trouble():
                error = await attempt(write(block, "during", user))
                during = value(block)  # read by another connection while the trouble lasts
                bulk = await new_bulk(block, user)
                gap = runtime.gaps[-1] if runtime.gaps else None
            gaps = runtime.counts["gaps"] - gaps
            after = await attempt(write(block, "after", user))
            found = rows(block)
            cases[f"{mode}: {name}"] = {
                "error": error,
                "during": during,
                "bulk": bulk,
                "gaps": gaps,
                "named": bool(gap) and gap["block_ids"] == [block.id],
                "gap": gap and gap["what"],
                "after": after,
                "value after": value(block),
                "rows": len(found),
                "last row": found[-1]["diff"]["after_hash"] == content_hash("after"),
            }


async def new_bulk(block: Any, user: Any) -> dict[str, Any]:
    """A bulk statement, by a caller that swallows every error and commits whatever is there."""

    async def swallowing(session: Any) -> str | None:
        return await attempt(session.execute(update(Block).where(Block.id == block.id).values(value="bulk")))

    return {"error": await through(swallowing), "value": value(block)}


async def slow_outbox(mode: str, user: Any) -> None:
    """Letta's statement_timeout strikes while our row is inserted."""

    async def action(session: Any) -> None:
        await session.execute(text("set local statement_timeout = '200ms'"))
        (await session.get(Block, block.id)).value = "during"
        await session.flush()

    with armed(ON_ERROR=mode) as runtime:
        block = await new_block(user)
        with fails("P0001", before="perform pg_sleep(30);"):
            error = await attempt(through(action))
        cases[f"{mode}: statement timeout"] = {
            "error": error,
            "value": value(block),
            "gaps": runtime.counts["gaps"],
            "rows": len(rows(block)),
        }


async def statements_around_the_session(mode: str, user: Any) -> None:
    async def in_session(session: Any) -> None:
        await session.execute(text(f"update block set value = 'by text' where id = '{block.id}'"))

    async def swallowed(session: Any) -> None:
        await attempt(in_session(session))

    async def by_engine() -> None:
        async with engine.begin() as connection:
            await connection.execute(text(f"update block set value = 'by engine' where id = '{block.id}'"))

    async def hidden(session: Any) -> None:
        await session.execute(
            text(f"with x as (update block set value = 'hidden' where id = '{block.id}' returning id) select * from x")
        )

    with armed(ON_ERROR=mode) as runtime:
        for name, work in {
            "text in a session": lambda: through(in_session),
            "text in a session whose caller swallows errors": lambda: through(swallowed),
            "text on a bare engine": by_engine,
            "a write inside a select": lambda: through(hidden),
        }.items():
            block = await new_block(user)
            gaps = runtime.counts["gaps"]
            error = await attempt(work())
            cases[f"{mode}: {name}"] = {
                "error": error,
                "value": value(block),
                "gaps": runtime.counts["gaps"] - gaps,
                "rows": len(rows(block)),
            }


# -- keys ----------------------------------------------------------------------------------------------------------------


async def keys(mode: str, user: Any) -> None:
    with armed():
        block = await new_block(user)
    for name, settings in {
        "malformed key": {"SIGNING_KEY": "not a key"},
        "key file that is missing": {"SIGNING_KEY": "/nonexistent/signing.key"},
        "no key and nowhere to make one": {"SIGNING_KEY": "", "HOME": "/dev/null/nowhere"},
    }.items():
        with armed(ON_ERROR=mode, **settings) as runtime:
            before, known = value(block), len(rows(block))
            error = await attempt(write(block, f"{mode} {name}", user))
            worker = activation.worker()
            assert worker is not None
            cases[f"{mode}: {name}"] = {
                "error": error,
                "written": value(block) == f"{mode} {name}",
                "kept": value(block) == before,
                "gaps": runtime.counts["gaps"],
                "rows": len(rows(block)) - known,
                "reported": worker.describe()["key_error"],
                "last gap": (worker.describe()["last_gaps"] or [{"what": None}])[-1]["what"],
            }


async def briefly_locked(user: Any) -> None:
    """A lock that is gone before the timeout, as a vacuum of the outbox takes it: the write waits for it and is recorded."""
    with armed(LOCK_TIMEOUT_MS="5000") as runtime:
        block = await new_block(user)
        with psycopg.connect(URL) as holder:
            holder.execute("lock table phionyx_outbox in access exclusive mode")
            writing = asyncio.create_task(attempt(write(block, "during", user)))
            await asyncio.sleep(0.5)
            waited = not writing.done()
            holder.rollback()
        error = await writing
        cases["briefly locked"] = {
            "waited": waited,
            "error": error,
            "agrees": agrees(block),
            "gaps": runtime.counts["gaps"],
        }


# -- what the session is left with ----------------------------------------------------------------------------------------


async def session_settings(user: Any) -> None:
    async def action(session: Any) -> None:
        for setting in ("default", "'7s'", "0"):
            await session.execute(text(f"set local lock_timeout = {setting}"))
            before = (await session.execute(text("show lock_timeout"))).scalar()
            block = await session.get(Block, blk.id)
            block.value += "x"
            await session.flush()
            seen.append([before, (await session.execute(text("show lock_timeout"))).scalar()])

    with armed():
        blk = await new_block(user)
        seen: list[Any] = []
        await through(action)
        with locked():
            await attempt(through(action))  # open mode: the capture fails, the session goes on
        async with engine.connect() as connection:
            outside = (await connection.execute(text("show lock_timeout"))).scalar()
        cases["lock timeout"] = {"pairs": seen, "outside": outside}


# -- values ----------------------------------------------------------------------------------------------------------------

ODD = {
    "dollar quotes": "$p$ $p0123456789abcdef$ $$ $1 $p0123456789abcdef$;drop table phionyx_outbox;--",
    "quotes": """'"''""'; rollback; --""",
    "backslashes": "\\ \\\\ \\' \\x41 \\u0041 \\000 \\",
    "percent": "%s %(x)s %% {x} :x ?",
    "not in the BMP": "\U0001f600\U0010ffff e\u0301 \u202e rtl \ufeff",
    "controls": "\x01\x07\x1b[31m\x7f\r\n\t\u2028",
    "escapes of surrogates, as text": "\\ud800\\udc00",
    "JSON": '{"nonce":"x","key_id":"y"}',
    "one megabyte": "0123456789abcdef" * 65536,
    "one megabyte of emoji": "\U0001f600" * 262144,
}
IMPOSSIBLE = {
    "NUL": lambda block, user: through(lambda session: assign(session, block, "a\0b")),
    "a lone surrogate": lambda block, user: through(lambda session: assign(session, block, "a\ud800b")),
    "a lone surrogate through the manager": lambda block, user: write(block, "a\ud800b", user),
}


async def assign(session: Any, block: Any, new: str) -> None:
    (await session.get(Block, block.id)).value = new


async def values(user: Any) -> None:
    with armed(INCLUDE_DIFF_TEXT="1") as runtime:
        for name, new in ODD.items():
            block = await new_block(user)
            error = await attempt(write(block, new, user))
            last = rows(block)[-1]["diff"]
            cases[f"value: {name}"] = {
                "error": error,
                "hash": last["after_hash"] == content_hash(new),
                "size": last["after_size_bytes"] == len(new.encode()),
                "kept": value(block) == new,
                "gaps": runtime.counts["gaps"],
                "agrees": agrees(block),
            }
        block = await new_block(user)
        cases["NUL through the manager"] = {
            "error": await attempt(write(block, "a\0b", user)),
            "value": value(block),
            "agrees": agrees(block),
        }
        for name, work in IMPOSSIBLE.items():
            block = await new_block(user)
            error = await attempt(work(block, user))
            cases[f"impossible: {name}"] = {
                "refused": error is not None and "EvidenceRefused" not in error,
                "value": value(block),
                "gaps": runtime.counts["gaps"],
                "agrees": agrees(block),
                "after": await attempt(write(block, "after", user)),
                "agrees after": agrees(block),
            }


# -- transactions that end otherwise ----------------------------------------------------------------------------------


async def rollbacks(user: Any) -> None:
    with armed() as runtime:
        block = await new_block(user)

        async def nested(session: Any) -> None:
            row = await session.get(Block, block.id)
            for number in range(4):
                savepoint = await session.begin_nested()
                row.value = f"nested {number}"
                await session.flush()
                if number % 2:
                    await savepoint.commit()
                else:
                    await savepoint.rollback()
                    await session.refresh(row)

        async def failing(session: Any) -> None:
            (await session.get(Block, block.id)).value = "never"
            await session.flush()
            raise RuntimeError("no")

        async def statement_fails(session: Any) -> None:
            (await session.get(Block, block.id)).value = "never either"
            await session.flush()
            await session.execute(text("select 1 / 0"))

        cases["rollbacks"] = {
            "errors": [await attempt(through(action)) for action in (nested, failing, statement_fails)],
            "value": value(block),
            "agrees": agrees(block),
            "gaps": runtime.counts["gaps"],
        }


async def deadlock_of_two_blocks(user: Any) -> None:
    """Two sessions update two blocks in opposite order through Letta's ``update_async``; PostgreSQL ends one of them."""
    with armed() as runtime:
        pair = [await new_block(user, "p"), await new_block(user, "q")]
        together = asyncio.Barrier(2)

        async def cross(session: Any, who: str, first: Any, second: Any) -> None:
            one, two = [await session.get(Block, block.id) for block in (first, second)]
            one.value = f"{who} first"
            await one.update_async(session, actor=user, no_commit=True, no_refresh=True)
            await together.wait()
            two.value = f"{who} second"
            await two.update_async(session, actor=user, no_commit=True, no_refresh=True)

        ways = (("left", *pair), ("right", *reversed(pair)))
        errors = await asyncio.gather(*(attempt(through(lambda s, way=way: cross(s, *way))) for way in ways))
        cases["deadlock of two blocks"] = {
            "errors": errors,
            "values": [value(block) for block in pair],
            "agrees": [agrees(block) for block in pair],
            "gaps": runtime.counts["gaps"],
            "deadlocks": sql("select deadlocks from pg_stat_database where datname = current_database()")[0][0],
        }


async def retry_of_letta(session: Any, row: Any, user: Any) -> None:
    """Letta's own; in 0.16.8 it fails at its second attempt, with and without this plugin (MissingGreenlet)."""
    await row.update_async(session, actor=user, no_commit=True, no_refresh=True)


async def retry_that_works(session: Any, row: Any, user: Any) -> None:
    """What Letta's retry means to do: the same object, in the same session, after its rollback."""
    try:
        await session.flush()
    except DBAPIError:
        await session.rollback()
        await session.run_sync(lambda _: setattr(row, "value", "retried"))
        await session.flush()


async def deadlock_that_is_retried(name: str, retry: Callable[..., Awaitable[None]], user: Any) -> None:
    """The other side only holds a lock and lets go, so that the retry is the only write."""
    with armed() as runtime:
        block = await new_block(user)
        held, blocked = asyncio.Event(), asyncio.Event()

        async def writer(session: Any) -> None:
            await session.execute(text("select pg_advisory_xact_lock(4711)"))
            row = await session.get(Block, block.id)
            row.value = "retried"
            held.set()
            await blocked.wait()
            await retry(session, row, user)

        async def rival() -> None:
            await held.wait()
            async with engine.connect() as connection:
                await connection.execute(text(f"select 1 from block where id = '{block.id}' for update"))
                blocked.set()
                while not await asyncio.to_thread(waiting, "UPDATE block"):
                    await asyncio.sleep(0.01)
                await connection.execute(text("select pg_advisory_xact_lock(4711)"))
                await connection.rollback()

        errors = await asyncio.gather(attempt(through(writer)), attempt(rival()))
        cases[name] = {
            "errors": errors,
            "value": value(block),
            "agrees": agrees(block),
            "rows": len(rows(block)),
            "gaps": runtime.counts["gaps"],
        }


def waiting(query: str) -> bool:
    found = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query ilike %s || '%%'"
    return bool(sql(found, query))


async def old_value_not_loaded(user: Any) -> None:
    """An object expired, then written, while another transaction is about to commit a new value of the same block."""

    async def action(session: Any) -> None:
        row = await session.get(Block, block.id)
        session.expire(row)
        row.value = "mine"
        loaded.set()
        await rival_wrote.wait()
        await session.flush()

    async def rival() -> None:
        async def slow(session: Any) -> None:
            (await session.get(Block, block.id)).value = "rival"
            await session.flush()
            rival_wrote.set()
            while not await asyncio.to_thread(waiting, "%block%"):
                await asyncio.sleep(0.01)

        await loaded.wait()
        await through(slow)

    with armed() as runtime:
        block = await new_block(user)
        loaded, rival_wrote = asyncio.Event(), asyncio.Event()
        errors = await asyncio.gather(attempt(through(action)), attempt(rival()))
        cases["old value not loaded"] = {"errors": errors, "agrees": agrees(block), "gaps": runtime.counts["gaps"]}


async def cancellations(user: Any) -> None:
    """A task is cancelled at every point of its way: what was committed is recorded, what was not is not."""
    with armed() as runtime:
        block = await new_block(user)
        began = time.monotonic()
        for number in range(5):
            await write(block, f"measured {number}", user)
        longest = (time.monotonic() - began) / 5 * 1.5
        for number in range(120):
            task = asyncio.ensure_future(attempt(write(block, f"value {number}", user)))
            until = time.monotonic() + (number % 60) / 60 * longest
            while time.monotonic() < until:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        while sql(
            "select 1 from pg_stat_activity where state <> 'idle' and pid <> pg_backend_pid() and query ilike '%block%'"
        ):
            await asyncio.sleep(0.01)
        committed = sql("select count(*) from proof where id = %s", block.id)[0][0]
        cases["cancellations"] = {
            "committed": committed,
            "agrees": agrees(block),
            "gaps": runtime.counts["gaps"],
            "after": await attempt(write(block, "after", user)),
            "agrees after": agrees(block),
        }


async def connections_that_are_cut(user: Any) -> None:
    """PostgreSQL ends Letta's connection after the flush, before the commit."""

    async def action(session: Any) -> None:
        (await session.get(Block, block.id)).value = "cut"
        await session.flush()
        pid = (await session.execute(text("select pg_backend_pid()"))).scalar()
        await asyncio.to_thread(sql, "select pg_terminate_backend(%s, 5000)", pid)

    with armed() as runtime:
        block = await new_block(user)
        cases["connection cut"] = {
            "failed": await attempt(through(action)) is not None,
            "value": value(block),
            "after": await attempt(write(block, "after", user)),
            "agrees": agrees(block),
            "gaps": runtime.counts["gaps"],
        }


async def main() -> None:
    await OrganizationManager().create_default_organization_async()
    user = await UserManager().create_default_actor_async()
    for mode in ("open", "closed"):
        await outbox_troubles(mode, user)
        await slow_outbox(mode, user)
        await statements_around_the_session(mode, user)
        await keys(mode, user)
    await briefly_locked(user)
    await session_settings(user)
    await values(user)
    await rollbacks(user)
    await deadlock_of_two_blocks(user)
    await deadlock_that_is_retried("deadlock that Letta retries", retry_of_letta, user)
    await deadlock_that_is_retried("deadlock that is retried", retry_that_works, user)
    await old_value_not_loaded(user)
    await cancellations(user)
    await connections_that_are_cut(user)
    print(json.dumps(cases))


if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    asyncio.run(main())
