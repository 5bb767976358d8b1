"""Which memories there are: one that was deleted, one beside another, no ledger yet, an unknown layout, paths of any length."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from code_rig import AGENT, KEY, SIGNER, Memory, Recorded, letta
from test_target import HUMAN, a_patch
from typer.testing import CliRunner

from phionyx_letta.cli.app import app
from phionyx_letta.errors import LedgerUnavailable
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.letta_code import ingest as ingest_module
from phionyx_letta.letta_code.changes import block_id, claims, label_of
from phionyx_letta.letta_code.objects import Commit
from phionyx_letta.letta_code.places import AgentMemory, Home
from phionyx_letta.letta_code.proposals import Proposals
from phionyx_letta.letta_code.queue import read_notes
from phionyx_letta.letta_code.turns import Turn
from phionyx_letta.letta_code.watching import Watch
from phionyx_letta.plugin.runtime import load_key
from phionyx_letta.settings import Settings, load_settings

OTHER = "agent-0c0de000-0000-4000-8000-000000000002"


class Cli:
    """`code …` over a Letta Code's folder, with a home of its own."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PHIONYX_LETTA_HOME", str(tmp_path / "own"))
        for name in ("LETTA_LOCAL_BACKEND_DIR", "PHIONYX_LETTA_LEDGER"):
            monkeypatch.delenv(name, raising=False)
        self.letta, self.database = tmp_path / "letta", tmp_path / "own" / "ledger.db"
        self.memories = {agent: Memory(self.letta / "agents" / agent / "memory") for agent in (AGENT, OTHER)}
        for memory in self.memories.values():
            memory.commit({"MEMORY.md": "index\n", "a.md": "1"})

    def plain(self, *arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["code", *arguments, "--letta-dir", str(self.letta)])
        return done.exit_code, done.output

    def __call__(self, *arguments: str) -> tuple[int, Any]:
        code, output = self.plain(*arguments, "--json")
        return code, json.loads(output)

    def events(self) -> list[str]:
        ledger = SqlLedger(f"sqlite:///{self.database}")
        found = [letta(one)["history"]["reason"] for one in ledger.iter_chain(OTHER) if "path" not in letta(one)]
        ledger.close()
        return found


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    return Cli(tmp_path, monkeypatch)


@pytest.mark.parametrize("what", ["memory", "agent", "all"])
def test_a_memory_that_was_deleted_is_told_and_recorded_once(cli: Cli, what: str) -> None:
    assert cli("ingest")[0] == 0
    assert cli("verify")[0] == 0
    folder = cli.memories[OTHER].path
    shutil.rmtree({"memory": folder, "agent": folder.parent, "all": cli.letta}[what])
    code, page = cli("verify")
    assert code == 1
    assert "unreadable" in [one["status"] for one in page["agents"] if one["agent_id"] == OTHER]
    code, page = cli("ingest")
    assert code == 1
    assert OTHER in [one["agent_id"] for one in page["problems"]]
    assert cli.events() == ["repository_gone"]
    code, page = cli("ingest")
    assert page["problems"] == []
    assert code == (2 if what == "all" else 0)
    assert cli.events() == ["repository_gone"]


def test_a_memory_that_comes_back_is_recorded_on(cli: Cli, tmp_path: Path) -> None:
    cli("ingest")
    aside = shutil.move(cli.memories[OTHER].path, tmp_path / "aside")
    cli("ingest")
    shutil.move(aside, cli.memories[OTHER].path)
    cli.memories[OTHER].commit({"a.md": "2"})
    code, page = cli("ingest")
    assert (code, page["envelopes"]) == (0, 1)


