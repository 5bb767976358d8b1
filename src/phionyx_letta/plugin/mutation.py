"""What a change of a block means: its kind, its event and the fields its envelope will carry.

Pure functions over before and after; no database, no Letta.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from phionyx_letta.decisions import kept
from phionyx_letta.diff import MemoryDiff, compute_memory_diff, content_hash
from phionyx_letta.envelope import canonical_json
from phionyx_letta.ledger.salts import Salt
from phionyx_letta.plugin.attribution import Attribution

#: The columns of ``block`` that reach the prompt (Letta's PROMPT_AFFECTING_BLOCK_FIELDS); a change of any is a mutation.
RECORDED = ("value", "label", "description", "limit", "read_only")
#: Version of that list, and of the state digest over it.
STATE_VERSION = "1"
#: The event of a system message that was compiled and stored.
COMPILE = "compile"
#: In place of a state digest: the row was deleted.
GONE = "deleted"
_SLEEPTIME = {"sleeptime_agent", "voice_sleeptime_agent"}
_FORGETTING = {"clear", "delete", "forget"}


@dataclass(frozen=True)
class BlockColumns:
    """The recorded columns of one block, as the database has them."""

    value: str
    label: str
    description: str | None = None
    limit: int | None = None
    read_only: bool | None = None

    def digest(self, value_hash: str | None = None, salt: bytes | None = None) -> str:
        """Hash over all recorded columns, named and versioned, so that a new column of Letta's raises no alarm.

        ``value_hash`` is that of the value, where it is known already. With ``salt`` the whole digest is keyed too: a description
        may hold content.
        """
        state = {
            "v": STATE_VERSION,
            "value": value_hash or content_hash(self.value, salt=salt),
            "label": self.label,
            "description": self.description,
            "limit": self.limit,
            "read_only": bool(self.read_only),
        }
        data = canonical_json(state).encode("ascii")
        if salt is not None:
            return "sha256:" + hmac.digest(salt, data, "sha256").hex()
        return "sha256:" + hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Commitment:
    """How one mutation commits to the content of its block: bare hashes, or hashes under a salt.

    Where the salt is new, what the block held before is not committed to under it: it may be what was forgotten.
    """

    salt: Salt | None = None
    before: Salt | None = None
    """The salt of what the block held before, where it is another one."""
    before_hash: str | None = None
    """Of the value before, where the ledger has it as a bare hash."""


BARE = Commitment()


def block_change(
    block_id: str,
    before: BlockColumns | None,
    after: BlockColumns | None,
    who: Attribution,
    *,
    organization_id: str | None,
    include_diff_text: bool = False,
    event: str | None = None,
    commitment: Commitment = BARE,
) -> dict[str, Any] | None:
    """The fields of the mutation that turned ``before`` into ``after``.

    Args:
        block_id: Letta's id of the block.
        before: None for a block that is created.
        after: None for a block whose row is deleted.
        who: attribution at the moment of the write.
        organization_id: of the block.
        include_diff_text: keep the content (opt-in).
        event: overrides the event found by comparison (``baseline``).
        commitment: the salt of the block, in a salted ledger; no content is kept then.

    Returns:
        The mutation for ``OutboxKey.seal``; None when no recorded column changed.
    """
    changed = _changed(before, after)
    if not changed and event is None:
        return None
    diff = _diff(before, after, commitment, include_diff_text)
    event = event or _event(before, after, changed, who.operation)
    kind = _kind(before, after, changed, who)
    details: dict[str, Any] = {"event": event, **_details(before, after, changed, diff.after_hash, commitment)}
    if diff.counts_method != "lcs":
        details["counts_method"] = diff.counts_method
    mutation = _mutation(block_id, (after or before).label, kind, event, who, organization_id, details)  # type: ignore[union-attr]
    mutation["diff"] = diff.to_dict()
    if who.claim is not None:
        mutation["living_memory"] = kept(who.claim, salted=commitment.salt is not None)
    if kind == "consolidate":
        mutation["audit"] = _consolidation(block_id, diff, who)
    return mutation


def operator_change(
    block_id: str,
    label: str,
    kind: str,
    event: str,
    diff: MemoryDiff,
    details: dict[str, Any],
    *,
    producer: str,
    operator: str,
    reason: str,
    organization_id: str | None = None,
) -> dict[str, Any]:
    """The fields of what a person recorded or did with the command line, with his name and his reason (``reconcile``)."""
    details = {"event": event, **details, "operator": operator, "reason": reason}
    mutation = _mutation(block_id, label, kind, event, Attribution(reason=reason), organization_id, details)
    return {**mutation, "producer": producer, "diff": diff.to_dict()}


def state_details(after: BlockColumns | None, after_hash: str, commitment: Commitment) -> dict[str, Any]:
    """What an envelope says of the state it leaves: salts and the digest over all recorded columns."""
    details: dict[str, Any] = {"state_version": STATE_VERSION}
    if commitment.salt is not None:
        details["salt"] = commitment.salt.name
    if commitment.before is not None:
        details["salt_before"] = commitment.before.name
    if after is not None:
        details["state"] = after.digest(after_hash, commitment.salt.value if commitment.salt else None)
    return details


def _diff(
    before: BlockColumns | None, after: BlockColumns | None, commitment: Commitment, include_diff_text: bool
) -> MemoryDiff:
    salt = commitment.salt.value if commitment.salt else None
    old, new = before.value if before else "", after.value if after else ""
    diff = compute_memory_diff(old, new, include_diff_text=include_diff_text and salt is None, salt=salt)
    if commitment.before_hash is not None:
        return replace(diff, before_hash=commitment.before_hash)
    if commitment.before is not None:
        return replace(diff, before_hash=content_hash(old, salt=commitment.before.value))
    return diff


def prompt_digest(content: Any, text: str | None = None) -> str:
    """Hash of a system message's content, as Letta's model or the database has it.

    Args:
        content: the parts, each a dict or one of Letta's models.
        text: the column that older messages have instead; it counts only where there are no parts, as in Letta.
    """
    parts = content or ([{"type": "text", "text": text}] if text else [])
    plain = [part if isinstance(part, dict) else part.model_dump(mode="json") for part in parts]
    given = [{name: value for name, value in part.items() if value is not None} for part in plain]
    # Letta takes NUL out of what it stores
    encoded = canonical_json({"v": STATE_VERSION, "content": given}).replace("\\u0000", "")
    return "sha256:" + hashlib.sha256(encoded.encode("ascii")).hexdigest()


def prompt_change(
    message_id: str,
    digest: str,
    agent_id: str | None,
    who: Attribution,
    *,
    organization_id: str | None,
    event: str = COMPILE,
) -> dict[str, Any]:
    """The fields of the mutation that stores a compiled system message: its digest, never its text.

    It says nothing of what was there before: Letta's messages have no version, so of two that compile at once the later
    overwrites what it never saw.

    Args:
        message_id: Letta's id of the message; it stands in the place of the block's.
        digest: see ``prompt_digest``.
        agent_id: whose prompt it is.
        who: attribution at the moment of the write.
        organization_id: of the message.
        event: ``compile``, or ``baseline``.
    """
    details = {"event": event, "state": digest, "state_version": STATE_VERSION}
    mutation = _mutation(message_id, "system", "write", event, who, organization_id, details)
    mutation["agent_id"] = mutation["letta"]["agent_id"] = agent_id
    mutation["diff"] = None
    return mutation


def history_change(
    block_id: str, label: str, digest: str, who: Attribution, *, organization_id: str | None
) -> dict[str, Any]:
    """The fields of the mutation that changes a block's checkpoints and not the block; the sealer fills in the content hashes."""
    event = who.operation if who.operation in ("undo", "redo") else "checkpoint"
    mutation = _mutation(block_id, label, "write", event, who, organization_id, {"event": event, "history": digest})
    mutation["diff"] = None
    return mutation


