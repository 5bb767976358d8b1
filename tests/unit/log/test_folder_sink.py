"""The folder: appended to by several processes, cut short at every byte, full, replaced, and read back."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import multiprocessing
import os
import resource
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from log_rig import ORIGIN, Log

from phionyx_letta import Ed25519Signer, LedgerUnavailable, StoreError
from phionyx_letta.errors import ProofError, SinkConflict, SinkError, UntrustedNote
from phionyx_letta.ledger.log import sink as sink_module
from phionyx_letta.ledger.log.folder import FolderSink
from phionyx_letta.ledger.log.reading import read_checkpoints
from phionyx_letta.ledger.log.sink import Published


@pytest.fixture
def log(signer: Ed25519Signer) -> Log:
    return Log(signer, 3)


@pytest.fixture
def sink(tmp_path: Path, log: Log) -> FolderSink:
    return FolderSink(tmp_path / "out", log.keys)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "out" / "checkpoints"


def sizes(source: Path, log: Log) -> list[int]:
    """Of the verified checkpoints; whatever else is there."""
    return [one.signed.checkpoint.size for one in read_checkpoints(source, log.keys) if one.signed]


def problems(source: Path, log: Log) -> list[str]:
    return [f"{one.place}: {one.problem}" for one in read_checkpoints(source, log.keys) if one.problem]


class TestAppending:
    def test_each_checkpoint_is_a_note_of_its_own(self, sink: FolderSink, log: Log, file: Path):
        notes = []
        for _ in range(3):
            notes.append(log.grow(5).published())
            sink.deliver(notes[-1])
        assert file.read_text() == "".join(one.note + "\n" for one in notes)
        assert sizes(file.parent, log) == sizes(file, log) == [8, 13, 18]
        assert problems(file, log) == []

    def test_the_same_again_and_an_older_one_are_not_written(self, sink: FolderSink, log: Log, file: Path):
        log.grow(10)
        for size in (5, 5, 9, 5, 2, 9, 13):
            sink.deliver(log.published(size))
        assert sizes(file, log) == [5, 9, 13]

    def test_it_goes_on_after_a_start(self, sink: FolderSink, log: Log, file: Path):
        sink.deliver(log.published())
        FolderSink(file.parent, log.keys).deliver(log.grow().published())
        FolderSink(file.parent, log.keys).deliver(log.published(2))
        assert sizes(file, log) == [3, 4]

    def test_several_logs_share_a_folder(self, sink: FolderSink, log: Log, file: Path, signer: Ed25519Signer):
        other = Log(signer, 2, origin="phionyx.example/other")
        for _ in range(3):
            sink.deliver(log.grow().published())
            sink.deliver(other.grow().published())
        found = [(one.origin, one.signed.checkpoint.size) for one in read_checkpoints(file, log.keys) if one.signed]
        assert found == [
            (origin, size)
            for pair in zip((4, 5, 6), (3, 4, 5), strict=True)
            for origin, size in zip((ORIGIN, other.origin), pair, strict=True)
        ]

    def test_of_a_long_file_little_is_verified_and_nothing_is_read_twice(
        self, sink: FolderSink, log: Log, file: Path, mocker
    ):
        file.parent.mkdir()
        log.grow(2_000)
        file.write_text("".join(log.published(size).note + "\n" for size in range(1, 2_001)))
        verified = mocker.spy(sink_module, "open_checkpoint")
        sink.deliver(log.published(2_001))
        assert verified.call_count == 2  # the largest of each thousand
        parsed = mocker.spy(sink_module, "_claimed")
        sink.deliver(log.published(2_002))
        assert parsed.call_count < 1_000
        assert sizes(file, log)[-3:] == [2_000, 2_001, 2_002]

    def test_its_own_is_found_before_a_long_stretch_of_others(
        self, sink: FolderSink, log: Log, file: Path, signer: Ed25519Signer
    ):
        sink.deliver(log.grow(10).published())
        other = Log(signer, 5, origin="phionyx.example/other").published()
        with file.open("a") as out:
            out.write((other.note + "\n") * 400)
        sink.deliver(log.published(4))  # older than what is held: not written
        assert sizes(file, log).count(13) == 1
        assert 4 not in sizes(file, log)

    def test_it_is_durable_before_it_returns(self, sink: FolderSink, log: Log, mocker):
        synced = mocker.spy(os, "fsync")
        sink.deliver(log.published())
        assert synced.call_count == 3  # the file, the folder that has its name, and the folder's own name
        sink.deliver(log.published())
        assert synced.call_count == 4, "what another wrote may not be durable yet"


class TestConflicts:
    def test_a_database_that_was_set_back(self, sink: FolderSink, log: Log, file: Path, signer: Ed25519Signer):
        sink.deliver(log.grow(10).published())
        before = file.read_bytes()
        with pytest.raises(SinkConflict, match="holds a checkpoint of 13 envelopes that the log, at 5"):
            sink.deliver(Log(signer, 5).published())
        assert file.read_bytes() == before

    @pytest.mark.parametrize("size", [7, 13, 20])
    def test_a_log_that_was_rewritten_whatever_its_size(
        self, sink: FolderSink, log: Log, signer: Ed25519Signer, size: int
    ):
        sink.deliver(log.grow(10).published())
        with pytest.raises(SinkConflict, match="rewritten"):
            sink.deliver(Log(signer, 20, forked_at=6).published(size))

    def test_a_log_without_a_proof_now_is_tried_again_later(self, sink: FolderSink, log: Log, file: Path):
        sink.deliver(log.published())

        def down(old: int, new: int) -> list[bytes]:
            raise LedgerUnavailable("the ledger does not answer", "wait")

        offered = log.grow().published()
        with pytest.raises(LedgerUnavailable):
            sink.deliver(Published(offered.checkpoint, offered.note, down))
        assert sizes(file, log) == [3]

    @pytest.mark.parametrize("proof", [[], [b""], [b"x" * 32], [None]])
    def test_a_wrong_proof_is_a_conflict(self, sink: FolderSink, log: Log, proof: list[bytes]):
        sink.deliver(log.published())
        offered = log.grow(4).published()
        with pytest.raises(SinkConflict):
            sink.deliver(Published(offered.checkpoint, offered.note, lambda old, new: proof))

    def test_what_others_put_in_does_not_count(self, sink: FolderSink, log: Log, file: Path):
        thief = Log(Ed25519Signer("55" * 32), 1000)
        sink.deliver(log.published())
        with file.open("a") as out:
            out.write(thief.published().note + "\n")
            out.write(log.published().note.replace("\n3\n", "\n900\n") + "\n")
        sink.deliver(log.grow().published())
        assert sizes(file, log) == [3, 4]
        records = list(read_checkpoints(file, log.keys))
        assert [type(one.problem) for one in records] == [type(None), UntrustedNote, UntrustedNote, type(None)]
        assert [one.origin for one in records] == [ORIGIN] * 4

    def test_a_file_that_was_cut_is_named_once_and_then_written_on(self, sink: FolderSink, log: Log, file: Path):
        for _ in range(3):
            sink.deliver(log.grow().published())
        os.truncate(file, file.stat().st_size // 3)
        with pytest.raises(SinkConflict, match="was cut or replaced"):
            sink.deliver(log.grow().published())
        sink.deliver(log.published())
        assert sizes(file, log) == [4, 7]

    def test_cutting_the_file_does_not_hide_a_database_that_was_set_back(self, sink: FolderSink, log: Log, file: Path):
        for _ in range(3):
            sink.deliver(log.grow().published())
        os.truncate(file, len(log.published(4).note.encode()) + 1)
        restored = Log(log.signer, 5)
        for said in ("was cut or replaced", "holds a checkpoint of 6", "holds a checkpoint of 6"):
            with pytest.raises(SinkConflict, match=said):
                sink.deliver(restored.published())

    @pytest.mark.parametrize("copies", [1, 500])
    def test_an_old_checkpoint_put_in_again_does_not_hide_a_database_that_was_set_back(
        self, sink: FolderSink, log: Log, file: Path, copies: int
    ):
        log.grow(10)
        for size in (4, 13):
            sink.deliver(log.published(size))
        with file.open("a") as out:
            out.write((log.published(4).note + "\n") * copies)
        for one in (sink, FolderSink(file.parent, log.keys)):
            with pytest.raises(SinkConflict, match="holds a checkpoint of 13"):
                one.deliver(Log(log.signer, 5).published())

    def test_forged_giants_do_not_hide_what_is_held(self, sink: FolderSink, log: Log, file: Path):
        sink.deliver(log.grow(10).published())
        thief = Log(Ed25519Signer("55" * 32), 50)
        with file.open("a") as out:
            out.write("".join(thief.published(size).note + "\n" for size in range(20, 50)))
        for one in (sink, FolderSink(file.parent, log.keys)):
            with pytest.raises(SinkConflict, match="holds a checkpoint of 13"):
                one.deliver(Log(log.signer, 5).published())

    @pytest.mark.parametrize("how", ["removed", "replaced"])
    def test_a_file_that_was_replaced_is_named_once(self, sink: FolderSink, log: Log, file: Path, how: str):
        sink.deliver(log.published())
        copy = file.read_bytes()
        kept = file.rename(file.with_name("moved"))  # keeps its inode from being used again
        if how == "replaced":
            file.write_bytes(copy)
        with pytest.raises(SinkConflict, match="was cut or replaced"):
            sink.deliver(log.grow().published())
        sink.deliver(log.published())
        assert sizes(file, log)[-1] == 4
        assert kept.read_bytes() == copy


class TestHalfWritten:
    def test_cut_at_every_byte_it_is_gone_on_with_and_named(self, log: Log, tmp_path: Path, caplog):
        first, second, third = (log.published(size) for size in (1, 2, 3))
        whole = f"{first.note}\n{second.note}\n".encode()
        start = len(first.note.encode()) + 1
        for end in range(start, len(whole) + 1):
            folder = tmp_path / str(end)
            folder.mkdir()
            (folder / "checkpoints").write_bytes(whole[:end])
            caplog.clear()
            FolderSink(folder, log.keys).deliver(third)
            data = (folder / "checkpoints").read_bytes()
            assert data.startswith(whole[:end]), "nothing is overwritten"
            assert data.endswith(f"\n\n{third.note}\n".encode()), end
            complete = end >= len(whole) - 2  # the next writer ends the last line
            assert sizes(folder, log) == ([1, 2, 3] if complete else [1, 3]), end
            torn = problems(folder, log)
            assert bool(torn) == (end > start and not complete), (end, torn)
            assert len(torn) <= 2  # cut within the first dash of a signature line, both halves are named
            assert all(f"checkpoints, line {first.note.count(chr(10)) + 2}: " in one for one in torn[:1])
            assert ("half a checkpoint" in caplog.text) == (whole[:end][-2:] != b"\n\n")

    def test_a_reader_alone_names_it_too(self, log: Log, tmp_path: Path):
        whole = f"{log.published(1).note}\n{log.published(2).note}".encode()
        file = tmp_path / "checkpoints"
        for end in range(len(log.published(1).note.encode()) + 2, len(whole)):
            file.write_bytes(whole[:end])
            assert sizes(file, log) == [1]
            assert 1 <= len(problems(file, log)) <= 2

    def test_garbage_between_costs_nothing_else(self, log: Log, tmp_path: Path):
        file = tmp_path / "checkpoints"
        notes = [log.published(size).note for size in (1, 2, 3)]
        junk = [
            b"\0\xff\n\n",
            b"\n\n\n",
            "— a b\n\n".encode(),
            b"x" * 300_000 + b"\n\n",
            b"words\nmore words\n\n",
            b"\r\n\r\n\n",
        ]
        file.write_bytes(b"".join(junk) + b"".join(note.encode() + b"\n" + b"".join(junk) for note in notes))
        assert sizes(file, log) == [1, 2, 3]
        assert len(problems(file, log)) == 4 * 4

    def test_a_giant_line_is_not_held_in_memory(self, log: Log, tmp_path: Path):
        file = tmp_path / "checkpoints"
        with file.open("wb") as out:
            out.truncate(400_000_000)  # a sparse file: zeros, without one newline
            out.seek(0, os.SEEK_END)
            out.write(b"\n\n" + log.published().note.encode())
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + 100_000_000, hard))
        try:
            found = [
                (bool(one.signed), one.problem and one.problem.message) for one in read_checkpoints(file, log.keys)
            ]
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        assert found == [(False, "a paragraph larger than 128000 bytes"), (True, None)]


def _write_until_full(folder: str, limit: int, results) -> None:
    """With a limit on the size of files: a disk that fills, as far as the writer can tell."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    log = Log(Ed25519Signer("11" * 32))
    sink = FolderSink(folder, log.keys)
    try:
        while True:
            sink.deliver(log.grow().published())
    except SinkError as error:
        results.put((log.tree.size - 1, str(error), type(error.__cause__).__name__))


