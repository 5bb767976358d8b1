"""What `doctor` says of the blocks: are they all recorded, and do they hold what was recorded."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, func, select, text

from phionyx_letta.cli.examine import FAIL, OK, WARN, Finding
from phionyx_letta.cli.seal import existing_key
from phionyx_letta.ledger import tables
from phionyx_letta.plugin.baseline import unrecorded_blocks
from phionyx_letta.plugin.outbox import open_payload
from phionyx_letta.plugin.reconcile import CHANGED, LOST_SALT, differences
from phionyx_letta.settings import load_settings

__all__ = ["changed_outside", "examine_blocks"]

MOST = 1000
_LISTED = 5
_FOUND = "'sha256:' || encode(sha256(convert_to(b.value, 'UTF8')), 'hex')"
_CHANGED = text(
    f"select b.id, b.label, p.after_hash as recorded, {_FOUND} as found from block b join phionyx_block p on p.block_id = b.id"
    f" where p.salt is null and {_FOUND} <> p.after_hash order by b.id limit {MOST}"
)
# only what the plugin recorded: the library may keep chains about blocks that were never in this table
_GONE = text(
    "select p.block_id as id, p.label, coalesce(p.after_hash, 'nothing') as recorded"
    " from phionyx_block p join phionyx_envelope e on e.seq = p.seq"
    " where e.event is not null and e.kind <> 'delete' and p.block_id not like 'message-%'"
    " and p.block_id not like 'phionyx-letta.%'"
    " and not exists (select 1 from block b where b.id = p.block_id)"
    f" order by p.block_id limit {MOST}"
)


def examine_blocks(connection: Connection) -> tuple[list[Finding], dict[str, Any]]:
    """Look at the blocks of Letta's database, in the caller's snapshot."""
    waiting = _waiting(connection)
    changed = changed_outside(connection, waiting)
    salted, more = _salted(connection, waiting)
    changed += more
    unrecorded = unrecorded_blocks(connection)
    findings = [
        Finding(
            "blocks",
            FAIL,
            f"{one['block_id']} ({one['label']}) was {'removed' if one['found'] is None else 'changed'} outside: "
            f"recorded {one['recorded'][:19]}…, found {(one['found'] or 'nothing')[:19]}",
            "somebody wrote to the database past Letta: find out who; `phionyx-letta reconcile` adopts or restores it",
        )
        for one in changed[:_LISTED]
    ]
    if len(changed) > _LISTED:
        findings.append(
            Finding("blocks", FAIL, f"and {len(changed) - _LISTED} more were changed outside", "--json lists them")
        )
    if not changed:
        findings.append(Finding("blocks", OK, "every recorded block holds what was recorded" + salted))
    if unrecorded > len(waiting):
        message = f"{unrecorded} blocks have no record: they are older than the plugin, or were written past it"
        findings.append(Finding("blocks", WARN, message, "`phionyx-letta baseline` records what they hold now"))
    return findings, {"unrecorded": unrecorded, "changed_outside": changed}


def changed_outside(connection: Connection, waiting: set[str]) -> list[dict[str, Any]]:
    """Blocks whose content is not what their newest envelope says; a block with a write that waits to be sealed is passed over."""
    rows = [*connection.execute(_CHANGED).mappings(), *connection.execute(_GONE).mappings()]
    return [
        {"block_id": row["id"], "label": row["label"], "recorded": row["recorded"], "found": row.get("found")}
        for row in rows
        if row["id"] not in waiting
    ]


def _salted(connection: Connection, waiting: set[str]) -> tuple[str, list[dict[str, Any]]]:
    """Salted hashes can only be compared with the key: what to say where there is none, and what was changed."""
    count = connection.execute(select(func.count()).where(tables.block.c.salt.is_not(None))).scalar_one()
    if not count:
        return "", []
    key = existing_key(load_settings())
    if key is None:
        return f", as far as that can be told without the signing key: {count} are salted", []
    return "", [
        {
            "block_id": one.block_id,
            "label": one.label,
            "recorded": one.recorded.after_hash,
            "found": one.found_hash or "nothing to compare",
        }
        for one in differences(connection, key)
        if one.what in (CHANGED, LOST_SALT)
        and one.recorded is not None
        and one.recorded.salt is not None
        and one.block_id not in waiting
    ]


def _waiting(connection: Connection) -> set[str]:
    payloads = connection.execute(select(tables.outbox.c.payload).where(tables.outbox.c.refused.is_(None))).scalars()
    return {str(fields["block_id"]) for payload in payloads if (fields := open_payload(payload)) is not None}
