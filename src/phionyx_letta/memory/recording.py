"""Evidence of what patches did: an envelope of the first seed for each patch that is applied or reverted, one chain per target.

What a person changed between two patches is recorded too, by its hashes, when the next patch finds it: else the chain would not
link. Content never enters an envelope here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phionyx_letta.diff import MemoryDiff, compute_memory_diff, content_hash
from phionyx_letta.envelope import MemoryMutationContext
from phionyx_letta.ledger.store import EnvelopeStore
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

    def record(self, target: Target, before: str, after: str, patch: MemoryPatch, event: str, by: str) -> str | None:
        """Record what was written, unless the chain's last envelope says so already (a run that was cut short).

        Args:
            target: what was written to.
            before: its text until then.
            after: its text now.
            patch: the patch that did it.
            event: `apply` or `revert`.
            by: the reviewer.

        Returns:
            The reference of the envelope that says it.

        Raises:
            StoreError: the store of envelopes cannot be written.
        """
        last, length = self._last(target.identity)
        known = _diff_of(last)
        noted = {"event": event, "patch_id": patch.patch_id, "reviewer": by, "session": patch.session_id}
        if known.get("after_hash") == content_hash(after) and _noted_in(last) == noted:
            return _reference(last)
        if known and known["after_hash"] != content_hash(before):
            self._emit(target, length, "write", _replaced(known, before), {"event": "edit_outside"}, OUTSIDE)
            length += 1
        return self._emit(target, length, _kind(before, after), compute_memory_diff(before, after), noted, PRODUCER)

    def _last(self, trace_id: str) -> tuple[Mapping[str, Any] | None, int]:
        last, length = None, 0
        for envelope in self._envelopes.iter_chain(trace_id):
            last, length = envelope, length + 1
        return last, length

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


def _kind(before: str, after: str) -> str:
    """By content (design, decision 4)."""
    if before and not after:
        return "clear"
    return "append" if before and after.startswith(before) else "write"


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


def _replaced(known: Mapping[str, Any], now: str) -> MemoryDiff:
    """The step from a text of which only the hash is known to `now`: all of it counts as replaced."""
    reached = compute_memory_diff("", now)
    return MemoryDiff(
        before_hash=known["after_hash"],
        after_hash=reached.after_hash,
        before_size_bytes=known["after_size_bytes"],
        after_size_bytes=reached.after_size_bytes,
        added_chars=reached.added_chars,
        removed_chars=known["added_chars"] + known["unchanged_chars"],
        unchanged_chars=0,
        counts_method="replaced",
    )
