"""What a proposer's answer becomes."""

import json

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
    import asyncio

    report = asyncio.run(collect([SEED], "Use  PYTEST\nalways", {"CLAUDE.md": "# Core Memory\n"}))
    (proposal,) = report.proposals
    assert proposal.content == "- The user prefers pytest for tests."
    assert (proposal.section, proposal.file_path, proposal.untrusted) == ("Core Memory", "CLAUDE.md", None)
    assert proposal.evidence[0].message_index == 0
    assert report.seen == {"CLAUDE.md": "whole"}


def test_evidence_that_nobody_said_is_dropped_and_counted():
    import asyncio

    report = asyncio.run(collect([SEED], "user: I use unittest"))
    assert report.proposals == []
    assert [one.fact_key for one in report.dropped] == ["user_prefers_pytest"]
