"""What is proposed once more: the patch that waits for it already is as good as another one."""

from __future__ import annotations

from phionyx_letta.errors import TargetRefused, UntrustedPatch
from phionyx_letta.memory.patches import MemoryPatch, check_trust
from phionyx_letta.memory.stored import Patches
from phionyx_letta.signing import Verifier

__all__ = ["MOST_PENDING", "pending_twin", "save_once"]

#: So many patches of one target may wait: nobody reviews more, and each is compared with what is proposed next.
MOST_PENDING = 100


def pending_twin(patch: MemoryPatch, store: Patches, verifier: Verifier | None) -> MemoryPatch | None:
    """Return the pending patch that makes the same text of the same text of the same target, or None.

    One that does not verify is none: whoever forged it could have everything else taken for proposed. The caller holds the store.
    """
    for summary in store.summaries("pending"):
        if summary.file_path != patch.file_path or (found := store.get(summary.patch_id)) is None:
            continue
        if (found.before_content, found.after_content) == (patch.before_content, patch.after_content):
            try:
                check_trust(found, verifier)
            except UntrustedPatch:
                continue
            return found
    return None


def save_once(patch: MemoryPatch, store: Patches, verifier: Verifier | None) -> MemoryPatch:
    """Store a pending patch, or return the one that waits for the same already.

    Raises:
        StoreError: the store cannot be written.
        TargetRefused: `MOST_PENDING` patches of its target wait already.
    """
    with store.exclusive():
        twin = pending_twin(patch, store, verifier)
        if twin is not None:
            return twin
        if sum(one.file_path == patch.file_path for one in store.summaries("pending")) >= MOST_PENDING:
            raise TargetRefused(
                f"nothing was written: {MOST_PENDING} changes of {patch.file_path} wait for review already",
                "try it again when a person has decided about some of them",
            )
        return store.save(patch)
