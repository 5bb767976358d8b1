"""A model endpoint on loopback that answers by a list of steps, as badly as each step says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Step = Callable[[BaseHTTPRequestHandler], None]


def completion(text: Any, finish: str = "stop") -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def body(data: bytes, status: int = 200, length: int | None = None, **headers: str) -> Step:
    """Answer with `data`, announced with another `length` if given."""

    def step(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data) if length is None else length))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return step


def says(text: Any, finish: str = "stop") -> Step:
    return body(json.dumps(completion(text, finish)).encode())


def proposes(*proposals: dict[str, Any]) -> Step:
    return says(json.dumps({"proposals": list(proposals)}))


def fails(status: int, **headers: str) -> Step:
    return body(json.dumps({"error": {"message": "no", "type": "error"}}).encode(), status, **headers)


def after(seconds: float, step: Step) -> Step:
    def late(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(seconds)
        step(handler)

    return late


def trickles(handler: BaseHTTPRequestHandler) -> None:
    """One byte at a time, for ever: no single read is slow."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.end_headers()
    for _ in range(200):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def hangs_up(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.close()


class Endpoint:
    """Serves the steps in order, the last one for ever; ``requests`` are the bodies received."""

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_POST(self) -> None:
                endpoint.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                endpoint.headers.append(dict(self.headers))
                endpoint.times.append(time.monotonic())
                self.close_connection = True
                step = endpoint.steps.pop(0) if len(endpoint.steps) > 1 else endpoint.steps[0]
                with suppress(OSError):  # the client has gone
                    step(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def prompts(self) -> list[str]:
        return [request["messages"][0]["content"] for request in self.requests]

    def __enter__(self) -> Endpoint:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
