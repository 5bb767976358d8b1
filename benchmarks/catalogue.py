"""Every benchmark: its name, what it compares, its figure's unit and the bound the project promises."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import evidence
import filesystem
import guarded
import letta_code
import letta_writes
import library
import patch_store
import run_latency
import sealing
import session_memory
from measuring import NotMeasured

from phionyx_letta.demo.errors import DemoError
from phionyx_letta.demo.letta_server import create_schema_in, require_letta
from phionyx_letta.demo.postgres import EmbeddedPostgres


class Bench:
    """What the benchmarks of one run share: how often to measure, a folder, a PostgreSQL, two Letta processes."""

    def __init__(self, rounds: int | None, things: ExitStack) -> None:
        """Nothing is started before a benchmark asks for it; ``things`` ends it all."""
        self._rounds = rounds
        self._things = things

    def rounds(self, usual: int) -> int:
        """``--rounds``, or what the benchmark takes by itself."""
        return self._rounds or usual

    @cached_property
    def folder(self) -> Path:
        """A temporary folder."""
        return Path(self._things.enter_context(tempfile.TemporaryDirectory(prefix="phionyx-bench-")))

    @cached_property
    def postgres(self) -> EmbeddedPostgres:
        """The embedded PostgreSQL, without fsync: commits are quick, so what capture adds to them weighs more."""
        try:
            return self._things.enter_context(EmbeddedPostgres())
        except DemoError as error:
            raise NotMeasured(str(error)) from None

    @cached_property
    def letta(self) -> letta_writes.Pair:
        """Two processes on one database of Letta's, without and with the plugin."""
        try:
            require_letta()
        except DemoError as error:
            raise NotMeasured(str(error)) from None
        uri = self.postgres.new_database("bench_letta")
        create_schema_in(uri)
        pair = letta_writes.Pair(uri, self.folder)
        self._things.callback(pair.close)
        pair.start()
        return pair

    @cached_property
    def guarded(self) -> guarded.GuardPair:
        """Two processes on one database of Letta's, both with the plugin, without and with guarded reads."""
        try:
            require_letta()
        except DemoError as error:
            raise NotMeasured(str(error)) from None
        uri = self.postgres.new_database("bench_guard")
        create_schema_in(uri)
        pair = guarded.GuardPair(uri, self.folder)
        self._things.callback(pair.close)
        pair.start()
        return pair

    @cached_property
    def sessions(self) -> run_latency.SessionPair:
        """Two Letta servers, without and with proposals after each session."""
        try:
            require_letta()
        except DemoError as error:
            raise NotMeasured(str(error)) from None
        uris = self.postgres.new_database("bench_quiet"), self.postgres.new_database("bench_sessions")
        for uri in uris:
            create_schema_in(uri)
        pair = run_latency.SessionPair(uris, self.folder)
        self._things.callback(pair.close)
        pair.start()
        return pair

    @cached_property
    def peer(self) -> filesystem.PeerPair:
        """One script under this package and under the peer's."""
        pair = filesystem.PeerPair(self.folder)
        self._things.callback(pair.close)
        pair.start()
        return pair

    @cached_property
    def memory_peer(self) -> filesystem.PeerPair:
        """One script under this package and under the second peer."""
        pair = filesystem.PeerPair(self.folder, patch_store.PEER, "memory_child.py")
        self._things.callback(pair.close)
        pair.start()
        return pair


@dataclass(frozen=True)
class Benchmark:
    """One row of the table."""

    name: str
    compares: str
    unit: str
    bound: float | None
    at_least: bool
    measure: Callable[[Bench], tuple[float, dict[str, Any]]] = field(repr=False)

    def holds(self, figure: float) -> bool | None:
        """Whether a figure keeps the bound; None where there is none."""
        if self.bound is None:
            return None
        return figure >= self.bound if self.at_least else figure <= self.bound


def at_most(
    name: str, compares: str, unit: str, bound: float | None, measure: Callable[..., Any], **how: Any
) -> Benchmark:
    return Benchmark(name, compares, unit, bound, False, lambda bench: measure(bench, **how))


def at_least(name: str, compares: str, unit: str, bound: float, measure: Callable[..., Any], **how: Any) -> Benchmark:
    return Benchmark(name, compares, unit, bound, True, lambda bench: measure(bench, **how))


