"""Webhook and witness over real HTTP: a witness that keeps to the protocol, and servers that do not."""

from __future__ import annotations

import base64
import contextlib
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from log_rig import ORIGIN, Log, Server

from phionyx_letta import Ed25519Signer, SettingsError
from phionyx_letta.checkpoint import open_checkpoint
from phionyx_letta.errors import LedgerUnavailable, NoteError, SinkConflict, SinkError
from phionyx_letta.ledger.log.post import MAX_ANSWER, Endpoint
from phionyx_letta.ledger.log.sink import Published
from phionyx_letta.ledger.log.webhook import WebhookSink
from phionyx_letta.ledger.log.witness import WitnessSink
from phionyx_letta.merkle import verify_consistency
from phionyx_letta.notes import COSIGNATURE, NoteKey, cosign_note, parse_note, sign_note

SECRET = "Bearer s3cr3t-t0ken"
NAME = "witness.example/w1"


@pytest.fixture
def log(signer: Ed25519Signer) -> Log:
    return Log(signer, 3)


class Witness:
    """c2sp.org/tlog-witness, for one log: what it answers to ``add-checkpoint``."""

    def __init__(self, log: Log) -> None:
        self.signer = Ed25519Signer("22" * 32)
        self.key = NoteKey(NAME, self.signer.public_key_hex, COSIGNATURE)
        self.log_keys = log.keys
        self.size, self.root = 0, log.tree.root(0)
        self.now = 1_700_000_000
        self.statuses: list[int] = []
        self._lock = threading.Lock()

    def __call__(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, dict[str, str], bytes]:
        with self._lock:
            status, headers, answer = self.answer(handler.path, body)
            self.statuses.append(status)
            return status, headers, answer

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if path != "/w/add-checkpoint":
            return 404, {}, b"no such path\n"
        head, _, rest = body.decode().partition("\n\n")
        old_line, *proof = head.split("\n")
        if not re.fullmatch(r"old (0|[1-9][0-9]*)", old_line) or len(proof) > 63:
            return 400, {}, b""
        old = int(old_line[4:])
        try:
            opened = open_checkpoint(rest, self.log_keys)
        except NoteError:
            return 403, {}, b""
        point = opened.checkpoint
        if point.origin != ORIGIN:
            return 404, {}, b""
        if old > point.size:
            return 400, {}, b""
        if old != self.size:
            return 409, {"Content-Type": "text/x.tlog.size"}, f"{self.size}\n".encode()
        hashes = [base64.b64decode(line) for line in proof]
        if not verify_consistency(old, self.root, point.size, point.root, hashes):
            return 422, {}, b""
        self.size, self.root = point.size, point.root
        self.now -= 10  # its clock runs backwards: nothing may depend on it
        return 200, {}, cosign_note(opened.note, NAME, self.signer, self.now).line().encode()


@pytest.fixture
def witness(log: Log) -> Witness:
    return Witness(log)


@pytest.fixture
def server(witness: Witness) -> Iterator[Server]:
    with Server(witness) as server:
        yield server


def sink_of(server: Server, witness: Witness) -> WitnessSink:
    return WitnessSink(Endpoint(server.url + "/w"), [witness.key])


