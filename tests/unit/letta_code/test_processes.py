"""Several processes, and processes that are killed: nothing lost, nothing twice. And what it costs."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from code_rig import Memory, Recorded, letta
from sqlalchemy import event

from phionyx_letta.errors import LedgerUnavailable
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.letta_code import ingest as ingest_module


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


def started(memory: Memory, ledger: Path, batch: int = 25) -> int:
    """A process that records, forked so that it need not start a Python of its own; its id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            opened = SqlLedger(f"sqlite:///{ledger}")
            Recorded(opened, batch=batch).ingest(memory)
            opened.close()
            code = 0
        finally:
            os._exit(code)
    return child


@pytest.mark.slow
def test_killed_at_random_moments(memory: Memory, tmp_path: Path) -> None:
    fast_import(memory, 1500)
    ledger = tmp_path / "ledger.db"
    SqlLedger(f"sqlite:///{ledger}").close()
    chance, kills = random.Random(6), 0
    for _ in range(40):
        child = started(memory, ledger)
        wal = Path(f"{ledger}-wal")
        size = wal.stat().st_size if wal.exists() else 0
        while (wal.stat().st_size if wal.exists() else 0) == size and os.waitid(
            os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT
        ) is None:
            time.sleep(0.002)  # until it writes
        time.sleep(chance.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        kills += ended == -signal.SIGKILL
        if ended == 0:  # it had come to the end
            break
    assert kills >= 5
    with closing(SqlLedger(f"sqlite:///{ledger}")) as opened:
        recorded = Recorded(opened)
        assert recorded.audit().verdict == "valid"
        recorded.ingest(memory)
        assert len(recorded.commits()) == 1500 == len(recorded.envelopes())
        recorded.agrees_with(memory)


@pytest.mark.slow
def test_two_at_once_and_a_writer(memory: Memory, tmp_path: Path) -> None:
    """Two processes record a repository that is written to meanwhile."""
    memory.commit({"a.md": "0"})
    ledger, stop = tmp_path / "ledger.db", threading.Event()
    SqlLedger(f"sqlite:///{ledger}").close()
    made: list[str] = [memory.head()]

    def write() -> None:
        while not stop.is_set() and len(made) < 200:
            made.append(memory.commit({"a.md": str(len(made)), f"n{len(made) % 7}.md": str(len(made))}))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(5):
            children = [started(memory, ledger) for _ in range(2)]
            assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    finally:
        stop.set()
        writer.join()
    with closing(SqlLedger(f"sqlite:///{ledger}")) as opened:
        recorded = Recorded(opened)
        recorded.ingest(memory)
        assert recorded.commits() == made
        recorded.agrees_with(memory)
        assert recorded.history() == []


@pytest.mark.slow
@pytest.mark.parametrize("then", ["nothing", "reset back", "another commit", "reflog gone"])
def test_cut_short_between_any_two_transactions(
    memory: Memory, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """A rewritten history of several transactions, stopped after each of them in turn."""
    write = ingest_module._Run._write
    left = [0]

    def stopping(self: Any, cursor: Any) -> None:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        write(self, cursor)

    monkeypatch.setattr(ingest_module._Run, "_write", stopping)
    recorded.options["batch"] = 1
    for stop in range(1, 4):
        left[0] = -1
        for number in range(3):
            memory.commit({"a.md": f"{stop} {number}", f"f{number}.md": f"{stop}"})
        recorded.ingest(memory)
        memory.git("reset", "-q", "--hard", "HEAD~2")
        for number in range(3):
            memory.commit({"b.md": f"{stop} {number}", f"f{number}.md": f"other {stop}"})
        memory.git("reflog", "expire", "--expire=now", "--all")  # one move of four steps, each a transaction
        left[0] = stop
        with pytest.raises(KeyboardInterrupt):
            recorded.ingest(memory)
        left[0] = -1
        if then == "reset back":
            memory.git("reset", "-q", "--hard", "HEAD~3")
        elif then == "another commit":
            memory.commit({"c.md": f"{stop}"})
        elif then == "reflog gone":
            memory.git("reflog", "expire", "--expire=now", "--all")
            memory.git("reset", "-q", "--hard", "HEAD~3")
            memory.git("reflog", "expire", "--expire=now", "--all")
        recorded.ingest(memory)
        recorded.agrees_with(memory)
        assert recorded.ingest(memory).envelopes == 0
    commits = [one for one in recorded.envelopes() if letta(one)["run_id"].startswith("commit:")]
    keys = [(letta(one)["commit"], letta(one)["path"]) for one in commits]
    assert len(keys) == len(set(keys))


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
    full: list[int] = []

    def limit(connection: Any, _record: object) -> None:
        if full:
            connection.execute(f"pragma max_page_count = {full[0]}")

    event.listen(recorded.ledger.engine, "connect", limit)
    with recorded.ledger.engine.connect() as connection:
        full.append(connection.exec_driver_sql("pragma page_count").scalar_one() + 60)
    recorded.ledger.engine.dispose()
    with pytest.raises(LedgerUnavailable):
        recorded.ingest(memory)
    full.clear()
    recorded.ledger.engine.dispose()
    assert 0 < len(recorded.commits()) < 400
    recorded.ingest(memory)
    assert len(recorded.commits()) == 400 == len(recorded.envelopes())
    recorded.agrees_with(memory)


@pytest.mark.slow
def test_ten_thousand_commits(memory: Memory, tmp_path: Path) -> None:
    """In flat memory, each once. How fast, beside a process for each commit and file, is for `benchmarks/run.py code-ingest`."""
    small, peaks = Memory(tmp_path / "small"), []
    for one, commits in ((small, 1000), (memory, 10_000)):
        fast_import(one, commits)
        _, status, usage = os.wait4(started(one, tmp_path / f"{commits}.db", batch=500), 0)
        assert os.waitstatus_to_exitcode(status) == 0
        peaks.append(usage.ru_maxrss / 1024)
    with closing(SqlLedger(f"sqlite:///{tmp_path / '10000.db'}")) as opened:
        recorded = Recorded(opened)
        assert recorded.ingest(memory).envelopes == 0
        assert recorded.audit().envelopes == 10_000
        recorded.agrees_with(memory)
    assert peaks[1] < peaks[0] + 24
