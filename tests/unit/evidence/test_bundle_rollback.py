"""A bundle of a log whose rollback was accepted: for both verifiers checkpoints from before are no fault, all others stand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from bundle_rig import FOREIGN, HOLDER, ORIGIN, History, judged, read, write

from phionyx_letta import Ed25519Signer
from phionyx_letta.checkpoint import open_checkpoint
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.plugin.adoption import Operator
from phionyx_letta.plugin.rollback import accept_rollback, given_up
from phionyx_letta.plugin.runtime import PluginKey

KEY = HOLDER.public_key_hex
ADA = Operator("Ada", "restored from Tuesday's backup")


class Restored(History):
    """Six envelopes, six more that a restored backup lost, and what was written since."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.live([0])
        backup, values = folder / "backup.db", dict(self.values)
        self.ledger.close()
        shutil.copy(self.path, backup)
        self.ledger = SqlLedger(f"sqlite:///{self.path}")
        self.use(HOLDER)
        self.live([1])
        self.ledger.close()
        for old in folder.glob("ledger.db*"):
            old.unlink()
        shutil.copy(backup, self.path)
        self.ledger, self.values = SqlLedger(f"sqlite:///{self.path}"), values
        self.use(HOLDER)

    def accept(self, signer: Ed25519Signer = HOLDER) -> None:
        points = [open_checkpoint(note, [KEY]).checkpoint for note in self.notes]
        with self.ledger.engine.connect() as connection:
            rollback = given_up(connection, self.key, ORIGIN, points)
        assert rollback is not None
        key = PluginKey(signer, "test")
        accept_rollback(self.ledger, key, rollback, ADA)
        self.use(signer)
        report = self.sealer.seal_pending()
        if signer is HOLDER:
            assert report.checkpoint is not None
            self.notes.append(report.checkpoint[1])

    def kept_outside(self, folder: Path) -> Path:
        path = folder / "checkpoints.txt"
        path.write_text("\n".join(self.notes))
        return path


@pytest.fixture
def restored(tmp_path: Path) -> Restored:
    return Restored(tmp_path)


@pytest.mark.parametrize("traces", [(), ("agent-b",)])
def test_an_accepted_one_is_no_fault(restored: Restored, traces: tuple[str, ...], tmp_path: Path) -> None:
    restored.accept()
    restored.live([2])
    path = restored.bundle(tmp_path / "evidence.zip", traces)
    for outside in ((), (restored.kept_outside(tmp_path),)):
        report = judged(path, KEY, outside=outside)
        assert report.verdict == "valid", report.findings
        assert report.covered == 13


@pytest.mark.parametrize("traces", [(), ("agent-b",)])
def test_one_that_nobody_accepted_fails(restored: Restored, traces: tuple[str, ...], tmp_path: Path) -> None:
    path = restored.bundle(tmp_path / "evidence.zip", traces)
    report = judged(path, KEY)
    assert (report.verdict, report.dimensions["checkpoint"]) == ("failed", "failed")


def test_nor_does_an_acceptance_by_a_strange_key_excuse_it(restored: Restored, tmp_path: Path) -> None:
    restored.accept(FOREIGN)
    report = judged(restored.bundle(tmp_path / "evidence.zip", keys=[KEY]), KEY)
    assert report.dimensions["checkpoint"] == "failed"


def test_nor_one_that_was_changed_or_moved_in(restored: Restored, tmp_path: Path) -> None:
    restored.accept()
    members = read(restored.bundle(tmp_path / "evidence.zip"))
    for old, new in ((b'"agreed_size":6', b'"agreed_size":0'), (b'"origin":"test/log",', b'"origin":"test/lag",')):
        assert old in members["envelopes.jsonl"]
        changed = {**members, "envelopes.jsonl": members["envelopes.jsonl"].replace(old, new)}
        assert judged(write(tmp_path / "changed.zip", changed), KEY).dimensions["checkpoint"] == "failed"


def test_what_came_after_it_is_held_to_its_own_checkpoints(restored: Restored, tmp_path: Path) -> None:
    restored.accept()
    restored.live([2])
    members = read(restored.bundle(tmp_path / "evidence.zip"))
    short = b"".join(members["envelopes.jsonl"].splitlines(keepends=True)[:-2])
    cut = {**members, "envelopes.jsonl": short, "log.txt": b"envelopes 11\n"}
    assert judged(write(tmp_path / "cut.zip", cut), KEY).dimensions["checkpoint"] == "failed"
