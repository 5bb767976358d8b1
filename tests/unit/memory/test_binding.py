"""A signed patch belongs to its store and its file; taken elsewhere it is refused, also where its file's name is relative."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from memory_helpers import Scripted, fact, memory, patch, propose

from phionyx_letta import Ed25519Signer
from phionyx_letta.errors import UntrustedPatch
from phionyx_letta.memory import LivingMemory
from phionyx_letta.memory.patches import transition

KEY = Ed25519Signer("11" * 32)


@pytest.fixture
def two_projects(tmp_path) -> tuple[Path, Path]:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "CLAUDE.md").write_text("# Notes\n")
    return tmp_path / "one", tmp_path / "two"


def here(monkeypatch, folder: Path, *facts, store: str = "patches.jsonl") -> LivingMemory:
    """A memory with relative names, as commands have it."""
    monkeypatch.chdir(folder)
    return LivingMemory(
        ["*.md"],
        Scripted(*facts),
        signer=KEY,
        store_path=store,
        occurrence_path="occurrences.json",
        occurrence_threshold=1,
    )


@pytest.mark.parametrize("store", ["patches.jsonl", "sqlite:///patches.db"])
class TestAPatchTakenToAnotherProject:
    def test_it_is_refused_there_and_applied_at_home(self, two_projects, monkeypatch, store):
        one, two = two_projects
        (made,) = propose(here(monkeypatch, one, fact("Deploys with uv."), store=store))
        other = here(monkeypatch, two, fact("Likes tea."), store=store)
        propose(other)
        other.store.save(made)
        for act in (other.apply, other.approve, other.rebase, lambda p: other.edit(p, "# mine\n")):
            with pytest.raises(UntrustedPatch, match="another patch store"):
                act(made.patch_id)
        assert (two / "CLAUDE.md").read_text() == "# Notes\n"
        assert "another patch store" in other.review(made.patch_id)["signature_note"]
        assert not other.review(made.patch_id)["signature_valid"]
        assert other.reject(made.patch_id).status == "rejected"
        here(monkeypatch, one, store=store).apply(made.patch_id)
        assert "Deploys with uv." in (one / "CLAUDE.md").read_text()

    def test_the_same_store_used_from_another_folder(self, two_projects, monkeypatch, store):
        one, two = two_projects
        (made,) = propose(here(monkeypatch, one, fact("Deploys with uv."), store=store))
        name = store.removeprefix("sqlite:///")
        away = here(monkeypatch, two, store=store.replace(name, str(one / name)))
        with pytest.raises(UntrustedPatch, match=r"made for CLAUDE.md beside its store.*two/CLAUDE.md"):
            away.apply(made.patch_id)
        assert (two / "CLAUDE.md").read_text() == "# Notes\n"

    def test_a_project_that_moves_whole_takes_its_patches_along(self, two_projects, monkeypatch, store):
        one, _ = two_projects
        (made,) = propose(here(monkeypatch, one, fact("Deploys with uv."), store=store))
        shutil.move(one, one.parent / "moved")
        here(monkeypatch, one.parent / "moved", store=store).apply(made.patch_id)
        assert "Deploys with uv." in (one.parent / "moved" / "CLAUDE.md").read_text()


class TestTheNote:
    def test_it_is_signed(self, two_projects, monkeypatch):
        living = here(monkeypatch, two_projects[0], fact("Deploys with uv."))
        (made,) = propose(living)
        assert living.review(made)["bound_to"] == {"store": made.patch_id, "target": "CLAUDE.md"}
        for changed in (None, {"store": "x"}, {**made.metadata["bound_to"], "target": "other.md"}):
            data = json.loads(json.dumps(made.to_dict()))
            data["metadata"]["bound_to"] = changed
            if changed is None:
                del data["metadata"]["bound_to"]
            living.store.update(type(made).from_dict(data))
            with pytest.raises(UntrustedPatch, match="other content"):
                living.apply(made.patch_id)

    def test_successors_are_bound_too(self, two_projects, monkeypatch):
        living = here(monkeypatch, two_projects[0], fact("Deploys with uv."))
        (made,) = propose(living)
        edited = living.edit(made, "# Notes\nuv\n")
        assert edited.metadata["bound_to"] == made.metadata["bound_to"]
        living.apply(edited)

    def test_a_patch_of_a_time_before_is_used_as_it_was(self, tmp_path):
        (tmp_path / "CLAUDE.md").write_text("a\n")
        living = memory(tmp_path, signer=KEY)
        old = patch(tmp_path / "CLAUDE.md")
        transition(old, "pending", by="x", signer=KEY)
        living.store.save(old)
        assert living.review(old)["bound_to"] is None
        assert living.apply(old).status == "applied"