class TestWitness:
    def test_it_cosigns_checkpoint_after_checkpoint(self, server: Server, witness: Witness, log: Log):
        sink = sink_of(server, witness)
        for _ in range(3):
            note = sink.deliver(log.grow(5).published())
            assert note is not None
            opened = open_checkpoint(note, log.keys, witnesses=[witness.key])
            assert opened.checkpoint.size == log.tree.size
            assert [(one.name, one.time()) for one in opened.cosignatures] == [(NAME, witness.now)]
        assert witness.statuses == [200, 200, 200]

    def test_after_a_start_it_is_asked_where_it_stands(self, server: Server, witness: Witness, log: Log):
        sink_of(server, witness).deliver(log.published())
        assert sink_of(server, witness).deliver(log.grow(4).published())
        assert witness.statuses == [200, 409, 200]
        assert witness.size == 7

    def test_the_same_again_is_cosigned_again(self, server: Server, witness: Witness, log: Log):
        sink = sink_of(server, witness)
        assert sink.deliver(log.published())
        assert sink.deliver(log.published())
        assert witness.size == 3

    def test_an_empty_log_is_cosigned(self, server: Server, witness: Witness, log: Log):
        sink = sink_of(server, witness)
        assert sink.deliver(log.published(0))
        assert sink.deliver(log.published())

    def test_another_sealer_was_faster(self, server: Server, witness: Witness, log: Log):
        mine, other = sink_of(server, witness), sink_of(server, witness)
        mine.deliver(log.published())
        late = log.grow(2).published()
        other.deliver(log.grow(2).published())
        assert mine.deliver(late) is None
        assert mine.deliver(log.grow().published())
        assert witness.size == 8

    def test_a_log_that_went_back(self, server: Server, witness: Witness, log: Log):
        sink_of(server, witness).deliver(log.grow(9).published())
        restored = Log(log.signer, 5)
        sink = sink_of(server, witness)
        for _ in range(2):
            with pytest.raises(
                SinkConflict, match="has signed a checkpoint of 12 envelopes, but the log has not so many"
            ):
                sink.deliver(restored.published())

    def test_a_log_that_was_rewritten(self, server: Server, witness: Witness, log: Log):
        sink_of(server, witness).deliver(log.published())
        sink = sink_of(server, witness)
        for _ in range(2):
            with pytest.raises(SinkConflict, match="does not continue"):
                sink.deliver(Log(log.signer, 9, forked_at=1).published())
        assert witness.size == 3

    def test_a_log_or_a_key_it_does_not_know(self, server: Server, witness: Witness, log: Log):
        with pytest.raises(SinkError, match="404: it does not know the log"):
            sink_of(server, witness).deliver(Log(log.signer, 2, origin="phionyx.example/other").published())
        with pytest.raises(SinkError, match="403: it does not trust the log's key"):
            sink_of(server, witness).deliver(Log(Ed25519Signer("55" * 32), 2).published())

    def test_the_ledger_does_not_answer_now(self, server: Server, witness: Witness, log: Log):
        sink = sink_of(server, witness)
        sink.deliver(log.published())
        offered = log.grow().published()

        def down(old: int, new: int) -> list[bytes]:
            raise LedgerUnavailable("the ledger does not answer", "wait")

        with pytest.raises(LedgerUnavailable):
            sink.deliver(Published(offered.checkpoint, offered.note, down))
        assert sink.deliver(offered)

    def test_it_needs_the_key_of_a_witness(self, log: Log):
        plain = NoteKey(NAME, Ed25519Signer("22" * 32).public_key_hex)
        for keys in ([], [plain]):
            with pytest.raises(SettingsError, match="cosignature/v1"):
                WitnessSink(Endpoint("https://witness.example"), keys)


def cosignature(log: Log, seed: str = "22" * 32, name: str = NAME, time: int = 1_700_000_000) -> bytes:
    return cosign_note(parse_note(log.published().note), name, Ed25519Signer(seed), time).line().encode()


class TestWitnessesThatDoNotKeepToIt:
    @pytest.mark.parametrize("status", [200, 201, 204, 400, 403, 404, 409, 422, 429, 500, 503])
    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"\n",
            b"ok\n",
            b"\xff\xfe\n",
            b"-1\n",
            b"007\n",
            b"9" * 30 + b"\n",
            b"<html>\n" * 50,
            "— x AAAAAAAA\n".encode(),
        ],
    )
    def test_garbage_with_any_status(self, witness: Witness, log: Log, status: int, body: bytes):
        with Server(lambda *_: (status, {}, body)) as server, pytest.raises(SinkError) as caught:
            sink_of(server, witness).deliver(log.published())
        assert server.url in str(caught.value)
        assert "html" not in str(caught.value)

    @pytest.mark.slow
    def test_every_truncation_and_every_changed_byte_of_the_answer(self, witness: Witness, log: Log):
        good = cosignature(log)
        answers = [good[:end] for end in range(len(good))]
        for place in range(len(good)):
            for bit in (1, 32, 128):
                bent = bytearray(good)
                bent[place] ^= bit
                answers.append(bytes(bent))
        left = iter([*answers, good])
        with Server(lambda *_: (200, {}, next(left))) as server:
            sink = sink_of(server, witness)
            for _ in answers:
                with pytest.raises(SinkError, match="without a valid cosignature"):
                    sink.deliver(log.published())
            assert sink.deliver(log.published())

    def test_signatures_of_others_of_other_texts_and_of_other_kinds(self, witness: Witness, log: Log):
        other_text = cosign_note(parse_note(log.published(2).note), NAME, witness.signer, 1).line().encode()
        plain = (
            parse_note(sign_note(log.published().checkpoint.text, NAME, witness.signer)).signatures[0].line().encode()
        )
        own = parse_note(log.published().note).signatures[0].line().encode()
        for body in (cosignature(log, "33" * 32), cosignature(log, name="else"), other_text, plain, own, own * 200):
            with (
                Server(lambda *_, body=body: (200, {}, body)) as server,
                pytest.raises(SinkError, match="valid cosignature"),
            ):
                sink_of(server, witness).deliver(log.published())

    def test_lines_of_unknown_keys_are_left_out(self, witness: Witness, log: Log):
        body = cosignature(log, "33" * 32) + cosignature(log) + cosignature(log, name="else")
        with Server(lambda *_: (200, {}, body)) as server:
            note = sink_of(server, witness).deliver(log.published())
        assert note is not None
        assert [one.name for one in parse_note(note).signatures] == [ORIGIN, NAME]

    def test_sizes_that_change_at_each_answer(self, witness: Witness, log: Log):
        told = iter([1, 2, 1, 2, 1, 2])
        with (
            Server(lambda *_: (409, {}, f"{next(told)}\n".encode())) as server,
            pytest.raises(SinkError, match="keeps changing"),
        ):
            sink_of(server, witness).deliver(log.published())
        assert len(server.requests) == 3

    def test_a_size_the_log_never_had_is_a_conflict_whoever_says_it(self, witness: Witness, log: Log):
        with Server(lambda *_: (409, {}, b"9223372036854775807\n")) as server, pytest.raises(SinkConflict):
            sink_of(server, witness).deliver(log.published())

    def test_names_in_an_answer_do_not_fill_the_log(self, witness: Witness, log: Log):
        body = cosignature(log, "33" * 32, name="n" * 30_000)
        with Server(lambda *_: (200, {}, body)) as server, pytest.raises(SinkError) as caught:
            sink_of(server, witness).deliver(log.published())
        assert len(str(caught.value)) < 500


