"""What a verified chain shows, what it cannot show, and that nothing given to the verifier makes it fail otherwise."""

from __future__ import annotations

import copy
import json
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phionyx_letta import (
    GENESIS_HASH,
    SCHEMA_ID,
    ChainVerifier,
    Ed25519Signer,
    Ed25519Verifier,
    HmacSigner,
    HmacVerifier,
    SigningKeyError,
    TornStoreError,
    UnsignedSigner,
    build_memory_envelope,
    envelope_line,
    verify_chain,
)
from phionyx_letta._shape import find_fault, is_plain
from phionyx_letta.verification import BlockHead

PEERS_DIMENSIONS = {
    "schema",
    "hash_continuity",
    "signature_performed",
    "signature_valid",
    "algorithm",
    "key_id",
    "key_trust",
    "revocation",
    "overall_assurance",
}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet=st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def places(value: object, path: tuple = ()) -> list[tuple]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, child in value.items():
            found += places(child, (*path, key))
    return found


def dimensions(result: dict) -> dict:
    return result["assurance"]["dimensions"]


class TestGoodChains:
    def test_signed_and_checked_with_the_pinned_key(self, chain, signer, verifier):
        result = verify_chain(chain(signer), verifier=verifier, expected_trace="agent-1")
        assert (result["valid"], result["checked"], result["broken_at"]) == (True, 4, None)
        assert result["assurance"]["overall_assurance"] == "E2"
        assert result["assurance"]["key_id"] == signer.key_id
        assert dimensions(result) == {
            "hashes": "ok",
            "continuity": "ok",
            "signatures": "ok",
            "key_trust": "ok",
            "checkpoint": "not_measured",
            "block_linkage": "ok",
        }

    def test_without_a_key_valid_means_the_hashes_and_assurance_says_so(self, chain, signer):
        result = verify_chain(chain(signer))
        assert result["valid"] is True
        assert dimensions(result)["signatures"] == dimensions(result)["key_trust"] == "not_measured"
        assert result["assurance"]["overall_assurance"] == "E1"
        assert result["signatures_verified"] is False

    def test_an_unsigned_chain_is_not_measured_by_a_key(self, chain, verifier):
        result = verify_chain(chain(UnsignedSigner()), verifier=verifier)
        assert result["valid"] is None
        assert result["measurement_status"] == "NOT_MEASURED"
        assert result["non_measurement_cause"] == "signature_absent"
        assert result["assurance"]["overall_assurance"] == "E0"

    def test_a_shared_secret_proves_no_key(self, chain):
        result = verify_chain(chain(HmacSigner("s")), verifier=HmacVerifier("s"))
        assert result["valid"] is True
        assert dimensions(result)["signatures"] == "ok"
        assert dimensions(result)["key_trust"] == "not_measured"

    def test_nothing_is_not_measured(self, verifier):
        result = verify_chain([], verifier=verifier)
        assert result["valid"] is None
        assert result["non_measurement_cause"] == "input_absent"
        assert set(dimensions(result).values()) == {"not_measured"}

    def test_the_report_speaks_the_peers_words(self, chain, signer, verifier):
        result = verify_chain(chain(signer), verifier=verifier)
        assert set(result["assurance"]) == PEERS_DIMENSIONS | {"dimensions"}
        assert json.loads(json.dumps(result)) == result

    def test_a_chain_without_positions_and_trace_is_accepted(self, chain, signer, verifier):
        assert verify_chain(chain(signer, positions=False), verifier=verifier)["valid"] is True

    def test_a_report_can_be_taken_on_the_way(self, chain, signer, verifier):
        walk = ChainVerifier(verifier=verifier)
        for number, envelope in enumerate(chain(signer), start=1):
            walk.feed(envelope)
            assert walk.result()["checked"] == number
        assert walk.head == envelope["integrity"]["current"]


