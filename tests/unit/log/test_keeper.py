"""The keeper: sinks that are down, slow, broken or far away, and a sealer that never waits for them."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from log_rig import Log, Server

from phionyx_letta import Ed25519Signer
from phionyx_letta.errors import SinkError
from phionyx_letta.ledger.log.folder import FolderSink
from phionyx_letta.ledger.log.keeper import SinkKeeper, SinkState
from phionyx_letta.ledger.log.post import Endpoint
from phionyx_letta.ledger.log.reading import read_checkpoints
from phionyx_letta.ledger.log.sink import Published, Sink
from phionyx_letta.ledger.log.webhook import WebhookSink
from phionyx_letta.ledger.log.witness import WitnessSink
from phionyx_letta.notes import COSIGNATURE, NoteKey, cosign_note, parse_note

QUICK = (0.01, 0.04)


@pytest.fixture
def log(signer: Ed25519Signer) -> Log:
    return Log(signer, 3)


class Scripted:
    """A sink that does what it is told."""

    interval = 0.0

    def __init__(self, act: Callable[[Published], str | None], name: str = "scripted") -> None:
        self.act = act
        self.name = name
        self.taken: list[int] = []
        self.times: list[float] = []

    def deliver(self, offered: Published, /) -> str | None:
        self.times.append(time.monotonic())
        note = self.act(offered)
        self.taken.append(offered.checkpoint.size)
        return note


def until(condition: Callable[[], object], timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


def refusing(_: Published) -> str | None:
    raise SinkError("the sink is down", "start it")


def held_by(gate: threading.Event) -> Callable[[Published], str | None]:
    def act(_: Published) -> str | None:
        gate.wait(20)
        return None

    return act


def test_every_sink_gets_it(log: Log, tmp_path: Path) -> None:
    with Server(lambda *_: (200, {}, b"")) as server:
        keeper = SinkKeeper([FolderSink(tmp_path, log.keys), WebhookSink(Endpoint(server.url), interval=0.0)])
        for _ in range(3):
            keeper.publish(log.grow().published())
            until(lambda: all(state.delivered_size == log.tree.size for state in keeper.states()))
        assert keeper.close()
    assert [one.signed.checkpoint.size for one in read_checkpoints(tmp_path, log.keys) if one.signed] == [4, 5, 6]
    assert len(server.requests) == 3
    assert [(state.delivered, state.failures, state.last_error) for state in keeper.states()] == [(3, 0, None)] * 2


def test_only_the_newest_waits(log: Log) -> None:
    gate = threading.Event()
    sink = Scripted(held_by(gate))
    keeper = SinkKeeper([sink])
    keeper.publish(log.published())
    until(lambda: sink.times)
    for _ in range(100):
        keeper.publish(log.grow().published())
    (state,) = keeper.states()
    assert (state.waiting_size, state.delivered_size) == (103, None)
    gate.set()
    assert keeper.close()
    assert sink.taken == [3, 103]


def test_a_sink_that_hangs_holds_up_neither_the_sealer_nor_another_sink(log: Log) -> None:
    gate = threading.Event()
    stuck, good = Scripted(held_by(gate), "stuck"), Scripted(lambda _: None, "good")
    keeper = SinkKeeper([stuck, good])
    for _ in range(200):
        keeper.publish(log.published())
    keeper.publish(log.grow().published())
    until(lambda: good.taken[-1:] == [4])
    assert not keeper.close(timeout=0.2)
    assert not gate.is_set(), "all that while it hung"
    gate.set()


def test_what_fails_is_tried_again_later_and_later(log: Log, caplog) -> None:
    sink = Scripted(refusing)
    keeper = SinkKeeper([sink], retry=(0.05, 0.2))
    keeper.publish(log.published())
    until(lambda: len(sink.times) >= 16)  # doubled without an end, the last pause would take half an hour
    pauses = [later - earlier for earlier, later in zip(sink.times, sink.times[1:], strict=False)]
    assert all(least <= pause for pause, least in zip(pauses, (0.05, 0.1, 0.2, 0.2, 0.2), strict=False))
    (state,) = keeper.states()
    assert state.failures >= 5
    assert (state.delivered_size, state.waiting_size, state.last_ok) == (None, 3, None)
    assert state.last_error == "the sink is down; start it"
    assert state.failing_since is not None
    sink.act = lambda _: None
    until(lambda: sink.taken == [3])
    (state,) = keeper.states()
    assert (state.delivered_size, state.waiting_size, state.failing_since) == (3, None, None)
    assert state.last_ok is not None
    assert state.last_error == "the sink is down; start it", "kept, with its time, for who looks later"
    assert keeper.close()
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "phionyx-letta: a checkpoint was not delivered: the sink is down; start it",
        "phionyx-letta: scripted takes checkpoints again",
    ], "once each, not at every try"


def test_a_new_checkpoint_does_not_hurry_a_sink_that_fails(log: Log) -> None:
    sink = Scripted(refusing)
    keeper = SinkKeeper([sink], retry=(60.0, 60.0))
    for _ in range(20):
        keeper.publish(log.grow().published())
        time.sleep(0.01)
    until(lambda: sink.times)
    assert len(sink.times) == 1
    keeper.close()
    assert len(sink.times) == 2, "once more at the end"


@pytest.mark.parametrize(
    "error", [ValueError("s3cr3t"), RecursionError(), MemoryError(), KeyError("s3cr3t"), StopIteration()]
)
def test_whatever_a_sink_raises_it_is_counted_and_not_quoted(log: Log, error: Exception, caplog) -> None:
    def fail(_: Published) -> str | None:
        raise error

    keeper = SinkKeeper([Scripted(fail)], retry=QUICK)
    keeper.publish(log.published())
    until(lambda: keeper.states()[0].failures >= 2)
    assert keeper.states()[0].last_error == f"scripted failed: {type(error).__name__}"
    keeper.close()
    assert "s3cr3t" not in caplog.text


def test_a_sink_is_not_asked_more_often_than_it_wants(log: Log) -> None:
    sink = Scripted(lambda _: None)
    sink.interval = 0.3
    keeper = SinkKeeper([sink])
    for _ in range(20):
        keeper.publish(log.grow().published())
        time.sleep(0.02)
    until(lambda: sink.taken[-1] == 23)
    assert len(sink.taken) <= 4
    assert all(later - earlier >= 0.3 for earlier, later in zip(sink.times, sink.times[1:], strict=False))
    assert keeper.close()


def test_at_the_end_what_waits_is_delivered_at_once(log: Log) -> None:
    sink = Scripted(lambda _: None)
    sink.interval = 60.0
    keeper = SinkKeeper([sink])
    keeper.publish(log.published())
    until(lambda: sink.taken == [3])
    keeper.publish(log.grow().published())
    assert keeper.close()
    assert sink.taken == [3, 4]


def test_a_wall_clock_that_steps_back_at_each_look_changes_nothing(log: Log, mocker) -> None:
    years = iter(range(2030, 1970, -1))
    clock = mocker.patch("phionyx_letta.ledger.log.keeper.datetime")
    clock.now.side_effect = lambda zone: datetime(max(1971, next(years, 0)), 1, 1, tzinfo=zone)
    sink = Scripted(refusing)
    keeper = SinkKeeper([sink], retry=QUICK)
    keeper.publish(log.published())
    until(lambda: len(sink.times) > 3)
    sink.act = lambda _: None
    until(lambda: sink.taken == [3])
    keeper.publish(log.grow().published())
    until(lambda: sink.taken == [3, 4])
    assert keeper.close()
    (state,) = keeper.states()
    assert state.last_ok is not None
    assert state.last_error_at is not None
    assert state.last_ok < state.last_error_at, "as the clock said"


def test_a_server_that_comes_back(log: Log, tmp_path: Path) -> None:
    """Down, then answering garbage, then well: nothing is lost, and the folder beside it never noticed."""
    answers = iter([(500, {}, b""), (302, {"Location": "http://x/"}, b""), (200, {"Content-Length": "9"}, b"x")])
    with Server(lambda *_: next(answers, (200, {}, b""))) as server:
        keeper = SinkKeeper(
            [FolderSink(tmp_path, log.keys), WebhookSink(Endpoint(server.url, timeout=0.5), interval=0.0)], retry=QUICK
        )
        keeper.publish(log.published())
        until(lambda: keeper.states()[1].delivered_size == 3)
        folder, webhook = keeper.states()
        assert keeper.close()
    assert (folder.failures, folder.delivered) == (0, 1)
    assert (webhook.failures, webhook.delivered) == (3, 1)
    assert len(server.requests) == 4


def test_cosigned_checkpoints_are_handed_on(log: Log) -> None:
    signer = Ed25519Signer("22" * 32)
    kept: list[tuple[int, str]] = []

    def cosign(_handler, body: bytes):
        note = parse_note(body.partition(b"\n\n")[2])
        return 200, {}, cosign_note(note, "w", signer, 7).line().encode()

    with Server(cosign) as server:
        sink = WitnessSink(Endpoint(server.url), [NoteKey("w", signer.public_key_hex, COSIGNATURE)], interval=0.0)
        keeper = SinkKeeper([sink], cosigned=lambda offered, note: kept.append((offered.checkpoint.size, note)))
        keeper.publish(log.published())
        until(lambda: kept)
        assert keeper.close()
    ((size, note),) = kept
    assert size == 3
    assert [one.name for one in parse_note(note).signatures] == [log.origin, "w"]


def test_a_cosignature_that_cannot_be_kept_is_a_failure_and_tried_again(log: Log) -> None:
    tries: list[int] = []

    def keep(offered: Published, note: str) -> None:
        tries.append(offered.checkpoint.size)
        if len(tries) < 3:
            raise SinkError("the ledger does not answer")

    keeper = SinkKeeper([Scripted(lambda offered: offered.note)], cosigned=keep, retry=QUICK)
    keeper.publish(log.published())
    until(lambda: keeper.states()[0].delivered_size == 3)
    assert tries == [3, 3, 3]
    assert keeper.close()


def test_no_sinks_and_no_checkpoints(log: Log) -> None:
    keeper = SinkKeeper([])
    keeper.publish(log.published())
    assert keeper.states() == []
    assert keeper.close()
    idle: list[Sink] = [Scripted(refusing)]
    keeper = SinkKeeper(idle)
    assert keeper.close()
    assert keeper.states() == [SinkState("scripted")]


def test_a_process_with_a_stuck_sink_ends(tmp_path: Path) -> None:
    program = """
        import time
        from phionyx_letta.ledger.log.keeper import SinkKeeper
        class Stuck:
            name, interval = "stuck", 0.0
            def deliver(self, offered):
                time.sleep(60)
        class Offered:
            class checkpoint:
                size = 1
        keeper = SinkKeeper([Stuck()])
        keeper.publish(Offered())
        time.sleep(0.1)
        print(keeper.close(0.1))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_it_says_nothing_while_all_is_well(log: Log, tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.DEBUG, logger="phionyx_letta"):
        keeper = SinkKeeper([FolderSink(tmp_path, log.keys)])
        keeper.publish(log.published())
        assert keeper.close()
    assert caplog.records == []
