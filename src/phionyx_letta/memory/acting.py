"""The parts of an act on a patch: finding it fit, saying what will be written, writing, recording, and moving the patch on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NoReturn

from phionyx_letta.diff import content_hash
from phionyx_letta.errors import DiffConflictError, IllegalTransition, PatchNotFound, TargetRefused
from phionyx_letta.memory.approval import check_decided, check_decider, check_seen
from phionyx_letta.memory.binding import check_bound
from phionyx_letta.memory.deciding import Change, announced, applied_already, changed_at, left_behind, require
from phionyx_letta.memory.opening import reviewer
from phionyx_letta.memory.patches import MemoryPatch, PatchStatus, check_trust, transition
from phionyx_letta.memory.pii import MemoryPIIFilter
from phionyx_letta.memory.policy import Policy
from phionyx_letta.memory.recording import MutationRecorder, cause
from phionyx_letta.memory.stored import Patches
from phionyx_letta.memory.targets import Target, Targets
from phionyx_letta.signing import Signer, Verifier

__all__ = ["Acting"]


class Acting:
    """What `LivingMemory` does with one patch; whoever calls is alone with its target."""

    def __init__(
        self,
        store: Patches,
        targets: Targets,
        signer: Signer,
        verifier: Verifier | None,
        *,
        policy: Policy | None,
        pii: MemoryPIIFilter,
        recorder: MutationRecorder | None,
    ) -> None:
        """Take what `LivingMemory` was made of."""
        self._store = store
        self._targets = targets
        self._signer = signer
        self._verifier = verifier
        self._policy = policy
        self._pii = pii
        self._recorder = recorder

    def alone_with(self, patch: MemoryPatch | str) -> contextlib.AbstractContextManager[None]:
        """Be alone with the target of a patch; what is found in the store before does not count."""
        return self._store.acting(self.load(patch).file_path)

    def load(self, patch: MemoryPatch | str, content: str | None = None) -> MemoryPatch:
        """Load a patch that is the one that was seen: the one in hand, and the one of this digest."""
        patch_id = patch.patch_id if isinstance(patch, MemoryPatch) else patch
        found = self._store.get(patch_id)
        if found is None:
            raise PatchNotFound(f"Patch '{patch_id}' not found.", "`phionyx-letta memory log` shows what there is")
        for seen in (patch if isinstance(patch, MemoryPatch) else None, content):
            if seen is not None:
                check_seen(found, seen)
        return found

    def trusted(
        self, patch: MemoryPatch | str, act: str, statuses: tuple[str, ...], content: str | None = None
    ) -> MemoryPatch:
        """Load a patch that verifies and whose status allows the act; a status that does not verify is no reason for anything."""
        found = self.load(patch, content)
        check_trust(found, self._verifier)
        check_decided(found, self._policy)
        check_bound(found, self._store, self._targets)
        require(found, act, statuses)
        return found

    def may_decide(self, patch: MemoryPatch, by: str | None) -> None:
        """Refuse, under a policy, a key that is no reviewer's, or whose block the target is not."""
        if self._policy is not None:
            check_decider(self._policy, self._signer, by, patch.file_path)

    def name(self, by: str | None) -> str:
        """Who decides, filtered like the reason: an address or a number does not enter what is never removed."""
        if by is None and self._policy is not None:
            holder = self._policy.holder(getattr(self._signer, "public_key_hex", None))
            by = holder.name if holder is not None else None
        return self._pii.filter_content(by or reviewer()).filtered_content

    def moved(
        self,
        patch: MemoryPatch,
        to: PatchStatus,
        by: str | None,
        reason: str,
        details: Mapping[str, Any] | None = None,
    ) -> MemoryPatch:
        """Move the patch on, signed, and store that."""
        said = self._pii.filter_content(reason).filtered_content
        transition(patch, to, by=self.name(by), reason=said, signer=self._signer, details=details)
        self._store.update(patch)
        return patch

    def require_unwritten(self, patch: MemoryPatch) -> None:
        """Refuse to give up a patch that `apply` wrote but could not record any more: the log would then explain nothing."""
        if patch.status != "approved" or announced(patch) is None:
            return
        try:
            current = self._targets.resolve(patch.file_path).read()
        except TargetRefused:
            return
        if applied_already(patch, current or ""):
            raise IllegalTransition(
                f"patch {patch.patch_id} was written already, by a run that was cut short",
                "apply it to finish that, then revert it if you do not want it",
            )

    def announce(self, target: Target, patch: MemoryPatch, change: Change, by: str | None, reason: str) -> None:
        """Say in the log what is about to be written, unless it says so already; not before its evidence has a place to go."""
        if self._recorder is not None and not target.records_itself:
            self._recorder.probe(target)
        if announced(patch) != change:
            status: PatchStatus = "applied" if patch.status == "applied" else "approved"
            self.moved(patch, status, by, reason, change.details())

    def refuse(self, patch: MemoryPatch, current: str | None, by: str | None, remedy: str = "") -> NoReturn:
        """Make the patch a conflict, and say so."""
        found = content_hash(current) if current is not None else ""
        remedy = remedy or f"`rebase {patch.patch_id}` offers a merge, if there is one"
        error = DiffConflictError(patch.file_path, content_hash(patch.before_content), found, remedy)
        if patch.status != "conflict":
            self.moved(patch, "conflict", by, error.message, {"expected": error.expected_hash, "found": found})
        raise error

    def write(
        self, target: Target, patch: MemoryPatch, current: str | None, text: str, event: str, by: str | None
    ) -> str | None:
        """Write the target; where it holds something else by now, the patch is a conflict."""
        if text == current:
            return None
        try:
            return target.write(current, text, cause(patch, event, self.name(by)))
        except DiffConflictError:
            if patch.status == "approved":
                self.refuse(patch, target.read(), by)
            raise

    def record(
        self,
        target: Target,
        patch: MemoryPatch,
        change: Change,
        event: str,
        by: str | None,
        found: str | None = None,
    ) -> str | None:
        """Leave the evidence, where the target does not itself."""
        if self._recorder is None or target.records_itself:
            return None
        return self._recorder.record(target, change, patch, event, self.name(by), found=found)

    def only_patches_wrote(self, patch: MemoryPatch, current: str) -> bool:
        """Whether `current` is what a patch left behind, or what this patch's session found: no person's edit in between."""
        wanted = content_hash(current)
        if wanted == patch.metadata.get("found"):
            return True
        done = [one for status in ("applied", "reverted") for one in self._store.list_by_status(status)]
        last = max((one for one in done if one.file_path == patch.file_path), key=changed_at, default=None)
        return last is not None and wanted in left_behind(last)
