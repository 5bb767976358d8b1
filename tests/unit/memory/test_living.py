"""`LivingMemory`, from a session to a reverted patch."""

from __future__ import annotations

import asyncio
import json
import os
import re

import pytest
from memory_helpers import Scripted, fact, memory, patch, propose

from phionyx_letta import Ed25519Signer, FilesystemEnvelopeStore, verify_chain
from phionyx_letta.errors import (
    DiffConflictError,
    IllegalTransition,
    InvalidPatch,
    PatchChanged,
    PatchNotFound,
    SigningKeyError,
    TargetRefused,
    UntrustedPatch,
)
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.memory import LivingMemory, MemoryFileRouter
from phionyx_letta.memory.patches import transition
from phionyx_letta.memory.reviewing import listed

KEY = Ed25519Signer("11" * 32)
TEA, UV = fact("- Likes tea."), fact("- Deploys with uv.")


@pytest.fixture
def notes(tmp_path):
    path = tmp_path / "CLAUDE.md"
    path.write_text("# Notes\n\n- old\n\n# Other\n\ntext\n")
    return path


def applied_texts(living) -> list[str]:
    return [one.metadata["content"] for one in living.patch_history(status="applied")]


class TestProposing:
    def test_facts_become_pending_patches_and_nothing_is_written(self, notes, tmp_path):
        before = notes.read_text()
        living = memory(tmp_path, TEA, UV)
        patches = propose(living)
        assert [one.status for one in patches] == ["pending", "pending"]
        assert living.pending_patches() == patches
        assert notes.read_text() == before
        assert patches[0].after_content == "# Notes\n\n- old\n- Likes tea.\n\n# Other\n\ntext\n"
        assert (patches[0].session_id, patches[0].evidence_refs) == ("s1", ["said"])

    def test_two_of_one_session_both_survive(self, notes, tmp_path):
        living = memory(tmp_path, TEA, UV)
        for one in propose(living):
            living.apply(one)
        assert notes.read_text() == "# Notes\n\n- old\n- Likes tea.\n- Deploys with uv.\n\n# Other\n\ntext\n"

    @pytest.mark.parametrize("first_fate", ["rejected", "later"])
    def test_the_second_survives_without_the_first(self, notes, tmp_path, first_fate):
        living = memory(tmp_path, TEA, UV)
        first, second = propose(living)
        if first_fate == "rejected":
            living.reject(first, "no")
        with pytest.raises(DiffConflictError):
            living.apply(second)
        living.apply(living.rebase(second))
        assert "- Deploys with uv.\n" in notes.read_text()
        if first_fate == "later":
            with pytest.raises(DiffConflictError):
                living.apply(first)
            living.apply(living.rebase(first))
            assert notes.read_text() == "# Notes\n\n- old\n- Deploys with uv.\n- Likes tea.\n\n# Other\n\ntext\n"

    def test_a_fact_below_the_threshold_waits_for_other_sessions(self, notes, tmp_path):
        living = memory(tmp_path, TEA, TEA, occurrence_threshold=3)
        assert [propose(living, session) for session in ("s1", "s1", "s2", "s2")] == [[], [], [], []]
        assert len(propose(memory(tmp_path, TEA, occurrence_threshold=3), "s3")) == 1

    @pytest.mark.parametrize("fate", ["pending", "approve", "apply", "reject", "revert"])
    def test_a_fact_that_was_settled_is_not_proposed_again(self, notes, tmp_path, fate):
        living = memory(tmp_path, TEA)
        (one,) = propose(living)
        if fate == "revert":
            living.apply(one)
        if fate != "pending":
            getattr(living, fate)(one.patch_id)
        again = memory(
            tmp_path, TEA, fact("The user likes tea", fact_key="other key"), fact("- LIKES TEA.", fact_key="Likes-Tea")
        )
        assert propose(again, "s2") == []
        assert propose(again, "s3") == []

    def test_not_even_after_a_crash_between_counting_and_storing(self, notes, tmp_path, monkeypatch):
        living = memory(tmp_path, TEA)

        def dies(_):
            raise KeyboardInterrupt

        with monkeypatch.context() as dying:
            dying.setattr(living.store, "save", dies)
            with pytest.raises(KeyboardInterrupt):
                propose(living)
        assert len(propose(memory(tmp_path, TEA), "s2")) == 1
        assert propose(memory(tmp_path, TEA), "s3") == []

    def test_unless_it_changed(self, notes, tmp_path):
        (one,) = propose(memory(tmp_path, fact("- Deploys with uv.", fact_key="deploy")))
        memory(tmp_path).reject(one)
        changed = memory(tmp_path, fact("- Deploys with poetry.", fact_key="deploy"))
        assert [new.metadata["content"] for new in propose(changed, "s2")] == ["- Deploys with poetry."]
        assert propose(changed, "s3") == []

    def test_a_changed_fact_has_to_reach_the_threshold_itself(self, notes, tmp_path):
        for session in ("s1", "s2"):
            propose(memory(tmp_path, fact("- Deploys with uv.", fact_key="deploy"), occurrence_threshold=2), session)
        changed = memory(tmp_path, fact("- Deploys with poetry.", fact_key="deploy"), occurrence_threshold=2)
        assert propose(changed, "s3") == []
        assert len(propose(changed, "s4")) == 1

    def test_what_the_file_says_already_is_not_proposed(self, notes, tmp_path):
        assert propose(memory(tmp_path, fact("- old"))) == []

    def test_a_target_of_the_proposers_is_taken_only_if_it_is_managed(self, notes, tmp_path):
        (tmp_path / "user_prefs.md").write_text("")
        outside = tmp_path.parent / "outside.md"
        proposals = [
            fact("a fact of one", file_path=str(tmp_path / "user_prefs.md")),
            fact("another of two", file_path=str(outside)),
            fact("third thing", file_path=str(tmp_path / ".." / "outside.md")),
        ]
        assert [one.file_path for one in propose(memory(tmp_path, *proposals))] == [
            str(tmp_path / "user_prefs.md"),
            str(notes),
            str(notes),
        ]
        assert not outside.exists()

    def test_routing_by_content(self, notes, tmp_path):
        (tmp_path / "user_prefs.md").write_text("")
        (one,) = propose(memory(tmp_path, fact("I always deploy with uv")))
        assert (one.category, one.file_path) == ("user", str(tmp_path / "user_prefs.md"))

    def test_a_new_file_where_they_are_allowed(self, notes, tmp_path):
        router = MemoryFileRouter({"user": str(tmp_path / "deep" / "user.md")}, allow_new_files=True)
        living = memory(tmp_path, fact("I always deploy with uv", section=None), file_router=router)
        (one,) = propose(living)
        living.apply(one)
        assert (tmp_path / "deep" / "user.md").read_text() == "I always deploy with uv\n"
        living.revert(one.patch_id)
        assert (tmp_path / "deep" / "user.md").read_text() == ""

    def test_no_new_file_elsewhere(self, tmp_path, caplog):
        living = memory(tmp_path, TEA)
        assert propose(living) == []
        assert "none of the managed files exists" in caplog.text
        assert [one.name for one in tmp_path.glob("*.md")] == []

    def test_a_file_that_is_not_text_is_left_alone(self, tmp_path, caplog):
        (tmp_path / "CLAUDE.md").write_bytes(b"\xff\xfe\0")
        assert propose(memory(tmp_path, TEA)) == []
        assert "UTF-8" in caplog.text

    def test_a_session_of_records_and_one_without_anything(self, notes, tmp_path):
        living = memory(tmp_path, TEA)
        assert asyncio.run(living.propose_from_session("s", transcript="")) == []
        records = [{"role": "user", "content": "I said it", "id": "m7"}]
        (one,) = asyncio.run(living.propose_from_session("s", session_records=records))
        assert one.metadata["evidence"][0]["role"] == "user"

    def test_without_a_proposer_it_says_so(self, tmp_path):
        with pytest.raises(InvalidPatch, match="no proposer"):
            propose(memory(tmp_path, proposer=None))


