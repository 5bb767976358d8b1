"""What an act requires of a patch and its target, what it would write, and whether a run that was cut short wrote it already.

Nothing is read or written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phionyx_letta.diff import MemoryDiff, compute_memory_diff, content_hash
from phionyx_letta.errors import IllegalTransition, InvalidMutation
from phionyx_letta.memory.merging import merge, reverse_merge, same_but_whitespace
from phionyx_letta.memory.patches import MemoryPatch

__all__ = [
    "Change",
    "announced",
    "applicable",
    "applied_already",
    "changed_at",
    "left_behind",
    "require",
    "reverted_already",
]


@dataclass(frozen=True)
class Change:
    """What an act does to its target, without the text; it is in the log before the target is written."""

    kind: str
    """`append`, `write` or `clear`, by content (design, decision 4)."""
    diff: MemoryDiff

    @classmethod
    def between(cls, before: str, after: str) -> Change:
        """Compare two texts."""
        kind = "clear" if before and not after else "append" if before and after.startswith(before) else "write"
        return cls(kind, compute_memory_diff(before, after))

    def details(self) -> dict[str, Any]:
        """Return it as the details of a step of the history."""
        diff = self.diff.to_dict()
        return {"writes": diff["after_hash"], "over": diff["before_hash"], "kind": self.kind, "diff": diff}


def announced(patch: MemoryPatch) -> Change | None:
    """Return what the newest step says is about to be written, or None."""
    details = _last_details(patch)
    try:
        return Change(str(details["kind"]), MemoryDiff(**details["diff"]))
    except (KeyError, TypeError, InvalidMutation):
        return None


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
    if same_but_whitespace(patch.before_content, current):
        return merge(patch.before_content, patch.after_content, current)
    return None


def applied_already(patch: MemoryPatch, current: str) -> bool:
    """Whether an `apply` that was announced, and cut short, wrote its text; a person may have edited the target since."""
    change, found = announced(patch), content_hash(current)
    if patch.status != "approved" or change is None or found == change.diff.before_hash:
        return False
    if found == change.diff.after_hash:
        return True
    without = reverse_merge(patch.before_content, patch.after_content, current)
    return without is not None and without != current


def reverted_already(patch: MemoryPatch, current: str) -> bool:
    """Whether a `revert` that was announced, and cut short, wrote its text; a person may have edited the target since."""
    change, found = announced(patch), content_hash(current)
    if patch.status != "applied" or change is None or found == change.diff.before_hash:
        return False
    if found == change.diff.after_hash:
        return True
    without = reverse_merge(patch.before_content, patch.after_content, current)
    if without is not None:
        return without == current
    before, after, now = (_stripped(text) for text in (patch.before_content, patch.after_content, current))
    added, removed = after - before, before - after
    return bool(added or removed) and not added & now and removed <= now


def left_behind(patch: MemoryPatch) -> set[str]:
    """Return the hashes of the texts the newest step speaks of: what it wrote, or is about to write, and over what."""
    details = _last_details(patch)
    return {str(details[name]) for name in ("wrote", "writes", "over") if name in details}


def _last_details(patch: MemoryPatch) -> Mapping[str, Any]:
    details = patch.history[-1].get("details") if patch.history else None
    return details if isinstance(details, dict) else {}


def _stripped(text: str) -> set[str]:
    return {line.strip() for line in text.split("\n")} - {""}


def changed_at(patch: MemoryPatch) -> str:
    """Return when the patch last changed its target."""
    return patch.reverted_at or patch.applied_at or ""
