"""Who holds the patches stops nobody for long: bounded waits, nothing lost, and no server is waited for under the store's lock."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from memory_helpers import patch

from phionyx_letta.errors import DiffConflictError, IllegalTransition, StoreError
from phionyx_letta.memory import LivingMemory, MemoryPatch, SqlOccurrenceTracker, SqlPatchStore, store_sql
from phionyx_letta.memory import store as file_store
from phionyx_letta.memory.store_sql import in_one_transaction
from phionyx_letta.memory.stored import Patches


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (file_store, store_sql):
        monkeypatch.setattr(module, "LONGEST_WAIT", 0.5)


@contextmanager
def in_a_thread(work: Callable[[], Any]) -> Iterator[list[Any]]:
    """Do it meanwhile; its result or its error, once the body is done."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield found
    thread.join(20)
    assert not thread.is_alive()


class Slow:
    """A target on a server that answers when it is told to; it compares and swaps as Letta does."""

    records_itself, limit, label = True, None, "human"

    def __init__(self, name: str) -> None:
        self.name = self.identity = name
        self.text = "a\n"
        self.asked, self.answer = threading.Event(), threading.Event()

    def notes(self) -> list[str]:
        return []

    def read(self) -> str | None:
        return self.text

    def write(self, expected: str | None, text: str, cause: Mapping[str, Any] | None = None) -> str | None:
        self.asked.set()
        assert self.answer.wait(20)
        if self.text != expected:
            raise DiffConflictError(self.name, "", "")
        self.text = text
        return None


class Server:
    """Its targets."""

    def __init__(self) -> None:
        self.found: dict[str, Slow] = {}

    def names(self) -> list[str]:
        return []

    def about(self, name: str) -> str:
        return ""

    def resolve(self, name: str) -> Slow:
        return self.found.setdefault(name, Slow(name))


class TestAHolderThatIsStuck:
    def test_is_waited_for_so_long_and_named_and_nothing_is_lost(self, new_store: Callable[[], Patches]) -> None:
        stuck, mine = new_store(), new_store()
        first = stuck.save(patch())
        new = patch()
        with stuck.exclusive():
            began = time.monotonic()
            with in_a_thread(lambda: mine.save(new)) as found:
                pass
            assert 0.4 < time.monotonic() - began < 10
            [error] = found
            assert isinstance(error, StoreError), error
            assert "another process has held" in error.message
            assert "wait for it, or end" in error.remedy
        assert mine.save(new).patch_id == new.patch_id
        assert {one.patch_id for one in mine.list_by_status()} == {first.patch_id, new.patch_id}

    def test_is_waited_for_so_long_in_a_transaction_of_several_steps_too(self, postgres: Any, ledgers: Any) -> None:
        url = postgres.new_database("stuck_holder")
        stuck, mine = SqlPatchStore(ledgers(url)), SqlPatchStore(ledgers(url))
        occurrences = SqlOccurrenceTracker(mine.ledger)
        with (
            stuck.exclusive(),
            pytest.raises(StoreError, match=r"server process [0-9]+") as caught,
            in_one_transaction(mine, occurrences),
        ):
            raise AssertionError("nobody else's")
        assert "pg_terminate_backend" in caught.value.remedy
        with in_one_transaction(mine, occurrences):
            mine.save(patch())
        assert stuck.count() == 1

    def test_ending_its_hold_loses_nothing(self, postgres: Any, ledgers: Any) -> None:
        url = postgres.new_database("ended_holder")
        stuck, mine = SqlPatchStore(ledgers(url)), SqlPatchStore(ledgers(url))
        with stuck.acting("x"):
            one = stuck.save(patch())
            with mine.ledger.engine.begin() as connection:
                connection.execute(
                    store_sql.text(
                        "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and pid <> pg_backend_pid()"
                    )
                )
            with mine.acting("x"):
                pass
        assert mine.get(one.patch_id) is not None


