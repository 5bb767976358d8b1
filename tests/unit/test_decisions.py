"""What a reviewer signed stays in the envelope and is checked with his public key, without the server's, its database or its word."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from block_rig import BlockRig
from outbox_rig import verifier_of

from phionyx_letta import Ed25519Signer, FilesystemEnvelopeStore, MemoryMutationContext, compute_memory_diff
from phionyx_letta.decisions import decide, decision_in, kept, signed_text
from phionyx_letta.diff import content_hash
from phionyx_letta.errors import UntrustedPatch
from phionyx_letta.ledger.audit import AuditReport, verify_envelope, verify_lines, verify_store
from phionyx_letta.ledger.audit_sql import verify_ledger
from phionyx_letta.memory import LivingMemory, MemoryPatch
from phionyx_letta.memory.claims import make_claim, read_claim
from phionyx_letta.memory.patches import transition
from phionyx_letta.memory.policy import Policy
from phionyx_letta.plugin.attribution import attributed

ADA, BOB = Ed25519Signer("22" * 32), Ed25519Signer("33" * 32)
CAUSE = {"event": "apply", "patch_id": "3f9c", "patch": "sha256:" + "ab" * 32, "reviewer": "ada", "session": "s1"}


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return a_policy(tmp_path / "who.toml", ada=ADA, bob=BOB)


def a_policy(path: Path, **keys: Ed25519Signer) -> Policy:
    path.write_text("".join(f'[[reviewer]]\nname = "{name}"\nkey = "{k.public_key_hex}"\n' for name, k in keys.items()))
    return Policy.load(str(path))


@pytest.fixture
def rig(empty_database: str) -> Iterator[BlockRig]:
    rig = BlockRig(empty_database)
    yield rig
    rig.close()


def decided(rig: BlockRig, policy: Policy, before: str, after: str, signer: Ed25519Signer = ADA) -> dict[str, Any]:
    """Ada's write, through what the server does with her header; her claim."""
    header = make_claim(CAUSE, "block-1", content_hash(before), content_hash(after), signer)
    claim, reviewer = read_claim(header, None, policy)
    with attributed(claim=claim, reviewer=reviewer):
        rig.set("block-1", value=after)
    rig.seal()
    return claim


def verified(rig: BlockRig, reviewers: Policy | None) -> AuditReport:
    return verify_ledger(rig.ledger, verifier=verifier_of(rig.key), reviewers=reviewers)


def forged(
    rig: BlockRig, said: dict[str, Any], before: str, after: str, block: str = "block-1", commitment: str = "sha256"
) -> None:
    """What somebody with the server's key and its database can seal."""
    context = MemoryMutationContext(
        trace_id="agent-a",
        turn_index=0,
        producer="phionyx-letta.unattributed",
        block_id=block,
        block_label="human",
        mutation_kind="write",
        diff=compute_memory_diff(before, after),
        metadata={"living_memory": said},
    )
    object.__setattr__(context.diff, "commitment", commitment)  # which `MemoryDiff` refuses
    rig.ledger.emit(context, signer=rig.key.signer)


@pytest.mark.parametrize("commitments", ["plain", "salted"])
class TestADecision:
    def test_is_checked_with_the_reviewers_public_key_from_the_envelope_alone(
        self, rig: BlockRig, policy: Policy, tmp_path: Path, commitments: str
    ) -> None:
        with rig.armed(rig.runtime(commitments)):
            rig.create("block-1", "name: Ann", "agent-a")
            claim = decided(rig, policy, "name: Ann", "name: Ann\nuv")
        report = verified(rig, policy)
        assert report.verdict == "valid"
        if commitments == "salted":  # who decided, about which block and patch, and when; not about which text
            assert (report.dimensions["reviewers"], report.findings_total) == ("not_measured", 1)
            assert "1 decision" in report.findings[0].message
        else:
            assert (report.dimensions["reviewers"], report.findings) == ("ok", [])
        assert verified(rig, None).dimensions["reviewers"] == "not_measured"
        assert verified(rig, None).verdict == "valid"
        [envelope] = [one for one in rig.envelopes() if decision_in(one)]
        said = decision_in(envelope)
        assert said is not None
        assert said["signature"] == claim["signature"]
        assert len(json.dumps(said)) < 2000
        assert not {"expected", "wrote"} & set(said)
        if commitments == "salted":
            text = json.dumps(said)
            assert not any(one in text for one in (claim["expected"], claim["wrote"], claim["nonce"], claim["patch"]))
        assert verify_envelope(envelope, verifier=rig.key.signer.verifier(), reviewers=policy).verdict == "valid"

    def test_of_somebody_else_or_taken_out_fails(
        self, rig: BlockRig, policy: Policy, tmp_path: Path, commitments: str
    ) -> None:
        with rig.armed(rig.runtime(commitments)):
            rig.create("block-1", "name: Ann", "agent-a")
            decided(rig, policy, "name: Ann", "name: Ann\nuv")
        report = verified(rig, a_policy(tmp_path / "other.toml", ada=BOB))
        assert (report.verdict, report.dimensions["reviewers"]) == ("failed", "failed")
        assert "no key of the reviewer" in str(report.reason)
        assert report.findings[0].block_id == "block-1"
        # a reviewer who has left, or has another key now: the policy of that time counts too
        policies = Policy((*a_policy(tmp_path / "other.toml", ada=BOB).reviewers, *policy.reviewers))
        assert verified(rig, policies).dimensions["reviewers"] == ("ok" if commitments == "plain" else "not_measured")


