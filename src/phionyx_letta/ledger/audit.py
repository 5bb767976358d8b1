"""One verdict over many chains: a store, a file of envelopes, a single envelope; `audit_sql` does a whole database.

`verification` checks one chain; here chains are put together, and nothing is called valid without a key. Three verdicts: `valid`,
`failed`, `not_measured`. A file or a folder alone cannot show that its end was cut, so `checkpoint` is never `ok` here.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any, Protocol

from phionyx_letta._lines import read_envelope
from phionyx_letta._shape import find_fault, shown
from phionyx_letta.decisions import Reviewers
from phionyx_letta.envelope import envelope_hash
from phionyx_letta.errors import PhionyxError
from phionyx_letta.ledger.decision_audit import REVIEWERS, SALTED, DecisionAudit
from phionyx_letta.ledger.store import EnvelopeStore
from phionyx_letta.signing import Verifier, signature_algorithm
from phionyx_letta.verification import DIMENSIONS, BlockHead, ChainVerifier, state_after

__all__ = [
    "Audit",
    "AuditFinding",
    "AuditReport",
    "Linkage",
    "named_trace",
    "verify_envelope",
    "verify_lines",
    "verify_store",
]

OK, VALID, FAILED, NOT_MEASURED = "ok", "valid", "failed", "not_measured"
_NEEDED = ("hashes", "continuity", "signatures", "key_trust")
MAX_FINDINGS = 100
_NONCE = re.compile("[0-9a-f]{32}")
SEALED_TWICE = "one captured mutation was sealed twice: a row of the outbox was copied"
Progress = Callable[[int], None]
"""Called now and then with the number of envelopes checked so far."""


class LogFeed(Protocol):
    """What compares the envelopes with the log's checkpoints; see `audit_log.LogAudit`."""

    def feed(self, body: bytes, /) -> None:
        """Take the next envelope."""
        ...

    def finish(self) -> None:
        """Say what was found."""
        ...


@dataclass(frozen=True)
class AuditFinding:
    """One thing that is wrong or was not measured: the chain, the place in it, the block, and what differs."""

    trace_id: str | None
    position: int | None
    block_id: str | None
    dimension: str
    status: str
    message: str
    expected: str | None = None
    found: str | None = None


