"""One ledger of a running Letta server, with the plugin, and of Letta Code's memories: verified, exported and shown alike."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from phionyx_letta import generate_key
from phionyx_letta.cli.app import app
from phionyx_letta.demo.model import EMBEDDING_HANDLE, MODEL_HANDLE
from phionyx_letta.ledger.sql import SqlLedger

CODE_AGENT = "agent-0c0de000-0000-4000-8000-000000000001"


def cli(*arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def commit(memory: Path, text: str) -> None:
    """As Letta Code's agent does it."""
    (memory / "human.md").write_text(text)
    for arguments in (("add", "-A"), ("commit", "-q", "-m", "learnt")):
        subprocess.run(
            ["git", "-C", str(memory), "-c", "user.name=A", "-c", f"user.email={CODE_AGENT}@letta.com", *arguments],
            check=True,
            env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull},
        )


@pytest.mark.slow
def test_a_servers_agents_and_letta_codes_stand_in_one_ledger(
    new_letta_database: Callable[[], str], letta_server_factory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, sink, url = tmp_path / "signing.key", tmp_path / "sink", new_letta_database()
    public = generate_key(key)
    sink.mkdir()
    settings = {
        "PHIONYX_LETTA_SIGNING_KEY": str(key),
        "PHIONYX_LETTA_SINKS": f"folder:{sink}",
        "PHIONYX_LETTA_HOME": str(tmp_path / "own"),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    memory = tmp_path / "letta" / "agents" / CODE_AGENT / "memory"
    memory.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", "-b", "main", str(memory)], check=True)
    server = letta_server_factory(url, plugin=True, env=settings)
    with httpx.Client(base_url=server.base_url, timeout=120) as rest, closing(SqlLedger(url, create=False)) as ledger:
        body = {
            "name": "ann",
            "agent_type": "letta_v1_agent",
            "model": MODEL_HANDLE,
            "embedding": EMBEDDING_HANDLE,
            "memory_blocks": [{"label": "human", "value": "name: Ann"}],
            "include_base_tools": False,
        }
        agent = rest.post("/v1/agents/", json=body).raise_for_status().json()["id"]
        for number in range(3):  # both write in turn, the server while ingest runs beside it
            block = f"/v1/agents/{agent}/core-memory/blocks/human"
            rest.patch(block, json={"value": f"name: Ann, {number}"}).raise_for_status()
            commit(memory, f"---\nname: human\n---\nAnn {number}\n")
            page = cli("code", "ingest", "--ledger", url, "--letta-dir", str(tmp_path / "letta"))
            assert (page["envelopes"], page["problems"]) == (1, [])
        deadline = time.monotonic() + 60
        while ledger.has_pending():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert cli("code", "ingest", "--ledger", url, "--letta-dir", str(tmp_path / "letta"))["envelopes"] == 0
        chains = Counter(row.trace_id for row in ledger.select())
        assert (chains[CODE_AGENT], chains[agent] >= 4) == (3, True)
    report = cli("verify", "--ledger", url, "--key", public, "--checkpoint", str(sink))
    assert (report["verdict"], report["dimensions"]["block_linkage"]) == ("valid", "ok")
    exported, bundle = tmp_path / "all.jsonl", tmp_path / "evidence.zip"
    cli("export", "--ledger", url, "--all", "--output", str(exported))
    found = Counter(json.loads(line)["subject"]["trace_id"] for line in exported.read_text().splitlines())
    assert (found[CODE_AGENT], found[agent]) == (3, chains[agent])
    cli("export", "--ledger", url, "--bundle", "--output", str(bundle))
    for file in (exported, bundle):
        assert cli("verify", str(file), "--key", public)["verdict"] == "valid"
    shown = [cli("show", one, "0", "--ledger", url) for one in (agent, CODE_AGENT)]
    assert shown[0].keys() == shown[1].keys()
    assert "letta-code" in json.dumps(shown[1])
