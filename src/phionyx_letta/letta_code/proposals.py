"""Living Memory over the memories of Letta Code: patches in the ledger's database, applied as commits, recorded by the next ingest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from phionyx_letta.envelope import GENESIS_HASH
from phionyx_letta.letta_code.places import AgentMemory
from phionyx_letta.letta_code.sealing import opened_ledger
from phionyx_letta.letta_code.target import MemfsTargets
from phionyx_letta.memory import LivingMemory, MemoryPatch
from phionyx_letta.memory.opening import keys, open_store, reviewer
from phionyx_letta.memory.policy import Policy
from phionyx_letta.memory.store_sql import SqlOccurrenceTracker, SqlPatchStore
from phionyx_letta.signing import Signer, UnsignedSigner

__all__ = ["Proposals"]


class Proposals:
    """The patches of one user's agents."""

    def __init__(
        self,
        store: str,
        memories: Sequence[AgentMemory],
        signer: Signer,
        *,
        proposer: Any = None,
        threshold: int = 3,
        policy: Policy | None = None,
    ) -> None:
        """Take the patch store (a JSONL file or the ledger's URL), the memories, what signs, and who may decide.

        What one agent was told counts for no other: proposed is with the memory of one.

        Raises:
            StoreError: the store cannot be opened.
        """
        self.targets = MemfsTargets(memories, partial(_newest_envelope, store) if "://" in store else None)
        kept = open_store(store)
        occurrences = None
        if isinstance(kept, SqlPatchStore) and len(memories) == 1:
            occurrences = SqlOccurrenceTracker(kept.ledger, scope=memories[0].agent_id)
        own = getattr(signer, "verifier", None)
        _, trusted = keys(True, "", signer, None)  # other reviewers' keys too
        self.living = LivingMemory(
            [],
            proposer,
            store=kept,
            occurrences=occurrences,
            occurrence_path=None if "://" in store else f"{store}.occurrences.json",
            targets=self.targets,
            signer=signer if not isinstance(signer, UnsignedSigner) else None,
            verifier=trusted or (own() if callable(own) else None),
            policy=policy,
            occurrence_threshold=threshold,
        )

    def apply(self, patch_id: str, *, by: str | None = None, content: str | None = None) -> MemoryPatch:
        """Commit a patch; see `LivingMemory.apply` for what is raised."""
        by = by or reviewer()
        self._settle(patch_id)
        with self.targets.attributed("Apply an approved memory patch", patch=patch_id, reviewer=by):
            return self.living.apply(patch_id, by=by, content=content)

    def revert(self, patch_id: str, *, by: str | None = None) -> MemoryPatch:
        """Take a patch back by a new commit; see `LivingMemory.revert` for what is raised."""
        by = by or reviewer()
        self._settle(patch_id)
        with self.targets.attributed("Revert a memory patch", patch=patch_id, reviewer=by):
            return self.living.revert(patch_id, by=by)

    def _settle(self, patch_id: str) -> None:
        known = self.living.store.get(patch_id)
        if known is not None:
            self.targets.settle(known.file_path)


def _newest_envelope(url: str, agent: str) -> str | None:
    """The hash of an agent's newest envelope: a commit that names it was made when the ledger stood there, not before."""
    with opened_ledger(url) as ledger:
        head = ledger.head(agent)
    return None if head == GENESIS_HASH else head
