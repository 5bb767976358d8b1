"""What a reviewer is shown of a patch: computed from what would be written, not from what the patch says of itself."""

from __future__ import annotations

from typing import Any, TypeVar

from phionyx_letta.errors import TargetRefused, UntrustedPatch
from phionyx_letta.memory.approval import check_decided
from phionyx_letta.memory.binding import BOUND, check_bound
from phionyx_letta.memory.deciding import applicable
from phionyx_letta.memory.merging import FileDiffEngine
from phionyx_letta.memory.patches import MemoryPatch, check_trust, content_digest
from phionyx_letta.memory.policy import Policy
from phionyx_letta.memory.stored import HEAD, Patches
from phionyx_letta.memory.targets import Targets
from phionyx_letta.signing import Verifier, signature_algorithm

__all__ = ["described", "last_envelope", "listed"]


def described(
    patch: MemoryPatch,
    targets: Targets,
    verifier: Verifier | None,
    store: Patches,
    policy: Policy | None = None,
) -> dict[str, Any]:
    """Return a patch for review, as JSON.

    The seed's keys, and: `content`, the digest of all that is decided about, for `approve` and `apply`;
    `diff_recorded` where the diff the patch carries is not that of its content; `target` (`unchanged`,
    `whitespace`, `diverged`, `missing` or why it is refused) and `target_notes`; `over_limit`, what does not fit and what to
    trim; `proposed_from`, the agent, session and model; `envelope` of the last write; `signature` (its algorithm),
    `signature_valid` (never for an unsigned patch) and `signature_note`; `bound_to`, the store and the target it was made for, or
    None; `file_seen`, the part of the file that the model was shown, or None for all of it; `untrusted`, the reason not to believe
    it, or None; `pii`, what was redacted, by type; `evidence_details` with role, message and context of each quote; `history`.
    """
    diff = FileDiffEngine.generate_unified_diff(patch.before_content, patch.after_content, patch.file_path)
    algorithm = signature_algorithm(patch.signature)
    note = trust_note(patch, verifier, store, targets, policy)
    return {
        "patch_id": patch.patch_id,
        "content": content_digest(patch),
        "file_path": patch.file_path,
        "status": patch.status,
        "rationale": patch.rationale,
        "evidence": list(patch.evidence_refs),
        "evidence_details": [one for one in _of(list, patch, "evidence") if isinstance(one, dict)],
        "category": patch.category,
        "section": _of(str, patch, "section") or None,
        "fact_key": _of(str, patch, "fact_key") or None,
        "session_id": patch.session_id,
        "author": patch.author,
        "diff": diff,
        "diff_recorded": patch.unified_diff if patch.unified_diff != diff else None,
        "stats": FileDiffEngine.count_changed_lines(diff),
        "created_at": patch.created_at,
        "applied_at": patch.applied_at,
        "reverted_at": patch.reverted_at,
        "target": target_state(patch, targets),
        "target_notes": target_notes(patch, targets),
        "over_limit": _of(dict, patch, "over_limit"),
        "proposed_from": _of(dict, patch, "proposed_from"),
        "envelope": last_envelope(patch),
        "signature": algorithm,
        "signature_valid": note is None and algorithm != "unsigned",
        "signature_note": note or ("nobody vouches for it" if algorithm == "unsigned" else None),
        "bound_to": _of(dict, patch, BOUND) or None,
        "file_seen": _of(str, patch, "file_seen") or None,
        "untrusted": str(patch.metadata["untrusted"]) if "untrusted" in patch.metadata else None,
        "pii": _of(dict, patch, "pii"),
        "history": patch.history,
    }


def listed(
    patch: MemoryPatch, verifier: Verifier | None, store: Patches, targets: Targets, policy: Policy | None = None
) -> dict[str, Any]:
    """Return what a list shows of a patch: its summary, its digest, and in `signature_note` why it may not be acted on, or None."""
    return {
        **{name: getattr(patch, name) for name in HEAD},
        "content": content_digest(patch),
        "signature_note": trust_note(patch, verifier, store, targets, policy),
    }


def trust_note(
    patch: MemoryPatch, verifier: Verifier | None, store: Patches, targets: Targets, policy: Policy | None
) -> str | None:
    """Return why the patch may not be acted on, or None."""
    try:
        check_trust(patch, verifier)
        check_decided(patch, policy)
        check_bound(patch, store, targets)
    except UntrustedPatch as error:
        return error.message
    return None


def last_envelope(patch: MemoryPatch) -> str | None:
    """Return the reference of the envelope of the patch's last write, where it is known."""
    return next((one for step in patch.history[::-1] if (one := _envelope(step))), None)


def _envelope(step: dict[str, Any]) -> str | None:
    details = step.get("details")
    found = details.get("envelope") if isinstance(details, dict) else None
    return found if isinstance(found, str) else None


def target_notes(patch: MemoryPatch, targets: Targets) -> list[str]:
    """Return what else is to be known of the target; nothing where it is not to be had."""
    try:
        return targets.resolve(patch.file_path).notes()
    except TargetRefused:
        return []


def target_state(patch: MemoryPatch, targets: Targets) -> str:
    """Return how the target stands to what the patch was made for."""
    try:
        current = targets.resolve(patch.file_path).read()
    except TargetRefused as error:
        return error.message
    if current is None:
        return "missing" if patch.before_content else "unchanged"
    if current == patch.before_content:
        return "unchanged"
    return "whitespace" if applicable(patch, current) is not None else "diverged"


_T = TypeVar("_T", str, list[Any], dict[str, Any])


def _of(kind: type[_T], patch: MemoryPatch, name: str) -> _T:
    """A value of the metadata, or an empty one where somebody put something else there."""
    value = patch.metadata.get(name)
    return value if isinstance(value, kind) else kind()
