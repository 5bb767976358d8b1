"""What a write through Letta's REST API says of the patch behind it, signed by whoever decided.

The claim goes along in a request header. It names exactly one write: the block, the hash of what it must hold and of what it will
hold; a server armed with the plugin lets no other write pass under it, and none at all under a claim that no trusted key signed.
So an agent, or whoever else may use the API, can neither apply a patch in a reviewer's name nor overwrite what was not reviewed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from phionyx_letta._canonical import JSON_ERRORS, encode
from phionyx_letta.decisions import FRESH, decide, signed_text
from phionyx_letta.errors import UntrustedPatch
from phionyx_letta.memory.policy import Policy, Reviewer
from phionyx_letta.signing import UNSIGNED, Signer, Verifier

__all__ = ["CLAIM_HEADER", "SERVER_HEADER", "make_claim", "read_claim"]

CLAIM_HEADER = "X-Phionyx-Living-Memory"
#: With which an armed server answers a request that carries it (or a claim).
SERVER_HEADER = "X-Phionyx-Letta"
_MOST_BYTES = 16_000
_REQUIRED = ("event", "patch_id", "reviewer", "block_id", "expected", "wrote", "at", "nonce")
_OPTIONAL = ("patch", "session", "proposer_model", "runs", "evidence_messages", "untrusted", "key_id")
_KNOWN = {*_REQUIRED, *_OPTIONAL}


def make_claim(cause: Mapping[str, Any], block_id: str, expected: str, wrote: str, signer: Signer) -> str:
    """Return the header's value: the decision (`decisions.decide`) and its signature.

    Args:
        cause: of `recording.cause`.
        block_id: the block that is written.
        expected: content hash of what it holds now.
        wrote: content hash of what it will hold.
        signer: the reviewer's.
    """
    claim = decide(cause, block_id, expected, wrote, signer, signer.key_id)
    signature = str(claim.pop("signature", UNSIGNED))
    return f"{_packed(encode(claim))}.{_packed(signature)}"


def read_claim(
    header: str, verifier: Verifier | None, policy: Policy | None = None
) -> tuple[dict[str, Any], Reviewer | None]:
    """Read and check a header's value.

    Args:
        header: it.
        verifier: of the keys that count where there is no policy.
        policy: who may decide; only their keys count then.

    Returns:
        The claim with its `signature`, and the reviewer the policy knows the key of.

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
        if at.tzinfo is None or not set(claim) <= _KNOWN or encode(claim) != plain:
            raise ValueError  # in any other form the envelope could not be checked: it keeps the claim, not its text
        digest = signed_text(claim)
    except (*JSON_ERRORS, UnicodeDecodeError):
        raise UntrustedPatch(f"the header {CLAIM_HEADER} is malformed", "use `phionyx-letta memory apply`") from None
    reviewer = policy.signed_by(digest, signed) if policy is not None else None
    if policy is not None and (reviewer is None or reviewer.name != claim["reviewer"]):
        raise UntrustedPatch(
            f"no reviewer of this server has signed, in his own name, that patch {claim['patch_id'][:40]} is applied",
            "sign with a reviewer's key and `--by` his name, as PHIONYX_LETTA_REVIEWERS of the server lists them",
        )
    if policy is None and (verifier is None or not verifier.verify(digest, signed)):
        raise UntrustedPatch(
            f"no key this server trusts has signed that patch {claim['patch_id'][:40]} is applied",
            "sign with the server's key, or add the reviewer's public key to PHIONYX_LETTA_TRUSTED_KEYS of the server",
        )
    if abs(datetime.now(UTC) - at) > FRESH:
        raise UntrustedPatch(
            f"the reviewer's signature is of {claim['at']}, too long ago", "apply the patch again; compare the clocks"
        )
    return {**claim, "signature": signed}, reviewer


def _packed(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _unpacked(text: str) -> str:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode()
