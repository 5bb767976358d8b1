"""A person's signed decision about one change of memory, as its envelope keeps it (`metadata.living_memory`), and whether it holds.

He signs who, which patch, which block and when in the clear, and the hashes of the content as one hash with a nonce. So the signature
can be checked from the envelope alone; also where salts keep bare hashes out of a ledger, which then has neither these nor the nonce.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from phionyx_letta._canonical import JSON_ERRORS, encode
from phionyx_letta.signing import UNSIGNED, Signs

__all__ = ["Reviewers", "decide", "decision_in", "fault_in", "kept", "signed_text"]

_PURPOSE = "phionyx-letta/living-memory-claim/v2"
_HASHES = ("patch", "expected", "wrote", "nonce")
"""What is signed as one hash: of the patch, of the text before and after, and what keeps them from being guessed."""
_CONTENT, _SIGNATURE = "content", "signature"


class Reviewers(Protocol):
    """Whose decisions count; see `memory.policy.Policy`."""

    def signed_as(self, name: str, signed: str, signature: str) -> bool:
        """Return whether a key of the reviewer of this name made the signature; never raise."""
        ...


def decide(
    cause: Mapping[str, Any], block_id: str, expected: str, wrote: str, signer: Signs, key_id: str | None
) -> dict[str, Any]:
    """Return the decision, signed where there is a key.

    Args:
        cause: what is said of the patch, JSON; see `memory.recording.cause`.
        block_id: what is written.
        expected: content hash of what it holds.
        wrote: content hash of what it will hold.
        signer: the reviewer's.
        key_id: the name of his key.
    """
    claim = {
        **cause,
        "block_id": block_id,
        "expected": expected,
        "wrote": wrote,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "nonce": secrets.token_hex(16),
        "key_id": key_id,
    }
    signature = signer.sign(signed_text(claim))
    return claim if signature == UNSIGNED else {**claim, _SIGNATURE: signature}


def signed_text(claim: Mapping[str, Any], *, content: object = None) -> str:
    """Return what the reviewer signs of a decision.

    Args:
        claim: it; a member `content` of its own never counts, or a signature would be good for any text.
        content: the hash over its hashes, where a salted ledger keeps that in their place.

    Raises:
        TypeError, ValueError, RecursionError, OverflowError: it is not JSON.
    """
    clear = {name: value for name, value in claim.items() if name not in (*_HASHES, _SIGNATURE, _CONTENT)}
    return _digest({**clear, _CONTENT: _content(claim) if content is None else content})


def kept(claim: Mapping[str, Any], *, salted: bool) -> dict[str, Any]:
    """Return what the envelope keeps of a decision: not the hashes that its diff has, and in a salted ledger no bare hash at all."""
    dropped = _HASHES if salted else ("expected", "wrote")
    found = {name: value for name, value in claim.items() if name not in dropped}
    if salted and _SIGNATURE in claim:
        found[_CONTENT] = _content(claim)
    return found


def decision_in(envelope: object) -> dict[str, Any] | None:
    """Return what an envelope says of the patch or the person behind it; None where it names neither."""
    try:
        said = envelope["subject"]["metadata"]["living_memory"]  # type: ignore[index]
    except (KeyError, TypeError, IndexError):
        return None
    return said if isinstance(said, dict) and ("reviewer" in said or "patch_id" in said) else None


def fault_in(envelope: Mapping[str, Any], said: Mapping[str, Any], reviewers: Reviewers) -> str | None:
    """Return why the decision is not that of the reviewer it names about this very change, or None.

    Args:
        envelope: of the right shape.
        said: of `decision_in`.
        reviewers: whose decisions count.
    """
    mutation = envelope["mutation"]
    name, signature = said.get("reviewer"), said.get(_SIGNATURE)
    if not isinstance(name, str) or not isinstance(signature, str):
        return "a change by a patch that no reviewer has signed"
    if said.get("block_id") != mutation["block_id"]:
        return "the reviewer decided about another block"
    salted = mutation["diff"].get("commitment", "sha256") != "sha256"
    claim = {**said, "expected": mutation["diff"]["before_hash"], "wrote": mutation["diff"]["after_hash"]}
    try:
        signed = signed_text(claim, content=said.get(_CONTENT) if salted else None)
    except JSON_ERRORS:
        return "what the reviewer signed is not JSON"
    if not reviewers.signed_as(name, signed, signature):
        return "no key of the reviewer it names has signed this change"
    return None


def _content(claim: Mapping[str, Any]) -> str:
    return _digest({name: claim.get(name) for name in _HASHES})


def _digest(value: Mapping[str, Any]) -> str:
    return "sha256:" + hashlib.sha256(f"{_PURPOSE}\n{encode(dict(value))}".encode("ascii")).hexdigest()
