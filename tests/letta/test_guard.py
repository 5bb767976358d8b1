"""Guarded reads on a running server: what was edited in the database reaches neither the model nor a client, whatever asks for it.

The attacker writes Letta's tables with psycopg; the server, its agents and its streams are the real ones, the model is scripted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from phionyx_letta.demo.letta_server import LettaServer
from phionyx_letta.demo.model import EMBEDDING_HANDLE, MODEL_HANDLE, ScriptedModel
from phionyx_letta.signing import generate_key

KINDS = ("letta_v1_agent", "memgpt_v2_agent")
RUNS = ("blocking", "streaming", "streaming tokens", "background", "conversation")
SAY = {"messages": [{"role": "user", "content": 'CALL core_memory_append {"label":"human","content":"more"}'}]}


@dataclass
class Rig:
    """The server, its database and the model's requests."""

    server: LettaServer
    database: str
    model: ScriptedModel
    rest: httpx.Client
    home: Path

    def agent(self, kind: str = "letta_v1_agent") -> str:
        body = {
            "name": f"{kind}-{time.time_ns()}",
            "agent_type": kind,
            "model": MODEL_HANDLE,
            "embedding": EMBEDDING_HANDLE,
            "memory_blocks": [{"label": "human", "value": "name: Ann"}],
            "tools": ["core_memory_append", "send_message"],  # without it the older kind goes on for 50 steps
            "include_base_tools": False,
        }
        answer = self.rest.post("/v1/agents/", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def sql(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database) as connection:
            done = connection.execute(statement, values or None)
            return done.fetchall() if done.description else []

    def block(self, agent: str) -> str:
        return str(self.sql("select block_id from blocks_agents where agent_id = %s", agent)[0][0])

    def prompt(self, agent: str) -> str:
        return str(self.sql("select message_ids ->> 0 from agents where id = %s", agent)[0][0])

    def conversation(self, agent: str) -> str:
        answer = self.rest.post("/v1/conversations/", params={"agent_id": agent}, json={})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def run(self, agent: str, how: str, conversation: str = "") -> tuple[bool, str]:
        """Send a message; whether the run went well, and all that the client was told."""
        if how == "blocking":
            answer = self.rest.post(f"/v1/agents/{agent}/messages", json=SAY)
            return answer.status_code == 200, answer.text
        if how == "background":
            answer = self.rest.post(f"/v1/agents/{agent}/messages/async", json=SAY)
            if answer.status_code != 200:
                return False, answer.text
            deadline = time.monotonic() + 60
            while (run := self.rest.get(f"/v1/runs/{answer.json()['id']}").json())["status"] not in (
                "completed",
                "failed",
            ):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            return run["status"] == "completed", json.dumps(run)
        path, body = f"/v1/agents/{agent}/messages/stream", SAY
        if how == "streaming tokens":
            body = {**SAY, "stream_tokens": True}
        if how == "conversation":
            path, body = f"/v1/conversations/{conversation}/messages", {**SAY, "streaming": True}
        with self.rest.stream("POST", path, json=body) as stream:
            text = b"".join(stream.iter_bytes()).decode()
            return stream.status_code == 200 and "event: error" not in text and "error_message" not in text, text

    def command(self, *arguments: str) -> Any:
        command = [Path(sys.executable).with_name("phionyx-letta"), *arguments, "--json"]
        done = subprocess.run(
            command,
            env={**os.environ, "PHIONYX_LETTA_SIGNING_KEY": str(self.home / "key"), "LETTA_PG_URI": self.database},
            capture_output=True,
            text=True,
            check=False,
        )
        return json.loads(done.stdout)


@contextmanager
def guarded(
    guard: str, database: str, model: ScriptedModel, home: Path, workers: int = 1, **more: str
) -> Iterator[Rig]:
    if not (home / "key").exists():
        generate_key(home / "key")
    settings = {
        "PHIONYX_LETTA_SIGNING_KEY": str(home / "key"),
        "PHIONYX_LETTA_SINKS": f"folder:{home / 'outside'}",
        "PHIONYX_LETTA_ON_ERROR": "closed",
        "PHIONYX_LETTA_GUARD": guard,
        **more,
    }
    with (
        LettaServer(database, model.base_url, plugin=True, schema=False, env=settings, workers=workers) as server,
        httpx.Client(base_url=server.base_url, timeout=120) as rest,
    ):
        yield Rig(server, database, model, rest, home)


@pytest.fixture(scope="module")
def rig(
    new_letta_database: Callable[[], str], model: ScriptedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    with guarded("reject", new_letta_database(), model, tmp_path_factory.mktemp("guard")) as found:
        yield found


def names_everything(text: str, named: str) -> bool:
    """The block, what was recorded and found, and the command."""
    return named in text and text.count("sha256:") >= 2 and "phionyx-letta reconcile" in text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", RUNS)
def test_an_edited_system_message_reaches_no_model_and_the_client_learns_why(rig: Rig, kind: str, how: str) -> None:
    agent = rig.agent(kind)
    conversation = rig.conversation(agent) if how == "conversation" else ""
    went_well, text = rig.run(agent, how, conversation)
    assert went_well, text
    message = rig.prompt(agent)
    if conversation and kind == "letta_v1_agent":  # LettaAgentV2 sends the agent's own prompt in a conversation too
        found = "select message_id from conversation_messages where conversation_id = %s order by position limit 1"
        message = str(rig.sql(found, conversation)[0][0])
    [(before,)] = rig.sql("select content::text from messages where id = %s", message)
    rig.sql("update messages set content = replace(content::text, 'Ann', 'Eve')::json where id = %s", message)
    asked = len(rig.model.requests)

    went_well, text = rig.run(agent, how, conversation)
    assert not went_well
    assert names_everything(text, message), text
    assert len(rig.model.requests) == asked, "the model was asked"

    rig.sql("update messages set content = %s::json where id = %s", before, message)
    went_well, text = rig.run(agent, how, conversation)
    assert went_well, text


def test_a_system_message_that_was_genuine_once_is_refused_too(rig: Rig) -> None:
    agent = rig.agent()
    message = rig.prompt(agent)
    [(old,)] = rig.sql("select content::text from messages where id = %s", message)
    assert rig.run(agent, "blocking")[0]
    rig.rest.patch(f"/v1/blocks/{rig.block(agent)}", json={"value": "name: Anna"}).raise_for_status()
    rig.sql("update messages set content = %s::json where id = %s", old, message)
    went_well, text = rig.run(agent, "blocking")
    assert not went_well
    assert names_everything(text, message), text


@pytest.mark.parametrize("column", ["value", "description", "limit", "read_only"])
def test_an_edited_block_is_not_read_by_rest_and_not_sent(rig: Rig, column: str) -> None:
    agent = rig.agent()
    block = rig.block(agent)
    [(before,)] = rig.sql(f'select "{column}" from block where id = %s', block)
    forged = {"value": "name: Eve", "description": "forged", "limit": 7, "read_only": True}[column]
    rig.sql(f'update block set "{column}" = %s where id = %s', forged, block)
    asked = len(rig.model.requests)
    for path in (
        f"/v1/blocks/{block}",
        f"/v1/agents/{agent}/core-memory/blocks/human",
        f"/v1/agents/{agent}/core-memory/blocks",
        f"/v1/agents/{agent}",
        f"/v1/agents/{agent}/context",
    ):
        answer = rig.rest.get(path)
        assert answer.status_code == 409, (path, answer.text)
        assert names_everything(answer.text, block), (path, answer.text)
        assert "forged" not in answer.text
    for how in RUNS[:-1]:
        went_well, text = rig.run(agent, how)
        assert not went_well
        assert names_everything(text, block), (how, text)
    assert rig.rest.patch(f"/v1/blocks/{block}", json={"value": "built on it"}).status_code == 409
    assert len(rig.model.requests) == asked

    rig.sql(f'update block set "{column}" = %s where id = %s', before, block)
    assert rig.run(agent, "blocking")[0]
    assert rig.rest.get(f"/v1/blocks/{block}").status_code == 200


def test_a_block_that_was_put_into_the_database_by_hand_is_refused(rig: Rig) -> None:
    agent = rig.agent()
    forged = "block-00000000-0000-4000-8000-00000000beef"
    columns = ", ".join(
        f'"{name}"'
        for (name,) in rig.sql("select column_name from information_schema.columns where table_name = 'block'")
        if name != "id"
    )
    rig.sql(
        f"insert into block (id, {columns}) select %s, {columns} from block where id = %s", forged, rig.block(agent)
    )
    time.sleep(0.5)
    answer = rig.rest.get(f"/v1/blocks/{forged}", timeout=120)
    assert answer.status_code == 409, answer.text
    assert "nothing is recorded of it" in answer.text
    rig.sql("delete from block where id = %s", forged)


def test_what_was_refused_stands_in_doctor_and_log(rig: Rig) -> None:
    agent = rig.agent()
    block = rig.block(agent)
    rig.sql("update block set value = 'name: Eve' where id = %s", block)
    assert rig.rest.get(f"/v1/blocks/{block}").status_code == 409
    deadline = time.monotonic() + 30
    while not any(block in finding["what"] for finding in rig.command("log")["findings"]):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    said = " ".join(finding["message"] for finding in rig.command("doctor")["findings"])
    assert "guard=reject" in said
    assert "reads were refused" in said
    rig.sql("update block set value = 'name: Ann' where id = %s", block)


def test_report_serves_what_it_reports_and_takes_up_what_is_older_than_it(
    new_letta_database: Callable[[], str], model: ScriptedModel, tmp_path: Path
) -> None:
    database = new_letta_database()
    with guarded("off", database, model, tmp_path) as rig:
        older = rig.agent()
    with guarded("report", database, model, tmp_path, PHIONYX_LETTA_ON_ERROR="open") as rig:
        for how in RUNS[:-1]:
            assert rig.run(older, how)[0], "the baseline takes up what is older than the guard"
        block = rig.block(older)
        rig.sql("update block set value = 'name: Eve' where id = %s", block)
        answer = rig.rest.get(f"/v1/blocks/{block}")
        assert (answer.status_code, answer.json()["value"]) == (200, "name: Eve")
        deadline = time.monotonic() + 30
        while not (found := rig.command("log")["findings"]):
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert [(block in one["what"], one["refused"]) for one in found] == [(True, False)]
