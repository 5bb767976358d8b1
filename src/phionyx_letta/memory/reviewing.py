"""What a reviewer is shown of a patch: computed from what would be written, not from what the patch says of itself."""

from __future__ import annotations

from typing import Any, TypeVar

from phionyx_letta.errors import TargetRefused, UntrustedPatch
from phionyx_letta.memory.deciding import applicable
from phionyx_letta.memory.merging import FileDiffEngine
from phionyx_letta.memory.patches import MemoryPatch, check_trust
from phionyx_letta.memory.stored import HEAD
from phionyx_letta.memory.targets import Targets
from phionyx_letta.signing import Verifier, signature_algorithm

__all__ = ["described", "listed"]


def described(patch: MemoryPatch, targets: Targets, verifier: Verifier | None) -> dict[str, Any]:
    """Return a patch for review, as JSON.

    The seed's keys, and: `diff_recorded` where the diff the patch carries is not that of its content; `target` (`unchanged`,
    `whitespace`, `diverged`, `missing` or why it is refused); `signature` (its algorithm), `signature_valid` (never for an unsigned
    patch) and `signature_note`; `untrusted`, the reason not to believe it, or None; `pii`, what was redacted, by type;
    `evidence_details` with role, message and context of each quote; `history`.
    """
    diff = FileDiffEngine.generate_unified_diff(patch.before_content, patch.after_content, patch.file_path)
    algorithm = signature_algorithm(patch.signature)
    note = trust_note(patch, verifier)
    return {
        "patch_id": patch.patch_id,
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
        "signature": algorithm,
        "signature_valid": note is None and algorithm != "unsigned",
        "signature_note": note or ("nobody vouches for it" if algorithm == "unsigned" else None),
        "untrusted": str(patch.metadata["untrusted"]) if "untrusted" in patch.metadata else None,
        "pii": _of(dict, patch, "pii"),
        "history": patch.history,
    }


def listed(patch: MemoryPatch, verifier: Verifier | None) -> dict[str, Any]:
    """Return what a list shows of a patch: its summary, and in `signature_note` why it may not be acted on, or None."""
    return {**{name: getattr(patch, name) for name in HEAD}, "signature_note": trust_note(patch, verifier)}


def trust_note(patch: MemoryPatch, verifier: Verifier | None) -> str | None:
    """Return why the patch may not be acted on, or None."""
    try:
        check_trust(patch, verifier)
    except UntrustedPatch as error:
        return error.message
    return None


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
