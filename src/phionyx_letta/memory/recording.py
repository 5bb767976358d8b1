"""Evidence of what patches did: an envelope of the first seed for each patch that is applied or reverted, one chain per target.

What a person changed between two patches is recorded too, by its hashes, when the next patch finds it: else the chain would not
link. Content never enters an envelope here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phionyx_letta.decisions import decide, kept
from phionyx_letta.diff import MemoryDiff
from phionyx_letta.envelope import MemoryMutationContext
from phionyx_letta.errors import StoreError
from phionyx_letta.ledger.store import EnvelopeStore
from phionyx_letta.memory.deciding import Change
from phionyx_letta.memory.patches import MemoryPatch, content_digest
from phionyx_letta.memory.targets import Target
from phionyx_letta.signing import Signer

__all__ = ["MutationRecorder", "cause"]

PRODUCER, OUTSIDE = "phionyx-letta.living_memory", "phionyx-letta.unattributed"


class MutationRecorder:
    """Writes envelopes for the targets of patches."""

    def __init__(self, envelopes: EnvelopeStore, signer: Signer) -> None:
        """Take the store of envelopes and what signs them."""
        self._envelopes = envelopes
        self._signer = signer
        self._key = (signer, signer.key_id)

    def probe(self, target: Target) -> None:
        """Refuse early: see whether the store of envelopes can be read and, as far as it can tell, written.

        Raises:
            StoreError: it cannot.
        """
        self._last(target.identity, "")
        probe = getattr(self._envelopes, "probe", None)  # a store of the caller's own may have none
        if probe is not None:
            probe(target.identity)

    def record(
        self, target: Target, change: Change, patch: MemoryPatch, event: str, by: str, *, found: str | None = None
    ) -> str | None:
        """Record what was written.

        Args:
            target: what was written to.
            change: what was done to its text.
            patch: the patch that did it.
            event: `apply` or `revert`.
            by: the reviewer.
            found: what the target holds now, where a run was cut short before it could say what it did. Nothing is recorded if it
                could; where the chain has gone on without it, it is recorded as a change of nothing, in its present place.

        Returns:
            The reference of the envelope that says it.

        Raises:
            StoreError: the store of envelopes cannot be written; the target was.
        """
        noted = {"event": event, "patch_id": patch.patch_id, "reviewer": by, "session": patch.session_id}
        try:
            last, length, done = self._last(target.identity, patch.patch_id)
            known = _diff_of(last)
            if found is not None:
                if _event_in(done) == event:
                    return _reference(done)
                if known and known["after_hash"] != change.diff.before_hash:
                    change = Change.between(found, found)
            if known and known["after_hash"] != change.diff.before_hash:
                self._emit(target, length, "write", _replaced(known, change.diff), {"event": "edit_outside"}, OUTSIDE)
                length += 1
            decided = decide(noted, target.identity, change.diff.before_hash, change.diff.after_hash, *self._key)
            return self._emit(target, length, change.kind, change.diff, kept(decided, salted=False), PRODUCER)
        except (StoreError, OSError) as error:
            raise StoreError(
                f"{target.label} was written, but its envelope was not: {error}",
                f"mend the ledger, then {event} the patch again: that finishes it",
            ) from error

    def _last(self, trace_id: str, patch_id: str) -> tuple[Mapping[str, Any] | None, int, Mapping[str, Any] | None]:
        """The chain's last envelope, its length, and the last envelope of this patch."""
        last, length, done = None, 0, None
        for envelope in self._envelopes.iter_chain(trace_id):
            last, length = envelope, length + 1
            noted = _noted_in(envelope)
            if isinstance(noted, Mapping) and noted.get("patch_id") == patch_id:
                done = envelope
        return last, length, done

    def _emit(
        self, target: Target, turn: int, kind: str, diff: MemoryDiff, noted: Mapping[str, Any], producer: str
    ) -> str | None:
        context = MemoryMutationContext(
            trace_id=target.identity,
            turn_index=turn,
            producer=producer,
            block_id=target.identity,
            block_label=target.label,
            mutation_kind=kind,
            diff=diff,
            metadata={"living_memory": dict(noted)},
        )
        return _reference(self._envelopes.emit(context, signer=self._signer))


def cause(patch: MemoryPatch, event: str, by: str) -> dict[str, Any]:
    """What the evidence of a write says of the patch behind it: ids and names, no content.

    Args:
        patch: the patch.
        event: `apply` or `revert`.
        by: who decided.
    """
    given = patch.metadata.get("proposed_from")
    given = given if isinstance(given, dict) else {}
    found = patch.metadata.get("evidence")
    messages = [one.get("message_id") for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    said = {
        "event": event,
        "patch_id": patch.patch_id,
        "patch": content_digest(patch),
        "reviewer": by,
        "session": patch.session_id,
        "proposer_model": given.get("model"),
        "runs": given.get("runs"),
        "evidence_messages": list(dict.fromkeys(one for one in messages if isinstance(one, str))),
        "untrusted": True if "untrusted" in patch.metadata else None,
    }
    return {name: value for name, value in said.items() if value is not None}


def _reference(envelope: Mapping[str, Any] | None) -> str | None:
    try:
        return "envelope://" + str(envelope["integrity"]["current"]) if envelope else None
    except (KeyError, TypeError):
        return None


def _diff_of(envelope: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        return dict(envelope["mutation"]["diff"]) if envelope else {}
    except (KeyError, TypeError, ValueError):
        return {}


def _noted_in(envelope: Mapping[str, Any] | None) -> object:
    try:
        return envelope["subject"]["metadata"]["living_memory"] if envelope else None
    except (KeyError, TypeError):
        return None


def _event_in(envelope: Mapping[str, Any] | None) -> object:
    noted = _noted_in(envelope)
    return noted.get("event") if isinstance(noted, Mapping) else None


def _replaced(known: Mapping[str, Any], now: MemoryDiff) -> MemoryDiff:
    """The step from one text to the one before `now`; both are known by their hashes only, so all of them counts as replaced."""
    return MemoryDiff(
        before_hash=known["after_hash"],
        after_hash=now.before_hash,
        before_size_bytes=known["after_size_bytes"],
        after_size_bytes=now.before_size_bytes,
        added_chars=now.removed_chars + now.unchanged_chars,
        removed_chars=known["added_chars"] + known["unchanged_chars"],
        unchanged_chars=0,
        counts_method="replaced",
    )
