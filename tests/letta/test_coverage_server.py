"""Every way a block changes on a running server: agents of both classes and their tools, runs of every sort, REST.

One server, armed by the one setting; what it recorded is read from its ledger. The model's answers are scripted.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from phionyx_letta import envelope_schema
from phionyx_letta.demo.letta_server import LettaServer
from phionyx_letta.demo.model import EMBEDDING_HANDLE, MODEL_HANDLE, ScriptedModel
from phionyx_letta.ledger.sql import SqlLedger

KINDS = ("letta_v1_agent", "memgpt_v2_agent")
TOOLS = [
    "core_memory_append",
    "core_memory_replace",
    "memory_insert",
    "memory_replace",
    "memory_rethink",
    "memory_apply_patch",
    "memory",
]
SCHEMA = Draft202012Validator(envelope_schema())
PARENT = "envelope://sha256:" + "ab" * 32


@dataclass
class Rig:
    """The server, its ledger and its REST API."""

    server: LettaServer
    ledger: SqlLedger
    rest: httpx.Client

    def agent(self, kind: str = "letta_v1_agent", **more: Any) -> str:
        body = {
            "name": f"{kind}-{time.time_ns()}",
            "agent_type": kind,
            "model": MODEL_HANDLE,
            "embedding": EMBEDDING_HANDLE,
            "memory_blocks": [{"label": "human", "value": "name: Ann"}, {"label": "persona", "value": "a rig"}],
            "tools": [*TOOLS, *(["send_message"] if kind == "memgpt_v2_agent" else [])],  # else it goes on for 50 steps
            "include_base_tools": False,
            **more,
        }
        return str(self.call("POST", "/v1/agents/", json=body)["id"])

    def call(self, method: str, path: str, **more: Any) -> Any:
        answer = self.rest.request(method, path, **more)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content else None

    def say(self, agent: str, *lines: str, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
        body = {"messages": [{"role": "user", "content": "\n".join(lines)}]}
        answer = self.call("POST", f"/v1/agents/{agent}/messages", json=body, headers=headers)
        return list(answer["messages"])

    def block(self, agent: str, label: str = "human") -> dict[str, Any]:
        return dict(self.call("GET", f"/v1/agents/{agent}/core-memory/blocks/{label}"))

    def mark(self) -> int:
        """The newest envelope, once everything so far is sealed."""
        deadline = time.monotonic() + 60
        while self.ledger.has_pending():
            assert time.monotonic() < deadline, "the outbox is not sealed"
            time.sleep(0.02)
        newest = self.ledger.select(limit=1, newest=True)
        return newest[0].seq if newest else -1

    def since(self, mark: int) -> list[dict[str, Any]]:
        self.mark()
        found = [json.loads(row.body) for row in self.ledger.select(after=mark)]
        for envelope in found:
            SCHEMA.validate(envelope)
        return found


@pytest.fixture(scope="module")
def rig(new_letta_database: Callable[[], str], model: ScriptedModel) -> Iterator[Rig]:
    database = new_letta_database()
    with LettaServer(database, model.base_url, plugin=True, schema=False) as server:
        ledger = SqlLedger(database, create=False)
        with httpx.Client(base_url=server.base_url, timeout=120) as rest:
            yield Rig(server, ledger, rest)
        ledger.close()


def digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def letta_of(envelope: dict[str, Any]) -> dict[str, Any]:
    return dict(envelope["subject"]["metadata"]["letta"])


def summary(envelopes: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(letta_of(e).get("tool", ""), e["mutation"]["mutation_kind"], letta_of(e)["event"]) for e in envelopes]


@pytest.mark.parametrize("kind", KINDS)
def test_each_memory_tool_of_an_agent_is_recorded_with_its_call(kind: str, rig: Rig) -> None:
    agent = rig.agent(kind)
    mark = rig.mark()
    messages = rig.say(
        agent,
        'CALL core_memory_append {"label":"human","content":"likes tea"}',
        'CALL core_memory_replace {"label":"human","old_content":"tea","new_content":"coffee"}',
        'CALL memory_insert {"label":"human","new_string":"lives in Oslo","insert_line":-1}',
        'CALL memory_replace {"label":"human","old_string":"Oslo","new_string":"Bergen"}',
        'CALL memory_apply_patch {"label":"human","patch":"-name: Ann\\n+name: Anna"}',
        'CALL memory_rethink {"label":"human","new_memory":"cleaned"}',
        'CALL core_memory_replace {"label":"human","old_content":"cleaned","new_content":""}',
        'CALL core_memory_append {"label":"human","content":"anew"}',
    )
    found = rig.since(mark)
    assert summary(found) == [
        ("core_memory_append", "append", "update"),
        ("core_memory_replace", "write", "update"),
        ("memory_insert", "append", "update"),
        ("memory_replace", "write", "update"),
        ("memory_apply_patch", "write", "update"),
        ("memory_rethink", "write", "update"),
        ("core_memory_replace", "clear", "update"),
        ("core_memory_append", "append", "update"),
    ]
    calls = [m["tool_call"]["tool_call_id"] for m in messages if m["message_type"] == "tool_call_message"]
    memory_calls = calls[: len(found)]  # memgpt_v2 ends with send_message
    assert [letta_of(envelope)["tool_call_id"] for envelope in found] == memory_calls
    runs = {run["id"] for run in rig.call("GET", "/v1/runs/", params={"agent_id": agent})}
    steps = {message["step_id"] for message in messages if message.get("step_id")}
    for envelope in found:
        letta = letta_of(envelope)
        assert letta["agent_id"] == agent == envelope["subject"]["trace_id"]
        assert letta["run_id"] in runs
        assert letta["step_id"] in steps
        assert letta["actor_id"].startswith("user-")
        assert letta["tool_id"].startswith("tool-")
        assert envelope["subject"]["producer"] == f"letta.{agent}"
        assert letta["request"]["path"] == f"/v1/agents/{agent}/messages"
    assert len({envelope["subject"]["turn_index"] for envelope in found}) == 1, "one run, one turn"
    assert found[0]["mutation"]["diff"]["before_hash"] == digest("name: Ann")
    assert found[-1]["mutation"]["diff"]["after_hash"] == digest(rig.block(agent)["value"])
    diffs = [envelope["mutation"]["diff"] for envelope in found]
    assert all(new["before_hash"] == old["after_hash"] for old, new in itertools.pairwise(diffs))


def test_the_memory_tool_creates_edits_renames_and_forgets(rig: Rig) -> None:
    agent = rig.agent()
    mark = rig.mark()
    rig.say(
        agent,
        'CALL memory {"command":"create","path":"/memories/notes","description":"d","file_text":"hello"}',
        'CALL memory {"command":"insert","path":"/memories/notes","insert_text":"more","insert_line":1}',
        'CALL memory {"command":"str_replace","path":"/memories/notes","old_string":"hello","new_string":"bye"}',
        'CALL memory {"command":"rename","old_path":"/memories/notes","new_path":"/memories/notes2"}',
    )
    rig.say(agent, 'CALL memory {"command":"delete","path":"/memories/notes2"}')  # in the next run: Letta renames late
    found = rig.since(mark)
    assert summary(found) == [
        ("memory", "write", "create"),
        ("memory", "write", "attach"),
        ("memory", "append", "update"),
        ("memory", "write", "update"),
        ("memory", "write", "rename"),
        ("memory", "forget", "detach"),
    ]
    assert {envelope["subject"]["trace_id"] for envelope in found} == {agent}
    forgotten = found[-1]["mutation"]
    assert forgotten["forgetting_reason"]
    assert forgotten["diff"]["before_hash"] == forgotten["diff"]["after_hash"] == digest("bye\nmore")
    assert len({letta_of(envelope)["tool_call_id"] for envelope in found}) == 5, "create and attach are one call"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["streaming", "background"])
def test_runs_of_every_sort_are_recorded(kind: str, how: str, rig: Rig) -> None:
    agent = rig.agent(kind)
    mark = rig.mark()
    body = {"messages": [{"role": "user", "content": 'CALL core_memory_append {"label":"human","content":"more"}'}]}
    if how == "streaming":
        body |= {"stream_tokens": True}
        with rig.rest.stream("POST", f"/v1/agents/{agent}/messages/stream", json=body) as stream:
            assert stream.status_code == 200
            assert sum(len(chunk) for chunk in stream.iter_bytes()) > 0
    else:
        run = rig.call("POST", f"/v1/agents/{agent}/messages/async", json=body)["id"]
        deadline = time.monotonic() + 60
        while rig.call("GET", f"/v1/runs/{run}")["status"] not in ("completed", "failed"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    [envelope] = rig.since(mark)
    letta = letta_of(envelope)
    assert (letta["tool"], letta["agent_id"], envelope["mutation"]["mutation_kind"]) == (
        "core_memory_append",
        agent,
        "append",
    )
    assert letta["tool_call_id"].startswith("call_")
    assert letta["run_id"] in {run["id"] for run in rig.call("GET", "/v1/runs/", params={"agent_id": agent})}
    assert envelope["mutation"]["diff"]["after_hash"] == digest(rig.block(agent)["value"])


def test_parallel_calls_keep_their_own_call_ids(rig: Rig) -> None:
    agent = rig.agent(parallel_tool_calls=True)
    mark = rig.mark()
    messages = rig.say(
        agent,
        'PARCALL core_memory_append {"label":"human","content":"p1"}',
        'PARCALL core_memory_append {"label":"persona","content":"p2"}',
        'PARCALL core_memory_append {"label":"human","content":"p1"}',
    )
    found = rig.since(mark)
    asked = {}
    for message in messages:
        calls = message.get("tool_calls") or ([message["tool_call"]] if message.get("tool_call") else [])
        asked |= {call["tool_call_id"]: json.loads(call["arguments"]) for call in calls}
    assert len(asked) == 3
    assert len(found) == 3
    assert len({letta_of(envelope)["tool_call_id"] for envelope in found}) == 3
    for envelope in found:
        arguments = asked[letta_of(envelope)["tool_call_id"]]
        assert arguments["label"] == envelope["mutation"]["block_label"]
    assert len({letta_of(envelope)["run_id"] for envelope in found}) == 1


def test_a_sandboxed_custom_tool_is_recorded_under_its_name(rig: Rig) -> None:
    source = '''
def edit_mem(agent_state: "AgentState") -> str:
    """Edit memory.

    Args:
        agent_state (AgentState): state

    Returns:
        str: ok
    """
    agent_state.memory.update_block_value(label="human", value="edited in the sandbox")
    return "ok"
'''
    tool = rig.call("POST", "/v1/tools/", json={"source_code": source, "source_type": "python"})
    agent = rig.agent(tool_ids=[tool["id"]])
    mark = rig.mark()
    rig.say(agent, "CALL edit_mem {}")
    [envelope] = rig.since(mark)
    letta = letta_of(envelope)
    assert (letta["tool"], letta["tool_type"], letta["tool_id"]) == ("edit_mem", "custom", tool["id"])
    assert letta["tool_call_id"]
    assert letta["run_id"]
    assert envelope["mutation"]["diff"]["after_hash"] == digest("edited in the sandbox")


def test_changes_over_rest_name_the_operator_and_the_request(rig: Rig) -> None:
    agent = rig.agent()
    human = rig.block(agent)["id"]
    mark = rig.mark()
    rig.call("PATCH", f"/v1/agents/{agent}/core-memory/blocks/human", json={"value": "by agent path"})
    rig.call("PATCH", f"/v1/blocks/{human}", json={"value": "by block path"})
    free = rig.call("POST", "/v1/blocks/", json={"label": "free", "value": "f"})["id"]
    rig.call("PATCH", f"/v1/agents/{agent}/core-memory/blocks/attach/{free}")
    rig.call("PATCH", f"/v1/agents/{agent}/core-memory/blocks/detach/{free}")
    reason = {"X-Phionyx-Forgetting-Reason": "explicit_user_request", "X-Phionyx-Parent-Envelope": PARENT}
    rig.call("PATCH", f"/v1/blocks/{human}", json={"value": ""}, headers=reason)
    rig.call("DELETE", f"/v1/blocks/{free}", headers=reason)
    found = rig.since(mark)
    assert [
        (e["mutation"]["mutation_kind"], letta_of(e)["event"], letta_of(e)["request"]["method"]) for e in found
    ] == [
        ("write", "update", "PATCH"),
        ("write", "update", "PATCH"),
        ("write", "create", "POST"),
        ("write", "attach", "PATCH"),
        ("forget", "detach", "PATCH"),
        ("clear", "update", "PATCH"),
        ("delete", "delete", "DELETE"),
    ]
    assert {envelope["subject"]["producer"] for envelope in found} == {"letta.api"}
    assert all(letta_of(envelope)["actor_id"].startswith("user-") for envelope in found)
    assert [envelope["subject"]["trace_id"] for envelope in found] == [agent, agent, free, agent, agent, agent, free]
    for envelope in found[-2:]:
        assert envelope["mutation"]["forgetting_reason"] == "explicit_user_request"
        audit = envelope["subject"]["metadata"]["memory_audit"]
        assert audit["parent_envelope_ref"] == PARENT
        assert audit["kind"] == envelope["mutation"]["mutation_kind"]
    assert found[0]["mutation"]["forgetting_reason"] is None
    assert "memory_audit" not in found[0]["subject"]["metadata"]


def test_a_parent_header_reaches_the_tools_of_blocking_streaming_and_background_runs(rig: Rig) -> None:
    agent = rig.agent()
    mark = rig.mark()
    headers = {"X-Phionyx-Parent-Envelope": PARENT.removeprefix("envelope://")}
    line = 'CALL core_memory_append {"label":"human","content":"caused"}'
    body = {"messages": [{"role": "user", "content": line}]}
    rig.say(agent, line, headers=headers)
    with rig.rest.stream("POST", f"/v1/agents/{agent}/messages/stream", json=body, headers=headers) as stream:
        assert sum(len(chunk) for chunk in stream.iter_bytes()) > 0
    run = rig.call("POST", f"/v1/agents/{agent}/messages/async", json=body, headers=headers)["id"]
    deadline = time.monotonic() + 60
    while rig.call("GET", f"/v1/runs/{run}")["status"] not in ("completed", "failed"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    found = rig.since(mark)
    assert [e["subject"]["metadata"]["memory_audit"]["parent_envelope_ref"] for e in found] == [PARENT] * 3
    assert [e["subject"]["turn_index"] - found[0]["subject"]["turn_index"] for e in found] == [0, 1, 2]
    rig.say(agent, line)
    assert "memory_audit" not in rig.since(mark)[-1]["subject"]["metadata"], "a header lasts for its request"


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Phionyx-Parent-Envelope", "envelope://sha256:abc"),
        ("X-Phionyx-Parent-Envelope", ""),
        ("X-Phionyx-Parent-Envelope", PARENT.upper()),
        ("X-Phionyx-Forgetting-Reason", ""),
        ("X-Phionyx-Forgetting-Reason", "x" * 201),
        ("X-Phionyx-Forgetting-Reason", "a\x01b"),
    ],
)
def test_a_malformed_header_is_answered_400_before_anything_is_written(header: str, value: str, rig: Rig) -> None:
    block = rig.call("POST", "/v1/blocks/", json={"label": "guarded", "value": "before"})["id"]
    mark = rig.mark()
    headers = {header: value.encode()}
    answer = rig.rest.request("PATCH", f"/v1/blocks/{block}", json={"value": "after"}, headers=headers)
    assert answer.status_code == 400
    assert header in answer.json()["detail"]
    assert rig.call("GET", f"/v1/blocks/{block}")["value"] == "before"
    assert rig.since(mark) == []


def test_the_example_that_names_its_cause_runs_as_written(rig: Rig) -> None:
    block = rig.call("POST", "/v1/blocks/", json={"label": "example", "value": "before"})["id"]
    mark = rig.mark()
    example = Path(__file__).parents[2] / "examples" / "caused_by.py"
    command = [sys.executable, str(example), rig.server.base_url, block]
    done = subprocess.run(command, env={"no_proxy": "*"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [envelope] = rig.since(mark)
    assert envelope["mutation"]["mutation_kind"] == "clear"
    assert "memory_audit" in envelope["subject"]["metadata"]


def test_a_conversation_is_named_and_its_isolated_block_has_a_history_of_its_own(rig: Rig) -> None:
    agent = rig.agent()
    mark = rig.mark()
    conversation = rig.call(
        "POST", "/v1/conversations/", params={"agent_id": agent}, json={"isolated_block_labels": ["human"]}
    )["id"]
    body = {"messages": [{"role": "user", "content": 'CALL core_memory_append {"label":"human","content":"here"}'}]}
    with rig.rest.stream("POST", f"/v1/conversations/{conversation}/messages", json=body) as stream:
        assert stream.status_code == 200
        assert sum(len(chunk) for chunk in stream.iter_bytes()) > 0
    created, appended = rig.since(mark)
    assert letta_of(created)["event"] == "create"
    assert created["mutation"]["diff"]["after_hash"] == digest("name: Ann")
    assert letta_of(appended)["conversation_id"] == conversation
    assert letta_of(appended)["agent_id"] == agent
    assert appended["mutation"]["block_id"] == created["mutation"]["block_id"] != rig.block(agent)["id"]
    assert rig.block(agent)["value"] == "name: Ann"


def test_a_sleeptime_agents_rewrite_is_a_consolidation_with_its_audit(rig: Rig) -> None:
    agent = rig.agent(enable_sleeptime=True, tools=["core_memory_append"])
    mark = rig.mark()
    rig.say(agent, "I moved to Bergen", 'SLEEP_CALL memory_rethink {"label":"human","new_memory":"lives in Bergen"}')
    deadline = time.monotonic() + 60
    while not (found := [e for e in rig.since(mark) if e["mutation"]["mutation_kind"] == "consolidate"]):
        assert time.monotonic() < deadline, summary(rig.since(mark))
        time.sleep(0.2)
    [envelope] = found
    letta, audit = letta_of(envelope), envelope["memory_consolidation_audit"]
    assert letta["agent_type"] == "sleeptime_agent"
    assert letta["agent_id"] != agent
    assert letta["tool"] == "memory_rethink"
    assert letta["run_id"]
    assert audit["block_ref"] == "pipeline_block_43:memory_consolidation"
    assert audit["consolidation_method"] == "letta.sleeptime.memory_rethink"
    said = {message["id"] for message in rig.call("GET", f"/v1/agents/{agent}/messages", params={"limit": 50})}
    assert audit["from_episodic"]
    assert said & set(audit["from_episodic"])
    assert audit["to_semantic"] == [f"{envelope['mutation']['block_id']}@{digest('lives in Bergen')}"]
    assert rig.block(agent)["value"] == "lives in Bergen"


def test_groups_attach_their_shared_blocks_to_each_member(rig: Rig) -> None:
    one, two = rig.agent(), rig.agent()
    shared = rig.call("POST", "/v1/blocks/", json={"label": "shared", "value": "s"})["id"]
    mark = rig.mark()
    body = {"agent_ids": [one, two], "description": "g", "shared_block_ids": [shared]}
    rig.call("POST", "/v1/groups/", json=body)
    found = rig.since(mark)
    assert [letta_of(envelope)["event"] for envelope in found] == ["attach", "attach"]
    assert {envelope["subject"]["trace_id"] for envelope in found} == {one, two}


def test_an_imported_agents_blocks_are_recorded(rig: Rig) -> None:
    agent = rig.agent()
    exported = rig.rest.get(f"/v1/agents/{agent}/export")
    assert exported.status_code == 200
    mark = rig.mark()
    rig.call("POST", "/v1/agents/import", files={"file": ("agent.af", exported.content)})
    found = rig.since(mark)
    assert sorted((letta_of(e)["event"], e["mutation"]["block_label"]) for e in found) == [
        ("attach", "human"),
        ("attach", "persona"),
        ("create", "human"),
        ("create", "persona"),
    ]
    created = {e["mutation"]["block_label"]: e["mutation"]["diff"]["after_hash"] for e in found}
    assert created == {"human": digest("name: Ann"), "persona": digest("a rig")}


def test_the_end_of_an_agent_forgets_its_blocks_but_keeps_them(rig: Rig) -> None:
    agent = rig.agent()
    human = rig.block(agent)["id"]
    mark = rig.mark()
    rig.call("DELETE", f"/v1/agents/{agent}")
    found = rig.since(mark)
    assert [(e["mutation"]["mutation_kind"], letta_of(e)["event"]) for e in found] == [("forget", "detach")] * 2
    assert {e["mutation"]["forgetting_reason"] for e in found} == {"letta.delete_agent"}
    assert rig.call("GET", f"/v1/blocks/{human}")["value"] == "name: Ann"


@pytest.mark.slow
def test_two_uvicorn_workers_record_every_write_once(
    new_letta_database: Callable[[], str], letta_server_factory: Callable[..., LettaServer]
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    database = new_letta_database()
    server = letta_server_factory(database, plugin=True, workers=2)
    ledger = SqlLedger(database, create=False)
    with httpx.Client(base_url=server.base_url, timeout=120) as rest:
        block = rest.post("/v1/blocks/", json={"label": "busy", "value": "0"}).json()["id"]
        with ThreadPoolExecutor(8) as pool:
            codes = list(
                pool.map(lambda i: rest.patch(f"/v1/blocks/{block}", json={"value": f"v{i}"}).status_code, range(80))
            )
        final = rest.get(f"/v1/blocks/{block}").json()["value"]
    assert set(codes) <= {200, 409}
    rig = Rig(server, ledger, rest)
    history = [envelope["mutation"]["diff"] for envelope in rig.since(-1)]
    assert len(history) == 1 + codes.count(200)
    assert all(new["before_hash"] == old["after_hash"] for old, new in itertools.pairwise(history))
    assert history[-1]["after_hash"] == digest(final)
    ledger.close()