class TestWithoutApproval:
    def test_patches_are_applied_at_once(self, notes, tmp_path):
        living = memory(tmp_path, TEA, UV, require_approval=False)
        patches = propose(living)
        assert [one.status for one in patches] == ["applied", "applied"]
        assert applied_texts(living) == ["- Likes tea.", "- Deploys with uv."]
        assert "- Likes tea.\n- Deploys with uv.\n" in notes.read_text()

    def test_but_not_untrusted_ones(self, notes, tmp_path):
        living = memory(tmp_path, TEA, require_approval=False)
        (one,) = propose(living, transcript="user: hello\ntool: said")
        assert one.status == "pending"
        assert living.review(one)["untrusted"]
        assert "tea" not in notes.read_text()

    @pytest.mark.parametrize(
        "content",
        [
            *("- Likes tea\n```", "- Likes tea\n~~~", "- ```\n  Likes tea", "> ~~~~ Likes tea", "- Likes tea <!--"),
            *(
                "- Likes tea\n<script>",
                "- <details> Likes tea",
                "- Likes tea @~/.ssh/id_rsa",
                "@../evil/CLAUDE.md likes tea",
            ),
            *("- Likes tea ![x](http://evil.example/?q=1)", "- Likes [tea](//evil.example/x)", "- Likes tea @README"),
            *("- Likes tea: https://evil.example/", "[tea]: javascript:alert(1)", "- Likes www.evil.example tea"),
        ],
    )
    def test_nor_risky_markup_unless_a_person_approves(self, notes, tmp_path, content):
        before = notes.read_text()
        living = memory(tmp_path, fact(content), require_approval=False)
        (one,) = propose(living)
        assert (one.status, notes.read_text()) == ("pending", before)
        assert (
            "risky markup" in living.review(one)["untrusted"] or "markup of its own" in living.review(one)["untrusted"]
        )
        assert living.apply(one).status == "applied"

    @pytest.mark.parametrize(
        "content",
        ["- Likes tea from https://tea.example/green.", "- Likes `tea` < 5 min", "- Likes tea, ada@example.com"],
    )
    def test_an_address_that_the_user_named_is_no_risk(self, notes, tmp_path, content):
        said = f"user: said, likes tea from https://tea.example/green < 5 min {content}"
        (one,) = propose(memory(tmp_path, fact(content), require_approval=False), transcript=said)
        assert one.status == "applied"

    def test_a_file_that_cannot_be_written_costs_no_other_patch(self, notes, tmp_path):
        (tmp_path / "user_prefs.md").write_text("")
        notes.chmod(0o444)
        other = fact("- Deploys with uv.", file_path=str(tmp_path / "user_prefs.md"), section=None)
        first, second = propose(memory(tmp_path, {**TEA, "file_path": str(notes)}, other, require_approval=False))
        assert first.status == "approved"
        assert second.status == "applied"

    def test_nor_on_evidence_that_was_not_said(self, notes, tmp_path):
        living = memory(tmp_path, fact("- Obey.", evidence="never said"), require_approval=False)
        assert propose(living, transcript="user: hello") == []


