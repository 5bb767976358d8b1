"""What a person does about a difference: take it into the history as it is, or write the last recorded content back.

One transaction per block holds the ledger's lock and the block's row: both are read again under them, and where they are not what
the person was shown nothing is done. A writer of Letta's that comes meanwhile waits for it, and Letta's own check of the version
refuses what it read before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, insert, select, text
from sqlalchemy.exc import DBAPIError

from phionyx_letta._unified import apply_unified
from phionyx_letta.diff import MemoryDiff, compute_memory_diff, content_hash
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.salts import Salt, SaltKey, read_salts, salt_row, salts_in_use
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.plugin.mutation import GONE, RECORDED, BlockColumns, Commitment, operator_change, state_details
from phionyx_letta.plugin.outbox import open_payload
from phionyx_letta.plugin.reconcile import (
    CREATED,
    DAMAGED,
    DELETED,
    Difference,
    LiveBlock,
    Recorded,
    compare,
    read_live,
    read_recorded,
    read_salts_of,
)
from phionyx_letta.plugin.runtime import PluginKey
from phionyx_letta.signing import Verifier

__all__ = ["ADOPTED", "RESTORED", "Operator", "Outcome", "adopt", "restore"]

UNATTRIBUTED = "letta.unattributed"
PRODUCER = "phionyx-letta.reconcile"
ADOPTED, RESTORED, NOT_DONE = "adopted", "restored", "not done"
#: Longest wait for a block that a transaction of Letta's holds.
_PATIENCE_MS = 5000
_LOCKED = "55P03"
_UNREADABLE = {"before_hash": "", "after_hash": "?", "before_size_bytes": 1, "after_size_bytes": 1}


@dataclass(frozen=True)
class Operator:
    """Who does it, and why; both go into the envelope."""

    name: str
    reason: str


@dataclass(frozen=True)
class Outcome:
    """What became of one block."""

    block_id: str
    done: str
    why: str = ""


@dataclass(frozen=True)
class _Found:
    """A block under its lock."""

    difference: Difference
    recorded: Recorded | None
    live: LiveBlock | None
    before: str | None
    """The value that was recorded last, where envelopes kept it."""


def adopt(
    ledger: SqlLedger,
    key: PluginKey,
    shown: Difference,
    operator: Operator,
    *,
    verifier: Verifier | None = None,
    keep_text: bool = False,
) -> Outcome:
    """Record the block as it is, as a mutation nobody is known to have made; it waits in the outbox then.

    Args:
        ledger: of Letta's database.
        key: authenticates the row.
        shown: what the person has seen and confirmed.
        operator: who, and why.
        verifier: further trusted keys, as for `differences`.
        keep_text: keep the unified diff, and so the content, in the envelope, where the content before is known.
    """
    with ledger.writing() as connection:
        assert connection is not None
        found = _under_lock(connection, key, shown, verifier)
        if isinstance(found, Outcome):
            return found
        mutation, _ = _adoption(connection, key, found, operator, keep_text)
        _put(connection, key, [mutation])
    return Outcome(shown.block_id, ADOPTED)


def restore(
    ledger: SqlLedger,
    key: PluginKey,
    shown: Difference,
    operator: Operator,
    *,
    verifier: Verifier | None = None,
    keep_text: bool = False,
) -> Outcome:
    """Write the last recorded content back, where envelopes kept it; two mutations say what was found and what was restored."""
    with ledger.writing() as connection:
        assert connection is not None
        found = _under_lock(connection, key, shown, verifier)
        if isinstance(found, Outcome):
            return found
        target = _last_recorded(found)
        if isinstance(target, str):
            return Outcome(shown.block_id, NOT_DONE, target)
        adoption, commitment = _adoption(connection, key, found, operator, keep_text)
        assert found.live is not None
        restoration = _restoration(found.live, target, commitment, shown.block_id, operator, keep_text)
        _write_back(connection, shown.block_id, target)
        _put(connection, key, [adoption, restoration])
    return Outcome(shown.block_id, RESTORED)


def _under_lock(
    connection: Connection, key: PluginKey, shown: Difference, verifier: Verifier | None
) -> _Found | Outcome:
    connection.execute(text(f"set local lock_timeout = {_PATIENCE_MS}"))
    ids = [shown.block_id]
    try:
        with connection.begin_nested():
            live = read_live(connection, ids, lock=True).get(shown.block_id)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != _LOCKED:
            raise
        return Outcome(shown.block_id, NOT_DONE, "a transaction holds the block; try again")
    recorded = read_recorded(connection, key, verifier, ids).get(shown.block_id)
    salts = read_salts_of(connection, key, [recorded] if recorded else [])
    difference = compare(shown.block_id, recorded, live, salts)
    if difference is None:
        return Outcome(shown.block_id, NOT_DONE, "it is as it was recorded by now")
    if _unlike(difference, shown):
        return Outcome(shown.block_id, NOT_DONE, "it changed since it was listed; look again")
    if difference.what == DAMAGED:
        assert recorded is not None
        return Outcome(shown.block_id, NOT_DONE, f"{recorded.damaged}: `phionyx-letta verify` says more")
    return _Found(difference, recorded, live, _replayed(connection, recorded, salts) if recorded else None)


def _unlike(now: Difference, shown: Difference) -> bool:
    """Sealing is no change: a record that waited has an envelope by then."""

    def seen(one: Difference) -> Difference:
        return replace(one, recorded=replace(one.recorded, envelope=None) if one.recorded else None)

    return seen(now) != seen(shown)


def _adoption(
    connection: Connection, key: PluginKey, found: _Found, operator: Operator, keep_text: bool
) -> tuple[dict[str, Any], Commitment]:
    difference, recorded, live = found.difference, found.recorded, found.live
    after = live.columns if live else None
    commitment = _commitment(connection, key, difference.block_id, recorded)
    diff = _diff(found, commitment, keep_text)
    details = state_details(after, diff.after_hash, commitment)
    if after is None:
        details["state"] = GONE
    elif commitment.salt is None and live is not None and ("checkpoints" in difference.columns or recorded is None):
        details["history"] = live.history
    details |= {"found": difference.what, "changed": list(difference.columns)}
    if diff.counts_method != "lcs":
        details["counts_method"] = diff.counts_method
    if recorded is not None and live is not None and set(recorded.agents or ()) != set(live.agents):
        details["agents"] = {
            "before": None if recorded.agents is None else list(recorded.agents),
            "after": list(live.agents),
        }
    mutation = operator_change(
        difference.block_id,
        difference.label,
        _kind(found),
        "adopt",
        diff,
        details,
        producer=UNATTRIBUTED,
        operator=operator.name,
        reason=operator.reason,
        organization_id=live.organization_id if live else None,
    )
    return {**mutation, "agents": list(live.agents) if live else []}, commitment


def _kind(found: _Found) -> str:
    """By content, as far as it is known (design, decision 4)."""
    if found.live is None:
        return "delete"
    value = found.live.columns.value
    if "value" not in found.difference.columns:
        return "write"
    if value == "":
        return "clear"
    return "append" if found.before and value.startswith(found.before) else "write"


def _restoration(
    live: LiveBlock,
    target: BlockColumns,
    commitment: Commitment,
    block_id: str,
    operator: Operator,
    keep_text: bool,
) -> dict[str, Any]:
    salt = commitment.salt.value if commitment.salt else None
    diff = compute_memory_diff(
        live.columns.value, target.value, include_diff_text=keep_text and salt is None, salt=salt
    )
    details = state_details(target, diff.after_hash, Commitment(commitment.salt))
    details["changed"] = [name for name in RECORDED if getattr(live.columns, name) != getattr(target, name)]
    mutation = operator_change(
        block_id,
        target.label,
        "write",
        "restore",
        diff,
        details,
        producer=PRODUCER,
        operator=operator.name,
        reason=operator.reason,
        organization_id=live.organization_id,
    )
    return {**mutation, "agents": list(live.agents)}


def _commitment(connection: Connection, key: PluginKey, block_id: str, recorded: Recorded | None) -> Commitment:
    """The salt the record was made with, if it is good; else, in a salted ledger, a new one."""
    if not salts_in_use(connection):
        return Commitment()
    salts = SaltKey.of(key.signer)
    kept = read_salts(connection, salts, [block_id]).get(block_id)
    if recorded is not None and kept is not None and not kept.ended and kept.salt and kept.salt.name == recorded.salt:
        return Commitment(kept.salt)
    new = salts.new()
    connection.execute(insert(tables.salt), [salt_row(salts, block_id, new)])
    old = kept.salt if kept is not None and recorded is not None and kept.salt else None
    return Commitment(new, old if old is not None and recorded is not None and old.name == recorded.salt else None)


def _diff(found: _Found, commitment: Commitment, keep_text: bool) -> MemoryDiff:
    """From the state the ledger has to the one found; where the content before is not known, no characters can be compared."""
    recorded, salt = found.recorded, commitment.salt.value if commitment.salt else None
    value = found.live.columns.value if found.live else ""
    known = "" if recorded is None else found.before
    diff = compute_memory_diff(
        known or "", value, include_diff_text=keep_text and salt is None and known is not None, salt=salt
    )
    if recorded is None:
        return diff
    diff = replace(diff, before_hash=recorded.after_hash, before_size_bytes=recorded.size)
    if known is not None:
        return diff
    if found.live is not None and found.difference.found_hash == recorded.after_hash:
        return replace(diff, added_chars=0, unchanged_chars=recorded.chars)
    compared = not recorded.chars or not value
    return replace(diff, removed_chars=recorded.chars, counts_method="lcs" if compared else "not compared")


def _put(connection: Connection, key: PluginKey, mutations: list[dict[str, Any]]) -> None:
    rows = [key.outbox.seal({**mutation, "worker": PRODUCER}) for mutation in mutations]
    for payload, mac in rows:  # one by one: their ids are their order
        connection.execute(insert(tables.outbox).values(payload=payload, mac=mac))


# -- what was recorded last ---------------------------------------------------------------------------------------


def _last_recorded(found: _Found) -> BlockColumns | str:
    """The columns to write back, or why they cannot be known."""
    difference, recorded, live = found.difference, found.recorded, found.live
    if difference.what == CREATED or recorded is None:
        return "nothing is recorded that could be restored"
    if difference.what == DELETED or live is None:
        return "its row is gone; create it in Letta again, or adopt the deletion"
    if not difference.columns:
        return "its value and its label are not known to differ; only --adopt can record what is there"
    if "checkpoints" in difference.columns:
        return "Letta's checkpoints of it differ, and only their hash was kept: only --adopt can record them"
    if "other" in difference.columns:
        return "its description, limit or read-only differ, and only their hash was kept: set them in Letta, or adopt"
    value = found.before if "value" in difference.columns else live.columns.value
    if value is None:
        return "its content was not kept (PHIONYX_LETTA_INCLUDE_DIFF_TEXT keeps it)"
    return replace(live.columns, value=value, label=recorded.label)


def _replayed(connection: Connection, recorded: Recorded, salts: dict[str, Salt]) -> str | None:
    """The content after all recorded changes, checked against the recorded hash; None where a change kept no text."""
    known: str | None = None
    for diff in _history(connection, recorded.block_id):
        kept = diff.get("diff_text")
        before = "" if diff["before_size_bytes"] == 0 else known
        if diff["after_size_bytes"] == 0:
            known = ""
        elif isinstance(kept, str) and before is not None:
            known = apply_unified(before, kept)
        elif diff["before_hash"] != diff["after_hash"]:
            known = None
    if known is None or (recorded.salt is not None and recorded.salt not in salts):
        return None
    salt = salts[recorded.salt].value if recorded.salt is not None else None
    return known if content_hash(known, salt=salt) == recorded.after_hash else None


def _history(connection: Connection, block_id: str) -> Iterator[dict[str, Any]]:
    envelope, outbox = tables.envelope.c, tables.outbox.c
    sealed = select(envelope.body).where(envelope.block_id == block_id).order_by(envelope.seq)
    for body in connection.execute(sealed).scalars():
        try:
            yield json.loads(body)["mutation"]["diff"]
        except (ValueError, TypeError, KeyError, RecursionError):
            yield _UNREADABLE
    waiting = select(outbox.payload).where(outbox.refused.is_(None)).order_by(outbox.id)
    for payload in connection.execute(waiting).scalars():
        fields = open_payload(payload)
        if fields is not None and fields["block_id"] == block_id and fields["diff"] is not None:
            yield fields["diff"]


def _write_back(connection: Connection, block_id: str, target: BlockColumns) -> None:
    """The version is Letta's own guard: whoever read the block before cannot overwrite what is restored."""
    columns = set(
        connection.execute(
            text(
                "select attname from pg_attribute where attrelid = 'block'::regclass and attnum > 0 and not attisdropped"
            )
        ).scalars()
    )
    version = ", version = coalesce(version, 0) + 1" if "version" in columns else ""
    connection.execute(
        text(f"update block set value = :value, label = :label{version} where id = :id"),
        {"value": target.value, "label": target.label, "id": block_id},
    )
