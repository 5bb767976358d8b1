"""Patches of a MemFS file become commits through the repository's own validator, and only on what was read. And `verify`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from code_rig import AGENT, SIGNER, Memory, Recorded, letta

from phionyx_letta.errors import DiffConflictError, TargetRefused
from phionyx_letta.letta_code.checking import check_memory
from phionyx_letta.letta_code.places import AgentMemory
from phionyx_letta.letta_code.proposals import Proposals
from phionyx_letta.letta_code.target import MemfsTargets
from phionyx_letta.memory import MemoryPatch

HUMAN = "---\nname: human\ndescription: who it is\n---\nAda\n"
FACT = {"content": "Likes tea.", "fact_key": "tea", "file_path": f"{AGENT}/human.md", "rationale": "she said so"}


class Proposer:
    """A model that always proposes the same fact."""

    def generate(self, prompt: str) -> str:
        quote = {"message_index": 0, "quote": "I like tea"}
        return json.dumps([{**FACT, "category": "user", "evidence": [quote]}])


@pytest.fixture
def memories(memory: Memory) -> list[AgentMemory]:
    memory.commit({"human.md": HUMAN, "MEMORY.md": "index\n"})
    return [AgentMemory(AGENT, memory.path)]


@pytest.fixture
def proposals(memories: list[AgentMemory], tmp_path: Path) -> Proposals:
    return Proposals(str(tmp_path / "patches.jsonl"), memories, SIGNER, proposer=Proposer(), threshold=1)


def a_patch(proposals: Proposals, after: str = HUMAN + "Likes tea.\n", name: str = "human.md") -> MemoryPatch:
    target = proposals.targets.resolve(f"{AGENT}/{name}")
    return proposals.living._proposing._saved(
        proposals.living._proposing._born(
            f"{AGENT}/{name}", target.read() or "", after, "she said so", ["I like tea"], "user", "letta-code:s", {}
        )
    )


class TestApply:
    def test_a_commit_with_trailers_that_the_ledger_has(
        self, proposals: Proposals, memory: Memory, recorded: Recorded
    ) -> None:
        recorded.ingest(memory)
        patch = proposals.apply(a_patch(proposals).patch_id, by="rita")
        assert patch.status == "applied"
        assert memory.git("status", "--porcelain") == ""
        assert memory.git("show", "HEAD:human.md") == HUMAN.strip() + "\nLikes tea."
        recorded.ingest(memory)
        said = letta(recorded.envelopes()[-1])
        assert said["claims"]["trailers"] == [["Phionyx-Patch", patch.patch_id], ["Phionyx-Reviewer", "rita"]]
        assert recorded.told()[-1] == ("human.md", "append", "update")
        recorded.agrees_with(memory)

    def test_taken_back_by_a_new_commit(self, proposals: Proposals, memory: Memory, recorded: Recorded) -> None:
        patch = proposals.apply(a_patch(proposals).patch_id)
        memory.commit({"other.md": "later"})
        assert proposals.revert(patch.patch_id).status == "reverted"
        assert memory.git("show", "HEAD:human.md") == HUMAN.strip()
        assert memory.git("rev-list", "--count", "HEAD") == "4"
        recorded.ingest(memory)
        assert recorded.history() == []

    def test_what_changed_meanwhile_is_a_conflict_and_is_rebased(self, proposals: Proposals, memory: Memory) -> None:
        patch = a_patch(proposals)
        head = memory.commit({"human.md": HUMAN.replace("Ada", "Ada Lovelace\nLondon\n\nMore\n")})
        with pytest.raises(DiffConflictError):
            proposals.apply(patch.patch_id)
        assert memory.head() == head

    def test_nothing_is_written_over_what_is_not_committed(self, proposals: Proposals, memory: Memory) -> None:
        patch = a_patch(proposals)
        memory.write("MEMORY.md", "dirty\n")
        head = memory.head()
        with pytest.raises(TargetRefused, match="not committed"):
            proposals.apply(patch.patch_id)
        assert (memory.head(), (memory.path / "MEMORY.md").read_text()) == (head, "dirty\n")
        memory.git("checkout", "-q", "MEMORY.md")
        assert proposals.apply(patch.patch_id).status == "applied"

    def test_letta_s_validator_has_the_last_word(self, proposals: Proposals, memory: Memory) -> None:
        hook = memory.path / ".git" / "hooks" / "pre-commit"
        hook.write_text("#!/bin/sh\necho 'Memory validation failed: no' >&2\nexit 1\n")
        hook.chmod(0o755)
        patch, head = a_patch(proposals), memory.head()
        with pytest.raises(TargetRefused, match="Memory validation failed"):
            proposals.apply(patch.patch_id)
        assert (memory.head(), memory.git("status", "--porcelain")) == (head, "")

    @pytest.mark.parametrize("after", ["no front\n", "---\nname: x\n---\nno description\n"])
    def test_a_frontmatter_must_stay_valid(self, proposals: Proposals, memory: Memory, after: str) -> None:
        patch = a_patch(proposals, after)
        with pytest.raises(TargetRefused, match="frontmatter"):
            proposals.apply(patch.patch_id)
        assert memory.git("status", "--porcelain") == ""

    def test_a_new_file(self, proposals: Proposals, memory: Memory) -> None:
        proposals.apply(a_patch(proposals, HUMAN, "notes/new.md").patch_id)
        assert memory.git("show", "HEAD:notes/new.md") == HUMAN.strip()

    def test_a_session_leads_to_a_patch(
        self, proposals: Proposals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import asyncio

        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        records = [{"role": "user", "content": "I like tea", "id": "m1"}]
        patches = asyncio.run(proposals.living.propose_from_session("conversation:1", session_records=records))
        assert [(one.file_path, one.status) for one in patches] == [(f"{AGENT}/human.md", "pending")]
        assert list(Path.cwd().iterdir()) == [], "nothing is left where the program happens to run"


@pytest.mark.parametrize(
    "name",
    [
        "agent-x/human.md",
        f"{AGENT}/../x.md",
        f"{AGENT}/.git/config.md",
        f"{AGENT}//x.md",
        f"{AGENT}/a.txt",
        "",
        AGENT,
        f"{AGENT}/-a\n.md",
    ],
)
def test_what_is_no_memory_file_is_refused(memories: list[AgentMemory], name: str) -> None:
    with pytest.raises(TargetRefused):
        MemfsTargets(memories).resolve(name)


def test_a_folder_that_is_a_link_is_not_written_through(
    memories: list[AgentMemory], memory: Memory, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (memory.path / "notes").symlink_to(tmp_path / "out")
    target = MemfsTargets(memories).resolve(f"{AGENT}/notes/x.md")
    with pytest.raises(TargetRefused):
        target.write(target.read(), HUMAN)
    assert list((tmp_path / "out").iterdir()) == []


class TestVerify:
    def status(self, recorded: Recorded, memories: list[AgentMemory]) -> tuple[str, list[str]]:
        found = check_memory(recorded.ledger, SIGNER.verifier(), memories[0])
        return found.status, found.files

    def test_each_answer(self, memory: Memory, recorded: Recorded, memories: list[AgentMemory]) -> None:
        with recorded.ledger.writing():
            pass
        recorded.ingest(memory)
        assert self.status(recorded, memories) == ("ok", [])
        memory.commit({"human.md": HUMAN + "x"})
        assert self.status(recorded, memories) == ("behind", ["human.md"])
        recorded.ingest(memory)
        memory.git("reset", "-q", "--hard", "HEAD~1")
        assert self.status(recorded, memories) == ("rewritten", ["human.md"])
        recorded.ingest(memory)
        assert self.status(recorded, memories) == ("ok", [])
        memory.write("u.md", "u")
        assert check_memory(recorded.ledger, SIGNER.verifier(), memories[0]).uncommitted == [
            {"path": "u.md", "state": "untracked"}
        ]

    def test_nothing_recorded(self, recorded: Recorded, memories: list[AgentMemory]) -> None:
        assert self.status(recorded, memories)[0] == "unrecorded"

    def test_a_history_replaced_by_one_that_is_not_there(
        self, memory: Memory, recorded: Recorded, memories: list[AgentMemory]
    ) -> None:
        import shutil

        recorded.ingest(memory)
        shutil.rmtree(memory.path / ".git")
        memory.git("init", "-q", "-b", "main")
        memory.commit({"human.md": "evil"})
        assert self.status(recorded, memories) == ("rewritten", ["human.md"])
