"""One ledger of a Letta server's agents and of Letta Code's, on PostgreSQL and on SQLite: verified, exported and shown alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from code_rig import AGENT, KEY, SIGNER, Memory, Recorded
from typer.testing import CliRunner

from phionyx_letta.cli.app import app
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.letta_code.places import AgentMemory
from phionyx_letta.letta_code.sealing import ingest
from phionyx_letta.settings import Settings


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    return json.loads(done.stdout)


@pytest.mark.parametrize("engine", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def test_one_ledger(
    engine: str, memory: Memory, tmp_path: Path, context: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/l.db" if engine == "sqlite" else request.getfixturevalue("empty_database")
    sink = tmp_path / "sink"
    sink.mkdir()
    settings = Settings(home=str(tmp_path / "own"), sinks=f"folder:{sink}")
    memory.commit({"a.md": "1", "b.md": "1"})
    with closing(SqlLedger(url)) as ledger:
        ledger.emit(context(), signer=SIGNER)
        result = ingest(ledger, KEY, settings, [AgentMemory(AGENT, memory.path)])
        assert (result.envelopes, result.checkpoint, result.delivered) == (2, 3, True)
        ledger.emit(context("new", "newer", turn_index=1), signer=SIGNER)
        memory.commit({"a.md": "2"}, "m", "--amend")
        result = ingest(ledger, KEY, settings, [AgentMemory(AGENT, memory.path)])
        assert result.checkpoint == 4 + result.envelopes
        Recorded(ledger).agrees_with(memory)
        assert ingest(ledger, KEY, settings, [AgentMemory(AGENT, memory.path)]).envelopes == 0
    key = SIGNER.public_key_hex
    report = run("verify", "--ledger", url, "--key", key, "--checkpoint", str(sink))
    assert (report["verdict"], report["dimensions"]["checkpoint"]) == ("valid", "ok")
    exported = tmp_path / "all.jsonl"
    run("export", "--ledger", url, "--all", "--output", str(exported))
    assert run("verify", str(exported), "--key", key)["verdict"] == "valid"
    bundle = tmp_path / "evidence.zip"
    run("export", "--ledger", url, "--bundle", "--output", str(bundle))
    assert run("verify", str(bundle), "--key", key)["verdict"] == "valid"
    shown = run("show", AGENT, "0", "--ledger", url)
    assert "letta-code" in json.dumps(shown)
