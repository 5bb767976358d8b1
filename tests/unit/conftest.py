"""What the tests of the library share: contexts, chains, and the JSON Schema every envelope is checked against."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, settings

from phionyx_letta import (
    GENESIS_HASH,
    Ed25519Signer,
    Ed25519Verifier,
    MemoryMutationContext,
    build_memory_envelope,
    compute_memory_diff,
    envelope_line,
    envelope_schema,
)

SEED = "11" * 32
# CI machines are shared: slowness is not a fault of the code. Properties are timed by nobody.
settings.register_profile("unit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unit")
_validator = jsonschema.Draft202012Validator(envelope_schema())

Envelope = dict[str, Any]


@pytest.fixture(scope="session")
def signer() -> Ed25519Signer:
    return Ed25519Signer(SEED)


@pytest.fixture(scope="session")
def verifier(signer: Ed25519Signer) -> Ed25519Verifier:
    return Ed25519Verifier(signer.public_key_hex)


@pytest.fixture(scope="session")
def context() -> Callable[..., MemoryMutationContext]:
    """Make a context; every field can be given, and `before` and `after` in place of a diff."""

    def make(before: str = "old", after: str = "new", **fields: Any) -> MemoryMutationContext:
        given = {
            "trace_id": "agent-1",
            "turn_index": 0,
            "producer": "letta.agent_test",
            "block_id": "block-1",
            "block_label": "core_memory.persona",
            "mutation_kind": "write",
            "diff": compute_memory_diff(before, after),
        }
        return MemoryMutationContext(**{**given, **fields})

    return make


@pytest.fixture(scope="session")
def accords() -> Callable[[Envelope], Envelope]:
    """Check an envelope against the shipped schema and against its own JSON; return it."""

    def check(envelope: Envelope) -> Envelope:
        _validator.validate(envelope)
        assert json.loads(envelope_line(envelope)) == envelope
        return envelope

    return check


@pytest.fixture(scope="session")
def fits_schema() -> Callable[[object], bool]:
    return _validator.is_valid


@pytest.fixture(scope="session")
def chain(
    context: Callable[..., MemoryMutationContext], accords: Callable[[Envelope], Envelope]
) -> Callable[..., list[Envelope]]:
    """Make a chain whose one block grows by a character per envelope."""

    def make(signer: Any, length: int = 4, *, positions: bool = True, **fields: Any) -> list[Envelope]:
        out: list[Envelope] = []
        previous = GENESIS_HASH
        for place in range(length):
            envelope = build_memory_envelope(
                context("a" * place, "a" * (place + 1), turn_index=place, **fields),
                previous_hash=previous,
                package_version="0.2.0",
                signer=signer,
                position=place if positions else None,
            )
            out.append(accords(envelope))
            previous = envelope["integrity"]["current"]
        return out

    return make
