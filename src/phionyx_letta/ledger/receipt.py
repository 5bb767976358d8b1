"""A receipt for something forgotten: who asked, why, when, which block and how much it held, provable offline.

It holds the envelope of the forgetting itself and, where there is one, the proof that it is in the log of a signed checkpoint; all it
says beside is copied from the envelope and checked against it. No content, and where commitments are salted nothing that could be
guessed: the hashes in it were made with a salt that is not in it and, once destroyed, nowhere (docs/forgetting.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from phionyx_letta._shape import find_fault
from phionyx_letta.checkpoint import open_checkpoint
from phionyx_letta.envelope import envelope_line
from phionyx_letta.errors import InvalidMutation, NoteError
from phionyx_letta.keys import Keyring
from phionyx_letta.ledger.audit import FAILED, OK, AuditFinding, AuditReport, verify_envelope
from phionyx_letta.merkle import leaf_hash, verify_inclusion
from phionyx_letta.signing import TrustedKeys

__all__ = ["RECEIPT_SCHEMA", "guessable", "is_receipt", "make_receipt", "verify_receipt"]

RECEIPT_SCHEMA = "phionyx.forgetting_receipt.v1"
_FORGETTING = ("forget", "delete", "clear")
_ASKED_BY = ("actor_id", "operator", "agent_id", "run_id", "tool", "operation", "request")
_SIZES = ("before_size_bytes", "after_size_bytes", "added_chars", "removed_chars", "unchanged_chars")
_PARTS = {"schema", "statement", "salt", "envelope", "destruction", "inclusion"}


def make_receipt(
    envelope: Mapping[str, Any],
    *,
    destruction: Mapping[str, Any] | None = None,
    inclusion: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make a receipt.

    Args:
        envelope: of the forgetting.
        destruction: the later envelope that says the salt was destroyed, where its own does not.
        inclusion: `index`, `proof` (hex) and `checkpoint` (a signed note): that the envelope is in the log.

    Raises:
        InvalidMutation: the envelope is malformed, forgets nothing, or keeps the content itself.
    """
    if find_fault(envelope) is not None:
        raise InvalidMutation("the envelope is malformed", "`phionyx-letta verify` says more")
    kind = envelope["mutation"]["mutation_kind"]
    if kind not in _FORGETTING:
        raise InvalidMutation(
            f"the envelope is a {kind}: nothing was forgotten", f"give one of {', '.join(_FORGETTING)}"
        )
    if envelope["mutation"]["diff"].get("diff_text"):
        raise InvalidMutation(
            "the envelope keeps the content that was forgotten",
            "its ledger was written with PHIONYX_LETTA_INCLUDE_DIFF_TEXT",
        )
    return {
        "schema": RECEIPT_SCHEMA,
        "statement": _statement(envelope),
        "salt": _salt(envelope, destruction),
        "envelope": envelope,
        "destruction": destruction,
        "inclusion": inclusion,
    }


def guessable(envelope: Mapping[str, Any]) -> bool:
    """Whether the envelope has bare hashes of content: a short text can be found by trying."""
    return bool(envelope["mutation"]["diff"].get("commitment") != "hmac-sha256")


def is_receipt(content: object) -> bool:
    """Whether this JSON value says that it is a receipt."""
    return isinstance(content, dict) and content.get("schema") == RECEIPT_SCHEMA


def verify_receipt(receipt: Mapping[str, Any], *, verifier: Keyring | TrustedKeys | None) -> AuditReport:
    """Verify a receipt offline: its envelopes, what it says of them, its place in the log. Nothing makes it raise."""
    report = verify_envelope(receipt.get("envelope"), verifier=verifier)
    report = replace(report, dimensions={**report.dimensions, "receipt": OK})
    if report.dimensions["hashes"] == FAILED:
        return report
    if receipt.keys() != _PARTS:
        return _failed(report, "receipt", "a part of the receipt is missing, or one was added")
    envelope, destruction = receipt["envelope"], receipt["destruction"]
    if destruction is not None:
        other = verify_envelope(destruction, verifier=verifier)
        if other.verdict == FAILED or other.verdict != report.verdict:
            return _failed(report, "receipt", f"the envelope of the salt's destruction: {other.reason}")
        if destruction["mutation"]["block_id"] != envelope["mutation"]["block_id"]:
            return _failed(report, "receipt", "the envelope of the salt's destruction is about another block")
    said = {name: receipt[name] for name in ("statement", "salt")}
    true = {"statement": _statement(envelope), "salt": _salt(envelope, destruction)}
    if said != true or envelope["mutation"]["mutation_kind"] not in _FORGETTING:
        return _failed(report, "receipt", "the receipt does not say what its envelope says")
    return _with_inclusion(report, envelope, receipt["inclusion"], verifier)