class TestAServerThatDoesNotAnswer:
    @pytest.fixture
    def living(self, new_store: Callable[[], Patches]) -> Callable[[], LivingMemory]:
        server = Server()
        return lambda: LivingMemory([], store=new_store(), targets=server, sign=False, occurrence_path=None)

    def test_is_not_waited_for_under_the_stores_lock(self, living: Callable[[], LivingMemory]) -> None:
        reviewer, agent = living(), living()
        one = reviewer.store.save(patch("x"))
        target = reviewer.targets.resolve("x")
        assert isinstance(target, Slow)
        with in_a_thread(lambda: reviewer.apply(one)) as found:
            assert target.asked.wait(10)
            queued = agent.store.save(patch("x"))  # an agent that proposes meanwhile
            assert agent.store.status(queued.patch_id) == "pending"
            with pytest.raises(StoreError, match="another process has held"):
                agent.reject(one.patch_id)
            target.answer.set()
        assert [one.status for one in found] == ["applied"]
        assert agent.store.status(one.patch_id) == "applied"
        assert agent.store.status(queued.patch_id) == "pending"

    def test_two_who_apply_one_patch_write_it_once(
        self, living: Callable[[], LivingMemory], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in (file_store, store_sql):
            monkeypatch.setattr(module, "LONGEST_WAIT", 20.0)
        ada, bob = living(), living()
        one = ada.store.save(patch("x"))
        target = ada.targets.resolve("x")
        assert isinstance(target, Slow)
        target.answer.set()
        with (
            in_a_thread(lambda: ada.apply(one.patch_id)) as first,
            in_a_thread(lambda: bob.apply(one.patch_id)) as other,
        ):
            pass
        done = [one for one in (*first, *other) if isinstance(one, MemoryPatch)]
        assert len(done) == 1
        assert any(isinstance(one, IllegalTransition) for one in (*first, *other))
        assert target.text == "a\nb\n"

    def test_on_postgres_other_targets_are_free(self, postgres: Any, ledgers: Any) -> None:
        url, server = postgres.new_database("other_targets"), Server()
        ada, bob = (
            LivingMemory([], store=SqlPatchStore(ledgers(url)), targets=server, sign=False, occurrence_path=None)
            for _ in range(2)
        )
        one, other = ada.store.save(patch("x")), ada.store.save(patch("y"))
        server.resolve("y").answer.set()
        with in_a_thread(lambda: ada.apply(one)) as found:
            assert server.resolve("x").asked.wait(10)
            assert bob.apply(other).status == "applied"
            server.resolve("x").answer.set()
        assert found[0].status == "applied"


def test_a_thread_does_not_write_into_the_transaction_that_another_joined(postgres: Any, ledgers: Any) -> None:
    url = postgres.new_database("joined_threads")
    store = SqlPatchStore(ledgers(url))
    with pytest.raises(ZeroDivisionError), in_one_transaction(store, SqlOccurrenceTracker(store.ledger)):  # noqa: PT012
        mine = store.save(patch())
        with in_a_thread(lambda: store.get(mine.patch_id)) as found:
            pass
        assert found == [None], "another thread sees what is committed only"
        1 / 0  # noqa: B018
    assert store.count() == 0


def test_the_process_that_proposes_answers_while_it_waits_for_the_store(
    postgres: Any, ledgers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims are renewed and other sessions go on: what is stored is stored in a thread."""
    monkeypatch.setattr(store_sql, "LONGEST_WAIT", 20.0)
    from outbox_rig import new_key

    from phionyx_letta.plugin.letta_sessions import Agent
    from phionyx_letta.plugin.session_queue import Claim
    from phionyx_letta.plugin.sessions import Pipe, Sessions, WithinBudget
    from phionyx_letta.settings import Settings

    url = postgres.new_database("proposing")
    ledger = ledgers(url)
    sessions = Sessions(ledger, new_key(), Settings(sessions="on", session_threshold=1), "me", Pipe())
    with ledger.engine.begin() as connection:
        connection.execute(
            store_sql.text(
                'create table block (id text, label text, value text, "limit" int, read_only bool,'
                " description text, is_deleted bool)"
            )
        )
        connection.execute(store_sql.text("create table blocks_agents (agent_id text, block_id text)"))
        connection.execute(store_sql.text("insert into block values ('b', 'human', 'Ann', 500, false, '', false)"))
        connection.execute(store_sql.text("insert into blocks_agents values ('a', 'b')"))
        connection.execute(
            store_sql.text(
                "insert into phionyx_session (session_id, agent_id, ended_by, state, attempts, claimed_by)"
                " values ('s', 'a', 'idle', 'waiting', 1, 'me')"
            )
        )

    class Model:
        model = "m"

        async def agenerate(self, prompt: str) -> str:
            return '[{"fact_key": "uv", "content": "- Uses uv.", "evidence": ["I use uv"], "rationale": "said"}]'

    agent = Agent("a", "letta_v1_agent", "a", frozenset(), None, None, None)
    records = [{"role": "user", "content": "I use uv", "id": "message-1"}]

    async def main() -> int:
        ticks = 0
        stuck = SqlPatchStore(ledgers(url))
        with stuck.exclusive():
            model = WithinBudget(Model(), left=None)
            work = asyncio.create_task(sessions._propose(Claim("s", "a", None, 1), agent, [], records, model))
            began = time.monotonic()
            while ticks < 50 and time.monotonic() - began < 9:
                await asyncio.sleep(0.01)
                ticks += 1
            assert not work.done()
        await work
        return ticks

    assert asyncio.run(main()) == 50
    assert SqlPatchStore(ledger).count("pending") == 1
    with ledger.engine.connect() as connection:
        assert connection.execute(store_sql.text("select state, patches from phionyx_session")).all() == [("done", 1)]
