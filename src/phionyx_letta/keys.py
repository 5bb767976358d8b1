"""Keys over time: which key was to be trusted at which place of the log (docs/keys.md, docs/adr/0006).

A statement about a key is a checkpoint of the log with one more line, so it goes wherever checkpoints go. A *rotation* is signed
by the old key and by the new one: from that size of the log on the new key seals, and what stood before it is fixed by the root.
The old private key is then destroyed, so a later theft of the new one cannot rewrite the past. A *revocation*, signed by a later
key, says up to which size of the log a key is still believed. Envelopes' own times decide nothing: a thief writes them too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.errors import NoteError, SigningKeyError, UntrustedNote
from phionyx_letta.merkle import MAX_SIZE
from phionyx_letta.notes import NoteKey, SignedNote, parse_note, sign_note
from phionyx_letta.signing import Ed25519Verifier, Signer, key_id_of

__all__ = ["REVOCATION", "ROTATION", "Keyring", "Statement", "issue_revocation", "issue_rotation", "statements_in"]

#: Kinds of statements.
ROTATION, REVOCATION = "key-rotation/v1", "key-revocation/v1"
_TIME = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z"
_LINE = re.compile(rf"({ROTATION}|{REVOCATION}) ([0-9a-f]{{64}}) ([0-9a-f]{{64}}) ({_TIME})")


@dataclass(frozen=True)
class Statement:
    """One statement about keys, as it was read; its signatures are not checked yet."""

    kind: str
    signer: str
    """Public key, 64 hex digits: of a rotation the old one."""
    subject: str
    """Public key: of a rotation the new one, of a revocation the one that is revoked."""
    at: str
    """Of a rotation when it was made, of a revocation from when on the key is not believed; by the signer's word."""
    checkpoint: Checkpoint
    note: SignedNote

    @classmethod
    def parse(cls, data: bytes | str) -> Statement:
        """Read a statement.

        Raises:
            NoteError: it is none.
        """
        note = parse_note(data)
        checkpoint = Checkpoint.parse(note.text)
        found = _LINE.fullmatch(checkpoint.extensions[0]) if len(checkpoint.extensions) == 1 else None
        if found is None or found[2] == found[3]:
            raise NoteError("it is no statement about a key", "see docs/keys.md")
        return cls(found[1], found[2], found[3], found[4], checkpoint, note)

    def signed(self) -> bool:
        """Return whether the keys signed it that have to: of a rotation both."""
        wanted = [self.signer, self.subject] if self.kind == ROTATION else [self.signer]
        try:
            keys = [NoteKey(self.checkpoint.origin, key) for key in wanted]
            good = self.note.verified(keys)
        except (NoteError, SigningKeyError):
            return False
        return all(any(key.names(one) for one in good) for key in keys)


def statements_in(notes: Iterable[bytes | str]) -> Iterator[Statement]:
    """Yield the statements among these notes; everything else is passed over."""
    for note in notes:
        try:
            yield Statement.parse(note)
        except NoteError:
            continue


def issue_rotation(checkpoint: Checkpoint, old: Signer, new: Signer, at: datetime) -> str:
    """Return the note by which ``new`` takes over from ``old`` where the log stands at ``checkpoint``.

    Raises:
        SigningKeyError: one of them has no Ed25519 key, or they are the same.
    """
    text = _text(checkpoint, ROTATION, _public(old), _public(new), at)
    first = sign_note(text, checkpoint.origin, old)
    second = sign_note(text, checkpoint.origin, new)
    return first + second.removeprefix(text + "\n")


def issue_revocation(checkpoint: Checkpoint, signer: Signer, revoked: str, at: datetime) -> str:
    """Return the note by which ``signer`` says that the key ``revoked`` is believed up to ``checkpoint`` and no further.

    Raises:
        SigningKeyError: the signer has no Ed25519 key, or it is the revoked one.
    """
    text = _text(checkpoint, REVOCATION, _public(signer), Ed25519Verifier(revoked).public_key_hex, at)
    return sign_note(text, checkpoint.origin, signer)


