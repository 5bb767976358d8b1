"""Watching: what changes is recorded, what ended is proposed from, and the command line's own behaviour."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from code_rig import AGENT, KEY, SIGNER, Memory
from test_target import HUMAN, Proposer, a_patch
from typer.testing import CliRunner

from phionyx_letta.cli.app import app
from phionyx_letta.errors import PatchChanged
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
from phionyx_letta.memory import LivingMemory
from phionyx_letta.memory.opening import open_store
from phionyx_letta.settings import Settings
from phionyx_letta.signing import generate_key


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


class TestKeys:
    """`code verify` needs no private key, and no command that reads makes one."""

    def run(self, home: Home, own: Path, *arguments: str, **settings: str) -> tuple[int, dict[str, Any]]:
        environment = {"PHIONYX_LETTA_HOME": str(own), **settings}
        done = CliRunner().invoke(app, [*arguments, "--letta-dir", str(home.letta), "--json"], env=environment)
        return done.exit_code, json.loads(done.stdout)

    @pytest.fixture
    def ledger(self, home: Home, tmp_path: Path) -> str:
        """A ledger that a key made which is not here."""
        file = str(tmp_path / "elsewhere" / "ledger.db")
        arguments = ("code", "ingest", "--ledger", file)
        assert self.run(home, tmp_path / "elsewhere", *arguments, PHIONYX_LETTA_SIGNING_KEY="22" * 32)[0] == 0
        return file

    @pytest.mark.parametrize("how", ["a public key", "none", "another", "the public half here"])
    def test_verify(self, home: Home, memory: Memory, ledger: str, tmp_path: Path, how: str) -> None:
        own, more = tmp_path / "own", list[str]()
        if how == "a public key":
            more = ["--key", SIGNER.public_key_hex]
        elif how == "another":
            generate_key(own / "signing.key")
        elif how == "the public half here":
            own.mkdir()
            (own / "signing.key.pub").write_text(f"{SIGNER.public_key_hex}\n")
        before = sorted(tmp_path.rglob("*"))
        code, page = self.run(home, own, "code", "verify", "--ledger", ledger, *more)
        (one,) = page["agents"]
        if how == "another":
            assert (code, one["status"], one["files"]) == (1, "other_key", [])
            assert f"made with {SIGNER.key_id}" in one["why"]
        else:
            assert (code, one["status"]) == (0, "ok")
            assert page["key_id"] == (None if how == "none" else SIGNER.key_id)
        assert sorted(tmp_path.rglob("*")) == before
        memory.commit({"human.md": HUMAN + "tea\n"})
        assert self.run(home, own, "code", "verify", "--ledger", ledger, "--key", SIGNER.public_key_hex)[0] == 2

    def test_what_was_changed_in_the_database(self, home: Home, ledger: str, tmp_path: Path) -> None:
        with closing(sqlite3.connect(ledger)) as database, database:
            database.execute("update phionyx_envelope set body = replace(body, 'human', 'humam') where seq = 1")
        for more in ([], ["--key", SIGNER.public_key_hex]):
            code, page = self.run(home, tmp_path / "own", "code", "verify", "--ledger", ledger, *more)
            assert code == 1
            assert page["agents"][0]["status"] in ("changed", "other_key")

    @pytest.mark.parametrize("settings", [{}, {"SIGNING_COMMAND": "/bin/false", "PUBLIC_KEY": SIGNER.public_key_hex}])
    @pytest.mark.parametrize(
        "arguments",
        [
            *(
                "code verify",
                "code status",
                "code review",
                "code review --patch-id x",
                "code approve x",
                "code apply x",
            ),
            *(
                "memory review --store-path sqlite:///{}/x.db",
                "memory log",
                "memory log --store-path sqlite:///{}/x.db",
            ),
            *("memory review", "verify --ledger sqlite:///{}/x.db", "explain x --ledger sqlite:///{}/x.db", "doctor"),
            "show x --ledger sqlite:///{}/x.db",
        ],
    )
    def test_who_only_reads_leaves_nothing(
        self, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, settings: dict[str, str]
    ) -> None:
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        for name, value in settings.items():
            monkeypatch.setenv(f"PHIONYX_LETTA_{name}", value)
        monkeypatch.setenv("PHIONYX_LETTA_HOME", str(tmp_path / "own"))
        before = sorted(tmp_path.rglob("*"))
        where = ["--letta-dir", str(home.letta)] if arguments.startswith("code ") else []
        done = CliRunner().invoke(app, [*arguments.format(tmp_path).split(), *where])
        assert sorted(tmp_path.rglob("*")) == before, done.output
        assert "Traceback" not in done.output
        assert "unable to open" not in done.output

    def test_review_without_a_ledger_says_so(self, home: Home, tmp_path: Path) -> None:
        for more in ([], ["--patch-id", "x"]):
            code, page = self.run(home, tmp_path / "own", "code", "review", *more)
            assert (code, f"there is no ledger at {tmp_path / 'own' / 'ledger.db'}" in page["error"]) == (2, True)
            assert "code ingest" in page["remedy"]


class TestOneLedgerForBoth:
    """Patches of a server and of Letta Code lie in one database; each command has its own."""

    @pytest.mark.parametrize("command", ["code review", "memory review"])
    def test_each_goes_through_its_own(self, home: Home, tmp_path: Path, command: str) -> None:
        url = f"sqlite:///{tmp_path / 'own' / 'ledger.db'}"
        environment = {"PHIONYX_LETTA_HOME": str(tmp_path / "own"), "PHIONYX_LETTA_SIGNING_KEY": "22" * 32}
        runner = CliRunner(env=environment)
        runner.invoke(app, ["code", "ingest", "--letta-dir", str(home.letta)])
        proposals = Proposals(url, home.memories(), SIGNER)
        code = a_patch(proposals)
        note = tmp_path / "notes" / "x.md"
        note.parent.mkdir()
        note.write_text("a\n")
        living = LivingMemory([str(note)], store=open_store(url), signer=SIGNER)
        server = living._proposing._saved(
            living._proposing._born(str(note), "a\n", "b\n", "because", ["I like tea"], "user", "s", {})
        )
        where = ["--store-path", url, "--path", str(note)]
        if command.startswith("code"):
            where = ["--letta-dir", str(home.letta)]
        own, other = (code, server) if command.startswith("code") else (server, code)
        done = runner.invoke(app, [*command.split(), "-i", *where], input="r\nno\n")
        assert (done.exit_code, "1 of 1" in done.output) == (0, True), done.output
        assert proposals.living.store.status(own.patch_id) == "rejected"
        assert proposals.living.store.status(other.patch_id) == "pending"
        listed = json.loads(runner.invoke(app, [*command.split(), *where, "--json"]).stdout)
        assert listed["patches"] == []

    def test_what_to_do_names_the_command_of_the_patch(self, home: Home, tmp_path: Path) -> None:
        proposals = Proposals(str(tmp_path / "patches.jsonl"), home.memories(), SIGNER)
        patch = a_patch(proposals)
        with pytest.raises(PatchChanged) as caught:
            proposals.living.approve(patch.patch_id, content="0" * 64)
        assert "`phionyx-letta code review --patch-id`" in caught.value.remedy
        with pytest.raises(PatchChanged) as caught:
            proposals.living.approve(patch.patch_id, content="x")
        assert "`code review" in caught.value.remedy


class TestCommands:
    def run(self, tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
        environment = {"PHIONYX_LETTA_HOME": str(tmp_path / "own"), "PHIONYX_LETTA_SIGNING_KEY": "22" * 32}
        where = ["--letta-dir", str(tmp_path / "letta"), "--json"]
        done = CliRunner().invoke(app, ["code", *arguments, *where], env=environment)
        return done.exit_code, json.loads(done.stdout)

    def test_one_after_the_other(self, home: Home, memory: Memory, tmp_path: Path) -> None:
        code, page = self.run(tmp_path, "status")
        assert (code, page["settings"], page["repositories"]) == (2, "no settings", {AGENT: "missing"})
        assert self.run(tmp_path, "install")[0] == 0
        assert self.run(tmp_path, "verify")[0] == 2
        code, page = self.run(tmp_path, "ingest")
        assert (code, page["envelopes"], page["checkpoint"]) == (0, 2, 2)
        assert page["agents"][0]["layout"] == "v2"
        assert self.run(tmp_path, "ingest")[1]["checkpoint"] is None
        code, page = self.run(tmp_path, "verify")
        assert (code, page["agents"][0]["status"]) == (0, "ok")
        memory.git("commit", "-q", "--amend", "--allow-empty", "-m", "other")
        assert self.run(tmp_path, "verify")[1]["agents"][0]["status"] == "rewritten"
        assert self.run(tmp_path, "uninstall")[0] == 0

    def test_an_applied_patch_names_the_newest_envelope(self, home: Home, memory: Memory, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 'own' / 'ledger.db'}"
        assert self.run(tmp_path, "ingest")[0] == 0
        memory.commit({"MEMORY.md": "index 2\n"})  # not recorded yet
        proposals = Proposals(url, home.memories(), SIGNER)
        patch = a_patch(proposals)
        code, page = self.run(tmp_path, "apply", patch.patch_id, "--by", "rita")
        assert (code, page["status"], page["envelopes"]) == (0, "applied", 1)
        with closing(SqlLedger(url)) as ledger:
            *_, before, last = ledger.iter_chain(AGENT)
        trailers = dict(last["subject"]["metadata"]["letta"]["claims"]["trailers"])
        assert trailers == {
            "Phionyx-Patch": patch.patch_id,
            "Phionyx-Reviewer": "rita",
            "Phionyx-Envelope": before["integrity"]["current"],
        }

    def test_reviewed_approved_and_applied(self, home: Home, memory: Memory, tmp_path: Path) -> None:
        self.run(tmp_path, "ingest")
        proposals = Proposals(f"sqlite:///{tmp_path / 'own' / 'ledger.db'}", home.memories(), SIGNER)
        patch, other = a_patch(proposals), a_patch(proposals, "---\ndescription: x\n---\n", "new.md")
        page = self.run(tmp_path, "review")[1]
        assert [(one["status"], one["signature_note"]) for one in page["patches"]] == [("pending", None)] * 2
        shown = self.run(tmp_path, "review", "--patch-id", patch.patch_id[:8])[1]
        assert (shown["signature_valid"], shown["target"], shown["untrusted"]) == (True, "unchanged", None)
        approved = self.run(tmp_path, "approve", patch.patch_id[:8], "--by", "rita", "--content", shown["content"])
        assert (approved[0], approved[1]["status"]) == (0, "approved")
        assert self.run(tmp_path, "reject", other.patch_id, "--reason", "no")[1]["status"] == "rejected"
        assert [one["status"] for one in self.run(tmp_path, "review")[1]["patches"]] == ["approved"]
        code, page = self.run(tmp_path, "apply", patch.patch_id[:8], "--content", "0" * 64)
        assert (code, "is not what was reviewed" in page["error"]) == (1, True)
        code, page = self.run(tmp_path, "apply", patch.patch_id[:8], "--by", "rita", "--content", shown["content"])
        assert (code, page["status"], page["envelopes"]) == (0, "applied", 1)
        assert self.run(tmp_path, "review")[1]["count"] == 0

    def test_a_patch_that_diverged_is_merged(self, home: Home, memory: Memory, tmp_path: Path) -> None:
        self.run(tmp_path, "ingest")
        proposals = Proposals(f"sqlite:///{tmp_path / 'own' / 'ledger.db'}", home.memories(), SIGNER)
        patch = a_patch(proposals)
        memory.commit({"human.md": HUMAN.replace("who it is", "who she is")})
        code, page = self.run(tmp_path, "apply", patch.patch_id)
        assert (code, "offers a merge" in page["remedy"]) == (1, True)
        rebased = self.run(tmp_path, "rebase", patch.patch_id)[1]
        assert self.run(tmp_path, "apply", rebased["patch_id"])[1]["status"] == "applied"
        assert (memory.path / "human.md").read_text() == HUMAN.replace("who it is", "who she is") + "Likes tea.\n"

    def test_used_wrongly(self, home: Home, tmp_path: Path) -> None:
        assert "no memory of nobody" in self.run(tmp_path, "ingest", "--agent", "nobody")[1]["error"]
        assert "--memory is of one agent" in self.run(tmp_path, "ingest", "--memory", "/x")[1]["error"]
        assert "is a folder" in self.run(tmp_path, "ingest", "--ledger", str(tmp_path))[1]["error"]
        code, page = self.run(tmp_path, "ingest", "--agent", "x", "--memory", str(tmp_path))
        assert code == 1
        assert "no git repository" in page["problems"][0]["what"]

    def test_nothing_there(self, tmp_path: Path) -> None:
        assert self.run(tmp_path, "ingest")[0] == 2


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