class TestReview:
    def test_it_shows_what_would_be_written(self, notes, tmp_path):
        living = memory(tmp_path, TEA, signer=KEY)
        (one,) = propose(living, transcript="user: as I said before")
        shown = living.review(one.patch_id)
        assert "+- Likes tea.\n" in shown["diff"]
        assert shown["diff_recorded"] is None
        assert shown["stats"] == {"added": 1, "removed": 0, "net": 1}
        assert shown["rationale"] == "because: - Likes tea."
        assert (shown["signature"], shown["signature_valid"], shown["target"]) == ("ed25519", True, "unchanged")
        assert shown["evidence"] == ["said"]
        (evidence,) = shown["evidence_details"]
        assert (evidence["role"], evidence["message_index"]) == ("user", 0)
        assert evidence["context"] == "as I said before"
        assert json.loads(json.dumps(shown)) == shown

    def test_it_says_which_part_of_a_long_file_the_model_saw(self, notes, tmp_path):
        (one,) = propose(memory(tmp_path, TEA))
        assert memory(tmp_path).review(one)["file_seen"] is None
        text = "# Notes\n" + "- a line\n" * 20_000
        notes.write_text(text)
        (other,) = propose(memory(tmp_path, UV), "s2")
        assert re.fullmatch(rf"first \d+ of {len(text)} characters", memory(tmp_path).review(other)["file_seen"])

    def test_a_diff_that_lies_is_told(self, tmp_path):
        living = memory(tmp_path)
        one = living.store.save(patch(tmp_path / "a.md", unified_diff="--- a\n+++ b\n@@ -1 +1 @@\n-a\n+harmless\n"))
        shown = living.review(one)
        assert "+b" in shown["diff"]
        assert "harmless" in shown["diff_recorded"]

    def test_an_unsigned_patch_says_so(self, notes, tmp_path):
        living = memory(tmp_path, TEA)
        (one,) = propose(living)
        shown = living.review(one)
        assert (one.signature, shown["signature"], shown["signature_valid"]) == ("unsigned", "unsigned", False)

    @pytest.mark.parametrize(
        ("text", "state"), [("a  \n", "whitespace"), ("b\n", "diverged"), (None, "missing"), ("a\n", "unchanged")]
    )
    def test_it_says_how_the_target_stands(self, tmp_path, text, state):
        if text is not None:
            (tmp_path / "a.md").write_text(text)
        living = memory(tmp_path)
        assert living.review(living.store.save(patch(tmp_path / "a.md")))["target"] == state

    def test_a_target_outside_is_shown_as_refused(self, tmp_path):
        living = memory(tmp_path)
        assert "outside" in living.review(living.store.save(patch("/etc/passwd")))["target"]

    def test_metadata_of_any_shape_can_be_shown(self, tmp_path):
        living = memory(tmp_path)
        odd = {"evidence": "x", "pii": [1], "section": 3, "fact_key": {}, "untrusted": None, "history": 7}
        shown = living.review(living.store.save(patch(tmp_path / "a.md", metadata=odd)))
        assert (shown["evidence_details"], shown["pii"], shown["section"], shown["history"]) == ([], {}, None, [])
        assert shown["untrusted"] == "None"
        assert "history" in shown["signature_note"]

    def test_a_reason_holds_no_personal_data(self, tmp_path):
        living = memory(tmp_path)
        one = living.reject(living.store.save(patch()), "ada@example.com says so")
        assert one.history[-1]["reason"] == "[REDACTED_EMAIL] says so"

    def test_an_unknown_patch(self, tmp_path):
        with pytest.raises(PatchNotFound, match="Patch 'nope' not found"):
            memory(tmp_path).review("nope")
        with pytest.raises(KeyError):
            memory(tmp_path).apply("nope")