@dataclass
class _Epoch:
    """Where a key is to be trusted: for the leaves from ``start`` on, before ``end`` and before ``limit``."""

    verifier: Ed25519Verifier
    start: int = 0
    end: int = MAX_SIZE
    limit: int = MAX_SIZE
    """What a revocation left of it."""
    predecessor: str | None = None
    successor: str | None = None
    revoked_from: str | None = None

    def covers(self, place: int) -> bool:
        return self.start <= place < min(self.end, self.limit)


@dataclass
class Keyring:
    """Trusted keys and what is stated about them: a verifier that knows at which place of the log which key was to be used."""

    roots: Sequence[str]
    """Public keys the caller trusts, each as 64 hex digits."""
    statements: list[Statement] = field(default_factory=list)
    """Those that are signed by trusted keys, after ``learn``."""
    conflicts: list[str] = field(default_factory=list)
    """Signed statements that cannot both be true."""

    algorithm = "ed25519"

    def __post_init__(self) -> None:
        """Trust the roots everywhere.

        Raises:
            SigningKeyError: there are none, or one is no public key.
        """
        if not self.roots:
            raise SigningKeyError("no trusted key was given", "pass at least one public key")
        self.roots = [Ed25519Verifier(root).public_key_hex for root in self.roots]
        self._known: dict[str, Statement] = {}
        self._resolve()

    def learn(self, statements: Iterable[Statement]) -> None:
        """Take statements into account, in any order; those no trusted key signed change nothing."""
        for one in statements:
            if str(one.note) not in self._known and one.signed():
                self._known[str(one.note)] = one
        self._resolve()

    def extended(self, statements: Iterable[Statement]) -> Keyring:
        """Return a keyring that knows these statements too."""
        ring = Keyring(self.roots)
        ring.learn([*self._known.values(), *statements])
        return ring

    @property
    def key_id(self) -> str:
        """The ids of the trusted keys, comma separated."""
        return ",".join(sorted(one.verifier.key_id for one in self._epochs.values()))

    @property
    def public_keys(self) -> list[str]:
        """All keys that are trusted somewhere, the caller's first."""
        return list(self._epochs)

    @property
    def needs_places(self) -> bool:
        """Whether trust depends on the place in the log."""
        return bool(self.statements)

    def verify(self, signed: str, signature: str) -> bool:
        """Return whether any key that is trusted somewhere made the signature."""
        return any(one.verifier.verify(signed, signature) for one in self._epochs.values())

    def verify_at(self, signed: str, signature: str, place: int) -> bool:
        """Return whether a key that is trusted at this place of the log made the signature."""
        return any(one.verifier.verify(signed, signature) for one in self._epochs.values() if one.covers(place))

    def why_not(self, signed: str, signature: str, place: int) -> str | None:
        """Return why a known key's signature is not good at this place; None if no known key made it."""
        for one in self._epochs.values():
            if one.verifier.verify(signed, signature):
                return _reason(one, place)
        return None

    def signs_at(self, size: int) -> list[str]:
        """Return the keys whose checkpoints of a log of this size are believed."""
        return [key for key, one in self._epochs.items() if one.start <= size <= min(one.end, one.limit)]

    def check_checkpoint(self, checkpoint: Checkpoint, note: SignedNote) -> None:
        """Make sure that a key that was to be trusted at this size of the log signed its checkpoint.

        Raises:
            UntrustedNote: none did, or a signature in a trusted key's name is wrong.
        """
        keys = [NoteKey(checkpoint.origin, key) for key in self.signs_at(checkpoint.size)]
        if not keys:
            raise UntrustedNote("no key is trusted at that size of the log", "give the keys of that time")
        note.verified(keys)

    def _resolve(self) -> None:
        barred: set[str] = set()  # keys whose only introduction is by a key that was revoked before
        while True:
            self._follow(barred)
            self._revoke()
            fresh = {one.subject for one in self.statements if self._comes_too_late(one)} - barred
            if not fresh:
                return
            barred |= fresh

    def _follow(self, barred: set[str]) -> None:
        """Go from the roots along the rotations."""
        self._epochs = {root: _Epoch(Ed25519Verifier(root)) for root in self.roots}
        self.statements, self.conflicts = [], []
        rotations = [one for one in self._known.values() if one.kind == ROTATION and one.subject not in barred]
        left = sorted(rotations, key=lambda one: (one.subject not in self.roots, one.checkpoint.size, one.subject))
        while True:
            found = next((one for one in left if one.signer in self._epochs), None)
            if found is None:
                return
            left.remove(found)
            self._rotate(found)

    def _rotate(self, said: Statement) -> None:
        old, size = self._epochs[said.signer], said.checkpoint.size
        if old.successor == said.subject and old.end == size:
            return  # the same said twice
        new = self._epochs.get(said.subject) or _Epoch(Ed25519Verifier(said.subject))
        circle = said.subject in self._ancestors(said.signer)
        if old.successor is not None or new.predecessor is not None or size < old.start or circle:
            self.conflicts.append(
                f"two rotations contradict each other: {key_id_of(said.signer)} to {key_id_of(said.subject)} "
                f"at {size} envelopes is not the only one"
            )
            return
        old.end, old.successor = size, said.subject
        new.start, new.predecessor = size, said.signer
        self._epochs[said.subject] = new
        self.statements.append(said)

    def _revoke(self) -> None:
        for said in self._known.values():
            subject = self._epochs.get(said.subject)
            if said.kind != REVOCATION or subject is None or said.signer not in self._epochs:
                continue
            if said.signer in self._ancestors(said.subject):
                continue  # who was replaced cannot speak against who came after
            subject.limit = min(subject.limit, said.checkpoint.size)
            subject.revoked_from = min(subject.revoked_from or said.at, said.at)
            self.statements.append(said)

    def _comes_too_late(self, said: Statement) -> bool:
        """Whether a rotation was signed by a key beyond what its revocation left of it, and nobody else vouches for the new key."""
        if said.kind != ROTATION or said.checkpoint.size <= self._epochs[said.signer].limit:
            return False
        against = {one.signer for one in self.statements if one.kind == REVOCATION and one.subject == said.signer}
        line = {key for key in against if said.subject in (key, *self._ancestors(key))}
        return said.subject not in self.roots and not line

    def _ancestors(self, key: str) -> Iterator[str]:
        """The keys before this one; rotations make no circles."""
        while (before := self._epochs[key].predecessor) is not None:
            yield before
            key = before


def _reason(epoch: _Epoch, place: int) -> str:
    if place < epoch.start:
        return f"the key was not in use yet: it seals from envelope {epoch.start} of the log on"
    if place >= epoch.limit:
        return (
            f"the key was revoked from {epoch.revoked_from} on, and only the first {epoch.limit} envelopes of the log are "
            "shown to be older"
        )
    return f"the key was replaced when the log had {epoch.end} envelopes: nobody should have it any more"


def _text(checkpoint: Checkpoint, kind: str, signer: str, subject: str, at: datetime) -> str:
    if signer == subject:
        raise SigningKeyError("the two keys of the statement are the same", "give another key")
    line = f"{kind} {signer} {subject} {at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return Checkpoint(checkpoint.origin, checkpoint.size, checkpoint.root, (line,)).text


def _public(signer: Signer) -> str:
    public = getattr(signer, "public_key_hex", None)
    if not isinstance(public, str):
        raise SigningKeyError(
            "a statement about keys is signed with Ed25519 keys", "`phionyx-letta keygen PATH` makes one"
        )
    return public
