"""Living Memory from a session to a reverted patch, on files: propose, review, apply, edit by hand, revert, verify.

python examples/living_memory.py

The proposer here is a stand-in that always says the same; `OpenAIProposer(model=…, base_url=…)` asks a real model.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

from phionyx_letta import Ed25519Signer, FilesystemEnvelopeStore, verify_chain
from phionyx_letta.memory import LivingMemory

SAID = "I always deploy with uv, never poetry."


class StandIn:
    """Answers as a model would: facts, each with the words it rests on."""

    def generate(self, prompt: str) -> str:
        fact = {
            "fact_key": "deploy_tool_uv",
            "content": "- Deploys with uv, never poetry.",
            "section": "Preferences",
            "rationale": "The user states a lasting preference.",
            "evidence": [SAID],
        }
        return json.dumps({"proposals": [fact]})


async def main(folder: Path) -> None:
    notes = folder / "CLAUDE.md"
    notes.write_text("# Project\n\n## Preferences\n\n- Short answers.\n")
    signer = Ed25519Signer("07" * 32)  # a key of 64 hex digits; use `phionyx-letta keygen` for a real one
    evidence = FilesystemEnvelopeStore(folder / "audit")
    memory = LivingMemory(
        paths=[str(folder / "*.md")],
        proposer=StandIn(),
        occurrence_threshold=2,
        store_path=str(folder / "patches.jsonl"),
        occurrence_path=str(folder / "occurrences.json"),
        signer=signer,
        envelopes=evidence,
    )

    for session in ("sess-41", "sess-42"):
        patches = await memory.propose_from_session(session, transcript=f"user: {SAID}\nassistant: Noted.")
        print(f"{session}: {len(patches)} patch(es) proposed")

    for patch in memory.pending_patches():
        review = memory.review(patch)
        print(
            f"\n{review['diff']}\nwhy: {review['rationale']}\nsaid: {review['evidence'][0]}\nsigned: {review['signature']}"
        )
        memory.apply(patch, by="ada", reason="that is so")

    notes.write_text(notes.read_text() + "- Tests first.\n")  # a person goes on editing
    memory.revert(memory.patch_history(status="applied")[0].patch_id, by="ada")
    print("\nafter the revert:\n\n" + notes.read_text())

    report = verify_chain(evidence.iter_chain(f"file:{notes.resolve()}"), verifier=signer.verifier())
    print(f"{report['checked']} envelopes: valid = {report['valid']}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="phionyx-example-") as made:
        asyncio.run(main(Path(made)))