@dataclass(frozen=True)
class AuditReport:
    """The verdict, and what it rests on."""

    verdict: str
    reason: str | None
    envelopes: int
    chains: int
    key_id: str | None
    dimensions: dict[str, str]
    findings: list[AuditFinding] = field(default_factory=list)
    findings_total: int = 0
    covered: int | None = None
    """How many envelopes, from the first sealed on, the newest agreeing checkpoint from outside covers."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


class Audit:
    """Gathers chains. Memory grows with the number of chains and blocks, not with that of envelopes."""

    def __init__(
        self,
        verifier: Verifier | None,
        *,
        block_heads: dict[str, BlockHead] | None = None,
        nonces_elsewhere: bool = False,
        reviewers: Reviewers | None = None,
    ) -> None:
        """Start with nothing.

        Args:
            verifier: the trusted key or keys; without one nothing is valid.
            block_heads: given where envelopes come in the order of a whole ledger: linkage of blocks is then checked across chains.
            nonces_elsewhere: the caller looks for mutations that were sealed twice itself.
            reviewers: whose decisions about patches count; without them these are not measured.
        """
        self.block_heads = block_heads
        self.seen = 0
        self.verifier = verifier
        self._chains: dict[str | None, ChainVerifier] = {}
        self._found: list[AuditFinding] = []
        self._found_total = 0
        self._extra: dict[str, str] = {}
        self.covered: int | None = None
        self.needed = set(_NEEDED)
        self._decisions = DecisionAudit(reviewers)
        self._nonces: array[int] | None = None if nonces_elsewhere else array("Q")  # of each envelope; 0: it has none

    def chain(self, trace_id: str | None) -> ChainVerifier:
        """The verifier of one chain."""
        if trace_id not in self._chains:
            self._chains[trace_id] = ChainVerifier(
                verifier=self.verifier, expected_trace=trace_id, block_heads=self.block_heads
            )
        return self._chains[trace_id]

    def chains(self) -> Iterable[tuple[str | None, ChainVerifier]]:
        """The chains seen so far."""
        return self._chains.items()

    def feed(self, trace_id: str | None, envelope: object, *, hashed: bool = False, place: int | None = None) -> None:
        """Check the next envelope of a chain; see `ChainVerifier.feed`."""
        self.seen += 1
        self.chain(trace_id).feed(envelope, hashed=hashed, place=place)
        if self._nonces is not None:
            self._nonces.append(_nonce_of(envelope))
        status, message = self._decisions.feed(envelope)
        if status == FAILED:
            found = _single(envelope, REVIEWERS, message)
            self.fail(REVIEWERS, message, trace_id=trace_id, position=found.position, block_id=found.block_id)
        elif status == NOT_MEASURED:
            self.leave_open(REVIEWERS, message, ())
        elif status == OK:
            self.measured(REVIEWERS)

    def _check_nonces(self) -> None:
        """Where no database can be asked, 8 bytes an envelope are kept to see one mutation sealed twice."""
        for first, again in _repeated(self._nonces or ()):
            self.fail(
                "continuity", SEALED_TWICE, found=f"the envelopes {first} and {again} in the order they were read"
            )
        self._nonces = None

    def measured(self, dimension: str) -> None:
        """Count a dimension of the container as measured."""
        self._extra.setdefault(dimension, OK)

    def fail(
        self,
        dimension: str,
        message: str,
        *,
        trace_id: str | None = None,
        position: int | None = None,
        block_id: str | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        """Record what is wrong with the container of the envelopes."""
        self._extra[dimension] = FAILED
        self._found_total += 1
        if len(self._found) < MAX_FINDINGS:
            values = (None if value is None else shown(value) for value in (expected, found))
            self._found.append(AuditFinding(trace_id, position, block_id, dimension, FAILED, message, *values))

    def note(self, dimension: str, message: str, *, block_id: str | None = None) -> None:
        """Record what could not be measured."""
        self._found_total += 1
        if len(self._found) < MAX_FINDINGS:
            self._found.append(AuditFinding(None, None, block_id, dimension, NOT_MEASURED, message))

    def leave_open(self, dimension: str, message: str, block_ids: Iterable[str]) -> None:
        """Record that a dimension was not measured of these blocks, unless it failed."""
        if self._extra.get(dimension) != FAILED:
            self._extra[dimension] = NOT_MEASURED
        for block_id in block_ids:
            self.note(dimension, message, block_id=block_id)

    def report(self) -> AuditReport:
        """Put everything together; nothing can be fed after it."""
        self._check_nonces()
        if self._decisions.salted:
            number = self._decisions.salted
            self.note(REVIEWERS, f"{number} decision{'s are' if number > 1 else ' is'} {SALTED}")
        results = [(trace_id, chain.result()) for trace_id, chain in self._chains.items()]
        answers = [result["assurance"]["dimensions"] for _, result in results]
        dimensions = {name: _worst([answer[name] for answer in answers]) for name in DIMENSIONS}
        for name, status in self._extra.items():
            chains_alone = name in dimensions and name != "checkpoint"  # no chain can measure that
            dimensions[name] = _worst([status, dimensions[name]]) if chains_alone else status
        findings = [AuditFinding(trace_id, **finding) for trace_id, result in results for finding in result["findings"]]
        findings = sorted([*findings, *self._found], key=lambda one: one.status != FAILED)
        verdict, reason = self._verdict(dimensions, findings, [result for _, result in results])
        return AuditReport(
            verdict=verdict,
            reason=reason,
            envelopes=self.seen,
            chains=len(results),
            key_id=getattr(self.verifier, "key_id", None),
            dimensions=dimensions,
            findings=findings[:MAX_FINDINGS],
            covered=self.covered,
            findings_total=self._found_total + sum(result["findings_total"] for _, result in results),
        )

    def _verdict(
        self, dimensions: dict[str, str], findings: list[AuditFinding], results: list[dict[str, Any]]
    ) -> tuple[str, str | None]:
        if FAILED in dimensions.values():
            return FAILED, next((one.message for one in findings if one.status == FAILED), None)
        if not self.seen:
            return NOT_MEASURED, "there are no envelopes: nothing was checked"
        if self.verifier is None:
            return NOT_MEASURED, "no key was given: the hashes hold, but anyone could have written these envelopes"
        if dimensions["checkpoint"] != OK and "checkpoint" in self.needed:
            return NOT_MEASURED, "no checkpoint of a trusted key was found where it was looked for"
        if dimensions.get("inclusion") != OK and "inclusion" in self.needed:
            return NOT_MEASURED, "no checkpoint from outside shows where the envelopes stand in the log"
        if any(dimensions[name] != OK for name in self.needed):
            open_ones = (one.message for one in findings if one.dimension in self.needed)
            reasons = [*(result["reason"] for result in results if result["reason"]), *open_ones]
            return NOT_MEASURED, next(iter(reasons), "not every signature was checked")
        return VALID, None


def verify_store(
    store: EnvelopeStore,
    *,
    verifier: Verifier | None,
    trace_id: str | None = None,
    reviewers: Reviewers | None = None,
) -> AuditReport:
    """Verify every chain of a store, or one; what cannot be read is a finding, not an exception."""
    audit = Audit(verifier, reviewers=reviewers)
    traces = store.traces() if trace_id is None else iter([trace_id])
    try:
        for trace in traces:
            _feed_all(audit, trace, store.iter_chain(trace))
    except PhionyxError as error:
        audit.fail("continuity", str(error))
    return audit.report()


def verify_lines(
    lines: IO[bytes],
    *,
    verifier: Verifier | None,
    trace_id: str | None = None,
    log: Callable[[Audit], LogFeed] | None = None,
    reviewers: Reviewers | None = None,
    progress: Progress | None = None,
) -> AuditReport:
    """Verify a file with one envelope a line; chains may be mixed, each is told by the trace id its envelopes carry.

    With `trace_id` every line has to belong to that chain. With `log` (as `LogAudit`), the file has to be a whole ledger in the
    order of its sealing.
    """
    audit, linkage = Audit(verifier, reviewers=reviewers), Linkage()
    feed = log(audit) if log else None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            envelope, hashed = read_envelope(line, signature_checked=verifier is not None)
        except (ValueError, RecursionError):
            ending = "" if line.endswith(b"\n") else ": its end is missing"
            audit.fail("hashes", f"line {number} is not JSON, or repeats a key{ending}")
            continue
        audit.feed(trace_id if trace_id is not None else named_trace(envelope), envelope, hashed=hashed)
        linkage.feed(envelope)
        if feed:
            feed.feed(line.rstrip(b"\r\n"))
        if progress and number % 1000 == 0:
            progress(audit.seen)
    if feed:
        feed.finish()
    return linkage.settled(audit.report())


def verify_envelope(envelope: object, *, verifier: Verifier | None, reviewers: Reviewers | None = None) -> AuditReport:
    """Verify one envelope by itself: its hash and its signature; its place in a chain is not measured."""
    dimensions = dict.fromkeys(DIMENSIONS, NOT_MEASURED)
    fault = find_fault(envelope)
    if fault is not None or not isinstance(envelope, dict):
        message = f"malformed envelope: {fault.path if fault else 'envelope'}"
        finding = _single(
            envelope, "hashes", message, fault.expected if fault else None, fault.found if fault else None
        )
        return AuditReport(FAILED, message, 1, 1, None, {**dimensions, "hashes": FAILED}, [finding], 1)
    integrity, findings = envelope["integrity"], []
    try:
        found = envelope_hash(envelope, integrity["previous"])
    except (TypeError, ValueError, RecursionError, OverflowError):
        found = "nothing: it is not JSON"
    dimensions["hashes"] = OK if found == integrity["current"] else FAILED
    if dimensions["hashes"] == FAILED:
        message = "content tampered: its hash is not the recorded one"
        findings.append(_single(envelope, "hashes", message, integrity["current"], found))
    algorithm = signature_algorithm(integrity["signature"])
    stripped = algorithm == "unsigned" and "key_id" in envelope["subject"]  # the hash covers the key's name
    if stripped or (verifier is not None and algorithm != "unsigned"):
        good = not stripped and verifier is not None and verifier.verify(integrity["current"], integrity["signature"])
        dimensions["signatures"] = OK if good else FAILED
        dimensions["key_trust"] = dimensions["signatures"] if algorithm in ("ed25519", "unsigned") else NOT_MEASURED
        if not good:
            message = "the signature was stripped" if stripped else "the signature is not that of a trusted key"
            found = shown(envelope["subject"].get("key_id", algorithm))
            findings.append(_single(envelope, "signatures", message, getattr(verifier, "key_id", None), found))
    status, message = DecisionAudit(reviewers).feed(envelope)
    if status is not None:
        dimensions[REVIEWERS] = status
    if status == FAILED:
        findings.append(_single(envelope, REVIEWERS, message))
    verdict, reason = VALID, None
    if findings:
        verdict, reason = FAILED, findings[0].message
    elif dimensions["key_trust"] != OK:
        verdict = NOT_MEASURED
        reason = "no key was given" if verifier is None else "it is not signed: anyone could have written this envelope"
    return AuditReport(verdict, reason, 1, 1, getattr(verifier, "key_id", None), dimensions, findings, len(findings))


def _feed_all(audit: Audit, trace_id: str, envelopes: Iterable[object]) -> None:
    chain = audit.chain(trace_id)
    try:
        for envelope in envelopes:
            audit.feed(trace_id, envelope)
    except PhionyxError as error:
        chain.fail(str(error))


def named_trace(envelope: object) -> str | None:
    """Return the chain an envelope says it belongs to, if it is text."""
    subject = envelope.get("subject") if isinstance(envelope, dict) else None
    trace = subject.get("trace_id") if isinstance(subject, dict) else None
    return trace if isinstance(trace, str) else None


def _single(
    envelope: object, dimension: str, message: str, expected: str | None = None, found: str | None = None
) -> AuditFinding:
    subject, mutation = (
        part if isinstance(envelope, dict) and isinstance(part := envelope.get(name), dict) else {}
        for name in ("subject", "mutation")
    )
    position, block = subject.get("position"), mutation.get("block_id")
    return AuditFinding(
        named_trace(envelope),
        position if type(position) is int else None,
        block if isinstance(block, str) else None,
        dimension,
        FAILED,
        message,
        expected,
        found,
    )


class Linkage:
    """Linkage of blocks across the chains of one file, in its order.

    Where everything links, it is measured. A break may mean that the file is a part of a ledger, so it stays not measured.
    """

    def __init__(self) -> None:
        """Start with no block known."""
        self._heads: dict[str, BlockHead] = {}
        self._unbroken = True

    def feed(self, envelope: object) -> None:
        """Take the next envelope."""
        if find_fault(envelope) is not None or not isinstance(envelope, dict):
            self._unbroken = False
            return
        block, diff = envelope["mutation"]["block_id"], envelope["mutation"]["diff"]
        letta = envelope["subject"]["metadata"].get("letta")
        last = self._heads.get(block)
        self._heads[block] = state_after(diff, letta if isinstance(letta, dict) else {}, last)
        self._unbroken = self._unbroken and (last is None or last.forgotten or last.after_hash == diff["before_hash"])

    def settled(self, report: AuditReport) -> AuditReport:
        """Return the report with what was measured here."""
        name = "block_linkage"
        if not self._unbroken or report.dimensions[name] != NOT_MEASURED or not report.envelopes:
            return report
        findings = [one for one in report.findings if one.dimension != name]
        total = report.findings_total - (len(report.findings) - len(findings))
        return replace(report, dimensions={**report.dimensions, name: OK}, findings=findings, findings_total=total)


def _nonce_of(envelope: object) -> int:
    """Return the first 64 bits of the nonce of a captured mutation, which are as good as random; 0 where there is none."""
    try:
        text = envelope["subject"]["metadata"]["letta"]["nonce"]  # type: ignore[index]
    except (TypeError, KeyError):
        return 0
    return int(text[:16], 16) if isinstance(text, str) and _NONCE.fullmatch(text) else 0


def _repeated(nonces: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the places of equal nonces; sixteen passes, so that only a sixteenth of them stand in a table at a time."""
    for part in range(16):
        seen: dict[int, int] = {}
        for place, nonce in enumerate(nonces):
            if nonce and nonce >> 60 == part and (first := seen.setdefault(nonce, place)) != place:
                yield first, place


def _worst(statuses: list[str]) -> str:
    if FAILED in statuses:
        return FAILED
    return NOT_MEASURED if NOT_MEASURED in statuses or not statuses else OK
