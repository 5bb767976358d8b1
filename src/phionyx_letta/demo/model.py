"""A model endpoint that speaks OpenAI's protocol and follows a script instead of thinking.

It serves ``/v1/models``, ``/v1/chat/completions`` (streamed and not) and ``/v1/embeddings`` on 127.0.0.1, so that a
real Letta server can run its real agents with no key and no network. What it answers is decided in
:mod:`phionyx_letta.demo.script`. It does not count tokens, judge requests or serve the Responses API (404).

``python -m phionyx_letta.demo.model PORT`` serves it in the foreground.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from phionyx_letta.demo.script import Reply, ToolCall, plan

MODEL = "gpt-4o-mini"
EMBEDDING_MODEL = "text-embedding-3-small"
#: The names by which a Letta server knows the two models of this endpoint.
MODEL_HANDLE = f"openai-proxy/{MODEL}"
EMBEDDING_HANDLE = f"openai/{EMBEDDING_MODEL}"
_DIMENSIONS = 1536
_USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}

Override = Callable[[dict[str, Any]], "Reply | None"]


@dataclass(frozen=True)
class ModelRequest:
    """One request the endpoint received."""

    path: str
    body: dict[str, Any]
    at: float  # seconds since the epoch


class ScriptedModel:
    """The endpoint, in a thread of this process, for the length of a ``with`` block.

    Args:
        port: the port on 127.0.0.1; 0 takes a free one.
        override: asked first with the body of every chat request; what it returns is the answer, unless that is None.
            It runs in the request's own thread, may sleep, and an exception it raises becomes an answer 500.
    """

    def __init__(self, port: int = 0, override: Override | None = None) -> None:
        """Take the port; answers come once the block is entered."""
        self.override = override
        self.requests: list[ModelRequest] = []
        self._server = _Server(("127.0.0.1", port), self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="scripted model", daemon=True
        )

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    @property
    def base_url(self) -> str:
        """The value for ``OPENAI_BASE_URL``."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def chats(self) -> list[dict[str, Any]]:
        """The bodies of the chat requests so far, oldest first."""
        return [request.body for request in list(self.requests) if request.path.endswith("/chat/completions")]

    def __enter__(self) -> ScriptedModel:
        """Start the endpoint."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the endpoint."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def serve_forever(self) -> None:
        """Serve in the calling thread until interrupted."""
        with suppress(KeyboardInterrupt):
            self._server.serve_forever()
        self._server.server_close()

    def reply(self, request: dict[str, Any]) -> Reply:
        """The answer to one chat request."""
        chosen = self.override(request) if self.override else None
        return chosen if chosen is not None else plan(request)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the default of 5 refuses connections when many agents think at once

    def __init__(self, address: tuple[str, int], model: ScriptedModel) -> None:
        self.model = model
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing when a client went away in the middle; it may have been killed on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet; requests are recorded instead."""

    def do_GET(self) -> None:
        if self.path.split("?")[0].endswith("/models"):
            models = [
                {"id": name, "object": "model", "created": 0, "owned_by": "phionyx"}
                for name in (MODEL, EMBEDDING_MODEL)
            ]
            self._send_json({"object": "list", "data": models})
        else:
            self._send_error(404, f"the scripted model does not serve {self.path}")

    def do_POST(self) -> None:
        path = self.path.split("?")[0]
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        except ValueError:
            return self._send_error(400, "the body is not JSON")
        self.server.model.requests.append(ModelRequest(path, body, time.time()))
        if path.endswith("/embeddings"):
            return self._send_json(_embeddings(body))
        if not path.endswith("/chat/completions"):
            return self._send_error(404, f"the scripted model does not serve {path}")
        try:
            reply = self.server.model.reply(body)
        except Exception as error:  # a mistake in a script or an override is the caller's to see
            return self._send_error(500, f"{type(error).__name__}: {error}")
        if body.get("stream"):
            return self._send_stream(_chunks(body, reply))
        return self._send_json(_completion(body, reply))

    def _send_error(self, status: int, message: str) -> None:
        self._send_json({"error": {"message": message, "type": "invalid_request_error"}}, status)

    def _send_json(self, content: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(content).encode()
        self._start(status, "application/json", ("Content-Length", str(len(data))))
        self.wfile.write(data)

    def _send_stream(self, events: Iterator[dict[str, Any]]) -> None:
        self._start(200, "text/event-stream", ("Transfer-Encoding", "chunked"))
        for event in events:
            self._send_chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        self._send_chunk(b"data: [DONE]\n\n")
        self._send_chunk(b"")

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _start(self, status: int, content_type: str, length: tuple[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header(*length)
        # measured: with connections kept alive, Letta's own database connections stall for a minute now and then
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()


def _completion(request: dict[str, Any], reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.calls:
        message["tool_calls"] = [_tool_call(call) for call in reply.calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(reply)}
    return {**_head(request, "chat.completion"), "usage": _USAGE, "choices": [choice]}


def _chunks(request: dict[str, Any], reply: Reply) -> Iterator[dict[str, Any]]:
    """The same answer in pieces, arguments cut in the middle as real endpoints do."""
    head = _head(request, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]}

    yield chunk({"role": "assistant", "content": "" if reply.calls else None})
    for piece in _pieces(reply.text or "", 8):
        yield chunk({"content": piece})
    for index, call in enumerate(map(_tool_call, reply.calls)):
        arguments = call["function"]["arguments"]
        yield chunk({"tool_calls": [{**call, "index": index, "function": {**call["function"], "arguments": ""}}]})
        for piece in _pieces(arguments, 10):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, _finish_reason(reply))
    yield {**head, "choices": [], "usage": _USAGE}


def _head(request: dict[str, Any], kind: str) -> dict[str, Any]:
    identity = f"chatcmpl-{uuid.uuid4().hex}"
    return {"id": identity, "object": kind, "created": int(time.time()), "model": request.get("model", MODEL)}


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.tool, "arguments": json.dumps(call.arguments)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.calls else "stop"


def _pieces(text: str, size: int) -> Iterator[str]:
    return (text[start : start + size] for start in range(0, len(text), size))


def _embeddings(request: dict[str, Any]) -> dict[str, Any]:
    texts = request.get("input", "")
    texts = texts if isinstance(texts, list) else [texts]
    size = int(request.get("dimensions") or _DIMENSIONS)
    data = [{"object": "embedding", "index": i, "embedding": _vector(text, size)} for i, text in enumerate(texts)]
    usage = {"prompt_tokens": 1, "total_tokens": 1}
    return {"object": "list", "model": request.get("model", EMBEDDING_MODEL), "usage": usage, "data": data}


def _vector(text: Any, size: int) -> list[float]:
    """A vector that depends on the text alone: equal texts are near, all others far."""
    source = random.Random(hashlib.sha256(str(text).encode("utf-8", "surrogatepass")).digest())
    return [source.uniform(-1, 1) for _ in range(size)]


def main() -> None:
    """Serve on the port given as the only argument."""
    if len(sys.argv) != 2 or not sys.argv[1].isdigit():
        sys.exit("usage: python -m phionyx_letta.demo.model PORT")
    model = ScriptedModel(int(sys.argv[1]))
    print(f"scripted model on {model.base_url}", flush=True)
    model.serve_forever()


if __name__ == "__main__":
    main()
