"""Several processes, and processes that are killed: nothing lost, nothing twice. And what it costs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from code_rig import AGENT, Memory, Recorded

from phionyx_letta.errors import LedgerUnavailable
from phionyx_letta.ledger.sql import SqlLedger

SEED = "22" * 32


def fast_import(memory: Memory, commits: int) -> None:
    """Many commits in one stream, each with another text in one of fifty files."""
    parts = []
    for number in range(commits):
        text = f"---\nname: n{number % 50}\n---\nfact {number}\n" * 4
        parts.append(
            f"commit refs/heads/main\ncommitter A <a@b> {1_700_000_000 + number} +0000\ndata 1\nm\n"
            f"M 100644 inline notes/f{number % 50}.md\ndata {len(text)}\n{text}\n"
        )
    memory.git("fast-import", "--quiet", given="".join(parts).encode())


def command(memory: Memory, ledger: Path) -> list[str]:
    arguments = ["code", "ingest", "--json", "--agent", AGENT, "--memory", str(memory.path), "--ledger", str(ledger)]
    return [sys.executable, "-m", "phionyx_letta.cli", *arguments]


def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PHIONYX_LETTA_SIGNING_KEY": SEED,
        "PHIONYX_LETTA_HOME": str(tmp_path),
        "PHIONYX_LETTA_BATCH": "50",
    }


@pytest.mark.slow
def test_killed_at_random_moments(memory: Memory, tmp_path: Path) -> None:
    fast_import(memory, 1500)
    ledger = tmp_path / "ledger.db"
    chance, kills = random.Random(6), 0
    for _ in range(12):
        process = subprocess.Popen(
            command(memory, ledger), env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline, started = time.monotonic() + 60, ledger.stat().st_size if ledger.exists() else 0
        while process.poll() is None and time.monotonic() < deadline:
            if ledger.exists() and ledger.stat().st_size > started:  # it began to write
                break
            time.sleep(0.01)
        time.sleep(chance.random() * 0.3)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    done = subprocess.run(command(memory, ledger), env=environment(tmp_path), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert kills >= 3
    with closing(SqlLedger(f"sqlite:///{ledger}")) as opened:
        recorded = Recorded(opened)
        assert len(recorded.commits()) == 1500 == len(recorded.envelopes())
        recorded.agrees_with(memory)


@pytest.mark.slow
def test_two_at_once_and_a_writer(memory: Memory, tmp_path: Path) -> None:
    """Two ingests of a repository that is written to meanwhile."""
    memory.commit({"a.md": "0"})
    ledger, stop = tmp_path / "ledger.db", threading.Event()
    made: list[str] = [memory.head()]

    def write() -> None:
        while not stop.is_set():
            made.append(memory.commit({"a.md": str(len(made)), f"n{len(made) % 7}.md": str(len(made))}))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            running = [
                subprocess.Popen(command(memory, ledger), env=environment(tmp_path), stdout=subprocess.DEVNULL)
                for _ in range(2)
            ]
            assert [process.wait(120) for process in running] == [0, 0]
    finally:
        stop.set()
        writer.join()
    with closing(SqlLedger(f"sqlite:///{ledger}")) as opened:
        recorded = Recorded(opened)
        recorded.ingest(memory)
        assert recorded.commits() == made
        recorded.agrees_with(memory)
        assert recorded.history() == []


def test_several_agents_in_one_ledger(memory: Memory, recorded: Recorded, tmp_path: Path) -> None:
    other = Memory(tmp_path / "other")
    memory.commit({"a.md": "1"})
    other.commit({"a.md": "2"})
    recorded.ingest(memory)
    recorded.ingest(other, "agent-2")
    memory.commit({"a.md": "3"})
    recorded.ingest(memory)
    recorded.agrees_with(memory)
    assert recorded.state("agent-2") == other.files()


def test_a_disk_that_is_full_loses_nothing(memory: Memory, recorded: Recorded) -> None:
    fast_import(memory, 400)
    recorded.options["batch"] = 20
    with recorded.ledger.engine.connect() as connection:
        pages = connection.exec_driver_sql("pragma page_count").scalar_one() + 60
        connection.exec_driver_sql(f"pragma max_page_count = {pages}")
        with pytest.raises(LedgerUnavailable):
            recorded.ingest(memory)
    recorded.ledger.close()
    assert 0 < len(recorded.commits()) < 400
    recorded.ingest(memory)
    assert len(recorded.commits()) == 400 == len(recorded.envelopes())
    recorded.agrees_with(memory)


@pytest.mark.slow
def test_ten_thousand_commits(memory: Memory, recorded: Recorded) -> None:
    """Flat memory, ten times as fast as a process for each commit and file, and nothing to do takes under 100 ms."""
    import tracemalloc

    fast_import(memory, 10_000)
    started = time.perf_counter()
    recorded.ingest(memory)
    taken = time.perf_counter() - started
    oids = memory.git("rev-list", "HEAD").split()
    started = time.perf_counter()
    for oid in oids[:50]:
        subprocess.run(["git", "-C", str(memory.path), "show", oid], capture_output=True, check=True)
    naive = (time.perf_counter() - started) / 50 * 10_000
    again = []
    for _ in range(5):
        started = time.perf_counter()
        assert recorded.ingest(memory).envelopes == 0
        again.append(time.perf_counter() - started)
    print(
        f"\n10 000 commits in {taken:.1f} s, one process each would take {naive:.1f} s; nothing new: {min(again) * 1e3:.0f} ms"
    )
    assert recorded.ledger.find(recorded.ledger.head(AGENT))
    assert recorded.audit().envelopes == 10_000
    assert naive > 10 * taken
    assert min(again) < 0.1
    peaks = []
    for name, commits in (("small", 1000), ("large", 4000)):
        one = Memory(memory.path.parent / name)
        fast_import(one, commits)
        tracemalloc.start()
        recorded.ingest(one, name)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0], peaks
