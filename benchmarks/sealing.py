"""The sealer on PostgreSQL: envelopes a second from a full outbox. No Letta is needed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

from chains import SEED
from measuring import quiet, seconds
from sqlalchemy import insert

from phionyx_letta import Ed25519Signer, Ed25519Verifier, verify_chain
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.plugin.attribution import Attribution
from phionyx_letta.plugin.checkpointing import CheckpointPolicy
from phionyx_letta.plugin.mutation import BlockColumns, block_change
from phionyx_letta.plugin.runtime import PluginKey
from phionyx_letta.plugin.sealer import Sealer
from phionyx_letta.settings import load_settings

if TYPE_CHECKING:
    from catalogue import Bench

_ROWS, _AGENTS, _BLOCKS = 5_000, 50, 4


def sealer(bench: Bench) -> tuple[float, dict[str, Any]]:
    """Rows as capture writes them, of 50 agents with four blocks each, taken from the outbox until it is empty.

    The batch is the plugin's own (``PHIONYX_LETTA_BATCH``); fsync is off, so it is the work that counts. Writing the
    rows is not part of the time. Every envelope is signed, and one chain is verified afterwards.
    """
    signer = Ed25519Signer(SEED)
    key = PluginKey(signer, "benchmark")
    ledger = SqlLedger(bench.postgres.new_database("bench_sealer"))
    rates, mutations = [], _mutations()
    batch = load_settings().batch
    try:
        for _ in range(bench.rounds(5)):
            rows = [key.outbox.seal(next(mutations)) for _ in range(_ROWS)]
            with ledger.engine.begin() as connection:
                connection.execute(insert(tables.outbox), [{"payload": p, "mac": mac} for p, mac in rows])
            pending = Sealer(ledger, key, batch=batch, checkpoints=CheckpointPolicy("benchmark", signer.public_key_hex))
            with quiet():
                rates.append(_ROWS / seconds(pending.seal_pending))
            with ledger.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql(
                    "vacuum analyze phionyx_outbox, phionyx_envelope, phionyx_chain, phionyx_block"
                )
        report = verify_chain(ledger.iter_chain("agent-0"), verifier=Ed25519Verifier(signer.public_key_hex))
    finally:
        ledger.close()
    if report["valid"] is not True or report["checked"] != len(rates) * _ROWS // _AGENTS:
        raise RuntimeError(f"what was sealed does not verify: {report}")
    message = "sha256:" + "0" * 64
    with quiet():
        signing = seconds(lambda: [signer.sign(message) for _ in range(_ROWS)])
    return statistics.median(rates), {
        "sign_per_s": _ROWS / signing,
        "rows": _ROWS,
        "batch": batch,
        "postgresql": bench.postgres.psql("show server_version"),
    }


def _mutations() -> Iterator[dict[str, Any]]:
    """Updates in turn over all blocks; every block's text grows by a line, a run makes four of them."""
    texts: dict[str, str] = {}
    for number in count():
        agent = f"agent-{number % _AGENTS}"
        block = f"block-{agent}-{number // _AGENTS % _BLOCKS}"
        who = Attribution(
            agent_id=agent,
            agent_type="letta_v1_agent",
            run_id=f"run-{agent}-{number // _AGENTS // 4}",
            step_id=f"step-{number}",
            tool="core_memory_append",
            tool_call_id=f"call-{number}",
            actor_id="user-0",
            operation="update_block",
        )
        old = texts.get(block, "")
        texts[block] = (old + f"fact {number}\n")[-2_000:]
        columns = [BlockColumns(value=text, label="human", limit=20_000) for text in (old, texts[block])]
        change = block_change(block, columns[0] if old else None, columns[1], who, organization_id="org-0")
        assert change is not None
        yield {**change, "worker": "benchmark"}
