"""What the plugin costs a memory write of a real Letta, and how soon the write is sealed.

Two processes import Letta on one database, one with the plugin and its sealer as in production, one without. They take
turns; each turn is short, so that both meet the same machine. Before the turn goes over, the sealer has emptied the
outbox: what is sealed late would otherwise burden the other side.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from measuring import Child, interleaved, medians, ratio

from phionyx_letta.demo.environment import letta_environment
from phionyx_letta.ledger.tables import ledger_url

if TYPE_CHECKING:
    from catalogue import Bench

Measured = tuple[float, dict[str, Any]]
_SCRIPT = str(Path(__file__).with_name("letta_child.py"))


class Pair:
    """Letta without and with the plugin, in two processes on one database."""

    def __init__(self, uri: str, folder: Path) -> None:
        """``uri`` is of a database with Letta's tables."""
        self._uri = uri
        self._folder = folder
        self._children: list[Child] = []
        self._connection: psycopg.Connection[Any] | None = None

    def start(self) -> None:
        """Start both, one after the other: Letta's first start makes rows that two would make at once."""
        for name in ("off", "on"):
            home = self._folder / f"letta-{name}"
            home.mkdir()
            environment = letta_environment(
                self._uri,
                home,
                model_base_url="http://127.0.0.1:9/v1",
                plugin=name == "on",
                extra={"PYTHONWARNINGS": "ignore"},
            )
            child = Child([sys.executable, _SCRIPT], cwd=home, env=environment)
            self._children.append(child)
            child.wait_until_ready()
        url = ledger_url(self._uri).set(drivername="postgresql").render_as_string(hide_password=False)
        self._connection = psycopg.connect(url, autocommit=True)
        self.drain()

    def off(self, **question: Any) -> Any:
        """Ask the one without the plugin."""
        return self._children[0].ask(**question)

    def on(self, **question: Any) -> Any:
        """Ask the one with the plugin, and wait for the sealer afterwards."""
        answer = self._children[1].ask(**question)
        self.drain()
        return answer

    def drain(self, within: float = 60.0) -> None:
        """Wait until the outbox is empty."""
        end = time.monotonic() + within
        while self.query("select 1 from phionyx_outbox limit 1"):
            if time.monotonic() > end:
                raise RuntimeError("the sealer does not empty the outbox")
            time.sleep(0.02)

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows, read from outside of both."""
        assert self._connection is not None
        return self._connection.execute(sql, values or None).fetchall()

    def close(self) -> None:
        """End both."""
        if self._connection is not None:
            self._connection.close()
        for child in self._children:
            child.close()


def writes(bench: Bench, *, size: int, attached: bool = False, tasks: int = 1) -> Measured:
    """``BlockManager.update_block_async`` with the plugin on against off.

    A turn is 20 updates of one block and counts with its median, or 5 updates of each of 16 blocks by as many tasks and
    connections, and counts with its whole duration: there the writes compete, so what counts is how many get done.
    """
    pair, updates = bench.letta, 20 if tasks == 1 else 5
    part = "median" if tasks == 1 else "total"
    asked = {"do": "writes", "size": size, "attached": attached, "tasks": tasks, "count": updates}
    for ask in (pair.off, pair.on):  # blocks, agents, connections, caches
        ask(**asked)
    pairs = interleaved(bench.rounds(60), lambda: pair.off(**asked)[part], lambda: pair.on(**asked)[part])
    _nothing_lost(pair)
    off, on = (one * 1e3 / (1 if tasks == 1 else tasks * updates) for one in medians(pairs))
    return ratio(pairs), {"off_ms": off, "on_ms": on, "postgresql": _version(pair)}


def capture_cpu(bench: Bench) -> Measured:
    """CPU time of Letta's own thread per update, capture's listeners in less out, in one process.

    It explains the figures above: waiting for PostgreSQL is not in it.
    """
    on, count = bench.letta.on, 15
    pairs = interleaved(
        bench.rounds(30),
        lambda: on(do="cpu", count=count, captured=False),
        lambda: on(do="cpu", count=count, captured=True),
    )
    on(do="cpu", count=1, captured=True)
    off_s, on_s = medians(pairs)
    return statistics.median(b - a for a, b in pairs) * 1e3, {"off_ms": off_s * 1e3, "on_ms": on_s * 1e3}


def seal_lag(bench: Bench) -> Measured:
    """How long after a write its envelope can be read by another process, at 50 writes a second; the 99th percentile.

    The clock starts at the time in the envelope, which capture takes before Letta commits, and stops when a reader that looks
    every 5 ms sees the envelope: the lag is rather overstated. A round is four seconds of writes.
    """
    pair, lags = bench.letta, []
    pair.on(do="paced", per_second=50, count=50)
    for _ in range(bench.rounds(8)):
        with _watched(pair) as seen:
            pair.on(do="paced", per_second=50, count=200)
        lags += seen
    lags.sort()
    details = {"median_ms": statistics.median(lags) * 1e3, "max_ms": lags[-1] * 1e3, "envelopes": len(lags)}
    return lags[int(len(lags) * 0.99) - 1] * 1e3, details


@contextmanager
def _watched(pair: Pair) -> Iterator[list[float]]:
    """Lags in seconds of the envelopes that appear while the body runs, seen by a process of its own."""
    ((last,),) = pair.query("select coalesce(max(seq), -1) from phionyx_envelope")
    watcher = Child([sys.executable, __file__, pair._uri, str(last)], cwd=pair._folder)
    watcher.wait_until_ready()
    lags: list[float] = []
    try:
        yield lags
        time.sleep(0.05)  # it looks every 5 ms
        lags += watcher.ask(do="stop")
    finally:
        watcher.close()


def _watch(uri: str, last: int) -> None:
    """The watcher's process: note when each envelope is first seen, until a line arrives."""
    import select

    from measuring import say

    url = ledger_url(uri).set(drivername="postgresql").render_as_string(hide_password=False)
    lags = []
    with psycopg.connect(url, autocommit=True) as connection:
        query = "select seq, at from phionyx_envelope where seq > %s order by seq"
        connection.execute(query, [last])
        say("ready")
        while not select.select([sys.stdin], [], [], 0.005)[0]:
            rows = connection.execute(query, [last]).fetchall()
            now = time.time()
            for seq, at in rows:
                last = seq
                lags.append(now - datetime.fromisoformat(at).timestamp())
    say(lags)


def _nothing_lost(pair: Pair) -> None:
    """A plugin that loses writes would be quick: none may have been."""
    for (info,) in pair.query("select info from phionyx_worker"):
        if json.loads(info)["gaps"]:
            raise RuntimeError(f"writes went unrecorded: {json.loads(info)['last_gaps'][:1]}")


def _version(pair: Pair) -> str:
    return str(pair.query("show server_version")[0][0])


if __name__ == "__main__":
    _watch(sys.argv[1], int(sys.argv[2]))
