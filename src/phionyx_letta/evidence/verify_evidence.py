#!/usr/bin/env python3
"""Verify a bundle of evidence about an agent's memory. One file, Python 3.10 or later, nothing to install.

    python3 verify_evidence.py evidence.zip --key KEY

KEY is the public key you were given by another way than the bundle: 64 hex digits, or a file that ends in them. Hashes and
proofs need Python's standard library alone; signatures are checked by the package `cryptography` or else by the command
`openssl` (version 3), whichever is there. With neither, or without a key, they are not measured.

Exit codes: 0 VALID, 1 FAILED, 2 NOT MEASURED or used wrongly. `--json` prints one object. Nothing is extracted or sent anywhere.

Who can change the bundle can change this file in it: take it from the package phionyx-letta, or compare its SHA-256. It shares no
code with `phionyx-letta verify` and gives the same verdict; README.md in the bundle says what each line of the report means.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterator
from itertools import islice
from typing import IO, Any, NamedTuple

OK, FAILED, NOT_MEASURED = "ok", "failed", "not_measured"
DIMENSIONS = (
    *("bundle", "hashes", "continuity", "signatures", "key_trust"),
    *("inclusion", "checkpoint", "block_linkage"),
)
FORMAT = "phionyx-letta/evidence/v1"
SCHEMA = "phionyx.memory_mutation_envelope.v1"
MEMBERS = (
    *("README.md", "verify_evidence.py", "schema.json", "keys.txt", "key-history"),
    *("checkpoints", "log.txt", "envelopes.jsonl", "manifest.json"),
)
GENESIS = "sha256:" + "0" * 64
MAX_SIZE = 2**63 - 1
MAX_SMALL, MAX_DIRECTORY, MAX_LINE, MAX_NOTE, PIECE = 4_000_000, 100_000, 16_000_000, 128_000, 1 << 18
MAX_CHECKPOINTS, MAX_UNREADABLE, MAX_FINDINGS = 10_000, 10_000, 100
DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError),
    *(RuntimeError, ValueError, OverflowError),
)


class Fault(Exception):
    """Something is not what it should be; the text says what."""


# -- signatures ----------------------------------------------------------------------------------------------------

Check = Callable[[str, bytes, bytes], bool]
"""Takes a public key in hex digits, a signature and what was signed."""


def by_cryptography() -> Check | None:
    """Return a check by the package `cryptography`; None where it is not installed."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        return None
    loaded: dict[str, Any] = {}

    def check(key: str, signature: bytes, message: bytes) -> bool:
        try:
            if key not in loaded:
                loaded[key] = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
            loaded[key].verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True

    return check


def by_openssl() -> Check | None:
    """Return a check by the command `openssl`, a process for each signature; None where there is none."""
    program = shutil.which("openssl")
    if program is None:
        return None
    folder = tempfile.TemporaryDirectory(prefix="verify-evidence-")
    paths = [os.path.join(folder.name, name) for name in ("key", "signature", "message")]

    def check(key: str, signature: bytes, message: bytes) -> bool:
        assert folder is not None  # it is removed when nothing refers to it any more
        parts = (bytes.fromhex("302a300506032b6570032100" + key), signature, message)
        for path, data in zip(paths, parts, strict=True):
            with open(path, "wb") as file:
                file.write(data)
        command = [str(program), "pkeyutl", "-verify", "-pubin", "-keyform", "DER", "-inkey", paths[0], "-rawin"]
        done = subprocess.run([*command, "-in", paths[2], "-sigfile", paths[1]], capture_output=True, check=False)
        return done.returncode == 0

    return check


def signature_check() -> tuple[Check | None, str]:
    """Return what checks signatures here, tried on the second example of RFC 8032 and on a wrong one, and its name."""
    key = "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    good = bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    for name, make in (("cryptography", by_cryptography), ("openssl", by_openssl)):
        check = make()
        if check is not None and check(key, good, b"\x72") and not check(key, good, b"\x73"):
            return check, name
    return None, "nothing"


# -- the Merkle tree of RFC 6962 -------------------------------------------------------------------------------------


def sha256(data: bytes) -> bytes:
    """Return the digest."""
    return hashlib.sha256(data).digest()


class Tree:
    """Grows by leaves and by complete subtrees; keeps the hashes of the complete subtrees its leaves divide into."""

    def __init__(self) -> None:
        """Start empty."""
        self.size = 0
        self.parts: list[bytes] = []

    def add(self, level: int, value: bytes) -> None:
        """Add the complete subtree of 2**level leaves that has this hash."""
        if self.size % (1 << level) or self.size + (1 << level) > MAX_SIZE:
            raise Fault("the log's layout is not one: a subtree does not begin where it can")
        index = self.size >> level
        while index & 1:
            value, index = sha256(b"\x01" + self.parts.pop() + value), index >> 1
        self.parts.append(value)
        self.size += 1 << level

    def root(self) -> bytes:
        """Return the root."""
        if not self.parts:
            return sha256(b"")
        folded = self.parts[-1]
        for left in reversed(self.parts[:-1]):
            folded = sha256(b"\x01" + left + folded)
        return folded


class Point(NamedTuple):
    """A checkpoint the log is compared with."""

    size: int
    root: bytes
    place: str
    signed: bool = True
    outside: bool = False
    pinned: bool = False
    origin: str = ""


