"""Whether a value has the shape of a memory mutation envelope: the rules of the shipped JSON Schema, fast.

The tests hold the two together. Nothing here raises, whatever it is given.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from phionyx_letta.diff import COMMITMENTS
from phionyx_letta.envelope import MUTATION_KINDS, SCHEMA_ID

__all__ = ["Fault", "find_fault", "is_plain", "shown"]

_HASH = re.compile(r"sha256:[0-9a-f]{64}").fullmatch
_SIGNATURE = re.compile(r"(?:unsigned|[a-z0-9-]+:[0-9a-f]+)?").fullmatch
_INTEGRITY_KEYS = {"previous", "current", "signature", "canonical_json"}


class Fault(NamedTuple):
    """Where a value departs from the shape: a path such as `mutation.diff.after_hash`, what belongs there, what is there."""

    path: str
    expected: str
    found: str


class _Rule(NamedTuple):
    name: str
    holds: Callable[[Any], bool]
    expected: str
    required: bool = True


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and _HASH(value) is not None


def _is_commitment(value: Any) -> bool:
    return isinstance(value, str) and value in COMMITMENTS


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_TEXT, _COUNT, _DIGEST = "text", "an integer of at least 0", "sha256:<64 hex digits>"
_SUBJECT = (
    _Rule("runtime", _is_text, _TEXT),
    _Rule("version", _is_text, _TEXT),
    _Rule("producer", _is_text, _TEXT),
    _Rule("turn_index", _is_count, _COUNT),
    _Rule("event_type", _is_text, _TEXT),
    _Rule("timestamp_utc", _is_text, _TEXT),
    _Rule("metadata", _is_object, "an object"),
    _Rule("trace_id", _is_text, _TEXT, False),
    _Rule("key_id", _is_text, _TEXT, False),
    _Rule("position", _is_count, _COUNT, False),
    _Rule("organization_id", _is_text, _TEXT, False),
)
_MUTATION = (
    _Rule("block_id", _is_text, _TEXT),
    _Rule("block_label", _is_text, _TEXT),
    _Rule(
        "mutation_kind", lambda value: isinstance(value, str) and value in MUTATION_KINDS, f"one of {MUTATION_KINDS}"
    ),
    _Rule("diff", _is_object, "an object"),
    _Rule("forgetting_reason", _is_text_or_none, "text or null"),
)
_DIFF = (
    _Rule("before_hash", _is_hash, _DIGEST),
    _Rule("after_hash", _is_hash, _DIGEST),
    _Rule("before_size_bytes", _is_count, _COUNT),
    _Rule("after_size_bytes", _is_count, _COUNT),
    _Rule("added_chars", _is_count, _COUNT),
    _Rule("removed_chars", _is_count, _COUNT),
    _Rule("unchanged_chars", _is_count, _COUNT),
    _Rule("diff_text", _is_text_or_none, "text or null"),
    _Rule("counts_method", _is_text, _TEXT, False),
    _Rule("commitment", _is_commitment, " or ".join(COMMITMENTS), False),
)
_CONSOLIDATION = (
    _Rule("block_ref", _is_text, _TEXT),
    _Rule("from_episodic", _are_texts, "a list of texts"),
    _Rule("to_semantic", _are_texts, "a list of texts"),
    _Rule("consolidation_method", _is_text, _TEXT),
    _Rule("decay_applied", lambda value: value is None or isinstance(value, bool), "true, false or null"),
)
_INTEGRITY = (
    _Rule("previous", _is_hash, _DIGEST),
    _Rule("current", _is_hash, _DIGEST),
    _Rule("signature", lambda value: isinstance(value, str) and _SIGNATURE(value) is not None, "<algorithm>:<hex>"),
    _Rule("canonical_json", lambda value: value is True, "true"),
)
_TOP = (
    _Rule("subject", _is_object, "an object"),
    _Rule("mutation", _is_object, "an object"),
    _Rule("memory_consolidation_audit", lambda value: value is None or isinstance(value, dict), "an object or null"),
    _Rule("integrity", _is_object, "an object"),
)
_MISSING = object()


_DIFF_COUNTS = itemgetter("before_size_bytes", "after_size_bytes", "added_chars", "removed_chars", "unchanged_chars")
_FOUR_HASHES = re.compile("(?:sha256:[0-9a-f]{64},){4}").fullmatch
_MAX_OUTLINES = 1000  # a ledger has a handful; the bound is for one made to have many
_outlines: set[tuple[Any, ...]] = set()


def is_plain(envelope: Any) -> bool:
    """Return whether an envelope has the shape, at a third of the cost of `find_fault`; False means: ask `find_fault`.

    Keys and types are compared with those of envelopes that `find_fault` has passed; values are always looked at.
    """
    try:
        subject, mutation, integrity = envelope["subject"], envelope["mutation"], envelope["integrity"]
        diff, kind = mutation["diff"], mutation["mutation_kind"]
        hashes = f"{diff['before_hash']},{diff['after_hash']},{integrity['previous']},{integrity['current']},"
        return (
            _outline(envelope, subject, mutation, diff, integrity) in _outlines
            and envelope["schema"] == SCHEMA_ID
            and kind in MUTATION_KINDS
            and subject["event_type"] == f"memory_{kind}"
            and subject["turn_index"] >= 0
            and subject.get("position", 0) >= 0
            and min(_DIFF_COUNTS(diff)) >= 0
            and diff.get("commitment", COMMITMENTS[0]) in COMMITMENTS
            and integrity["canonical_json"] is True
            and _FOUR_HASHES(hashes) is not None
            and _SIGNATURE(integrity["signature"]) is not None
        )
    except Exception:  # whatever was given is not plain
        return False


def _outline(*parts: dict[Any, Any]) -> tuple[Any, ...]:
    return tuple([(*part, *map(type, part.values())) for part in parts])


def _remember(envelope: dict[Any, Any]) -> None:
    if len(_outlines) < _MAX_OUTLINES and envelope["memory_consolidation_audit"] is None:  # its own parts are not in it
        mutation = envelope["mutation"]
        parts = (envelope, envelope["subject"], mutation, mutation["diff"], envelope["integrity"])
        if all(isinstance(key, str) for part in parts for key in part):
            _outlines.add(_outline(*parts))


def find_fault(envelope: object) -> Fault | None:
    """Return the first departure from the shape, or None."""
    if not isinstance(envelope, dict):
        return Fault("envelope", "an object", shown(envelope))
    if envelope.get("schema") != SCHEMA_ID:
        return Fault("schema", SCHEMA_ID, shown(envelope.get("schema")))
    fault = _check(envelope, _TOP, "")
    if fault is not None:
        return fault
    integrity, audit = envelope["integrity"], envelope["memory_consolidation_audit"]
    fault = (
        _check(envelope["subject"], _SUBJECT, "subject.")
        or _check(envelope["mutation"], _MUTATION, "mutation.")
        or _check(envelope["mutation"]["diff"], _DIFF, "mutation.diff.")
        or (None if audit is None else _check(audit, _CONSOLIDATION, "memory_consolidation_audit."))
        or _check(integrity, _INTEGRITY, "integrity.")
        or _check_integrity_keys(integrity)
        or _check_event(envelope)
    )
    if fault is None:
        _remember(envelope)
    return fault


def shown(value: object) -> str:
    """Return a short rendering of any value; never its whole content, never an error."""
    if value is _MISSING:
        return "nothing"
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if value.bit_length() < 200 else "a huge integer"
    if isinstance(value, str):
        return value if len(value) <= 160 else value[:157] + "..."
    return f"a {type(value).__name__}"


def _check(part: dict[Any, Any], rules: tuple[_Rule, ...], path: str) -> Fault | None:
    for name, holds, expected, required in rules:
        value = part.get(name, _MISSING)
        if value is _MISSING:
            if required:
                return Fault(path + name, expected, "nothing")
        elif not holds(value):
            return Fault(path + name, expected, shown(value))
    return None


def _check_integrity_keys(integrity: dict[Any, Any]) -> Fault | None:
    extra = integrity.keys() - _INTEGRITY_KEYS
    if extra:  # no hash covers this part: whatever is added to it would travel as if it were evidence
        return Fault("integrity", "four keys", f"also {shown(min(extra, key=str))}")
    return None


def _check_event(envelope: dict[Any, Any]) -> Fault | None:
    expected = f"memory_{envelope['mutation']['mutation_kind']}"
    if envelope["subject"]["event_type"] != expected:
        return Fault("subject.event_type", expected, shown(envelope["subject"]["event_type"]))
    return None
