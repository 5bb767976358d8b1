"""Whether a person decides about what he saw, and whether those who decided are reviewers of the policy, where there is one.

The digest of a patch (`patches.content_digest`) stands for what was reviewed. Under a policy the steps that let a patch through are
signed by a reviewer's key, in that reviewer's name: a server's key proposes, and decides nothing.
"""

from __future__ import annotations

import re

from phionyx_letta.errors import PatchChanged, UntrustedPatch
from phionyx_letta.memory.blocks import PREFIX, parse_block_name
from phionyx_letta.memory.patches import CODE_SESSION, MemoryPatch, content_digest
from phionyx_letta.memory.policy import Policy
from phionyx_letta.signing import Signer

__all__ = ["check_decided", "check_decider", "check_seen"]

DECISIONS = ("approved", "applied", "reverted")
"""The steps of a history that only a reviewer may take. Nothing is let through by a rejection or a conflict."""
_SEEN = re.compile(r"(?:sha256:)?([0-9a-f]{40,64})")


def check_seen(stored: MemoryPatch, seen: MemoryPatch | str) -> None:
    """Return if the stored patch is the one that was seen.

    Args:
        stored: what would be decided about.
        seen: the patch in the caller's hands, or a digest, or 40 or more of its first hex digits: with fewer, whoever
            proposes could make two patches whose digests begin alike, and put the one in the other's place (16: 2**32 tries).

    Raises:
        PatchChanged: it is not, or this is no digest.
    """
    review = "code review" if (stored.session_id or "").startswith(CODE_SESSION) else "memory review"
    found = content_digest(stored)
    given = content_digest(seen) if isinstance(seen, MemoryPatch) else seen.strip().lower()
    match = _SEEN.fullmatch(given)
    if match is None:
        raise PatchChanged(f"{seen!r} is not the digest of a patch", f"give sha256:… as `{review} --patch-id` shows it")
    if not found.removeprefix("sha256:").startswith(match[1]):
        raise PatchChanged(
            f"patch {stored.patch_id} is not what was reviewed: {given} was seen, {found} is stored",
            f"review it again: `phionyx-letta {review} --patch-id` shows what is stored now, and its digest",
        )


def check_decided(patch: MemoryPatch, policy: Policy | None) -> None:
    """Return if each decision in the history of a patch is that of a reviewer; its signatures were checked.

    Raises:
        UntrustedPatch: one is not, or not under his name.
    """
    if policy is None:
        return
    for number, step in enumerate(patch.history, start=1):
        if step.get("to") in DECISIONS:
            who = policy.signed_by(str(step.get("hash")), str(step.get("signature")))
            if who is None or who.name != step.get("by"):
                raise UntrustedPatch(
                    f"step {number} of patch {patch.patch_id} says that {step.get('by')} decided, and no reviewer of that name "
                    "has signed it",
                    "reject it and propose it again; a policy that has changed since has to keep its former reviewers' keys",
                )
    if patch.status in DECISIONS and not patch.history:
        raise UntrustedPatch(f"nobody has signed that patch {patch.patch_id} is {patch.status}", "reject it")


def check_decider(policy: Policy, signer: Signer, by: str | None, target: str) -> None:
    """Return if the key that signs is a reviewer's: his who is said to decide, where somebody is, and whose block the target is.

    A block counts by the label it was proposed under; the server that is written to looks at the present one. Memory files are
    every reviewer's.

    Raises:
        UntrustedPatch: the key is no reviewer's, or another's than of whoever is said to decide, or the block is not his.
    """
    who = policy.holder(getattr(signer, "public_key_hex", None))
    if who is None:
        raise UntrustedPatch(
            "the key that signs here is no reviewer's of the approval policy",
            "sign with a reviewer's key: set PHIONYX_LETTA_SIGNING_KEY to it",
        )
    if by not in (None, who.name):
        raise UntrustedPatch(
            f"the key that signs here is {who.name}'s, not {by}'s", f"leave out --by, or give {who.name}"
        )
    if target.startswith(PREFIX) and not who.may_write(label := parse_block_name(target).label):
        raise UntrustedPatch(
            f"{who.name} may not decide about blocks called {label}", "have a reviewer decide whose blocks they are"
        )
