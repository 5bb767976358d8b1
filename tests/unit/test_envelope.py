"""What an envelope holds, how it is hashed, and what is refused."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import phionyx_letta
from phionyx_letta import (
    GENESIS_HASH,
    MUTATION_KINDS,
    SCHEMA_ID,
    InvalidMutation,
    MemoryConsolidationAudit,
    MemoryDiff,
    PhionyxError,
    UnsignedSigner,
    _canonical,
    build_memory_envelope,
    canonical_json,
    envelope_hash,
    envelope_line,
    envelope_schema,
)

USAGE = """
from phionyx_letta import (
    MemoryMutationContext,
    HmacSigner,
    FilesystemEnvelopeStore,
    build_memory_envelope,
    compute_memory_diff,
    GENESIS_HASH,
)

signer = HmacSigner(secret="REPLACE_IN_PRODUCTION_WITH_ED25519")
store = FilesystemEnvelopeStore(root="/var/lib/phionyx/letta_audit")

# Compute the diff between before and after content
diff = compute_memory_diff(
    before="User prefers concise answers.",
    after="User prefers concise answers. They speak Turkish.",
)

ctx = MemoryMutationContext(
    trace_id="letta-trace-alex-001",
    turn_index=42,
    producer="letta.agent_alex",
    block_id="block-9e3a-...",
    block_label="core_memory.persona",
    mutation_kind="append",
    diff=diff,
)

