"""Nothing lost, nothing twice: whatever is killed and whenever, each committed state of each block has exactly one envelope.

What was committed is told by a trigger of PostgreSQL (`proof.py`), not by anything of ours.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from proof import install_witness, prove

from phionyx_letta.demo.letta_server import LettaServer
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.plugin.runtime import PluginKey
from phionyx_letta.plugin.sealer import Sealer
from phionyx_letta.signing import Ed25519Signer, Ed25519Verifier, TrustedKeys

pytestmark = pytest.mark.slow

WRITERS_SCRIPT = Path(__file__).parent / "scripts" / "killed_writers.py"
WRITER_KILLS = 120
SERVER_KILLS = 10


class Key:
    """A signing key of one host."""

    def __init__(self) -> None:
        self.private = os.urandom(32).hex()
        self.signer = Ed25519Signer(self.private)
        self.env = {"PHIONYX_LETTA_SIGNING_KEY": self.private}
        self.verifier = Ed25519Verifier(self.signer.public_key_hex, self.signer.key_id)

    def seal_all(self, url: str) -> None:
        """As `phionyx-letta seal` does: until the outbox is empty."""
        ledger = SqlLedger(url)
        sealer = Sealer(ledger, PluginKey(self.signer, "test"))
        try:
            wait_until(lambda: not (sealer.seal_pending() and ledger.has_pending()))
        finally:
            ledger.close()


@pytest.fixture
def key() -> Key:
    return Key()


@pytest.fixture
def witnessed(new_letta_database: Callable[[], str]) -> str:
    url = new_letta_database()
    install_witness(url)
    return url


class TestWritersThatAreKilled:
    def test_a_hundred_kills_of_writers_and_of_the_sealer(self, run_in_letta: Any, witnessed: str, key: Key) -> None:
        SqlLedger(witnessed).close()
        done = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            sealing = pool.submit(kill_sealers_until, done, witnessed, key)
            try:
                env = {**key.env, "PHIONYX_LETTA_SEALER": "0"}
                told = run_in_letta(
                    WRITERS_SCRIPT, str(WRITER_KILLS), "4", database=witnessed, plugin=True, env=env, timeout=500
                )
            finally:
                done.set()
            sealers_killed = sealing.result()
        wait_until(lambda: writing(witnessed) == 0)
        key.seal_all(witnessed)
        proof = prove(witnessed, key.verifier)
        print(f"\n{told} sealers killed: {sealers_killed} {proof}")
        assert told["kills"] >= WRITER_KILLS
        assert told["died by themselves"] == 0
        assert sealers_killed >= 5
        assert proof.states >= told["acknowledged"] > WRITER_KILLS


class TestServersThatAreKilled:
    def test_ten_kills_of_the_whole_server_under_concurrent_patches(
        self, letta_server_factory: Any, witnessed: str, key: Key
    ) -> None:
        choose, acknowledged, clients = random.Random(7), 0, itertools.count()
        for _ in range(SERVER_KILLS):
            server = letta_server_factory(witnessed, plugin=True, env=key.env)
            with patching([server], clients) as counter:
                wait_until(lambda: counter.answered > 10)
                time.sleep(choose.uniform(0, 1))  # the kill comes at a random moment of the writing
                server.kill()
            acknowledged += counter.answered
            server.stop()
        wait_until(lambda: writing(witnessed) == 0)
        key.seal_all(witnessed)
        proof = prove(witnessed, key.verifier)
        print(f"\n{SERVER_KILLS} kills, {acknowledged} writes answered, {proof}")
        assert proof.states >= acknowledged


class TestTwoServersOnOneDatabase:
    def test_with_one_key(self, letta_server_factory: Any, witnessed: str, key: Key) -> None:
        servers = [letta_server_factory(witnessed, plugin=True, env=key.env) for _ in range(2)]
        counter = write_at_both(servers)
        wait_until(lambda: pending(witnessed) == 0)  # their own sealers do it
        proof = prove(witnessed, key.verifier)
        print(f"\n{counter.answered} writes answered, {counter.conflicts} conflicts, {proof}")
        assert proof.states >= counter.answered

    def test_with_a_key_each(self, letta_server_factory: Any, witnessed: str) -> None:
        keys = [Key(), Key()]
        servers = [letta_server_factory(witnessed, plugin=True, env=one.env) for one in keys]
        counter = write_at_both(servers)
        wait_until(lambda: pending(witnessed) == 0)
        proof = prove(witnessed, TrustedKeys(one.verifier for one in keys))
        print(f"\n{counter.answered} writes answered, {counter.conflicts} conflicts, {proof}")
        assert proof.states >= counter.answered
        assert signers(witnessed) == {one.signer.key_id for one in keys}


class Counter:
    """What clients were told."""

    def __init__(self) -> None:
        self.answered = 0
        self.conflicts = 0
        self.failed = 0


@contextlib.contextmanager
def patching(servers: list[LettaServer], names: Iterator[int], tasks: int = 4) -> Iterator[Counter]:
    """Clients that create and PATCH blocks, one shared by all, on these servers in turn, until the body ends."""
    counter, done, lock = Counter(), threading.Event(), threading.Lock()
    shared = servers[0].client().blocks.create(label="shared", value=f"shared {next(names)}").id
    counter.answered += 1

    def note(status: int) -> None:
        with lock:
            counter.answered += status == 200
            counter.conflicts += status == 409
            counter.failed += status not in (200, 409)

    def work(server: LettaServer, name: str) -> None:
        own = None
        for number in itertools.count():
            if done.is_set():
                return
            if own is None or number % 9 == 0:
                status, block = request(server, "POST", "/v1/blocks/", {"label": "human", "value": f"{name} {number}"})
                own = block.get("id") if status == 200 else None
            elif number % 3 == 0:
                status, _ = request(server, "PATCH", f"/v1/blocks/{shared}", {"value": f"{name} shared {number}"})
            else:
                status, _ = request(server, "PATCH", f"/v1/blocks/{own}", {"value": f"{name} {number}" * number})
            note(status)

    with ThreadPoolExecutor(tasks) as pool:
        working = [pool.submit(work, servers[n % len(servers)], f"client {next(names)}") for n in range(tasks)]
        try:
            yield counter
        finally:
            done.set()
        for one in working:
            one.result()


def write_at_both(servers: list[LettaServer]) -> Counter:
    with patching(servers, itertools.count(), tasks=6) as counter:
        wait_until(lambda: counter.answered >= 300)
    assert counter.failed == 0
    return counter


def request(server: LettaServer, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status (0 when there was no answer) and body."""
    import httpx

    try:
        answer = httpx.request(method, server.base_url + path, json=body, timeout=60, trust_env=False)
        return answer.status_code, answer.json() if answer.status_code == 200 else {}
    except httpx.HTTPError:
        return 0, {}


