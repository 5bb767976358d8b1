"""What answers where a Letta server should: whatever it is, the error says so and what to do, and nothing is taken for written."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from phionyx_letta import Ed25519Signer
from phionyx_letta.errors import TargetRefused
from phionyx_letta.memory import LivingMemory, MemoryPatch
from phionyx_letta.memory.block_rest import RestBlocks
from phionyx_letta.memory.blocks import block_name
from phionyx_letta.memory.patches import transition

KEY = Ed25519Signer("11" * 32)
NAME = block_name("agent-1", "block-1", "human")


class Server(ThreadingHTTPServer):
    """A server that may answer like Letta, and otherwise as a test says."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.value = "name: Ann"
        self.agents = ["agent-1"]
        self.bad: Callable[[str, str], tuple[int, str, bytes] | None] = lambda method, path: None
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None: ...

    def _answer(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        parts = urlsplit(self.path)
        bad = self.server.bad(self.command, parts.path)
        if bad is not None:
            self._send(*bad)
            return
        if self.command == "PATCH":
            self.server.value = body["value"]
        found: Any = {"id": "block-1", "label": "human", "value": self.server.value, "limit": 500, "read_only": False}
        if parts.path.endswith("/agents"):
            asked = parse_qs(parts.query)
            ids = self.server.agents
            start = ids.index(asked["after"][0]) + 1 if "after" in asked else 0
            found = [{"id": one} for one in ids[start : start + int(asked["limit"][0])]]
        self._send(200, "application/json", json.dumps(found).encode())

    do_GET = do_PATCH = _answer

    def _send(self, status: int, kind: str, body: bytes) -> None:
        if status == 0:  # no answer at all
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("x-phionyx-letta", "1")
        if status == 302:
            self.send_header("location", self.server.url + "/round")
        self.send_header("content-length", str(len(body) + (9 if kind == "cut" else 0)))
        self.end_headers()
        self.wfile.write(body)
        if kind == "cut":
            self.close_connection = True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    found = Server()
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def living(url: str, tmp_path: Any) -> LivingMemory:
    return LivingMemory(
        [], targets=RestBlocks(url, KEY), signer=KEY, store_path=str(tmp_path / "patches.jsonl"), occurrence_path=None
    )


def proposed(memory: LivingMemory) -> MemoryPatch:
    patch = MemoryPatch(NAME, "name: Ann", "name: Ann\nuv", "", "why")
    transition(patch, "pending", by="x", signer=KEY)
    return memory.store.save(patch)


NOT_LETTA = {
    "HTML": (200, "text/html", b"<html>welcome"),
    "HTML in JSON's name": (200, "application/json", b"<html>welcome"),
    "nothing": (200, "application/json", b""),
    "null": (200, "application/json", b"null"),
    "a list": (200, "application/json", b"[1]"),
    "another object": (200, "application/json", b'{"id": 1}'),
    "deep": (200, "application/json", b"[" * 100_000),
    "not UTF-8": (200, "application/json", b'{"id": "\xff"}'),
    "half an answer": (200, "cut", b'{"id"'),
    "a hung up line": (0, "", b""),
    "round and round": (302, "text/html", b""),
    "an HTML error": (502, "text/html", b"<html>bad gateway"),
}


class TestWhatIsNoLettaServer:
    @pytest.mark.parametrize("what", NOT_LETTA)
    @pytest.mark.parametrize("where", ["block", "agents", "write"])
    def test_is_said_and_what_to_do_and_nothing_counts_as_written(
        self, server: Server, tmp_path: Any, what: str, where: str
    ) -> None:
        memory = living(server.url, tmp_path)
        patch = proposed(memory)

        def bad(method: str, path: str) -> tuple[int, str, bytes] | None:
            here = "write" if method == "PATCH" else "agents" if path.endswith("/agents") else "block"
            return NOT_LETTA[what] if here == where or path == "/round" else None

        server.bad = bad
        with pytest.raises(TargetRefused) as caught:
            memory.apply(patch.patch_id)
        assert caught.value.remedy or "502" in caught.value.message
        assert server.value == "name: Ann"
        assert memory.review(patch.patch_id)["status"] in ("pending", "approved")
        server.bad = lambda method, path: None
        assert memory.apply(patch.patch_id).status == "applied"
        assert server.value == "name: Ann\nuv"

    @pytest.mark.parametrize(
        "url",
        ["", "localhost:8283", "http://", "http://[bad", "http://host:99999", "ftp://x", "http://\ud800/", "nonsense"],
    )
    def test_a_url_that_names_no_server_is_said(self, url: str, tmp_path: Any) -> None:
        memory = living(url, tmp_path)
        with pytest.raises(TargetRefused) as caught:
            memory.apply(proposed(memory))
        assert "PHIONYX_LETTA_SERVER_URL" in caught.value.remedy

    def test_nobody_there_is_said(self, tmp_path: Any) -> None:
        memory = living("http://127.0.0.1:9", tmp_path)
        with pytest.raises(TargetRefused, match="does not answer"):
            memory.apply(proposed(memory))


def test_an_agent_beyond_the_first_thousand_is_found(server: Server, tmp_path: Any) -> None:
    server.agents = [f"agent-{number}" for number in range(2500, 0, -1)]
    memory = living(server.url, tmp_path)
    [note] = memory.review(proposed(memory))["target_notes"]
    assert note.count("agent-") == 2499
    server.agents = [f"agent-{number}" for number in range(1000, 0, -1)]
    assert memory.targets.resolve(NAME).read() == "name: Ann"
