"""Whether a chain of envelopes is what was written: three answers (ok, failed, not measured) in six dimensions.

`hashes` (each envelope is what was hashed), `continuity` (nothing missing, moved or from another chain), `signatures`,
`key_trust` (made by a key the caller chose), `checkpoint` (the end was not cut: a chain alone cannot show that, so never
measured here) and `block_linkage` (each change of a block starts from the state the last one left). One pass, flat memory,
and no input makes it raise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from phionyx_letta._lines import read_envelope
from phionyx_letta._shape import find_fault, is_plain, shown
from phionyx_letta.envelope import CONTENT_UNKNOWN, GENESIS_HASH, SCHEMA_ID, envelope_hash
from phionyx_letta.errors import PhionyxError, SigningKeyError
from phionyx_letta.signing import PlacedVerifier, Verifier, signature_algorithm

__all__ = ["DIMENSIONS", "ChainVerifier", "Finding", "verify_chain"]

DIMENSIONS = ("hashes", "continuity", "signatures", "key_trust", "checkpoint", "block_linkage")
OK, FAILED, NOT_MEASURED = "ok", "failed", "not_measured"
MAX_FINDINGS = 100
"""Findings kept in a report; the rest is counted."""

_PEERS_WORDS = {OK: "PASS", FAILED: "FAIL", NOT_MEASURED: "NOT_MEASURED"}
_ASYMMETRIC = {"ed25519"}
# Signatures are verified in bursts: alternating with JSON, each finds the processor's cache cold.
_BURST = 256


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or could not be measured, and where."""

    position: int
    """0-based place in the chain; the number of envelopes read where the rest cannot be."""
    block_id: str | None
    dimension: str
    status: str
    """`failed` or `not_measured`."""
    message: str
    expected: str | None = None
    found: str | None = None


class BlockHead(NamedTuple):
    """The state in which an envelope left a block."""

    after_hash: str
    size_bytes: int
    chars: int
    forgotten: bool = False
    """The salt of that hash was destroyed, as a signed envelope says: the next state cannot be compared with it."""


def state_after(diff: dict[str, Any], letta: dict[str, Any], last: BlockHead | None) -> BlockHead:
    """The state in which an envelope leaves its block.

    It is forgotten where `metadata.letta.salt_destroyed` names the salt of `after_hash`, and stays so while attach and detach
    repeat that hash.
    """
    salt = letta.get("salt")
    forgotten = isinstance(salt, str) and letta.get("salt_destroyed") == salt
    if last is not None and last.forgotten and last.after_hash == diff["after_hash"]:
        forgotten = True
    return BlockHead(
        diff["after_hash"], diff["after_size_bytes"], diff["added_chars"] + diff["unchanged_chars"], forgotten
    )