def kill_sealers_until(done: threading.Event, url: str, key: Key) -> int:
    """Run the real sealing process and SIGKILL it at random moments; how often."""
    choose, killed = random.Random(11), 0
    environment = {**os.environ, **key.env}
    while not done.is_set():
        process = subprocess.Popen(
            [sys.executable, "-m", "phionyx_letta.plugin.sealing_process"],
            stdin=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({"url": url}) + "\n")
        process.stdin.flush()
        done.wait(choose.uniform(0.5, 4))
        killed += process.poll() is None
        process.kill()
        process.wait()
        process.stdin.close()
    return killed


def pending(url: str) -> int:
    with psycopg.connect(url) as connection:
        found = connection.execute("select count(*) from phionyx_outbox").fetchone()
    return int(found[0])  # type: ignore[index]


def writing(url: str) -> int:
    """Transactions that killed processes have left behind: PostgreSQL ends them when it sees that nobody is there."""
    with psycopg.connect(url) as connection:
        found = connection.execute(
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and backend_type = 'client backend' and pid <> pg_backend_pid() and xact_start is not null"
        ).fetchone()
    return int(found[0])  # type: ignore[index]


def signers(url: str) -> set[str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute("select body from phionyx_envelope").fetchall()
    return {json.loads(row[0])["subject"]["key_id"] for row in rows}


def wait_until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    waiting = threading.Event()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        waiting.wait(0.02)
    assert condition()
