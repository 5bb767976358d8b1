"""One agent's repository neither hides what its prompt holds nor keeps the others from being recorded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from code_rig import AGENT, KEY, SIGNER, Memory, Recorded, blob

from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.letta_code.checking import check_memory
from phionyx_letta.letta_code.places import AgentMemory, Home
from phionyx_letta.letta_code.sealing import ingest
from phionyx_letta.letta_code.watching import Watch
from phionyx_letta.settings import Settings


@pytest.mark.parametrize("packed", [False, True])
def test_replacements_are_told_once_and_fail_the_check(memory: Memory, recorded: Recorded, packed: bool) -> None:
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    memory.git("replace", memory.git("rev-parse", "HEAD:a.md"), blob(memory, b"evil"))
    if packed:
        memory.git("pack-refs", "--all")
    assert check_memory(recorded.ledger, SIGNER.verifier(), AgentMemory(AGENT, memory.path)).status == "replaced"
    assert [gap["reason"] for gap in recorded.ingest(memory).gaps] == ["replaced"]
    assert recorded.ingest(memory).gaps == []


def test_a_reflog_behind_a_link_is_told_once(memory: Memory, recorded: Recorded) -> None:
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    for name in ("HEAD", "refs/heads/main"):
        log = memory.path / ".git" / "logs" / name
        log.rename(log.with_name("aside"))
        log.symlink_to("aside")
    memory.commit({"a.md": "thrown away"})
    memory.git("reset", "-q", "--hard", "HEAD~1")
    assert [gap["reason"] for gap in recorded.ingest(memory).gaps] == ["reflog_unreadable"] * 2
    assert recorded.ingest(memory).gaps == []


def nul(folder: Path) -> None:
    folder.mkdir()
    (folder / ".git").write_bytes(b"gitdir: a\0b")


def long_link(folder: Path) -> None:
    folder.symlink_to("a" * 300)


def long_git(folder: Path) -> None:
    folder.mkdir()
    (folder / ".git").symlink_to("a" * 300)


@pytest.mark.parametrize("name", ["evil", "an odd_name:ä"])
@pytest.mark.parametrize("make", [nul, long_link, long_git])
def test_one_that_cannot_be_read_is_told_and_the_others_are_recorded(
    memory: Memory, recorded: Recorded, tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    memory.commit({"a.md": "1"})
    home = Home.find(tmp_path / "letta")
    evil = home.backend / "memfs" / name
    evil.mkdir()
    make(evil / "memory")
    found = ingest(recorded.ledger, KEY, Settings(home=str(tmp_path / "own")), home.memories())
    assert [one["agent_id"] for one in found.agents] == [AGENT]
    (problem,) = found.problems
    assert problem["path"] == str(evil / "memory")
    (wrong,) = [one for one in home.memories() if one.agent_id != AGENT]
    assert check_memory(recorded.ledger, SIGNER.verifier(), wrong).status == "unreadable"


def test_agents_that_differ_in_case_only_are_two(memory: Memory, recorded: Recorded) -> None:
    other = Memory(memory.path.parent.parent / AGENT.upper() / "memory")
    for one, name in ((memory, AGENT), (other, AGENT.upper())):
        one.commit({"a.md": name})
        recorded.ingest(one, name)
    for one, name in ((memory, AGENT), (other, AGENT.upper())):
        assert check_memory(recorded.ledger, SIGNER.verifier(), AgentMemory(name, one.path)).status == "ok"


def test_watch_records_what_went_before_it_started(memory: Memory, recorded: Recorded, tmp_path: Path) -> None:
    memory.commit({"a.md": "1"})
    home, settings = Home.find(tmp_path / "letta"), Settings(home=str(tmp_path / "own"))
    ingest(recorded.ledger, KEY, settings, home.memories())
    shutil.rmtree(memory.path.parent)
    Watch(f"sqlite:///{tmp_path / 'ledger.db'}", KEY, settings, home).look()
    assert [
        one["history"]["reason"] for one in Recorded(SqlLedger(f"sqlite:///{tmp_path / 'ledger.db'}")).history()
    ] == ["repository_gone"]