class TestAttacks:
    @pytest.mark.parametrize("place", [0, 1, 3])
    def test_an_edit_is_named_by_position_block_and_hash(self, place, chain, signer, verifier):
        envelopes = chain(signer)
        envelopes[place]["mutation"]["block_label"] = "edited"
        result = verify_chain(envelopes, verifier=verifier)
        (finding,) = result["findings"]
        assert (result["valid"], result["broken_at"], result["checked"]) == (False, place, place)
        assert (finding["position"], finding["block_id"], finding["dimension"]) == (place, "block-1", "hashes")
        assert finding["expected"] == envelopes[place]["integrity"]["current"] != finding["found"]

    def test_every_single_edit_anywhere_is_noticed(self, chain, signer, verifier):
        envelopes = chain(signer, metadata={"deep": {"er": "x"}})
        for path in places(envelopes[1]):
            edited = copy.deepcopy(envelopes)
            part = edited[1]
            for key in path[:-1]:
                part = part[key]
            part[path[-1]] = "edited"
            assert verify_chain(edited, verifier=verifier)["valid"] is False, path
            del part[path[-1]]
            assert verify_chain(edited, verifier=verifier)["valid"] is False, path

    @pytest.mark.parametrize(
        "order",
        [(1, 2, 3), (0, 2, 3), (0, 1, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)],
        ids=["head", "gap", "twice", "swap", "back"],
    )
    def test_removing_repeating_and_moving_break_continuity(self, order, chain, signer, verifier):
        envelopes = chain(signer)
        result = verify_chain([envelopes[place] for place in order], verifier=verifier)
        assert result["valid"] is False
        assert dimensions(result)["continuity"] == "failed"

    def test_a_missing_head_is_called_so(self, chain, signer):
        assert "head is missing" in verify_chain(chain(signer)[1:])["reason"]

    def test_a_rewrite_with_another_key_fails_the_pinned_one(self, chain, verifier):
        result = verify_chain(chain(Ed25519Signer("99" * 32)), verifier=verifier)
        assert result["valid"] is False
        assert dimensions(result)["key_trust"] == "failed"
        assert result["findings_total"] == 4

    def test_a_forged_append_fails(self, chain, signer, verifier, context):
        envelopes = chain(signer)
        forged = build_memory_envelope(
            context(), previous_hash=envelopes[-1]["integrity"]["current"], package_version="1", signer=HmacSigner("x")
        )
        result = verify_chain([*envelopes, forged], verifier=verifier)
        assert (result["valid"], result["broken_at"]) == (False, 4)

    @pytest.mark.parametrize("signature", ["unsigned", "", "ed25519:" + "0" * 128, "hmac-sha256:" + "0" * 32, "x:ab"])
    def test_a_stripped_or_replaced_signature_fails(self, signature, chain, signer, verifier):
        envelopes = chain(signer)
        envelopes[2]["integrity"]["signature"] = signature
        result = verify_chain(envelopes, verifier=verifier)
        assert (result["valid"], result["broken_at"]) == (False, 2)
        assert dimensions(result)["signatures"] == "failed"

    def test_stripping_every_signature_fails_even_without_a_key_to_check(self, chain, signer):
        envelopes = chain(signer)
        for envelope in envelopes:
            envelope["integrity"]["signature"] = "unsigned"
        assert verify_chain(envelopes)["valid"] is False

    def test_unsigned_among_signed_fails_once_there_is_a_key(self, signer, verifier, context):
        first = build_memory_envelope(
            context(), previous_hash=GENESIS_HASH, package_version="1", signer=UnsignedSigner(), position=0
        )
        second = build_memory_envelope(
            context("new", "newer"),
            previous_hash=first["integrity"]["current"],
            package_version="1",
            signer=signer,
            position=1,
        )
        result = verify_chain([first, second], verifier=verifier)
        assert (result["valid"], result["broken_at"]) == (False, 0)
        assert verify_chain([first, second])["valid"] is True

    def test_what_no_hash_covers_may_not_be_added(self, chain, signer, verifier):
        envelopes = chain(signer)
        envelopes[0]["integrity"]["note"] = "smuggled"
        assert verify_chain(envelopes, verifier=verifier)["valid"] is False

    def test_a_chain_of_another_agent_is_not_accepted_for_this_one(self, chain, signer, verifier):
        result = verify_chain(chain(signer, trace_id="agent-2"), verifier=verifier, expected_trace="agent-1")
        assert result["valid"] is False
        assert (result["findings"][0]["expected"], result["findings"][0]["found"]) == ("agent-1", "agent-2")

    def test_a_wrong_position_fails_even_if_signed(self, signer, verifier, context):
        envelope = build_memory_envelope(
            context(), previous_hash=GENESIS_HASH, package_version="1", signer=signer, position=1
        )
        assert dimensions(verify_chain([envelope], verifier=verifier))["continuity"] == "failed"

    def test_many_faults_are_counted_and_the_first_is_the_reason(self, chain, signer, verifier):
        envelopes = chain(signer, length=150)
        for envelope in envelopes[20:]:
            envelope["mutation"]["block_label"] = "edited"
        result = verify_chain(envelopes, verifier=verifier)
        assert (result["findings_total"], len(result["findings"]), result["broken_at"]) == (130, 100, 20)
        assert "position 20, block block-1" in result["reason"]


