"""The sealer on a real PostgreSQL: every committed row once, in the order of the writes, with the right place in its chain.

No Letta: rows are what capture writes, put there by hand.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from outbox_rig import Rig, attached, changed, new_key, payload_of

from phionyx_letta.diff import content_hash
from phionyx_letta.envelope import CONTENT_UNKNOWN
from phionyx_letta.ledger.sql import LOCK_KEY
from phionyx_letta.plugin.attribution import Attribution
from phionyx_letta.plugin.baseline import record_baseline
from phionyx_letta.plugin.sealer import Sealer

LETTAS_TABLES = (
    """create table block (id text primary key, organization_id text, value text, label text, description text,
       "limit" integer, read_only boolean)""",
    "create table blocks_agents (agent_id text, block_id text)",
    """create table block_history (id text, block_id text, sequence_number int, value text, label text, description text,
       "limit" int, metadata_ json, actor_type text, actor_id text, organization_id text,
       is_deleted boolean, _created_by_id text, created_at timestamptz)""",
)


@pytest.fixture
def rig(empty_database: str) -> Iterator[Rig]:
    rig = Rig(empty_database)
    yield rig
    rig.close()


def by(agent: str | None = None, run: str | None = None, **fields: Any) -> Attribution:
    return Attribution(agent_id=agent, run_id=run, **fields)


def hashes(*values: str) -> list[str]:
    return [content_hash(value) for value in values]


def traces(rig: Rig) -> list[str]:
    return [envelope["subject"]["trace_id"] for envelope in rig.envelopes()]


def turns(rig: Rig, trace: str) -> list[int]:
    return [e["subject"]["turn_index"] for e in rig.ledger.iter_chain(trace)]


class TestEveryCommittedRowIsSealed:
    def test_also_one_whose_transaction_commits_last_though_its_number_is_the_lowest(self, rig: Rig) -> None:
        with rig.connect() as late:
            rig.put(rig.row(changed("slow", None, "one")), late)
            rig.write("quick", "one")
            assert rig.seal().sealed == 1
            late.commit()
        assert rig.seal().sealed == 1
        assert rig.after_hashes("slow") == rig.after_hashes("quick") == hashes("one")
        assert rig.findings() == []

    def test_many_transactions_that_overlap(self, rig: Rig) -> None:
        """Eight writers whose transactions begin and commit out of step, while a sealer runs all the time."""
        done = threading.Event()

        def write(block: str) -> None:
            with rig.connect() as connection:
                for number in range(40):
                    before = None if number == 0 else str(number - 1)
                    rig.put(rig.row(changed(block, before, str(number))), connection)
                    if number % 3:
                        connection.commit()

        def seal() -> None:
            while not done.is_set():
                Sealer(rig.ledger, rig.key, batch=7).seal_pending()

        with ThreadPoolExecutor(9) as pool:
            sealing = pool.submit(seal)
            for writing in [pool.submit(write, f"b{number}") for number in range(8)]:
                writing.result()
            done.set()
            sealing.result()
        rig.seal()
        for number in range(8):
            assert rig.after_hashes(f"b{number}") == hashes(*map(str, range(40)))
        assert len(rig.envelopes()) == 320
        assert rig.outbox() == []
        assert rig.findings() == []

    def test_more_than_a_batch(self, rig: Rig) -> None:
        sealer = Sealer(rig.ledger, rig.key, batch=10)
        for number in range(35):
            rig.write("b", str(number))
        assert sealer.seal_batch().sealed == 10
        assert sealer.seal_pending().sealed == 25
        assert rig.after_hashes("b") == hashes(*map(str, range(35)))
        assert rig.findings() == []

    def test_exactly_a_batch(self, rig: Rig) -> None:
        for number in range(10):
            rig.write("b", str(number))
        assert Sealer(rig.ledger, rig.key, batch=10).seal_pending().sealed == 10

    def test_none_of_a_transaction_that_is_rolled_back(self, rig: Rig) -> None:
        with rig.connect() as connection:
            rig.put(rig.row(changed("b", None, "one")), connection)
            connection.rollback()
        assert rig.seal().sealed == 0
        assert rig.envelopes() == []

    def test_none_of_a_savepoint_that_is_rolled_back(self, rig: Rig) -> None:
        with rig.connect() as connection:
            rig.put(rig.row(changed("b", None, "one")), connection)
            with connection.transaction() as savepoint:
                rig.put(rig.row(changed("b", "one", "dropped")), connection)
                raise_rollback(savepoint)
            rig.put(rig.row(changed("b", "one", "two")), connection)
        rig.seal()
        assert rig.after_hashes("b") == hashes("one", "two")
        assert rig.findings() == []

    def test_in_the_order_of_the_writes_across_transactions_of_one_block(self, rig: Rig) -> None:
        """The second writer waits for the first one's row lock, as capture does, so its number is the higher one."""
        rig.sql("create table block (id text primary key)")
        rig.sql("insert into block values ('b')")
        first, lock = rig.connect(), "select 1 from block where id = 'b' for update"
        with first, ThreadPoolExecutor(1) as pool:
            first.execute(lock)

            def second_writer() -> None:
                with rig.connect() as second:
                    second.execute(lock)
                    rig.put(rig.row(changed("b", "one", "two")), second)

            second = pool.submit(second_writer)
            wait_until(lambda: waiting_for_locks(rig) == 1)
            rig.put(rig.row(changed("b", None, "one")), first)
            first.commit()
            second.result()
        rig.seal()
        assert rig.after_hashes("b") == hashes("one", "two")


