"""Watching: what changes is recorded, what ended is proposed from, and no fault ends it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from code_rig import AGENT, KEY, SIGNER, Memory
from test_target import HUMAN, Proposer, a_patch

from phionyx_letta.ledger.log.git import GitRepository
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.letta_code import sessions as sessions_module
from phionyx_letta.letta_code import watching
from phionyx_letta.letta_code.committing import MemoryCommit
from phionyx_letta.letta_code.errors import MemoryUnreadable
from phionyx_letta.letta_code.hooks import Hooks
from phionyx_letta.letta_code.objects import Objects
from phionyx_letta.letta_code.places import AgentMemory, Home
from phionyx_letta.letta_code.proposals import Proposals
from phionyx_letta.letta_code.sessions import Sessions
from phionyx_letta.letta_code.watching import Watch
from phionyx_letta.settings import Settings


@pytest.fixture
def home(memory: Memory, tmp_path: Path) -> Home:
    memory.commit({"human.md": HUMAN, "MEMORY.md": "index\n"})
    return Home.find(tmp_path / "letta")


@pytest.fixture
def watch(home: Home, tmp_path: Path) -> Watch:
    settings = Settings(home=str(tmp_path / "own"))
    url = f"sqlite:///{tmp_path / 'own' / 'ledger.db'}"
    return Watch(url, KEY, settings, home, proposer=Proposer(), idle=100)


def transcript(home: Home, *messages: dict[str, Any], version: int = 3, name: str = "Y29udg") -> Path:
    """As Letta Code 0.34.12 writes it."""
    path = home.backend / "conversations" / name / "messages.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"type": "session", "version": version, "id": "local-conv-1"}]
    lines += [{"type": "message", "id": f"m{number}", "message": one} for number, one in enumerate(messages)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def said(role: str, *texts: str) -> dict[str, Any]:
    return {
        "role": role,
        "content": [{"type": "text", "text": text} for text in texts],
        "metadata": {"agent_id": AGENT},
    }


def test_a_change_is_recorded_once(watch: Watch, memory: Memory) -> None:
    first = watch.look()
    assert first.ingested is not None
    assert (first.ingested.envelopes, first.errors) == (2, [])
    assert watch.look().ingested is None
    memory.commit({"human.md": HUMAN + "tea\n"})
    again = watch.look()
    assert again.ingested is not None
    assert again.ingested.envelopes == 1


def test_a_conversation_that_is_idle_is_proposed_from_once(watch: Watch, home: Home) -> None:
    path = transcript(home, said("user", "<system-reminder>x</system-reminder>", "I like tea"), said("assistant", "ok"))
    assert watch.look().patches == [], "it goes on"
    os.utime(path, (1, 1))
    sessions = list(Sessions(home.backend, home.letta).finished(100, {}))
    assert [one["role"] for one in sessions[0].records] == ["system", "user", "assistant"]
    assert watch.look().patches == [], "a fact has to come up in three conversations"
    for number in range(2):
        os.utime(transcript(home, said("user", "I like tea"), name=f"c{number}"), (1, 1))
        text = path.parent.with_name(f"c{number}") / "messages.jsonl"
        text.write_text(text.read_text().replace("local-conv-1", f"local-conv-{number + 2}"))
        os.utime(text, (1, 1))
    assert len(watch.look().patches) == 1
    assert watch.look().patches == []


def test_a_transcript_is_not_read_again_before_it_changes(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions, read = Sessions(home.backend, tmp_path / "own"), list[str]()
    for name in ("a", "b", "c"):
        transcript(home, name=name)
    inner = Sessions._read
    monkeypatch.setattr(
        Sessions, "_read", lambda self, path, start: (read.append(path.parent.name), inner(self, path, start))[1]
    )
    size = (home.backend / "conversations" / "a" / "messages.jsonl").stat().st_size
    monkeypatch.setattr(sessions_module, "_MOST_AT_ONCE", 2 * size)
    for expected in (["a", "b"], ["a", "b", "c"], ["a", "b", "c"]):
        list(sessions.finished(0, {}))
        assert read == expected
    ended = {(AGENT, "ended"): time.time()}
    list(sessions.finished(1e9, ended))
    list(sessions.finished(1e9, ended))
    list(sessions.finished(1e9, ended))
    assert read == ["a", "b", "c"] * 2


def test_folders_that_cannot_be_listed_hold_up_no_other(watch: Watch, home: Home, memory: Memory) -> None:
    other = Memory(home.backend / "memfs" / "agent-2" / "memory")
    other.commit({"a.md": "1"})
    watch.look()
    heads = memory.path / ".git" / "logs" / "refs" / "heads"
    heads.rename(heads.with_name("moved"))
    heads.symlink_to("a" * 300)
    other.commit({"a.md": "2"})
    found = watch.look()
    assert found.ingested is not None
    recorded = {one["agent_id"]: one["envelopes"] for one in found.ingested.agents}
    assert recorded["agent-2"] == 1
    assert recorded[memory.path.parent.name] == 1, "that its log cannot be read is told"


def test_a_transcript_of_another_version_is_told_not_guessed(watch: Watch, home: Home) -> None:
    os.utime(transcript(home, said("user", "I like tea"), version=4), (1, 1))
    assert any("version 4" in error for error in watch.look().errors)
    os.utime(transcript(home, said("user", "x"), name="other"), (1, 1))
    (home.backend / "conversations" / "other" / "messages.jsonl").write_text("no json\n")
    os.utime(home.backend / "conversations" / "other" / "messages.jsonl", (1, 1))
    assert any("unknown form" in error for error in watch.look().errors)


def test_a_memory_that_cannot_be_read_holds_up_no_other(watch: Watch, home: Home, memory: Memory) -> None:
    (home.backend / "memfs" / "agent-broken" / "memory").mkdir(parents=True)
    found = watch.look()
    assert found.ingested is not None
    assert found.ingested.envelopes == 2
    assert ["no git repository" in error for error in found.errors] == [True]


def test_a_memory_that_cannot_be_read_is_tried_again(
    watch: Watch, home: Home, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing changes that would show in the files it looks at."""
    monkeypatch.setattr(watching, "_AGAIN_EVERY", 2)
    (memory.path / ".git" / "objects").rename(memory.path / ".git" / "away")
    assert watch.look().errors != []
    (memory.path / ".git" / "away").rename(memory.path / ".git" / "objects")
    again = watch.look()
    assert again.ingested is not None
    assert (again.ingested.envelopes, again.errors) == (2, [])