class TestBlockLinkage:
    @pytest.fixture
    def two_agents(self, signer, context):
        """Agents 1 and 2 write the same block in turn: neither chain alone shows every write."""
        heads = {"agent-1": GENESIS_HASH, "agent-2": GENESIS_HASH}
        out = []
        for place in range(4):
            trace = f"agent-{place % 2 + 1}"
            envelope = build_memory_envelope(
                context("a" * place, "a" * (place + 1), trace_id=trace),
                previous_hash=heads[trace],
                package_version="1",
                signer=signer,
            )
            heads[trace] = envelope["integrity"]["current"]
            out.append((trace, envelope))
        return out

    def verify_ledger(self, records, verifier):
        block_heads: dict[str, BlockHead] = {}
        chains: dict[str, ChainVerifier] = {}
        for trace, envelope in records:
            walk = chains.setdefault(
                trace, ChainVerifier(verifier=verifier, expected_trace=trace, block_heads=block_heads)
            )
            walk.feed(envelope)
        return [walk.result() for walk in chains.values()]

    def test_one_chain_alone_cannot_tell_a_gap_from_anothers_write(self, two_agents, verifier):
        result = verify_chain([envelope for trace, envelope in two_agents if trace == "agent-1"], verifier=verifier)
        assert result["valid"] is True
        assert dimensions(result)["block_linkage"] == "not_measured"
        assert "whole ledger" in result["findings"][0]["message"]

    def test_all_chains_together_link(self, two_agents, verifier):
        results = self.verify_ledger(two_agents, verifier)
        assert [result["valid"] for result in results] == [True, True]
        assert all(dimensions(result)["block_linkage"] == "ok" for result in results)

    def test_a_write_that_is_missing_from_all_chains_is_a_failure(self, two_agents, verifier):
        results = self.verify_ledger(two_agents[:1] + two_agents[2:], verifier)
        assert any(dimensions(result)["block_linkage"] == "failed" for result in results)

    @pytest.mark.parametrize("lie", [{"before_size_bytes": 7}, {"removed_chars": 9}])
    def test_the_sizes_a_block_was_left_with_count_too(self, lie, context, signer, verifier):
        """An attach repeats them from the database: a lie there must not pass because the hash is right."""
        head, out = GENESIS_HASH, []
        for before, after, change in (("", "abc", {}), ("abc", "abcd", lie)):
            mutation = context(before, after)
            mutation = replace(mutation, diff=replace(mutation.diff, **change))
            out.append(build_memory_envelope(mutation, previous_hash=head, package_version="1", signer=signer))
            head = out[-1]["integrity"]["current"]
        result = verify_chain(out, verifier=verifier)
        assert result["valid"] is False
        assert dimensions(result)["block_linkage"] == "failed"
        assert "size before" in result["reason"]


def test_a_library_users_own_turns_and_metadata_raise_no_alarm(context, signer, verifier):
    """Only the plugin counts turns without gaps; anybody may call a part of his metadata `letta`."""
    for own in ({"letta": {"x": 1}}, {"letta": "text"}, {"letta": None}):
        envelope = build_memory_envelope(
            context("", "a", turn_index=7, metadata=own), previous_hash=GENESIS_HASH, package_version="1", signer=signer
        )
        assert verify_chain([envelope], verifier=verifier)["valid"] is True, own


class TestLines:
    """A chain may be given as the lines of a file; what is signed is then hashed as it stands."""

    def test_lines_and_dicts_give_one_verdict(self, chain, signer, verifier):
        envelopes = chain(signer, 5)
        for key in (verifier, None):
            expected = verify_chain(envelopes, verifier=key)
            for lines in (
                [envelope_line(one) for one in envelopes],
                [envelope_line(one).encode() + b"\r\n" for one in envelopes],
                [json.dumps(one, indent=1) for one in envelopes],
            ):
                assert verify_chain(lines, verifier=key) == expected

    def test_every_changed_byte_of_a_line_is_found(self, chain, signer, verifier):
        line = envelope_line(chain(signer, 1)[0]).encode()
        for place in range(len(line)):
            for byte in {line[place] ^ 1, line[place] ^ 32} - {line[place]}:
                edited = line[:place] + bytes([byte]) + line[place + 1 :]
                result = verify_chain([edited], verifier=verifier)
                assert result["valid"] is False, edited

    @pytest.mark.parametrize("line", ["", "{", "[]", "7", '"', b"\xff", "[" * 100_000])
    def test_what_is_no_envelope_is_a_failure(self, line, verifier):
        result = verify_chain([line], verifier=verifier)
        assert result["valid"] is False
        assert "malformed" in result["reason"]

    @pytest.mark.parametrize("where", ['"producer":', '"signature":', '"mutation":', '"after_hash":'])
    def test_a_repeated_key_is_refused(self, where, chain, signer, verifier):
        line = envelope_line(chain(signer, 1)[0]).replace(where, f'{where}"lie",{where}')
        for key in (verifier, None):
            assert verify_chain([line], verifier=key)["valid"] is False

    def test_a_right_hash_without_the_signature_is_not_enough(self, chain, signer, verifier):
        other = Ed25519Signer("33" * 32)
        envelope = chain(signer, 1)[0]
        envelope["integrity"]["signature"] = other.sign(envelope["integrity"]["current"])
        assert verify_chain([envelope_line(envelope)], verifier=verifier)["valid"] is False