def _write_many(folder: str, start: int, count: int) -> None:
    log = Log(Ed25519Signer("11" * 32), 400)
    sink = FolderSink(folder, log.keys)
    for size in range(start, start + count * 4, 4):
        sink.deliver(log.published(size))


@pytest.mark.slow
class TestUnderStress:
    def test_a_disk_that_fills_loses_nothing_and_goes_on_when_it_is_freed(self, log: Log, tmp_path: Path):
        context = multiprocessing.get_context("spawn")
        for limit in (0, 1, 1000, 1500):
            folder = tmp_path / str(limit)
            results = context.Queue()
            process = context.Process(target=_write_until_full, args=(str(folder), limit, results))
            process.start()
            taken, said, cause = results.get(timeout=30)
            process.join()
            assert "no space is left" in said
            assert cause == "OSError"
            assert sizes(folder, log) == list(range(1, taken + 1))
            assert len(problems(folder, log)) <= 2
            log.grow(max(0, taken + 1 - log.tree.size))
            FolderSink(folder, log.keys).deliver(log.published(taken + 1))
            assert sizes(folder, log) == list(range(1, taken + 2))

    def test_several_processes_at_once(self, log: Log, tmp_path: Path):
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=_write_many, args=(str(tmp_path), first, 25)) for first in (1, 2, 3, 4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0] * 4
        found = sizes(tmp_path, log)
        assert found == sorted(set(found))
        assert found[-1] == 100
        assert problems(tmp_path, log) == []

    def test_a_reader_beside_a_writer_sees_only_whole_checkpoints_before_the_end(self, log: Log, tmp_path: Path):
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_write_many, args=(str(tmp_path), 1, 60))
        process.start()
        looks = 0
        while process.is_alive():
            if (tmp_path / "checkpoints").exists():
                records = list(read_checkpoints(tmp_path, log.keys))
                assert all(one.signed for one in records[:-1])
                looks += 1
        assert process.exitcode == 0
        assert looks > 3
        assert sizes(tmp_path, log) == list(range(1, 241, 4))


