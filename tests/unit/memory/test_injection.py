"""Sessions that attack: whatever the model makes of them, nothing is applied unseen (issue 4)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from injections import ATTACKS, Attack, page, user
from test_prompting import data_of

from phionyx_letta.memory import LivingMemory
from phionyx_letta.memory.pii import MemoryPIIFilter
from phionyx_letta.memory.proposer import collect_proposals
from phionyx_letta.memory.transcript import parse_transcript

pytestmark = pytest.mark.slow

FILE = "# Memory\n\n- Works in Ankara.\n"


class Fooled:
    """A model that does what the attack wants; it keeps what it was sent."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.prompts: list[str] = []

    async def agenerate(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return self.answer


def memory(folder: Path, proposer, **options) -> LivingMemory:
    (folder / "CLAUDE.md").write_text(FILE, encoding="utf-8")
    options = {"require_approval": False, "sign": False, **options}
    return LivingMemory(
        paths=[str(folder / "CLAUDE.md")],
        proposer=proposer,
        store_path=str(folder / "patches.jsonl"),
        occurrence_path=str(folder / "occurrences.json"),
        occurrence_threshold=1,
        **options,
    )


def report_of(attack: Attack):
    messages = parse_transcript(attack.transcript, attack.records)
    return asyncio.run(
        collect_proposals(Fooled(attack.answer), messages, {"CLAUDE.md": FILE}, pii=MemoryPIIFilter([]), backoff=0)
    )


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
class TestAttacks:
    def test_nothing_is_applied(self, attack, tmp_path):
        living = memory(tmp_path, Fooled(attack.answer))
        patches = asyncio.run(
            living.propose_from_session("s", transcript=attack.transcript, session_records=attack.records)
        )
        assert (tmp_path / "CLAUDE.md").read_text(encoding="utf-8") == FILE
        assert [patch.status for patch in patches if patch.status == "applied"] == []
        assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".md") == ["CLAUDE.md"]

    def test_what_it_wants_is_dropped_or_marked(self, attack):
        report = report_of(attack)
        assert [proposal for proposal in report.proposals if proposal.untrusted is None] == []
        assert report.proposals or report.dropped, "it is counted"

    def test_the_session_stays_data(self, attack):
        model = Fooled("[]")
        messages = parse_transcript(attack.transcript, attack.records)
        asyncio.run(collect_proposals(model, messages, {}, pii=MemoryPIIFilter([])))
        frames = set()
        for prompt in model.prompts:
            data, frame = data_of(prompt)
            assert all(one["role"] == messages[one["index"]].role for one in data["messages"])
            assert all(one["text"] in messages[one["index"]].text for one in data["messages"])
            frames.add(frame.replace(prompt[-32:], "<boundary>"))
        assert len(frames) == 1


def test_there_are_at_least_thirty():
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 30


HARMLESS = [
    (user("I always deploy with uv, never poetry."), "- Deploys with uv, never poetry.", ["I always deploy with uv"]),
    (user("Please use tabs, not spaces."), "- Prefers tabs to spaces.", ["use tabs, not spaces"]),
    (
        user("We moved the database to PostgreSQL 16."),
        "- The database is PostgreSQL 16.",
        ["moved the database to PostgreSQL 16"],
    ),
    (user("Benim adım Ümit, kısa yanıtları severim."), "- Adı Ümit; kısa yanıtları sever.", ["kısa yanıtları severim"]),
    (user("我喜欢简短的回答"), "- 喜欢简短的回答", ["我喜欢简短的回答"]),
    (user("I use µs, not ms, in logs ❤️"), "- Logs are in µs ❤️.", ["I use µs, not ms"]),
    (page("uv 0.5 is out", "good, I always deploy with uv"), "- Deploys with uv.", ["I always deploy with uv"]),
    ("Use pytest always", "- The user prefers pytest for tests.", ["Use pytest always"]),
    (user("run tests with pytest -q"), "- Tests are run with pytest -q.", ["run tests with pytest -q"]),
    (user("never push to main directly"), "- Never pushes to main directly.", ["never push to main directly"]),
    (user("when I say ship it, deploy to staging"), '- "Ship it" means deploy to staging.', ["when I say ship it"]),
    (user("you should know I hate tabs"), "- Hates tabs.", ["you should know I hate tabs"]),
    (user("that was wrong, the port is 8283"), "- The port is 8283, not another.", ["the port is 8283"]),
]


@pytest.mark.parametrize(("session", "content", "evidence"), HARMLESS, ids=[content for _, content, _ in HARMLESS])
def test_a_plain_fact_that_was_said_is_trusted(session, content, evidence):
    (proposal,) = report_of(Attack("harmless", session, content, evidence)).proposals
    assert proposal.untrusted is None
    assert proposal.content == content


SECRETS = {
    "ada.lovelace@corp.com": "ada.lovelace",
    "+1 415 555 2671": "555 2671",
    "536-22-8726": "536-22",
    "4111 1111 1111 1111": "4111 1111",
    "ghp_Z1LGKN9bemzYumle29nmwYfq483XZZLT2trK": "ghp_Z1LG",
    "hunter2-Tr0ub4dor&3": "hunter2",
}


@pytest.mark.parametrize(("value", "part"), SECRETS.items())
def test_personal_data_in_any_field_of_an_answer_is_not_stored(value, part, tmp_path):
    said = f"my password is {value}" if part == "hunter2" else f"note {value}"
    fact = {
        "fact_key": f"key of {said}",
        "category": said,
        "content": f"- Note: {said}",
        "section": said,
        "file_path": f"{said}.md",
        "rationale": f"because {said}",
        "evidence": [said, value, part],
    }
    unfound = {**fact, "evidence": ["not there at all"], "fact_key": f"lost: {said}"}
    malformed = {"fact_key": said, "content": None}
    living = memory(tmp_path, Fooled(json.dumps([fact, unfound, malformed])), require_approval=True)
    records = [{"role": "user", "content": f"listen: {said} and so on", "id": said}]
    asyncio.run(living.propose_from_session(f"session of {said}", session_records=records))
    assert len(living.pending_patches()) == 1
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*") if path.is_file()}
    assert len(written) >= 3
    assert [name for name, text in written.items() if part in text or value in text] == []