class TestBadInput:
    @pytest.mark.parametrize(
        "given_chain", [None, 5, "text", b"bytes", {"a": 1}, object(), [None], [[]], [{}], [{"schema": 1}]]
    )
    def test_what_is_no_chain_fails_with_a_finding(self, given_chain, verifier):
        result = verify_chain(given_chain, verifier=verifier)
        assert result["valid"] is False
        assert result["findings"]
        assert json.dumps(result)

    def test_a_store_that_cannot_be_read_fails_where_it_stops(self, chain, signer, verifier):
        def torn():
            yield from chain(signer)
            raise TornStoreError("chain.jsonl, line 5 is not an index line", "restore it")

        result = verify_chain(torn(), verifier=verifier)
        assert (result["valid"], result["broken_at"], result["seen"]) == (False, 4, 4)
        assert "line 5" in result["reason"]

    def test_a_foreign_schema_is_called_mixed(self, chain, signer):
        result = verify_chain([chain(signer)[0], {"schema": "phionyx.other.v1"}])
        assert "mixed schemas" in result["reason"]
        assert SCHEMA_ID in verify_chain([{"schema": "phionyx.other.v1"}])["reason"]

    def test_circles_and_endless_nesting_and_huge_numbers(self, chain, signer):
        for poison in ("circle", "deep", "huge", "nan", "key"):
            envelope = chain(signer, length=1)[0]
            metadata = envelope["subject"]["metadata"]
            deep: list = []
            for _ in range(50_000):
                deep = [deep]
            metadata["x"] = {
                "circle": metadata,
                "deep": deep,
                "huge": 10**5000,
                "nan": float("nan"),
                "key": {(1, 2): 3},
            }[poison]
            result = verify_chain([envelope])
            assert (result["valid"], dimensions(result)["hashes"]) == (False, "failed"), poison
            while deep:  # taken apart by hand: its own destructor would recurse
                deep = deep.pop()

    def test_what_cannot_verify_is_refused_at_once(self, signer):
        with pytest.raises(SigningKeyError):
            verify_chain([], verifier=signer)

    def test_a_verifier_that_raises_does_not_make_it_good(self, chain, signer):
        class Broken:
            algorithm, key_id = "ed25519", "broken"

            def verify(self, signed, signature):
                raise RuntimeError

        assert verify_chain(chain(signer), verifier=Broken())["valid"] is False

    @given(st.lists(json_values | st.binary(), max_size=4))
    def test_random_values_never_crash_it(self, values):
        result = verify_chain(values)
        assert result["valid"] is (False if values else None)

    @settings(max_examples=300)
    @given(data=st.data(), value=json_values)
    def test_random_changes_never_crash_it_and_never_pass(self, data, value, chain, signer, verifier):
        envelopes = chain(signer, length=2)
        path = data.draw(st.sampled_from(places(envelopes[1])))
        part = envelopes[1]
        for key in path[:-1]:
            part = part[key]
        same = part[path[-1]] == value and type(part[path[-1]]) is type(value)
        part[path[-1]] = value
        if not same:
            assert verify_chain(envelopes, verifier=verifier)["valid"] is False

    @settings(max_examples=300)
    @given(data=st.data(), value=json_values)
    def test_the_quick_look_and_the_schema_agree(self, data, value, chain, signer, fits_schema):
        envelope = chain(signer, length=1)[0]
        path = data.draw(st.sampled_from(places(envelope)))
        part = envelope
        for key in path[:-1]:
            part = part[key]
        if data.draw(st.booleans()):
            part[path[-1]] = value
        else:
            del part[path[-1]]
        accepted = find_fault(envelope) is None
        if not (isinstance(value, float) and value.is_integer()):  # 1.0 is an integer to JSON Schema
            assert accepted == fits_schema(envelope)
        assert not is_plain(envelope) or accepted


def test_a_long_chain_is_verified_in_flat_memory(chain, signer, verifier):
    """The same envelope over and over: only what the verifier keeps could grow, and it would go on growing."""
    envelope = chain(signer, length=1)[0]
    walk = ChainVerifier(block_heads={})
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(3):  # the findings it keeps and the interpreter's free lists are full after the first stretch
            for _ in range(3000):
                walk.feed(envelope)
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert min(sizes[1] - sizes[0], sizes[2] - sizes[1]) < 20_000, sizes


def test_a_pinned_key_may_be_one_of_several(chain, signer, verifier):
    from phionyx_letta import TrustedKeys

    other = Ed25519Verifier(Ed25519Signer("55" * 32).public_key_hex)
    assert verify_chain(chain(signer), verifier=TrustedKeys([other, verifier]))["valid"] is True
