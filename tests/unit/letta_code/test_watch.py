"""Watching: what changes is recorded, what ended is proposed from, and no fault ends it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
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
    sessions = list(Sessions(home.backend, home.letta).finished(100, set()))
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
        list(sessions.finished(0, set()))
        assert read == expected
    list(sessions.finished(1e9, {"ended"}))
    list(sessions.finished(1e9, {"ended"}))
    list(sessions.finished(1e9, {"ended"}))
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
        monkeypatch.setattr(watching, "_AGAIN_EVERY", 2)
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
        assert len(asked) == 3, "not with each look"

    @pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
    def test_who_ends_it_ends_it(self, watch: Watch, monkeypatch: pytest.MonkeyPatch, end: type[BaseException]) -> None:
        def ended(self: Home) -> list[AgentMemory]:
            raise end

        monkeypatch.setattr(Home, "memories", ended)
        with pytest.raises(end):
            watch.look()


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
