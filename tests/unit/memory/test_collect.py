"""What a proposer's answer becomes."""

import asyncio
import json

import pytest

from phionyx_letta.errors import ProposerUnavailable
from phionyx_letta.memory.pii import MemoryPIIFilter
from phionyx_letta.memory.proposer import collect_proposals
from phionyx_letta.memory.transcript import parse_transcript


class Fixed:
    def __init__(self, answer):
        self.answer = answer if isinstance(answer, str) else json.dumps(answer)
        self.prompts = []

    async def agenerate(self, prompt):
        self.prompts.append(prompt)
        return self.answer


async def collect(proposals, transcript, files=None, **options):
    proposer = Fixed(proposals)
    return await collect_proposals(
        proposer, parse_transcript(transcript), files or {}, pii=MemoryPIIFilter(), backoff=0.01, **options
    )


SEED = {
    "file_path": "CLAUDE.md",
    "section": "Core Memory",
    "fact_key": "user_prefers_pytest",
    "proposed_addition": "- The user prefers pytest for tests.",
    "rationale": "Add pytest preference",
    "evidence": "Use pytest always",
}


def test_the_answer_format_of_the_seed_is_read():
    report = asyncio.run(collect([SEED], "Use  PYTEST\nalways", {"CLAUDE.md": "# Core Memory\n"}))
    (proposal,) = report.proposals
    assert proposal.content == "- The user prefers pytest for tests."
    assert (proposal.section, proposal.file_path, proposal.untrusted) == ("Core Memory", "CLAUDE.md", None)
    assert proposal.evidence[0].message_index == 0
    assert report.seen == {"CLAUDE.md": "whole"}


def test_evidence_that_nobody_said_is_dropped_and_counted():
    report = asyncio.run(collect([SEED], "user: I use unittest"))
    assert report.proposals == []
    assert [one.fact_key for one in report.dropped] == ["user_prefers_pytest"]


def test_a_proposer_that_cannot_be_asked_is_named():
    with pytest.raises(ProposerUnavailable, match="neither `agenerate` nor `generate`"):
        asyncio.run(collect_proposals(object(), [], {}, pii=MemoryPIIFilter()))


def test_a_proposer_that_fails_is_asked_again_and_then_given_up():
    class Fails:
        calls = 0

        def generate(self, prompt):
            self.calls += 1
            raise RuntimeError("the secret zebra")

    proposer = Fails()
    with pytest.raises(ProposerUnavailable, match="RuntimeError") as caught:
        asyncio.run(collect_proposals(proposer, parse_transcript("user: hi"), {}, pii=MemoryPIIFilter(), backoff=0))
    assert proposer.calls == 3
    assert "zebra" not in str(caught.value)


@pytest.mark.parametrize(
    "wrap",
    ["{}", "```json\n{}\n```", "Here it is:\n```\n{}\n```\nDone.", " \n{}\n"],
    ids=["bare", "fence", "prose", "space"],
)
@pytest.mark.parametrize("form", ["list", "object", "single"])
def test_every_usual_form_of_an_answer_is_read(wrap, form):
    value = {"list": [SEED], "object": {"proposals": [SEED]}, "single": SEED}[form]
    report = asyncio.run(collect(wrap.format(json.dumps(value)), "user: Use pytest always"))
    assert len(report.proposals) == 1


def test_without_evidence_only_where_it_is_waived_and_no_speaker_is_named():
    unfound = {**SEED, "evidence": "user said one"}
    waived = asyncio.run(collect([unfound], "user chatted about pytest", require_evidence=False))
    assert [one.evidence[0].message_index for one in waived.proposals] == [-1]
    assert waived.proposals[0].untrusted is None
    for transcript, waive in (("user chatted about pytest", True), ("user: chatted about pytest", False)):
        assert asyncio.run(collect([unfound], transcript, require_evidence=waive)).proposals == []
    assert asyncio.run(collect([{**SEED, "evidence": []}], "about pytest", require_evidence=False)).proposals == []


def test_a_value_of_the_session_is_found_without_the_words_that_gave_it_away():
    fact = {
        **SEED,
        "fact_key": "reach_5326543210",
        "proposed_addition": "- Use pytest, or 5326543210.",
        "evidence": "Use pytest",
    }
    (proposal,) = asyncio.run(collect([fact], "user: Use pytest or my phone number 5326543210")).proposals
    assert proposal.fact_key == "reach_[REDACTED_PHONE]"
    assert proposal.content == "- Use pytest, or [REDACTED_PHONE]."
    assert proposal.redactions == {"phone": 2}


def test_a_plain_word_that_was_a_password_stays_a_word():
    transcript = 'user: Use pytest always, password: "pytest"'
    assert asyncio.run(collect([SEED], transcript)).proposals[0].content == SEED["proposed_addition"]
