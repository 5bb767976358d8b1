"""A database set back on purpose: accepted by a signed record, after which verification holds again; nothing else is excused by it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from block_rig import BlockRig
from outbox_rig import new_key, verifier_of
from typer.testing import CliRunner

from phionyx_letta.checkpoint import Checkpoint, open_checkpoint
from phionyx_letta.cli.app import app
from phionyx_letta.errors import SinkConflict
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.audit_log import read_outside
from phionyx_letta.ledger.audit_sql import verify_ledger
from phionyx_letta.ledger.lineage import OwnKeys
from phionyx_letta.ledger.log.folder import FolderSink
from phionyx_letta.ledger.log.sink import Published
from phionyx_letta.ledger.rollback import AcceptedRollback, GivenUp, current_origin, excuses
from phionyx_letta.ledger.rollback_sql import accepted_rollbacks
from phionyx_letta.ledger.statements import rotate
from phionyx_letta.plugin.adoption import Operator
from phionyx_letta.plugin.checkpointing import CheckpointPolicy
from phionyx_letta.plugin.evidence import Reader
from phionyx_letta.plugin.rollback import accept_rollback, given_up
from phionyx_letta.plugin.runtime import Runtime
from phionyx_letta.plugin.sealer import Sealer
from phionyx_letta.plugin.watch import LogWatch
from phionyx_letta.settings import load_settings

ORIGIN = "test/log"
WHO = ("--accept-rollback", "--name", "Ada", "--reason", "restored from Tuesday's backup", "--yes", "--json")


class Log:
    """A ledger with a folder of checkpoints outside, and backups of the database."""

    def __init__(self, rig: BlockRig, folder: Path) -> None:
        self.rig, self.folder = rig, folder
        self.public = rig.key.signer.public_key_hex  # type: ignore[attr-defined]
        self.sink = FolderSink(folder, [self.public])
        self.sealer = self.fresh_sealer()
        self.count = 0

    def fresh_sealer(self) -> Sealer:
        return Sealer(self.rig.ledger, self.rig.key, checkpoints=CheckpointPolicy(ORIGIN, self.public))

    def write(self, times: int = 1, *, deliver: bool = True) -> Checkpoint:
        for _ in range(times):
            self.count += 1
            self.rig.write(f"block-{self.count}", f"value {self.count}")
            report = self.sealer.seal_pending()
        assert report.checkpoint is not None
        if deliver:
            self.deliver(report.checkpoint)
        return report.checkpoint[0]

    def deliver(self, signed: tuple[Checkpoint, str]) -> None:
        self.sink.deliver(Published(*signed, self.rig.ledger.consistency_proof))

    def backup(self) -> dict[str, list[Any]]:
        with psycopg.connect(self.rig.url) as connection:
            return {
                name: connection.execute(f"select * from {name}").fetchall()
                for name in tables.metadata.tables
                if name != "phionyx_outbox"
            }

    def set_back(self, backup: dict[str, list[Any]]) -> None:
        with psycopg.connect(self.rig.url) as connection:
            for name, rows in backup.items():
                connection.execute(f"delete from {name}")
                for row in rows:
                    marks = ", ".join(["%s"] * len(row))
                    connection.execute(f"insert into {name} overriding system value values ({marks})", row)

    def verified(self) -> Any:
        outside = read_outside([str(self.folder)], [self.public])
        return verify_ledger(self.rig.ledger, verifier=verifier_of(self.rig.key), outside=outside)

    def accept(self, code: int = 0) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["reconcile", *WHO, "--checkpoint", str(self.folder)])
        assert done.exit_code == code, done.output
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


@pytest.fixture
def log(empty_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    rig = BlockRig(empty_database)
    monkeypatch.setenv("PHIONYX_LETTA_LEDGER", empty_database)
    monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", rig.key.source)
    monkeypatch.setenv("PHIONYX_LETTA_LOG_ORIGIN", ORIGIN)
    yield Log(rig, tmp_path / "checkpoints")
    rig.close()


def test_nothing_is_accepted_where_nothing_was_set_back(log: Log) -> None:
    log.write(5)
    assert log.accept()["accepted"] is None
    assert len(log.rig.envelopes()) == 5


@pytest.mark.parametrize("goes_on_first", [0, 2, 9])
def test_after_it_verification_and_checkpoints_go_on_under_a_new_origin(log: Log, goes_on_first: int) -> None:
    log.write(4)
    backup = log.backup()
    log.write(5)
    log.set_back(backup)
    log.sealer = log.fresh_sealer()
    if goes_on_first:  # Letta wrote on before anybody accepted
        with pytest.raises(SinkConflict):
            log.write(goes_on_first)
    assert log.verified().verdict == "failed"
    accepted = log.accept()["accepted"]
    (end,) = accepted["given_up"]
    assert (end["size"], end["agreed_size"], end["origin"]) == (9, 4, ORIGIN)
    assert log.verified().verdict == "valid"
    point = log.write(3)
    assert point.origin == accepted["origin"] != ORIGIN
    report = log.verified()
    assert (report.verdict, report.covered) == ("valid", point.size)
    assert log.accept()["accepted"] is None
    last = next(e for e in log.rig.envelopes() if e["mutation"]["block_id"] == "phionyx-letta.log")
    letta = last["subject"]["metadata"]["letta"]
    assert (letta["operator"], letta["reason"]) == ("Ada", "restored from Tuesday's backup")


def test_a_running_sealer_that_saw_the_log_go_back_signs_again(log: Log) -> None:
    log.write(4)
    backup = log.backup()
    log.write(5)
    log.set_back(backup)
    log.rig.write("block-x", "x")
    assert log.sealer.seal_pending().checkpoint is None  # it remembers nine
    log.accept()
    assert log.write().origin.startswith(f"{ORIGIN}/restored-")
    assert log.verified().verdict == "valid"


def test_a_later_rollback_is_not_excused(log: Log) -> None:
    log.write(4)
    old = log.backup()
    log.write(5)
    log.set_back(old)
    first = log.accept()["accepted"]
    log.sealer = log.fresh_sealer()
    log.write(2)
    after = log.backup()
    log.write(2)
    log.set_back(after)
    assert log.verified().verdict == "failed"
    log.set_back(old)  # to before the acceptance
    assert log.verified().verdict == "failed"
    second = log.accept()["accepted"]  # which names what the first one had led to as well
    assert [end["origin"] for end in second["given_up"]] == [ORIGIN, first["origin"]]
    assert log.verified().verdict == "valid"


def test_an_acceptance_forged_in_the_database_excuses_nothing(log: Log) -> None:
    log.write(4)
    backup = log.backup()
    log.write(5)
    with_record = log.backup()
    log.set_back(backup)
    forger = BlockRig(log.rig.url, new_key())
    (point,) = [p for p, _ in read_outside([str(log.folder)], [log.public]).checkpoints if p.size == 9]
    rollback = AcceptedRollback(ORIGIN, "test/log/evil", (GivenUp(ORIGIN, 9, point.root.hex(), 4),))
    accept_rollback(forger.ledger, forger.key, rollback, Operator("E", "e"))
    forger.seal()
    forger.close()
    assert log.verified().verdict == "failed"
    with log.rig.ledger.engine.connect() as connection:
        assert accepted_rollbacks(connection, OwnKeys(connection, log.rig.key.signer).verifies) == []
    log.set_back(with_record)
    assert log.verified().verdict == "valid"


def test_what_an_acceptance_excuses() -> None:
    said = AcceptedRollback("a", "a/restored-1", (GivenUp("a", 9, "aa" * 32, 4),))
    points = {size: Checkpoint("a", size, bytes.fromhex("bb" * 32)) for size in (3, 4, 5, 8, 9, 10)}
    assert [size for size, point in points.items() if excuses([said], point)] == [5, 8]
    assert said.excuses(Checkpoint("a", 9, bytes.fromhex("aa" * 32)))
    assert not said.excuses(Checkpoint("b", 5, bytes.fromhex("bb" * 32)))
    assert current_origin("a", [said]) == "a/restored-1"
    assert current_origin("b", [said]) == "b"


def test_the_checkpoint_is_signed_in_the_transaction_that_seals_the_record(log: Log) -> None:
    log.write(4)
    backup = log.backup()
    log.write(5)
    log.set_back(backup)
    origin = log.accept()["accepted"]["origin"]
    ((note,),) = log.rig.sql("select note from phionyx_checkpoint where origin = %s", origin)
    assert open_checkpoint(note, [log.public]).checkpoint.size == 5


def test_doctor_and_reconcile_do_not_take_the_record_for_a_block(log: Log) -> None:
    log.write(4)
    backup = log.backup()
    log.write(5)
    log.set_back(backup)
    log.accept()
    log.rig.sql("delete from phionyx_block where block_id <> 'phionyx-letta.log'")
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert "phionyx-letta.log" not in json.dumps(found["blocks"])


def test_without_checkpoints_from_outside_nothing_can_be_accepted(log: Log, tmp_path: Path) -> None:
    log.write(4)
    done = CliRunner().invoke(app, ["reconcile", *WHO])
    assert (done.exit_code, "nothing shows what is given up" in done.stdout) == (2, True)
    shutil.rmtree(log.folder)
    done = CliRunner().invoke(app, ["reconcile", *WHO, "--checkpoint", str(log.folder)])
    assert done.exit_code == 2


def test_nothing_is_given_up_of_another_log(log: Log) -> None:
    log.write(4)
    stranger = Checkpoint("another/log", 99, bytes(32))
    with log.rig.ledger.engine.connect() as connection:
        assert given_up(connection, log.rig.key, ORIGIN, [stranger]) is None


class TestGuardedReads:
    """What a server that starts now makes of the log: nothing is served where it has a fault."""

    class Readers:
        """Stands where the guard does, which needs Letta."""

        reader: Reader | None = None

        def use(self, reader: Reader) -> None:
            self.reader = reader

    def start(self, log: Log, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setenv("PHIONYX_LETTA_SINKS", f"folder:{log.folder}")
        guard = self.Readers()
        watch = LogWatch(log.rig.url, Runtime(load_settings()), guard)  # type: ignore[arg-type]
        watch.start()
        deadline = time.monotonic() + 20
        while guard.reader is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert guard.reader is not None
        found = watch.describe()
        watch.stop()
        return found

    def test_an_accepted_rollback_is_none_to_them_and_a_later_one_is(
        self, log: Log, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log.write(4)
        backup = log.backup()
        log.write(5)
        log.set_back(backup)
        assert "set back" in self.start(log, monkeypatch)["fault"]
        log.accept()
        assert self.start(log, monkeypatch)["fault"] is None
        log.sealer = log.fresh_sealer()
        point = log.write(2)
        after = log.backup()
        found = self.start(log, monkeypatch)
        assert (found["fault"], found["outside_size"], found["disbelieved"]) == (None, point.size, 0)
        log.write(1)
        log.set_back(after)
        assert "set back" in self.start(log, monkeypatch)["fault"]

    @pytest.mark.parametrize("origin", [ORIGIN, None])
    def test_a_new_key_takes_over_what_the_old_one_signed(
        self, origin: str | None, log: Log, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log.write(4)
        old, new = log.rig.key, new_key()
        rotate(log.rig.ledger, old.signer, new.signer, ORIGIN)
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", new.source)
        if origin is None:
            monkeypatch.delenv("PHIONYX_LETTA_LOG_ORIGIN")
        found = self.start(log, monkeypatch)
        assert (found["fault"], found["disbelieved"], found["size"]) == (None, 0, 4)
        assert found["outside_size"] == 4  # the old key's checkpoint, or the state in which the new one took over
        log.rig.sql("delete from phionyx_envelope where seq = 3")
        assert "set back" in self.start(log, monkeypatch)["fault"]