class TestWhoHasTheServersKey:
    """Each forgery is sealed with it, so that every signature of the chain is good; only the reviewers' dimension tells."""

    def _fails(self, rig: BlockRig, policy: Policy, said: str) -> None:
        report = verified(rig, policy)
        assert (report.dimensions["signatures"], report.dimensions["reviewers"]) == ("ok", "failed")
        assert any(said in one.message for one in report.findings), report.findings

    def test_cannot_name_a_reviewer_without_a_signature(self, rig: BlockRig, policy: Policy) -> None:
        forged(rig, dict(CAUSE), "a", "b")
        self._fails(rig, policy, "no reviewer has signed")

    def test_cannot_name_a_patch_without_a_reviewer(self, rig: BlockRig, policy: Policy) -> None:
        forged(rig, {"event": "apply", "patch_id": "p"}, "a", "b")
        self._fails(rig, policy, "no reviewer has signed")

    def test_cannot_sign_for_him(self, rig: BlockRig, policy: Policy) -> None:
        hashes = content_hash("a"), content_hash("b")
        claim, _ = read_claim(make_claim(CAUSE, "block-1", *hashes, rig.key.signer), rig.key.signer.verifier())
        forged(rig, kept(claim, salted=False), "a", "b")
        self._fails(rig, policy, "no key of the reviewer")

    def test_cannot_use_his_signature_for_another_text_block_or_name(self, rig: BlockRig, policy: Policy) -> None:
        claim, _ = read_claim(make_claim(CAUSE, "block-1", content_hash("a"), content_hash("b"), ADA), None, policy)
        for number, (said, after, block) in enumerate(
            [
                (kept(claim, salted=False), "evil", "block-1"),
                (kept(claim, salted=True), "evil", "block-1"),
                (kept(claim, salted=False), "b", "block-2"),
                (kept({**claim, "reviewer": "bob"}, salted=False), "b", "block-1"),
                (kept({**claim, "block_id": "block-2"}, salted=False), "b", "block-2"),
                ({**kept(claim, salted=False), "untrusted": None}, "b", "block-1"),
            ]
        ):
            forged(rig, said, "a", after, block)
            report = verified(rig, policy)
            wrong = [one for one in report.findings if one.dimension == "reviewers"]
            assert len(wrong) == number + 1, (number, wrong)

    @pytest.mark.parametrize("word", ["hmac-sha256", "x", "", "sha256 "])
    def test_cannot_put_another_text_under_it_by_calling_the_hashes_salted(
        self, rig: BlockRig, policy: Policy, word: str
    ) -> None:
        claim, _ = read_claim(make_claim(CAUSE, "block-1", content_hash("a"), content_hash("b"), ADA), None, policy)
        forged(rig, kept(claim, salted=True), "a", "evil", commitment=word)
        report = verified(rig, policy)
        assert report.verdict == "failed"
        wrong = "no salt is named" if word == "hmac-sha256" else "malformed envelope: mutation.diff.commitment"
        assert any(wrong in one.message for one in report.findings), report.findings

    def test_cannot_use_it_for_a_block_that_is_not_his(self, rig: BlockRig, tmp_path: Path) -> None:
        policy = a_policy(tmp_path / "who.toml", ada=ADA)
        one = policy.reviewers[0]
        claim, _ = read_claim(make_claim(CAUSE, "block-1", content_hash("a"), content_hash("b"), ADA), None, policy)
        forged(rig, kept(claim, salted=False), "a", "b")
        his = Policy((replace(one, blocks=("hum*",)),))
        assert verified(rig, his).dimensions["reviewers"] == "ok"
        self._fails(rig, Policy((replace(one, blocks=("project*",)),)), "is not one of that reviewer's blocks")

    @pytest.mark.parametrize(
        "at", ["2020-01-01T00:00:00+00:00", "2096-01-01T00:00:00+00:00", "2026-01-01T00:00:00", "x", None]
    )
    def test_cannot_use_one_of_another_time(self, rig: BlockRig, policy: Policy, at: str | None) -> None:
        decided = decide(CAUSE, "block-1", content_hash("a"), content_hash("b"), ADA, ADA.key_id)
        claim = {**decided, "at": at}
        claim["signature"] = ADA.sign(signed_text(claim))
        forged(rig, kept(claim, salted=False), "a", "b")
        self._fails(rig, policy, "minutes of")

    def test_cannot_use_one_decision_twice(self, rig: BlockRig, policy: Policy) -> None:
        claim, _ = read_claim(make_claim(CAUSE, "block-1", content_hash("a"), content_hash("b"), ADA), None, policy)
        forged(rig, kept(claim, salted=False), "a", "b")
        assert verified(rig, policy).dimensions["reviewers"] == "ok"
        forged(rig, {"event": "edit_outside"}, "b", "a")
        forged(rig, kept(claim, salted=False), "a", "b")
        self._fails(rig, policy, "stands behind another change too")


