"""The queue of sessions: every session is proposed from once or is visibly parked, whoever dies, and nothing else is."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, tzinfo
from pathlib import Path

import psycopg
import pytest
from queue_rig import QueueRig, drain, queue
from sessions_rig import remember

from phionyx_letta.demo.model import ScriptedModel
from phionyx_letta.demo.script import PROPOSER, Reply, plan
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.plugin import session_queue, sessions
from phionyx_letta.plugin.run_ends import _note_sql
from phionyx_letta.plugin.session_queue import SessionQueue, end_by_hand, try_again
from phionyx_letta.settings import Settings

pytestmark = pytest.mark.slow

_NAMES = "amber birch cedar delta ember fjord grove heron ivory jade kelp lotus maple nadir onyx pearl quartz raven slate tulip"
WORDS = _NAMES.split()


def fact(number: int) -> str:
    """What a user says in a session of its own, and the fact in it."""
    name = f"{WORDS[number % len(WORDS)]}{number}"
    said = f"My favourite stone is {name}."
    return remember(said, fact_key=f"stone_{name}", content=f"- Favourite stone {name}.", evidence=[said])


@pytest.fixture
def rig(new_letta_database: Callable[[], str], model: ScriptedModel, tmp_path: Path) -> Iterator[QueueRig]:
    with queue(new_letta_database(), model.base_url, tmp_path) as found:
        yield found


def settings(**more: object) -> Settings:
    return Settings(sessions="on", **more)  # type: ignore[arg-type]


def test_killed_at_random_moments_every_session_is_proposed_from_exactly_once(
    rig: QueueRig, model: ScriptedModel
) -> None:
    agents = [rig.agent() for _ in range(3)]
    for number in range(24):
        rig.run(agents[number % 3], fact(number))
    chance = random.Random(7)
    kills, more = 0, {"PHIONYX_LETTA_SESSION_ATTEMPTS": "50"}
    workers = [rig.start(**more) for _ in range(2)]
    deadline = time.monotonic() + 150
    while rig.states().get("done", 0) < 24:
        assert time.monotonic() < deadline, rig.sql("select * from phionyx_session")
        time.sleep(chance.uniform(0.2, 2.0))
        if kills < 15:
            victim = workers.pop(0)
            rig.kill(victim)
            kills += 1
            workers.append(rig.start(**more))

    assert rig.states() == {"done": 24}
    assert kills >= 3
    patches = rig.patches()
    assert Counter(one["metadata"]["content"] for one in patches) == {
        f"- Favourite stone {WORDS[n % 20]}{n}.": 1 for n in range(24)
    }
    assert len({one["session_id"] for one in patches}) == 24
    counted = [json.loads(body)["count"] for (body,) in rig.sql("select body from phionyx_occurrence")]
    assert counted == [1] * 24


def test_who_lost_the_claim_while_it_stood_still_stores_nothing(
    rig: QueueRig, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = rig.agent()
    rig.run(agent, fact(1))
    slow: list[float] = []

    def answer(request: dict[str, object]) -> Reply:
        slow.append(time.monotonic())
        time.sleep(4 if len(slow) == 1 else 0)
        return plan(request)

    monkeypatch.setattr(model, "override", answer)
    first = rig.start()
    rig.wait(lambda: slow)
    os.kill(first.pid, signal.SIGSTOP)
    rig.expire(first)
    rig.start()
    rig.wait(lambda: rig.states() == {"done": 1})
    os.kill(first.pid, signal.SIGCONT)
    time.sleep(6)

    assert len(slow) == 2, "both asked"
    assert len(rig.patches(agent)) == 1
    assert rig.sql("select attempts, patches from phionyx_session") == [(2, 1)]
    assert first.poll() is None, "it goes on"


def test_a_dead_model_endpoint_parks_the_session_with_the_reason_and_retry_brings_it_back(
    rig: QueueRig, model: ScriptedModel
) -> None:
    agent = rig.agent()
    rig.run(agent, fact(1))
    dead = {"PHIONYX_LETTA_PROPOSER_BASE_URL": "http://127.0.0.1:9/v1"}
    process = rig.start(PHIONYX_LETTA_SESSION_ATTEMPTS="2", PHIONYX_LETTA_SESSION_BACKOFF="0.2", **dead)
    rig.wait(lambda: rig.states() == {"parked": 1})
    [(session, attempts, detail)] = rig.sql("select session_id, attempts, detail from phionyx_session")
    assert attempts == 2
    assert "no usable answer" in detail
    rig.kill(process)

    ledger = SqlLedger(rig.url)
    assert try_again(ledger, session)
    assert not try_again(ledger, session), "it is not parked any more"
    ledger.close()
    rig.start()
    rig.wait(lambda: rig.states() == {"done": 1})
    assert len(rig.patches(agent)) == 1


def test_a_session_that_ends_its_worker_every_time_is_parked(rig: QueueRig) -> None:
    rig.run(rig.agent(), fact(1))
    ledger = SqlLedger(rig.url)
    mine = SessionQueue(ledger, settings(session_end="run", session_attempts=3), "mine")
    assert mine.close() == 1
    for attempt in (1, 2, 3):
        claim = mine.claim()
        assert claim is not None
        assert claim.attempt == attempt
        assert mine.claim() is None, "it is taken"
        rig.sql("update phionyx_session set claimed_until = now() - interval '1 second'")
    assert mine.claim() is None
    [(state, detail)] = rig.sql("select state, detail from phionyx_session")
    assert state == "parked"
    assert "ended 3 times" in detail
    ledger.close()


def test_attempts_that_failed_are_paid_for_too(rig: QueueRig) -> None:
    rig.run(rig.agent(), fact(1))
    ledger = SqlLedger(rig.url)
    mine = SessionQueue(ledger, settings(session_end="run", session_backoff=0.001), "mine")
    assert mine.close() == 1
    claim = mine.claim()
    assert claim is not None
    assert not mine.failed(claim, "no answer", tokens=5)
    time.sleep(0.1)
    again = mine.claim()
    assert again is not None
    mine.settle(again, "done", tokens=7)
    assert rig.sql("select state, tokens from phionyx_session") == [("done", 12)]
    ledger.close()


def test_what_is_no_talk_of_a_user_with_an_agent_is_left_out_and_what_is_not_wanted_is_skipped(rig: QueueRig) -> None:
    sleeptime, background = rig.agent(kind="sleeptime_agent"), rig.agent()
    rig.run(sleeptime, fact(1))
    rig.run(background, fact(2), run_type="sleeptime_agent_send_message_async")
    opted_out, short, gone = rig.agent(tag="no-proposals"), rig.agent(), rig.agent()
    rig.run(opted_out, fact(3))
    rig.run(short, "hi")
    rig.run(gone, fact(4))
    ledger = SqlLedger(rig.url)
    mine = SessionQueue(ledger, settings(session_end="run"), "mine")
    assert mine.close() == 3
    assert rig.sql("select count(*) from phionyx_run where session_id = ''") == [(2,)]
    ledger.close()
    for table, column in (("messages", "agent_id"), ("runs", "agent_id"), ("agents", "id")):
        rig.sql(f"delete from {table} where {column} = %s", gone)
    rig.start()
    rig.wait(lambda: rig.states() == {"skipped": 3})
    said = dict(rig.sql("select agent_id, detail from phionyx_session"))
    assert "no-proposals" in said[opted_out]
    assert "2 characters" in said[short]
    assert said[gone] == "the agent was deleted"
    assert rig.patches() == []


def test_a_session_ends_when_it_is_idle_and_not_while_a_run_is_under_way_or_waits_for_an_approval(
    rig: QueueRig,
) -> None:
    ledger = SqlLedger(rig.url)
    mine = SessionQueue(ledger, settings(session_idle=30), "mine")
    talking, running, approving, idle, orphaned = (rig.agent() for _ in range(5))
    first, second = rig.run(idle, fact(1), age=50), rig.run(idle, fact(2), age=40)
    rig.run(talking, fact(3), age=50)
    rig.run(talking, fact(4), age=5)
    rig.run(running, fact(5), age=50)
    under_way = rig.run(running, fact(6), ended=False, noted=False, age=20)
    rig.run(approving, fact(7), age=50, stop_reason="requires_approval")
    rig.run(orphaned, ended=False, noted=False, age=5000)  # its process died before anybody swept
    rig.run(orphaned, fact(8), age=50)

    assert mine.close() == 2
    closed = dict(rig.sql("select agent_id, session_id from phionyx_session"))
    assert closed.keys() == {idle, orphaned}
    session = closed[idle]
    assert set(rig.sql("select run_id from phionyx_run where session_id = %s", session)) == {(first,), (second,)}
    rig.sql("update runs set completed_at = now(), status = 'completed' where id = %s", under_way)
    rig.sql("insert into phionyx_run(run_id, ended_at) values (%s, now() - interval '40 seconds')", under_way)
    assert mine.close() == 1
    assert len(end_by_hand(ledger, approving, None)) == 1
    assert end_by_hand(ledger, approving, None) == []
    assert len(rig.command("session", "end", talking)["ended"]) == 1
    assert "no open session" in rig.command("session", "end", talking, code=1)["error"]
    listed = rig.command("session", "list", "--agent", talking)["sessions"]
    assert [(one["state"], one["ended_by"], one["runs"]) for one in listed] == [("waiting", "hand", 2)]
    by_hand = SessionQueue(ledger, settings(session_end="hand", session_idle=0), "mine")
    rig.run(talking, fact(9), age=500)
    assert by_hand.close() == 0
    ledger.close()


def test_the_sweep_finds_ends_no_hook_saw_and_runs_whose_process_died_and_no_others(rig: QueueRig) -> None:
    agent, ledger = rig.agent(), SqlLedger(rig.url)
    mine = SessionQueue(ledger, settings(), "mine")
    missed = rig.run(agent, fact(1), noted=False, age=70)
    dead = rig.run(agent, fact(2), ended=False, noted=False, age=100)
    alive = rig.run(agent, fact(3), ended=False, noted=False, age=100)
    rig.run(agent, fact(4), ended=False, noted=False, age=5)  # may not be told of yet
    rig.run(agent, fact(5), noted=False, age=4000)  # before anybody noted ends
    assert mine.sweep() == 0, "no worker has said since when it notes ends"
    [(since,)] = rig.sql("select (now() - interval '1 hour')::text")
    told = json.dumps({"sessions_since": since.replace(" ", "T"), "active_runs": [alive]})
    rig.sql("insert into phionyx_worker(worker_id, seen_at, armed, info) values ('w1', now(), true, %s)", told)
    assert mine.sweep() == 2
    assert {run for (run,) in rig.sql("select run_id from phionyx_run")} == {missed, dead}
    assert mine.sweep() == 0

    # where a living worker does not say what it has under way, no run is taken for dead
    rig.sql("insert into phionyx_worker(worker_id, seen_at, armed, info) values ('w2', now(), true, '{}')")
    rig.run(agent, fact(6), ended=False, noted=False, age=100)
    assert mine.sweep() == 0
    ledger.close()


def test_a_later_sweep_looks_only_at_what_came_since_and_at_what_was_not_finished_then(rig: QueueRig) -> None:
    agent, ledger = rig.agent(), SqlLedger(rig.url)
    mine = SessionQueue(ledger, settings(), "mine")
    slow = rig.run(agent, fact(1), ended=False, noted=False, age=3 * 3600)
    rig.sql("update messages set created_at = now() where run_id = %s", slow)
    [(since,)] = rig.sql("select (now() - interval '1 day')::text")
    told = json.dumps({"sessions_since": since.replace(" ", "T"), "active_runs": [slow]})
    rig.sql("insert into phionyx_worker(worker_id, seen_at, armed, info) values ('w1', now(), true, %s)", told)
    assert mine.sweep() == 0, "it is under way"
    rig.sql("update runs set completed_at = now(), status = 'completed' where id = %s", slow)
    old = rig.run(agent, fact(2), noted=False, age=2 * 3600)
    recent = [rig.run(agent, fact(3), noted=False, age=70), rig.run(agent, fact(4), noted=False, age=1800)]
    assert mine.sweep() == 3
    assert {run for (run,) in rig.sql("select run_id from phionyx_run")} == {slow, *recent}
    assert SessionQueue(ledger, settings(), "new").sweep() == 1, "the first sweep of a process looks at all"
    assert rig.sql("select 1 from phionyx_run where run_id = %s", old)
    ledger.close()


def test_each_run_is_a_session_and_those_that_waited_for_an_approval_belong_to_the_one_that_follows(
    rig: QueueRig,
) -> None:
    agent, other, ledger = rig.agent(), rig.agent(), SqlLedger(rig.url)
    asked, again = (rig.run(agent, fact(n), age=50 - n, stop_reason="requires_approval") for n in (1, 2))
    rig.run(other, fact(3), age=45)
    mine = SessionQueue(ledger, settings(session_end="run"), "mine")
    assert mine.close() == 1, "what waits for an approval is no end"
    assert rig.sql("select agent_id from phionyx_session") == [(other,)]
    answered, next_one = rig.run(agent, age=30), rig.run(agent, fact(5), age=20)
    waiting = rig.run(agent, fact(6), age=10, stop_reason="requires_approval")
    assert mine.close() == 2
    grouped = rig.sql(
        "select array_agg(r.run_id) from phionyx_run r join runs u on u.id = r.run_id where u.agent_id = %s group by r.session_id",
        agent,
    )
    assert {frozenset(runs) for (runs,) in grouped} == {
        frozenset(s) for s in ({asked, again, answered}, {next_one}, {waiting})
    }
    assert mine.close() == 0
    ledger.close()
    rig.start()
    rig.wait(lambda: rig.states() == {"done": 3})
    assert len(rig.patches(agent)) == 3, "each fact once, and what was said before the approval too"


def test_ends_of_runs_are_kept_as_long_as_their_session_can_be_tried_again(rig: QueueRig) -> None:
    ledger = SqlLedger(rig.url)
    mine = SessionQueue(ledger, settings(session_end="run"), "mine")
    told = json.dumps({"sessions_since": "2020-01-01T00:00:00+00:00", "active_runs": []})
    rig.sql("insert into phionyx_worker(worker_id, seen_at, armed, info) values ('w1', now(), true, %s)", told)
    runs = {state: rig.run(rig.agent(), fact(1), age=31 * 86400) for state in ("parked", "waiting", "done", "skipped")}
    assert mine.close() == 4
    for state, run in runs.items():
        rig.sql(
            "update phionyx_session set state = %s where session_id = (select session_id from phionyx_run where run_id = %s)",
            *(state, run),
        )
    unended = rig.run(rig.agent(), fact(2), age=31 * 86400)
    mine.sweep()
    assert {run for (run,) in rig.sql("select run_id from phionyx_run")} == {runs["parked"], runs["waiting"], unended}
    [(parked,)] = rig.sql("select session_id from phionyx_session where state = 'parked'")
    assert try_again(ledger, parked)
    ledger.close()
    rig.start()
    rig.wait(lambda: rig.sql("select patches from phionyx_session where session_id = %s and state = 'done'", parked))
    assert rig.sql("select patches from phionyx_session where session_id = %s", parked) == [(1,)]


def test_noting_an_end_waits_for_nobody_who_notes_it_too_and_leaves_the_transaction_as_it_was(rig: QueueRig) -> None:
    with psycopg.connect(rig.url) as sweep, psycopg.connect(rig.url) as letta:
        sweep.execute("insert into phionyx_run(run_id) values ('run-1')")
        letta.execute("set lock_timeout = '7s'")
        began = time.monotonic()
        with pytest.raises(psycopg.errors.LockNotAvailable):
            letta.execute(";".join(_note_sql(["run-1"])))
        assert time.monotonic() - began < 2
        letta.execute("rollback to savepoint phionyx_run")
        letta.execute(";".join(_note_sql(["run-2"])))
        assert letta.execute("show lock_timeout").fetchall() == [("7s",)]
        letta.commit()
    assert rig.sql("select run_id from phionyx_run order by 1") == [("run-1",), ("run-2",)]


@pytest.mark.parametrize(
    "most",
    [
        {"PHIONYX_LETTA_SESSION_TOKENS": "1"},
        {"PHIONYX_LETTA_SESSION_PRICE": "1000000", "PHIONYX_LETTA_SESSION_COST": "1"},
    ],
)
def test_budget_and_cooldown_postpone_and_cost_no_attempt(rig: QueueRig, most: dict[str, str]) -> None:
    agent = rig.agent()
    for number in (1, 2):
        rig.run(agent, fact(number))
    process = rig.start(**most, PHIONYX_LETTA_SESSION_CONCURRENCY="1")
    rig.wait(lambda: rig.sql("select 1 from phionyx_session where state = 'waiting' and detail like '%used up%'"))
    rig.kill(process)
    [(due, attempts)] = rig.sql("select due_at > now(), attempts from phionyx_session where state = 'waiting'")
    assert (due, attempts) == (True, 0)
    assert rig.states() == {"done": 1, "waiting": 1}

    rig.sql("update phionyx_session set due_at = now() where state = 'waiting'")
    rig.start(PHIONYX_LETTA_SESSION_COOLDOWN="3600")
    rig.wait(lambda: rig.sql("select 1 from phionyx_session where detail like '%cooldown%' and due_at > now()"))


def test_how_long_a_session_waits_goes_by_the_databases_clock(rig: QueueRig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ahead(datetime):
        """The clock of a host three days ahead."""

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Ahead:  # type: ignore[override]
            return cls.fromtimestamp(time.time() + 3 * 86400, tz)

    monkeypatch.setattr(session_queue, "datetime", Ahead)
    monkeypatch.setattr(sessions, "datetime", Ahead, raising=False)
    agent, ledger = rig.agent(), SqlLedger(rig.url)
    rig.run(agent, fact(1))
    mine = SessionQueue(ledger, settings(session_end="run", session_tokens=10, session_cooldown=60), "mine")
    assert mine.close() == 1
    assert mine.not_yet(agent) is None
    rig.sql("update phionyx_session set state = 'done', finished_at = now() - interval '30 seconds', tokens = 9")
    cooling = mine.not_yet(agent)
    assert cooling is not None
    assert "cooldown" in cooling[1]
    assert rig.sql("select %s between now() and now() + interval '31 seconds'", cooling[0]) == [(True,)]
    rig.sql("update phionyx_session set tokens = 10")
    spent = mine.not_yet(agent)
    assert spent is not None
    assert "used up" in spent[1]
    assert rig.sql("select %s = date_trunc('day', now(), 'UTC') + interval '1 day'", spent[0]) == [(True,)]
    ledger.close()


def test_a_dry_run_says_what_it_would_propose_and_stores_nothing_else(rig: QueueRig) -> None:
    agent = rig.agent()
    rig.run(agent, fact(1))
    rig.start(PHIONYX_LETTA_SESSIONS="dry-run")
    rig.wait(lambda: rig.states() == {"done": 1})
    [(detail, tokens)] = rig.sql("select detail, tokens from phionyx_session")
    assert "dry run: 1 facts" in detail
    assert tokens > 0
    assert rig.patches() == []
    assert rig.sql("select count(*) from phionyx_occurrence") == [(0,)]


def test_a_fact_is_proposed_when_it_recurred_in_three_sessions_of_one_agent(rig: QueueRig) -> None:
    agent, other = rig.agent(), rig.agent()
    for who in (agent, agent, other):
        rig.run(who, fact(1))
    rig.start(PHIONYX_LETTA_SESSION_THRESHOLD="3")
    rig.wait(lambda: rig.states() == {"done": 3})
    assert rig.patches() == [], "two agents' sessions are not added up"
    rig.run(agent, fact(1))
    rig.wait(lambda: rig.states() == {"done": 4})
    [patch] = rig.patches()
    assert patch["file_path"].startswith(f"letta:{agent}/")


#: So many sessions wait; benchmarks/run.py session-memory takes the thousand of the issue.
QUEUED = 200


def test_a_long_queue_drains_in_bounded_memory(rig: QueueRig) -> None:
    agent = rig.agent()
    drained = drain(rig, agent, fact(0), QUEUED)
    assert drained.peak_kb < drained.early_kb + 20_000, drained
    assert len(rig.patches(agent)) == 1, "a fact that waits for review is not proposed again"


def test_the_proposers_prompt_is_recognised_by_the_scripted_model() -> None:
    from phionyx_letta.memory.prompting import Part, build_prompt

    assert build_prompt(Part(1, 1, ()), []).startswith(PROPOSER)
