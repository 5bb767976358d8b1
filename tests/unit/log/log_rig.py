"""A log in memory that signs checkpoints of itself, and a web server that answers as it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from phionyx_letta import Ed25519Signer
from phionyx_letta.checkpoint import Checkpoint, issue_checkpoint
from phionyx_letta.ledger.log.sink import Published
from phionyx_letta.merkle import MemoryTree, consistency_proof, leaf_hash

ORIGIN = "phionyx.example/log"


class Log:
    """Leaves are numbers; from the leaf ``forked_at`` on, other numbers."""

    def __init__(
        self, signer: Ed25519Signer, size: int = 0, *, origin: str = ORIGIN, forked_at: int | None = None
    ) -> None:
        self.signer, self.origin, self.forked_at = signer, origin, forked_at
        self.keys = [signer.public_key_hex]
        self.tree = MemoryTree()
        self.grow(size)

    def grow(self, leaves: int = 1) -> Log:
        for _ in range(leaves):
            number = self.tree.size
            other = self.forked_at is not None and number >= self.forked_at
            self.tree.append(leaf_hash(f"{'other' if other else 'leaf'} {number}".encode()))
        return self

    def published(self, size: int | None = None) -> Published:
        size = self.tree.size if size is None else size
        point = Checkpoint(self.origin, size, self.tree.root(size))
        return Published(point, issue_checkpoint(point, self.signer), self.prove)

    def prove(self, old: int, new: int) -> list[bytes]:
        return consistency_proof(self.tree, old, new)


Answers = Callable[[BaseHTTPRequestHandler, bytes], tuple[int, dict[str, str], bytes] | None]


class Server:
    """A web server on loopback; ``answers`` gets the handler and the body, and returns status, headers and body.

    Where it returns None, it has written to the handler's file itself.
    """

    def __init__(self, answers: Answers) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.requests.append((self.path, dict(self.headers), body))
                answer = answers(self, body)
                if answer is None:
                    return
                status, headers, content = answer
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                """A client that hangs up is what some tests are about."""

        self._http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
