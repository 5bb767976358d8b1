"""Letta Code: a long memory recorded beside one process per commit and file; nothing new; the memory it takes; the hooks."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chains import SEED
from measuring import interleaved, medians, quiet, ratio

from phionyx_letta import Ed25519Signer
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.letta_code.hooks import Hooks
from phionyx_letta.letta_code.ingest import Recorder
from phionyx_letta.letta_code.places import Home
from phionyx_letta.plugin.runtime import PluginKey

if TYPE_CHECKING:
    from catalogue import Bench

Measured = tuple[float, dict[str, Any]]
COMMITS = 10_000
_FILES = 50
_SAMPLE = 300  # processes of the peer; the rest is reckoned from them


def ingest(bench: Bench) -> Measured:
    """10 000 commits of one file each in one run, against a `git show COMMIT:PATH` for each, in processor time of both and of git."""
    memory = _memory(bench, COMMITS)
    wanted = _git(memory, "rev-list", "HEAD").split()[:_SAMPLE]
    names = [f"{oid}:{_path(COMMITS - 1 - number)}" for number, oid in enumerate(wanted)]

    def peer() -> float:
        began = _processor()
        for name in names:
            subprocess.run(["git", "-C", str(memory), "show", name], capture_output=True, check=True)
        return (_processor() - began) * COMMITS / len(names)

    def ours() -> float:
        began = _processor()
        _record(bench, memory, COMMITS)
        return _processor() - began

    with quiet():
        pairs = interleaved(bench.rounds(3), ours, peer)
    own, other = medians(pairs)
    return ratio(pairs), {"ours_s": own, "peer_s": other, "commits": COMMITS}


def again(bench: Bench) -> Measured:
    """A run over the same memory that finds nothing new, in processor time of the process and of git."""
    memory = _memory(bench, COMMITS)
    with closing(SqlLedger(f"sqlite:///{bench.folder / 'again.db'}")) as ledger:
        recorder = Recorder(ledger, _key())
        recorder.record("agent-again", memory)
        taken = []
        for _ in range(bench.rounds(20)):
            began, on_the_clock = _processor(), time.perf_counter()
            recorder.record("agent-again", memory)
            taken.append((_processor() - began, time.perf_counter() - on_the_clock))
    wall = sorted(clock for _, clock in taken)
    return statistics.median(used for used, _ in taken) * 1e3, {"wall_ms": statistics.median(wall) * 1e3}


def memory(bench: Bench) -> Measured:
    """Peak memory of a process that records 1 000 commits, then of one that records 10 000."""
    peaks = {}
    for commits in (COMMITS // 10, COMMITS):
        command = [sys.executable, __file__, str(_memory(bench, commits)), str(bench.folder / f"peak-{commits}.db")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[commits] = json.loads(done.stdout)
    small, large = peaks.values()
    return (large - small) / 1e6, {f"peak_{name}": value for name, value in peaks.items()}


def hook(bench: Bench) -> Measured:
    """The slower of the two hooks, as Letta Code and git run them: 99th percentile in processor time, beside the clock's median."""
    home = Home.find(bench.folder / "letta-home")
    path = home.backend / "memfs" / "agent-hook" / "memory"
    path.mkdir(parents=True, exist_ok=True)
    _git(path, "init", "-q", "-b", "main")
    Hooks(home, bench.folder / "own").install(home.memories())
    settings = json.loads((home.letta / "settings.json").read_text())
    command = settings["hooks"]["PostToolUse"][-1]["hooks"][0]["command"]
    moved = f"{'0' * 40} {'1' * 40} refs/heads/main\n".encode()
    figures, details = [], {}
    for name, arguments, given in (
        ("tool", ["sh", "-c", command], b'{"agent_id":"agent-hook","tool_name":"Bash"}'),
        ("ref", [str(path / ".git" / "hooks" / "reference-transaction"), "committed"], moved),
    ):
        used, clock = [], []
        for _ in range(bench.rounds(300)):
            before, began = _children(), time.perf_counter()
            subprocess.run(arguments, input=given, check=True)
            clock.append(time.perf_counter() - began)
            used.append(_children() - before)
        figures.append(sorted(used)[int((len(used) - 1) * 0.99)] * 1e3)
        details |= {f"{name}_p99_ms": figures[-1], f"{name}_wall_median_ms": statistics.median(clock) * 1e3}
    return max(figures), details


def _record(bench: Bench, memory: Path, number: int) -> None:
    path = bench.folder / f"code-{number}-{time.monotonic_ns()}.db"
    with closing(SqlLedger(f"sqlite:///{path}")) as ledger:
        report = Recorder(ledger, _key()).record("agent-bench", memory)
    assert report.envelopes == number
    for one in bench.folder.glob(f"{path.name}*"):
        one.unlink()


def _key() -> PluginKey:
    signer = Ed25519Signer(SEED)
    return PluginKey(signer, "the benchmark")


def _memory(bench: Bench, commits: int) -> Path:
    """A repository whose commits each write another text to one of fifty files in a folder; made once."""
    path = bench.folder / f"memory-{commits}"
    if path.is_dir():
        return path
    path.mkdir()
    _git(path, "init", "-q", "-b", "main")
    parts = []
    for number in range(commits):
        text = f"---\nname: n{number % _FILES}\n---\nfact {number}\n" * 4
        parts.append(
            f"commit refs/heads/main\ncommitter A <a@b> {1_700_000_000 + number} +0000\ndata 1\nm\n"
            f"M 100644 inline {_path(number)}\ndata {len(text)}\n{text}\n"
        )
    _git(path, "fast-import", "--quiet", given="".join(parts))
    return path


def _path(number: int) -> str:
    return f"notes/f{number % _FILES}.md"


def _git(path: Path, *arguments: str, given: str | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(path), *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True, env=environment).stdout


def _processor() -> float:
    """Seconds of this process and of those it waited for: on a busy machine a clock on the wall measures the others."""
    return time.process_time() + _children()


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    with closing(SqlLedger(f"sqlite:///{sys.argv[2]}")) as opened:
        Recorder(opened, _key()).record("agent-bench", Path(sys.argv[1]))
    status = Path("/proc/self/status").read_text()  # getrusage would tell the parent's peak if that was higher
    print(int(status.partition("VmHWM:")[2].split()[0]) * 1024)