class TestWebhook:
    def test_it_gets_the_note_and_the_header(self, log: Log):
        with Server(lambda *_: (204, {}, b"")) as server:
            WebhookSink(Endpoint(server.url + "/hook?x=1", header=f"Authorization: {SECRET}")).deliver(log.published())
        ((path, headers, body),) = server.requests
        assert path == "/hook?x=1"
        assert headers["Authorization"] == SECRET
        assert headers["Content-Type"] == "text/plain; charset=utf-8"
        assert open_checkpoint(body, log.keys).checkpoint.size == 3

    @pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
    def test_any_2xx_means_taken(self, log: Log, status: int):
        with Server(lambda *_: (status, {}, b"")) as server:
            WebhookSink(Endpoint(server.url)).deliver(log.published())
        assert server.requests[0][0] == "/"

    @pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
    def test_anything_else_is_an_error_without_the_answer(self, log: Log, status: int):
        with (
            Server(lambda *_: (status, {}, SECRET.encode())) as server,
            pytest.raises(SinkError, match=str(status)) as caught,
        ):
            WebhookSink(Endpoint(server.url + "/secret-path", header=f"Authorization: {SECRET}")).deliver(
                log.published()
            )
        assert "s3cr3t" not in str(caught.value)
        assert "secret-path" not in str(caught.value)

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    def test_a_redirect_is_refused(self, log: Log, status: int):
        with (
            Server(lambda *_: (200, {}, b"")) as other,
            Server(lambda *_: (status, {"Location": other.url}, b"")) as server,
            pytest.raises(SinkError, match="redirect"),
        ):
            WebhookSink(Endpoint(server.url, header=f"Authorization: {SECRET}")).deliver(log.published())
        assert other.requests == []


class TestServersThatMisbehave:
    def deliver(self, server: Server, log: Log, timeout: float = 0.5) -> str:
        started = time.monotonic()
        with pytest.raises(SinkError) as caught:
            WebhookSink(Endpoint(server.url, header=f"X-Token: {SECRET}", timeout=timeout)).deliver(log.published())
        assert time.monotonic() - started < timeout + 30, "it is given up"
        assert "s3cr3t" not in str(caught.value)
        return str(caught.value)

    def test_one_that_never_answers(self, log: Log):
        ended = threading.Event()
        with Server(lambda *_: (ended.wait(5), (200, {}, b""))[1]) as server:
            said = self.deliver(server, log)
            ended.set()
        assert "gave no answer: timed out" in said

    @pytest.mark.parametrize(
        "before",
        [
            b"",
            b"HTTP/1.1 200 OK\r\nX-A: ",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n",
            b"HTTP/1.0 200 OK\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1000\r\n\r\n",
        ],
    )
    def test_one_that_sends_a_byte_now_and_then(self, log: Log, before: bytes):
        def drip(handler: BaseHTTPRequestHandler, _body: bytes) -> None:
            handler.wfile.write(before)
            for _ in range(100):
                handler.wfile.write(b"x")
                handler.wfile.flush()
                time.sleep(0.05)

        with Server(drip) as server:
            self.deliver(server, log)

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"\r\n\r\n",
            b"garbage\r\n\r\n",
            b"HTTP/1.1 abc OK\r\n\r\n",
            b"HTTP/1.1 99999 OK\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc",
            b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500,
            b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000,
            b"\x16\x03\x01\x02\x00",
            b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (MAX_ANSWER + 1),
        ],
    )
    def test_one_that_speaks_no_http(self, log: Log, raw: bytes):
        def speak(handler: BaseHTTPRequestHandler, _body: bytes) -> None:
            handler.wfile.write(raw)
            handler.wfile.flush()
            handler.close_connection = True

        with Server(speak) as server:
            self.deliver(server, log, timeout=3)

    def test_one_that_is_not_there(self, log: Log):
        with Server(lambda *_: (200, {}, b"")) as server:
            url = server.url
        with pytest.raises(SinkError, match="Connection refused"):
            WebhookSink(Endpoint(url)).deliver(log.published())

    def test_a_name_that_does_not_exist(self, log: Log):
        with pytest.raises(SinkError, match=r"https://nowhere\.invalid gave no answer"):
            WebhookSink(Endpoint("https://nowhere.invalid/")).deliver(log.published())


