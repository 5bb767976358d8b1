"""The limits the docs admit, shown: what an attacker with the database and without the key can still hide today.

Each of these verifies as valid, with `checkpoint` not measured. When checkpoints outside the database close one, its test
must change together with docs/guarantees.md.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from phionyx_letta import Ed25519Signer, Ed25519Verifier, MemoryMutationContext, compute_memory_diff
from phionyx_letta.ledger.audit_sql import verify_ledger
from phionyx_letta.ledger.sql import SqlLedger

SIGNER = Ed25519Signer("05" * 32)
VERIFIER = Ed25519Verifier(SIGNER.public_key_hex)


def cut_the_tail(database: sqlite3.Connection) -> None:
    database.execute("delete from phionyx_envelope where seq = 3")
    head = database.execute("select current_hash from phionyx_envelope where seq = 2").fetchone()[0]
    database.execute("update phionyx_chain set head = ?, length = 1 where trace_id = 'b'", (head,))
    after = database.execute("select body from phionyx_envelope where seq = 2").fetchone()[0]
    hash_ = after.split('"after_hash":"')[1][:71]
    database.execute("update phionyx_block set after_hash = ?, seq = 2 where block_id = 'block-b'", (hash_,))


def remove_a_whole_chain(database: sqlite3.Connection) -> None:
    database.execute("delete from phionyx_envelope where trace_id = 'a'")
    database.execute("update phionyx_envelope set seq = seq - 2")
    database.execute("delete from phionyx_chain where trace_id = 'a'")
    database.execute("delete from phionyx_block where block_id = 'block-a'")
    database.execute("update phionyx_block set seq = seq - 2")


@pytest.mark.parametrize("attack", [cut_the_tail, remove_a_whole_chain])
def test_a_removed_end_and_a_removed_chain_are_not_seen_without_a_checkpoint(
    attack: Callable[[sqlite3.Connection], None], tmp_path: Path
) -> None:
    path = tmp_path / "ledger.db"
    ledger = SqlLedger(f"sqlite:///{path}")
    for trace in ("a", "b"):
        for turn, (before, after) in enumerate([("", "one"), ("one", "two")]):
            diff = compute_memory_diff(before, after)
            context = MemoryMutationContext(trace, turn, "p", f"block-{trace}", "human", "write", diff)
            ledger.emit(context, signer=SIGNER)
    assert verify_ledger(ledger, verifier=VERIFIER).envelopes == 4
    with sqlite3.connect(path) as database:
        attack(database)
    report = verify_ledger(ledger, verifier=VERIFIER)
    ledger.close()
    assert report.envelopes < 4
    assert (report.verdict, report.dimensions["checkpoint"]) == ("valid", "not_measured"), report.findings