_WRITE = "update of {}, plugin on / off"
_writes = letta_writes.writes
BENCHMARKS: dict[str, Benchmark] = {
    one.name: one
    for one in (
        at_most("write-free-2k", _WRITE.format("a 2 kB block of no agent"), "x", 1.10, _writes, size=2_000),
        at_most("write-free-20k", _WRITE.format("a 20 kB block of no agent"), "x", 1.10, _writes, size=20_000),
        at_most(
            "write-attached-2k", _WRITE.format("an agent's 2 kB block"), "x", 1.04, _writes, size=2_000, attached=True
        ),
        at_most(
            "write-attached-20k",
            _WRITE.format("an agent's 20 kB block"),
            "x",
            1.04,
            _writes,
            size=20_000,
            attached=True,
        ),
        at_most(
            "write-free-16", _WRITE.format("16 such 2 kB blocks at once"), "x", 1.10, _writes, size=2_000, tasks=16
        ),
        at_most(
            "write-attached-16",
            _WRITE.format("16 agents' 2 kB blocks at once"),
            "x",
            1.04,
            _writes,
            size=2_000,
            tasks=16,
            attached=True,
        ),
        at_most(
            "capture-cpu", "CPU of one captured update less an uncaptured one", "ms", None, letta_writes.capture_cpu
        ),
        at_most("seal-lag", "p99 from write to sealed envelope, 50 writes/s", "ms", 250, letta_writes.seal_lag),
        at_most("guard-step", "an agent's step, reads guarded / not", "x", 1.03, guarded.step),
        at_most("guard-read", "reading 20 blocks of 2 kB, guarded less not", "ms", 5, guarded.read),
        at_most("run-latency", "an agent's run beside a proposer of 5 s / without one", "x", 1.02, run_latency.latency),
        at_most(
            "session-memory", "growth of memory while 1 000 queued sessions drain", "MB", 20, session_memory.growth
        ),
        at_least("sealer", "a full outbox on PostgreSQL", "envelopes/s", 4_000, sealing.sealer),
        at_most("filesystem-append", "append to a chain of 20 000 / of 100", "x", 1.2, filesystem.append_flat),
        at_least(
            "filesystem-append-peer",
            "append to a chain of 20 000, peer / ours",
            "x",
            20,
            filesystem.append_against_peer,
        ),
        at_least("patch-store", "open 10 000 patches, peer / ours", "x", 5, patch_store.load_against_peer),
        at_least("diff-append", "one line appended to 20 kB, peer / ours", "x", 1_000, filesystem.diff_against_peer),
        at_most("diff-rewrite-100k", "diff of a full rewrite of 100 kB", "ms", 1_000, library.diff_rewrite),
        at_most("diff-longest", "slowest diff of all shapes up to 1 MB", "ms", 20, library.diff_longest),
        at_least("verify", "100 000 signed envelopes, rate / bare Ed25519 rate", "x", 0.7, library.verify_rate),
        at_most("pii", "personal data looked for in prose, per kilobyte", "ms", 5, library.pii_cost),
        at_most("verify-memory", "growth of memory, 10 000 to 100 000 envelopes", "MB", 4, library.verify_memory),
        at_least("bundle-verify", "a bundle of 100 000, every signature / bare Ed25519", "x", 0.5, evidence.signatures),
        at_most("bundle-hashes", "the same without a key / bare SHA-256", "x", None, evidence.hashes),
        at_most("bundle-script", "the verifier in the bundle, every signature", "envelopes/s", None, evidence.script),
        at_most("bundle-memory", "growth of memory, bundles of 10 000 to 100 000", "MB", 4, evidence.memory),
        at_least("code-ingest", "10 000 commits recorded, one git process each / ours", "x", 10, letta_code.ingest),
        at_most("code-again", "a recorded memory looked at again, processor time", "ms", 100, letta_code.again),
        at_most("code-memory", "growth of memory, 1 000 to 10 000 commits", "MB", 24, letta_code.memory),
        at_most("code-hook", "p99 of the slower hook of Letta Code, processor time", "ms", 50, letta_code.hook),
        at_most("import", "import phionyx_letta, above a bare start of Python", "ms", 100, library.import_time),
    )
}
