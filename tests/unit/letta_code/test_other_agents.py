"""One agent's repository neither hides what its prompt holds nor keeps the others from being recorded."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from code_rig import AGENT, KEY, SIGNER, Memory, Recorded, blob
from sqlalchemy import update

from phionyx_letta.ledger import tables
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.letta_code import working_tree
from phionyx_letta.letta_code.checking import check_memory
from phionyx_letta.letta_code.cursor import foreign
from phionyx_letta.letta_code.errors import MemoryUnreadable
from phionyx_letta.letta_code.objects import Objects
from phionyx_letta.letta_code.places import AgentMemory, Home
from phionyx_letta.letta_code.repository import MemoryRepository
from phionyx_letta.letta_code.sealing import ingest
from phionyx_letta.letta_code.watching import Watch
from phionyx_letta.letta_code.working_tree import uncommitted
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


def link_memory(mine: Path, theirs: Path) -> None:
    mine.parent.mkdir(parents=True)
    mine.symlink_to(theirs)


def link_folder(mine: Path, theirs: Path) -> None:
    mine.parent.symlink_to(theirs.parent)


def name_git_dir(mine: Path, theirs: Path) -> None:
    mine.mkdir(parents=True)
    (mine / ".git").write_text(f"gitdir: {theirs}/.git\n")


def share_common_dir(mine: Path, theirs: Path) -> None:
    git = mine / ".git"
    git.mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "commondir").write_text(f"{theirs}/.git\n")


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("make", [link_memory, link_folder, name_git_dir, share_common_dir])
def test_no_memory_is_recorded_as_two_agents(
    memory: Memory, recorded: Recorded, tmp_path: Path, make: Callable[[Path, Path], None], alone: bool
) -> None:
    memory.commit({"a.md": "1"})
    home, settings = Home.find(tmp_path / "letta"), Settings(home=str(tmp_path / "own"))
    if alone:  # only the one that is not its own is asked for; of the other the ledger knows
        ingest(recorded.ledger, KEY, settings, home.memories())
    mine = home.backend / "memfs" / "a-first-one" / "memory"
    make(mine, memory.path)
    memories = [one for one in home.memories() if not alone or one.agent_id != AGENT]
    found = ingest(recorded.ledger, KEY, settings, memories)
    (problem,) = found.problems
    assert (problem["agent_id"], problem["path"]) == ("a-first-one", str(mine))
    assert AGENT in problem["what"]
    assert str(memory.path) in problem["what"]
    assert recorded.envelopes("a-first-one") == []
    recorded.agrees_with(memory)


@pytest.mark.parametrize("make", [link_memory, name_git_dir, share_common_dir])
def test_a_memory_that_lies_in_no_agents_folder_is_of_who_was_recorded_there(
    tmp_path: Path, recorded: Recorded, make: Callable[[Path, Path], None]
) -> None:
    """Moved to another disk by a link; a second one that leads there has the same claim."""
    aside = Memory(tmp_path / "disk" / "b")
    aside.commit({"a.md": "1"})
    home, settings = Home.find(tmp_path / "letta"), Settings(home=str(tmp_path / "own"))
    link_memory(home.backend / "memfs" / AGENT / "memory", aside.path)
    other = home.backend / "memfs" / "a-first-one" / "memory"
    make(other, aside.path)
    found = ingest(recorded.ledger, KEY, settings, home.memories())
    assert [(one["agent_id"], "a-first-one" in one["what"], AGENT in one["what"]) for one in found.problems] == [
        ("a-first-one", True, True),
        (AGENT, True, True),
    ]
    assert (found.agents, found.envelopes) == ([], 0)
    shutil.rmtree(other.parent)
    ingest(recorded.ledger, KEY, settings, home.memories())
    make(other, aside.path)
    aside.commit({"a.md": "2"})
    (problem,) = ingest(recorded.ledger, KEY, settings, home.memories()).problems
    assert problem["agent_id"] == "a-first-one"
    recorded.agrees_with(aside)


def test_who_was_recorded_with_a_memory_of_its_own_has_no_claim_to_anothers(tmp_path: Path, recorded: Recorded) -> None:
    aside = Memory(tmp_path / "disk" / "b")
    aside.commit({"a.md": "1"})
    home, settings = Home.find(tmp_path / "letta"), Settings(home=str(tmp_path / "own"))
    link_memory(home.backend / "memfs" / AGENT / "memory", aside.path)
    other = Memory(home.backend / "memfs" / "a-first-one" / "memory")
    other.commit({"b.md": "1"})
    assert ingest(recorded.ledger, KEY, settings, home.memories()).problems == []
    shutil.rmtree(other.path.parent)
    name_git_dir(other.path, aside.path)
    found = ingest(recorded.ledger, KEY, settings, home.memories())
    assert [one["agent_id"] for one in found.problems] == ["a-first-one", AGENT]
    assert found.envelopes == 0


def test_a_mistyped_agent_does_not_keep_its_memory(memory: Memory, recorded: Recorded, tmp_path: Path) -> None:
    memory.commit({"a.md": "1"})
    settings = Settings(home=str(tmp_path / "own"))
    for name in ("agnet-1", AGENT, AGENT):
        found = ingest(recorded.ledger, KEY, settings, [AgentMemory(name, memory.path)])
        assert found.problems == []
    recorded.agrees_with(memory)
    assert len(recorded.envelopes()) == 1


@pytest.mark.parametrize("first", ["server", "memory"])
def test_no_chain_gets_envelopes_of_two_sources(
    memory: Memory, recorded: Recorded, tmp_path: Path, context: Callable[..., Any], first: str
) -> None:
    home, settings = Home.find(tmp_path / "letta"), Settings(home=str(tmp_path / "own"))
    memory.commit({"a.md": "1"})
    if first == "memory":
        assert ingest(recorded.ledger, KEY, settings, home.memories()).envelopes == 1
        memory.commit({"a.md": "2"})
    recorded.ledger.emit(context(trace_id=AGENT, turn_index=1), signer=SIGNER)
    size = len(recorded.envelopes())
    found = ingest(recorded.ledger, KEY, settings, home.memories())
    (problem,) = found.problems
    assert (problem["agent_id"], problem["path"]) == (AGENT, str(memory.path))
    assert "another source" in problem["what"]
    assert "(letta.agent_test)" in problem["what"], "and names it"
    assert "--ledger" in problem["remedy"]
    assert len(recorded.envelopes()) == size


@pytest.mark.parametrize(
    "body", ["", "null", "[]", "1", '"x"', "{}", '{"subject": 1}', '{"subject": {"producer": 1}}', "[" * 9999]
)
def test_a_chain_with_what_is_no_envelope_is_another_sources(
    recorded: Recorded, context: Callable[..., Any], body: str
) -> None:
    recorded.ledger.emit(context(trace_id=AGENT), signer=SIGNER)
    with recorded.ledger.engine.begin() as connection:
        connection.execute(update(tables.envelope).values(body=body))
        assert foreign(connection, AGENT, 0)


def test_a_head_that_is_a_link_is_read_by_its_text(memory: Memory, recorded: Recorded, tmp_path: Path) -> None:
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    memory.git("config", "core.preferSymlinkRefs", "true")
    memory.git("checkout", "-q", "-b", "other")
    head = memory.path / ".git" / "HEAD"
    assert head.is_symlink()
    made = memory.commit({"a.md": "2"})
    assert recorded.ingest(memory).branch == "refs/heads/other"
    assert recorded.commits()[-1] == made
    recorded.agrees_with(memory)
    (tmp_path / "outside").write_text("ref: refs/heads/main\n")
    for target in ("../../outside", str(tmp_path / "outside"), "refs/../../outside", "a" * 300):
        head.unlink()
        head.symlink_to(target)
        with pytest.raises(MemoryUnreadable, match="HEAD"):
            recorded.ingest(memory)


def test_large_work_files_are_not_read_to_tell_that_they_differ(
    memory: Memory, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = b"x" * 200_000
    memory.commit({f"{number}.md": str(number) for number in range(50)} | {"same.bin": same, "also.bin": same + b"y"})
    for number in range(50):
        os.truncate(memory.path / f"{number}.md", 60 << 20)  # 3 GB, and no block on the disk
    (memory.path / "also.bin").write_bytes(b"z" + same)

    def states() -> dict[str, str]:
        with Objects(MemoryRepository(memory.path).git) as objects:
            return {one["path"]: one["state"] for one in uncommitted(objects, memory.path, memory.head())}

    began = time.process_time()
    assert states() == {f"{number}.md": "modified" for number in range(50)} | {"also.bin": "modified"}
    assert time.process_time() - began < 2
    monkeypatch.setattr(working_tree, "_ALL", 300_000)
    assert states() == {f"{number}.md": "modified" for number in range(50)} | {
        "also.bin": "modified",
        "same.bin": "not_compared",
    }, "neither the same nor another"
