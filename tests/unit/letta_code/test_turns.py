"""Turns: a repository that names much, or a git that says nothing, holds up the others by a turn; nothing is lost or twice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from code_rig import AGENT, KEY, SIGNER, Memory, Recorded, blob, letta, raw_tree, set_head
from test_processes import fast_import

from phionyx_letta.errors import SettingsError
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.letta_code import rounds, sealing
from phionyx_letta.letta_code.checking import check_memory
from phionyx_letta.letta_code.errors import MemoryUnreadable
from phionyx_letta.letta_code.ingest import Recorder
from phionyx_letta.letta_code.places import AgentMemory, Home
from phionyx_letta.letta_code.queue import queue_path
from phionyx_letta.letta_code.rounds import Slow, record_in_turn
from phionyx_letta.letta_code.sealing import Ingested, ingest
from phionyx_letta.letta_code.turns import Turn, TurnOver
from phionyx_letta.letta_code.watching import Watch
from phionyx_letta.settings import Settings

LATER = "agent-zz"


def run(recorded: Recorded, tmp_path: Path, slow: Slow | None = None) -> Ingested:
    memories = Home.find(tmp_path / "letta").memories()
    return ingest(recorded.ledger, KEY, Settings(home=str(tmp_path / "own")), memories, slow=slow)


@pytest.fixture
def other(memory: Memory) -> Memory:
    found = Memory(memory.path.parent.parent / LATER / "memory")
    found.commit({"a.md": "1"})
    return found


def rewritten(memory: Memory) -> None:
    for number in range(4):
        memory.commit({"a.md": str(number), f"{number}.md": "x"})
    memory.git("reset", "-q", "--hard", "HEAD~2")
    memory.commit({"a.md": "other"}, "m", "--amend")
    memory.commit({"b.md": "1"})


def wandering(memory: Memory) -> None:
    rewritten(memory)
    memory.git("checkout", "-q", "-b", "side", "HEAD~1")
    memory.commit({"c.md": "1"})
    memory.git("checkout", "-q", "main")
    memory.git("merge", "-q", "--no-edit", "side")
    memory.git("checkout", "-q", "side")
    memory.commit({"c.md": "12"})


def lying(memory: Memory) -> None:
    rewritten(memory)
    log = memory.path / ".git" / "logs" / "refs" / "heads" / "main"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:2], "no line\n", *lines[2:], "no line\n"]))


def lying_twice(memory: Memory) -> None:
    for number in range(5):
        memory.commit({"a.md": str(number)})
    lying(memory)
    log = memory.path / ".git" / "logs" / "HEAD"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for one in lines for line in ("no line\n", one)))


def gaps(recorded: Recorded) -> list[tuple[object, ...]]:
    found = (one["history"] for one in recorded.history() if one["event"] == "gap")
    return [(gap["reason"], gap.get("log"), gap.get("lines"), gap.get("bytes")) for gap in found]


@pytest.mark.parametrize("make", [rewritten, wandering, lying, lying_twice])
@pytest.mark.parametrize("before", [False, True])
def test_many_turns_record_what_one_does(
    memory: Memory, recorded: Recorded, tmp_path: Path, make: Callable[[Memory], None], before: bool
) -> None:
    """Each turn is a run of its own: killed after any of them, the next goes on there."""
    with closing(SqlLedger(f"sqlite:///{tmp_path / 'whole.db'}")) as ledger:
        whole = Recorded(ledger)
        if before:
            memory.commit({"z.md": "1"})
            for one in (recorded, whole):
                one.ingest(memory)
        make(memory)
        whole.ingest(memory)
        turns, unfinished = 0, "yes"
        while unfinished:
            unfinished = Recorder(recorded.ledger, KEY).record(AGENT, memory.path, Turn(envelopes=1)).unfinished
            turns += 1
        assert turns > 4
        assert recorded.told() == whole.told()
        assert gaps(recorded) == gaps(whole)
        assert recorded.commits() == whole.commits()
    recorded.agrees_with(memory)
    assert recorded.ingest(memory).envelopes == 0


@pytest.mark.parametrize("onward", ["nowhere", "a commit", "back and forth"])
def test_a_move_whose_end_vanished_on_the_way_is_told_from_where_the_ledger_stands(
    memory: Memory, recorded: Recorded, onward: str
) -> None:
    old = memory.commit({"a.md": "0"})
    recorded.ingest(memory)
    memory.git("checkout", "-q", "-b", "side")
    for number in range(5):
        memory.commit({f"{number}.md": "x"})
    memory.git("checkout", "-q", "main")
    memory.git("merge", "-q", "--ff-only", "side")
    gone = memory.head()
    (memory.path / ".git" / "logs" / "HEAD").unlink()  # so that it is one move
    report = Recorder(recorded.ledger, KEY).record(AGENT, memory.path, Turn(envelopes=3))
    assert report.unfinished
    memory.git("reset", "-q", "--hard", old)
    memory.git("branch", "-q", "-D", "side")
    (memory.path / ".git" / "objects" / gone[:2] / gone[2:]).unlink()
    if onward != "nowhere":
        memory.commit({"b.md": "new"})
    if onward == "back and forth":
        memory.git("reset", "-q", "--hard", old)
    assert recorded.ingest(memory).rewrites >= 1
    recorded.agrees_with(memory)
    assert check_memory(recorded.ledger, SIGNER.verifier(), AgentMemory(AGENT, memory.path)).status == "ok"
    assert recorded.ingest(memory).envelopes == 0


def test_the_others_wait_for_one_turn(
    memory: Memory, other: Memory, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "ENVELOPES", 100)
    fast_import(memory, 450)
    slow = Slow()
    found = run(recorded, tmp_path, slow)
    assert {one["agent_id"]: one["envelopes"] for one in found.agents} == {AGENT: 100, LATER: 1}
    assert (found.unfinished, found.checkpoint) == ([AGENT], 101)
    other.commit({"a.md": "2"})
    found = run(recorded, tmp_path)  # in no hurry: until all is recorded
    assert {one["agent_id"]: one["envelopes"] for one in found.agents} == {AGENT: 350, LATER: 1}
    assert (found.unfinished, found.checkpoint) == ([], 452)
    recorded.agrees_with(memory)
    assert recorded.commits() == memory.git("rev-list", "--reverse", "HEAD").split()


def test_a_look_of_watch_is_one_turn_and_the_next_goes_on(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "ENVELOPES", 100)
    fast_import(memory, 250)
    watch = Watch(
        f"sqlite:///{tmp_path / 'w.db'}", KEY, Settings(home=str(tmp_path / "own")), Home.find(tmp_path / "letta")
    )
    looks = [watch.look().ingested for _ in range(4)]
    assert [one.envelopes for one in looks if one is not None] == [100, 100, 50]


def test_a_turn_that_is_too_short_for_anything_grows(
    memory: Memory, other: Memory, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "SECONDS", 1e-6)
    memory.commit({"a.md": "1"})
    slow, settings = Slow(), Settings(home=str(tmp_path / "own"))
    waiting = Home.find(tmp_path / "letta").memories()
    for _ in range(40):  # as watch does: who came to an end is not read again
        unfinished = ingest(recorded.ledger, KEY, settings, waiting, slow=slow).unfinished
        waiting = [one for one in waiting if one.agent_id in unfinished]
    assert waiting == []
    recorded.agrees_with(memory)
    assert recorded.commits(LATER) == [other.head()]
    assert slow.long == {}


def test_empty_commits_are_progress(memory: Memory, recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.commit({"a.md": "1"})
    for _ in range(30):
        memory.commit({})
    monkeypatch.setattr(rounds, "SECONDS", 1e6)
    checks, real = 0, Turn.check

    def check(turn: Turn, envelopes: int) -> None:
        nonlocal checks
        checks += 1
        if checks % 8 == 0:
            raise TurnOver("over")
        real(turn, envelopes)

    monkeypatch.setattr(Turn, "check", check)
    slow, turns, unfinished = Slow(), 0, "yes"
    while unfinished:
        unfinished = record_in_turn(Recorder(recorded.ledger, KEY), AGENT, memory.path, slow, alone=False).unfinished
        turns += 1
        assert slow.long == {}
    assert turns > 3
    recorded.agrees_with(memory)


def test_a_memory_that_never_gets_on_has_no_endless_turns_and_is_told(
    memory: Memory, other: Memory, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.commit({"a.md": "1"})
    monkeypatch.setattr(rounds, "SECONDS", 1e-9)
    slow = Slow(longest=4e-9)
    told = [[one["agent_id"] for one in run(recorded, tmp_path, slow).problems] for _ in range(8)]
    assert slow.long == {AGENT: 2, LATER: 2}
    assert told == [[], []] + [[AGENT, LATER]] * 6
    assert run(recorded, tmp_path).problems == [], "who is in no hurry has no limit"
    recorded.agrees_with(memory)


@pytest.mark.parametrize("hurry", [True, False])
def test_a_backlog_keeps_the_notes_of_who_made_it(
    memory: Memory, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hurry: bool
) -> None:
    monkeypatch.setattr(rounds, "ENVELOPES", 3)
    queue = queue_path(tmp_path / "own")
    queue.mkdir(parents=True)
    for number in range(8):
        commit, note = memory.commit({"a.md": str(number)}), queue / f"n.1.{number}"
        note.write_text(f"ref\n{AGENT}\nconv-{number}\n{memory.path}\n{'0' * 40} {commit} refs/heads/main\n")
        os.utime(note, (time.time() - 700,) * 2)
    slow = Slow() if hurry else None
    while run(recorded, tmp_path, slow).unfinished:
        assert len(list(queue.iterdir())) == 8
    assert [letta(one)["conversation_id"] for one in recorded.envelopes()] == [f"conv-{number}" for number in range(8)]
    assert list(queue.iterdir()) == []


def test_what_is_noted_during_a_run_is_known_to_its_next_rounds(
    memory: Memory, other: Memory, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "ENVELOPES", 3)
    commits = [memory.commit({"a.md": str(number)}) for number in range(8)]
    queue = queue_path(tmp_path / "own")
    real = Recorder.record

    def record(recorder: Recorder, agent: str, *arguments: object) -> object:
        report = real(recorder, agent, *arguments)  # type: ignore[arg-type]
        queue.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"{'0' * 40} {commit} refs/heads/main\n" for commit in commits)
        (queue / "n.1.1").write_text(f"ref\n{AGENT}\nconv\n{memory.path}\n{lines}")
        return report

    monkeypatch.setattr(Recorder, "record", record)
    run(recorded, tmp_path)
    said = [letta(one).get("conversation_id") for one in recorded.envelopes()]
    assert said == [None] * 3 + ["conv"] * 5


def test_a_sink_that_is_none_is_told_before_anything_is_recorded(
    memory: Memory, recorded: Recorded, tmp_path: Path
) -> None:
    memory.commit({"a.md": "1"})
    settings, home = Settings(home=str(tmp_path / "own"), sinks="nonsense:/x"), Home.find(tmp_path / "letta")
    with pytest.raises(SettingsError, match="nonsense"):
        ingest(recorded.ledger, KEY, settings, home.memories())
    with pytest.raises(SettingsError, match="nonsense"):
        Watch(f"sqlite:///{tmp_path / 'w.db'}", KEY, settings, home)
    assert recorded.envelopes() == []


def test_a_sink_that_takes_nothing_is_tried_once_in_a_run(
    memory: Memory, other: Memory, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "ENVELOPES", 1)
    for number in range(6):
        memory.commit({"a.md": str(number)})
    offered = []

    def deliver(ledger: SqlLedger, policy: object, settings: Settings, signed: object) -> bool:
        offered.append(signed)
        return False

    monkeypatch.setattr(sealing, "deliver", deliver)
    found = run(recorded, tmp_path)
    assert (len(offered), found.delivered, found.checkpoint) == (1, False, 7)


def test_one_commit_is_never_divided(memory: Memory, recorded: Recorded) -> None:
    memory.commit({f"{number}.md": "1" for number in range(20)})
    memory.commit({f"{number}.md": "2" for number in range(20)})
    recorder = Recorder(recorded.ledger, KEY, batch=5)
    assert recorder.record(AGENT, memory.path, Turn(envelopes=1)).envelopes == 20
    assert recorder.record(AGENT, memory.path, Turn(envelopes=1)).envelopes == 20
    assert recorder.record(AGENT, memory.path, Turn(envelopes=1)).unfinished == ""


def test_a_turn_that_ends_within_a_commit_leaves_no_part_of_it(
    memory: Memory, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.commit({"a.md": "1"})
    memory.commit({f"{number}.md": "x" * 1_100_000 + str(number) for number in range(3)})
    reads, limit, real = 0, 0, Turn.left

    def left(turn: Turn) -> float:
        nonlocal reads
        reads += 1
        if reads == limit:
            raise TurnOver("over")
        return real(turn)

    monkeypatch.setattr(Turn, "left", left)
    for number in range(1, 400, 7):
        reads, limit = 0, number
        report = recorded.ingest(memory)
        assert len(recorded.envelopes()) in (0, 1, 4)
        if not report.unfinished:
            break
    recorded.agrees_with(memory)
    assert len(recorded.envelopes()) == 4


def hang(memory: Memory) -> None:
    pipe = memory.path / ".git" / "pipe"
    os.mkfifo(pipe)
    with (memory.path / ".git" / "config").open("a") as config:
        config.write(f"[include]\n path = {pipe}\n")


@pytest.mark.slow
def test_gits_that_hang_share_their_patience(
    memory: Memory, other: Memory, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "_FIRST", 1.0)
    monkeypatch.setattr(rounds, "_ALL_FIRST", 3.0)
    monkeypatch.setattr(rounds, "_SHARED", 6.0)
    hanging = [Memory(memory.path.parent.parent / f"agent-{number:02}" / "memory") for number in range(12)]
    for one in (memory, *hanging):
        one.commit({"a.md": "1"})
    for one in hanging:
        hang(one)
    began = time.monotonic()
    found = run(recorded, tmp_path)
    assert time.monotonic() - began < 30, "not a minute for each"
    assert {one["agent_id"] for one in found.agents} == {AGENT, LATER}
    assert [one["agent_id"] for one in found.problems] == [f"agent-{number:02}" for number in range(12)]
    assert all(one["path"] in one["what"] for one in found.problems)
    (hanging[0].path / ".git" / "config").write_text("[core]\nrepositoryformatversion = 0\n")
    assert "agent-00" in {one["agent_id"] for one in run(recorded, tmp_path).agents}, "it is tried again"


def pipe_in_refs(memory: Memory) -> Path:
    """Reading objects does not notice; `for-each-ref` never ends."""
    pipe = memory.path / ".git" / "refs" / "replace" / ("a" * 40)
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    return pipe


def test_a_helper_git_that_hangs_is_a_silent_git(
    memory: Memory, other: Memory, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "_FIRST", 0.5)
    monkeypatch.setattr(rounds, "_VERDICT", 1.0)
    memory.commit({"a.md": "1"})
    pipe = pipe_in_refs(memory)
    slow = Slow()
    began = time.monotonic()
    found = run(recorded, tmp_path, slow)
    assert [one["agent_id"] for one in found.agents] == [LATER]
    assert (slow.silent, slow.long) == ({AGENT: None}, {})
    assert [one["agent_id"] for one in found.problems] == [AGENT]
    found = run(recorded, tmp_path, slow)  # the verdict
    assert time.monotonic() - began < 8, "and not a minute"
    (problem,) = found.problems
    assert problem["agent_id"] == AGENT
    assert str(memory.path) in problem["what"]
    assert "for-each-ref" in problem["what"]
    with pytest.raises(MemoryUnreadable, match="for-each-ref"):
        Recorder(recorded.ledger, KEY).record(AGENT, memory.path, Turn(silence=0.5))
    pipe.unlink()
    run(recorded, tmp_path)
    recorded.agrees_with(memory)


def test_each_of_many_silent_ones_comes_to_its_verdict(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_FIRST": 0.2, "_LEAST": 0.1, "_SHARED": 1.2, "_VERDICT": 0.6}.items():
        monkeypatch.setattr(rounds, name, value)
    agents = [f"agent-{number}" for number in range(3)]
    for agent in agents:
        silent = Memory(Home.find(tmp_path / "letta").backend / "memfs" / agent / "memory")
        silent.commit({"a.md": "1"})
        pipe_in_refs(silent)
    slow, verdicts = Slow(), []
    for _ in range(4):
        began = time.monotonic()
        found = run(recorded, tmp_path, slow)
        assert time.monotonic() - began < 10
        verdicts.append([one["agent_id"] for one in found.problems if "said nothing" not in one["what"]])
        assert len(found.problems) == 3
    assert verdicts == [[], *([agent] for agent in agents)]


def test_one_memory_whose_git_fails_is_no_fault_of_the_ledger(
    memory: Memory, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.commit({"a.md": "1"})
    monkeypatch.setattr(rounds, "_FIRST", 0.5)
    monkeypatch.setattr(rounds, "_VERDICT", 0.5)
    pipe_in_refs(memory)
    (problem,) = run(recorded, tmp_path).problems
    assert problem["agent_id"] == AGENT


@pytest.mark.slow
def test_killed_between_turns(
    memory: Memory, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "ENVELOPES", 60)
    other = Memory(memory.path.parent.parent / LATER / "memory")
    fast_import(memory, 600)
    fast_import(other, 600)
    url = str(recorded.ledger.engine.url)
    for _ in range(6):
        child = os.fork()
        if child == 0:
            try:
                with closing(SqlLedger(url)) as ledger:
                    run(Recorded(ledger), tmp_path)
            finally:
                os._exit(0)
        size, began = len(recorded.envelopes()), time.monotonic()
        while len(recorded.envelopes()) == size and time.monotonic() - began < 20:
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    run(recorded, tmp_path)
    for one, agent in ((memory, AGENT), (other, LATER)):
        recorded.agrees_with(one, agent)
        assert recorded.commits(agent) == one.git("rev-list", "--reverse", "main").split()
        assert len(recorded.envelopes(agent)) == len(recorded.commits(agent))


def test_memories_named_one_by_one_come_to_their_end(memory: Memory, recorded: Recorded, tmp_path: Path) -> None:
    fast_import(memory, 30)
    settings = Settings(home=str(tmp_path / "own"))
    assert ingest(recorded.ledger, KEY, settings, [AgentMemory(AGENT, memory.path)]).envelopes == 30


def test_one_commit_whose_files_take_long_to_compare_ends_with_the_turn(memory: Memory, recorded: Recorded) -> None:
    """Twenty thousand names of two texts: all of it is read at once, and compared for half an hour."""
    chance = random.Random(1)
    for _ in range(2):
        text = blob(memory, bytes(chance.choices(b"abcd", k=20_000)))
        folder = raw_tree(memory, [("100644", b"%03d.md" % number, text) for number in range(100)])
        set_head(memory, raw_tree(memory, [("40000", b"%03d" % number, folder) for number in range(20)]))
    assert Recorder(recorded.ledger, KEY).record(AGENT, memory.path, Turn(envelopes=1)).envelopes == 2000
    began = time.monotonic()
    report = Recorder(recorded.ledger, KEY).record(AGENT, memory.path, Turn(seconds=1.5))
    assert time.monotonic() - began < 10
    assert report.unfinished
    assert report.envelopes == 0
