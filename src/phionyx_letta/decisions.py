"""A person's signed decision about one change of memory, as its envelope keeps it (`metadata.living_memory`), and whether it holds.

He signs who, which patch, which block and when in the clear, and the hashes of the content as one hash with a nonce. So the signature
can be checked from the envelope alone; also where salts keep bare hashes out of a ledger, which then has neither these nor the nonce.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from phionyx_letta._canonical import JSON_ERRORS, encode
from phionyx_letta.signing import UNSIGNED, Signs

__all__ = ["FRESH", "Reviewers", "decide", "decision_in", "fault_in", "is_salted", "kept", "signed_text"]

FRESH = timedelta(minutes=5)
"""How old a decision may be when it is acted on, and how far two clocks may differ."""
_PURPOSE = "phionyx-letta/living-memory-claim/v2"
_WRITING = timedelta(minutes=1)
"""How long the request that brought a decision may take until it writes."""
_HASHES = ("patch", "expected", "wrote", "nonce")
"""What is signed as one hash: of the patch, of the text before and after, and what keeps them from being guessed."""
_CONTENT, _SIGNATURE = "content", "signature"


class Reviewers(Protocol):
    """Whose decisions count; see `memory.policy.Policy`."""

    def signed_as(self, name: str, signed: str, signature: str, *, label: str | None = None) -> bool:
        """Return whether a key of the reviewer of this name, and of blocks of this label, made the signature; never raise."""
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


def is_salted(envelope: Mapping[str, Any]) -> bool:
    """Whether its hashes are salted: then nobody without the salt can check which text a decision is about."""
    return bool(envelope["mutation"]["diff"].get("commitment", "sha256") != "sha256")


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
    salted = is_salted(envelope)
    if salted and not _names_salt(envelope["subject"]):
        return "its hashes are called salted, and no salt is named: nobody can say what the reviewer decided about"
    if not _in_time(said.get("at"), envelope["subject"]["timestamp_utc"]):
        return f"the reviewer did not decide within {FRESH // timedelta(minutes=1)} minutes of this change"
    claim = {**said, "expected": mutation["diff"]["before_hash"], "wrote": mutation["diff"]["after_hash"]}
    try:
        signed = signed_text(claim, content=said.get(_CONTENT) if salted else None)
    except JSON_ERRORS:
        return "what the reviewer signed is not JSON"
    if not reviewers.signed_as(name, signed, signature):
        return "no key of the reviewer it names has signed this change"
    block = not mutation["block_id"].startswith("file:")  # memory files are every reviewer's
    if block and not reviewers.signed_as(name, signed, signature, label=mutation["block_label"]):
        return "what was changed is not one of that reviewer's blocks"
    return None


def _names_salt(subject: Mapping[str, Any]) -> bool:
    letta = subject["metadata"].get("letta")
    return isinstance(letta, dict) and isinstance(letta.get("salt"), str)


def _in_time(decided: object, changed: str) -> bool:
    try:
        apart = datetime.fromisoformat(changed) - datetime.fromisoformat(str(decided))
    except (TypeError, ValueError):  # no time, or one without a zone
        return False
    return abs(apart) <= FRESH + _WRITING


def _content(claim: Mapping[str, Any]) -> str:
    return _digest({name: claim.get(name) for name in _HASHES})


def _digest(value: Mapping[str, Any]) -> str:
    return "sha256:" + hashlib.sha256(f"{_PURPOSE}\n{encode(dict(value))}".encode("ascii")).hexdigest()
