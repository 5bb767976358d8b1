"""Chains in a folder: any trace id, several writers, crashes at every moment, and damage named by file and line."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import multiprocessing
import os
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phionyx_letta import (
    GENESIS_HASH,
    Ed25519Signer,
    EnvelopeStore,
    FilesystemEnvelopeStore,
    InvalidMutation,
    MemoryMutationContext,
    StaleHeadError,
    StoreError,
    TornStoreError,
    build_memory_envelope,
    compute_memory_diff,
    verify_chain,
)
from phionyx_letta.ledger import index as index_files
from phionyx_letta.ledger.folders import folder_of, is_long, trace_of

TRACE = "agent-1"
ODD_IDS = [
    "",
    ".",
    "..",
    "a/b",
    "a_b",
    "a\\b",
    "A",
    "a",
    "%41",
    "%",
    "%~",
    "x" * 300,
    "x" * 301,
    "é" * 90,
    "ü\ud800",
    "a\0b",
    "con ",
]


@pytest.fixture
def store(tmp_path: Path) -> FilesystemEnvelopeStore:
    return FilesystemEnvelopeStore(tmp_path)


@pytest.fixture
def filled(store, signer, context):
    for place in range(4):
        store.emit(context("a" * place, "a" * (place + 1), turn_index=place), signer=signer)
    return store


def index_of(store: FilesystemEnvelopeStore) -> Path:
    return store.root / TRACE / "chain.jsonl"


class TestLayout:
    def test_it_is_an_envelope_store(self, store):
        assert isinstance(store, EnvelopeStore)

    def test_files_and_index_lines_are_those_of_the_peers(self, filled):
        folder = filled.root / TRACE
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        assert names == ["000000.json", "000001.json", "000002.json", "000003.json", "chain.jsonl"]
        lines = [json.loads(line) for line in index_of(filled).read_text().splitlines()]
        assert set(lines[0]) == {"turn_index", "current_hash", "previous_hash", "envelope_path"}
        assert [line["envelope_path"] for line in lines] == [f"{TRACE}/{name}" for name in names[:4]]
        assert lines[0]["previous_hash"] == GENESIS_HASH
        assert all(one["current_hash"] == next_["previous_hash"] for one, next_ in pairwise(lines))

    def test_what_is_read_is_what_was_written(self, store, signer, context, accords):
        envelopes = [store.emit(context(metadata={"ü": "\ud800", "n": n}), signer=signer) for n in range(3)]
        assert list(store.iter_chain(TRACE)) == [accords(envelope) for envelope in envelopes]
        assert [envelope["subject"]["position"] for envelope in envelopes] == [0, 1, 2]

    def test_reading_creates_nothing(self, tmp_path):
        store = FilesystemEnvelopeStore(tmp_path / "nothing")
        assert store.head(TRACE) == GENESIS_HASH
        assert list(store.iter_chain(TRACE)) == []
        assert list(store.traces()) == []
        assert not store.root.exists()

    def test_appending_and_emitting_mix(self, store, signer, verifier, context):
        for place in range(3):
            envelope = build_memory_envelope(
                context(), previous_hash=store.head(TRACE), package_version="1", signer=signer
            )
            store.append(TRACE, envelope)
            store.emit(context("new", "old"), signer=signer)
            assert len(list(store.iter_chain(TRACE))) == 2 * place + 2
        assert verify_chain(store.iter_chain(TRACE), verifier=verifier, expected_trace=TRACE)["valid"] is True


class TestRefusals:
    def test_an_envelope_on_an_old_head_is_stale(self, filled, context, signer):
        stale = build_memory_envelope(context(), previous_hash=GENESIS_HASH, package_version="1", signer=signer)
        with pytest.raises(StaleHeadError, match="moved on"):
            filled.append(TRACE, stale)
        assert len(list(filled.iter_chain(TRACE))) == 4

    @pytest.mark.parametrize(
        "given_envelope", [None, {}, [], {"integrity": {}, "subject": {}}, {"integrity": 1, "subject": 2}]
    )
    def test_what_is_no_envelope(self, given_envelope, store):
        with pytest.raises(InvalidMutation):
            store.append(TRACE, given_envelope)
        assert list(store.traces()) == []

    def test_an_envelope_that_was_changed_after_it_was_built(self, store, context, signer):
        envelope = build_memory_envelope(context(), previous_hash=GENESIS_HASH, package_version="1", signer=signer)
        envelope["mutation"]["block_id"] = "other"
        with pytest.raises(InvalidMutation, match="hash"):
            store.append(TRACE, envelope)

    def test_a_trace_id_that_is_not_text(self, store):
        with pytest.raises(StoreError):
            store.head(None)


class TestTraceIds:
    def test_odd_ids_have_chains_of_their_own(self, store, context, signer):
        for trace in ODD_IDS:
            store.emit(context(trace_id=trace), signer=signer)
        assert sorted(store.traces()) == sorted(ODD_IDS)
        for trace in ODD_IDS:
            assert [envelope["subject"]["trace_id"] for envelope in store.iter_chain(trace)] == [trace]
        assert all(path.is_dir() for path in store.root.iterdir())  # nothing landed in the root itself

    @given(
        st.lists(
            st.text(alphabet=st.characters()) | st.text(alphabet="aA./%~-_", max_size=6),
            min_size=2,
            max_size=2,
            unique=True,
        )
    )
    def test_folder_names_are_injective_even_where_case_is_ignored(self, ids):
        one, other = map(folder_of, ids)
        assert one.casefold() != other.casefold()
        for trace, folder in zip(ids, (one, other), strict=True):
            assert len(folder) <= 180
            assert folder.isascii()
            assert "/" not in folder
            assert folder not in ("", ".", "..")
            assert is_long(folder) or trace_of(folder) == trace

    @pytest.mark.parametrize("trace", ["agent-0f3c1a52-9d2e-4a10-8f0e-2f5f2f6f7a11", "letta-trace-alex-001", "a.b_c-1"])
    def test_ordinary_ids_are_their_own_folders(self, trace):
        assert folder_of(trace) == trace

    def test_a_chain_a_peer_wrote_under_capitals_is_found_and_continued(self, store, context, signer):
        store.emit(context(), signer=signer)
        (store.root / TRACE).rename(store.root / "Alex_1")
        index = store.root / "Alex_1" / "chain.jsonl"
        index.write_text(index.read_text().replace(TRACE + "/", "Alex_1/"))
        assert store.head("Alex_1") != GENESIS_HASH
        store.emit(context(trace_id="Alex_1"), signer=signer)
        assert len(list(store.iter_chain("Alex_1"))) == 2
        assert list(store.traces()) == ["Alex_1"]

    def test_the_id_of_a_long_one_is_needed_to_list_it(self, store, context, signer):
        store.emit(context(trace_id="x" * 300), signer=signer)
        (folder,) = store.root.iterdir()
        (folder / "trace_id.json").write_text("{}")
        with pytest.raises(TornStoreError, match=r"trace_id\.json"):
            list(store.traces())


class TestCrashes:
    def test_an_orphan_envelope_is_written_over(self, filled, context, signer, verifier):
        (filled.root / TRACE / "000004.json").write_text('{"half": ')
        assert len(list(filled.iter_chain(TRACE))) == 4
        filled.emit(context("aaaa", "b"), signer=signer)
        assert verify_chain(filled.iter_chain(TRACE), verifier=verifier)["checked"] == 5

    @pytest.mark.parametrize("keep", [1, 20, 150])
    def test_half_an_index_line_is_skipped_with_a_warning_and_repaired_by_the_next_append(
        self, keep, filled, context, signer, verifier, caplog
    ):
        index = index_of(filled)
        whole = index.read_bytes()
        index.write_bytes(whole + whole[:keep])
        head = [envelope["integrity"]["current"] for envelope in filled.iter_chain(TRACE)][-1]
        with caplog.at_level(logging.WARNING):
            assert filled.head(TRACE) == head
        assert "half a line" in caplog.text
        filled.emit(context("aaaa", "b"), signer=signer)
        assert index.read_bytes().startswith(whole)
        assert verify_chain(filled.iter_chain(TRACE), verifier=verifier)["checked"] == 5

    def test_a_line_whose_newline_is_missing_counts(self, filled, context, signer, verifier):
        index = index_of(filled)
        index.write_bytes(index.read_bytes()[:-1])
        assert len(list(filled.iter_chain(TRACE))) == 4
        filled.emit(context("aaaa", "b"), signer=signer)
        assert verify_chain(filled.iter_chain(TRACE), verifier=verifier)["checked"] == 5

    @pytest.mark.parametrize("lines", [0, 0.3, 1, 2.5, 3])
    def test_index_lines_lost_with_the_power_are_read_and_written_again_from_the_envelopes(
        self, lines, filled, context, signer, verifier
    ):
        index = index_of(filled)
        whole = index.read_bytes()
        index.write_bytes(whole[: int(len(whole) // 4 * lines)])
        envelopes = list(filled.iter_chain(TRACE))
        assert len(envelopes) == 4
        assert filled.head(TRACE) == envelopes[-1]["integrity"]["current"]
        filled.emit(context("aaaa", "b"), signer=signer)
        assert index.read_bytes().startswith(whole)
        assert verify_chain(filled.iter_chain(TRACE), verifier=verifier)["checked"] == 5

    def test_an_index_lost_as_a_whole_is_written_again(self, filled, context, signer):
        whole = index_of(filled).read_bytes()
        index_of(filled).unlink()
        assert list(filled.traces()) == [TRACE]
        assert len(list(filled.iter_chain(TRACE))) == 4
        filled.emit(context(), signer=signer)
        assert index_of(filled).read_bytes().startswith(whole)

    @pytest.mark.parametrize("change", ["core_memory.human", "previous"])
    def test_an_envelope_beyond_the_index_that_does_not_link_is_an_orphan(self, change, filled, context, signer):
        other = json.loads((filled.root / TRACE / "000003.json").read_text())
        if change == "previous":
            other["integrity"]["previous"] = GENESIS_HASH
        else:
            other["mutation"]["block_label"] = change
        lines = index_of(filled).read_bytes().splitlines(keepends=True)
        index_of(filled).write_bytes(b"".join(lines[:3]))
        (filled.root / TRACE / "000003.json").write_text(json.dumps(other))
        assert len(list(filled.iter_chain(TRACE))) == 3
        filled.emit(context("aaa", "b"), signer=signer)
        assert len(list(filled.iter_chain(TRACE))) == 4

    def test_an_envelope_is_on_the_disk_before_its_index_line_is_written(self, filled, context, signer, monkeypatch):
        events: list[str] = []
        for name in ("write", "fsync", "rename"):
            real = getattr(os, name)
            monkeypatch.setattr(
                index_files.os, name, lambda *given, name=name, real=real: (events.append(name), real(*given))[1]
            )
        filled.emit(context(), signer=signer)
        assert events == ["write", "rename", "fsync", "write"]

    def test_a_full_disk_leaves_the_chain_as_it_was(self, filled, context, signer, verifier, monkeypatch):
        before = index_of(filled).read_bytes()
        for failing, first in (("fsync", 0), ("write", 0), ("write", 1), ("rename", 0)):
            with monkeypatch.context() as patch:
                calls = count()
                real = getattr(os, failing)

                def full(*arguments, real=real, calls=calls, first=first):
                    if next(calls) >= first:
                        raise OSError(errno.ENOSPC, "No space left on device")
                    return real(*arguments)

                patch.setattr(index_files.os, failing, full)
                with pytest.raises(StoreError, match="space"):
                    filled.emit(context("aaaa", "b"), signer=signer)
            assert index_of(filled).read_bytes() == before
        filled.emit(context("aaaa", "b"), signer=signer)
        assert verify_chain(filled.iter_chain(TRACE), verifier=verifier)["checked"] == 5

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
    @given(cut=st.integers(0, 1200), junk=st.binary(max_size=30).filter(lambda data: b"\n" not in data))
    def test_wherever_the_index_is_cut_the_chain_goes_on(self, cut, junk, tmp_path_factory, context, signer, verifier):
        store = FilesystemEnvelopeStore(tmp_path_factory.mktemp("cut"))
        for place in range(2):
            store.emit(context("a" * place, "a" * (place + 1)), signer=signer)
        index = index_of(store)
        index.write_bytes(index.read_bytes()[:cut] + junk)
        with contextlib.suppress(TornStoreError):  # junk right behind a whole line, or two envelopes beyond the end
            kept = len(list(store.iter_chain(TRACE)))
            store.emit(context(), signer=signer)
            assert verify_chain(store.iter_chain(TRACE), verifier=verifier)["checked"] == kept + 1


class TestDamage:
    def test_a_corrupt_line_in_the_middle_is_named(self, filled):
        lines = index_of(filled).read_bytes().splitlines(keepends=True)
        index_of(filled).write_bytes(lines[0] + b"garbage\n" + b"".join(lines[2:]))
        with pytest.raises(TornStoreError, match=r"chain\.jsonl, line 2"):
            list(filled.iter_chain(TRACE))

    def test_a_corrupt_last_line_is_named(self, filled, context, signer):
        with index_of(filled).open("ab") as file:
            file.write(b"[]\n")
        for act in (lambda: filled.head(TRACE), lambda: filled.emit(context(), signer=signer)):
            with pytest.raises(TornStoreError, match="last line"):
                act()

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 200_000, b'{"integrity": {}}'])
    def test_an_unreadable_envelope_is_named(self, content, filled):
        (filled.root / TRACE / "000002.json").write_bytes(content)
        with pytest.raises(TornStoreError, match=r"line 3.*000002\.json"):
            list(filled.iter_chain(TRACE))
        assert verify_chain(filled.iter_chain(TRACE))["broken_at"] == 2

    def test_a_missing_envelope_is_named(self, filled):
        (filled.root / TRACE / "000001.json").unlink()
        with pytest.raises(TornStoreError, match=r"000001\.json is missing"):
            list(filled.iter_chain(TRACE))

    def test_an_envelope_exchanged_for_a_resealed_one_contradicts_the_index(self, filled, context, signer):
        other = build_memory_envelope(
            context("aaa", "x"),
            previous_hash=list(filled.iter_chain(TRACE))[2]["integrity"]["current"],
            package_version="1",
            signer=signer,
        )
        (filled.root / TRACE / "000003.json").write_text(json.dumps(other))
        assert verify_chain(filled.iter_chain(TRACE))["valid"] is False

    def test_an_edited_envelope_is_read_and_named_by_the_verifier(self, filled, verifier):
        path = filled.root / TRACE / "000001.json"
        path.write_text(path.read_text().replace("core_memory.persona", "core_memory.human"))
        result = verify_chain(filled.iter_chain(TRACE), verifier=verifier)
        assert (result["broken_at"], result["findings"][0]["block_id"]) == (1, "block-1")

    def test_an_index_cut_together_with_an_envelope_is_noticed_by_the_ones_beyond(self, filled):
        lines = index_of(filled).read_bytes().splitlines(keepends=True)
        index_of(filled).write_bytes(b"".join(lines[:2]))
        (filled.root / TRACE / "000002.json").unlink()
        with pytest.raises(TornStoreError, match="was cut"):
            list(filled.iter_chain(TRACE))

    @pytest.mark.parametrize("path", ["../outside.json", "/etc/hostname", f"{TRACE}/../../x.json"])
    def test_an_index_that_leads_out_of_the_store_is_not_followed(self, path, filled):
        lines = index_of(filled).read_text().replace(f"{TRACE}/000000.json", path)
        index_of(filled).write_text(lines)
        with pytest.raises(TornStoreError, match="out of the store"):
            list(filled.iter_chain(TRACE))


class TestPlace:
    def test_the_root_comes_from_the_environment(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PHIONYX_LETTA_AUDIT_ROOT", str(tmp_path / "given"))
        assert FilesystemEnvelopeStore().root == tmp_path / "given"
        monkeypatch.delenv("PHIONYX_LETTA_AUDIT_ROOT")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert FilesystemEnvelopeStore().root == tmp_path / ".phionyx" / "letta_audit"

    def test_no_home_at_all_names_the_variable(self, monkeypatch):
        def homeless():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("PHIONYX_LETTA_AUDIT_ROOT", raising=False)
        monkeypatch.setattr(Path, "home", homeless)
        with pytest.raises(StoreError, match="PHIONYX_LETTA_AUDIT_ROOT"):
            FilesystemEnvelopeStore()

    def test_a_root_that_cannot_be_written_names_the_variable(self, tmp_path, context, signer):
        (tmp_path / "file").write_text("")
        store = FilesystemEnvelopeStore(tmp_path / "file" / "root")
        with pytest.raises(StoreError, match="PHIONYX_LETTA_AUDIT_ROOT"):
            store.emit(context(), signer=signer)


class TestCost:
    def test_an_append_reads_as_much_of_a_long_chain_as_of_a_short_one(self, store, context, signer, monkeypatch):
        read: list[int] = []
        real = os.pread

        def counted(descriptor, length, offset):
            data = real(descriptor, length, offset)
            read.append(len(data))
            return data

        for _ in range(30):
            store.emit(context(), signer=signer)
        monkeypatch.setattr(index_files.os, "pread", counted)
        store.emit(context(), signer=signer)
        short = sum(read)
        entry = index_of(store).read_bytes().splitlines(keepends=True)[-1]
        index_of(store).write_bytes(entry * 20_000)  # as long a chain, without writing it
        read.clear()
        store.emit(context(), signer=signer)
        assert sum(read) == short


def write_many(root: str, writer: int, count: int, start: object) -> None:
    store, signer = FilesystemEnvelopeStore(root), Ed25519Signer("11" * 32)
    diff = compute_memory_diff("", f"from {writer}")
    start.wait(30)
    for number in range(count):
        context = MemoryMutationContext(
            trace_id=TRACE,
            turn_index=number,
            producer=f"writer-{writer}",
            block_id=f"block-{writer}-{number}",
            block_label="human",
            mutation_kind="write",
            diff=diff,
        )
        if number % 2:
            store.emit(context, signer=signer)
            continue
        while True:  # what a caller of append does: build again until nobody was quicker
            envelope = build_memory_envelope(
                context, previous_hash=store.head(TRACE), package_version="1", signer=signer
            )
            try:
                store.append(TRACE, envelope)
                break
            except StaleHeadError:
                continue


@pytest.mark.slow
def test_eight_processes_write_one_chain_without_forking_it(tmp_path, verifier):
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Event()
    writers = [spawn.Process(target=write_many, args=(str(tmp_path), number, 12, start)) for number in range(8)]
    for writer in writers:
        writer.start()
    start.set()
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0] * 8
    store = FilesystemEnvelopeStore(tmp_path)
    result = verify_chain(store.iter_chain(TRACE), verifier=verifier, expected_trace=TRACE)
    assert (result["valid"], result["checked"]) == (True, 96)
    assert len({envelope["mutation"]["block_id"] for envelope in store.iter_chain(TRACE)}) == 96


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(
    writes=st.lists(
        st.tuples(st.sampled_from(["a", "A", "", "x/y"]), st.text(alphabet=st.characters()), st.integers(0, 3)),
        max_size=8,
    )
)
def test_any_sequence_of_writes_reads_back_and_verifies(writes, tmp_path_factory, context, signer, verifier, accords):
    store = FilesystemEnvelopeStore(tmp_path_factory.mktemp("any"))
    written: dict[str, list] = {}
    for trace, content, turn in writes:
        envelope = store.emit(context("", content, trace_id=trace, turn_index=turn), signer=signer)
        written.setdefault(trace, []).append(accords(envelope))
    assert set(store.traces()) == set(written)
    for trace, envelopes in written.items():
        assert list(store.iter_chain(trace)) == envelopes
        assert verify_chain(store.iter_chain(trace), verifier=verifier, expected_trace=trace)["valid"] is True
