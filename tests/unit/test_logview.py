"""The log as a guarded process knows it, against an attacker who owns the database: what counts, and what shows."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from phionyx_letta import Ed25519Signer, MemoryMutationContext, build_memory_envelope, compute_memory_diff
from phionyx_letta.checkpoint import Checkpoint, issue_checkpoint
from phionyx_letta.envelope import GENESIS_HASH, envelope_line
from phionyx_letta.merkle import MemoryTree, leaf_hash
from phionyx_letta.plugin.logview import LogView, Recorded
from phionyx_letta.plugin.mutation import GONE, STATE_VERSION
from phionyx_letta.plugin.outside import OutsideCheckpoints

OURS, THEIRS = Ed25519Signer("11" * 32), Ed25519Signer("22" * 32)
ORIGIN = "phionyx.test/log"


class Log:
    """Sealed envelopes of one chain, as the database keeps them."""

    def __init__(self, signer: Ed25519Signer = OURS) -> None:
        self.signer = signer
        self.bodies: list[str] = []
        self.head = GENESIS_HASH

    def add(self, value: str, *, block: str = "block-1", event: str = "update", **letta: Any) -> str:
        state = f"state of {value}"
        context = MemoryMutationContext(
            trace_id="agent-1",
            turn_index=len(self.bodies),
            producer="p",
            block_id=block,
            block_label="human",
            mutation_kind="delete" if event == "delete" else "write",
            diff=compute_memory_diff("", value),
            metadata={"letta": {"event": event, "state": state, "state_version": STATE_VERSION, **letta}},
        )
        envelope = build_memory_envelope(
            context,
            previous_hash=self.head,
            package_version="0",
            signer=self.signer,
            position=len(self.bodies),
        )
        self.head = envelope["integrity"]["current"]
        self.bodies.append(envelope_line(envelope))
        return state

    def checkpoint(self, size: int | None = None) -> Checkpoint:
        part = self.bodies[:size]
        return Checkpoint(ORIGIN, len(part), MemoryTree(leaf_hash(body.encode()) for body in part).root())


def view_of(bodies: list[str], outside: Checkpoint | None = None) -> LogView:
    view = LogView(lambda current, signature, place: OURS.sign(current) == signature)
    if outside is not None:
        view.expect(outside)
    view.extend(enumerate(bodies))
    return view


@pytest.fixture
def log() -> Log:
    log = Log()
    for number in range(5):
        log.add(f"value {number}")
    return log


def state_in(view: LogView, block: str = "block-1") -> str | None:
    found = view.recorded(block)
    assert found is not None
    return found.state


def test_the_newest_envelope_of_a_block_says_what_is_recorded(log: Log) -> None:
    log.add("another's", block="block-2")
    view = view_of(log.bodies)
    assert (state_in(view), view.size, view.fault) == ("state of value 4", 6, None)
    assert view.recorded("block-3") is None


def test_a_forged_envelope_a_foreign_one_and_a_copy_of_an_old_one_say_nothing(log: Log) -> None:
    foreign = Log(THEIRS)
    foreign.head = log.head
    foreign.add("forged")
    changed = json.loads(log.bodies[4])
    changed["subject"]["metadata"]["letta"]["state"] = "forged"
    bodies = [*log.bodies, foreign.bodies[0], envelope_line(changed), log.bodies[1]]
    view = view_of(bodies)
    assert (state_in(view), view.disbelieved, view.size) == ("state of value 4", 3, 8)


def test_what_a_checkpoint_covers_has_to_be_what_was_signed(log: Log) -> None:
    assert view_of(log.bodies, log.checkpoint()).fault is None
    bodies = [*log.bodies[:2], log.bodies[3], log.bodies[2], log.bodies[4]]
    assert "log was rewritten" in str(view_of(bodies, log.checkpoint()).fault)


def test_a_checkpoint_that_becomes_known_later_is_compared_with_the_log_as_it_was(log: Log) -> None:
    view = view_of(log.bodies)
    view.expect(log.checkpoint(3))
    assert view.fault is None
    other = Log()
    for number in range(4):
        other.add(f"other {number}")
    view.expect(other.checkpoint())
    assert "checkpoint from outside" in str(view.fault)


def test_a_shorter_log_a_hole_and_another_last_envelope_are_faults_that_stay(log: Log) -> None:
    for spoil in (lambda view: view.shorter(3, 5), lambda view: view.changed(4), lambda view: view.extend([(9, "{}")])):
        view = view_of(log.bodies)
        spoil(view)
        fault = view.fault
        assert fault
        view.extend([(5, log.bodies[0])])
        assert (view.fault, view.size) == (fault, 5)
    assert "is not one" in str(view_of([*log.bodies, "not json"]).fault)


def test_a_baseline_takes_up_only_what_nothing_was_recorded_of(log: Log) -> None:
    edited = Log()
    edited.add("first", event="baseline")
    assert state_in(view_of(edited.bodies)) == "state of first"
    edited.add("edited by hand", event="baseline")
    assert state_in(view_of(edited.bodies)) == "state of first"
    edited.add("", event="delete")
    edited.add("put back by hand", event="baseline")
    assert state_in(view_of(edited.bodies)) == GONE


def test_an_unknown_version_of_the_state_is_no_state() -> None:
    assert Recorded("a", "b").after({"event": "update", "state": "c", "state_version": "99"}, None).state is None


def test_a_committed_row_is_awaited_until_it_is_sealed(log: Log) -> None:
    view = view_of(log.bodies)
    view.await_sealing("block-1", "n1")
    assert view.awaited(["block-1"], time.monotonic()) == {"block-1": ["n1"]}
    assert view.awaited(["block-2"], time.monotonic()) == {}
    log.add("value 5", nonce="n1")
    view.extend(enumerate(log.bodies))
    assert view.awaited(["block-1"], time.monotonic()) == {}


def test_what_was_overtaken_is_remembered_for_who_loaded_it_before(log: Log) -> None:
    view = view_of(log.bodies)
    before = time.monotonic()
    log.add("value 5")
    view.extend(enumerate(log.bodies))
    assert [one.state for one in view.recently("block-1", before)] == ["state of value 4"]
    assert view.recently("block-1", time.monotonic()) == []


class TestCheckpointsFromOutside:
    def reader(self, folder: Path) -> OutsideCheckpoints:
        return OutsideCheckpoints(f"folder:{folder} https://example.invalid/x", ORIGIN, [OURS.public_key_hex])

    def test_the_largest_signed_one_counts_whenever_it_is_added(self, log: Log, tmp_path: Path) -> None:
        outside = self.reader(tmp_path)
        assert (outside.any, outside.newest()) == (True, None)
        file = tmp_path / "checkpoints"
        for size in (2, 5, 3):
            with file.open("a") as out:
                out.write(issue_checkpoint(log.checkpoint(size), OURS) + "\n")
            newest = outside.newest()
            assert newest is not None
        assert newest.size == 5
        with file.open("a") as out:
            out.write(issue_checkpoint(Checkpoint(ORIGIN, 99, b"x" * 32), THEIRS) + "\n")
            out.write(issue_checkpoint(Checkpoint("another/log", 98, b"x" * 32), OURS) + "\n\nhalf a checkp")
        assert outside.newest() == newest

    def test_a_file_that_is_cut_hides_nothing_that_was_seen(self, log: Log, tmp_path: Path) -> None:
        file, outside = tmp_path / "checkpoints", self.reader(tmp_path)
        file.write_text(issue_checkpoint(log.checkpoint(), OURS) + "\n")
        assert outside.newest() == log.checkpoint()
        file.write_text("")
        assert outside.newest() == log.checkpoint()

    def test_a_file_that_cannot_be_read_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoints").mkdir()
        outside = self.reader(tmp_path)
        assert outside.newest() is None
        assert "cannot be read" in str(outside.problem)