class ChainVerifier:
    """Verifies one chain, envelope by envelope.

    To check the linkage of blocks over a whole ledger, give the verifiers of all its chains one `block_heads` map (block id to last
    state) and feed them in the ledger's order: a mismatch is then a failure. Without the map a mismatch may only mean that
    another agent's chain holds the write between, so it is reported as not measured.
    """

    def __init__(
        self,
        *,
        verifier: Verifier | None = None,
        expected_trace: str | None = None,
        block_heads: dict[str, BlockHead] | None = None,
    ) -> None:
        """Start at genesis.

        Raises:
            SigningKeyError: `verifier` has no `verify`.
        """
        if verifier is not None and not callable(getattr(verifier, "verify", None)):
            raise SigningKeyError(f"a {type(verifier).__name__} cannot verify", "use Ed25519Verifier or HmacVerifier")
        self.seen = 0
        self.head: str | None = GENESIS_HASH
        self._verifier = verifier
        self._placed = verifier if isinstance(verifier, PlacedVerifier) and verifier.needs_places else None
        self._trace = expected_trace
        self._ledger_wide = block_heads is not None
        self._block_heads: dict[str, BlockHead] = {} if block_heads is None else block_heads
        self._turns = 0
        self._findings: list[Finding] = []
        self._findings_total = 0
        self._first_failure: Finding | None = None
        self._failed: set[str] = set()
        self._unmeasured: set[str] = set()
        self._algorithms: dict[str, int] = {}  # how many envelopes carry each
        self._first_unsigned: int | None = None
        self._verified = 0
        self._pending: list[tuple[int, str, str | None, str, str, int | None]] = []  # signatures to verify, see _BURST
        self._malformed = 0
        self._unbound_reported = False
        self._stripped_reported = False

    def feed(self, envelope: object, *, hashed: bool = False, place: int | None = None) -> None:
        """Check the next envelope, a dict or a line of JSON; whatever it is, nothing is raised.

        `hashed`: its hash was found right on the text it was read from (`read_envelope`). `place`: in the log, where that is
        known; a `PlacedVerifier` needs it.
        """
        if isinstance(envelope, str | bytes):
            envelope, hashed = self._read(envelope)
        position = self.seen
        self.seen += 1
        fault = None if is_plain(envelope) else find_fault(envelope)
        if fault is not None or not isinstance(envelope, dict):
            self._feed_malformed(position, envelope, fault)
            return
        subject, mutation, integrity = envelope["subject"], envelope["mutation"], envelope["integrity"]
        block_id = mutation["block_id"]
        if not hashed:
            self._check_hash(position, block_id, envelope, integrity)
        self._check_previous(position, block_id, integrity["previous"])
        self.head = integrity["current"]
        self._check_place(position, block_id, subject)
        self._check_signature(position, block_id, subject, integrity, place)
        letta = subject["metadata"].get("letta")
        letta = letta if isinstance(letta, dict) else {}
        if letta.get("content") != CONTENT_UNKNOWN:
            self._check_linkage(position, block_id, mutation["diff"], letta)

    def fail(self, message: str) -> None:
        """Record that the chain could not be read further."""
        self._find(self.seen, None, "continuity", FAILED, message)

    def result(self) -> dict[str, Any]:
        """Return the report of what was fed so far; `feed` may go on after it.

        Keys: `valid` (True, False, None: not measured), `checked` (envelopes before the first failure), `seen`,
        `broken_at` (0-based), `reason`, `hash_chain_valid`, `signatures_verified`, `measurement_status`,
        `non_measurement_cause`, `assurance` (the peers' words and `dimensions`), `findings` (dicts of `Finding`, at most
        `MAX_FINDINGS`), `findings_total`.
        """
        self._verify_pending()
        self._check_stripped()
        dimensions = self._dimensions()
        valid, reason, cause = self._verdict(dimensions)
        broken_at = self._first_failure.position if self._first_failure else None
        hashes = None if not self.seen and not self._failed else not self._failed & {"hashes", "continuity"}
        return {
            "valid": valid,
            "checked": self.seen if broken_at is None else broken_at,
            "seen": self.seen,
            "broken_at": broken_at,
            "reason": reason,
            "hash_chain_valid": hashes,
            "signatures_verified": dimensions["signatures"] == OK,
            "measurement_status": {True: "PASS", False: "FAIL", None: "NOT_MEASURED"}[valid],
            "non_measurement_cause": cause,
            "assurance": self._assurance(dimensions, valid),
            "findings": [asdict(finding) for finding in sorted(self._findings, key=lambda one: one.position)],
            "findings_total": self._findings_total,
        }

    def _read(self, line: str | bytes) -> tuple[object, bool]:
        try:
            return read_envelope(line, signature_checked=self._verifier is not None)
        except (ValueError, RecursionError):
            return line, False  # whatever it is, it has not the shape

    def _feed_malformed(self, position: int, envelope: object, fault: Any) -> None:
        self._malformed += 1
        integrity = envelope.get("integrity") if isinstance(envelope, dict) else None
        current = integrity.get("current") if isinstance(integrity, dict) else None
        mutation = envelope.get("mutation") if isinstance(envelope, dict) else None
        block_id = mutation.get("block_id") if isinstance(mutation, dict) else None
        message = f"malformed envelope: {fault.path}"
        if fault.path == "schema":
            message = "mixed schemas in one chain" if position else f"not a chain of {SCHEMA_ID}"
        dimension = "signatures" if fault.path == "integrity.signature" else "hashes"
        self._find(position, block_id, dimension, FAILED, message, fault.expected, fault.found)
        self.head = current if isinstance(current, str) else None

    def _check_hash(self, position: int, block_id: str, envelope: dict[str, Any], integrity: dict[str, Any]) -> None:
        try:
            found = envelope_hash(envelope, integrity["previous"])
            if found != integrity["current"]:  # keys that are not text sort differently before a JSON round trip
                found = envelope_hash(json.loads(json.dumps(envelope)), integrity["previous"])
        except (TypeError, ValueError, RecursionError, OverflowError):
            self._find(position, block_id, "hashes", FAILED, "the envelope is not JSON")
            return
        if found != integrity["current"]:
            message = "content tampered: its hash is not the recorded one"
            self._find(position, block_id, "hashes", FAILED, message, integrity["current"], found)

    def _check_previous(self, position: int, block_id: str, previous: str) -> None:
        if self.head is None or previous == self.head:
            return
        message = "previous does not match the envelope before: something was removed, inserted or moved"
        if position == 0:
            message = "the head is missing: the chain does not start at genesis"
        self._find(position, block_id, "continuity", FAILED, message, self.head, previous)

    def _check_place(self, position: int, block_id: str, subject: dict[str, Any]) -> None:
        place = subject.get("position", position)
        if place != position:
            message = "position does not match the place in the chain"
            self._find(position, block_id, "continuity", FAILED, message, str(position), shown(place))
        self._check_turn(position, block_id, subject)
        trace = subject.get("trace_id")
        if trace is None:
            self._note_unbound(position, block_id)
        elif self._trace is None:
            self._trace = trace
        elif trace != self._trace:
            message = "the envelope belongs to another chain"
            self._find(position, block_id, "continuity", FAILED, message, shown(self._trace), shown(trace))

    def _check_turn(self, position: int, block_id: str, subject: dict[str, Any]) -> None:
        """The plugin counts turns without gaps (design, decision 3); a library user's count is his own."""
        turn, letta = subject["turn_index"], subject["metadata"].get("letta")
        if turn > self._turns and isinstance(letta, dict) and "nonce" in letta:
            message = "turn_index skips turns: the count of turns was changed, or envelopes are missing"
            self._find(position, block_id, "continuity", FAILED, message, f"at most {self._turns}", shown(turn))
        self._turns = max(self._turns, turn + 1)

    def _note_unbound(self, position: int, block_id: str) -> None:
        if self._trace is not None and not self._unbound_reported:
            self._unbound_reported = True
            message = "the envelope does not name its chain, so it cannot be told from another chain's"
            self._find(position, block_id, "continuity", NOT_MEASURED, message, shown(self._trace))

    def _check_signature(
        self, position: int, block_id: str, subject: dict[str, Any], integrity: dict[str, Any], place: int | None
    ) -> None:
        signature = integrity["signature"]
        algorithm = signature_algorithm(signature)
        self._algorithms[algorithm] = self._algorithms.get(algorithm, 0) + 1
        if algorithm == "unsigned":
            if self._first_unsigned is None:
                self._first_unsigned = position
            if "key_id" in subject:  # the hash covers the key's name: this envelope was signed once
                message = "the signature was stripped"
                self._find(position, block_id, "signatures", FAILED, message, shown(subject["key_id"]), "unsigned")
            return
        if self._verifier is None:
            return
        self._pending.append((position, block_id, subject.get("key_id"), integrity["current"], signature, place))
        if len(self._pending) >= _BURST:
            self._verify_pending()

    def _verify_pending(self) -> None:
        """Verify the signatures put aside."""
        pending, self._pending = self._pending, []
        for position, block_id, key_id, current, signature, place in pending:
            if self._verifies(current, signature, place):
                self._verified += 1
            else:
                self._note_bad_signature(position, block_id, key_id, current, signature, place)

    def _note_bad_signature(
        self, position: int, block_id: str, key_id: str | None, current: str, signature: str, place: int | None
    ) -> None:
        named = shown(key_id or f"{signature_algorithm(signature)} by an unnamed key")
        message = "the signature is not that of a trusted key"
        if place is not None and self._placed is not None:
            message = self._placed.why_not(current, signature, place) or message
        self._find(position, block_id, "signatures", FAILED, message, self._key_id(), named)

    def _verifies(self, current: str, signature: str, place: int | None) -> bool:
        try:
            if self._placed is not None:
                if place is not None:
                    return self._placed.verify_at(current, signature, place)
                self._note_unplaced()
            return self._verifier is not None and self._verifier.verify(current, signature) is True
        except Exception:  # a caller's own verifier: garbage that makes it fail is not a good signature
            return False

    def _note_unplaced(self) -> None:
        if "key_trust" not in self._unmeasured:
            message = "keys were changed or revoked: whether each was used in its time only the log shows"
            self._find(self.seen - 1, None, "key_trust", NOT_MEASURED, message)

    def _check_linkage(self, position: int, block_id: str, diff: dict[str, Any], letta: dict[str, Any]) -> None:
        last = self._block_heads.get(block_id)
        self._block_heads[block_id] = state_after(diff, letta, last)
        if last is None:
            return
        if last.after_hash == diff["before_hash"]:
            before = (diff["before_size_bytes"], diff["removed_chars"] + diff["unchanged_chars"])
            if before != last[1:3]:
                message = "the size before is not the one the block's last envelope left, though the hash is"
                self._find(position, block_id, "block_linkage", FAILED, message, _sizes(*last[1:3]), _sizes(*before))
            return
        if last.forgotten:
            return
        message = "before_hash is not the state the block's last envelope left"
        if self._ledger_wide:
            self._find(position, block_id, "block_linkage", FAILED, message, last.after_hash, diff["before_hash"])
            return
        message += "; the write between may be in another agent's chain: verify the whole ledger to know"
        self._find(position, block_id, "block_linkage", NOT_MEASURED, message, last.after_hash, diff["before_hash"])

    def _check_stripped(self) -> None:
        """Signed and unsigned envelopes in one chain: with a key to check, the unsigned ones count as stripped."""
        if self._first_unsigned is None or len(self._algorithms) == 1 or self._stripped_reported:
            return
        self._stripped_reported = True
        position = self._first_unsigned
        status = NOT_MEASURED if self._verifier is None else FAILED
        message = f"{self._algorithms['unsigned']} envelopes are unsigned while others are signed"
        self._find(position, None, "signatures", status, message, "a signature", "unsigned")

    def _find(
        self,
        position: int,
        block_id: object,
        dimension: str,
        status: str,
        message: str,
        expected: str | None = None,
        found: str | None = None,
    ) -> None:
        self._findings_total += 1
        block = block_id if isinstance(block_id, str) else None
        finding = Finding(position, block, dimension, status, message, expected, found)
        if len(self._findings) < MAX_FINDINGS:
            self._findings.append(finding)
        if status != FAILED:
            self._unmeasured.add(dimension)
            return
        self._failed.add(dimension)
        if self._first_failure is None or position < self._first_failure.position:
            self._first_failure = finding

    def _dimensions(self) -> dict[str, str]:
        well_formed = self.seen > self._malformed
        signed = set(self._algorithms) - {"unsigned"}
        all_verified = bool(self.seen) and self._verified == self.seen
        pinned = all_verified and set(self._algorithms) <= _ASYMMETRIC and "key_trust" not in self._unmeasured
        measured = {
            "hashes": bool(self.seen),
            "continuity": well_formed,
            "signatures": all_verified,
            "key_trust": pinned,
            "checkpoint": False,
            "block_linkage": well_formed and "block_linkage" not in self._unmeasured,
        }
        out = {name: OK if measured[name] else NOT_MEASURED for name in DIMENSIONS}
        out.update(dict.fromkeys(self._failed, FAILED))
        if self._verifier is not None and signed and "signatures" in self._failed:
            out["key_trust"] = FAILED
        return out

    def _verdict(self, dimensions: dict[str, str]) -> tuple[bool | None, str | None, str | None]:
        first = self._first_failure
        if first is not None:
            block = f", block {shown(first.block_id)}" if first.block_id is not None else ""
            return False, f"{first.message} (position {first.position}{block})", None
        if not self.seen:
            return None, "there are no envelopes: nothing was checked", "input_absent"
        if self._verifier is None:
            return True, None, None  # on hashes alone, as the peers' contract has it; assurance says what is missing
        if dimensions["signatures"] != OK:
            reason = "the hashes hold, but no envelope is signed: anyone could have written this chain"
            return None, reason, "signature_absent"
        return True, None, None

    def _assurance(self, dimensions: dict[str, str], valid: bool | None) -> dict[str, Any]:
        algorithms = sorted(self._algorithms)
        signed = bool(set(algorithms) - {"unsigned"})
        chain = FAILED if FAILED in (dimensions["hashes"], dimensions["continuity"]) else dimensions["continuity"]
        return {
            "schema": "FAIL" if self._malformed else "PASS" if self.seen else "NOT_MEASURED",
            "hash_continuity": _PEERS_WORDS[chain],
            "signature_performed": signed,
            "signature_valid": _PEERS_WORDS[dimensions["signatures"]],
            "algorithm": (algorithms[0] if len(algorithms) == 1 else "mixed") if algorithms else None,
            "key_id": self._key_id() if signed else None,
            "key_trust": _PEERS_WORDS[dimensions["key_trust"]],
            "revocation": "NOT_MEASURED",
            "overall_assurance": self._overall(dimensions, valid, algorithms),
            "dimensions": dimensions,
        }

    @staticmethod
    def _overall(dimensions: dict[str, str], valid: bool | None, algorithms: list[str]) -> str:
        """Return the peers' level: E0 hashes only, E1 signed but not checked against a pinned key, E2 checked against one."""
        if valid is False:
            return "INVALID"
        if dimensions["key_trust"] == OK:
            return "E2"
        signed_by_key = bool(algorithms) and set(algorithms) <= _ASYMMETRIC
        return "E1" if signed_by_key or dimensions["signatures"] == OK else "E0"

    def _key_id(self) -> str | None:
        key_id = getattr(self._verifier, "key_id", None)
        return key_id if isinstance(key_id, str) else None


def _sizes(size: int, chars: int) -> str:
    return f"{size} bytes, {chars} characters"


def verify_chain(
    envelopes: Iterable[object],
    *,
    verifier: Verifier | None = None,
    expected_trace: str | None = None,
    block_heads: dict[str, BlockHead] | None = None,
) -> dict[str, Any]:
    """Verify one chain of dicts or JSON lines, read once and in order; `ChainVerifier.result` tells what comes back.

    Without a `verifier`, `valid` is True on hashes alone: signatures and key trust are then not measured, and `assurance` says so.
    What cannot be read (a torn store, something that is not a chain at all) is a failed result, never an exception.

    Raises:
        SigningKeyError: `verifier` has no `verify`.
    """
    chain = ChainVerifier(verifier=verifier, expected_trace=expected_trace, block_heads=block_heads)
    try:
        for envelope in envelopes:
            chain.feed(envelope)
    except PhionyxError as error:
        chain.fail(str(error))
    except (TypeError, ValueError, RecursionError, OSError) as error:  # from the iterable: it is input like the rest
        chain.fail(f"the envelopes cannot be read ({type(error).__name__})")
    return chain.result()