def attachment_change(
    event: str, block_id: str, label: str, agent_id: str, who: Attribution, *, organization_id: str | None
) -> dict[str, Any]:
    """The fields of an ``attach`` or ``detach``; the sealer fills in the content hashes, which are equal.

    A detach is what an agent's ``memory`` tool calls delete: the agent forgets, the block survives (design, decision 4).
    """
    kind = "forget" if event == "detach" else "write"
    mutation = _mutation(block_id, label, kind, event, who, organization_id, {"event": event})
    mutation["diff"] = None
    mutation["attached_agent"] = agent_id
    if kind == "forget" and mutation["reason"] is None:
        mutation["reason"] = f"letta.{who.operation or who.tool or 'detach'}"
    return mutation


def _mutation(
    block_id: str,
    label: str,
    kind: str,
    event: str,
    who: Attribution,
    organization_id: str | None,
    details: dict[str, Any],
) -> dict[str, Any]:
    agent_id = who.agent_id or who.request_agent_id
    return {
        "at": datetime.now(UTC).isoformat(timespec="microseconds"),
        "kind": kind,
        "event": event,
        "block_id": block_id,
        "block_label": label,
        "agent_id": agent_id,
        "organization_id": organization_id,
        "producer": f"letta.{who.agent_id}" if who.agent_id else ("letta.api" if who.request else "letta.server"),
        "reason": who.reason if kind in _FORGETTING else None,
        "parent": who.parent,
        "letta": {**details, **_who(who, agent_id)},
    }


