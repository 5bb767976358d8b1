"""The evidence of one memory mutation: its context, its envelope, the canonical JSON that is hashed and signed.

The canonical form, the hash and the shape are those of `phionyx.memory_mutation_envelope.v1` as the peers write them:
`sha256(canonical({"record": envelope without integrity, "previous": previous}))`, signed over the ASCII text
`sha256:<hex>`. Additive within v1, and hashed: `subject.trace_id`, `key_id`, `position`, `organization_id`. This module
knows nothing of stores.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from phionyx_letta._canonical import JSON_ERRORS, encode, encode_as_ordered, quoted
from phionyx_letta.diff import MemoryDiff
from phionyx_letta.errors import InvalidMutation

__all__ = [
    "GENESIS_HASH",
    "MUTATION_KINDS",
    "SCHEMA_ID",
    "DraftEnvelope",
    "MemoryConsolidationAudit",
    "MemoryMutationContext",
    "ParsedJson",
    "Signs",
    "build_memory_envelope",
    "canonical_json",
    "draft_memory_envelope",
    "envelope_hash",
    "envelope_line",
    "envelope_schema",
]

SCHEMA_ID = "phionyx.memory_mutation_envelope.v1"
RUNTIME = "phionyx-letta"
GENESIS_HASH = "sha256:" + "0" * 64
"""The `previous` of the first envelope of a chain."""
CONTENT_UNKNOWN = "not recorded"
"""`metadata.letta.content` of an attach or detach of a block whose content no envelope has recorded yet: its hashes, those of the
empty text, say nothing about the block and take no part in its linkage."""
MUTATION_KINDS = ("write", "append", "clear", "delete", "forget", "consolidate")

_HASH = re.compile(r"sha256:[0-9a-f]{64}")


class Signs(Protocol):
    """What building an envelope needs of a signer; a `key_id` attribute, where there is one, enters the subject."""

    def sign(self, message: str, /) -> str:
        """Return `<algorithm>:<hex>` over the ASCII text `message`, or `unsigned`."""
        ...


@dataclass(frozen=True)
class MemoryConsolidationAudit:
    """Which memories a consolidation took and what it made of them (seed: `memory_consolidation_audit`)."""

    block_ref: str = "pipeline_block_43:memory_consolidation"
    from_episodic: Sequence[str] = ()
    to_semantic: Sequence[str] = ()
    consolidation_method: str = ""
    decay_applied: bool | None = None

    def __post_init__(self) -> None:
        """Raise `InvalidMutation` on anything the schema would refuse."""
        _require_text(self, "block_ref", "consolidation_method")
        for name in ("from_episodic", "to_semantic"):
            ids = getattr(self, name)
            if not isinstance(ids, list | tuple) or not all(isinstance(one, str) for one in ids):
                raise InvalidMutation(f"{name} is not a list of memory ids (str)", "pass a list of str")
        if not isinstance(self.decay_applied, bool | None):
            raise InvalidMutation("decay_applied is not True, False or None", "leave it out if unknown")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "block_ref": self.block_ref,
            "from_episodic": list(self.from_episodic),
            "to_semantic": list(self.to_semantic),
            "consolidation_method": self.consolidation_method,
            "decay_applied": self.decay_applied,
        }


@dataclass(frozen=True)
class MemoryMutationContext:
    """Everything about one mutation except its place in a chain.

    `turn_index` is the caller's count of turns (>= 0; several mutations may share one). `forgetting_reason` and `metadata`
    are the producer's own words; metadata must be JSON.

    Raises:
        InvalidMutation: (a `ValueError`) an unknown kind, or a wrong type.
    """

    trace_id: str
    turn_index: int
    producer: str
    block_id: str
    block_label: str
    mutation_kind: str
    diff: MemoryDiff
    consolidation_audit: MemoryConsolidationAudit | None = None
    forgetting_reason: str | None = None
    metadata: Mapping[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check types and the kind."""
        if self.mutation_kind not in MUTATION_KINDS:
            raise InvalidMutation(
                f"mutation_kind {_shown(self.mutation_kind)} is not in {MUTATION_KINDS}", "use one of these kinds"
            )
        _require_text(self, "trace_id", "producer", "block_id", "block_label")
        if type(self.turn_index) is not int or self.turn_index < 0:
            raise InvalidMutation(
                f"turn_index {_shown(self.turn_index)} is not an integer of at least 0", "count from 0"
            )
        if not isinstance(self.diff, MemoryDiff):
            raise InvalidMutation("diff is not a MemoryDiff", "use compute_memory_diff(before, after)")
        if not isinstance(self.forgetting_reason, str | None):
            raise InvalidMutation("forgetting_reason is neither text nor None", "pass a short reason as str")
        if not isinstance(self.metadata, Mapping):
            raise InvalidMutation("metadata is not a mapping", "pass a dict")
        self._check_consolidation()

    def _check_consolidation(self) -> None:
        audit = self.consolidation_audit
        if audit is None:
            return
        if not isinstance(audit, MemoryConsolidationAudit):
            raise InvalidMutation("consolidation_audit is not a MemoryConsolidationAudit", "build one, or leave it out")
        if self.mutation_kind != "consolidate":
            raise InvalidMutation(
                f"a {self.mutation_kind} mutation cannot carry a consolidation audit", 'use mutation_kind="consolidate"'
            )


