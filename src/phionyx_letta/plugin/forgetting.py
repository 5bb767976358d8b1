"""Which salts are destroyed when a batch is sealed, in the transaction that seals it (docs/forgetting.md).

A salt is destroyed with the deletion of its block, and with the detachment from the last agent that had it. Where another agent
still has the block, or a later write already waits under the salt, it ends instead: the next write takes a new one, links to
the old one last time, and the old one is destroyed when that write is sealed. A clear ends it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, select

from phionyx_letta.ledger import tables
from phionyx_letta.ledger.salts import destroy_salts, end_salts
from phionyx_letta.ledger.writer import BlockState

__all__ = ["Forgetting"]


class Forgetting:
    """The salts of one batch."""

    def __init__(self, connection: Connection, rows: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Look ahead.

        Args:
            connection: of the transaction that seals.
            rows: id and fields of all rows of the batch, in their order.
        """
        self._connection = connection
        self._end = max((number for number, _ in rows), default=0)
        self._last_use = {
            fields["letta"]["salt"]: number for number, fields in rows if isinstance(fields["letta"].get("salt"), str)
        }
        self._destroyed: set[str] = set()
        self._ended: set[str] = set()

    def settle(
        self, number: int, fields: dict[str, Any], block: BlockState | None, agents: Sequence[str] | None
    ) -> str | None:
        """Take the next row.

        Args:
            number: its id.
            fields: of its payload.
            block: as the row finds it.
            agents: who has the block after it; None if that is not known.

        Returns:
            The name of the salt that is destroyed with this row.
        """
        salt = fields["letta"].get("salt")
        old = block.salt if block is not None else None
        gone: str | None = None
        if fields["diff"] is None:
            if fields["kind"] == "forget" and block is not None and old is not None and not block.forgotten:
                if agents == [] and not self._used_later(number, old):
                    gone = old
                else:
                    self._ended.add(old)
        elif not isinstance(salt, str):
            return None
        elif fields["kind"] == "delete" or (block is not None and block.forgotten and old == salt):
            gone = salt  # the second: written in the moment in which it was forgotten
            if old not in (None, salt):
                self._destroyed.add(str(old))
        elif old not in (None, salt) and fields["letta"].get("salt_before") == old:
            gone = old
        elif fields["kind"] == "clear":
            self._ended.add(salt)
        if gone is not None:
            self._destroyed.add(gone)
        return gone

    def flush(self) -> None:
        """Destroy and end what was settled; the caller commits."""
        destroy_salts(self._connection, self._destroyed)
        end_salts(self._connection, self._ended - self._destroyed)

    def _used_later(self, number: int, salt: str) -> bool:
        if self._last_use.get(salt, number) > number:
            return True
        outbox = tables.outbox.c
        waiting = select(outbox.id).where(outbox.id > self._end, outbox.payload.contains(f'"salt":"{salt}"'))
        return self._connection.execute(waiting.limit(1)).first() is not None
