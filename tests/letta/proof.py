"""Proof that nothing was lost and nothing recorded twice, from a witness that is not ours: a trigger of PostgreSQL.

The trigger writes every committed state of every block into a table of its own, in the transaction that makes it. A block's
row is locked then, so the order of the entries is the order of the commits.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import psycopg

from phionyx_letta.diff import content_hash
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.signing import Verifier
from phionyx_letta.verification import ChainVerifier

_WITNESS = (
    "create table proof (seq bigserial primary key, id text, version integer, value text, did text)",
    """create function witness() returns trigger language plpgsql as $$ begin
         if tg_op = 'DELETE' then
           insert into proof(id, version, value, did) values (old.id, old.version, '', tg_op);
         elsif tg_op = 'INSERT' or old.value is distinct from new.value then
           insert into proof(id, version, value, did) values (new.id, new.version, new.value, tg_op);
         end if;
         return null;
       end $$""",
    "create trigger witness after insert or update or delete on block for each row execute function witness()",
)
#: Events that leave the content as it is.
_SAME_CONTENT = {"attach", "detach", "baseline"}


@dataclass(frozen=True)
class Proof:
    """What was compared."""

    states: int
    envelopes: int
    blocks: int
    chains: int


def install_witness(url: str) -> None:
    """From now on every committed state of a block is noted."""
    with psycopg.connect(url) as connection:
        for statement in _WITNESS:
            connection.execute(statement)


def prove(url: str, verifier: Verifier) -> Proof:
    """Each committed state of each block has exactly one envelope, in order, and the whole ledger verifies.

    Call it when all is sealed.
    """
    ledger = SqlLedger(url)
    try:
        rows = ledger.select()
    finally:
        ledger.close()
    with psycopg.connect(url) as connection:
        witnessed = connection.execute("select id, value, version from proof order by seq").fetchall()
        left = connection.execute("select id, refused from phionyx_outbox").fetchall()
    assert left == []
    states: dict[str, list[str]] = defaultdict(list)
    for block_id, value, _ in witnessed:
        states[block_id].append(content_hash(value))
    assert _recorded(rows) == dict(states)
    for name in ("outbox_id", "nonce", "current_hash"):
        values = [getattr(row, name) for row in rows]
        assert None not in values
        assert len(set(values)) == len(values), f"the same {name} twice"
    assert [row.seq for row in rows] == list(range(len(rows)))
    chains = _verified(rows, verifier)
    return Proof(len(witnessed), len(rows), len(states), chains)


def _recorded(rows: list[Any]) -> dict[str, list[str]]:
    """The content hashes each block went through, by its envelopes."""
    recorded: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.event not in _SAME_CONTENT:
            recorded[row.block_id].append(json.loads(row.body)["mutation"]["diff"]["after_hash"])
    return dict(recorded)


def _verified(rows: list[Any], verifier: Verifier) -> int:
    """Verify every chain and the linkage of blocks across them; how many chains there are."""
    heads: dict[str, str] = {}
    chains: dict[str, ChainVerifier] = {}
    for row in rows:
        if row.trace_id not in chains:
            chains[row.trace_id] = ChainVerifier(verifier=verifier, expected_trace=row.trace_id, block_heads=heads)
        chains[row.trace_id].feed(json.loads(row.body))
    for chain in chains.values():
        result = chain.result()
        assert result["valid"] is True, result["findings"]
        assert result["findings"] == []
        dimensions = result["assurance"]["dimensions"]
        assert {dimensions[name] for name in ("hashes", "continuity", "signatures", "key_trust", "block_linkage")} == {
            "ok"
        }
    return len(chains)