class ParsedJson(dict[str, Any]):
    """Metadata that was read from JSON, so that it need not be written and read again to know it is."""


@dataclass(frozen=True, slots=True)
class DraftEnvelope:
    """An envelope that is hashed and chained but not signed yet."""

    record: dict[str, Any]
    """The envelope without `integrity`."""
    text: str
    """Canonical JSON of the record."""
    previous: str
    current: str
    """The hash, which is what gets signed."""

    def signed(self, signature: str) -> dict[str, Any]:
        """Return the envelope."""
        return {**self.record, "integrity": self._integrity(signature)}

    def line(self, signature: str) -> str:
        """Return `envelope_line` of the envelope, without encoding the record again: "integrity" sorts before all its keys."""
        return f'{{"integrity":{encode(self._integrity(signature))},{self.text[1:]}'

    def _integrity(self, signature: str) -> dict[str, Any]:
        return {"previous": self.previous, "current": self.current, "signature": signature, "canonical_json": True}


def canonical_json(obj: object) -> str:
    """Return the canonical text: sorted keys, no spaces, ASCII escapes, no NaN (the peers' form).

    Raises:
        TypeError, ValueError, RecursionError: `obj` is not JSON.
    """
    return encode(obj)


def envelope_hash(envelope: Mapping[str, Any], previous: str) -> str:
    """Return `sha256:<hex>` of `envelope` (its `integrity` aside) chained onto `previous`.

    Raises:
        TypeError, ValueError, RecursionError: the envelope is not JSON.
    """
    return _record_hash(encode({key: value for key, value in envelope.items() if key != "integrity"}), previous)


def envelope_line(envelope: Mapping[str, Any]) -> str:
    """Return the canonical JSON of the whole envelope: one line of ASCII, what stores keep."""
    return encode(dict(envelope))


def build_memory_envelope(
    ctx: MemoryMutationContext,
    *,
    previous_hash: str,
    package_version: str,
    signer: Signs,
    memory_audit_parent_ref: str | None = None,
    position: int | None = None,
    timestamp_utc: str | None = None,
    organization_id: str | None = None,
) -> dict[str, Any]:
    """Return the signed envelope of one mutation, exactly as a reader of its JSON will see it.

    `previous_hash` is the chain's head (`GENESIS_HASH` for the first), `position` its 0-based place in the chain,
    `memory_audit_parent_ref` the upstream envelope that caused the mutation (any text), `timestamp_utc` ISO-8601 (now by
    default).

    Raises:
        InvalidMutation: an argument has the wrong form, or the metadata is not JSON; then the path inside it is named.
    """
    draft = draft_memory_envelope(
        ctx,
        previous_hash=previous_hash,
        package_version=package_version,
        key_id=getattr(signer, "key_id", None),
        memory_audit_parent_ref=memory_audit_parent_ref,
        position=position,
        timestamp_utc=timestamp_utc,
        organization_id=organization_id,
    )
    return draft.signed(signer.sign(draft.current))


def draft_memory_envelope(
    ctx: MemoryMutationContext,
    *,
    previous_hash: str,
    package_version: str,
    key_id: str | None,
    memory_audit_parent_ref: str | None = None,
    position: int | None = None,
    timestamp_utc: str | None = None,
    organization_id: str | None = None,
) -> DraftEnvelope:
    """Return the hashed envelope without its signature, which no later hash depends on: many can be signed in a burst.

    Arguments and errors are those of `build_memory_envelope`; `key_id` names the key that will sign.
    """
    _check_place(previous_hash, package_version, memory_audit_parent_ref, position, timestamp_utc, organization_id)
    metadata = _as_json(ctx.metadata)
    if memory_audit_parent_ref is not None:
        metadata["memory_audit"] = {
            "parent_envelope_ref": memory_audit_parent_ref,
            "schema": SCHEMA_ID,
            "kind": ctx.mutation_kind,
        }
    subject: dict[str, Any] = {
        "runtime": RUNTIME,
        "version": package_version,
        "producer": ctx.producer,
        "turn_index": ctx.turn_index,
        "event_type": f"memory_{ctx.mutation_kind}",
        "timestamp_utc": timestamp_utc or datetime.now(UTC).isoformat(timespec="microseconds"),
        "metadata": metadata,
        "trace_id": ctx.trace_id,
    }
    for name, value in (("key_id", key_id), ("position", position), ("organization_id", organization_id)):
        if value is not None:
            subject[name] = value
    record = {
        "schema": SCHEMA_ID,
        "subject": subject,
        "mutation": _mutation(ctx),
        "memory_consolidation_audit": ctx.consolidation_audit.to_dict() if ctx.consolidation_audit else None,
    }
    text = encode(record)
    if "\\ud" in text:  # the halves of a surrogate pair become one character when the JSON is read again
        record = json.loads(text)
    return DraftEnvelope(record, text, previous_hash, _record_hash(text, previous_hash))


