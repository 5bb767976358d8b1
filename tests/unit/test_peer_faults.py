"""One test per fault found in the first phionyx-letta (0.1.0a3): none of them exists here."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import pytest

from phionyx_letta import (
    GENESIS_HASH,
    Ed25519Signer,
    FilesystemEnvelopeStore,
    HmacSigner,
    UnsignedSigner,
    build_memory_envelope,
    compute_memory_diff,
    content_hash,
    envelope_hash,
    verify_chain,
)
from phionyx_letta.ledger import index as index_files

TRACE = "agent-1"


@pytest.fixture
def store(tmp_path: Path) -> FilesystemEnvelopeStore:
    return FilesystemEnvelopeStore(tmp_path)


def test_two_mutations_in_one_turn_keep_both_envelopes(store, context, signer, verifier):
    for label in ("human", "persona"):
        store.emit(context(turn_index=5, block_label=label, block_id=label), signer=signer)
    result = verify_chain(store.iter_chain(TRACE), verifier=verifier)
    assert (result["valid"], result["checked"]) == (True, 2)
    assert [envelope["subject"]["turn_index"] for envelope in store.iter_chain(TRACE)] == [5, 5]


def test_concurrent_writers_do_not_fork_the_chain(store, context, signer, verifier):
    def write(number: int) -> None:
        for turn in range(10):
            store.emit(context(turn_index=turn, block_id=f"block-{number}-{turn}"), signer=signer)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    result = verify_chain(store.iter_chain(TRACE), verifier=verifier, expected_trace=TRACE)
    assert (result["valid"], result["checked"]) == (True, 80)


@pytest.mark.parametrize("moment", ["write_file", "append_line"])
def test_a_crash_between_envelope_and_index_costs_nothing(moment, store, context, signer, verifier, monkeypatch):
    store.emit(context("", "a"), signer=signer)
    with monkeypatch.context() as patch:
        real = getattr(index_files, moment)

        def crash(*given, **named):
            real(*given, **named)
            raise KeyboardInterrupt

        patch.setattr(index_files, moment, crash)
        with pytest.raises(KeyboardInterrupt):
            store.emit(context("a", "lost"), signer=signer)
    store.emit(context("a", "b"), signer=signer)
    result = verify_chain(store.iter_chain(TRACE), verifier=verifier)
    assert (result["valid"], result["checked"], result["findings"]) == (True, 2, [])


def test_an_envelope_whose_writer_was_killed_before_the_index_is_no_orphan(store, context, signer, verifier):
    for place in range(2):
        store.emit(context("a" * place, "a" * (place + 1)), signer=signer)
    index = store.root / TRACE / "chain.jsonl"
    index.write_bytes(index.read_bytes().splitlines(keepends=True)[0])  # as the kill leaves it
    store.emit(context("aa", "b"), signer=signer)
    result = verify_chain(store.iter_chain(TRACE), verifier=verifier)
    assert (result["valid"], result["checked"], result["findings"]) == (True, 3, [])


def test_a_torn_index_line_does_not_crash_the_reader(store, context, signer):
    store.emit(context(), signer=signer)
    with (store.root / TRACE / "chain.jsonl").open("ab") as file:
        file.write(b'{"current_ha')
    assert len(list(store.iter_chain(TRACE))) == 1
    assert store.head(TRACE) != GENESIS_HASH


def test_a_cut_tail_is_said_to_be_unmeasured(chain, signer, verifier):
    """A chain alone cannot show it: the report says so, and the ledger's checkpoints measure it."""
    result = verify_chain(chain(signer)[:2], verifier=verifier)
    assert result["assurance"]["dimensions"]["checkpoint"] == "not_measured"


@pytest.mark.parametrize("signature", ["ed25519:" + "0" * 128, "ed25519:xyz", "garbage", "", "unsigned"])
def test_garbage_and_stripped_signatures_are_not_valid(signature, chain, signer, verifier):
    envelopes = chain(signer)
    envelopes[-1]["integrity"]["signature"] = signature
    assert verify_chain(envelopes, verifier=verifier)["valid"] is False


def test_a_full_rewrite_by_another_key_is_not_valid(chain, verifier):
    assert verify_chain(chain(Ed25519Signer("aa" * 32)), verifier=verifier)["valid"] is False
    assert verify_chain(chain(HmacSigner("secret")), verifier=verifier)["valid"] is False


def test_an_unsigned_chain_is_not_valid_for_a_key(chain, verifier):
    assert verify_chain(chain(UnsignedSigner()), verifier=verifier)["valid"] is None


