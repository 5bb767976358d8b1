"""The log as the sealer keeps it on a real PostgreSQL, and the checkpoints it brings outside."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from outbox_rig import Rig, new_key, verifier_of

from phionyx_letta import Ed25519Signer, UnsignedSigner, compute_memory_diff
from phionyx_letta.envelope import MemoryMutationContext, envelope_hash, envelope_line
from phionyx_letta.ledger.audit_log import read_outside
from phionyx_letta.ledger.audit_sql import verify_ledger
from phionyx_letta.ledger.log.reading import read_checkpoints
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.ledger.tree import sql_nodes, stored_checkpoint
from phionyx_letta.merkle import MemoryTree, consistency_proof, inclusion_proof, leaf_hash, verify_consistency
from phionyx_letta.plugin.checkpointing import CheckpointPolicy
from phionyx_letta.plugin.sealer import Sealer
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
    return Sealer(rig.ledger, rig.key, checkpoints=CheckpointPolicy("test/log", public(rig), **policy))  # type: ignore[arg-type]


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
                assert stored_checkpoint(connection, "test/log", [public(rig)]) == signed

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


@pytest.mark.parametrize(
    "signers", [[None], [Ed25519Signer("11" * 32)], [Ed25519Signer("11" * 32), Ed25519Signer("22" * 32)]]
)
def test_appending_never_hashes_the_whole_ledger_anew(
    signers: list[Ed25519Signer | None], tmp_path: Path, mocker: object
) -> None:
    ledger = SqlLedger(f"sqlite:///{tmp_path / 'l.db'}")
    hashed = mocker.patch("phionyx_letta.ledger.tree.leaf_hash", side_effect=leaf_hash)  # type: ignore[attr-defined]
    for number in range(60):
        context = MemoryMutationContext("t", number, "p", "b", "l", "write", compute_memory_diff("", str(number)))
        ledger.emit(context, signer=signers[number % len(signers)] or UnsignedSigner())
    ledger.close()
    assert hashed.call_count <= 2 * 60


class TestProofs:
    @pytest.mark.slow
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


class TestAnAttackerWithTheDatabase:
    """Whatever is done to the tables of the log: nothing wrong is signed, and nothing stops the sealing."""

    @pytest.mark.parametrize("lie", ["key_id = 'other'", "key_id = null", "key_id = null, mac = null"])
    def test_a_frontier_that_is_said_to_be_another_keys_is_never_signed(self, rig: Rig, lie: str) -> None:
        at_work = sealer(rig)
        rig.write("a", "one")
        at_work.seal_pending()
        rig.sql(f"update phionyx_log set frontier = repeat('ab', 32), {lie}")
        for one, text in ((at_work, "two"), (sealer(rig), "three")):
            rig.write("a", text)
            signed = one.seal_pending().checkpoint
            assert signed is not None
            assert signed[0].root == tree_of(rig).root()
            rig.sql(f"update phionyx_log set frontier = repeat('ab', 32) || ' ' || repeat('ab', 32), {lie}")

    def test_nodes_put_in_ahead_of_the_tree_stop_no_sealing_and_reach_no_proof(self, rig: Rig) -> None:
        rig.sql("insert into phionyx_log_node select 8, n, '' from generate_series(0, 3) n")
        rig.sql("insert into phionyx_log_node values (9, 0, '')")
        for number in range(600):
            rig.write(f"block-{number % 7}", str(number))
        report = sealer(rig).seal_pending()
        assert (report.sealed, report.refused) == (600, 0)
        assert rig.ledger.consistency_proof(300, 600) == consistency_proof(tree_of(rig), 300, 600)

    @pytest.mark.parametrize(
        ("edit", "said"),
        [
            ("update phionyx_log_node set hash = decode('00', 'hex') where place = 1", "subtree 1 of level 8 is not"),
            ("delete from phionyx_log_node where place = 0 and level = 8", "subtree 0 of level 8 is not"),
            ("insert into phionyx_log_node values (9, 7, '')", "subtree 7 of level 9 is not"),
            ("update phionyx_envelope set leaf = decode('00', 'hex') where seq = 9", "the column leaf is not"),
        ],
    )
    @pytest.mark.slow
    def test_a_hash_that_was_changed_is_named(self, rig: Rig, edit: str, said: str) -> None:
        for number in range(600):
            rig.write(f"block-{number % 7}", str(number))
        rig.seal()
        assert verify_ledger(rig.ledger, verifier=verifier_of(rig.key)).verdict == "valid"
        rig.sql(edit)
        report = verify_ledger(rig.ledger, verifier=verifier_of(rig.key))
        assert (report.verdict, report.dimensions["database"], report.findings_total) == ("failed", "failed", 1)
        assert said in report.findings[0].message

    def test_hosts_with_two_keys_take_turns_and_sign_the_same_tree(self, rig: Rig) -> None:
        other = Rig(rig.url)
        try:
            sealers = [
                (
                    one,
                    Sealer(one.ledger, one.key, checkpoints=CheckpointPolicy(name, public(one)), trusted=[public(two)]),
                )
                for one, two, name in ((rig, other, "test/log"), (other, rig, "other/log"))
            ]
            for number in range(600):
                who, at_work = sealers[number // 100 % 2]
                who.write(f"block-{number // 100 % 2}", str(number))
                if number % 100 == 99:
                    signed = at_work.seal_pending().checkpoint
                    assert signed is not None
                    assert (signed[0].size, signed[0].root) == (number + 1, tree_of(rig).root())
            assert rig.ledger.consistency_proof(256, 600) == consistency_proof(tree_of(rig), 256, 600)
        finally:
            other.close()

    def test_a_host_covers_no_strangers_envelopes(self, rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
        other = Rig(rig.url)
        try:
            other.write("a", "theirs")
            other.seal()
            rig.write("b", "ours")
            report = sealer(rig).seal_pending()
            assert (report.sealed, report.checkpoint) == (1, None)
            assert "PHIONYX_LETTA_TRUSTED_KEYS" in caplog.text
            rig.write("b", "more")
            trusting = Sealer(
                rig.ledger, rig.key, checkpoints=CheckpointPolicy("test/log", public(rig)), trusted=[public(other)]
            )
            signed = trusting.seal_pending().checkpoint
            assert signed is not None
            assert signed[0].root == tree_of(rig).root()
        finally:
            other.close()

    @pytest.mark.parametrize("running_since", ["before", "after"])
    @pytest.mark.parametrize("forged", ["edited", "rehashed", "stranger", "copy of the newest", "copy of an old one"])
    def test_an_envelope_put_in_by_hand_comes_under_no_checkpoint(
        self, rig: Rig, forged: str, running_since: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        at_work = sealer(rig)
        for value in ("one", "two", "three"):
            rig.write("a", value)
            at_work.seal_pending()
        bodies = [body for (body,) in rig.sql("select body from phionyx_envelope order by seq")]
        envelope = json.loads(bodies[1 if forged == "copy of an old one" else 2])
        if not forged.startswith("copy"):
            envelope["mutation"]["diff"]["after_hash"] = "sha256:" + "ab" * 32
            envelope["integrity"]["previous"] = json.loads(bodies[2])["integrity"]["current"]
        if forged in ("rehashed", "stranger"):
            envelope["integrity"]["current"] = envelope_hash(envelope, envelope["integrity"]["previous"])
        if forged == "stranger":
            envelope["integrity"]["signature"] = new_key().signer.sign(envelope["integrity"]["current"])
        rig.sql("alter table phionyx_envelope drop constraint phionyx_envelope_current_hash_key")
        rig.sql(
            "insert into phionyx_envelope(seq, trace_id, position, current_hash, turn_index, at, block_id, block_label, kind, body,"
            " leaf) select 3, 'x', 3, 'x', turn_index, at, block_id, block_label, kind, %s, leaf from phionyx_envelope"
            " where seq = 2",
            envelope_line(envelope),
        )
        if running_since == "after":
            rig.ledger.known_log = None
            at_work = sealer(rig)
        for value in ("four", "five"):
            rig.write("a", value)
            report = at_work.seal_pending()
            assert (report.sealed, report.refused, report.checkpoint) == (1, 0, None)
        assert "not signed by a key this host believes" in caplog.text
        rig.sql("delete from phionyx_envelope where seq = 3")  # who finds it takes it out and closes the gap
        rig.sql("update phionyx_envelope set seq = seq + 1000 where seq > 3")
        rig.sql("update phionyx_envelope set seq = seq - 1001 where seq > 1000")
        rig.write("a", "six")
        signed = at_work.seal_pending().checkpoint
        assert signed is not None
        assert (signed[0].size, signed[0].root) == (6, tree_of(rig).root())

    @pytest.mark.parametrize("place", [5, 2**40, 2**62])
    def test_a_row_far_beyond_the_end_stops_no_sealing_and_gets_nothing_signed(
        self, rig: Rig, place: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        rig.write("a", "one")
        sealer(rig).seal_pending()
        rig.sql(
            "insert into phionyx_envelope(seq, trace_id, position, current_hash, turn_index, at, block_id, block_label, kind, body,"
            f" leaf) values ({place}, 'x', 0, 'x', 0, 'x', 'x', 'x', 'write', 'x', '')"
        )
        rig.write("a", "two")
        report = sealer(rig).seal_pending()
        assert (report.sealed, report.refused, report.checkpoint) == (1, 0, None)
        assert "no checkpoint is signed" in caplog.text

    def test_a_stored_checkpoint_that_is_none_stops_no_sealing_and_goes_nowhere(self, rig: Rig, tmp_path: Path) -> None:
        rig.write("a", "one")
        with running(rig, log_origin="test/log"):
            wait_until(lambda: rig.sql("select 1 from phionyx_checkpoint"))
        forged = "test/log\n9\n" + "A" * 43 + "=\n\n\N{EM DASH} test/log AAAAAAAA\n"
        for note in ("garbage", forged):
            rig.sql("update phionyx_checkpoint set note = %s, size = 2000000000", note)
            with running(rig, sinks=f"folder:{tmp_path}", log_origin="test/log"):
                rig.write("a", note)
                wait_until(lambda: not rig.sql("select 1 from phionyx_outbox"))
        records = list(read_checkpoints(tmp_path, [public(rig)]))
        assert [one.signed.checkpoint.size for one in records if one.signed] == [2, 3]
        assert not [one for one in records if one.problem]

    def test_a_lock_somebody_holds_keeps_no_sealer_from_ending(self, rig: Rig) -> None:
        from phionyx_letta.ledger.sql import LOCK_KEY

        with rig.connect() as holder:
            with running(rig):
                holder.execute("select pg_advisory_xact_lock(%s)", (LOCK_KEY,))
            holder.rollback()


def test_sinks_that_look_alike_stop_no_sealing_and_old_ones_are_forgotten(rig: Rig, tmp_path: Path) -> None:
    """Two paths of one host have one name, since a path may be a secret."""
    with running(rig, sinks=f"folder:{tmp_path} folder:{tmp_path} http://127.0.0.1:9/a http://127.0.0.1:9/b"):
        rig.write("a", "one")
        wait_until(lambda: len(rig.sql("select 1 from phionyx_sink")) == 3)
        rig.write("a", "two")
        wait_until(lambda: rig.sql("select count(*) from phionyx_envelope")[0][0] == 2)
    with running(rig, sinks=f"folder:{tmp_path}"):
        wait_until(lambda: len(rig.sql("select 1 from phionyx_sink")) == 1)


@pytest.mark.parametrize("origin", ["with a space", "a+b", " ", "a\nb"])
def test_an_origin_that_no_note_can_carry_is_an_unusable_setting(origin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from phionyx_letta.errors import SettingsError
    from phionyx_letta.settings import load_settings

    monkeypatch.setenv("PHIONYX_LETTA_LOG_ORIGIN", origin)
    with pytest.raises(SettingsError, match="PHIONYX_LETTA_LOG_ORIGIN"):
        load_settings()
