"""Guarded reads on a running server: what was edited in the database reaches neither the model nor a client, whatever asks for it.

The attacker writes Letta's tables with psycopg; the server, its agents and its streams are the real ones, the model is scripted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from server_rig import ServerRig

from phionyx_letta.demo.model import ScriptedModel

KINDS = ("letta_v1_agent", "memgpt_v2_agent")
RUNS = ("blocking", "streaming", "streaming tokens", "background", "conversation")
SAY = 'CALL core_memory_append {"label":"human","content":"more"}'


class Rig(ServerRig):
    """And whether its agents answer."""

    def prompt(self, agent: str) -> str:
        return str(self.sql("select message_ids ->> 0 from agents where id = %s", agent)[0][0])

    def answer(self, agent: str, how: str, conversation: str = "") -> tuple[bool, str]:
        """Send a message; whether the run went well, and all that the client was told."""
        status, text = self.send(agent, SAY, how, conversation)
        if how == "background":
            return status == 200 and json.loads(text)["status"] == "completed", text
        failed = how != "blocking" and ("event: error" in text or "error_message" in text)
        return status == 200 and not failed, text


@contextmanager
def guarded(
    guard: str, database: str, model: ScriptedModel, home: Path, workers: int = 1, **more: str
) -> Iterator[Rig]:
    settings = {
        "PHIONYX_LETTA_SINKS": f"folder:{home / 'outside'}",
        "PHIONYX_LETTA_ON_ERROR": "closed",
        "PHIONYX_LETTA_GUARD": guard,
        **more,
    }
    with Rig.serving(database, model, home, settings, workers) as rig:
        yield rig


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
    went_well, text = rig.answer(agent, how, conversation)
    assert went_well, text
    message = rig.prompt(agent)
    if conversation and kind == "letta_v1_agent":  # LettaAgentV2 sends the agent's own prompt in a conversation too
        found = "select message_id from conversation_messages where conversation_id = %s order by position limit 1"
        message = str(rig.sql(found, conversation)[0][0])
    [(before,)] = rig.sql("select content::text from messages where id = %s", message)
    rig.sql("update messages set content = replace(content::text, 'Ann', 'Eve')::json where id = %s", message)
    asked = len(rig.model.requests)

    went_well, text = rig.answer(agent, how, conversation)
    assert not went_well
    assert names_everything(text, message), text
    assert len(rig.model.requests) == asked, "the model was asked"

    rig.sql("update messages set content = %s::json where id = %s", before, message)
    went_well, text = rig.answer(agent, how, conversation)
    assert went_well, text


def test_a_system_message_that_was_genuine_once_is_refused_too(rig: Rig) -> None:
    agent = rig.agent()
    message = rig.prompt(agent)
    [(old,)] = rig.sql("select content::text from messages where id = %s", message)
    assert rig.answer(agent, "blocking")[0]
    rig.rest.patch(f"/v1/blocks/{rig.block(agent)}", json={"value": "name: Anna"}).raise_for_status()
    rig.sql("update messages set content = %s::json where id = %s", old, message)
    went_well, text = rig.answer(agent, "blocking")
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
        went_well, text = rig.answer(agent, how)
        assert not went_well
        assert names_everything(text, block), (how, text)
    assert rig.rest.patch(f"/v1/blocks/{block}", json={"value": "built on it"}).status_code == 409
    assert len(rig.model.requests) == asked

    rig.sql(f'update block set "{column}" = %s where id = %s', before, block)
    assert rig.answer(agent, "blocking")[0]
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
    while not any(block in finding["what"] for finding in rig.command("log", code=None)["findings"]):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    said = " ".join(finding["message"] for finding in rig.command("doctor", code=None)["findings"])
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
            assert rig.answer(older, how)[0], "the baseline takes up what is older than the guard"
        block = rig.block(older)
        rig.sql("update block set value = 'name: Eve' where id = %s", block)
        answer = rig.rest.get(f"/v1/blocks/{block}")
        assert (answer.status_code, answer.json()["value"]) == (200, "name: Eve")
        deadline = time.monotonic() + 30
        while not (found := rig.command("log", code=None)["findings"]):
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert [(block in one["what"], one["refused"]) for one in found] == [(True, False)]
