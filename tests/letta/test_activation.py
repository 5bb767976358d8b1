"""How the plugin is turned on and off in a process that has a real Letta."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
RunInLetta = Callable[..., Any]

WRITE = """
import asyncio, json, sys
sys.argv.append("--no-generation")
import letta.server.rest_api.app as app
from letta.schemas.block import Block
from letta.server.db import db_registry
from sqlalchemy import text

async def main():
    app.server.default_org = await app.server.organization_manager.create_default_organization_async()
    user = await app.server.user_manager.create_default_actor_async()
    error = None
    try:
        await app.server.block_manager.create_or_update_block_async(Block(label="a", value="1"), user)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    async with db_registry.async_session() as session:
        written = (await session.execute(text("select count(*) from block"))).scalar()
        exists = (await session.execute(text("select to_regclass('phionyx_outbox')"))).scalar()
        rows = (await session.execute(text("select count(*) from phionyx_outbox"))).scalar() if exists else None
    from phionyx_letta.plugin import activation
    worker = activation.worker()
    print(json.dumps({"blocks": written, "rows": rows, "error": error,
                      "gaps": worker and dict(worker.runtime.counts).get("gaps", 0)}))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def arming(run_in_letta: RunInLetta, new_letta_database: Callable[[], str]) -> dict[str, Any]:
    env = {"PHIONYX_LETTA_SEALER": "0"}
    result: dict[str, Any] = run_in_letta(SCRIPTS / "arming.py", database=new_letta_database(), env=env)
    return result


def test_nothing_is_captured_before_install_and_after_uninstall(arming: dict[str, Any]) -> None:
    assert arming["not armed"] == []
    assert arming["disarmed"] == arming["armed twice"] == ["update"]


def test_installing_twice_captures_each_write_once(arming: dict[str, Any]) -> None:
    assert arming["armed twice"] == ["update"]
    assert arming["listeners armed"] == 5


def test_every_target_is_found_in_this_letta_and_restored_by_uninstall(arming: dict[str, Any]) -> None:
    assert arming["wrapped"] == arming["targets"] > 15
    assert arming["restored"]
    assert arming["listeners disarmed"] == 0
    assert arming["middleware before"] == arming["middleware after"]


def test_it_can_be_armed_again(arming: dict[str, Any]) -> None:
    assert arming["armed again"] == ["update", "update"]


def test_a_context_manager_gives_parent_and_reason_in_code(arming: dict[str, Any]) -> None:
    parent = "envelope://sha256:" + "cd" * 32
    assert arming["context"] == {"parent": parent, "reason": "retention_policy", "kind": "clear"}
    assert "nonsense" in arming["malformed"]


def test_the_plugin_is_inert_under_alembic(run_in_letta: RunInLetta, database: str, tmp_path: Path) -> None:
    script = tmp_path / "alembic"
    script.write_text(WRITE)
    assert run_in_letta(script, database=database, plugin=True) == {
        "blocks": 1,
        "rows": None,
        "error": None,
        "gaps": None,
    }