class TestOneSealerAtATime:
    def test_two_at_once_never_duplicate(self, rig: Rig) -> None:
        rig.put_many([rig.row(changed(f"b{number}", None, "one")) for number in range(600)])
        together = threading.Barrier(3)

        def seal() -> int:
            sealer, sealed = Sealer(rig.ledger, rig.key, batch=7), 0
            together.wait()
            while rig.ledger.has_pending():
                sealed += sealer.seal_batch().sealed
            return sealed

        with ThreadPoolExecutor(3) as pool:
            counts = [running.result() for running in [pool.submit(seal) for _ in range(3)]]
        assert sum(counts) == len(rig.envelopes()) == 600
        assert len({e["mutation"]["block_id"] for e in rig.envelopes()}) == 600
        assert rig.findings() == []

    def test_one_that_is_stalled_is_left_alone_and_followed(self, rig: Rig) -> None:
        rig.write("b", "one")
        with rig.holding(f"select pg_advisory_xact_lock({LOCK_KEY})"):
            report = rig.seal()
            assert report.busy
            assert report.sealed == 0
        report = rig.seal()
        assert not report.busy
        assert report.sealed == 1

    def test_writers_do_not_wait_for_a_stalled_one(self, rig: Rig) -> None:
        with rig.holding(f"select pg_advisory_xact_lock({LOCK_KEY})"):
            rig.write("b", "one")
            rig.write("b", "two")
        assert rig.seal().sealed == 2

    def test_one_that_is_killed_in_the_middle_of_a_batch_leaves_all_or_nothing(self, rig: Rig) -> None:
        for number in range(20):
            rig.write("b", str(number))
        with rig.holding("lock table phionyx_chain in exclusive mode") as connection:
            sealer = start_sealing_process(rig)
            wait_until(lambda: waiting_for_locks(rig) == 1)  # its envelopes are inserted, its heads are not
            sealer.kill()
            sealer.wait()
            connection.rollback()
        wait_until(lambda: advisory_locks(rig) == 0)
        assert rig.envelopes() == []
        assert len(rig.outbox()) == 20
        assert rig.seal().sealed == 20
        assert rig.after_hashes("b") == hashes(*map(str, range(20)))
        assert rig.findings() == []

    def test_its_end_of_input_makes_it_seal_what_is_left_and_go(self, rig: Rig) -> None:
        with rig.holding(f"select pg_advisory_xact_lock({LOCK_KEY})"):
            sealer = start_sealing_process(rig)
            rig.write("b", "one")
        assert sealer.stdin is not None
        sealer.stdin.close()
        assert sealer.wait(30) == 0
        assert rig.after_hashes("b") == hashes("one")

    def test_no_lock_outlives_a_batch(self, rig: Rig) -> None:
        """A session's lock would stay with whichever connection a pooler such as pgbouncer hands out next."""
        rig.write("b", "one")
        rig.seal()
        assert advisory_locks(rig) == 0
        source = [row[0] for row in rig.sql("select query from pg_stat_activity where datname = current_database()")]
        assert not any("pg_advisory_lock(" in query or "pg_try_advisory_lock(" in query for query in source)

    def test_each_batch_is_one_transaction(self, rig: Rig) -> None:
        """What another connection sees is a row in the outbox or its envelope, never both and never neither."""
        seen: set[int] = set()
        done = threading.Event()

        def look() -> None:
            with rig.connect() as connection:
                while not done.is_set():
                    found = connection.execute(
                        "select (select count(*) from phionyx_outbox) + (select count(*) from phionyx_envelope)"
                    ).fetchone()
                    connection.commit()
                    seen.add(found[0])  # type: ignore[index]

        rig.put_many([rig.row(changed(f"b{number}", None, "one")) for number in range(200)])
        with ThreadPoolExecutor(1) as pool:
            looking = pool.submit(look)
            Sealer(rig.ledger, rig.key, batch=3).seal_pending()
            done.set()
            looking.result()
        assert seen == {200}


