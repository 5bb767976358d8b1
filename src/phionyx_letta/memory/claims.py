"""What a write through Letta's REST API says of the patch behind it, signed by whoever decided.

The claim goes along in a request header. It names exactly one write: the block, the hash of what it must hold and of what it will
hold; a server armed with the plugin lets no other write pass under it, and none at all under a claim that no trusted key signed.
So an agent, or whoever else may use the API, can neither apply a patch in a reviewer's name nor overwrite what was not reviewed.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from phionyx_letta._canonical import JSON_ERRORS, encode
from phionyx_letta.errors import UntrustedPatch
from phionyx_letta.memory.policy import Policy, Reviewer
from phionyx_letta.signing import Signer, Verifier

__all__ = ["CLAIM_HEADER", "SERVER_HEADER", "make_claim", "read_claim"]

CLAIM_HEADER = "X-Phionyx-Living-Memory"
#: With which an armed server answers a request that carries it (or a claim).
SERVER_HEADER = "X-Phionyx-Letta"
#: How old a claim may be, and how far two clocks may differ.
FRESH = timedelta(minutes=5)
_PURPOSE = "phionyx-letta/living-memory-claim/v1"
_MOST_BYTES = 16_000
_REQUIRED = ("event", "patch_id", "reviewer", "block_id", "expected", "wrote", "at")


def make_claim(cause: Mapping[str, Any], block_id: str, expected: str, wrote: str, signer: Signer) -> str:
    """Return the header's value.

    Args:
        cause: of `recording.cause`.
        block_id: the block that is written.
        expected: content hash of what it holds now.
        wrote: content hash of what it will hold.
        signer: the reviewer's.
    """
    at = datetime.now(UTC).isoformat(timespec="seconds")
    claim = {**cause, "block_id": block_id, "expected": expected, "wrote": wrote, "at": at, "key_id": signer.key_id}
    text = encode(claim)
    return f"{_packed(text)}.{_packed(signer.sign(_digest(text)))}"


def read_claim(
    header: str, verifier: Verifier | None, policy: Policy | None = None
) -> tuple[dict[str, Any], Reviewer | None]:
    """Read and check a header's value.

    Args:
        header: it.
        verifier: of the keys that count where there is no policy.
        policy: who may decide; only their keys count then.

    Returns:
        The claim, and the reviewer the policy knows the key of.

    Raises:
        UntrustedPatch: it is malformed, too old, or not signed by a trusted key.
    """
    text, _, signature = header.partition(".")
    try:
        if len(header) > _MOST_BYTES:
            raise ValueError
        plain, signed = _unpacked(text), _unpacked(signature)
        claim = json.loads(plain)
        if not isinstance(claim, dict) or not all(isinstance(claim.get(name), str) for name in _REQUIRED):
            raise ValueError
        at = datetime.fromisoformat(claim["at"])
        if at.tzinfo is None:
            raise ValueError
    except (*JSON_ERRORS, UnicodeDecodeError):
        raise UntrustedPatch(f"the header {CLAIM_HEADER} is malformed", "use `phionyx-letta memory apply`") from None
    reviewer = policy.signed_by(_digest(plain), signed) if policy is not None else None
    if policy is not None and (reviewer is None or reviewer.name != claim["reviewer"]):
        raise UntrustedPatch(
            f"no reviewer of this server has signed, in his own name, that patch {claim['patch_id'][:40]} is applied",
            "sign with a reviewer's key and `--by` his name, as PHIONYX_LETTA_REVIEWERS of the server lists them",
        )
    if policy is None and (verifier is None or not verifier.verify(_digest(plain), signed)):
        raise UntrustedPatch(
            f"no key this server trusts has signed that patch {claim['patch_id'][:40]} is applied",
            "sign with the server's key, or add the reviewer's public key to PHIONYX_LETTA_TRUSTED_KEYS of the server",
        )
    if abs(datetime.now(UTC) - at) > FRESH:
        raise UntrustedPatch(
            f"the reviewer's signature is of {claim['at']}, too long ago", "apply the patch again; compare the clocks"
        )
    return claim, reviewer


def _digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(f"{_PURPOSE}\n{text}".encode()).hexdigest()


def _packed(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _unpacked(text: str) -> str:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode()
