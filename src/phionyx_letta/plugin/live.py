"""`verify`, on Letta's own database: do the blocks, and Letta's checkpoints of them, hold what their newest envelopes say?

Needs no key that the server has: a block with a write that waits in the outbox is passed over.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select, text

from phionyx_letta.ledger import tables
from phionyx_letta.ledger.audit import Audit
from phionyx_letta.plugin.evidence import HISTORY_SQL, NO_HISTORY, history_digest
from phionyx_letta.plugin.logview import Recorded
from phionyx_letta.plugin.mutation import GONE, BlockColumns
from phionyx_letta.plugin.outbox import open_payload

__all__ = ["LIVE", "LiveAudit"]

LIVE = "live"
_BLOCKS = text(
    "select id, label, description, \"limit\", read_only, encode(sha256(convert_to(value, 'UTF8')), 'hex') as hash"
    " from block order by id"
)
_HISTORIES = text(
    f"select g.id, array_to_string(array({HISTORY_SQL.format(block='g.id')}), e'\\n') as rows"
    " from (select distinct block_id as id from block_history) g"
)


class LiveAudit:
    """Takes the envelopes of a whole ledger in sealing order, then compares what is there."""

    def __init__(self) -> None:
        """Nothing is recorded yet."""
        self._known: dict[str, Recorded] = {}

    def feed(self, envelope: dict[str, Any]) -> None:
        """Take the next envelope; it was found to have the right shape."""
        letta = envelope["subject"]["metadata"].get("letta")
        if isinstance(letta, dict):
            mutation = envelope["mutation"]
            before = self._known.get(mutation["block_id"], Recorded())
            self._known[mutation["block_id"]] = before.after(letta, mutation["diff"])

    def finish(self, connection: Connection, audit: Audit) -> None:
        """Compare; findings go to ``audit``, as its dimension `live`."""
        salted = sum(known.salted for known in self._known.values())
        if salted:
            message = (
                f"{salted} blocks are committed to under salts: `phionyx-letta reconcile` compares them, with the key"
            )
            audit.note(LIVE, message)
        else:
            audit.needed.add(LIVE)
            audit.measured(LIVE)
        waiting = _waiting(connection)
        found = {row.id: row for row in connection.execute(_BLOCKS)}
        histories = {
            row.id: history_digest(row.rows.split("\n") if row.rows else []) for row in connection.execute(_HISTORIES)
        }
        for block_id, known in self._known.items():
            if block_id.startswith("block-") and block_id not in waiting:
                self._compare(audit, block_id, known, found.get(block_id), histories.get(block_id, NO_HISTORY))
        unrecorded = [block_id for block_id in found if block_id not in self._known and block_id not in waiting]
        if unrecorded:
            audit.leave_open(
                LIVE,
                f"nothing is recorded of {len(unrecorded)} blocks: they were put into the database by hand, or are older than"
                " the plugin; `phionyx-letta reconcile` lists them",
                unrecorded,
            )

    @staticmethod
    def _compare(audit: Audit, block_id: str, known: Recorded, row: Any, history: str) -> None:
        if known.state == GONE or row is None:
            if (known.state == GONE) != (row is None):
                message = "the block was put back after it was deleted" if row else "the block was removed outside"
                audit.fail(LIVE, message, block_id=block_id, expected=known.state, found="a row" if row else "nothing")
            return
        if known.salted:
            return
        value = "sha256:" + row.hash
        state = BlockColumns("", row.label, row.description, row.limit, row.read_only).digest(value)
        if known.after_hash is not None and value != known.after_hash:
            message = "the block's value is not what was recorded"
            audit.fail(LIVE, message, block_id=block_id, expected=known.after_hash, found=value)
        elif known.state is not None and state != known.state:
            message = "the block's columns are not what was recorded"
            audit.fail(LIVE, message, block_id=block_id, expected=known.state, found=state)
        if history != (known.history or NO_HISTORY):
            message = "Letta's checkpoints of the block are not those that were recorded"
            audit.fail(LIVE, message, block_id=block_id, expected=known.history or NO_HISTORY, found=history)


def _waiting(connection: Connection) -> set[str]:
    payloads = connection.execute(select(tables.outbox.c.payload).where(tables.outbox.c.refused.is_(None))).scalars()
    return {str(fields["block_id"]) for payload in payloads if (fields := open_payload(payload)) is not None}
