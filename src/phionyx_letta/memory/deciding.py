"""What an act requires of a patch and its target, and what it would write. Nothing is read or written here."""

from __future__ import annotations

from typing import Any

from phionyx_letta.diff import content_hash
from phionyx_letta.errors import IllegalTransition
from phionyx_letta.memory.merging import merge, same_but_whitespace
from phionyx_letta.memory.patches import MemoryPatch

__all__ = ["applicable", "changed_at", "last_detail", "require"]


def require(patch: MemoryPatch, act: str, statuses: tuple[str, ...]) -> None:
    """Refuse an act that the patch's status does not allow.

    Raises:
        IllegalTransition: in the seed's words.
    """
    if patch.status not in statuses:
        raise IllegalTransition(
            f"Patch {patch.patch_id} has status '{patch.status}', cannot {act}.",
            f"only {' or '.join(statuses)} patches can",
        )


def applicable(patch: MemoryPatch, current: str | None) -> str | None:
    """Return the text to write, or None where the target has diverged (`current` is None where it does not exist)."""
    if current is None:
        return None if patch.before_content else patch.after_content
    if current == patch.before_content:
        return patch.after_content
    if patch.status == "approved" and last_detail(patch, "writes") == content_hash(current):
        return current  # written by a run that was cut short before it could say so
    if same_but_whitespace(patch.before_content, current):
        return merge(patch.before_content, patch.after_content, current)
    return None


def last_detail(patch: MemoryPatch, name: str) -> Any:
    """Return what the newest step of the history noted under this name, or None."""
    details = patch.history[-1].get("details") if patch.history else None
    return details.get(name) if isinstance(details, dict) else None


def changed_at(patch: MemoryPatch) -> str:
    """Return when the patch last changed its target."""
    return patch.reverted_at or patch.applied_at or ""