@pytest.fixture
def tls(tmp_path: Path) -> tuple[ThreadingHTTPServer, Path]:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=DNS:localhost -keyout {key.name} -out {certificate.name}".split(),
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """A client that does not trust the certificate hangs up."""

    server = Quiet(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server, certificate
    server.shutdown()
    server.server_close()


class TestTls:
    def test_a_certificate_that_is_trusted(self, tls, log: Log):
        server, certificate = tls
        context = ssl.create_default_context(cafile=str(certificate))
        WebhookSink(Endpoint(f"https://localhost:{server.server_port}", tls=context)).deliver(log.published())

    def test_one_that_is_not_and_one_of_another_name(self, tls, log: Log):
        server, certificate = tls
        with pytest.raises(SinkError, match="certificate is not trusted"):
            WebhookSink(Endpoint(f"https://localhost:{server.server_port}")).deliver(log.published())
        context = ssl.create_default_context(cafile=str(certificate))
        with pytest.raises(SinkError, match="certificate is not trusted"):
            WebhookSink(Endpoint(f"https://127.0.0.1:{server.server_port}", tls=context)).deliver(log.published())

    def test_a_handshake_that_never_ends(self, log: Log):
        listener = socket.create_server(("127.0.0.1", 0))

        def drip() -> None:
            client, _ = listener.accept()
            with contextlib.suppress(OSError):
                client.sendall(b"\x16\x03\x03\x40\x00")  # a record of 16 kB, a byte now and then
                for _ in range(100):
                    client.sendall(b"\x02")
                    time.sleep(0.05)

        threading.Thread(target=drip, daemon=True).start()
        with listener, pytest.raises(SinkError, match="timed out"):
            WebhookSink(Endpoint(f"https://localhost:{listener.getsockname()[1]}", timeout=0.5)).deliver(
                log.published()
            )


class TestSettings:
    @pytest.mark.parametrize(
        "url",
        [
            "",
            "example.org",
            "ftp://example.org/",
            "file:///etc/passwd",
            "http://example.org/",
            "http://127.0.0.1.example.org/",
            "http://localhost.example.org/",
            "http://0.0.0.0/",
            "http://2130706433/",
            "https://",
            "https://user:s3cr3t@example.org/",
            "https://s3cr3t@example.org/",
            "https://example.org/#s3cr3t",
            "https://example.org/a b",
            "https://example.org/a\r\nX: y",
            "https://example.org:99999/",
            "https://exa mple.org/",
            "https://[::1/",
            "https://example.org/ü",
            None,
            5,
        ],
    )
    def test_urls_that_are_refused(self, url: Any):
        with pytest.raises(SettingsError) as caught:
            Endpoint(url)
        assert "s3cr3t" not in str(caught.value)

    @pytest.mark.parametrize(
        ("url", "name"),
        [
            ("https://example.org/secret/path?token=s3cr3t", "https://example.org"),
            ("https://example.org:8443", "https://example.org:8443"),
            ("http://localhost:80/", "http://localhost:80"),
            ("http://127.9.9.9/", "http://127.9.9.9"),
            ("http://[::1]:8080/x", "http://[::1]:8080"),
        ],
    )
    def test_only_the_host_is_ever_shown(self, url: str, name: str):
        endpoint = Endpoint(url)
        assert endpoint.name == name
        assert WebhookSink(endpoint).name == f"webhook {name}"
        assert "s3cr3t" not in repr(endpoint)

    @pytest.mark.parametrize(
        "header",
        [
            "s3cr3t",
            ": s3cr3t",
            "A B: s3cr3t",
            "X: s3cr3t\r\nY: z",
            "X: s3cr3t\n",
            "X: s3cr3tü",
            "Host: s3cr3t",
            "content-length: 5",
            "Transfer-Encoding: s3cr3t",
        ],
    )
    def test_headers_that_are_refused_are_not_shown(self, header: str):
        with pytest.raises(SettingsError) as caught:
            Endpoint("https://example.org/", header=header)
        assert "s3cr3t" not in str(caught.value)