def test_memories_of_another_machine_on_the_same_ledger_are_not_missed(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    cli("ingest")
    monkeypatch.undo()
    monkeypatch.setenv("PHIONYX_LETTA_HOME", str(cli.database.parent))
    shutil.rmtree(cli.memories[OTHER].path)
    assert cli("ingest")[1]["problems"] == []


def test_watch_notices_a_memory_that_goes(cli: Cli) -> None:
    watch = Watch(
        f"sqlite:///{cli.database}", KEY, Settings(home=str(cli.database.parent)), Home.find(cli.letta), idle=600
    )
    assert watch.look().errors == []
    shutil.rmtree(cli.memories[OTHER].path.parent)
    assert any("no git repository" in error for error in watch.look().errors)
    assert cli.events() == ["repository_gone"]
    assert watch.look().errors == []


def test_a_second_memory_of_an_agent_neither_replaces_it_nor_stays_untold(cli: Cli) -> None:
    cli("ingest")
    real = cli.memories[AGENT]
    decoy = cli.letta / "lc-local-backend" / "memfs" / AGENT / "memory"
    decoy.parent.mkdir(parents=True)
    subprocess.run(["git", "clone", "-q", str(real.path), str(decoy)], check=True)
    code, page = cli("verify")
    assert (code, {one["agent_id"]: one["status"] for one in page["agents"]}[AGENT]) == (1, "several")
    real.commit({"a.md": "evil"})
    assert {one["agent_id"]: one["status"] for one in cli("verify")[1]["agents"]}[AGENT] == "behind"
    code, page = cli("ingest")
    assert (code, page["envelopes"]) == (1, 1)
    assert str(decoy) in page["problems"][0]["what"]
    assert cli("ingest")[0] == 1, "as long as it is there"
    code, text = cli.plain("verify")
    assert (code, "another memory" in text, str(decoy) in text.replace("\n", "")) == (1, True, True)
    shutil.rmtree(decoy)
    assert cli("ingest")[0] == 0


def test_no_patch_is_committed_while_an_agent_has_two_memories(cli: Cli) -> None:
    cli.memories[AGENT].commit({"human.md": HUMAN})
    cli("ingest")
    key = load_key(load_settings()).signer
    patch = a_patch(Proposals(f"sqlite:///{cli.database}", Home.find(cli.letta).memories(), key, threshold=1))
    decoy = cli.letta / "lc-local-backend" / "memfs" / AGENT / "memory"
    decoy.parent.mkdir(parents=True)
    subprocess.run(["git", "clone", "-q", str(cli.memories[AGENT].path), str(decoy)], check=True)
    code, text = cli.plain("apply", patch.patch_id, "--by", "rita")
    assert (code, "more than one memory" in text) == (2, True)
    shutil.rmtree(decoy)
    assert cli("apply", patch.patch_id, "--by", "rita")[1]["status"] == "applied"


def test_verify_makes_no_ledger(cli: Cli) -> None:
    code, text = cli.plain("verify")
    assert code == 2
    assert "there is no ledger" in text
    assert "code ingest" in text
    assert not cli.database.exists()


def test_an_unknown_layout_is_told_in_text_too(cli: Cli) -> None:
    cli.memories[OTHER].commit({"MEMORY.md": None})
    code, text = cli.plain("ingest")
    assert (code, text.count("the layout is unknown")) == (0, 1)


def test_what_goes_wrong_with_one_agent_does_not_hold_up_the_others(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where nothing at all could be recorded it is the ledger's failure."""
    real = ingest_module.Recorder.record
    failing = {AGENT}

    def record(recorder: ingest_module.Recorder, agent: str, path: Path, turn: Turn) -> ingest_module.AgentReport:
        if agent in failing:
            raise LedgerUnavailable("no place", "make some")
        return real(recorder, agent, path, turn)

    monkeypatch.setattr(ingest_module.Recorder, "record", record)
    code, page = cli("ingest")
    assert (code, [one["agent_id"] for one in page["agents"]]) == (1, [OTHER])
    assert page["problems"][0]["what"] == "no place"
    failing.add(OTHER)
    code, text = cli.plain("ingest")
    assert (code, "no place; make some" in " ".join(text.split())) == (2, True)


@pytest.mark.parametrize("engine", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def test_paths_longer_than_any_index_takes(
    engine: str, memory: Memory, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/l.db" if engine == "sqlite" else request.getfixturevalue("empty_database")
    ledger = SqlLedger(url)
    recorded = Recorded(ledger)
    deep = "/".join(["\x01" * 100] * 12)
    memory.commit({f"{deep}/a.md": "1", f"{deep}/b.md": "1"})
    recorded.ingest(memory)
    memory.commit({f"{deep}/a.md": "12"})
    recorded.ingest(memory)
    recorded.agrees_with(memory)
    assert [kind for _, kind, _ in recorded.told()] == ["write", "write", "append"]
    assert len({one["mutation"]["block_id"] for one in recorded.envelopes()}) == 2
    checked = sealing_check(ledger, memory)
    assert checked.status == "ok"
    memory.git("checkout", "-q", "--orphan", "other")
    memory.git("rm", "-rfq", ".")
    memory.commit({"c.md": "1"})
    shutil.rmtree(memory.path / ".git" / "logs")
    memory.git("branch", "-D", "main")
    memory.git("reflog", "expire", "--expire=now", "--all")
    memory.git("gc", "-q", "--prune=now")
    recorded.ingest(memory)
    assert sealing_check(ledger, memory).files == []
    ledger.close()


def sealing_check(ledger: SqlLedger, memory: Memory) -> Any:
    from phionyx_letta.letta_code.checking import check_memory

    return check_memory(ledger, SIGNER.verifier(), AgentMemory(AGENT, memory.path))


def test_no_two_files_share_a_block() -> None:
    long = "x" * 400
    names = [long, long + "y", block_id("a", long).partition(":")[2], "x" * 300, ""]
    assert len({block_id("a", name) for name in names[:2] + names[3:]}) == 4
    assert block_id("a", names[2]) == block_id("a", long), "a block's name leads to itself"


def test_too_many_files_after_a_vanished_history_are_a_gap(
    memory: Memory, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.commit({f"{number}.md": "1" for number in range(9)})
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    memory.git("reset", "-q", "--hard", "HEAD~1")
    memory.git("update-ref", "-d", "ORIG_HEAD")
    memory.git("reflog", "expire", "--expire=now", "--all")
    memory.git("gc", "-q", "--prune=now")
    monkeypatch.setattr("phionyx_letta.letta_code.trees.MAX_FILES", 5)
    report = recorded.ingest(memory)
    assert sorted(gap["reason"] for gap in report.gaps) == ["too_many_files", "vanished"]
    assert recorded.ingest(memory).gaps == []
    memory.commit({"0.md": "12"})
    assert recorded.ingest(memory).gaps == []
    assert recorded.told()[-1] == ("0.md", "append", "update")


def within(seconds: float, act: Callable[[], Any]) -> Any:
    began = time.monotonic()
    found = act()
    assert time.monotonic() - began < seconds
    return found


def test_no_text_makes_reading_it_slow() -> None:
    """Each of these took minutes when a pattern could begin anew at every place."""
    spaces = " " * 500_000
    assert within(2, lambda: label_of("f.md", f"---\nname: a{spaces}b\n---\nx")) == "f"
    assert within(2, lambda: label_of("f.md", f"---\nname: a{spaces}\n---\nx")) == "a"
    assert within(2, lambda: label_of("f.md", "---\n" + f"---{spaces}x\n" * 2)) == "f"
    for person in ("<" * 500_000, "A " * 250_000, "<>" * 250_000 + "1 +0000", "> " * 250_000):
        commit = Commit("", "", (), person, person, "m\n\n" + "Agent-ID:" + spaces + "x")
        assert "author" not in within(2, functools.partial(claims, commit))


@pytest.mark.parametrize(
    ("person", "name", "email"),
    [
        ("A B <a@b> 17 +0000", "A B", "a@b"),
        ("<a@b> 17 -0100", "", "a@b"),
        ("A <> 17 +0000", "A", ""),
        ("A <a@b> c> 17 +0000", "A", "a@b> c"),
    ],
)
def test_who_a_commit_says_made_it(person: str, name: str, email: str) -> None:
    found = claims(Commit("", "", (), person, "nobody", ""))
    assert found == {"author": {"name": name, "email": email, "unix_time": 17}}


def note(queue: Path, number: int, at: float, text: str) -> None:
    queue.mkdir(exist_ok=True)
    (queue / f"n.{number}.0").write_text(text)
    os.utime(queue / f"n.{number}.0", (at, at))


@pytest.mark.parametrize(
    ("agent", "conversation", "tool"),
    [("", "", None), ("", "conv-1", None), (AGENT, "conv-1", "call_42"), (AGENT, "", "call_42")],
)
def test_a_commit_of_nobody_known_gets_no_tool_call(
    tmp_path: Path, agent: str, conversation: str, tool: str | None
) -> None:
    """A person who commits by hand while the agent works did not do so by the agent's next tool call."""
    commit = "ab" * 20
    note(tmp_path / "q", 1, 1e9, f"ref\n{agent}\n{conversation}\n/home/me\n{'0' * 40} {commit} refs/heads/main\n\n")
    call = {"tool_name": "Read", "tool_call_id": "call_42", "agent_id": AGENT}
    note(tmp_path / "q", 2, 1e9 + 500, "tool\n" + json.dumps(call))
    found = read_notes(tmp_path / "q").about(AGENT, commit)
    assert found.get("tool_call_id") == tool
    assert bool(found) == bool(agent or conversation)
