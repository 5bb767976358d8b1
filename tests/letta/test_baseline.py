"""Blocks older than the plugin: what the ledger says of them before, during and after the baseline."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from phionyx_letta import Ed25519Verifier
from phionyx_letta.ledger.audit_sql import verify_ledger
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.plugin.baseline import record_baseline, unrecorded_blocks
from phionyx_letta.plugin.runtime import load_key
from phionyx_letta.plugin.sealer import Sealer
from phionyx_letta.settings import Settings

OLDER = """
import asyncio, json, sys, letta.server.rest_api.app as app
from letta.schemas.block import Block, BlockUpdate
from letta.schemas.agent import CreateAgent
from letta.schemas.embedding_config import EmbeddingConfig
from letta.schemas.llm_config import LLMConfig
from phionyx_letta.plugin import install

async def main():
    app.server.default_org = await app.server.organization_manager.create_default_organization_async()
    user = await app.server.user_manager.create_default_actor_async()
    blocks, agents = app.server.block_manager, app.server.agent_manager
    made = [await blocks.create_or_update_block_async(Block(label=f"l{i}", value=f"old {i}"), user) for i in range(5)]
    model = LLMConfig(model="m", model_endpoint_type="openai", model_endpoint="http://127.0.0.1:9/v1", context_window=32000)
    new = CreateAgent(name="a", llm_config=model, embedding_config=EmbeddingConfig.default_config(provider="openai"),
                      include_base_tools=False, block_ids=[made[0].id])
    agent = await agents.create_agent_async(new, user)
    install()
    await agents.attach_block_async(agent.id, made[1].id, user)      # attached before it has a record
    await agents.detach_block_async(agent.id, made[1].id, user)
    await agents.attach_block_async(agent.id, made[1].id, user)
    await blocks.update_block_async(made[2].id, BlockUpdate(value="new 2"), user)  # its record begins with a write
    print(json.dumps({"blocks": [block.id for block in made], "agent": agent.id}))

asyncio.run(main())
"""


def digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def test_a_baseline_begins_the_record_of_each_older_block_and_raises_no_alarm(
    run_in_letta: Callable[..., Any], database: str, monkeypatch: Any
) -> None:
    seed = "42" * 32
    env = {"PHIONYX_LETTA_SIGNING_KEY": seed, "PHIONYX_LETTA_SEALER": "0"}
    ids = run_in_letta(OLDER, database=database, env=env)
    monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", seed)
    key = load_key(Settings())
    ledger = SqlLedger(database)
    sealer = Sealer(ledger, key)
    sealer.seal_batch()  # the attachments are sealed before any baseline: their block has no record yet
    early = [json.loads(row.body) for row in ledger.select(block_id=ids["blocks"][1])]
    assert [one["subject"]["metadata"]["letta"]["content"] for one in early] == ["not recorded"] * 3
    with ledger.engine.connect() as connection:
        assert unrecorded_blocks(connection) == 4
    while record_baseline(ledger, key.outbox, "test", limit=2):
        sealer.seal_pending()
    with ledger.engine.connect() as connection:
        assert unrecorded_blocks(connection) == 0
    baselines = [json.loads(row.body) for row in ledger.select(event="baseline")]
    found = {one["mutation"]["block_id"]: one["mutation"]["diff"] for one in baselines}
    assert set(found) == set(ids["blocks"]) - {ids["blocks"][2]}
    for number, block in enumerate(ids["blocks"]):
        if block in found:
            assert found[block]["before_hash"] == found[block]["after_hash"] == digest(f"old {number}")
    traces = {one["mutation"]["block_id"]: one["subject"]["trace_id"] for one in baselines}
    assert traces[ids["blocks"][0]] == traces[ids["blocks"][1]] == ids["agent"]
    assert {one["subject"]["producer"] for one in baselines} == {"phionyx-letta.baseline"}
    report = verify_ledger(ledger, verifier=Ed25519Verifier(key.signer.public_key_hex))  # type: ignore[attr-defined]
    assert report.verdict == "valid", report
    assert report.dimensions["block_linkage"] == "ok"
    ledger.close()
