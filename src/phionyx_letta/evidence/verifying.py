"""Verifying a bundle: offline, as a stream, with nothing but public keys; no input makes it raise.

To the dimensions of a chain come two. `bundle`: the zip is one of ours and undamaged. `inclusion`: every envelope stands at its
place in the log that a trusted key's checkpoint is of. `checkpoint` (nothing was cut off or left out up to the newest
checkpoint) only a bundle of the whole log can show. `verify_evidence.py`, which travels in the bundle, gives the same answers
by other code; the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import IO

from phionyx_letta._lines import read_envelope
from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.decisions import Reviewers
from phionyx_letta.errors import NoteError, TornStoreError
from phionyx_letta.evidence.container import CHECKPOINTS, ENVELOPES, HISTORY, LAYOUT, MANIFEST, MEMBERS, BundleReader
from phionyx_letta.keys import ROTATION, Keyring, Statement, statements_in
from phionyx_letta.ledger.audit import Audit, AuditReport, Linkage, Progress, named_trace
from phionyx_letta.ledger.audit_log import Outside
from phionyx_letta.ledger.log.layout import Envelopes, read_layout
from phionyx_letta.ledger.log.paragraphs import notes_in
from phionyx_letta.ledger.log.walk import LogWalk, Point
from phionyx_letta.ledger.rollback import AcceptedRollback, accepted_in, excuses
from phionyx_letta.notes import parse_note

__all__ = ["read_history", "verify_bundle"]

BUNDLE, INCLUSION, CHECKPOINT, KEY_TRUST = "bundle", "inclusion", "checkpoint", "key_trust"
OK, FAILED, NOT_MEASURED = "ok", "failed", "not_measured"
#: Most checkpoints that are read from a bundle; the exporter writes no more.
MAX_CHECKPOINTS = 10_000
#: The longest line of an envelope, bytes.
MAX_LINE = 16_000_000
#: After so many lines that are no JSON the rest is not read.
_MAX_UNREADABLE = 10_000
_TELL_EVERY = 1000


def verify_bundle(
    path: Path,
    *,
    keys: Keyring | None,
    outside: Outside | None = None,
    reviewers: Reviewers | None = None,
    progress: Progress | None = None,
) -> AuditReport:
    """Verify a bundle.

    Args:
        path: of the zip.
        keys: public keys the caller trusts, and what he knows of them; without one nothing is valid.
        outside: checkpoints the caller has from elsewhere.
        reviewers: whose decisions about patches count.
        progress: called now and then with the number of envelopes checked.

    Raises:
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        try:
            reader = BundleReader(file)
        except TornStoreError as error:
            audit = Audit(keys)
            audit.fail(BUNDLE, f"this is not a bundle of evidence: {error.message}")
            return _completed(audit.report())
        return _completed(_Verification(reader, keys, outside, reviewers, progress).report())