def test_files_of_envelopes_and_folders_are_checked_too(tmp_path: Path, policy: Policy) -> None:
    """Patches of memory files carry the decision as well; here Ada's key signs both."""
    (tmp_path / "m.md").write_text("a\n")
    store = FilesystemEnvelopeStore(tmp_path / "audit")
    living = LivingMemory(
        [str(tmp_path / "*.md")], signer=ADA, policy=policy, envelopes=store, store_path=str(tmp_path / "patches.jsonl")
    )
    patch = MemoryPatch(str(tmp_path / "m.md"), "a\n", "a\nb\n", "", "why")
    transition(patch, "pending", by="x", signer=ADA)
    living.apply(living.store.save(patch))
    living.revert(patch)
    report = verify_store(store, verifier=ADA.verifier(), reviewers=policy)
    assert (report.verdict, report.dimensions["reviewers"]) == ("valid", "ok")
    assert verify_store(store, verifier=ADA.verifier()).dimensions["reviewers"] == "not_measured"
    lines = [json.dumps(one) for trace in store.traces() for one in store.iter_chain(trace)]
    (tmp_path / "all.jsonl").write_text("\n".join(lines).replace('"reviewer": "ada"', '"reviewer": "bob"'))
    with (tmp_path / "all.jsonl").open("rb") as file:
        assert verify_lines(file, verifier=ADA.verifier(), reviewers=policy).dimensions["reviewers"] == "failed"


@pytest.mark.parametrize(
    "said",
    [
        None,
        1,
        [],
        {"reviewer": 1},
        {"reviewer": "ada", "signature": 1},
        {"patch_id": {"a": [1] * 9}, "reviewer": "\ud800"},
    ],
)
def test_what_is_no_decision_raises_nothing(said: Any, policy: Policy, chain: Any) -> None:
    [envelope] = chain(ADA, 1, metadata={"living_memory": said})
    report = verify_envelope(envelope, verifier=ADA.verifier(), reviewers=policy)
    assert report.dimensions.get("reviewers") in (None, "failed")
    for broken in (None, "x", {"subject": {"metadata": {"living_memory": said}}}):
        assert verify_envelope(broken, verifier=ADA.verifier(), reviewers=policy).verdict == "failed"


def test_a_claim_in_any_other_form_than_the_canonical_one_is_refused(policy: Policy) -> None:
    """The envelope keeps the claim, not its text: in another form its signature could not be checked any more."""
    from phionyx_letta.memory.claims import _packed, _unpacked

    header = make_claim(CAUSE, "block-1", "sha256:aa", "sha256:bb", ADA)
    text, _, signature = header.partition(".")
    for changed in (_unpacked(text).replace(",", ", "), _unpacked(text)[:-1] + ',"signature":"x"}'):
        with pytest.raises(UntrustedPatch, match="malformed"):
            read_claim(f"{_packed(changed)}.{signature}", None, policy)


@pytest.mark.parametrize("more", ["content", "signature", "x"])
def test_a_claim_has_the_known_members_only(policy: Policy, more: str) -> None:
    """With the hash of what was signed beside it (anybody computes it from an envelope) its hashes would not count any more."""
    from phionyx_letta._canonical import encode
    from phionyx_letta.decisions import _HASHES, _digest
    from phionyx_letta.memory.claims import _packed, _unpacked

    text, _, signature = make_claim(CAUSE, "block-1", content_hash("a"), content_hash("b"), ADA).partition(".")
    claim = json.loads(_unpacked(text))
    content = _digest({name: claim.get(name) for name in _HASHES})
    forged = {**claim, "expected": content_hash("b"), "wrote": content_hash("evil"), more: content}
    with pytest.raises(UntrustedPatch, match="malformed"):
        read_claim(f"{_packed(encode(forged))}.{signature}", None, policy)
    without = {name: value for name, value in forged.items() if name != more}
    with pytest.raises(UntrustedPatch, match="no reviewer of this server has signed"):
        read_claim(f"{_packed(encode(without))}.{signature}", None, policy)