envelope = build_memory_envelope(
    ctx=ctx,
    previous_hash=store.head("letta-trace-alex-001"),
    package_version="0.1.0a1",
    signer=signer,
)
store.append("letta-trace-alex-001", envelope)
"""

texts = st.text(alphabet=st.characters())  # lone surrogates included
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(texts | st.integers(), inner) | st.tuples(inner, inner),
    max_leaves=12,
)
flat_documents = (
    scalars
    | st.lists(scalars | st.tuples(scalars, scalars))
    | st.dictionaries(st.integers() | st.floats(0, 1), scalars)
)


def build(context, **arguments):
    given = {"previous_hash": GENESIS_HASH, "package_version": "0.2.0", "signer": UnsignedSigner()}
    return build_memory_envelope(context, **{**given, **arguments})


class TestSeed:
    def test_the_sixty_second_usage_runs_as_written(self, tmp_path: Path, accords):
        names: dict = {}
        exec(USAGE.replace("/var/lib/phionyx/letta_audit", str(tmp_path)), names)
        accords(names["envelope"])
        assert names["store"].head("letta-trace-alex-001") == names["envelope"]["integrity"]["current"]

    def test_every_public_name_exists(self):
        assert all(hasattr(phionyx_letta, name) for name in phionyx_letta.__all__)
        assert set(phionyx_letta._MODULES) | {"__version__"} == set(phionyx_letta.__all__) <= set(dir(phionyx_letta))
        assert not hasattr(phionyx_letta, "nothing")
        assert phionyx_letta.__version__ == "0.2.0"

    @pytest.mark.parametrize("code", ["import phionyx_letta", "from phionyx_letta import *"])
    def test_importing_the_library_imports_nothing_heavy(self, code):
        code += "\nimport sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
        loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        heavy = {"letta", "sqlalchemy", "pydantic", "typer", "rich", "rapidfuzz", "cryptography", "asyncio", "wrapt"}
        assert not heavy & set(loaded)


class TestContent:
    def test_the_envelope_has_the_seeds_structure(self, context, accords):
        envelope = accords(build(context(turn_index=7)))
        assert envelope["schema"] == SCHEMA_ID
        assert list(envelope["subject"])[:7] == [
            "runtime",
            "version",
            "producer",
            "turn_index",
            "event_type",
            "timestamp_utc",
            "metadata",
        ]
        assert envelope["subject"]["turn_index"] == 7
        assert envelope["memory_consolidation_audit"] is None

    def test_trace_position_key_and_organization_enter_the_hash(self, context, accords, signer):
        envelope = accords(build(context(), signer=signer, position=3, organization_id="org-1"))
        subject = envelope["subject"]
        assert subject["trace_id"] == "agent-1"
        assert subject["position"] == 3
        assert subject["organization_id"] == "org-1"
        assert subject["key_id"] == signer.key_id
        for name in ("trace_id", "position", "organization_id", "key_id"):
            changed = {**envelope, "subject": {**subject, name: "other"}}
            assert envelope_hash(changed, GENESIS_HASH) != envelope["integrity"]["current"]

    def test_an_unsigned_envelope_names_no_key(self, context, accords):
        assert "key_id" not in accords(build(context()))["subject"]

    @pytest.mark.parametrize("kind", MUTATION_KINDS)
    def test_every_kind_names_its_event(self, kind, context, accords):
        assert accords(build(context(mutation_kind=kind)))["subject"]["event_type"] == f"memory_{kind}"

    def test_a_parent_reference_stands_beside_the_producers_metadata(self, context, accords):
        envelope = accords(build(context(metadata={"mine": 1}), memory_audit_parent_ref="envelope://sha256:ab"))
        assert envelope["subject"]["metadata"] == {
            "mine": 1,
            "memory_audit": {"parent_envelope_ref": "envelope://sha256:ab", "schema": SCHEMA_ID, "kind": "write"},
        }

    def test_a_consolidation_carries_its_audit(self, context, accords):
        audit = MemoryConsolidationAudit(
            from_episodic=["m1"], to_semantic=["s1"], consolidation_method="k", decay_applied=False
        )
        envelope = accords(build(context(mutation_kind="consolidate", consolidation_audit=audit)))
        assert envelope["memory_consolidation_audit"] == audit.to_dict()


class TestHash:
    def test_the_hash_is_that_of_record_and_previous(self, context):
        envelope = build(context(metadata={"k": "ü"}))
        record = {key: value for key, value in envelope.items() if key != "integrity"}
        text = json.dumps({"record": record, "previous": GENESIS_HASH}, sort_keys=True, separators=(",", ":"))
        expected = "sha256:" + hashlib.sha256(text.encode("ascii")).hexdigest()
        assert envelope["integrity"]["current"] == expected == envelope_hash(envelope, GENESIS_HASH)

    def test_the_line_is_the_canonical_json_of_the_whole(self, context):
        envelope = build(context())
        assert envelope_line(envelope) == canonical_json(envelope)
        assert "\n" not in envelope_line(envelope)

    @given(documents)
    def test_canonical_json_survives_a_round_trip_of_what_json_can_hold(self, document):
        read = json.loads(json.dumps(document))
        assert canonical_json(json.loads(canonical_json(read))) == canonical_json(read)
        assert canonical_json(read) == json.dumps(read, sort_keys=True, separators=(",", ":"), allow_nan=False)
        assert canonical_json(read).isascii()

    def test_canonical_json_is_the_same_without_the_quick_encoder(self, monkeypatch):
        document = {"b": [1, 2.5, None, True, "é\ud800", 10**30], "a": {"\uffff": 1, "\U0001f600": 2}}
        monkeypatch.setattr(json.encoder, "c_make_encoder", None)
        assert _canonical._encoder(sort_keys=True)(document) == canonical_json(document)

    @pytest.mark.slow
    @given(metadata=st.dictionaries(texts | st.integers(), flat_documents, max_size=4), label=texts)
    def test_whatever_the_metadata_an_envelope_is_what_its_json_says(self, metadata, label, context, accords):
        assume(len({json.dumps(str(key)) for key in metadata}) == len(metadata))  # 1 and "1" are refused, see below
        envelope = build(context(metadata=metadata, block_label=label, producer=label))
        accords(envelope)
        assert envelope_hash(json.loads(envelope_line(envelope)), GENESIS_HASH) == envelope["integrity"]["current"]


class TestRefusals:
    def test_an_unknown_kind(self, context):
        with pytest.raises(ValueError, match="not in"):
            context(mutation_kind="rewrite")

    @pytest.mark.parametrize(
        ("metadata", "path"),
        [
            ({"a": {"b": [1, float("nan")]}}, "metadata['a']['b'][1]"),
            ({"x": float("inf")}, "metadata['x']"),
            ({"x": b"bytes"}, "metadata['x']"),
            ({"x": {("a",): 1}}, "metadata['x']"),
            ({"x": 10**5000}, "metadata['x']"),
            ({1: "a", "1": "b"}, "'1'"),
        ],
    )
    def test_metadata_that_is_not_json_is_named_by_its_path(self, metadata, path, context):
        with pytest.raises(InvalidMutation) as caught:
            build(context(metadata=metadata))
        assert path in str(caught.value)

    def test_metadata_in_a_circle(self, context):
        circle: dict = {}
        circle["self"] = circle
        with pytest.raises(InvalidMutation, match="circle"):
            build(context(metadata=circle))

    def test_metadata_nested_without_end(self, context):
        deep: list = []
        for _ in range(100_000):
            deep = [deep]
        with pytest.raises(InvalidMutation, match="nested"):
            build(context(metadata={"deep": deep}))
        while deep:  # taken apart by hand: its own destructor would recurse
            deep = deep.pop()

    @pytest.mark.parametrize(
        "fields",
        [
            {"turn_index": -1},
            {"turn_index": True},
            {"turn_index": "1"},
            {"trace_id": None},
            {"block_id": 5},
            {"diff": {"before_hash": "x"}},
            {"metadata": []},
            {"forgetting_reason": 1},
            {"consolidation_audit": {}},
            {"consolidation_audit": MemoryConsolidationAudit()},
        ],
    )
    def test_a_field_of_the_wrong_sort(self, fields, context):
        with pytest.raises(InvalidMutation):
            context(**fields)

    @pytest.mark.parametrize(
        "arguments",
        [
            {"previous_hash": "sha256:00"},
            {"previous_hash": None},
            {"package_version": None},
            {"position": -1},
            {"position": True},
            {"timestamp_utc": "yesterday"},
            {"timestamp_utc": "2026-01-01T00:00:00"},
            {"timestamp_utc": "2026-01-01T00:00:00+02:00"},
            {"organization_id": 1},
            {"memory_audit_parent_ref": 1},
        ],
    )
    def test_an_argument_of_the_wrong_sort(self, arguments, context):
        with pytest.raises(InvalidMutation):
            build(context(), **arguments)

    def test_a_diff_made_by_hand_is_checked_too(self):
        with pytest.raises(InvalidMutation):
            MemoryDiff("md5:x", "sha256:" + "0" * 64, 0, 0, 0, 0, 0)

    def test_every_error_shows_its_remedy(self, context):
        with pytest.raises(PhionyxError) as caught:
            context(turn_index=-1)
        assert caught.value.remedy
        assert caught.value.remedy in str(caught.value)


class TestSchema:
    def test_it_names_no_host(self):
        assert envelope_schema()["$id"].startswith("urn:")
        assert envelope_schema()["version"]

    def test_a_copy_is_given_so_that_nobody_changes_it_for_others(self):
        envelope_schema().clear()
        assert envelope_schema()