def envelope_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the envelope, as shipped with the package; a fresh copy each time."""
    from importlib.resources import files

    text = files("phionyx_letta").joinpath("schemas", f"{SCHEMA_ID}.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def _mutation(ctx: MemoryMutationContext) -> dict[str, Any]:
    return {
        "block_id": ctx.block_id,
        "block_label": ctx.block_label,
        "mutation_kind": ctx.mutation_kind,
        "diff": ctx.diff.to_dict(),
        "forgetting_reason": ctx.forgetting_reason,
    }


def _record_hash(record_text: str, previous: str) -> str:
    # the canonical text of {"previous": …, "record": …}, without encoding the record a second time
    payload = f'{{"previous":{quoted(previous)},"record":{record_text}}}'
    return "sha256:" + hashlib.sha256(payload.encode("ascii")).hexdigest()


def _as_json(metadata: Mapping[Any, Any]) -> dict[str, Any]:
    """Return metadata as a reader of the JSON will see it (keys are text, tuples lists): else a false alarm later."""
    given = dict(metadata)
    if not given or isinstance(metadata, ParsedJson):
        return given
    try:
        text = encode_as_ordered(given)
        read: dict[str, Any] = json.loads(text)
        same = read == given
    except JSON_ERRORS as error:
        path = _offending_path(given)
        remedy = "use str, int, finite float, bool, None, list, dict"
        raise InvalidMutation(f"{path} is not JSON ({_reason(error)})", remedy) from None
    if not same:
        json.loads(text, object_pairs_hook=_refuse_twins)
    return read


def _refuse_twins(pairs: list[tuple[str, Any]]) -> None:
    """Refuse keys that differ in Python and are one key in JSON (1 and "1"): one of the two values would be lost."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise InvalidMutation(f"two keys of the metadata are both {_shown(key)} in JSON", "rename one of them")
        seen.add(key)


def _offending_path(value: object, path: str = "metadata", depth: int = 0) -> str:
    """Return the path of the deepest part of `value` that cannot be encoded on its own."""
    children: list[tuple[str, object]] = []
    if isinstance(value, dict):
        for key, child in value.items():
            if not isinstance(key, str | int | float | bool | None):
                return f"{path}: the key of type {type(key).__name__}"
            children.append((f"{path}[{_shown(key)}]", child))
    elif isinstance(value, list | tuple):
        children = [(f"{path}[{index}]", child) for index, child in enumerate(value)]
    if depth >= 20:  # endless nesting: naming its first levels is enough
        return path
    for name, child in children:
        try:
            encode_as_ordered(child)
        except JSON_ERRORS:
            return _offending_path(child, name, depth + 1)
    return path


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply, or in a circle"
    if isinstance(error, TypeError):
        return str(error)
    return str(error).partition(":")[0]  # what follows the colon is the value: it may be memory content


def _check_place(
    previous_hash: object, version: object, parent: object, position: object, timestamp: object, organization: object
) -> None:
    if not isinstance(previous_hash, str) or not _HASH.fullmatch(previous_hash):
        raise InvalidMutation("previous_hash is not of the form sha256:<64 hex digits>", "pass store.head(trace_id)")
    if not isinstance(version, str):
        raise InvalidMutation("package_version is not text", "pass phionyx_letta.__version__")
    for name, value in (("memory_audit_parent_ref", parent), ("organization_id", organization)):
        if not isinstance(value, str | None):
            raise InvalidMutation(f"{name} is not text", "pass a str, or leave it out")
    if position is not None and (type(position) is not int or position < 0):
        raise InvalidMutation("position is not an integer of at least 0", "count from 0, or leave it out")
    if timestamp is not None and not _is_utc(timestamp):
        raise InvalidMutation("timestamp_utc is not ISO-8601 in UTC", "for example 2026-01-31T12:00:00+00:00")


def _is_utc(timestamp: object) -> bool:
    if not isinstance(timestamp, str):
        return False
    try:
        offset = datetime.fromisoformat(timestamp).utcoffset()
    except ValueError:
        return False
    return offset is not None and not offset


def _require_text(owner: object, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(owner, name), str):
            raise InvalidMutation(f"{name} is {type(getattr(owner, name)).__name__}, not text", "pass a str")


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."
