"""A ledger on a real PostgreSQL and a hand that writes to its outbox: what the tests of sealing and of attacks stand on.

No Letta here: rows are made by the plugin's own functions, as capture makes them, and put into the table by plain SQL.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable
from contextlib import contextmanager
from typing import Any

import psycopg

from phionyx_letta import Ed25519Signer, Ed25519Verifier
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.plugin.attribution import Attribution
from phionyx_letta.plugin.mutation import BlockColumns, attachment_change, block_change
from phionyx_letta.plugin.runtime import PluginKey
from phionyx_letta.plugin.sealer import Sealer, SealReport, pending
from phionyx_letta.signing import TrustedKeys, Verifier
from phionyx_letta.verification import ChainVerifier

Row = tuple[str, str]
"""Payload and MAC."""


def new_key() -> PluginKey:
    """A signing key that nobody has used before; its private half is its `source`, for the processes that need it."""
    seed = os.urandom(32).hex()
    signer = Ed25519Signer(seed)
    return PluginKey(signer, seed)


def verifier_of(*keys: PluginKey) -> Verifier:
    """What trusts exactly these keys."""
    return TrustedKeys(
        Ed25519Verifier(key.signer.public_key_hex, key.signer.key_id)  # type: ignore[attr-defined]
        for key in keys
    )


def changed(block_id: str, before: str | None, after: str | None, who: Attribution = Attribution()) -> dict[str, Any]:  # noqa: B008 - frozen
    """The mutation capture would describe; None before a create and after a delete."""
    columns = [None if value is None else BlockColumns(value, label="human", limit=5000) for value in (before, after)]
    mutation = block_change(block_id, *columns, who, organization_id="org-1")
    assert mutation is not None
    return mutation


def attached(block_id: str, agent_id: str, event: str = "attach", who: Attribution = Attribution()) -> dict[str, Any]:  # noqa: B008 - frozen
    """The mutation of an attach or detach."""
    return attachment_change(event, block_id, "human", agent_id, who, organization_id="org-1")


class Rig:
    """One ledger, one key and the sealer that has it."""

    def __init__(self, url: str, key: PluginKey | None = None) -> None:
        self.url = url
        self.key = key or new_key()
        self.ledger = SqlLedger(url)
        self.sealer = Sealer(self.ledger, self.key)
        self.values: dict[str, str | None] = {}

    def close(self) -> None:
        self.ledger.close()

    # -- writing -------------------------------------------------------------------------------------------------

    def connect(self) -> psycopg.Connection[Any]:
        """A connection of one's own, as an attacker or another transaction has it."""
        return psycopg.connect(self.url)

    def sql(self, statement: str, *values: object) -> list[Any]:
        """Run one statement in its own transaction; its rows, if it gives any."""
        with self.connect() as connection:
            done = connection.execute(statement, values)
            return done.fetchall() if done.description else []

    def row(self, mutation: dict[str, Any]) -> Row:
        """What capture would insert for a mutation."""
        return self.key.outbox.seal(mutation)

    def put(self, row: Row, connection: psycopg.Connection[Any] | None = None) -> int:
        """Insert a row; its id."""
        statement = "insert into phionyx_outbox(payload, mac) values (%s, %s) returning id"
        if connection is None:
            return int(self.sql(statement, *row)[0][0])
        found = connection.execute(statement, row).fetchone()
        assert found is not None
        return int(found[0])

    def put_refused(self, row: Row) -> None:
        """Insert a row that bears the mark of a refused one from the beginning."""
        self.sql("insert into phionyx_outbox(payload, mac, refused) values (%s, %s, 'so there')", *row)

    def put_many(self, rows: Iterable[Row]) -> None:
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.executemany("insert into phionyx_outbox(payload, mac) values (%s, %s)", rows)

    def write(self, block_id: str, after: str | None, who: Attribution = Attribution()) -> int:  # noqa: B008 - frozen
        """A genuine write of a block whose last value is remembered; the id of its row."""
        row = self.row(changed(block_id, self.values.get(block_id), after, who))
        self.values[block_id] = after
        return self.put(row)

    # -- sealing and reading -------------------------------------------------------------------------------------

    def seal(self) -> SealReport:
        return self.sealer.seal_pending()

    def seal_afresh(self) -> SealReport:
        """As a sealer that has just started does."""
        return Sealer(self.ledger, self.key).seal_pending()

    def envelopes(self) -> list[dict[str, Any]]:
        return list(self.ledger.iter_all())

    def after_hashes(self, block_id: str) -> list[str]:
        return [e["mutation"]["diff"]["after_hash"] for e in self.envelopes() if e["mutation"]["block_id"] == block_id]

    def outbox(self) -> list[Any]:
        """(id, why it was refused or None), oldest first."""
        return self.sql("select id, refused from phionyx_outbox order by id")

    def refusals(self) -> dict[int, str]:
        """What `doctor` shows as refused."""
        with self.ledger.engine.connect() as connection:
            return {row["id"]: row["why"] for row in pending(connection)["refused"]}

    def findings(self, *keys: PluginKey) -> list[dict[str, Any]]:
        """What is wrong with the whole ledger, found with public keys only; an empty list is a valid ledger."""
        heads: dict[str, str] = {}
        chains: dict[str, ChainVerifier] = {}
        trusted = verifier_of(*(keys or (self.key,)))
        for envelope in self.envelopes():
            trace = envelope["subject"]["trace_id"]
            if trace not in chains:
                chains[trace] = ChainVerifier(verifier=trusted, expected_trace=trace, block_heads=heads)
            chains[trace].feed(envelope)
        results = [chain.result() for chain in chains.values()]
        assert all(result["valid"] for result in results) == (not any(result["findings"] for result in results))
        return [finding for result in results for finding in result["findings"]]

    @contextmanager
    def holding(self, statement: str) -> Any:
        """A transaction that has run a statement and stays open for the body."""
        with self.connect() as connection:
            connection.execute(statement)
            yield connection
            connection.rollback()

    def see_worker(self, key_id: str, seen: str = "now()") -> None:
        """A worker with this key said that it lives, at an SQL expression's time."""
        self.sql(
            f"insert into {tables.worker.name}(worker_id, seen_at, armed, key_id, info) values (%s, {seen}, true, %s, '{{}}')",
            secrets.token_hex(4),
            key_id,
        )


def payload_of(row: Row) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(row[0])
    return fields
