"""Nothing of any positive of the labelled sets reaches a file (issue 4), whatever field it comes in."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from phionyx_letta.memory import LivingMemory

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[2] / "data"
POSITIVES = [
    (text, value)
    for name in ("pii_cases.json", "pii_generated.json", "pii_handwritten.json")
    for _, text, value in json.loads((DATA / name).read_text(encoding="utf-8"))
    if value is not None
]
SESSIONS = [POSITIVES[start : start + 60] for start in range(0, len(POSITIVES), 60)]


class Repeats:
    """A model that repeats every case in every field of a proposal, however long."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    async def agenerate(self, prompt: str) -> str:
        return json.dumps(
            [
                {
                    "fact_key": f"{text} {chr(97 + number // 26)}{chr(97 + number % 26)}"[-200:],
                    "category": text[:50],
                    "content": f"- {text}"[:4000],
                    "section": text[:200],
                    "file_path": text[:900],
                    "rationale": text[:2000],
                    "evidence": [text[:4000]],
                }
                for number, text in enumerate(self.texts)
            ]
        )


def forms(value: str) -> set[str]:
    """The value as it may stand in a file: plain, or escaped in JSON."""
    return {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}


@pytest.mark.parametrize("store", ["file", "sqlite"])
@pytest.mark.parametrize("session", range(len(SESSIONS)))
def test_no_positive_is_in_any_file_that_was_written(session, store, tmp_path, caplog):
    cases = SESSIONS[session]
    living = LivingMemory(
        paths=[str(tmp_path / "CLAUDE.md")],
        proposer=Repeats([text for text, _ in cases]),
        store_path=str(tmp_path / "patches.jsonl") if store == "file" else f"sqlite:///{tmp_path / 'ledger.db'}",
        occurrence_path=str(tmp_path / "occurrences.json"),
        occurrence_threshold=1,
        require_approval=True,
    )
    (tmp_path / "CLAUDE.md").write_text("# Memory\n", encoding="utf-8")
    records = [{"role": "user", "content": text, "id": text} for text, _ in cases]
    with caplog.at_level(logging.DEBUG, logger="phionyx_letta"):
        asyncio.run(living.propose_from_session(cases[0][0], session_records=records))
    pending = living.pending_patches()
    assert pending
    for patch in pending[:1]:
        living.apply(patch)
    written = {
        path.name: path.read_bytes().decode("utf-8", "replace") for path in tmp_path.rglob("*") if path.is_file()
    }
    assert "[REDACTED_" in "".join(written.values())
    written["the log"] = caplog.text
    leaks = [
        (name, value) for _, value in cases for name, text in written.items() if any(f in text for f in forms(value))
    ]
    assert leaks == []