class TestTwoHostsWithTwoKeys:
    @pytest.fixture
    def other(self, rig: Rig) -> Iterator[Rig]:
        other = Rig(rig.url, new_key())
        other.values = rig.values  # both write the same blocks
        yield other
        other.close()

    def test_each_seals_its_own_and_the_order_stays(self, rig: Rig, other: Rig) -> None:
        for host in (rig, other):
            rig.see_worker(host.key.outbox.key_id)
        values = [str(number) for number in range(12)]
        for number, value in enumerate(values):
            (rig, other, other)[number % 3].write("b", value)
        while rig.outbox():
            mine, theirs = rig.seal(), other.seal()
            assert mine.refused == theirs.refused == 0
        assert rig.after_hashes("b") == hashes(*values)
        keys = [envelope["subject"]["key_id"] for envelope in rig.envelopes()]
        assert keys == [(rig, other, other)[number % 3].key.outbox.key_id for number in range(12)]
        assert rig.findings(rig.key, other.key) == []

    def test_one_key_alone_does_not_verify_the_others_envelopes(self, rig: Rig, other: Rig) -> None:
        for host in (rig, other):
            rig.see_worker(host.key.outbox.key_id)
            host.write("b", host.key.outbox.key_id)
            host.seal()
        assert {finding["dimension"] for finding in rig.findings(rig.key)} >= {"signatures"}

    def test_rows_behind_one_of_a_living_host_wait_for_it(self, rig: Rig, other: Rig) -> None:
        for host in (rig, other):
            rig.see_worker(host.key.outbox.key_id)
        rig.write("b", "one")
        other.write("b", "two")
        rig.write("b", "three")
        report = rig.seal()
        assert (report.sealed, report.refused, report.waiting) == (1, 0, 1)
        other.seal()
        assert rig.seal().sealed == 1
        assert rig.after_hashes("b") == hashes("one", "two", "three")

    @pytest.mark.parametrize("seen", ["now() - interval '31 seconds'", None])
    def test_those_of_a_host_that_is_gone_are_passed_over_and_said_so(
        self, rig: Rig, other: Rig, seen: str | None
    ) -> None:
        if seen:
            rig.see_worker(other.key.outbox.key_id, seen)
        passed = other.write("b", "one")
        rig.write("c", "one")
        report = rig.seal()
        assert (report.sealed, report.refused, report.waiting) == (1, 1, 0)
        assert "no running worker has" in rig.refusals()[passed]

    def test_and_are_sealed_when_it_comes_back(self, rig: Rig, other: Rig) -> None:
        other.write("b", "one")
        rig.seal()
        assert other.seal_afresh().sealed == 1
        assert rig.after_hashes("b") == hashes("one")
        assert rig.findings(rig.key, other.key) == []

    def test_patience_is_measured_by_the_databases_clock(
        self, rig: Rig, other: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Hosts' clocks differ: one that is an hour ahead must not take every other host for dead."""

        class AnHourAhead(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return super().now(tz) + timedelta(hours=1)

        monkeypatch.setattr("phionyx_letta.plugin.sealer.datetime", AnHourAhead)
        rig.see_worker(other.key.outbox.key_id)
        other.write("b", "one")
        assert rig.seal().waiting == 1


class TestTurns:
    def test_mutations_of_one_run_share_one_and_the_next_run_has_the_next(self, rig: Rig) -> None:
        for run, value in [("r1", "a"), ("r1", "b"), ("r2", "c"), ("r2", "d"), ("r3", "e")]:
            rig.write("b", value, by("agent-1", run))
        rig.seal()
        assert turns(rig, "agent-1") == [0, 0, 1, 1, 2]

    def test_a_change_outside_any_run_is_one_of_its_own(self, rig: Rig) -> None:
        for run, value in [(None, "a"), ("r1", "b"), (None, "c"), (None, "d"), ("r2", "e")]:
            rig.write("b", value, by("agent-1", run))
        rig.seal()
        assert turns(rig, "agent-1") == [0, 1, 2, 3, 4]

    def test_interleaved_runs_keep_theirs(self, rig: Rig) -> None:
        for run, value in [("r1", "a"), ("r2", "b"), ("r1", "c"), ("r3", "d"), ("r2", "e"), (None, "f"), ("r1", "g")]:
            rig.write("b", value, by("agent-1", run))
        rig.seal()
        assert turns(rig, "agent-1") == [0, 1, 0, 2, 1, 3, 0]
        assert rig.findings() == []

    def test_also_when_each_row_is_sealed_by_itself(self, rig: Rig) -> None:
        for run, value in [("r1", "a"), ("r2", "b"), ("r1", "c"), (None, "d"), ("r2", "e")]:
            rig.write("b", value, by("agent-1", run))
            rig.seal_afresh()
        assert turns(rig, "agent-1") == [0, 1, 0, 2, 1]

    def test_chains_count_by_themselves(self, rig: Rig) -> None:
        for agent, run, value in [
            ("agent-1", "r1", "a"),
            ("agent-2", "r1", "b"),
            ("agent-2", "r2", "c"),
            ("agent-1", "r2", "d"),
        ]:
            rig.write("b", value, by(agent, run))
        rig.seal()
        assert turns(rig, "agent-1") == [0, 1]
        assert turns(rig, "agent-2") == [0, 1]


class TestAttachAndDetach:
    def test_carry_the_content_as_it_stood_at_their_place_in_the_order(self, rig: Rig) -> None:
        rig.write("b", "one")
        rig.put(rig.row(attached("b", "agent-1")))
        rig.write("b", "two")
        rig.put(rig.row(attached("b", "agent-1", "detach")))
        rig.seal()
        assert rig.after_hashes("b") == hashes("one", "one", "two", "two")
        for envelope in rig.envelopes():
            diff = envelope["mutation"]["diff"]
            if envelope["subject"]["metadata"]["letta"]["event"] in ("attach", "detach"):
                assert diff["before_hash"] == diff["after_hash"]
                assert (diff["added_chars"], diff["removed_chars"], diff["unchanged_chars"]) == (0, 0, 3)
                assert diff["before_size_bytes"] == diff["after_size_bytes"] == 3
        assert rig.findings() == []

    def test_sizes_are_in_bytes_and_counts_in_characters(self, rig: Rig) -> None:
        rig.write("b", "aé\U0001f600")
        rig.put(rig.row(attached("b", "agent-1")))
        rig.seal()
        diff = rig.envelopes()[-1]["mutation"]["diff"]
        assert (diff["after_size_bytes"], diff["unchanged_chars"]) == (7, 3)

    def test_of_a_block_nothing_is_known_of_say_so(self, rig: Rig) -> None:
        rig.put(rig.row(attached("b", "agent-1")))
        rig.seal()
        (envelope,) = rig.envelopes()
        assert envelope["subject"]["metadata"]["letta"]["content"] == CONTENT_UNKNOWN
        assert envelope["mutation"]["diff"]["after_hash"] == content_hash("")

    def test_a_detach_is_a_forget_with_a_reason(self, rig: Rig) -> None:
        rig.write("b", "one")
        rig.put(rig.row(attached("b", "agent-1", "detach")))
        rig.put(rig.row(attached("b", "agent-2", "detach", by("agent-2", reason="explicit_user_request"))))
        rig.seal()
        _, first, second = rig.envelopes()
        assert first["mutation"]["mutation_kind"] == second["mutation"]["mutation_kind"] == "forget"
        assert first["mutation"]["forgetting_reason"] == "letta.detach"
        assert second["mutation"]["forgetting_reason"] == "explicit_user_request"


class TestWhichChain:
    def test_that_of_the_agent_the_write_is_attributed_to(self, rig: Rig) -> None:
        rig.write("b", "one", by("agent-7"))
        rig.put(rig.row(attached("b", "agent-1")))
        rig.write("b", "two", by("agent-7"))
        rig.seal()
        assert traces(rig) == ["agent-7", "agent-1", "agent-7"]

    def test_else_that_of_the_one_agent_that_has_the_block(self, rig: Rig) -> None:
        rig.put(rig.row(attached("b", "agent-1")))
        rig.write("b", "one")
        rig.seal()
        assert traces(rig) == ["agent-1", "agent-1"]

    def test_else_that_of_the_block(self, rig: Rig) -> None:
        rig.write("b", "one")  # nobody has it
        for agent in ("agent-1", "agent-2"):
            rig.put(rig.row(attached("b", agent)))
        rig.write("b", "two")  # two agents have it
        rig.seal()
        assert traces(rig) == ["b", "agent-1", "agent-2", "b"]

    def test_a_detach_counts(self, rig: Rig) -> None:
        for agent, event in [("agent-1", "attach"), ("agent-2", "attach"), ("agent-1", "detach")]:
            rig.put(rig.row(attached("b", agent, event)))
        rig.write("b", "one")
        rig.put(rig.row(attached("b", "agent-2", "detach")))
        rig.write("b", "two")
        rig.seal()
        assert traces(rig)[3:] == ["agent-2", "agent-2", "b"]

    def test_the_agents_of_a_block_are_remembered_between_batches(self, rig: Rig) -> None:
        rig.put(rig.row(attached("b", "agent-1")))
        rig.seal()
        rig.write("b", "one")
        rig.seal_afresh()
        assert traces(rig) == ["agent-1", "agent-1"]
        assert json.loads(rig.sql("select agents from phionyx_block where block_id = 'b'")[0][0]) == ["agent-1"]

    def test_attaching_twice_is_attaching_once(self, rig: Rig) -> None:
        for _ in range(2):
            rig.put(rig.row(attached("b", "agent-1")))
        rig.write("b", "one")
        rig.seal()
        assert traces(rig)[2] == "agent-1"

    def test_a_block_that_was_deleted_has_no_agents(self, rig: Rig) -> None:
        rig.put(rig.row(attached("b", "agent-1")))
        rig.write("b", "one")
        rig.put(rig.row(changed("b", "one", None)))
        rig.seal()
        assert json.loads(rig.sql("select agents from phionyx_block where block_id = 'b'")[0][0]) == []

    def test_position_trace_key_and_organization_are_under_the_hash(self, rig: Rig) -> None:
        for value in ("one", "two"):
            rig.write("b", value, by("agent-1"))
        rig.seal()
        for position, envelope in enumerate(rig.envelopes()):
            subject = envelope["subject"]
            assert subject["trace_id"] == "agent-1"
            assert subject["position"] == position
            assert subject["key_id"] == rig.key.outbox.key_id
            assert subject["organization_id"] == "org-1"

    def test_linkage_of_a_block_is_checked_across_chains(self, rig: Rig) -> None:
        for agent, value in [("agent-1", "one"), ("agent-2", "two"), ("agent-1", "three")]:
            rig.write("b", value, by(agent))
        rig.seal()
        assert rig.findings() == []
        heads = [e["mutation"]["diff"] for e in rig.envelopes()]
        assert [diff["before_hash"] for diff in heads[1:]] == [diff["after_hash"] for diff in heads[:-1]]


class TestWhatAnEnvelopeCarries:
    def test_the_moment_of_the_write_and_not_of_the_sealing(self, rig: Rig) -> None:
        row = rig.row(changed("b", None, "one"))
        rig.put(row)
        rig.seal()
        assert rig.envelopes()[0]["subject"]["timestamp_utc"] == payload_of(row)["at"]

    def test_who_and_why(self, rig: Rig) -> None:
        who = by("agent-1", "r1", step_id="s1", tool="core_memory_append", tool_call_id="call-1", actor_id="user-1")
        rig.write("b", "one", who)
        rig.seal()
        (envelope,) = rig.envelopes()
        letta = envelope["subject"]["metadata"]["letta"]
        assert envelope["subject"]["producer"] == "letta.agent-1"
        assert (
            letta.items()
            >= {
                "agent_id": "agent-1",
                "run_id": "r1",
                "step_id": "s1",
                "tool": "core_memory_append",
                "tool_call_id": "call-1",
                "actor_id": "user-1",
            }.items()
        )

    def test_the_upstream_envelope_that_caused_it(self, rig: Rig) -> None:
        reference = "envelope://sha256:" + "ab" * 32
        rig.write("b", "one", by(parent=reference))
        rig.seal()
        assert rig.envelopes()[0]["subject"]["metadata"]["memory_audit"]["parent_envelope_ref"] == reference

    def test_a_change_that_was_not_recorded_is_said_in_the_log(
        self, rig: Rig, caplog: pytest.LogCaptureFixture
    ) -> None:
        rig.write("b", "one")
        rig.values["b"] = "changed by hand"
        rig.write("b", "two")
        with caplog.at_level(logging.ERROR):
            assert rig.seal().sealed == 2
        assert "a change in between was not recorded" in caplog.text
        assert [finding["dimension"] for finding in rig.findings()] == ["block_linkage"]


class TestBaseline:
    @pytest.fixture
    def blocks(self, rig: Rig) -> Rig:
        for statement in LETTAS_TABLES:
            rig.sql(statement)
        for name in ("old", "older"):
            rig.sql("insert into block values (%s, 'org-1', 'held before', 'human', null, 5000, false)", name)
        rig.sql("insert into blocks_agents values ('agent-1', 'old')")
        return rig

    def take(self, rig: Rig) -> None:
        while record_baseline(rig.ledger, rig.key.outbox, "test"):
            rig.seal()

    def test_every_block_without_a_record_gets_one_envelope(self, blocks: Rig) -> None:
        self.take(blocks)
        self.take(blocks)
        assert sorted(e["mutation"]["block_id"] for e in blocks.envelopes()) == ["old", "older"]
        assert {e["subject"]["metadata"]["letta"]["event"] for e in blocks.envelopes()} == {"baseline"}
        assert {e["mutation"]["diff"]["before_hash"] for e in blocks.envelopes()} == {content_hash("held before")}
        assert blocks.findings() == []

    def test_it_knows_the_agent_that_has_the_block(self, blocks: Rig) -> None:
        self.take(blocks)
        blocks.values["old"] = "held before"
        blocks.write("old", "new")
        blocks.seal()
        assert list(blocks.ledger.traces()) == ["agent-1", "older"]

    def test_a_block_whose_write_waits_in_the_outbox_gets_none(self, blocks: Rig) -> None:
        blocks.values["old"] = "held before"
        blocks.write("old", "new")
        record_baseline(blocks.ledger, blocks.key.outbox, "test")
        blocks.seal()
        events = {e["mutation"]["block_id"]: e["subject"]["metadata"]["letta"]["event"] for e in blocks.envelopes()}
        assert events == {"old": "update", "older": "baseline"}

    def test_a_block_that_is_being_written_is_not_waited_for(self, blocks: Rig) -> None:
        with blocks.holding("update block set value = 'x' where id = 'old'"):
            record_baseline(blocks.ledger, blocks.key.outbox, "test")
            blocks.seal()
            assert [e["mutation"]["block_id"] for e in blocks.envelopes()] == ["older"]
        self.take(blocks)
        assert [e["mutation"]["block_id"] for e in blocks.envelopes()] == ["older", "old"]


def raise_rollback(transaction: Any) -> None:
    raise psycopg.Rollback(transaction)


def start_sealing_process(rig: Rig) -> subprocess.Popen[str]:
    """The real process, with this rig's key."""
    environment = {**os.environ, "PHIONYX_LETTA_SIGNING_KEY": rig.key.source, "PHIONYX_LETTA_BASELINE": "off"}
    process = subprocess.Popen(
        [sys.executable, "-m", "phionyx_letta.plugin.sealing_process"],
        stdin=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps({"url": rig.url}) + "\n")
    process.stdin.flush()
    return process


def waiting_for_locks(rig: Rig) -> int:
    return int(
        rig.sql(
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )[0][0]
    )


def advisory_locks(rig: Rig) -> int:
    return int(
        rig.sql(
            "select count(*) from pg_locks where locktype = 'advisory'"
            " and database = (select oid from pg_database where datname = current_database())"
        )[0][0]
    )


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    waiting = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        waiting.wait(0.02)
    assert condition()
