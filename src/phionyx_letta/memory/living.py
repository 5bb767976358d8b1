"""`LivingMemory`: the second seed's front door. Sessions become patches; people approve, reject, apply, rebase and revert them.

Nothing is written to a memory file but by `apply` and `revert`, and never over what the patch was not made for. Every act is alone
with its target, so of two processes that act on one patch one finds it already done; the store stays free meanwhile. What an act is
about to write is in the log before it is written: one that was cut short is finished by doing it again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from phionyx_letta.diff import content_hash
from phionyx_letta.errors import (
    DiffConflictError,
    IllegalTransition,
    InvalidPatch,
    TargetRefused,
    UntrustedPatch,
)
from phionyx_letta.ledger.store import EnvelopeStore
from phionyx_letta.memory.acting import Acting
from phionyx_letta.memory.deciding import (
    Change,
    announced,
    applicable,
    applied_already,
    require,
    reverted_already,
)
from phionyx_letta.memory.managed import ManagedFiles
from phionyx_letta.memory.merging import merge, reverse_merge
from phionyx_letta.memory.occurrences import Occurrences
from phionyx_letta.memory.opening import (
    OCCURRENCE_PATH,
    STORE_PATH,
    keys,
    open_kept,
    open_occurrences,
    open_store,
)
from phionyx_letta.memory.patches import HISTORY, MemoryPatch, PatchStatus, check_trust
from phionyx_letta.memory.pii import MemoryPIIFilter
from phionyx_letta.memory.policy import Policy
from phionyx_letta.memory.proposing import Found, Proposing, placed_again
from phionyx_letta.memory.recording import MutationRecorder
from phionyx_letta.memory.reviewing import described
from phionyx_letta.memory.routing import MemoryFileRouter
from phionyx_letta.memory.stored import Patches
from phionyx_letta.memory.targets import Targets
from phionyx_letta.signing import Signer, Verifier

__all__ = ["LivingMemory"]

_log = logging.getLogger(__name__)


class LivingMemory:
    """Manages memory files as reviewed, signed, revertible patches."""

    def __init__(
        self,
        paths: Iterable[str],
        proposer: Any = None,
        *,
        require_approval: bool = True,
        sign: bool = True,
        signature_secret: str = "",
        store_path: str = STORE_PATH,
        occurrence_path: str | None = OCCURRENCE_PATH,
        occurrence_threshold: int = 3,
        pii_filter: MemoryPIIFilter | None = None,
        file_router: MemoryFileRouter | None = None,
        store: Patches | None = None,
        occurrences: Occurrences | None = None,
        targets: Targets | None = None,
        envelopes: EnvelopeStore | None = None,
        signer: Signer | None = None,
        verifier: Verifier | None = None,
        policy: Policy | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        """Take the managed files, the proposer and where things are kept; nothing is read or written yet.

        Args:
            paths: files and globs (`**` for any depth); nothing outside them is ever written.
            proposer: an object with `agenerate(prompt)` or `generate(prompt)`; None for one that only reviews.
            require_approval: False applies what is proposed at once, except what is marked untrusted.
            sign: False leaves patches unsigned.
            signature_secret: for HMAC-SHA256. Without it the key of PHIONYX_LETTA_SIGNING_KEY signs (Ed25519); without that too,
                patches say `unsigned`.
            store_path: the JSONL file of patches, or a database URL.
            occurrence_path: the JSON file of occurrences; None keeps them in memory. With a database they live there.
            occurrence_threshold: in how many distinct sessions a fact must be seen before it is proposed.
            pii_filter: sees everything new before it is stored or sent.
            file_router: chooses the file of a fact.
            store, occurrences, targets: in place of what the paths give.
            envelopes: where each applied or reverted patch leaves its evidence.
            provenance: where the sessions come from, as JSON; each patch proposed keeps it (`metadata["proposed_from"]`).
            signer, verifier: in place of what the secret or the environment gives; a verifier may trust several keys.
            policy: who may decide; their keys are trusted too, approval is required, and no other key approves, applies or reverts.

        Raises:
            SigningKeyError: the configured key is missing or malformed.
            TargetRefused: a path cannot be one.
        """
        self.proposer = proposer
        self.require_approval = require_approval or policy is not None
        self.signer, self.verifier = keys(sign, signature_secret, signer, verifier)
        self.policy = policy
        if policy is not None:
            self.verifier = policy.trusting(self.verifier)
        self.store: Patches = store or open_store(store_path)
        self.pii = pii_filter or MemoryPIIFilter()
        self.router = file_router or MemoryFileRouter()
        new_files = list(self.router.path_map.values()) if self.router.allow_new_files else []
        self.targets: Targets = targets or ManagedFiles([*paths, *new_files])
        self.envelopes = envelopes
        self._recorder = MutationRecorder(envelopes, self.signer) if envelopes is not None else None
        self._act = Acting(
            self.store, self.targets, self.signer, self.verifier, policy=policy, pii=self.pii, recorder=self._recorder
        )
        self._proposing = Proposing(
            targets=self.targets,
            store=self.store,
            occurrences=occurrences or open_occurrences(self.store, occurrence_path),
            threshold=occurrence_threshold,
            pii=self.pii,
            router=self.router,
            signer=self.signer,
            verifier=self.verifier,
            evidence_required=require_approval or sign,
            kept=open_kept(self.store, self.pii),
            provenance=provenance,
        )

    # -- asking --------------------------------------------------------------------------------------------------

    def pending_patches(self) -> list[MemoryPatch]:
        """Return the patches that wait for a decision, oldest first."""
        return self.store.pending_patches()

    def patch_history(self, *, status: PatchStatus | None = None, limit: int | None = None) -> list[MemoryPatch]:
        """Return patches in this status, or all; the newest `limit` of them, oldest first."""
        return self.store.list_by_status(status, limit=limit)

    def review(self, patch: MemoryPatch | str) -> dict[str, Any]:
        """Return all that a reviewer needs; see `reviewing.described` for the keys.

        Raises:
            PatchNotFound: there is no such patch.
            PatchChanged: the one in hand is not the one that is stored.
        """
        return described(self._act.load(patch), self.targets, self.verifier, self.store, self.policy)

    # -- proposing -----------------------------------------------------------------------------------------------

    async def propose_from_session(
        self,
        session_id: str,
        *,
        transcript: str | None = None,
        session_records: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[MemoryPatch]:
        """Ask the proposer about a finished session and store what it proposes as patches.

        Args:
            session_id: its id; a fact counts once for it, however often it comes up.
            transcript: the session as text, `user: …` and so on at the start of lines; or
            session_records: its messages, with role, content and perhaps an id.

        Returns:
            The new patches: pending, or applied where no approval is required. What is below the threshold is counted, not lost.

        Raises:
            InvalidPatch: there is no proposer.
            ProposerUnavailable: it gave no usable answer. Beside a store in a file the session is kept, see
                `propose_from_kept_sessions`; with a database the caller keeps it. It can be proposed again either way.
        """
        found = await self.ask_about(session_id, transcript=transcript, session_records=session_records)
        return self.keep(found, session_id)

    async def ask_about(
        self,
        session_id: str,
        *,
        transcript: str | None = None,
        session_records: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Found]:
        """The first half of `propose_from_session`: ask, and store nothing (a dry run ends here).

        Raises:
            InvalidPatch, ProposerUnavailable: as there.
        """
        if self.proposer is None:
            raise InvalidPatch("there is no proposer to ask", "pass one to LivingMemory")
        return await self._proposing.ask(self.proposer, session_id, transcript, session_records)

    def keep(self, found: Sequence[Found], session_id: str) -> list[MemoryPatch]:
        """The second half: count the facts and store those that are due as patches."""
        with self.store.exclusive():
            made = [self._proposing.patch_for(proposal, session_id) for proposal in found]
        patches = [patch for patch in made if patch is not None]
        if self.require_approval:
            return patches
        return [patch if "untrusted" in patch.metadata else self._applied_at_once(patch) for patch in patches]

    async def propose_from_kept_sessions(self) -> list[MemoryPatch]:
        """Propose from the sessions that were kept because the proposer gave no answer; each is forgotten once it did.

        Raises:
            InvalidPatch, ProposerUnavailable: as `propose_from_session`; the sessions it did not come to stay kept.
        """
        patches: list[MemoryPatch] = []
        kept = self._proposing.kept
        if kept is None:
            return patches
        for session_id, records in list(kept.all()):
            patches += await self.propose_from_session(session_id, session_records=records)
            kept.drop(session_id)
        return patches

    def _applied_at_once(self, patch: MemoryPatch) -> MemoryPatch:
        try:
            return self.apply(patch, by=patch.author, reason="no approval is required")
        except (DiffConflictError, TargetRefused) as error:  # the patch stays, and the session's others go on
            _log.warning("patch %s was not applied: %s", patch.patch_id, error)
            return self._act.load(patch)

    # -- deciding ------------------------------------------------------------------------------------------------

    def approve(
        self, patch: MemoryPatch | str, *, by: str | None = None, reason: str = "", content: str | None = None
    ) -> MemoryPatch:
        """Approve a pending patch, without applying it yet.

        Args:
            patch: it, as it was reviewed, or its id. Whatever act it is for, a patch in hand has to be the one that is stored.
            by: who decides; by default the user, or the reviewer whose key signs.
            reason: why.
            content: the digest of what was reviewed (`review()["content"]`), where only the id is at hand.

        Raises:
            PatchChanged: the stored patch is not what was reviewed.
            PatchNotFound, UntrustedPatch, IllegalTransition: it is not there, does not verify, or is not pending.
        """
        with self._act.alone_with(patch):
            found = self._act.trusted(patch, "approve", ("pending",), content)
            self._act.may_decide(found, by)
            return self._act.moved(found, "approved", by, reason)

    def reject(self, patch: MemoryPatch | str, reason: str = "", *, by: str | None = None) -> MemoryPatch:
        """Reject a patch for good: its fact is not proposed again unless it changes.

        One that does not verify can be rejected too, whatever status it claims; its fact may come up again.

        Raises:
            PatchNotFound, IllegalTransition: it is not there, or already applied, reverted or rejected.
        """
        with self._act.alone_with(patch):
            found = self._act.load(patch)
            try:
                check_trust(found, self.verifier)
            except UntrustedPatch as error:  # whatever status it claims: that may be forged too
                details = {"untrusted": error.message, "claimed": found.status}
                found.metadata = {name: value for name, value in found.metadata.items() if name != HISTORY}
                found.applied_at = found.reverted_at = None
                return self._act.moved(found, "rejected", by, reason, details)
            require(found, "reject", ("pending", "approved", "conflict"))
            self._act.require_unwritten(found)
            return self._act.moved(found, "rejected", by, reason)

    def edit(
        self, patch: MemoryPatch | str, after_content: str, *, by: str | None = None, reason: str = ""
    ) -> MemoryPatch:
        """Replace a pending patch by one with the reviewer's own text: the old one is rejected and names the new one.

        Raises:
            PatchNotFound, UntrustedPatch, IllegalTransition: it is not there, does not verify, or is not pending.
            TargetRefused: the target is not managed.
        """
        with self._act.alone_with(patch):
            found = self._act.trusted(patch, "edit", ("pending", "approved", "conflict"))
            self._act.require_unwritten(found)
            author = self._act.name(by)
            new = self._proposing.successor(found, found.before_content, after_content, "edited_from", author)
            self._act.moved(found, "rejected", by, reason or f"edited as {new.patch_id}", {"replaced_by": new.patch_id})
            return new

    def apply(
        self, patch: MemoryPatch | str, *, by: str | None = None, reason: str = "", content: str | None = None
    ) -> MemoryPatch:
        """Write a pending or approved patch to its target; applying is approving, so it takes the arguments of `approve`.

        Raises:
            PatchChanged: the stored patch is not what was reviewed.
            DiffConflictError: the target has changed by more than whitespace; the patch is now `conflict`, nothing was written.
            PatchNotFound, UntrustedPatch, IllegalTransition: it is not there, does not verify, or its status forbids it.
            TargetRefused: the target is not managed, or cannot be written without loss.
        """
        with self._act.alone_with(patch):
            found = self._act.trusted(patch, "apply", ("pending", "approved"), content)
            self._act.may_decide(found, by)
            target = self.targets.resolve(found.file_path)
            current = target.read()
            change, envelope = announced(found), None
            if change is not None and applied_already(found, current or ""):
                envelope = self._act.record(target, found, change, "apply", by, current or "")
            else:
                text = applicable(found, current)
                if text is None:
                    self._act.refuse(found, current, by)
                change = Change.between(current or "", text)
                self._act.announce(target, found, change, by, reason)
                envelope = self._act.write(target, found, current, text, "apply", by)
                envelope = self._act.record(target, found, change, "apply", by) or envelope
            return self._act.moved(found, "applied", by, reason, {"wrote": change.diff.after_hash, **_named(envelope)})

    def rebase(self, patch: MemoryPatch | str, *, by: str | None = None) -> MemoryPatch:
        """Offer a diverged patch as a new pending one, made for what the target holds now; the old one becomes `conflict`.

        The two changes must merge cleanly (three-way, by lines). An addition that only other patches got in the way of, or to a
        block, is placed anew: nothing that is there goes.

        Raises:
            DiffConflictError: they do not merge; the patch is `conflict`, nothing was written.
            PatchNotFound, UntrustedPatch, IllegalTransition: it is not there, does not verify, or there is nothing to rebase.
            TargetRefused: the target is not managed, or is not text.
        """
        with self._act.alone_with(patch):
            found = self._act.trusted(patch, "rebase", ("pending", "approved", "conflict"))
            self._act.require_unwritten(found)
            target = self.targets.resolve(found.file_path)
            current = target.read()
            if current == found.before_content and found.status != "conflict":
                raise IllegalTransition(f"{found.file_path} has not diverged from patch {found.patch_id}", "apply it")
            merged = merge(found.before_content, found.after_content, current or "")
            # a block is written by its agent all the time, mostly at its end: there the fact is offered below that
            if merged is None and (target.records_itself or self._act.only_patches_wrote(found, current or "")):
                merged = placed_again(found, current or "")
            if merged is None or (current is None and found.before_content):
                self._act.refuse(
                    found, current, by, "the same lines were changed: edit the file by hand, and reject the patch"
                )
            if merged == current:
                raise IllegalTransition(
                    f"{found.file_path} already holds what patch {found.patch_id} adds", "reject the patch"
                )
            new = self._proposing.successor(found, current or "", merged, "rebased_from", found.author)
            if found.status != "conflict":
                self._act.moved(found, "conflict", by, f"rebased as {new.patch_id}", {"replaced_by": new.patch_id})
            return new

    def revert(self, patch_id: MemoryPatch | str, *, by: str | None = None, reason: str = "") -> MemoryPatch:
        """Take an applied patch out of its target again; what was changed later stays.

        Raises:
            DiffConflictError: later edits changed the same lines; nothing was written, and the patch stays `applied`.
            PatchNotFound, UntrustedPatch, IllegalTransition: it is not there, does not verify, or is not applied.
            TargetRefused: the target is not managed, or cannot be written without loss.
        """
        with self._act.alone_with(patch_id):
            found = self._act.trusted(patch_id, "revert", ("applied",))
            self._act.may_decide(found, by)
            target = self.targets.resolve(found.file_path)
            current = target.read()
            change = announced(found)
            if change is not None and reverted_already(found, current or ""):
                envelope = self._act.record(target, found, change, "revert", by, current or "")
                return self._act.moved(
                    found, "reverted", by, reason, {"wrote": change.diff.after_hash, **_named(envelope)}
                )
            text = reverse_merge(found.before_content, found.after_content, current or "")
            if text is None or (current is None and found.before_content):
                hashes = content_hash(found.after_content), content_hash(current) if current is not None else ""
                raise DiffConflictError(found.file_path, *hashes, "later edits changed the same lines: edit it by hand")
            envelope = None
            if current is not None:
                change = Change.between(current, text)
                self._act.announce(target, found, change, by, reason)
                envelope = self._act.write(target, found, current, text, "revert", by)
                envelope = self._act.record(target, found, change, "revert", by) or envelope
            return self._act.moved(found, "reverted", by, reason, {"wrote": content_hash(text), **_named(envelope)})


def _named(envelope: str | None) -> dict[str, str]:
    """The envelope of a write as the history keeps it; nothing where it is not known."""
    return {} if envelope is None else {"envelope": envelope}