def _who(who: Attribution, agent_id: str | None) -> dict[str, Any]:
    fields = {
        "agent_id": agent_id,
        "agent_type": who.agent_type,
        "run_id": who.run_id,
        "step_id": who.step_id,
        "conversation_id": who.conversation_id,
        "tool": who.tool,
        "tool_id": who.tool_id,
        "tool_type": who.tool_type,
        "tool_call_id": who.tool_call_id,
        "actor_id": who.actor_id,
        "operation": who.operation,
        "request": dict(who.request) if who.request else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _changed(before: BlockColumns | None, after: BlockColumns | None) -> list[str]:
    if before is None or after is None:
        return list(RECORDED)
    return [name for name in RECORDED if getattr(before, name) != getattr(after, name)]


def _event(before: BlockColumns | None, after: BlockColumns | None, changed: list[str], operation: str | None) -> str:
    if before is None:
        return "create"
    if after is None:
        return "delete"
    if operation in ("undo", "redo"):
        return operation
    if "value" in changed:
        return "update"
    return "rename" if "label" in changed else "update_" + changed[0]


def _kind(before: BlockColumns | None, after: BlockColumns | None, changed: list[str], who: Attribution) -> str:
    """By tool first, by content second (design, decision 4)."""
    if after is None:
        return "delete"
    old = before.value if before else ""
    if before is None or "value" not in changed:
        return "write"
    if after.value == "":
        return "clear"
    if who.tool == "core_memory_append" or (old and after.value.startswith(old)):
        return "append"
    return "consolidate" if who.agent_type in _SLEEPTIME else "write"


def _details(
    before: BlockColumns | None,
    after: BlockColumns | None,
    changed: list[str],
    after_hash: str,
    commitment: Commitment,
) -> dict[str, Any]:
    """What changed beside the value. A description may hold content, so only its hashes are kept."""
    salt = commitment.salt.value if commitment.salt else None
    details = state_details(after, after_hash, commitment)
    if before is None or after is None:
        return details
    details["changed"] = changed
    for name in ("label", "limit", "read_only"):
        if name in changed:
            details[name] = {"before": getattr(before, name), "after": getattr(after, name)}
    if "description" in changed:
        old = commitment.before.value if commitment.before else salt
        details["description"] = {
            "before_hash": content_hash(before.description or "", salt=old),
            "after_hash": content_hash(after.description or "", salt=salt),
        }
    return details


def _consolidation(block_id: str, diff: MemoryDiff, who: Attribution) -> Mapping[str, Any]:
    """The audit subblock of a sleeptime agent's rewrite: the messages it was shown, the block state it made of them."""
    return {
        "from_episodic": list(who.reviewed),
        "to_semantic": [f"{block_id}@{diff.after_hash}"],
        "consolidation_method": f"letta.sleeptime.{who.tool or 'rewrite'}",
    }