class Log:
    """The log of the bundle, walked once and compared with every checkpoint on the way."""

    def __init__(self, layout: Iterator[tuple[int, bytes | None]], points: list[Point]) -> None:
        """Start at its beginning; `layout` gives (number of envelopes, None) or (level, hash of what is not here)."""
        self.layout, self.points, self.next, self.run = layout, sorted(points), 0, 0
        self.tree = Tree()
        self.last = -1
        self.agreed: list[Point] = []
        self.broken: list[Point] = []
        self.unseen: list[Point] = []
        self.compare()

    def compare(self) -> None:
        """Compare the root with the checkpoints of this size."""
        while self.next < len(self.points) and self.points[self.next].size <= self.tree.size:
            point = self.points[self.next]
            self.next += 1
            if point.size < self.tree.size:
                self.unseen.append(point)
            else:
                (self.agreed if point.root == self.tree.root() else self.broken).append(point)

    def advance(self) -> bool:
        """Take the next line of the layout; False at its end."""
        piece = next(self.layout, None)
        if piece is None:
            return False
        number, value = piece
        if value is None:
            self.run = number
        else:
            self.tree.add(number, value)
            self.compare()
        return True

    def place(self) -> int:
        """Go to the next envelope and return its place in the log."""
        while not self.run:
            if not self.advance():
                raise Fault("the bundle has more envelopes than the log's layout")
        return self.tree.size

    def feed(self, line: bytes) -> None:
        """Take the envelope of that place."""
        self.run -= 1
        self.last = self.tree.size
        self.tree.add(0, sha256(b"\x00" + line))
        self.compare()

    def finish(self) -> None:
        """Take what comes after the last envelope."""
        while not self.run and self.advance():
            pass
        if self.run:
            raise Fault("the log's layout has more envelopes than the bundle")


LAYOUT = re.compile(rb"(?:envelopes ([1-9][0-9]{0,18})|subtree (0|[1-9][0-9]?) ([0-9a-f]{64}))\n")


