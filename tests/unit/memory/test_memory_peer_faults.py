"""Every fault measured in the peer's Living Memory; none of them may be here. For its filter and its prompt see also `test_pii`."""

from __future__ import annotations

import argparse
import json

import pytest
from memory_helpers import fact, memory, patch, propose

from phionyx_letta.cli.memory import run_memory
from phionyx_letta.errors import DiffConflictError, TargetRefused, UntrustedPatch
from phionyx_letta.memory import LivingMemory, MemoryFileRouter, MemoryPatch, PatchStore

PERSONAL = "ada@example.com"


@pytest.fixture
def notes(tmp_path):
    path = tmp_path / "CLAUDE.md"
    path.write_text("# Notes\n")
    return path


def command(tmp_path, name: str, patch_id: str | None = None, **more) -> None:
    run_memory(
        argparse.Namespace(memory_command=name, patch_id=patch_id, store_path=str(tmp_path / "patches.jsonl"), **more)
    )


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("PHIONYX_LETTA_AUDIT_ROOT", str(tmp_path / "audit"))


def test_apply_checks_the_signature(notes, tmp_path):
    living = memory(tmp_path, fact("- Likes tea."), signature_secret="s")
    (one,) = propose(living)
    lines = (tmp_path / "patches.jsonl").read_text()
    (tmp_path / "patches.jsonl").write_text(lines.replace("Likes tea", "Likes bribes"))
    with pytest.raises(UntrustedPatch):
        living.apply(one.patch_id)
    assert notes.read_text() == "# Notes\n"


def test_an_empty_secret_gives_no_signature_that_could_be_forged(notes, tmp_path):
    living = LivingMemory([str(notes)], store_path=str(tmp_path / "p.jsonl"))
    one = living.store.save(patch(notes, "# Notes\n", "# Notes\n- x\n"))
    assert one.sign("") == "unsigned"
    assert living.review(one)["signature_valid"] is False
    assert living.review(one)["signature"] == "unsigned"


def test_the_command_does_not_sign_with_an_empty_secret(notes, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", "11" * 32)
    (one,) = propose(memory(tmp_path, fact("- Likes tea.")))
    command(tmp_path, "apply", one.patch_id)
    stored = PatchStore(tmp_path / "patches.jsonl").get(one.patch_id)
    assert stored.signature.startswith("ed25519:")
    assert all(step["signature"].startswith("ed25519:") for step in stored.history)


def test_applied_patches_are_not_pending_again_after_a_reload(notes, tmp_path):
    living = memory(tmp_path, fact("- Likes tea."))
    living.apply(propose(living)[0])
    assert memory(tmp_path).pending_patches() == []


def test_an_edit_of_five_percent_is_not_overwritten(notes, tmp_path):
    notes.write_text("# Notes\n" + "".join(f"- line {number}\n" for number in range(200)))
    living = memory(tmp_path, fact("- Likes tea."))
    (one,) = propose(living)
    edited = notes.read_text().replace("line 77", "line 77, and mine")
    notes.write_text(edited)
    with pytest.raises(DiffConflictError):
        living.apply(one)
    assert notes.read_text() == edited


def test_two_patches_of_one_session_both_survive(notes, tmp_path):
    living = memory(tmp_path, fact("- Likes tea."), fact("- Deploys with uv."))
    for one in propose(living):
        living.apply(one)
    assert notes.read_text() == "# Notes\n- Likes tea.\n- Deploys with uv.\n"


def test_revert_keeps_later_edits(notes, tmp_path):
    living = memory(tmp_path, fact("- Likes tea."))
    one = living.apply(propose(living)[0])
    notes.write_text(notes.read_text() + "- mine\n")
    living.revert(one.patch_id)
    assert notes.read_text() == "# Notes\n- mine\n"


def test_personal_data_reaches_no_file(notes, tmp_path):
    said = f"write to {PERSONAL}, I like tea"
    proposal = fact(
        f"- Likes tea, writes to {PERSONAL}.",
        evidence=said,
        fact_key=f"mail {PERSONAL}",
        section=f"Notes of {PERSONAL}",
        rationale=f"said {PERSONAL}",
    )
    living = memory(tmp_path, proposal, occurrence_threshold=1)
    (one,) = propose(living, session=f"session of {PERSONAL}", transcript=f"user: {said}")
    living.apply(one)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) >= 3
    for path in written:
        assert PERSONAL not in path.read_text()
    assert "[REDACTED_EMAIL]" in notes.read_text()
    assert one.metadata["pii"]["email"] >= 1
    assert PERSONAL not in living.proposer.prompts[0]


def test_existing_text_of_the_file_is_left_alone(notes, tmp_path):
    notes.write_text(f"# Notes\n- write to {PERSONAL}\n")
    living = memory(tmp_path, fact("- Likes tea."))
    living.apply(propose(living)[0])
    assert notes.read_text() == f"# Notes\n- write to {PERSONAL}\n- Likes tea.\n"