_NOTES = [Log(Ed25519Signer("11" * 32), size).published().note for size in (1, 2, 3)]
_FILE = "".join(note + "\n" for note in _NOTES).encode()


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(0, len(_FILE)), st.integers(0, 40), st.one_of(st.binary(max_size=40), st.just(b"\n\n"))),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_done_to_the_file_only_true_checkpoints_are_read(tmp_path: Path, edits) -> None:
    """Bytes are cut out and put in anywhere: the reader never fails, and what it verifies was signed."""
    data = _FILE
    for place, cut, put in edits:
        data = data[:place] + put + data[place + cut :]
    file = tmp_path / "checkpoints"
    file.write_bytes(data)
    log = Log(Ed25519Signer("11" * 32), 4)
    true = [one.signed.checkpoint for one in read_checkpoints(file, log.keys) if one.signed]
    assert all(one.text in {log.published(size).checkpoint.text for size in (1, 2, 3)} for one in true)
    FolderSink(tmp_path, log.keys).deliver(log.published())
    assert file.read_bytes().startswith(data)
    assert sizes(file, log)[-1] == 4


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30)), min_size=1, max_size=25))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_offered_in_whatever_order_what_is_kept_is_one_history(tmp_path_factory, offers) -> None:
    """A true log and one forked from it at the tenth leaf, both with the key: the folder keeps to whichever came first."""
    folder = tmp_path_factory.mktemp("folder")
    signer = Ed25519Signer("11" * 32)
    logs = Log(signer, 30), Log(signer, 30, forked_at=10)
    sink = FolderSink(folder, logs[0].keys)
    for forked, size in offers:
        with contextlib.suppress(SinkConflict):
            sink.deliver(logs[forked].published(size))
    kept = [one.signed.checkpoint for one in read_checkpoints(folder, logs[0].keys) if one.signed]
    assert [one.size for one in kept] == sorted({one.size for one in kept})
    assert any(all(one.root == log.tree.root(one.size) for one in kept) for log in logs)