def read_layout(file: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Yield what the lines of log.txt say."""
    number = 0
    while True:
        line = file.readline(128)
        if not line:
            return
        number += 1
        found = LAYOUT.fullmatch(line)
        if found is None or (found[1] and int(found[1]) > MAX_SIZE) or (found[2] and int(found[2]) > 62):
            raise Fault(f"line {number} of the log's layout is not one")
        yield (int(found[1]), None) if found[1] else (int(found[2]), bytes.fromhex(found[3].decode()))


# -- signed notes, checkpoints, statements about keys -----------------------------------------------------------------

DASH = "\N{EM DASH} "
FORBIDDEN = re.compile("[\x00-\x09\x0b-\x1f\ud800-\udfff]")
STATEMENT = re.compile(
    r"(key-rotation/v1|key-revocation/v1) ([0-9a-f]{64}) ([0-9a-f]{64}) "
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z)"
)


def strict_base64(text: str) -> bytes:
    """Return the bytes of base64 in its one canonical form."""
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except ValueError:
        raise Fault("it is not base64") from None
    if base64.b64encode(data).decode() != text:
        raise Fault("it is not base64 as it has to be")
    return data


def is_name(name: str) -> bool:
    """Return whether a key of a note can have this name."""
    return bool(name) and "+" not in name and not FORBIDDEN.search(name) and not any(char.isspace() for char in name)


class Note:
    """A signed checkpoint (c2sp.org/signed-note, c2sp.org/tlog-checkpoint), taken apart; nothing of it is believed yet."""

    def __init__(self, data: bytes) -> None:
        """Read it, strictly."""
        if len(data) > MAX_NOTE:
            raise Fault("the note is too large")
        try:
            whole = data.decode("utf-8")
        except UnicodeDecodeError:
            raise Fault("the note is not UTF-8") from None
        text, blank, lines = whole.rpartition("\n\n")
        if FORBIDDEN.search(whole) or not blank or not lines.endswith("\n") or len(lines.split("\n")) > 101:
            raise Fault("it is not a signed note")
        self.text = text + "\n"
        self.signatures = list(dict.fromkeys(self.signature(line) for line in lines[:-1].split("\n")))
        origin, *rest = text.split("\n")
        if len(rest) < 2 or not all([origin, *rest]) or not re.fullmatch("0|[1-9][0-9]{0,18}", rest[0]):
            raise Fault("it is not a checkpoint")
        self.origin, self.size, self.root, self.extensions = origin, int(rest[0]), strict_base64(rest[1]), rest[2:]
        if self.size > MAX_SIZE or len(self.root) != 32:
            raise Fault("it is not a checkpoint")

    @staticmethod
    def signature(line: str) -> tuple[str, bytes, bytes]:
        """Return name, key id and signature of a line."""
        name, _, encoded = line[len(DASH) :].partition(" ")
        data = strict_base64(encoded)
        if not line.startswith(DASH) or not is_name(name) or len(data) <= 4:
            raise Fault("a signature line is malformed")
        return name, data[:4], data[4:]

    def signers(self, keys: list[str], check: Check) -> list[str]:
        """Return which of these keys signed it; a wrong signature in the name of one of them condemns it."""
        if not is_name(self.origin):
            raise Fault("no key can have the name of its log")
        ids: dict[bytes, str] = {}
        for key in dict.fromkeys(keys):
            known = sha256(self.origin.encode() + b"\n\x01" + bytes.fromhex(key))[:4]
            if known in ids and any(named[:2] == (self.origin, known) for named in self.signatures):
                raise Fault("two trusted keys have one id")
            ids[known] = key
        good = []
        for name, key_id, value in self.signatures:
            if name == self.origin and key_id in ids:
                if len(value) != 64 or not check(ids[key_id], value, self.text.encode()):
                    raise Fault("the signature in a trusted key's name is not that key's")
                good.append(ids[key_id])
        if not good:
            raise Fault("no trusted key signed it")
        return good


def notes_in(file: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Yield (line, note) for each pair of paragraphs, (line, None) for what is no such pair."""
    text: tuple[int, bytes] | None = None
    for line, paragraph in paragraphs(file):
        signatures = paragraph.startswith(DASH.encode())
        if text is not None and not signatures:
            yield text[0], None
            text = None
        if len(paragraph) > MAX_NOTE:
            text = None
            yield line, None
        elif not signatures:
            text = line, paragraph
        elif text is None:
            yield line, None
        else:
            yield text[0], text[1] + b"\n" + paragraph
            text = None
    if text is not None:
        yield text[0], None


def paragraphs(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (number of its first line, lines) of each run of lines that are not empty; of a giant one only its start."""
    number, first, held, at_start = 1, 1, b"", True
    while True:
        piece = file.readline(MAX_NOTE)
        if not piece or (at_start and piece == b"\n"):
            if held:
                yield first, held
            held = b""
            if not piece:
                return
        elif len(held) <= MAX_NOTE:
            first = first if held else number
            held += piece
        at_start = piece.endswith(b"\n")
        number += at_start


class Statement(NamedTuple):
    """A rotation (by the old key and the new one) or a revocation (by a later key)."""

    kind: str
    signer: str
    subject: str
    at: str
    note: Note


def statements_in(file: IO[bytes]) -> Iterator[Statement]:
    """Yield the statements of a file of notes; everything else is passed over."""
    for _, data in notes_in(file):
        try:
            note = Note(data or b"")
        except Fault:
            continue
        found = STATEMENT.fullmatch(note.extensions[0]) if len(note.extensions) == 1 else None
        if found is not None and found[2] != found[3]:
            yield Statement(found[1], found[2], found[3], found[4], note)


class Epoch:
    """Where in the log a key is believed."""

    def __init__(self) -> None:
        """Everywhere."""
        self.start, self.end, self.limit = 0, MAX_SIZE, MAX_SIZE
        self.before: str | None = None
        self.after: str | None = None


class Keys:
    """The keys the reader trusts, and those they lead to."""

    def __init__(self, roots: list[str], check: Check, said: list[Statement]) -> None:
        """Follow the statements that are signed as they have to be."""
        self.roots, self.check = list(dict.fromkeys(roots)), check
        self.known = [one for one in said if self.is_signed(one)]
        self.conflicts: list[str] = []
        self.accepted: list[Statement] = []
        self.epochs: dict[str, Epoch] = {}
        barred: set[str] = set()
        while True:
            self.follow(barred)
            late = {one.subject for one in self.accepted if self.too_late(one)} - barred
            if not late:
                break
            barred |= late

    def is_signed(self, said: Statement) -> bool:
        """Return whether the keys signed that have to: of a rotation both."""
        wanted = [said.signer, said.subject] if said.kind.startswith("key-rotation") else [said.signer]
        try:
            return set(said.note.signers(wanted, self.check)) == set(wanted)
        except Fault:
            return False

    def follow(self, barred: set[str]) -> None:
        """Go from the roots along the rotations, then apply the revocations."""
        self.epochs, self.accepted, self.conflicts = {root: Epoch() for root in self.roots}, [], []
        left = [one for one in self.known if one.kind == "key-rotation/v1" and one.subject not in barred]
        left.sort(key=lambda one: (one.subject not in self.roots, one.note.size, one.subject))
        while True:
            found = next((one for one in left if one.signer in self.epochs), None)
            if found is None:
                break
            left.remove(found)
            self.rotate(found)
        for said in self.known:
            known = said.kind == "key-revocation/v1" and {said.signer, said.subject} <= set(self.epochs)
            if known and said.signer not in self.ancestors(said.subject):
                epoch = self.epochs[said.subject]
                epoch.limit = min(epoch.limit, said.note.size)
                self.accepted.append(said)

    def rotate(self, said: Statement) -> None:
        """Let the new key follow the old one, unless another has."""
        old, new = self.epochs[said.signer], self.epochs.get(said.subject, Epoch())
        if old.after == said.subject and old.end == said.note.size:
            return
        circle = said.subject in self.ancestors(said.signer)
        if old.after is not None or new.before is not None or said.note.size < old.start or circle:
            self.conflicts.append("two rotations of keys contradict each other")
            return
        old.end, old.after = said.note.size, said.subject
        new.start, new.before = said.note.size, said.signer
        self.epochs[said.subject] = new
        self.accepted.append(said)

    def too_late(self, said: Statement) -> bool:
        """Return whether a rotation is beyond what a revocation left of its signer, and nobody else speaks for the new key."""
        if said.kind != "key-rotation/v1" or said.note.size <= self.epochs[said.signer].limit:
            return False
        against = [one.signer for one in self.accepted if one.kind != said.kind and one.subject == said.signer]
        vouched = any(said.subject in [key, *self.ancestors(key)] for key in against)
        return said.subject not in self.roots and not vouched

    def ancestors(self, key: str) -> list[str]:
        """Return the keys before this one."""
        found: list[str] = []
        before = self.epochs[key].before
        while before is not None:
            found.append(before)
            before = self.epochs[before].before
        return found

    def signed(self, current: str, signature: str, place: int | None) -> bool:
        """Return whether a key that is believed at this place of the log signed it."""
        if not re.fullmatch("ed25519:[0-9a-f]{128}", signature):
            return False
        value, message = bytes.fromhex(signature[8:]), current.encode()
        for key, one in self.epochs.items():
            if (place is None or one.start <= place < min(one.end, one.limit)) and self.check(key, value, message):
                return True
        return False

    def check_note(self, note: Note) -> None:
        """Make sure that a key that was to sign a checkpoint of this size did."""
        size = note.size
        keys = [key for key, one in self.epochs.items() if one.start <= size <= min(one.end, one.limit)]
        if not keys:
            raise Fault("no key is trusted at that size of the log")
        note.signers(keys, self.check)


# -- envelopes -------------------------------------------------------------------------------------------------------


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object that repeats a key: its readers could see different things."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")
    return found


LINE = re.compile(
    rb'\{"integrity":\{"canonical_json":true,"current":"(sha256:[0-9a-f]{64})","previous":"(sha256:[0-9a-f]{64})",'
    rb'"signature":"[a-z0-9-]+:[0-9a-f]+"\},(.*)',
    re.DOTALL,
)


def read_envelope(line: bytes, signatures_checked: bool) -> tuple[Any, bool]:
    """Return the envelope, and whether its hash was found right on the text; only then may that text repeat a key."""
    found = LINE.match(line) if signatures_checked else None
    if found is not None:
        digest = hashlib.sha256(b'{"previous":"%b","record":{%b}' % (found[2], found[3].rstrip())).hexdigest()
        if digest.encode() == found[1][7:]:
            return json.loads(line), True
    return json.loads(line, object_pairs_hook=unique), False


def hash_of(envelope: dict[str, Any]) -> str:
    """Return the hash an envelope has to have: over its canonical JSON without `integrity`, chained onto the one before."""
    record = {name: value for name, value in envelope.items() if name != "integrity"}
    linked = {"previous": envelope["integrity"]["previous"], "record": record}
    text = json.dumps(linked, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def matches(pattern: str) -> Callable[[Any], bool]:
    """Return the rule that a value is text of this form."""
    form = re.compile(pattern)
    return lambda value: isinstance(value, str) and form.fullmatch(value) is not None


RULES: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "texts": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    "count": lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
    "object": lambda value: isinstance(value, dict),
    "truth": lambda value: value is None or isinstance(value, bool),
    "true": lambda value: value is True,
    "hash": matches("sha256:[0-9a-f]{64}"),
    "commitment": matches("sha256|hmac-sha256"),
    "kind": matches("write|append|clear|delete|forget|consolidate"),
    "signature": matches("(?:unsigned|[a-z0-9-]+:[0-9a-f]+)?"),
}
#: What each part has to hold, in the order in which it is looked at: `?` before a name, it may be missing; after a rule, null.
SHAPE = {
    "": "subject:object mutation:object memory_consolidation_audit:object? integrity:object",
    "subject": "runtime:text version:text producer:text turn_index:count event_type:text timestamp_utc:text "
    "metadata:object ?trace_id:text ?key_id:text ?position:count ?organization_id:text",
    "mutation": "block_id:text block_label:text mutation_kind:kind diff:object forgetting_reason:text?",
    "mutation.diff": "before_hash:hash after_hash:hash before_size_bytes:count after_size_bytes:count added_chars:count "
    "removed_chars:count unchanged_chars:count diff_text:text? ?counts_method:text ?commitment:commitment",
    "memory_consolidation_audit": "block_ref:text from_episodic:texts to_semantic:texts consolidation_method:text "
    "decay_applied:truth",
    "integrity": "previous:hash current:hash signature:signature canonical_json:true",
}
RULE = re.compile(r"(\??)([a-z_]+):([a-z]+)(\??)")
PARTS = {part: [found.groups() for found in RULE.finditer(rules)] for part, rules in SHAPE.items()}


def fault_of(envelope: Any) -> str | None:
    """Return where an envelope departs from the shape of its schema; None where it does not."""
    if not isinstance(envelope, dict) or envelope.get("schema") != SCHEMA:
        return "schema"
    for part, rules in PARTS.items():
        value: Any = envelope
        for name in filter(None, part.split(".")):
            value = value[name]
        for optional, name, rule, nullable in rules if value is not None else ():
            if name not in value:
                if not optional:
                    return f"{part}.{name}"
            elif not RULES[rule](value[name]) and not (nullable and value[name] is None):
                return f"{part}.{name}"
    if len(envelope["integrity"]) != 4:
        return "integrity"
    if envelope["subject"]["event_type"] != "memory_" + envelope["mutation"]["mutation_kind"]:
        return "subject.event_type"
    return None


def nonce_of(envelope: Any) -> int:
    """Return the beginning of the nonce of a captured change, as a number; 0 where there is none."""
    try:
        nonce = envelope["subject"]["metadata"]["letta"]["nonce"]
    except (TypeError, KeyError):
        return 0
    return int(nonce[:16], 16) if isinstance(nonce, str) and re.fullmatch("[0-9a-f]{32}", nonce) else 0


class Chain:
    """One chain of envelopes, as far as it was read."""

    def __init__(self) -> None:
        """Start at genesis."""
        self.seen = self.malformed = self.turns = self.verified = 0
        self.head: str | None = GENESIS
        self.failed: set[str] = set()
        self.open: set[str] = set()
        self.algorithms: set[str] = set()


class Audit:
    """What was found so far, over all chains."""

    def __init__(self, keys: Keys | None, whole: bool, placed: bool) -> None:
        """Start with nothing; `whole`: the envelopes are a whole log, in its order; `placed`: their places in it are known."""
        self.keys, self.whole = keys, whole
        self.unplaced = keys is not None and bool(keys.accepted) and not placed
        self.seen, self.unbroken = 0, True
        self.chains: dict[str | None, Chain] = {}
        self.blocks: dict[Any, tuple[str, int, int, bool]] = {}
        self.last: dict[str, tuple[str, bool]] = {}
        self.nonces = array("Q")  # the first 64 bits of each envelope's; 0: it has none
        self.given_up: list[dict[str, Any]] = []
        self.extra: dict[str, str] = {"bundle": OK}
        self.findings: list[dict[str, str]] = []
        self.total = 0

    def find(self, dimension: str, status: str, message: str, where: str = "") -> None:
        """Keep a finding."""
        self.total += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append({"dimension": dimension, "status": status, "where": where, "message": message})

    def fail(self, dimension: str, message: str, where: str = "") -> None:
        """Something about the bundle as a whole is wrong."""
        self.extra[dimension] = FAILED
        self.find(dimension, FAILED, message, where)

    def feed(self, envelope: Any, hashed: bool, place: int | None, line: int) -> None:
        """Check the next envelope."""
        self.seen += 1
        subject = envelope.get("subject") if isinstance(envelope, dict) else None
        trace = subject.get("trace_id") if isinstance(subject, dict) else None
        chain = self.chains.setdefault(trace if isinstance(trace, str) else None, Chain())
        position, where = chain.seen, f"line {line}, position {chain.seen} of chain {trace}"
        chain.seen += 1

        def fail(dimension: str, message: str) -> None:
            chain.failed.add(dimension)
            self.find(dimension, FAILED, message, where)

        self.nonces.append(nonce_of(envelope))
        fault = fault_of(envelope)
        if fault is not None:
            chain.malformed += 1
            fail("signatures" if fault == "integrity.signature" else "hashes", f"malformed envelope: {fault}")
            integrity = envelope.get("integrity") if isinstance(envelope, dict) else None
            current = integrity.get("current") if isinstance(integrity, dict) else None
            chain.head = current if isinstance(current, str) else None
            self.unbroken = False
            return
        integrity = envelope["integrity"]
        if not hashed:
            try:
                right = hash_of(envelope) == integrity["current"]
            except (TypeError, ValueError, RecursionError, OverflowError):
                right = False
            if not right:
                fail("hashes", "its content is not what was hashed")
        if chain.head is not None and integrity["previous"] != chain.head:
            fail("continuity", "it does not continue the envelope before: something was removed, inserted or moved")
        chain.head = integrity["current"]
        self.check_place(chain, envelope["subject"], position, fail)
        self.check_signature(chain, envelope, place, fail)
        self.check_linkage(chain, envelope, trace, fail)

    def accept(self, line: bytes, place: int) -> None:
        """Take what a rollback gave up that the operator accepted: a record in the log, signed like every other."""
        if self.keys is None or b"accept_rollback" not in line:
            return
        try:
            envelope = json.loads(line)
            if fault_of(envelope) is not None or envelope["mutation"]["block_id"] != "phionyx-letta.log":
                return
            said, current = envelope["subject"]["metadata"]["letta"], envelope["integrity"]["current"]
            if said["event"] != "accept_rollback" or hash_of(envelope) != current:
                return
            record = said["rollback"]
            ends = [
                {name: end[name] for name in ("origin", "size", "root", "agreed_size")} for end in record["given_up"]
            ]
        except (LookupError, TypeError, ValueError, RecursionError):
            return
        texts = [record.get("base"), record.get("origin"), *(end[name] for end in ends for name in ("origin", "root"))]
        numbers = [end[name] for end in ends for name in ("size", "agreed_size")]
        shaped = all(isinstance(text, str) for text in texts) and all(type(number) is int for number in numbers)
        if shaped and self.keys.signed(current, envelope["integrity"]["signature"], place):
            self.given_up += ends

    def is_given_up(self, point: Point) -> bool:
        """Return whether the log need not agree with a checkpoint any more; where a key was changed it always has to."""
        for end in () if point.pinned else self.given_up:
            if point.origin == end["origin"] and point.size == end["size"]:
                if point.root.hex() == end["root"]:
                    return True
            elif point.origin == end["origin"] and end["agreed_size"] < point.size < end["size"]:
                return True
        return False

    def check_nonces(self) -> None:
        """One captured change is sealed once. Sixteen passes: only a sixteenth of the nonces stand in a table at a time."""
        for part in range(16):
            seen: dict[int, int] = {}
            for number, nonce in enumerate(self.nonces, start=1):
                if nonce and nonce >> 60 == part and (first := seen.setdefault(nonce, number)) != number:
                    self.fail("continuity", "one captured change was sealed twice", f"records {first} and {number}")

    def check_place(
        self, chain: Chain, subject: dict[str, Any], position: int, fail: Callable[[str, str], None]
    ) -> None:
        """Position and turn are counted without gaps."""
        if subject.get("position", position) != position:
            fail("continuity", "its position is not its place in the chain")
        turn = subject["turn_index"]
        if turn > chain.turns and "letta" in subject["metadata"]:
            fail("continuity", "its turn skips turns")
        chain.turns = max(chain.turns, turn + 1)

    def check_signature(
        self, chain: Chain, envelope: dict[str, Any], place: int | None, fail: Callable[[str, str], None]
    ) -> None:
        """Signed by a key that is believed at this place of the log."""
        signature = envelope["integrity"]["signature"]
        algorithm = signature.partition(":")[0] or "unsigned"
        chain.algorithms.add(algorithm)
        if algorithm == "unsigned":
            if "key_id" in envelope["subject"]:
                fail("signatures", "its signature was stripped: it names the key that signed it")
        elif self.keys is not None:
            if self.keys.signed(envelope["integrity"]["current"], signature, place):
                chain.verified += 1
            else:
                fail("signatures", "its signature is not that of a key that is trusted at its place in the log")

    def check_linkage(
        self, chain: Chain, envelope: dict[str, Any], trace: Any, fail: Callable[[str, str], None]
    ) -> None:
        """Each change of a block begins with what the last one left."""
        block, diff = envelope["mutation"]["block_id"], envelope["mutation"]["diff"]
        letta = envelope["subject"]["metadata"].get("letta")
        letta = letta if isinstance(letta, dict) else {}
        salt = letta.get("salt")
        gone = isinstance(salt, str) and letta.get("salt_destroyed") == salt  # what comes next links to nothing
        last = self.last.get(block)
        self.unbroken = self.unbroken and (last is None or last[1] or last[0] == diff["before_hash"])
        self.last[block] = (diff["after_hash"], gone or last == (diff["after_hash"], True))
        if letta.get("content") == "not recorded":
            return
        name = block if self.whole else (trace, block)
        known, unchanged = self.blocks.get(name), diff["unchanged_chars"]
        gone = gone or (known is not None and known[3] and known[0] == diff["after_hash"])
        self.blocks[name] = (diff["after_hash"], diff["after_size_bytes"], diff["added_chars"] + unchanged, gone)
        if known is None:
            return
        if known[0] == diff["before_hash"]:
            if known[1:3] != (diff["before_size_bytes"], diff["removed_chars"] + unchanged):
                fail("block_linkage", "the size before is not the one the block's last envelope left")
        elif known[3]:
            return
        elif self.whole:
            fail("block_linkage", "it does not begin with what the block's last envelope left")
        else:
            chain.open.add("block_linkage")

    def dimensions(self) -> dict[str, str]:
        """Put all chains together."""
        answers: dict[str, list[str]] = {name: [] for name in DIMENSIONS}
        for chain in self.chains.values():
            for name, status in self.answers_of(chain).items():
                answers[name].append(status)
        out = {name: worst(found) for name, found in answers.items()}
        for name, status in self.extra.items():
            alone = name in ("bundle", "inclusion", "checkpoint")
            out[name] = status if alone else worst([status, out[name]])
        if not self.whole and self.unbroken and self.seen and out["block_linkage"] == NOT_MEASURED:
            out["block_linkage"] = OK
        return out

    def answers_of(self, chain: Chain) -> dict[str, str]:
        """Return the dimensions of one chain."""
        well_formed, verified = chain.seen > chain.malformed, chain.verified == chain.seen
        if self.keys is not None and len(chain.algorithms) > 1 and "unsigned" in chain.algorithms:
            chain.failed.add("signatures")
        measured = {
            "hashes": True,
            "continuity": well_formed,
            "signatures": verified,
            "key_trust": verified and chain.algorithms <= {"ed25519"} and not self.unplaced,
            "block_linkage": well_formed and not chain.open,
        }
        out = {name: OK if known else NOT_MEASURED for name, known in measured.items()}
        out.update(dict.fromkeys(chain.failed, FAILED))
        if self.keys is not None and chain.algorithms - {"unsigned"} and "signatures" in chain.failed:
            out["key_trust"] = FAILED
        return out


def worst(statuses: list[str]) -> str:
    """Return failed before not measured before ok."""
    if FAILED in statuses:
        return FAILED
    return NOT_MEASURED if NOT_MEASURED in statuses or not statuses else OK


# -- the zip ---------------------------------------------------------------------------------------------------------


class Bounded:
    """A file that gives only a little at once: a zip may claim a directory of gigabytes."""

    def __init__(self, file: IO[bytes]) -> None:
        """Wrap it."""
        self.file, self.seek, self.tell, self.close = file, file.seek, file.tell, file.close

    def seekable(self) -> bool:
        """It is a file."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Read a little."""
        data = self.file.read(PIECE + 1 if size < 0 else size) if size <= PIECE else b""
        if size > PIECE or len(data) > PIECE:
            raise zipfile.BadZipFile("its directory is larger than a bundle's")
        return data


class Member(io.RawIOBase):
    """What is read of a member, counted and hashed; damage ends it."""

    def __init__(self, source: Any) -> None:
        """Read from an open member of a zip."""
        self.source, self.digest, self.size, self.damaged = source, hashlib.sha256(), 0, False

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read the next piece."""
        try:
            piece = b"" if self.damaged else self.source.read(min(len(buffer), PIECE))
        except DAMAGE:
            self.damaged, piece = True, b""
        self.digest.update(piece)
        self.size += len(piece)
        buffer[: len(piece)] = piece
        return len(piece)


class Bundle:
    """The members of the zip."""

    def __init__(self, file: IO[bytes]) -> None:
        """Read the directory and the manifest."""
        self.problems: list[str] = []
        try:
            self.zip = zipfile.ZipFile(Bounded(file))  # type: ignore[arg-type, unused-ignore]
            self.check_directory()
            file.seek(-22, io.SEEK_END)
            if file.read(4) != b"PK\5\6":
                raise Fault("something stands after the zip in its file")
            with self.zip.open("manifest.json") as member:
                self.manifest = json.loads(member.read(MAX_DIRECTORY), object_pairs_hook=unique)
        except (*DAMAGE, RecursionError) as error:
            raise Fault(f"it is no zip that can be read ({str(error)[:80]!r})") from None
        if not isinstance(self.manifest, dict) or self.manifest.get("format") != FORMAT:
            raise Fault(f"its manifest is not one of {FORMAT}")
        members = self.manifest.get("members")
        self.declared = members if isinstance(members, dict) else {}
        if set(self.declared) != set(self.zip.namelist()) - {"manifest.json"}:
            self.problems.append("the manifest does not list the members that are there")

    def check_directory(self) -> None:
        """Refuse what no bundle has."""
        names, infos = self.zip.namelist(), self.zip.infolist()
        if len(names) > len(MEMBERS) or len(set(names)) != len(names) or not set(names) <= set(MEMBERS):
            raise Fault("it has members that no bundle has, or one twice")
        if not set(names) >= set(MEMBERS) - {"log.txt"}:
            raise Fault("a member is missing")
        if self.zip.comment or min(info.header_offset for info in infos) != 0:
            raise Fault("something stands before or after the zip in its file")
        for info in infos:
            if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise Fault("a member is encrypted, or packed in a way no bundle is")
            if info.file_size > max(MAX_SMALL, info.compress_size * 200):
                raise Fault("a member inflates too much: it is a bomb")

    def has(self, name: str) -> bool:
        """Return whether there is such a member."""
        return name in self.zip.namelist()

    def open(self, name: str) -> tuple[IO[bytes], Callable[[], None]]:
        """Return a member to read from, and what is to be called at the end: it reads the rest and compares the hash."""
        try:
            member = Member(self.zip.open(name))
        except DAMAGE:
            self.problems.append(f"{name} is damaged")
            return io.BytesIO(), lambda: None

        def done() -> None:
            scratch = memoryview(bytearray(PIECE))
            while member.readinto(scratch):
                pass
            found = {"bytes": member.size, "sha256": member.digest.hexdigest()}
            if member.damaged:
                self.problems.append(f"{name} is damaged")
            elif self.declared.get(name) != found:
                self.problems.append(f"{name} is not the file the manifest tells of")

        return io.BufferedReader(member, PIECE), done

    def read(self, name: str) -> bytes:
        """Return a small member; nothing where it is not small."""
        file, done = self.open(name)
        data = file.read(MAX_SMALL + 1)
        done()
        if len(data) > MAX_SMALL:
            self.problems.append(f"{name} is too large")
            return b""
        return data


# -- the verification ------------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """What the reader brought along."""

    roots: list[str]
    check: Check | None
    statements: list[str]
    checkpoints: list[str]


class Report(NamedTuple):
    """The answer."""

    verdict: str
    reason: str
    envelopes: int
    chains: int
    covered: int | None
    dimensions: dict[str, str]
    findings: list[dict[str, str]]
    total: int


def verify(path: str, given: Given) -> Report:
    """Verify a bundle."""
    with open(path, "rb") as file:
        try:
            bundle = Bundle(file)
        except Fault as fault:
            audit = Audit(None, False, False)
            audit.fail("bundle", f"this is not a bundle of evidence: {fault}")
            return concluded(audit, None, given)
        return verify_members(bundle, given)


def verify_members(bundle: Bundle, given: Given) -> Report:
    """Read every member once."""
    for name in ("README.md", "verify_evidence.py", "schema.json", "keys.txt"):
        bundle.read(name)
    keys = None
    said = [*statements_in(io.BytesIO(bundle.read("key-history")))]
    if given.roots and given.check is not None:
        for source in [*given.statements, *given.checkpoints]:
            with open(source, "rb") as file:
                said += statements_in(file)
        keys = Keys(given.roots, given.check, said)
    placed = bundle.has("log.txt")
    whole = placed and is_whole(bundle)
    audit = Audit(keys, whole, placed)
    points = [
        Point(one.note.size, one.note.root, "key-history", signed=one.kind == "key-rotation/v1", pinned=True)
        for one in (keys.accepted if keys else [])
    ]
    points += bundled_points(bundle, audit)
    if keys is not None:
        points += outside_points(given.checkpoints, audit, keys)
    layout, layout_done = bundle.open("log.txt") if placed else (io.BytesIO(), lambda: None)
    log = Log(read_layout(layout), points) if placed else None
    try:
        feed_envelopes(bundle, audit, log)
    except Fault as fault:
        audit.fail("bundle", str(fault))
    layout_done()
    audit.check_nonces()
    judge_log(audit, log, points, given)
    for problem in dict.fromkeys([*bundle.problems, *wrong_claims(bundle, audit, log)]):
        audit.fail("bundle", problem)
    return concluded(audit, log, given)


def is_whole(bundle: Bundle) -> bool:
    """Return whether the layout has no subtree: of a whole log it is one line, or none."""
    file, done = bundle.open("log.txt")
    try:
        pieces = list(islice(read_layout(file), 2))
    except Fault:
        return False
    finally:
        done()
    return len(pieces) < 2 and all(value is None for _, value in pieces)


def bundled_points(bundle: Bundle, audit: Audit) -> list[Point]:
    """Return the checkpoints of the bundle; one that no trusted key signed fails."""
    file, done = bundle.open("checkpoints")
    points = []
    for number, (line, data) in enumerate(notes_in(file)):
        if number >= MAX_CHECKPOINTS:
            audit.fail("bundle", f"there are more than {MAX_CHECKPOINTS} checkpoints")
            break
        place = f"checkpoints, line {line}"
        try:
            if data is None:
                raise Fault("it is no signed note")
            note = Note(data)
            if audit.keys is not None:
                audit.keys.check_note(note)
            points.append(Point(note.size, note.root, place, signed=audit.keys is not None, origin=note.origin))
        except Fault as fault:
            audit.fail("checkpoint", f"{place}: {fault}")
    done()
    return points


def outside_points(sources: list[str], audit: Audit, keys: Keys) -> list[Point]:
    """Return the checkpoints of the reader's own files; what no trusted key signed is only named."""
    points: dict[tuple[str, int, bytes], Point] = {}
    for source in sources:
        with open(source, "rb") as file:
            for line, data in notes_in(file):
                place = f"{source}, line {line}"
                try:
                    note = Note(data or b"")
                    keys.check_note(note)
                    point = Point(note.size, note.root, place, outside=True, origin=note.origin)
                    points.setdefault((note.origin, note.size, note.root), point)
                except Fault as fault:
                    audit.find("checkpoint", NOT_MEASURED, str(fault), place)
    return list(points.values())


def feed_envelopes(bundle: Bundle, audit: Audit, log: Log | None) -> None:
    """Check every envelope, one line at a time."""
    file, done = bundle.open("envelopes.jsonl")
    number = unreadable = 0
    try:
        while True:
            line = file.readline(MAX_LINE)
            if not line:
                break
            number += 1
            if not line.endswith(b"\n"):
                audit.fail("hashes", f"line {number} has no end, or is too long")
                raise Fault(f"envelopes.jsonl cannot be read beyond line {number}")
            line = line[:-1]
            place = log.place() if log is not None else None
            try:
                envelope, hashed = read_envelope(line, audit.keys is not None)
            except (ValueError, RecursionError):
                unreadable += 1
                audit.fail("hashes", f"line {number} is not JSON, or repeats a key")
                if unreadable >= MAX_UNREADABLE:
                    raise Fault(f"{unreadable} lines are not JSON; the rest was not read") from None
            else:
                audit.feed(envelope, hashed, place, number)
            if log is not None:
                audit.accept(line, log.tree.size)
                log.feed(line)
    finally:
        done()
    if log is not None:
        log.finish()


def judge_log(audit: Audit, log: Log | None, points: list[Point], given: Given) -> None:
    """Say what the checkpoints show."""
    for conflict in audit.keys.conflicts if audit.keys is not None else []:
        audit.fail("key_trust", conflict)
    if log is None:
        if points:
            audit.fail("bundle", "there are checkpoints, but no layout of the log they are of")
        return
    broken = [point for point in log.broken if not audit.is_given_up(point)]
    beyond = [point for point in log.points[log.next :] if not audit.is_given_up(point)]
    for point in broken[:1]:
        message = f"the log is not the one that was signed at {point.size} envelopes ({point.place})"
        audit.fail("checkpoint", message)
        audit.fail("inclusion", message)
    for point in beyond[-1:]:
        audit.fail(
            "checkpoint", f"the end is missing: a checkpoint has {point.size} envelopes, the log {log.tree.size}"
        )
    for point in log.unseen:
        if not point.outside and not audit.is_given_up(point):  # who wrote the bundle could have shown it
            message = f"{point.place}: the bundle does not show the log at {point.size} envelopes"
            audit.fail("key_trust" if point.pinned else "inclusion", message)
    good = [point for point in log.agreed if point.signed and point.size]
    theirs = [point for point in good if point.outside]
    if broken or not good:
        return
    if log.last < max(point.size for point in good) and (theirs or not given.checkpoints):
        audit.extra.setdefault("inclusion", OK)
    if audit.whole and not beyond:
        audit.extra.setdefault("checkpoint", OK)


def wrong_claims(bundle: Bundle, audit: Audit, log: Log | None) -> Iterator[str]:
    """Yield what the manifest says otherwise than the bundle is."""
    facts = {"envelopes": audit.seen, "log_size": log.tree.size if log is not None else None, "whole": audit.whole}
    for name, value in facts.items():
        said = bundle.manifest.get(name)
        if said != value or type(said) is not type(value):
            yield f"the manifest's {name} is not what the bundle holds"


def concluded(audit: Audit, log: Log | None, given: Given) -> Report:
    """Put the verdict together."""
    dimensions = audit.dimensions()
    needed = [
        "bundle",
        "hashes",
        "continuity",
        "signatures",
        "key_trust",
        *(["inclusion"] if given.checkpoints else []),
    ]
    missing = [name for name in needed if dimensions[name] != OK]
    verdict, reason = "valid", ""
    if FAILED in dimensions.values():
        verdict = FAILED
        reason = next((one["message"] for one in audit.findings if one["status"] == FAILED), "")
    elif not audit.seen:
        verdict, reason = NOT_MEASURED, "there are no envelopes: nothing was checked"
    elif not given.roots:
        verdict, reason = NOT_MEASURED, "no key was given: anyone could have written these envelopes"
    elif given.check is None:
        verdict, reason = NOT_MEASURED, "neither the package cryptography nor the command openssl 3 is here"
    elif missing:
        verdict, reason = NOT_MEASURED, f"not measured: {', '.join(missing)}"
    covered = None
    if log is not None:
        good = [one.size for one in log.agreed if one.signed and one.size and (one.outside or not given.checkpoints)]
        covered = max(good, default=None)
    return Report(verdict, reason, audit.seen, len(audit.chains), covered, dimensions, audit.findings, audit.total)


# -- the command -----------------------------------------------------------------------------------------------------


def public_key(given: str) -> str:
    """Return the 64 hex digits that were given, or that a file ends in."""
    text = given.strip()
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        with open(given, encoding="utf-8") as file:
            lines = [line.strip() for line in file.read(65_536).splitlines()]
        if any("private" in line for line in lines):
            raise Fault(f"{given} is a private key: give the public one, {given}.pub, and keep this one secret")
        text = ([""] + [line for line in lines if line and not line.startswith("#")])[-1]
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise Fault("a public key has 64 hex digits, or is a file that ends in them")
    return text.lower()


def show(report: Report, name: str) -> None:
    """Print the report for people."""
    words = {"valid": "VALID", FAILED: "FAILED", NOT_MEASURED: "NOT MEASURED"}
    print(f"{words[report.verdict]}  {report.envelopes} envelopes in {report.chains} chains, signatures by {name}")
    if report.covered is not None:
        print(f"checkpoints cover the first {report.covered} envelopes of the log")
    if report.reason:
        print(printable(report.reason))
    for dimension in DIMENSIONS:
        print(f"  {dimension.replace('_', ' '):<14} {report.dimensions[dimension].replace('_', ' ')}")
    for one in report.findings[:20]:
        print(printable(f"{one['status']}: {one['where']}{': ' if one['where'] else ''}{one['message']}"))
    if report.total > 20:
        print(f"and {report.total - 20} more findings; --json lists the first {MAX_FINDINGS}")


def printable(text: str) -> str:
    """Whoever wrote the bundle must not command the reader's terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Verify a bundle of evidence about an agent's memory.")
    parser.add_argument("bundle", help="the zip")
    parser.add_argument("--key", action="append", default=[], help="public key you trust; may be given several times")
    parser.add_argument(
        "--keys", action="append", default=[], help="statements about keys that you have from elsewhere"
    )
    parser.add_argument("--checkpoint", action="append", default=[], help="checkpoints that you have from elsewhere")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    try:
        roots = [public_key(key) for key in asked.key]
        if (asked.checkpoint or asked.keys) and not roots:
            raise Fault("checkpoints and statements are believed from a key on: give it with --key")
        check, name = signature_check() if roots else (None, "nothing")
        report = verify(asked.bundle, Given(roots, check, asked.keys, asked.checkpoint))
    except (Fault, OSError, UnicodeDecodeError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    except MemoryError:
        print("error: a record of the bundle does not fit into memory", file=sys.stderr)
        return 1
    if asked.json:
        print(json.dumps({**report._asdict(), "signatures_by": name}))
    else:
        show(report, name)
    return {"valid": 0, FAILED: 1}.get(report.verdict, 2)


if __name__ == "__main__":
    sys.exit(main())
