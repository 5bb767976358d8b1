"""A patch's lifecycle, its signatures and its history."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_helpers import patch

from phionyx_letta import Ed25519Signer, HmacSigner, UnsignedSigner
from phionyx_letta.errors import IllegalTransition, InvalidPatch, UntrustedPatch
from phionyx_letta.memory import MemoryPatch
from phionyx_letta.memory.patches import TRANSITIONS, check_trust, transition

KEY, OTHER = Ed25519Signer("11" * 32), Ed25519Signer("22" * 32)
STATUSES = sorted(set(TRANSITIONS) - {"proposed"})


def applied(signer=KEY) -> MemoryPatch:
    one = patch()
    for status, by in (("pending", "living-memory"), ("approved", "ada"), ("applied", "ada")):
        transition(one, status, by=by, reason=f"to {status}", signer=signer)
    return one


class TestTransitions:
    def test_the_whole_way_is_recorded_with_who_when_and_why(self):
        one = applied()
        steps = [(step["from"], step["to"], step["by"], step["reason"]) for step in one.history]
        assert steps == [
            ("proposed", "pending", "living-memory", "to pending"),
            ("pending", "approved", "ada", "to approved"),
            ("approved", "applied", "ada", "to applied"),
        ]
        assert one.applied_at == one.history[-1]["at"]
        check_trust(one, KEY.verifier())

    @pytest.mark.parametrize("come_from", STATUSES)
    @pytest.mark.parametrize("to", STATUSES)
    def test_only_what_the_table_allows_is_possible(self, come_from, to):
        one = patch()
        transition(one, "pending", by="x", signer=KEY)
        one.status = come_from
        if to in TRANSITIONS[come_from]:
            transition(one, to, by="x", signer=KEY)
            assert one.status == to
        else:
            with pytest.raises(IllegalTransition, match=f"'{come_from}'.*'{to}'"):
                transition(one, to, by="x", signer=KEY)
            assert one.status == come_from

    def test_every_status_of_the_seed_is_in_the_table(self):
        assert set(STATUSES) == {"pending", "approved", "applied", "rejected", "reverted", "conflict"}
        assert {after for allowed in TRANSITIONS.values() for after in allowed} == set(STATUSES)


class TestSignatures:
    def test_without_a_secret_a_patch_says_unsigned_and_nothing_verifies_it(self):
        one = patch()
        assert one.sign() == "unsigned"
        assert one.sign("") == "unsigned"
        assert not one.verify("")
        assert not one.verify("unsigned")

    def test_a_secret_signs_all_of_it(self):
        one = patch()
        one.sign("secret")
        assert one.signature.startswith("hmac-sha256:")
        assert one.verify("secret")
        assert not one.verify("other")
        one.rationale = "else"
        assert not one.verify("secret")

    @given(field=st.sampled_from(sorted(set(patch().to_dict()) - {"signature"})))
    def test_no_field_can_be_changed(self, field):
        data = applied().to_dict()
        changed = {"status": "reverted", "evidence_refs": ["x"], "metadata": {**data["metadata"], "x": 1}}
        data[field] = changed.get(field, "2020-01-01T00:00:00+00:00")
        with pytest.raises(UntrustedPatch):
            check_trust(MemoryPatch.from_dict(data), KEY.verifier())

    def test_another_key_is_not_trusted(self):
        with pytest.raises(UntrustedPatch, match="not signed by a trusted key") as caught:
            check_trust(applied(OTHER), KEY.verifier())
        assert "PHIONYX_LETTA_REVIEWERS" in caught.value.remedy

    def test_a_stripped_signature_is_not_trusted_where_a_key_is_configured(self):
        one = applied()
        one.signature = "unsigned"
        with pytest.raises(UntrustedPatch, match="unsigned"):
            check_trust(one, KEY.verifier())

    def test_a_signature_that_cannot_be_checked_is_not_trusted(self):
        with pytest.raises(UntrustedPatch, match="no key is configured"):
            check_trust(applied(), None)

    def test_a_patch_without_history_is_not_trusted_where_a_key_is_configured(self):
        one = patch()
        one.sign_with(KEY)
        with pytest.raises(UntrustedPatch, match="no history"):
            check_trust(one, KEY.verifier())

    @pytest.mark.parametrize("signer", [UnsignedSigner(), HmacSigner("s"), KEY], ids=lambda one: one.algorithm)
    def test_it_survives_its_json(self, signer):
        read = MemoryPatch.from_dict(json.loads(json.dumps(applied(signer).to_dict())))
        check_trust(read, None if signer.algorithm == "unsigned" else signer.verifier())


class TestHistory:
    def resigned(self, change) -> MemoryPatch:
        """A patch whose history was tampered with by somebody who can sign the whole, but not the steps, anew."""
        one = applied()
        change(one.metadata["history"])
        one.sign_with(KEY)
        return one

    @pytest.mark.parametrize(
        "change",
        [
            lambda steps: steps.pop(1),
            lambda steps: steps.pop(),
            lambda steps: steps.clear(),
            lambda steps: steps.reverse(),
            lambda steps: steps[1].update(by="eve"),
            lambda steps: steps[1].update(extra="x"),
            lambda steps: steps[1].pop("reason"),
            lambda steps: steps.append(copy.deepcopy(steps[-1])),
            lambda steps: steps.__setitem__(1, None),
            lambda steps: steps[0].update({"from": "applied"}),
            lambda steps: steps[0].update({"from": [], "to": {}}),
        ],
    )
    def test_a_changed_history_does_not_verify(self, change):
        with pytest.raises(UntrustedPatch, match="history"):
            check_trust(self.resigned(change), KEY.verifier())

    def test_the_history_of_one_patch_is_not_that_of_another(self):
        one, other = applied(), patch(after="a\nevil\n", status="applied")
        other.metadata = copy.deepcopy(one.metadata)
        other.sign_with(KEY)
        with pytest.raises(UntrustedPatch, match="other content"):
            check_trust(other, KEY.verifier())

    def test_without_a_key_its_links_are_still_checked(self):
        one = applied(UnsignedSigner())
        one.metadata["history"][1]["by"] = "eve"
        with pytest.raises(UntrustedPatch, match="step 2"):
            check_trust(one, None)


class TestBadInput:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("file_path", None),
            ("status", "done"),
            ("evidence_refs", "x"),
            ("evidence_refs", [1]),
            ("metadata", []),
            ("session_id", 3),
            ("patch_id", ""),
            ("signature", b"x"),
        ],
    )
    def test_a_wrong_field_is_named(self, field, value):
        with pytest.raises(InvalidPatch, match=field.replace("patch_id", "patch id")):
            MemoryPatch.from_dict({**patch().to_dict(), field: value})

    def test_a_missing_field_is_named(self):
        with pytest.raises(InvalidPatch, match="rationale"):
            MemoryPatch.from_dict(dict.fromkeys(("file_path", "before_content", "after_content", "unified_diff"), "x"))

    @given(
        data=st.recursive(
            st.none() | st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
        )
    )
    def test_nothing_but_its_error_comes_out(self, data):
        with pytest.raises(InvalidPatch):
            MemoryPatch.from_dict(data)

    def test_unknown_keys_are_left_aside(self):
        assert MemoryPatch.from_dict({**patch().to_dict(), "new": 1}).rationale == "why"

    def test_metadata_that_is_not_json_is_refused(self):
        with pytest.raises(InvalidPatch, match="not JSON"):
            patch(metadata={"x": object()}).sign("s")


class TestALoneSurrogate:
    @pytest.mark.parametrize("name", ["file_path", "rationale", "session_id", "author", "category", "patch_id"])
    def test_a_name_with_one_is_refused_by_name(self, name):
        fields = {"file_path": "a.md", "before_content": "", "after_content": "", "unified_diff": "", "rationale": ""}
        with pytest.raises(InvalidPatch, match=f"{name} .*lone surrogate"):
            MemoryPatch(**{**fields, name: "a\ud800.md"})