class TestPlaces:
    def test_a_folder_that_cannot_be_made(self, log: Log, tmp_path: Path):
        (tmp_path / "file").write_text("")
        with pytest.raises(SinkError, match="file"):
            FolderSink(tmp_path / "file" / "sub", log.keys).deliver(log.published())

    @pytest.mark.parametrize("name", ["checkpoints", ".checkpoints.lock"])
    def test_a_symbolic_link_is_not_followed(self, log: Log, tmp_path: Path, name: str):
        target = tmp_path / "elsewhere"
        target.write_text("kept")
        folder = tmp_path / "out"
        folder.mkdir()
        (folder / name).symlink_to(target)
        with pytest.raises(SinkError, match="symbolic link"):
            FolderSink(folder, log.keys).deliver(log.published())
        assert target.read_text() == "kept"

    def test_a_lock_that_somebody_keeps_is_not_waited_for_for_ever(
        self, sink: FolderSink, log: Log, file: Path, mocker
    ):
        mocker.patch("phionyx_letta.ledger.log.folder._LOCK_SECONDS", 0.2)
        sink.deliver(log.published())
        with (file.parent / ".checkpoints.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(SinkError, match="locked by another process"):
                sink.deliver(log.grow().published())
        sink.deliver(log.published())
        assert sizes(file, log) == [3, 4]

    def test_a_pipe_is_not_waited_for(self, log: Log, tmp_path: Path):
        os.mkfifo(tmp_path / "checkpoints")
        with pytest.raises(SinkError, match="not a file"):
            FolderSink(tmp_path, log.keys).deliver(log.published())
        with pytest.raises(StoreError, match="not a file"):
            list(read_checkpoints(tmp_path / "checkpoints", log.keys))

    def test_a_source_that_is_not_there(self, log: Log, tmp_path: Path):
        for source in (tmp_path, tmp_path / "nothing", tmp_path / "nothing" / "checkpoints"):
            with pytest.raises(StoreError, match="there are no checkpoints at"):
                list(read_checkpoints(source, log.keys))

    def test_an_empty_file_has_none(self, log: Log, tmp_path: Path):
        (tmp_path / "checkpoints").write_text("")
        assert list(read_checkpoints(tmp_path, log.keys)) == []

    def test_an_append_only_file_is_enough(self, sink: FolderSink, log: Log, file: Path, mocker):
        """As with chattr +a: whatever would shorten or overwrite the file is refused."""
        refused = OSError(errno.EPERM, "Operation not permitted")
        for name in ("ftruncate", "truncate", "pwrite", "rename", "replace", "unlink", "remove"):
            mocker.patch.object(os, name, side_effect=refused)
        log.grow(3)
        for size in (2, 4, 6):
            sink.deliver(log.published(size))
        assert sizes(file, log) == [2, 4, 6]

    def test_errors_do_not_hide_behind_a_missing_proof(self, sink: FolderSink, log: Log):
        sink.deliver(log.published())
        with pytest.raises(SinkConflict) as caught:
            sink.deliver(Log(log.signer, 1).published())
        assert not isinstance(caught.value, ProofError)
        assert caught.value.remedy


def test_nothing_is_logged_when_all_is_well(sink: FolderSink, log: Log, caplog) -> None:
    with caplog.at_level(logging.INFO):
        sink.deliver(log.published())
        sink.deliver(log.grow().published())
    assert caplog.records == []
