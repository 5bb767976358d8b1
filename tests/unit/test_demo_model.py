"""The scripted model over HTTP, as OpenAI's own client sees it."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from phionyx_letta.demo.model import MODEL, ScriptedModel
from phionyx_letta.demo.process import free_port
from phionyx_letta.demo.script import Reply

TOOLS = [{"type": "function", "function": {"name": "note", "parameters": {"properties": {"text": {}}}}}]
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": 'CALL note {"text": "grüße"}'}], "tools": TOOLS}


@pytest.fixture
def endpoint() -> Iterator[ScriptedModel]:
    with ScriptedModel() as model:
        yield model


def send(port: int, path: str, body: Any = None) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, data)
    answer = connection.getresponse()
    return answer, answer.read()


def chat(model: ScriptedModel, **more: Any) -> Any:
    return json.loads(send(model.port, "/v1/chat/completions", {**CHAT, **more})[1])


def test_a_tool_call(endpoint: ScriptedModel) -> None:
    choice = chat(endpoint)["choices"][0]
    function = choice["message"]["tool_calls"][0]["function"]
    assert choice["finish_reason"] == "tool_calls"
    assert (function["name"], json.loads(function["arguments"])) == ("note", {"text": "grüße"})


def test_a_stream_adds_up_to_the_same_answer(endpoint: ScriptedModel) -> None:
    answer, body = send(endpoint.port, "/v1/chat/completions", {**CHAT, "stream": True})
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    assert events.pop() == b"[DONE]"
    deltas = [c["delta"] for event in events for c in json.loads(event)["choices"]]
    parts = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert answer.headers["Content-Type"] == "text/event-stream"
    assert [part["name"] for part in parts if "name" in part] == ["note"]
    assert json.loads("".join(part["arguments"] for part in parts)) == {"text": "grüße"}


def test_every_answer_closes_its_connection(endpoint: ScriptedModel) -> None:
    for path, body in (("/v1/models", None), ("/v1/chat/completions", CHAT), ("/v1/embeddings", {"input": "x"})):
        assert send(endpoint.port, path, body)[0].headers["Connection"] == "close"


def test_what_was_asked_is_recorded(endpoint: ScriptedModel) -> None:
    before = time.time()
    chat(endpoint, user="anna")
    send(endpoint.port, "/v1/embeddings", {"input": "x"})
    assert [request.path for request in endpoint.requests] == ["/v1/chat/completions", "/v1/embeddings"]
    assert [body["user"] for body in endpoint.chats] == ["anna"]
    assert endpoint.requests[0].at >= before


def test_equal_texts_have_equal_embeddings(endpoint: ScriptedModel) -> None:
    data = json.loads(send(endpoint.port, "/v1/embeddings", {"input": ["a", "b", "a"]})[1])["data"]
    first, second, third = (entry["embedding"] for entry in data)
    assert len(first) == 1536
    assert first == third != second


def test_a_callable_may_answer_instead(endpoint: ScriptedModel) -> None:
    endpoint.override = lambda request: Reply(text="mine") if request.get("user") == "me" else None
    assert chat(endpoint, user="me")["choices"][0]["message"]["content"] == "mine"
    assert chat(endpoint)["choices"][0]["message"]["tool_calls"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/responses", {}, 404),
        ("/elsewhere", None, 404),
        ("/v1/chat/completions", b"{", 400),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "CALL note nothing"}]}, 500),
    ],
)
def test_a_bad_request_is_told_so(endpoint: ScriptedModel, path: str, body: Any, status: int) -> None:
    answer, said = send(endpoint.port, path, body)
    assert answer.status == status
    assert json.loads(said)["error"]["message"]


def test_it_runs_alone() -> None:
    port = free_port()
    command = [sys.executable, "-m", "phionyx_letta.demo.model", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip().endswith(f"http://127.0.0.1:{port}/v1")
            assert json.loads(send(port, "/v1/models")[1])["data"][0]["id"] == MODEL
        finally:
            process.kill()
