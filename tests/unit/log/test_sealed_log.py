"""The log as the sealer keeps it on a real PostgreSQL, and the checkpoints it brings outside."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from outbox_rig import Rig, verifier_of

from phionyx_letta import Ed25519Signer, UnsignedSigner, compute_memory_diff
from phionyx_letta.envelope import MemoryMutationContext
from phionyx_letta.ledger.audit_log import read_outside
from phionyx_letta.ledger.audit_sql import verify_ledger
from phionyx_letta.ledger.log.reading import read_checkpoints
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.ledger.tree import sql_nodes, stored_checkpoint
from phionyx_letta.merkle import MemoryTree, consistency_proof, inclusion_proof, leaf_hash, verify_consistency
from phionyx_letta.plugin.sealer import CheckpointPolicy, Sealer
from phionyx_letta.plugin.sealing_process import seal_until
from phionyx_letta.settings import Settings


@pytest.fixture
def rig(empty_database: str) -> Iterator[Rig]:
    made = Rig(empty_database)
    yield made
    made.close()


def tree_of(rig: Rig) -> MemoryTree:
    """Made anew from the envelopes, by the simplest way there is."""
    return MemoryTree(leaf_hash(body.encode()) for (body,) in rig.sql("select body from phionyx_envelope order by seq"))


def public(rig: Rig) -> str:
    assert isinstance(rig.key.signer, Ed25519Signer)
    return rig.key.signer.public_key_hex


def sealer(rig: Rig, **policy: float) -> Sealer:
    return Sealer(rig.ledger, rig.key, checkpoints=CheckpointPolicy("test/log", **policy))  # type: ignore[arg-type]


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "in time"
        time.sleep(0.02)


@contextmanager
def running(rig: Rig, **settings: object) -> Iterator[threading.Thread]:
    stop = threading.Event()
    given = Settings(baseline="off", poll_ms=5, **settings)  # type: ignore[arg-type]
    thread = threading.Thread(target=seal_until, args=(stop, rig.ledger, rig.key, given))
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join(20)
        assert not thread.is_alive()


class TestCheckpoints:
    def test_one_per_batch_over_all_that_is_sealed(self, rig: Rig) -> None:
        at_work = sealer(rig)
        for number in range(3):
            for block in ("a", "b"):
                rig.write(block, f"{block} {number}")
            signed = at_work.seal_pending().checkpoint
            assert signed is not None
            assert (signed[0].size, signed[0].root) == (2 * number + 2, tree_of(rig).root())
            with rig.ledger.engine.connect() as connection:
                assert stored_checkpoint(connection, "test/log") == signed[1]

    def test_nothing_sealed_nothing_signed(self, rig: Rig) -> None:
        at_work = sealer(rig)
        assert at_work.seal_pending().checkpoint is None
        rig.write("a", "one")
        assert at_work.seal_pending().checkpoint is not None
        assert at_work.seal_pending().checkpoint is None
        assert at_work.sign_last() is None

    def test_every_so_many_envelopes_and_one_at_the_end(self, rig: Rig) -> None:
        at_work = sealer(rig, every=4)
        sizes = []
        for number in range(10):
            rig.write("a", str(number))
            signed = at_work.seal_pending().checkpoint
            sizes += [signed[0].size] if signed else []
        assert sizes == [4, 8]
        last = at_work.sign_last()
        assert last is not None
        assert last[0].size == 10

    def test_after_so_many_seconds_though_nothing_is_written(self, rig: Rig) -> None:
        at_work = sealer(rig, every=1000, seconds=0.2)
        rig.write("a", "one")
        assert at_work.seal_pending().checkpoint is None
        wait_until(at_work.due)
        signed = at_work.seal_pending().checkpoint
        assert signed is not None
        assert signed[0].size == 1

    def test_a_damaged_frontier_is_hashed_anew_and_never_signed(
        self, rig: Rig, caplog: pytest.LogCaptureFixture
    ) -> None:
        at_work = sealer(rig)
        for lie in ("size = 0, frontier = ''", f"frontier = '{'ab' * 32}'", "mac = null", "frontier = 'x'"):
            rig.write("a", lie)
            at_work.seal_pending()
            rig.sql(f"update phionyx_log set {lie}")
            rig.write("b", lie)
            signed = at_work.seal_pending().checkpoint
            assert signed is not None
            assert signed[0].root == tree_of(rig).root(), lie
        assert "hashed anew" in caplog.text

    def test_a_clock_that_steps_back_changes_nothing(self, rig: Rig, mocker: object) -> None:
        at_work, sizes = sealer(rig), []
        for number, now in enumerate((2_000_000_000.0, 1.0, 1_000_000_000.0)):
            mocker.patch("time.time", return_value=now)  # type: ignore[attr-defined]
            rig.write("a", str(number))
            signed = at_work.seal_pending().checkpoint
            sizes += [signed[0].size] if signed else []
        assert sizes == [1, 2, 3]

    def test_the_librarys_own_appends_are_leaves_too(self, rig: Rig) -> None:
        rig.write("a", "one")
        sealer(rig).seal_pending()
        context = MemoryMutationContext("t", 0, "p", "b", "l", "write", compute_memory_diff("", "x"))
        rig.ledger.emit(context, signer=UnsignedSigner())
        rig.write("a", "two")
        signed = sealer(rig).seal_pending().checkpoint
        assert signed is not None
        assert (signed[0].size, signed[0].root) == (3, tree_of(rig).root())


class TestProofs:
    def test_from_the_database_as_from_the_whole_tree(self, rig: Rig) -> None:
        for start in range(0, 1300, 650):
            for number in range(start, start + 650):
                rig.write(f"block-{number % 7}", str(number))
            sealer(rig).seal_pending()
        tree = tree_of(rig)
        with rig.ledger.engine.connect() as connection:
            nodes = sql_nodes(connection)
            for old, new in ((1, 1300), (255, 1024), (256, 1299), (650, 651), (1024, 1300)):
                proof = consistency_proof(nodes, old, new)
                assert proof == consistency_proof(tree, old, new)
                assert verify_consistency(old, tree.root(old), new, tree.root(new), proof)
            for index in (0, 255, 256, 700, 1299):
                assert inclusion_proof(nodes, index, 1300) == inclusion_proof(tree, index, 1300)


class TestSinks:
    def test_the_running_sealer_brings_every_state_outside(self, rig: Rig, tmp_path: Path) -> None:
        with running(rig, sinks=f"folder:{tmp_path}/a folder:{tmp_path}/b"):
            for number in range(20):
                rig.write(f"block-{number % 3}", str(number))
                time.sleep(0.01)
        for folder in ("a", "b"):
            outside = read_outside([str(tmp_path / folder)], [public(rig)])
            report = verify_ledger(rig.ledger, verifier=verifier_of(rig.key), outside=outside)
            assert (report.verdict, report.covered) == ("valid", 20), report.findings

    def test_one_that_is_down_is_counted_and_told_and_costs_no_sealing(self, rig: Rig, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with running(rig, sinks=f"folder:{tmp_path}/file/below folder:{tmp_path}/good"):
            rig.write("a", "one")
            wait_until(lambda: rig.sql("select 1 from phionyx_envelope"))
            wait_until(lambda: any(json.loads(row[0])["failures"] for row in rig.sql("select info from phionyx_sink")))
        told = {json.loads(info)["name"]: json.loads(info) for (info,) in rig.sql("select info from phionyx_sink")}
        bad, good = told[f"folder {tmp_path}/file/below"], told[f"folder {tmp_path}/good"]
        assert bad["failing_since"]
        assert "cannot be written" in bad["last_error"]
        assert (good["failing_since"], good["delivered_size"]) == (None, 1)

    def test_a_malformed_list_of_sinks_stops_no_sealing(self, rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
        with running(rig, sinks="ftp://somewhere"):
            rig.write("a", "one")
            wait_until(lambda: rig.sql("select 1 from phionyx_envelope"))
        assert "PHIONYX_LETTA_SINKS" in caplog.text

    def test_two_sealers_on_one_ledger_share_a_folder(self, rig: Rig, tmp_path: Path) -> None:
        other = Rig(rig.url, rig.key)
        try:
            with running(rig, sinks=f"folder:{tmp_path}"), running(other, sinks=f"folder:{tmp_path}"):
                for number in range(60):
                    rig.write(f"block-{number % 3}", str(number))
                    time.sleep(0.005)
        finally:
            other.close()
        records = list(read_checkpoints(tmp_path, [public(rig)]))
        assert not [one for one in records if one.problem]
        tree = tree_of(rig)
        sizes = [one.signed.checkpoint.size for one in records if one.signed]
        assert sizes[-1] == max(sizes) == 60
        assert all(one.signed.checkpoint.root == tree.root(one.signed.checkpoint.size) for one in records if one.signed)

    def test_after_a_start_what_was_signed_meanwhile_is_brought_outside(self, rig: Rig, tmp_path: Path) -> None:
        with running(rig):
            rig.write("a", "one")
            wait_until(lambda: rig.sql("select 1 from phionyx_envelope"))
        with running(rig, sinks=f"folder:{tmp_path}"):
            wait_until(lambda: (tmp_path / "checkpoints").exists())
        assert [one.signed.checkpoint.size for one in read_checkpoints(tmp_path, [public(rig)]) if one.signed] == [1]

    def test_a_database_that_was_set_back_is_refused_by_the_folder_after_a_restart(
        self, rig: Rig, tmp_path: Path
    ) -> None:
        with running(rig, sinks=f"folder:{tmp_path}"):
            for number in range(3):
                rig.write("a", str(number))
        SqlLedger(rig.url).close()
        rig.sql(
            "truncate phionyx_envelope, phionyx_chain, phionyx_block, phionyx_log, phionyx_log_node, phionyx_checkpoint"
        )
        rig.values.clear()
        with running(rig, sinks=f"folder:{tmp_path}"):
            rig.write("a", "another past")
            wait_until(
                lambda: any(json.loads(row[0])["last_error"] for row in rig.sql("select info from phionyx_sink"))
            )
        (info,) = (json.loads(row[0]) for row in rig.sql("select info from phionyx_sink"))
        assert "does not agree with" in info["last_error"]