def _statement(envelope: Mapping[str, Any]) -> dict[str, Any]:
    subject, mutation = envelope["subject"], envelope["mutation"]
    letta = _letta(envelope)
    return {
        "forgotten": mutation["mutation_kind"],
        "event": letta.get("event"),
        "block_id": mutation["block_id"],
        "block_label": mutation["block_label"],
        "at": subject["timestamp_utc"],
        "reason": mutation["forgetting_reason"],
        "producer": subject["producer"],
        "asked_by": {name: letta[name] for name in _ASKED_BY if name in letta},
        "sizes": {name: mutation["diff"][name] for name in _SIZES},
        "chain": subject.get("trace_id"),
        "position": subject.get("position"),
        "envelope": envelope["integrity"]["current"],
    }


def _salt(envelope: Mapping[str, Any], destruction: Mapping[str, Any] | None) -> dict[str, Any]:
    """What became of the salt the content was committed to under: of the state before, which is what was forgotten."""
    letta = _letta(envelope)
    name = letta.get("salt_before", letta.get("salt"))
    if not isinstance(name, str):
        return {"name": None, "state": "none: the hashes are bare"}
    later = _letta(destruction).get("salt_destroyed") if destruction else None
    if name in (letta.get("salt_destroyed"), later):
        return {"name": name, "state": "destroyed"}
    return {"name": name, "state": "not destroyed yet"}


def _letta(envelope: Mapping[str, Any]) -> Mapping[str, Any]:
    letta = envelope["subject"]["metadata"].get("letta")
    return letta if isinstance(letta, dict) else {}


def _with_inclusion(
    report: AuditReport, envelope: Mapping[str, Any], inclusion: object, verifier: Keyring | TrustedKeys | None
) -> AuditReport:
    if inclusion is None:
        return report
    public = verifier.public_keys if verifier else []
    if not public:
        return report
    read = _read_inclusion(inclusion)
    if read is None:
        return _failed(report, "checkpoint", "the proof of its place in the log is malformed")
    index, proof, note = read
    try:
        point = open_checkpoint(note, public).checkpoint
    except NoteError as error:
        return _failed(report, "checkpoint", error.message)
    leaf = leaf_hash(envelope_line(envelope).encode("ascii"))
    if not verify_inclusion(leaf, index, point.size, proof, point.root):
        return _failed(report, "checkpoint", "the envelope is not at that place in the log of the checkpoint")
    return replace(report, dimensions={**report.dimensions, "checkpoint": OK}, covered=point.size)


def _read_inclusion(inclusion: object) -> tuple[int, Sequence[bytes], str] | None:
    if not isinstance(inclusion, dict) or inclusion.keys() != {"index", "proof", "checkpoint"}:
        return None
    index, proof, note = inclusion["index"], inclusion["proof"], inclusion["checkpoint"]
    if type(index) is not int or not isinstance(proof, list) or not isinstance(note, str):
        return None
    try:
        return index, [bytes.fromhex(one) for one in proof], note
    except (ValueError, TypeError):
        return None


def _failed(report: AuditReport, dimension: str, message: str) -> AuditReport:
    finding = AuditFinding(None, None, None, dimension, FAILED, message)
    return replace(
        report,
        verdict=FAILED,
        reason=report.reason if report.verdict == FAILED else message,
        dimensions={**report.dimensions, dimension: FAILED},
        findings=[*report.findings, finding],
        findings_total=report.findings_total + 1,
    )