def read_history(path: Path) -> list[Statement]:
    """Return the statements about keys that a bundle holds, none where it is damaged; their signatures are not checked here.

    Raises:
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        try:
            return list(_statements(BundleReader(file)))
        except TornStoreError:
            return []


def _statements(reader: BundleReader) -> Iterator[Statement]:
    notes = notes_in(BytesIO(reader.read(HISTORY)))
    return statements_in(note for _, note, _ in notes if note is not None)


class _Verification:
    """One pass over one bundle."""

    def __init__(
        self,
        reader: BundleReader,
        keys: Keyring | None,
        outside: Outside | None,
        reviewers: Reviewers | None,
        progress: Progress | None,
    ) -> None:
        self._reader = reader
        self._outside = outside
        self._progress = progress
        for name in MEMBERS:
            if name not in (ENVELOPES, LAYOUT, CHECKPOINTS, HISTORY, MANIFEST) and reader.has(name):
                reader.read(name)
        self._ring = keys.extended(_statements(reader)) if keys is not None else None
        self._has_log = reader.has(LAYOUT)
        self._whole = self._has_log and self._is_whole()
        self._audit = Audit(self._ring, block_heads={} if self._whole else None, reviewers=reviewers)
        self._audit.needed.add(BUNDLE)
        self._audit.measured(BUNDLE)
        self._linkage = Linkage()
        self._accepted: list[AcceptedRollback] = []

    def report(self) -> AuditReport:
        """Read everything and put it together."""
        points = [*self._stated(), *self._bundled(), *self._from_outside()]
        walk = None
        with ExitStack() as stack:
            if self._has_log:
                walk = LogWalk(read_layout(stack.enter_context(self._reader.stream(LAYOUT))), points)
            try:
                self._feed(stack.enter_context(self._reader.stream(ENVELOPES)), walk)
                if walk is not None:
                    walk.finish()
            except TornStoreError as error:
                self._audit.fail(BUNDLE, error.message)
        if walk is not None:
            self._judge_log(walk)
        elif points:
            self._audit.fail(BUNDLE, "there are checkpoints, but no layout of the log they are of")
        self._judge_keys(walk)
        self._judge_container(walk)
        report = self._audit.report()
        return report if self._whole else self._linkage.settled(report)

    # -- what the log is compared with ---------------------------------------------------------------------------

    def _stated(self) -> Iterator[Point]:
        for one in self._ring.statements if self._ring else ():
            rotation = one.kind == ROTATION  # a revocation may be by a key that was not in use yet at that size
            yield Point(one.checkpoint.size, one.checkpoint.root, HISTORY, signed=rotation, pinned=True)

    def _bundled(self) -> Iterator[Point]:
        with self._reader.stream(CHECKPOINTS) as file:
            for number, (line, note, problem) in enumerate(notes_in(file)):
                place = f"{CHECKPOINTS}, line {line}"
                if number >= MAX_CHECKPOINTS:
                    self._audit.fail(BUNDLE, f"there are more than {MAX_CHECKPOINTS} checkpoints")
                    return
                try:
                    if note is None:
                        raise NoteError(problem)
                    parsed = parse_note(note)
                    point = Checkpoint.parse(parsed.text)
                    if self._ring is not None:
                        self._ring.check_checkpoint(point, parsed)
                except NoteError as error:
                    self._audit.fail(CHECKPOINT, f"{place}: {error.message}")
                else:
                    yield Point(point.size, point.root, place, signed=self._ring is not None, origin=point.origin)

    def _from_outside(self) -> Iterator[Point]:
        if self._outside is None:
            return
        self._audit.needed.add(INCLUSION)
        for record in self._outside.problems:
            said = record.problem.message if record.problem else "it is no checkpoint"
            self._audit.note(CHECKPOINT, f"{record.place}: {said}")
        for point, place in self._outside.checkpoints:
            yield Point(point.size, point.root, place, outside=True, origin=point.origin)

    def _is_whole(self) -> bool:
        """The layout of a whole log is one line; an empty log has none."""
        with self._reader.stream(LAYOUT) as lines:
            try:
                pieces = list(zip(range(2), read_layout(lines), strict=False))
            except TornStoreError:
                return False
            return all(isinstance(piece, Envelopes) for _, piece in pieces) and len(pieces) < 2

    # -- reading -------------------------------------------------------------------------------------------------

    def _feed(self, lines: IO[bytes], walk: LogWalk | None) -> None:
        unreadable = number = 0
        while line := lines.readline(MAX_LINE):
            number += 1
            if not line.endswith(b"\n"):
                self._audit.fail("hashes", f"line {number} has no end, or is longer than {MAX_LINE} bytes")
                raise TornStoreError(f"{ENVELOPES} cannot be read beyond line {number}")
            line = line[:-1]
            place = walk.place() if walk is not None else None
            try:
                envelope, hashed = read_envelope(line, signature_checked=self._ring is not None)
            except (ValueError, RecursionError):
                unreadable += 1
                self._audit.fail("hashes", f"line {number} is not JSON, or repeats a key")
                if unreadable >= _MAX_UNREADABLE:
                    raise TornStoreError(
                        f"{unreadable} lines of {ENVELOPES} are not JSON; the rest was not read"
                    ) from None
            else:
                self._audit.feed(named_trace(envelope), envelope, hashed=hashed, place=place)
                if not self._whole:
                    self._linkage.feed(envelope)
            if walk is not None:
                accepted = accepted_in(line, self._ring, place or 0)
                self._accepted += [] if accepted is None else [accepted]
                walk.feed(line)
            if self._progress and number % _TELL_EVERY == 0:
                self._progress(self._audit.seen)

    # -- judging -------------------------------------------------------------------------------------------------

    def _judge_log(self, walk: LogWalk) -> None:
        audit = self._audit
        broken, beyond, unseen = (self._not_given_up(points) for points in (walk.broken, walk.beyond, walk.unseen))
        for point in broken[:1]:
            message = (
                "what was sealed was rewritten, removed, inserted or moved: the log is not the one that was signed"
            )
            for dimension in (CHECKPOINT, INCLUSION):
                audit.fail(
                    dimension,
                    message,
                    expected=f"the root at {point.size} envelopes ({point.place})",
                    found=f"another; {len(broken)} checkpoints disagree",
                )
        for point in beyond[-1:]:
            audit.fail(
                CHECKPOINT,
                "the end is missing: envelopes were cut off, or the log was set back to an older state",
                expected=f"{point.size} envelopes at least ({point.place})",
                found=f"a log of {walk.size}",
            )
        for point in unseen:
            message = f"{point.place}: the bundle does not show the log at {point.size} envelopes"
            if point.outside:
                audit.note(CHECKPOINT, message)
            elif not point.pinned:
                audit.fail(INCLUSION, message)  # who wrote the bundle could have
        good = [point.size for point in walk.agreed if point.signed and point.size]
        theirs = [point.size for point in walk.agreed if point.outside and point.size]
        audit.covered = max(good if self._outside is None else theirs, default=None)
        if broken or not good:
            return
        if walk.last is not None and walk.last >= max(good):
            audit.note(INCLUSION, f"the envelopes from {max(good)} of the log on are newer than the newest checkpoint")
        elif self._outside is None or theirs:
            audit.measured(INCLUSION)
        if not self._whole:
            audit.note(
                CHECKPOINT, "a part of a log cannot show that nothing of a chain was left out after or beside it"
            )
        elif not beyond:
            audit.measured(CHECKPOINT)

    def _not_given_up(self, points: list[Point]) -> list[Point]:
        """Return those that no accepted rollback gave up; where a key was changed nothing can be given up."""
        return [
            one
            for one in points
            if one.pinned or not excuses(self._accepted, Checkpoint(one.origin, one.size, one.root))
        ]

    def _judge_keys(self, walk: LogWalk | None) -> None:
        ring = self._ring
        if ring is None:
            return
        for conflict in ring.conflicts:
            self._audit.fail(KEY_TRUST, conflict)
        unseen = [point for point in (walk.unseen if walk is not None else ()) if point.pinned]
        for point in unseen[:1]:
            self._audit.fail(
                KEY_TRUST, f"the bundle does not show the log at {point.size} envelopes, where a key was changed"
            )

    def _judge_container(self, walk: LogWalk | None) -> None:
        manifest = self._reader.manifest
        claims = {
            "envelopes": self._audit.seen,
            "log_size": walk.size if walk is not None else None,
            "whole": self._whole,
        }
        for name, value in claims.items():
            if manifest.get(name) != value or type(manifest.get(name)) is not type(value):
                self._audit.fail(BUNDLE, f"the manifest's {name} is not what the bundle holds", expected=str(value))
        for problem in dict.fromkeys(self._reader.problems):
            self._audit.fail(BUNDLE, problem)


def _completed(report: AuditReport) -> AuditReport:
    """Every report on a bundle has the same dimensions."""
    return replace(report, dimensions={INCLUSION: NOT_MEASURED, BUNDLE: NOT_MEASURED, **report.dimensions})
