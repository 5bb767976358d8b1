"""Acts that a SIGKILL cut short: done again, they are finished, and the evidence says who did what."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from memory_helpers import fact, memory, propose

from phionyx_letta import Ed25519Signer, FilesystemEnvelopeStore, verify_chain
from phionyx_letta.errors import DiffConflictError, IllegalTransition, StoreError
from phionyx_letta.memory import LivingMemory
from phionyx_letta.memory.files import FileTarget
from phionyx_letta.memory.patches import check_trust

KEY = Ed25519Signer("11" * 32)
BEFORE, AFTER = "# Notes\n\n- a\n", "# Notes\n\n- a\n- Deploys with uv.\n"


def opened(folder: Path) -> LivingMemory:
    uv = fact("- Deploys with uv.", section=None)
    return memory(folder, uv, signer=KEY, envelopes=FilesystemEnvelopeStore(folder / "audit"))


@pytest.fixture
def notes(tmp_path) -> Path:
    path = tmp_path / "CLAUDE.md"
    path.write_text(BEFORE)
    return path


def killed(folder: Path, act: str, patch_id: str, *, written: bool = True) -> None:
    """Do it in a process that is killed right before, or right after, the file is written."""
    child = os.fork()
    if child == 0:
        write = FileTarget.write

        def dies(*arguments):
            if written:
                write(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        FileTarget.write = dies
        getattr(opened(folder), act)(patch_id)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def events(folder: Path) -> list[str]:
    chain = list(FilesystemEnvelopeStore(folder / "audit").iter_chain(f"file:{folder / 'CLAUDE.md'}"))
    assert verify_chain(chain, verifier=KEY.verifier())["valid"] is True
    for one in opened(folder).patch_history():
        check_trust(one, KEY.verifier())
    return [one["subject"]["metadata"]["living_memory"]["event"] for one in chain]


class TestApply:
    @pytest.mark.parametrize("written", [True, False])
    def test_it_is_finished_by_the_next(self, notes, tmp_path, written):
        (one,) = propose(opened(tmp_path))
        killed(tmp_path, "apply", one.patch_id, written=written)
        assert notes.read_text() == (AFTER if written else BEFORE)
        assert opened(tmp_path).apply(one.patch_id).status == "applied"
        assert notes.read_text() == AFTER
        assert events(tmp_path) == ["apply"]

    @pytest.mark.parametrize("text", [AFTER + "- mine\n", "# Notes\n\n- mine\n- a\n- Deploys with uv.\n"])
    def test_also_when_a_person_edited_the_file_since(self, notes, tmp_path, text):
        (one,) = propose(opened(tmp_path))
        killed(tmp_path, "apply", one.patch_id)
        notes.write_text(text)
        for act in ("reject", "rebase"):
            with pytest.raises(IllegalTransition, match="written already") as caught:
                getattr(opened(tmp_path), act)(one.patch_id)
            assert "apply it to finish that" in caught.value.remedy
        assert opened(tmp_path).apply(one.patch_id).status == "applied"
        assert notes.read_text() == text
        opened(tmp_path).revert(one.patch_id)
        assert notes.read_text() == text.replace("- Deploys with uv.\n", "")
        assert events(tmp_path) == ["apply", "edit_outside", "revert"]

    def test_an_edit_where_nothing_was_written_is_still_a_conflict(self, notes, tmp_path):
        (one,) = propose(opened(tmp_path))
        killed(tmp_path, "apply", one.patch_id, written=False)
        notes.write_text(BEFORE + "- mine\n")
        with pytest.raises(DiffConflictError):
            opened(tmp_path).apply(one.patch_id)
        assert notes.read_text() == BEFORE + "- mine\n"
        assert opened(tmp_path).reject(one.patch_id).status == "rejected"

    def test_where_the_chain_went_on_without_it_it_is_recorded_in_its_present_place(self, notes, tmp_path):
        (one,) = propose(opened(tmp_path))
        killed(tmp_path, "apply", one.patch_id)
        tea = memory(tmp_path, fact("- Likes tea."), signer=KEY, envelopes=FilesystemEnvelopeStore(tmp_path / "audit"))
        (other,) = propose(tea, "s2")
        tea.apply(other)
        notes.write_text(notes.read_text() + "- mine\n")
        opened(tmp_path).apply(one.patch_id)
        assert events(tmp_path) == ["apply", "edit_outside", "apply"]
        chain = list(FilesystemEnvelopeStore(tmp_path / "audit").iter_chain(f"file:{notes}"))
        diff = chain[-1]["mutation"]["diff"]
        assert diff["before_hash"] == diff["after_hash"]


class TestRevert:
    def applied(self, folder: Path) -> str:
        living = opened(folder)
        (one,) = propose(living)
        return living.apply(one).patch_id

    @pytest.mark.parametrize("written", [True, False])
    @pytest.mark.parametrize("later", ["", "- mine\n"])
    def test_it_is_finished_by_the_next(self, notes, tmp_path, written, later):
        one = self.applied(tmp_path)
        at = opened(tmp_path).store.get(one).applied_at
        notes.write_text(AFTER + later)
        killed(tmp_path, "revert", one, written=written)
        assert notes.read_text() == (BEFORE if written else AFTER) + later
        done = opened(tmp_path).revert(one)
        assert (done.status, done.applied_at) == ("reverted", at)
        assert notes.read_text() == BEFORE + later
        assert events(tmp_path) == (["apply", "edit_outside", "revert"] if later else ["apply", "revert"])

    @pytest.mark.parametrize("text", [BEFORE + "- mine\n", "# Notes\n\n- mine\n- a\n"])
    def test_also_when_a_person_edited_the_file_since(self, notes, tmp_path, text):
        one = self.applied(tmp_path)
        killed(tmp_path, "revert", one)
        notes.write_text(text)
        assert opened(tmp_path).revert(one).status == "reverted"
        assert notes.read_text() == text
        assert events(tmp_path) == ["apply", "revert"]

    def test_an_edit_where_nothing_was_written_is_kept(self, notes, tmp_path):
        one = self.applied(tmp_path)
        killed(tmp_path, "revert", one, written=False)
        notes.write_text(AFTER + "- mine\n")
        opened(tmp_path).revert(one)
        assert notes.read_text() == BEFORE + "- mine\n"
        assert events(tmp_path) == ["apply", "edit_outside", "revert"]


class TestAnUnusableLedger:
    @pytest.mark.parametrize("act", ["apply", "revert"])
    def test_nothing_is_written(self, notes, tmp_path, act):
        living = opened(tmp_path)
        (one,) = propose(living)
        if act == "revert":
            living.apply(one)
        before = notes.read_text()
        (tmp_path / "file").write_text("")
        broken = memory(tmp_path, signer=KEY, envelopes=FilesystemEnvelopeStore(tmp_path / "file"))
        with pytest.raises(StoreError):
            getattr(broken, act)(one.patch_id)
        assert notes.read_text() == before
        assert broken.store.status(one.patch_id) == ("pending" if act == "apply" else "applied")

    @pytest.mark.parametrize("act", ["apply", "revert"])
    def test_one_that_fails_after_the_write_says_so_and_the_act_is_finished_by_doing_it_again(
        self, notes, tmp_path, monkeypatch, act
    ):
        living = opened(tmp_path)
        (one,) = propose(living)
        if act == "revert":
            living.apply(one)

        def full(*_, **__):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as failing:
            failing.setattr(FilesystemEnvelopeStore, "emit", full)
            with pytest.raises(StoreError, match=r"was written, but its envelope was not.*No space left") as caught:
                getattr(living, act)(one.patch_id)
        assert f"{act} the patch again" in caught.value.remedy
        getattr(opened(tmp_path), act)(one.patch_id)
        assert events(tmp_path) == (["apply"] if act == "apply" else ["apply", "revert"])