def test_three_hits_in_one_session_are_one(notes, tmp_path):
    living = memory(tmp_path, fact("- Likes tea."), fact("- Likes tea."), fact("- Likes tea."), occurrence_threshold=3)
    assert propose(living) == []


def test_later_sessions_add_no_second_patch(notes, tmp_path):
    living = memory(tmp_path, fact("- Likes tea."))
    assert [len(propose(living, session)) for session in ("s1", "s2", "s3")] == [1, 0, 0]


def test_line_endings_and_encodings_survive(notes, tmp_path):
    notes.write_bytes(b"\xef\xbb\xbf# Notes\r\n")
    living = memory(tmp_path, fact("- Likes tea."))
    living.apply(propose(living)[0])
    assert notes.read_bytes() == b"\xef\xbb\xbf# Notes\r\n- Likes tea.\r\n"


def test_a_file_that_is_not_utf_8_crashes_nothing(notes, tmp_path):
    (tmp_path / "latin.md").write_bytes(b"caf\xe9\n")
    living = memory(tmp_path, fact("- Likes tea."))
    assert len(propose(living)) == 1
    with pytest.raises(TargetRefused, match="UTF-8"):
        living.apply(living.store.save(patch(tmp_path / "latin.md")))


def test_a_foreign_line_does_not_brick_the_store(notes, tmp_path):
    (tmp_path / "patches.jsonl").write_text("[]\n")
    living = memory(tmp_path, fact("- Likes tea."))
    assert living.apply(propose(living)[0]).status == "applied"


def test_a_torn_tail_does_not_swallow_the_next_patch(notes, tmp_path):
    propose(memory(tmp_path, fact("- Likes tea.")))
    store = tmp_path / "patches.jsonl"
    store.write_text(store.read_text() + '{"patch_id": "torn", "sta')
    propose(memory(tmp_path, fact("- Deploys with uv.")), "s2")
    assert memory(tmp_path).store.count("pending") == 2


def test_a_heading_in_a_fence_is_no_section(notes, tmp_path):
    notes.write_text("# Notes\n\n```sh\n# Setup\nmake\n```\n")
    (one,) = propose(memory(tmp_path, fact("- Likes tea.", section="Setup")))
    assert one.after_content == "# Notes\n\n```sh\n# Setup\nmake\n```\n\n## Setup\n\n- Likes tea.\n"


@pytest.mark.parametrize("name", ["/etc/motd", "../outside.md", "patches.jsonl"])
def test_the_command_writes_to_no_other_path(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    outside = tmp_path.parent / "outside.md"
    outside.write_text("a\n")
    one = PatchStore(tmp_path / "patches.jsonl").save(patch(name))
    with pytest.raises(SystemExit) as ended:
        command(tmp_path, "apply", one.patch_id)
    assert ended.value.code == 1
    assert "outside the managed paths" in capsys.readouterr().err
    assert outside.read_text() == "a\n"


def test_applying_at_once_checks_for_conflicts(notes, tmp_path, monkeypatch):
    living = memory(tmp_path, fact("- Likes tea."), require_approval=False)
    place = living._proposing._store.save

    def edited_meanwhile(one: MemoryPatch) -> MemoryPatch:
        notes.write_text("# Notes\n- mine\n")
        return place(one)

    monkeypatch.setattr(living.store, "save", edited_meanwhile)
    (one,) = propose(living)
    assert one.status == "conflict"
    assert notes.read_text() == "# Notes\n- mine\n"


def test_there_are_approve_and_reject(notes, tmp_path):
    living = memory(tmp_path, fact("- Likes tea."), fact("- Deploys with uv."))
    first, second = propose(living)
    assert living.approve(first).status == "approved"
    assert living.reject(second, "not true").history[-1]["reason"] == "not true"


def test_i_always_deploy_with_uv_is_about_the_user():
    assert MemoryFileRouter().categorize("I always deploy with uv") == "user"


def test_a_long_transcript_is_read_to_its_end(notes, tmp_path):
    living = memory(tmp_path, fact("- Likes tea.", evidence="at the very end"))
    long = "".join(f"user: message {number} {'x' * 200}\n" for number in range(400))
    (one,) = propose(living, transcript=long + "user: at the very end I like tea\n")
    assert one.metadata["evidence"][0]["message_index"] == 400
    assert any("at the very end" in prompt for prompt in living.proposer.prompts)


def test_the_store_is_readable_json_lines(notes, tmp_path):
    propose(memory(tmp_path, fact("- Likes tea.")))
    for line in (tmp_path / "patches.jsonl").read_text().splitlines():
        assert MemoryPatch.from_dict(json.loads(line)).rationale == "because: - Likes tea."
