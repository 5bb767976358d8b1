"""Material for the benchmarks: contexts and envelopes like those of an agent that edits its four blocks."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phionyx_letta import (
    GENESIS_HASH,
    Ed25519Signer,
    MemoryMutationContext,
    Signer,
    build_memory_envelope,
    compute_memory_diff,
    envelope_line,
)

SEED = "11" * 32
_LETTA = {
    "event": "update",
    "state_version": "1",
    "state": "sha256:" + "2a" * 32,
    "changed": ["value"],
    "agent_id": "agent-5a0e7f5c-90c9-4c31-8a55-0f3c1a52c0de",
    "agent_type": "letta_v1_agent",
    "run_id": "run-7d1f0c58-6a52-4ab4-9a1c-6f8a2bb1c0aa",
    "step_id": "step-1b6b2c7e-0f43-4ac8-b0a3-8a0f8b8f6b11",
    "tool": "core_memory_append",
    "tool_call_id": "call_0123456789abcdef",
    "actor_id": "user-00000000-0000-4000-8000-000000000000",
}


def contexts(trace_id: str, count: int, *, first: int = 0, nonces: bool = False) -> Iterator[MemoryMutationContext]:
    """Mutations that link: each block's text is replaced, `before` being what its last mutation left."""
    for place in range(first, first + count):
        block, turn = place % 4, place // 4
        yield MemoryMutationContext(
            trace_id=trace_id,
            turn_index=turn,
            producer="letta." + str(_LETTA["agent_id"]),
            block_id=f"block-{block}",
            block_label="human",
            mutation_kind="write",
            diff=compute_memory_diff(f"fact {turn - 1}" if turn else "", f"fact {turn}"),
            metadata={"letta": {**_LETTA, "nonce": secrets.token_hex(16)} if nonces else _LETTA},
        )


def envelopes(trace_id: str, count: int, signer: Signer, *, nonces: bool = False) -> Iterator[dict[str, Any]]:
    """The chain of these mutations."""
    head = GENESIS_HASH
    for place, context in enumerate(contexts(trace_id, count, nonces=nonces)):
        envelope = build_memory_envelope(
            context, previous_hash=head, package_version="0.2.0", signer=signer, position=place
        )
        head = envelope["integrity"]["current"]
        yield envelope


def write_signed_chain(path: Path, count: int) -> None:
    """One envelope a line."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="ascii") as file:
        for envelope in envelopes("agent-bench", count, Ed25519Signer(SEED)):
            file.write(envelope_line(envelope) + "\n")
    partial.rename(path)