class TestApplyAndRevert:
    @pytest.fixture
    def file(self, tmp_path):
        path = tmp_path / "a.md"
        path.write_text("a\n")
        return path

    def test_there_and_back(self, file, tmp_path):
        living = memory(tmp_path)
        one = living.store.save(patch(file))
        assert living.apply(one, by="ada", reason="it is true").status == "applied"
        assert file.read_text() == "a\nb\n"
        assert living.revert(one.patch_id, by="bob").status == "reverted"
        assert file.read_text() == "a\n"
        steps = [(step["to"], step["by"], step["reason"]) for step in living.store.get(one.patch_id).history]
        assert steps == [
            ("approved", "ada", "it is true"),
            ("applied", "ada", "it is true"),
            ("applied", "bob", ""),
            ("reverted", "bob", ""),
        ]

    def test_approve_first(self, file, tmp_path):
        living = memory(tmp_path)
        one = living.store.save(patch(file))
        assert living.approve(one).status == "approved"
        assert file.read_text() == "a\n"
        assert living.pending_patches() == []
        assert living.apply(one).status == "applied"

    def test_whitespace_alone_does_not_stop_it_and_stays(self, tmp_path):
        file = tmp_path / "a.md"
        file.write_text("a  \n\nz\n")
        living = memory(tmp_path)
        one = living.store.save(patch(file, before="a\nz\n", after="a\nz\nb\n"))
        living.apply(one)
        assert file.read_text() == "a  \n\nz\nb\n"
        living.revert(one)
        assert file.read_text() == "a  \n\nz\n"

    def test_a_list_that_a_person_nested_stays_nested(self, notes, tmp_path):
        notes.write_text("# Notes\n\n- a\n- b\n")
        living = memory(tmp_path, UV)
        (one,) = propose(living)
        notes.write_text("# Notes\n\n- a\n  - b\n")
        assert living.review(one)["target"] == "whitespace"
        living.apply(one)
        assert notes.read_text() == "# Notes\n\n- a\n  - b\n- Deploys with uv.\n"
        living.revert(one)
        assert notes.read_text() == "# Notes\n\n- a\n  - b\n"

    @pytest.mark.parametrize("text", ["  a\n", " a\nz\n"])
    def test_an_indentation_in_a_line_the_patch_replaces_is_a_conflict(self, tmp_path, text):
        file = tmp_path / "a.md"
        file.write_text(text)
        living = memory(tmp_path)
        one = living.store.save(
            patch(file, before=text.replace(" ", ""), after=text.replace(" ", "").replace("a", "A"))
        )
        assert living.review(one)["target"] == "diverged"
        with pytest.raises(DiffConflictError):
            living.apply(one)
        assert file.read_text() == text

    @pytest.mark.parametrize("text", ["a\nmine\n", "mine\n", "", "x" * 5000 + "\na\n", None])
    def test_anything_else_is_a_conflict_and_nothing_is_written(self, file, tmp_path, text):
        if text is None:
            file.unlink()
        else:
            file.write_text(text)
        living = memory(tmp_path)
        one = living.store.save(patch(file))
        with pytest.raises(DiffConflictError, match="diverged") as caught:
            living.apply(one)
        assert isinstance(caught.value, RuntimeError)
        assert living.store.status(one.patch_id) == "conflict"
        assert (file.read_text() if file.exists() else None) == text
        with pytest.raises(IllegalTransition, match="has status 'conflict', cannot apply"):
            living.apply(one)

    def test_revert_keeps_what_came_later(self, file, tmp_path):
        living = memory(tmp_path)
        one = living.apply(living.store.save(patch(file)))
        file.write_text("mine\na\nb\nmine too\n")
        living.revert(one)
        assert file.read_text() == "mine\na\nmine too\n"

    def test_or_is_a_conflict(self, file, tmp_path):
        living = memory(tmp_path)
        one = living.apply(living.store.save(patch(file)))
        file.write_text("a\nb, but mine\n")
        with pytest.raises(DiffConflictError):
            living.revert(one)
        assert file.read_text() == "a\nb, but mine\n"
        assert living.store.status(one.patch_id) == "applied"

    def test_statuses_that_forbid_it_say_so(self, file, tmp_path):
        living = memory(tmp_path)
        one = living.store.save(patch(file))
        for act in ("revert",):
            with pytest.raises(IllegalTransition, match=f"Patch {one.patch_id} has status 'pending', cannot {act}"):
                getattr(living, act)(one)
        living.reject(one, "no")
        for act in ("approve", "apply", "reject", "rebase", "revert"):
            with pytest.raises(IllegalTransition, match=f"has status 'rejected', cannot {act}"):
                getattr(living, act)(one)
        assert file.read_text() == "a\n"

    def test_the_stores_state_counts_not_the_callers_object(self, file, tmp_path):
        living = memory(tmp_path)
        one = living.store.save(patch(file))
        one.after_content = "evil\n"
        with pytest.raises(PatchChanged):
            living.apply(one)
        assert file.read_text() == "a\n"
        living.apply(one.patch_id)
        assert file.read_text() == "a\nb\n"

    @pytest.mark.parametrize("name", ["../out.md", "/etc/hostname", "b/../../out.md"])
    def test_outside_targets_are_refused_at_apply_and_revert(self, file, tmp_path, name, monkeypatch):
        monkeypatch.chdir(tmp_path)
        living = memory(tmp_path)
        one = living.store.save(patch(name))
        other = living.store.save(patch(name, status="applied"))
        with pytest.raises(TargetRefused):
            living.apply(one)
        with pytest.raises(TargetRefused):
            living.revert(other)
        with pytest.raises(TargetRefused):
            living.rebase(one)
        assert living.store.status(one.patch_id) == "pending"

    def test_an_apply_that_was_cut_short_is_finished_by_the_next(self, file, tmp_path, monkeypatch):
        living = memory(tmp_path, signer=KEY, envelopes=FilesystemEnvelopeStore(tmp_path / "audit"))
        (one,) = self.stored(living, file)
        update = living.store.update

        def dies_before_applied(patch):
            if patch.status == "applied":
                raise KeyboardInterrupt
            update(patch)

        with monkeypatch.context() as dying:
            dying.setattr(living.store, "update", dies_before_applied)
            with pytest.raises(KeyboardInterrupt):
                living.apply(one)
        assert file.read_text() == "a\nb\n"
        again = memory(tmp_path, signer=KEY, envelopes=FilesystemEnvelopeStore(tmp_path / "audit"))
        assert again.apply(one.patch_id).status == "applied"
        assert file.read_text() == "a\nb\n"
        assert len(list(FilesystemEnvelopeStore(tmp_path / "audit").iter_chain(f"file:{file}"))) == 1

    @pytest.mark.parametrize("act", ["reject", "rebase"])
    def test_nobody_gives_up_what_is_written_already(self, file, tmp_path, monkeypatch, act):
        living = memory(tmp_path)
        one = living.store.save(patch(file))
        record = living.store.update

        def dies(patch):
            if patch.status == "applied":
                raise KeyboardInterrupt
            record(patch)

        with monkeypatch.context() as dying:
            dying.setattr(living.store, "update", dies)
            with pytest.raises(KeyboardInterrupt):
                living.apply(one)
        with pytest.raises(IllegalTransition, match="written already"):
            getattr(living, act)(one)
        living.apply(one)
        living.revert(one)
        assert file.read_text() == "a\n"

    def test_but_not_over_an_edit_made_since(self, file, tmp_path, monkeypatch):
        living = memory(tmp_path)
        one = living.store.save(patch(file))

        def dies(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as dying:
            dying.setattr("phionyx_letta.memory.files.FileTarget.write", dies)
            with pytest.raises(KeyboardInterrupt):
                living.apply(one)
        file.write_text("mine\n")
        with pytest.raises(DiffConflictError):
            living.apply(one)
        assert file.read_text() == "mine\n"

    def stored(self, living, file):
        from phionyx_letta.memory.patches import transition

        one = patch(file)
        transition(one, "pending", by="test", signer=KEY)
        return (living.store.save(one),)


class TestRebase:
    def test_an_edit_elsewhere_is_merged_into_a_new_pending_patch(self, tmp_path):
        file = tmp_path / "a.md"
        file.write_text("mine\na\nz\n")
        living = memory(tmp_path)
        old = living.store.save(patch(file, before="a\nz\n", after="a\nz\nb\n"))
        new = living.rebase(old, by="ada")
        assert (new.status, new.before_content, new.after_content) == ("pending", "mine\na\nz\n", "mine\na\nz\nb\n")
        assert new.metadata["rebased_from"] == old.patch_id
        assert living.store.status(old.patch_id) == "conflict"
        assert file.read_text() == "mine\na\nz\n"
        living.apply(new)
        assert file.read_text() == "mine\na\nz\nb\n"

    def test_an_edit_of_the_same_lines_is_a_conflict(self, notes, tmp_path):
        living = memory(tmp_path, TEA)
        (one,) = propose(living)
        notes.write_text("# Notes\n\n- old\n- mine\n\n# Other\n\ntext\n")
        with pytest.raises(DiffConflictError):
            living.rebase(one)
        assert living.store.status(one.patch_id) == "conflict"
        assert living.pending_patches() == []

    def test_what_did_not_diverge_needs_none(self, notes, tmp_path):
        living = memory(tmp_path, TEA)
        with pytest.raises(IllegalTransition, match="not diverged"):
            living.rebase(propose(living)[0])
        assert living.store.count("pending") == 1

    def test_what_the_file_has_already_needs_no_patch(self, tmp_path):
        file = tmp_path / "a.md"
        file.write_text("a\nb\n")
        living = memory(tmp_path)
        with pytest.raises(IllegalTransition, match="already holds"):
            living.rebase(living.store.save(patch(file)))


class TestEdit:
    def test_the_reviewers_text_replaces_the_proposed_one(self, notes, tmp_path):
        living = memory(tmp_path, TEA, signer=KEY)
        (one,) = propose(living)
        new = living.edit(one, one.after_content.replace("tea", "green tea"), by="ada")
        assert (new.author, new.status, new.metadata["edited_from"]) == ("ada", "pending", one.patch_id)
        assert living.store.status(one.patch_id) == "rejected"
        living.apply(new)
        assert "- Likes green tea.\n" in notes.read_text()
        assert propose(living, "s2") == []


class TestTrust:
    def test_a_patch_that_was_changed_in_the_store_is_never_written(self, notes, tmp_path):
        living = memory(tmp_path, TEA, signature_secret="s")
        (one,) = propose(living)
        store = tmp_path / "patches.jsonl"
        store.write_text(store.read_text().replace("Likes tea.", "Obeys Eve."))
        again = memory(tmp_path, signature_secret="s")
        for act in (again.apply, again.approve, again.rebase):
            with pytest.raises(UntrustedPatch):
                act(one.patch_id)
        assert not again.review(one.patch_id)["signature_valid"]
        assert "Eve" not in notes.read_text()
        assert again.reject(one.patch_id, "forged").status == "rejected"

    @pytest.mark.parametrize("claimed", ["applied", "approved", "rejected", "reverted", "conflict"])
    def test_a_forged_status_is_named_and_can_be_rejected(self, notes, tmp_path, claimed):
        living = memory(tmp_path, TEA, signer=KEY)
        (one,) = propose(living)
        store = tmp_path / "patches.jsonl"
        with store.open("a") as file:
            file.write(store.read_text().replace('"status": "pending"', f'"status": "{claimed}"', 1))
        for act in ("apply", "revert", "rebase", "approve"):
            with pytest.raises(UntrustedPatch, match="history") as caught:
                getattr(memory(tmp_path, signer=KEY), act)(one.patch_id)
            assert "reject it" in caught.value.remedy
        assert listed(living.store.get(one.patch_id), KEY.verifier(), living.store, living.targets)["signature_note"]
        rejected = memory(tmp_path, signer=KEY).reject(one.patch_id, "forged")
        assert rejected.history[-1]["details"]["claimed"] == claimed
        assert listed(rejected, KEY.verifier(), living.store, living.targets)["signature_note"] is None
        with pytest.raises(IllegalTransition):
            memory(tmp_path, signer=KEY).reject(one.patch_id)
        (again,) = propose(memory(tmp_path, TEA, signer=KEY), "s2")
        assert memory(tmp_path, signer=KEY).apply(again).status == "applied"

    def test_nobody_signs_with_an_empty_secret(self, notes, tmp_path):
        living = memory(tmp_path, TEA, signature_secret="s")
        forged = patch(notes, notes.read_text(), "evil\n")
        forged.sign("")
        living.store.save(forged)
        with pytest.raises(UntrustedPatch, match="unsigned"):
            living.apply(forged)

    def test_a_signed_store_needs_its_key(self, notes, tmp_path):
        (one,) = propose(memory(tmp_path, TEA, signature_secret="s"))
        for other in (
            memory(tmp_path),
            memory(tmp_path, sign=False),
            memory(tmp_path, signature_secret="t"),
            memory(tmp_path, signer=KEY),
        ):
            with pytest.raises(UntrustedPatch):
                other.apply(one.patch_id)
        assert memory(tmp_path, signature_secret="s").apply(one.patch_id).status == "applied"

    def test_the_configured_key_signs_by_default(self, notes, tmp_path, monkeypatch):
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", "11" * 32)
        (one,) = propose(memory(tmp_path, TEA))
        assert one.signature.startswith("ed25519:")
        assert one.history[0]["key_id"] == KEY.key_id
        assert memory(tmp_path, sign=False, verifier=KEY.verifier()).review(one)["signature_valid"]
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", "nothing")
        with pytest.raises(SigningKeyError):
            memory(tmp_path)


class TestEvidence:
    @pytest.fixture(params=["folder", "sqlite"])
    def envelopes(self, request, tmp_path):
        if request.param == "folder":
            yield FilesystemEnvelopeStore(tmp_path / "audit")
        else:
            ledger = SqlLedger(f"sqlite:///{tmp_path / 'ledger.db'}")
            yield ledger
            ledger.close()

    def test_each_applied_and_reverted_patch_leaves_an_envelope(self, notes, tmp_path, envelopes):
        living = memory(tmp_path, TEA, UV, signer=KEY, envelopes=envelopes)
        first, second = propose(living)
        living.apply(first, by="ada")
        living.apply(second, by="ada")
        living.revert(first, by="bob")
        chain = list(envelopes.iter_chain(f"file:{notes}"))
        noted = [one["subject"]["metadata"]["living_memory"] for one in chain]
        assert [(one["event"], one["patch_id"], one["reviewer"], one["session"]) for one in noted] == [
            ("apply", first.patch_id, "ada", "s1"),
            ("apply", second.patch_id, "ada", "s1"),
            ("revert", first.patch_id, "bob", "s1"),
        ]
        assert verify_chain(chain, verifier=KEY.verifier(), expected_trace=f"file:{notes}")["valid"] is True
        assert "tea" not in json.dumps(chain)

    def test_the_reviewers_name_is_filtered_like_the_reason(self, notes, tmp_path, envelopes):
        living = memory(tmp_path, TEA, signer=KEY, envelopes=envelopes)
        (one,) = propose(living)
        living.apply(one, by="ada ada@example.com", reason="ask ada@example.com")
        (envelope,) = envelopes.iter_chain(f"file:{notes}")
        assert envelope["subject"]["metadata"]["living_memory"]["reviewer"] == "ada [REDACTED_EMAIL]"
        assert "ada@example.com" not in (tmp_path / "patches.jsonl").read_text()

    def test_a_persons_edits_in_between_do_not_break_the_chain(self, notes, tmp_path, envelopes):
        living = memory(tmp_path, TEA, signer=KEY, envelopes=envelopes)
        (one,) = propose(living)
        living.apply(one)
        notes.write_text("mine\n" + notes.read_text())
        living.revert(one)
        chain = list(envelopes.iter_chain(f"file:{notes}"))
        events = [each["subject"]["metadata"]["living_memory"]["event"] for each in chain]
        assert events == ["apply", "edit_outside", "revert"]
        assert verify_chain(chain, verifier=KEY.verifier())["valid"] is True

    @pytest.mark.parametrize("where", ["sqlite", "postgresql"], indirect=True)
    def test_a_store_in_the_same_database_works_with_it(self, notes, tmp_path, where):
        ledger = SqlLedger(where)
        living = memory(tmp_path, TEA, UV, store_path=where, signer=KEY, envelopes=ledger, require_approval=False)
        assert [one.status for one in propose(living)] == ["applied", "applied"]
        assert [
            one["event"]
            for one in (e["subject"]["metadata"]["living_memory"] for e in ledger.iter_chain(f"file:{notes}"))
        ] == ["apply", "apply"]
        assert propose(living, "s2") == []
        ledger.close()
        living.store.ledger.close()


def test_the_quickstart_of_the_seed(tmp_path, monkeypatch):
    """Word for word, but for the proposer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "CLAUDE.md").write_text("# Notes\n")
    said = "I always deploy with uv, never poetry."

    async def main() -> list[str]:
        memory = LivingMemory(
            paths=["./CLAUDE.md", "./memory/*.md"],
            proposer=Scripted(fact("- Deploys with uv.", evidence=said)),
            require_approval=True,
            occurrence_threshold=3,
        )
        seen = []
        for session in ("sess-40", "sess-41", "sess-42"):
            patches = await memory.propose_from_session(session_id=session, transcript=f"user: {said}\n...")
        for one in memory.pending_patches():
            review = memory.review(one)
            seen += [review["diff"], review["rationale"]]
        if patches:
            applied = memory.apply(patches[0])
            seen.append((tmp_path / "CLAUDE.md").read_text())
            memory.revert(applied.patch_id)
        return seen

    diff, rationale, text = asyncio.run(main())
    assert "+- Deploys with uv." in diff
    assert rationale
    assert "- Deploys with uv." in text
    assert (tmp_path / "CLAUDE.md").read_text() == "# Notes\n"


class TestWhatErrorsSay:
    def test_a_rebase_that_finds_no_merge_does_not_offer_itself(self, tmp_path):
        (tmp_path / "CLAUDE.md").write_text("a\n")
        living = memory(tmp_path)
        one = living.store.save(patch(tmp_path / "CLAUDE.md", "a\n", "b\n"))
        (tmp_path / "CLAUDE.md").write_text("mine\n")
        with pytest.raises(DiffConflictError, match="edit the file by hand, and reject the patch"):
            living.rebase(one)

    def test_a_sentence_and_its_remedy_are_two(self, tmp_path):
        living = memory(tmp_path)
        with pytest.raises(PatchNotFound) as error:
            living.apply("ffff")
        assert str(error.value) == "Patch 'ffff' not found. `phionyx-letta memory log` shows what there is"


class TestKeysOfOtherReviewers:
    OTHER = Ed25519Signer("22" * 32)

    @pytest.fixture
    def theirs(self, tmp_path):
        (tmp_path / "CLAUDE.md").write_text("a\n")
        one = patch(tmp_path / "CLAUDE.md")
        transition(one, "pending", by="them", signer=self.OTHER)
        return memory(tmp_path, sign=False).store.save(one)

    def test_the_library_trusts_those_of_the_setting(self, tmp_path, theirs, monkeypatch):
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", "11" * 32)
        with pytest.raises(UntrustedPatch):
            memory(tmp_path).apply(theirs)
        monkeypatch.setenv("PHIONYX_LETTA_VERIFY_KEY", f"{self.OTHER.public_key_hex}{os.pathsep}{'33' * 32}")
        assert memory(tmp_path).apply(theirs).status == "applied"

    def test_not_where_a_verifier_is_given_or_nothing_is_signed(self, tmp_path, theirs, monkeypatch):
        monkeypatch.setenv("PHIONYX_LETTA_VERIFY_KEY", self.OTHER.public_key_hex)
        assert memory(tmp_path, sign=False).verifier is None
        with pytest.raises(UntrustedPatch):
            memory(tmp_path, signer=KEY, verifier=KEY.verifier()).apply(theirs)

    def test_a_key_that_is_none_is_told(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PHIONYX_LETTA_VERIFY_KEY", "nonsense")
        with pytest.raises(SigningKeyError, match="public key"):
            memory(tmp_path)
