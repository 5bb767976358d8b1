"""How far each agent's memory is recorded: one row for an agent, beside the envelopes and in their transaction.

The row only saves work: it is authenticated with the signing key, and where it is missing or not this key's, the last envelope of
the agent tells the same, and commits the ledger has are not recorded again.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Column, Connection, MetaData, Row, String, Table, Text, inspect, select

from phionyx_letta.envelope import Signs, canonical_json
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.bulk import upsert_rows
from phionyx_letta.ledger.tree import derived_key
from phionyx_letta.letta_code.repository import LogPlace

__all__ = ["SOURCE", "Cursor", "create_table", "foreign", "foreign_to", "read_cursor", "read_cursors", "store_cursor"]

#: `metadata.letta.source` of every envelope made here.
SOURCE = "letta-code"
_PURPOSE = "phionyx-letta/letta-code-cursor/v1"

_metadata = MetaData()
table = Table(
    "phionyx_code_cursor",
    _metadata,
    Column("agent_id", String, primary_key=True),
    Column(
        "body", Text, nullable=False, comment="JSON: the commit, how far the reflogs were read, where the memory is"
    ),
    Column("mac", String, comment="HMAC-SHA256 over both, keyed from the signing key"),
)


@dataclass(frozen=True)
class Cursor:
    """What of an agent's memory is recorded."""

    tip: str | None = None
    """The commit the branch stood at when the move in progress, if any, began."""
    at: str | None = None
    """The commit the last envelope led to; it differs from `tip` within a move that takes several transactions."""
    ref: str | None = None
    """The branch HEAD stood for; empty where it was detached; None before the first run."""
    places: dict[str, LogPlace] = field(default_factory=dict)
    path: str = ""
    host: str = ""
    """The machine that recorded it: a ledger may be shared, and a path means something on one of them."""
    problem: str = ""
    """What the last run found wrong with the repository as a whole, so that it is recorded once."""
    chain: int = 0
    """Envelopes of the agent's chain that are known to be Letta Code's."""


def create_table(connection: Connection) -> None:
    """Make the table if it is missing."""
    _metadata.create_all(connection)


def read_cursor(connection: Connection, signer: Signs | None, agent: str) -> Cursor:
    """How far the agent's memory is recorded, by its row, else by its last envelope; without a signer any row counts."""
    row = None
    if inspect(connection).has_table(table.name):
        row = connection.execute(select(table).where(table.c.agent_id == agent)).first()
    cursor = None if row is None else _cursor(signer, row)
    return cursor or _from_envelopes(connection, agent)


def read_cursors(connection: Connection, signer: Signs | None) -> dict[str, Cursor]:
    """How far the memories of all agents are recorded, by the rows that are this key's; without a signer by all."""
    if not inspect(connection).has_table(table.name):
        return {}
    found = ((row.agent_id, _cursor(signer, row)) for row in connection.execute(select(table)))
    return {agent: cursor for agent, cursor in found if cursor is not None}


def _cursor(signer: Signs | None, row: Row[Any]) -> Cursor | None:
    if signer is not None and not hmac.compare_digest(_mac(signer, row.agent_id, row.body) or "", row.mac or ""):
        return None
    try:
        body = json.loads(row.body)
        places = {name: LogPlace.of(place) for name, place in body.pop("places").items()}
        cursor = Cursor(**body, places=places)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):  # somebody else's
        return None
    commits, texts = (cursor.tip, cursor.at, cursor.ref), (cursor.path, cursor.host, cursor.problem)
    typed = all(isinstance(one, str | None) for one in commits) and all(isinstance(one, str) for one in texts)
    return cursor if typed and isinstance(cursor.chain, int) and isinstance(row.agent_id, str) else None


def store_cursor(connection: Connection, signer: Signs, agent: str, cursor: Cursor) -> None:
    """Keep it, in the transaction of what it says is recorded."""
    fields = {name: value for name, value in vars(cursor).items() if name != "places"}
    body = canonical_json({**fields, "places": {name: place.stored() for name, place in cursor.places.items()}})
    upsert_rows(connection, table, "agent_id", [{"agent_id": agent, "body": body, "mac": _mac(signer, agent, body)}])


def _mac(signer: Signs, agent: str, body: str) -> str | None:
    key = derived_key(signer, _PURPOSE)
    if key is None:
        return ""
    return hmac.digest(key, canonical_json([agent, body]).encode("ascii"), "sha256").hex()


def _from_envelopes(connection: Connection, agent: str) -> Cursor:
    columns = tables.envelope.c
    query = select(columns.body).where(columns.trace_id == agent).order_by(columns.position.desc())
    for body in connection.execute(query.limit(1000)).scalars():
        letta = _letta(body)
        if letta.get("source") == SOURCE and "head" in letta:
            head = letta["head"] if isinstance(letta["head"], str) else None
            return Cursor(tip=head, at=head)
    return Cursor()


def foreign_to(connection: Connection, signer: Signs, agent: str) -> str | None:
    """Who else writes to the agent's chain; None if nobody does."""
    return foreign(connection, agent, read_cursor(connection, signer, agent).chain)


def foreign(connection: Connection, agent: str, start: int) -> str | None:
    """Who made the first envelope of the agent's chain, from place `start` on, that is not Letta Code's; None if all are."""
    columns = tables.envelope.c
    query = select(columns.body).where(columns.trace_id == agent, columns.position >= start).order_by(columns.position)
    with connection.execution_options(yield_per=100).execute(query) as bodies:
        for body in bodies.scalars():
            if _letta(body).get("source") != SOURCE:
                return str(_subject(body).get("producer") or "somebody else")[:100]
    return None


def _letta(body: str) -> dict[str, Any]:
    metadata = _subject(body).get("metadata")
    found = metadata.get("letta") if isinstance(metadata, dict) else None
    return found if isinstance(found, dict) else {}


def _subject(body: str) -> dict[str, Any]:
    try:
        found = json.loads(body)["subject"]
    except (ValueError, TypeError, KeyError, RecursionError):  # no envelope
        return {}
    return found if isinstance(found, dict) else {}