def test_a_lone_surrogate_is_hashed_stored_and_verified(store, context, signer, verifier, accords):
    text = "half \ud83d and \udc00 end"
    diff = compute_memory_diff(text, text + "\ud800", include_diff_text=True)
    fields = {"trace_id": text, "block_label": text, "producer": text, "metadata": {text: text}, "diff": diff}
    accords(store.emit(context(**fields), signer=signer))
    assert verify_chain(store.iter_chain(text), verifier=verifier, expected_trace=text)["valid"] is True


def test_integer_keys_in_metadata_raise_no_false_alarm(store, context, signer, verifier):
    envelope = store.emit(context(metadata={1: "a", 10: "b", 2: (1, 2), "x": {3.5: None, True: 1}}), signer=signer)
    assert list(store.iter_chain(TRACE)) == [envelope]
    assert verify_chain([envelope], verifier=verifier)["valid"] is True
    assert verify_chain(store.iter_chain(TRACE), verifier=verifier)["valid"] is True


def test_ids_with_slashes_dots_or_nothing_have_folders_of_their_own(store, context, signer):
    ids = ["a/b", "a_b", "", ".", "..", "../up"]
    for trace in ids:
        store.emit(context(trace_id=trace), signer=signer)
    assert sorted(store.traces()) == sorted(ids)
    assert not list(store.root.glob("*.json*"))
    assert not (store.root.parent / "up").exists()


def test_one_agents_chain_does_not_pass_as_anothers(chain, signer, verifier):
    envelopes = chain(signer, trace_id="agent-2")
    assert verify_chain(envelopes, verifier=verifier, expected_trace="agent-2")["valid"] is True
    assert verify_chain(envelopes, verifier=verifier, expected_trace="agent-1")["valid"] is False
    envelopes[0]["subject"]["trace_id"] = "agent-1"
    assert verify_chain(envelopes, verifier=verifier)["valid"] is False


def test_a_change_must_start_from_the_state_the_last_one_left(context, signer, verifier):
    first = build_memory_envelope(context("a", "b"), previous_hash=GENESIS_HASH, package_version="1", signer=signer)
    second = build_memory_envelope(
        context("other", "c"), previous_hash=first["integrity"]["current"], package_version="1", signer=signer
    )
    whole = verify_chain([first, second], verifier=verifier, block_heads={})
    assert (whole["valid"], whole["broken_at"]) == (False, 1)
    assert whole["findings"][0]["found"] == content_hash("other")
    alone = verify_chain([first, second], verifier=verifier)
    assert alone["assurance"]["dimensions"]["block_linkage"] == "not_measured"


@pytest.mark.parametrize("junk", [None, 1, "x", [], {}, {"integrity": None}, {"schema": [], "subject": 1}])
def test_malformed_input_does_not_crash_the_verifier(junk, chain, signer, verifier):
    envelopes = chain(signer)
    assert verify_chain([*envelopes, junk], verifier=verifier)["broken_at"] == 4
    assert verify_chain([junk, *envelopes], verifier=verifier)["broken_at"] == 0


def test_a_forgotten_pin_cannot_be_recovered_from_a_salted_hash():
    salt = random.Random(1).randbytes(32)
    diff = compute_memory_diff("4711", "", salt=salt)
    guesses = (f"{pin:04d}" for pin in range(10_000))
    assert not any(content_hash(guess) == diff.before_hash for guess in guesses)
    assert content_hash("4711", salt=salt) == diff.before_hash  # while the salt exists, the block's history still links


def test_the_head_is_found_without_reading_the_index(store, context, signer, monkeypatch):
    store.emit(context(), signer=signer)
    index = store.root / TRACE / "chain.jsonl"
    index.write_bytes(index.read_bytes() * 20_000)
    monkeypatch.setattr("builtins.open", None)
    read: list[int] = []
    real = index_files.os.pread
    monkeypatch.setattr(index_files.os, "pread", lambda *given: (read.append(given[1]), real(*given))[1])
    assert store.head(TRACE) != GENESIS_HASH
    assert sum(read) < 10_000


def test_a_one_line_append_to_a_large_block_needs_no_comparison(monkeypatch):
    from phionyx_letta import _align

    monkeypatch.setattr(_align, "_lcs", None)  # calling it would fail
    draw = random.Random(4)
    before = "".join(draw.choices("abc \n", k=100_000))
    assert compute_memory_diff(before, before + "one more line\n").added_chars == 14


def test_what_is_verified_is_what_the_json_says(context, signer):
    """The hash of an envelope in memory is the hash of the envelope in its file."""
    envelope = build_memory_envelope(
        context(metadata={"z": 1.0, "a": [None, True], "\ud83d\ude00": "\ud83d\ude00"}),
        previous_hash=GENESIS_HASH,
        package_version="1",
        signer=signer,
    )
    assert envelope_hash(json.loads(json.dumps(envelope)), GENESIS_HASH) == envelope["integrity"]["current"]
