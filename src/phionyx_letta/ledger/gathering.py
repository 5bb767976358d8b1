"""What a bundle takes from a SQL ledger, in one snapshot: envelopes as stored, their places in the log, the hashes of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, func, select

from phionyx_letta.ledger import tables
from phionyx_letta.ledger.audit_sql import snapshot
from phionyx_letta.ledger.lineage import stored_statements
from phionyx_letta.ledger.log.layout import write_layout
from phionyx_letta.ledger.rollback import LOG_BLOCK
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.ledger.tree import sql_nodes

__all__ = ["Gathered", "gather"]


class Gathered:
    """Some chains of a ledger, or all of it, as they stand in one transaction."""

    def __init__(self, connection: Connection, traces: Sequence[str]) -> None:
        """Take these chains, and the log's own records, which say what was given up; all chains where none is named."""
        self._connection = connection
        self._asked = list(dict.fromkeys(traces))
        self._traces = [*self._asked, LOG_BLOCK] if traces else []
        column = tables.envelope.c
        last = connection.execute(select(func.max(column.seq))).scalar()
        self.size: int = 0 if last is None else last + 1
        """Of the log."""
        self.count: int = connection.execute(self._chosen(select(func.count()))).scalar_one()
        """Envelopes that are taken."""
        self.whole = not self._traces or self.count == self.size
        if self.whole:
            self.size = self.count  # where one is missing the roots will tell
        self.checkpoints: list[str] = list(connection.execute(select(tables.checkpoint.c.note)).scalars())
        """The newest of each origin, as notes."""
        self.statements = stored_statements(connection)
        """About keys, as notes, in the order they were recorded."""

    def lines(self) -> Iterator[bytes]:
        """Yield the envelopes as they are stored, in sealing order, each with a newline."""
        query = self._chosen(select(tables.envelope.c.body)).order_by(tables.envelope.c.seq)
        for body in self._connection.execute(query).scalars():
            yield str(body).encode("utf-8", "surrogatepass") + b"\n"

    def layout(self, cuts: Iterable[int]) -> Iterator[bytes]:
        """Yield the lines of the log's layout, which shows the log at these sizes.

        Raises:
            ProofError: leaves of the log are missing.
        """
        if self.whole:
            if self.count:
                yield f"envelopes {self.count}\n".encode()
            return
        query = self._chosen(select(tables.envelope.c.seq)).order_by(tables.envelope.c.seq)
        places = list(self._connection.execute(query).scalars())
        for line in write_layout(places, self.size, cuts, sql_nodes(self._connection).hashes):
            yield line.encode()

    def missing(self) -> list[str]:
        """Return the chains that are not there."""
        column = tables.envelope.c.trace_id
        found = set(self._connection.execute(self._chosen(select(column).distinct())).scalars())
        return [trace for trace in self._asked if trace not in found]

    def _chosen(self, query: Any) -> Any:
        query = query.select_from(tables.envelope)
        return query.where(tables.envelope.c.trace_id.in_(self._traces)) if self._traces else query


@contextmanager
def gather(ledger: SqlLedger, traces: Sequence[str]) -> Iterator[Gathered]:
    """Take these chains, or all, in one snapshot of the ledger.

    Raises:
        LedgerUnavailable: the database does not answer.
    """
    with snapshot(ledger) as connection:
        yield Gathered(connection, traces)
