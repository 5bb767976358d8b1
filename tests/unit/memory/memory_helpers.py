"""A scripted proposer, and small memories in a folder, for the tests of Living Memory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from phionyx_letta.memory import LivingMemory, MemoryPatch


class Scripted:
    """A proposer that answers with what it was given, and remembers what it was asked."""

    def __init__(self, *proposals: dict[str, Any]) -> None:
        self.proposals = list(proposals)
        self.prompts: list[str] = []

    def generate(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return json.dumps(self.proposals)


def fact(content: str, evidence: str = "said", **more: Any) -> dict[str, Any]:
    given = {
        "fact_key": content,
        "proposed_addition": content,
        "section": "Notes",
        "rationale": f"because: {content}",
        "evidence": evidence,
    }
    return {**given, **more}


def memory(folder: Path, *facts: dict[str, Any], **options: Any) -> LivingMemory:
    """A memory of the Markdown files of a folder, where one session is enough for a fact."""
    given: dict[str, Any] = {
        "paths": [str(folder / "*.md")],
        "proposer": Scripted(*facts),
        "occurrence_threshold": 1,
        "store_path": str(folder / "patches.jsonl"),
        "occurrence_path": str(folder / "occurrences.json"),
    }
    return LivingMemory(**{**given, **options})


SAID = "user: said, likes tea and deploys with uv"


def propose(living: LivingMemory, session: str = "s1", transcript: str = SAID) -> list[MemoryPatch]:
    return asyncio.run(living.propose_from_session(session, transcript=transcript))


def patch(path: Path | str = "CLAUDE.md", before: str = "a\n", after: str = "a\nb\n", **more: Any) -> MemoryPatch:
    given = {"unified_diff": "", "rationale": "why"}
    return MemoryPatch(file_path=str(path), before_content=before, after_content=after, **{**given, **more})