def test_a_checkpoint_that_a_sink_did_not_take_is_told_and_offered_again(
    home: Home, memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_FIRST_PAUSE", 0)
    sink = tmp_path / "sink"
    settings = Settings(home=str(tmp_path / "own"), sinks=f"folder:{sink}")
    sink.write_text("a file in its place")
    watch = Watch(f"sqlite:///{tmp_path / 'own' / 'ledger.db'}", KEY, settings, home)
    for _ in range(2):
        assert ["not every sink took the newest checkpoint" in one for one in watch.look().errors] == [True]
    sink.unlink()
    sink.mkdir()
    found = watch.look()
    assert (found.errors, found.ingested) == ([], None)
    delivered = sorted(path.name for path in sink.iterdir())
    assert delivered != []
    shutil.rmtree(sink)
    sink.mkdir()
    Watch(f"sqlite:///{tmp_path / 'own' / 'ledger.db'}", KEY, settings, home).look()
    assert sorted(path.name for path in sink.iterdir()) == delivered, "after a start it is not known what a sink holds"


def test_what_the_system_refuses_is_told_and_tried_again(
    watch: Watch, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Home) -> list[AgentMemory]:
        raise PermissionError(13, "Permission denied", "/home/other")

    monkeypatch.setattr(Home, "memories", refused)
    assert ["Permission denied" in one for one in watch.look().errors] == [True]
    monkeypatch.undo()
    assert watch.look().errors == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a repository away")
def test_a_repository_of_another_user(
    watch: Watch, memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (memory.path, *memory.path.rglob("*")):
        os.chown(path, 12345, 12345)
    with (
        pytest.raises(MemoryUnreadable, match="belongs to another user") as caught,
        Objects(GitRepository(memory.path)) as objects,
    ):
        objects.head()
    assert watch.look().errors == [caught.value.message]
    words = shlex.split(caught.value.remedy.partition(": ")[2])
    subprocess.run(words, check=True)
    assert watch.look().errors == []


def test_a_broken_repository_behind_a_link_is_not_taken_for_the_one_around_it(memory: Memory, tmp_path: Path) -> None:
    memory.commit({"a.md": "1"})
    (memory.path / "inner" / ".git").mkdir(parents=True)
    (tmp_path / "link").symlink_to(memory.path / "inner")
    with pytest.raises(MemoryUnreadable), Objects(GitRepository(tmp_path / "link")) as objects:
        objects.head()


class TestLooks:
    """What a look sees without the full one."""

    def news(self, watch: Watch, memory: Memory) -> int:
        watch.look()
        assert watch.look().ingested is None, "nothing changed"
        memory.commit({"human.md": HUMAN + "tea\n"})
        found = watch.look()
        assert found.errors == []
        return found.ingested.envelopes if found.ingested else 0

    def test_a_git_directory_elsewhere(self, watch: Watch, memory: Memory, tmp_path: Path) -> None:
        memory.git("init", "-q", "--separate-git-dir", str(tmp_path / "elsewhere"))
        assert (memory.path / ".git").is_file()
        assert self.news(watch, memory) == 1

    def test_a_branch_deep_down_without_reflogs(self, watch: Watch, memory: Memory) -> None:
        memory.git("config", "core.logAllRefUpdates", "false")
        shutil.rmtree(memory.path / ".git" / "logs")
        memory.git("checkout", "-q", "-b", "a/b/c")
        watch.look()  # that the reflog is gone
        assert self.news(watch, memory) == 1

    def test_times_that_are_put_back(self, watch: Watch, memory: Memory) -> None:
        """With a file that is written in place, as large as before."""
        memory.git("config", "core.logAllRefUpdates", "false")
        shutil.rmtree(memory.path / ".git" / "logs")
        first = memory.head()
        memory.commit({"human.md": HUMAN + "tea\n"})
        watch.look()
        watch.look()
        assert watch.look().ingested is None
        branch = memory.path / ".git" / "refs" / "heads" / "main"
        before = branch.stat()
        branch.write_text(f"{first}\n")
        os.utime(branch, ns=(before.st_atime_ns, before.st_mtime_ns))
        found = watch.look()
        assert found.ingested is not None
        assert found.ingested.agents[0]["rewrites"] == 1


class TestFaults:
    """Whatever goes wrong with one agent is told, logged, and tried again."""

    @pytest.mark.parametrize("where", ["_marks", "cover", "memories", "ingest"])
    def test_of_one_agent(
        self,
        watch: Watch,
        home: Home,
        memory: Memory,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        where: str,
    ) -> None:
        other = Memory(home.backend / "memfs" / "agent-2" / "memory")
        other.commit({"a.md": "1"})
        Hooks(home, Path(watch._settings.home or "")).install(home.memories())
        monkeypatch.setattr(watching, "_AGAIN_EVERY", 2)

        def wrapped(inner: Any, of_one: Any) -> Any:
            def fails(*given: Any, **named: Any) -> Any:
                if of_one is None or of_one(given):
                    raise RuntimeError("a fault")
                return inner(*given, **named)

            return fails

        if where == "_marks":
            monkeypatch.setattr(watching, "_marks", wrapped(watching._marks, lambda given: given[0] == memory.path))
        elif where == "cover":
            one = lambda given: given[1][0].agent_id == AGENT  # noqa: E731
            monkeypatch.setattr(Hooks, "cover", wrapped(Hooks.cover, one))
        else:
            owner: Any = Home if where == "memories" else watching
            monkeypatch.setattr(owner, where, wrapped(getattr(owner, where), None))
        found = watch.look()
        assert any("RuntimeError: a fault" in error for error in found.errors)
        assert any(record.exc_info for record in caplog.records), "with its traceback"
        if where in ("_marks", "cover"):
            assert any(AGENT in error and str(memory.path) in error for error in found.errors)
            assert found.ingested is not None
            assert "agent-2" in {one["agent_id"] for one in found.ingested.agents}
        monkeypatch.undo()
        again = [watch.look() for _ in range(watching._AGAIN_EVERY + 1)]
        assert again[-1].errors == []
        with closing(SqlLedger(watch._url)) as ledger:
            assert (len(list(ledger.iter_chain(AGENT))), len(list(ledger.iter_chain("agent-2")))) == (2, 1)

    def test_of_one_conversation(
        self, watch: Watch, home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        os.utime(transcript(home, said("user", "I like tea")), (1, 1))
        asked = list[str]()

        def fails(self: Watch, session: Any, memory: AgentMemory) -> list[str]:
            asked.append(session.conversation)
            raise ZeroDivisionError("a fault")

        monkeypatch.setattr(Watch, "_proposed", fails)
        errors = watch.look().errors
        assert [AGENT in one and "local-conv-1" in one and "ZeroDivisionError" in one for one in errors] == [True]
        for _ in range(4):
            watch.look()
        assert len(asked) == 1, "not with each look"
        watch._sessions._later = {name: (0.0, pause) for name, (_, pause) in watch._sessions._later.items()}
        watch.look()
        assert len(asked) == 2

    @pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
    def test_who_ends_it_ends_it(self, watch: Watch, monkeypatch: pytest.MonkeyPatch, end: type[BaseException]) -> None:
        def ended(self: Home) -> list[AgentMemory]:
            raise end

        monkeypatch.setattr(Home, "memories", ended)
        with pytest.raises(end):
            watch.look()


def conversation(home: Home, number: int, *texts: str, agent: str = AGENT, at: float = 1) -> Path:
    path = transcript(
        home, *({**said("user", text), "metadata": {"agent_id": agent}} for text in texts), name=f"c{number}"
    )
    path.write_text(path.read_text().replace("local-conv-1", f"local-conv-{number}"))
    os.utime(path, (at, at))
    return path


class Asked(Proposer):
    """Remembers what it was asked about; what holds `poison` it cannot answer."""

    def __init__(self) -> None:
        self.about = list[str]()

    def generate(self, prompt: str) -> str:
        self.about += [word for word in ("poison", "coffee", "tea") if f"I like {word}" in prompt]
        return "no answer" if "I like poison" in prompt else super().generate(prompt)


class TestAsking:
    @pytest.fixture
    def proposer(self, watch: Watch) -> Asked:
        proposer = watch._proposer = Asked()
        return proposer

    def test_what_it_cannot_answer_is_asked_rarely_and_holds_up_no_other(
        self, watch: Watch, home: Home, proposer: Asked
    ) -> None:
        conversation(home, 1, "I like poison")
        conversation(home, 2, "I like tea")
        errors = watch.look().errors
        assert ["local-conv-1" in one for one in errors] == [True]
        first = proposer.about.count("poison")
        for _ in range(3):
            watch.look()
        assert (proposer.about.count("poison"), proposer.about.count("tea")) == (first, 0), "it may be down"
        watch._ask_at = 0.0
        watch.look()
        assert (proposer.about.count("poison"), proposer.about.count("tea")) == (first, 1)
        watch._sessions._later = {name: (0.0, pause) for name, (_, pause) in watch._sessions._later.items()}
        for _ in range(3):
            watch._ask_at = 0.0
            watch.look()
        assert proposer.about.count("poison") == 2 * first

    def test_a_session_that_is_taken_up_again_has_not_ended(self, watch: Watch, home: Home, proposer: Asked) -> None:
        """Letta Code goes on with the last conversation when it starts."""
        queue = Path(watch._settings.home or "") / "code" / "queue"
        queue.mkdir(parents=True)
        note = queue / "n.1.0"
        note.write_text("session\n" + json.dumps({"agent_id": AGENT, "conversation_id": "local-conv-1"}))
        path = conversation(home, 1, "I like tea", at=time.time() - 50)
        os.utime(note, (time.time() - 50, time.time() - 50))
        watch.look()
        assert proposer.about == ["tea"]
        with path.open("a") as file:
            file.write(json.dumps({"type": "message", "id": "m", "message": said("user", "I like coffee")}) + "\n")
        watch.look()
        assert proposer.about == ["tea"]
        os.utime(note)
        watch.look()
        assert proposer.about == ["tea", "coffee"]

    def test_the_end_of_another_agent_s_conversation(self, watch: Watch, home: Home, proposer: Asked) -> None:
        """Each agent has one that is called `default`."""
        queue = Path(watch._settings.home or "") / "code" / "queue"
        queue.mkdir(parents=True)
        said_by = {"agent_id": "agent-2", "conversation_id": "local-conv-1"}
        (queue / "n.1.0").write_text("session\n" + json.dumps(said_by))
        conversation(home, 1, "I like tea", at=time.time())
        watch.look()
        assert proposer.about == []

    def test_what_one_agent_was_told_counts_for_no_other(self, watch: Watch, home: Home) -> None:
        Memory(home.backend / "memfs" / "agent-2" / "memory").commit({"human.md": HUMAN})
        for number, agent in ((1, AGENT), (2, AGENT), (3, "agent-2")):
            conversation(home, number, "I like tea", agent=agent)
        assert watch.look().patches == []
        conversation(home, 4, "I like tea", agent=AGENT)
        assert len(watch.look().patches) == 1

    def test_two_of_one_home_count_for_themselves(self, home: Home, tmp_path: Path) -> None:
        """Conversations are numbered from 1 in each of them."""
        conversation(home, 1, "I like tea")
        own, other = tmp_path / "own", Home.find(tmp_path / "second")
        conversation(other, 1, "I like tea")
        for one in (home, other):
            (session,) = Sessions(one.backend, own).finished(100, {})
            Sessions(one.backend, own).done(session)
            assert list(Sessions(one.backend, own).finished(100, {})) == []

    def test_one_that_was_written_anew_is_read_from_its_beginning(self, home: Home, tmp_path: Path) -> None:
        sessions = Sessions(home.backend, tmp_path / "own")
        conversation(home, 1, "I like tea", "I like coffee")
        (session,) = sessions.finished(100, {})
        sessions.done(session)
        conversation(home, 1, "I like tea")
        assert [len(one.records) for one in sessions.finished(100, {})] == [1]

    def test_what_cannot_be_written_down_is_not_asked_again(self, watch: Watch, home: Home, proposer: Asked) -> None:
        own = Path(watch._settings.home or "")
        own.mkdir()
        (own / "code").write_text("a file in its place")
        conversation(home, 1, "I like tea")
        assert [AGENT in one for one in watch.look().errors] == [True]
        watch._sessions._later.clear()
        watch.look()
        assert proposer.about == ["tea"]

    def test_one_that_is_too_large_is_told(
        self, watch: Watch, home: Home, monkeypatch: pytest.MonkeyPatch, proposer: Asked
    ) -> None:
        monkeypatch.setattr(sessions_module, "_LARGEST", 100)
        conversation(home, 1, "I like tea")
        assert ["more than" in one for one in watch.look().errors] == [True]

    def test_while_it_is_asked_everything_is_recorded_and_the_service_ends(
        self, watch: Watch, home: Home, memory: Memory, proposer: Asked, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked, answer, stop, told = threading.Event(), threading.Event(), threading.Event(), list[watching.Pass]()

        def waits(self: Watch, session: Any, memory: AgentMemory) -> list[str]:
            asked.set()
            answer.wait(60)
            return ["a patch"]

        monkeypatch.setattr(Watch, "_proposed", waits)
        conversation(home, 1, "I like tea")
        conversation(home, 2, "I like tea")
        running = threading.Thread(target=watch.run, args=(stop, 0.05, told.append))
        running.start()
        try:
            assert asked.wait(30)
            memory.commit({"human.md": HUMAN + "tea\n"})
            end = time.monotonic() + 30
            while sum(one.ingested.envelopes for one in told if one.ingested) < 3:
                assert time.monotonic() < end
                time.sleep(0.01)
            answer.set()
            while not any(one.patches for one in told):
                assert time.monotonic() < end
                time.sleep(0.01)
        finally:
            answer.set()
            stop.set()
            running.join(30)
        assert not running.is_alive()

    def test_a_memory_that_went_while_nothing_could_be_recorded(
        self, watch: Watch, home: Home, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watch.look()
        shutil.rmtree(memory.path)
        with monkeypatch.context() as patched:
            patched.setattr(watching, "ingest", lambda *_, **__: 1 / 0)
            assert watch.look().errors != []
        found = watch.look()
        assert found.ingested is not None
        assert [one["agent_id"] for one in found.ingested.problems] == [AGENT] or found.ingested.envelopes == 1


@pytest.mark.slow
def test_the_service_ends_when_told(home: Home, memory: Memory, tmp_path: Path) -> None:
    environment = {**os.environ, "PHIONYX_LETTA_HOME": str(tmp_path / "own"), "PHIONYX_LETTA_SIGNING_KEY": "22" * 32}
    arguments = ["code", "watch", "--poll", "0.1", "--json", "--letta-dir", str(home.letta)]
    process = subprocess.Popen(
        [sys.executable, "-m", "phionyx_letta.cli", *arguments], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["envelopes"] == 2
    memory.commit({"human.md": HUMAN + "tea\n"})
    assert json.loads(process.stdout.readline())["envelopes"] == 1
    process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    assert process.wait(30) == 0
    assert time.monotonic() - started < 30


def test_a_look_touches_no_work_tree(
    watch: Watch, home: Home, memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed `apply` began is finished by the next one, at a person's command: a look runs nothing of the agent's."""
    proposals = Proposals(str(tmp_path / "patches.jsonl"), home.memories(), SIGNER)
    monkeypatch.setattr(MemoryCommit, "settle", lambda self: [])
    patch = a_patch(proposals).patch_id
    proposals.apply(patch)
    monkeypatch.undo()
    monkeypatch.setenv("PHIONYX_LETTA_HOME", str(tmp_path / "phionyx"))
    script = memory.path / ".git" / "hooks" / "post-index-change"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    script.chmod(0o755)
    assert watch.look().errors == []
    assert (memory.git("diff", "--cached", "--name-only"), (tmp_path / "ran").exists()) == ("human.md", False)
    assert proposals.revert(patch).status == "reverted"
    assert memory.git("status", "--porcelain") == ""
