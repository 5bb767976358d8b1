"""Signed notes (https://c2sp.org/signed-note): a text, a blank line, and a line for each signature.

The format of Go's checksum database and of today's transparency logs. Two of its signature types are here: Ed25519 over
the text (0x01), and the timestamped cosignature of a witness (0x04, https://c2sp.org/tlog-cosignature). Parsing is strict:
what is not exactly a note is an error that says where. A line of an unknown key is ignored, as the format demands; a wrong
signature in the name of a known key condemns the whole note.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from phionyx_letta.errors import NoteError, SigningKeyError, UntrustedNote
from phionyx_letta.signing import Ed25519Verifier, Signer

__all__ = [
    "COSIGNATURE",
    "ED25519",
    "MAX_BYTES",
    "NoteKey",
    "NoteSignature",
    "SignedNote",
    "cosign_note",
    "is_name",
    "parse_note",
    "parse_signatures",
    "sign_note",
]

#: The signature types' identifiers.
ED25519, COSIGNATURE = 0x01, 0x04
#: The largest note that is read (a signature of the largest kind the format knows has 5 kB; 16 must fit).
MAX_BYTES = 128_000
#: Most signature lines that are read (Go reads 100).
MAX_SIGNATURES = 100

_DASH = "\N{EM DASH} "
_ID_BYTES, _TIME_BYTES, _SIGNATURE_BYTES, _KEY_BYTES = 4, 8, 64, 32
_FORMAT = "see https://c2sp.org/signed-note"
_FORBIDDEN = re.compile("[\x00-\x09\x0b-\x1f\ud800-\udfff]")  # control characters but the newline; what UTF-8 has not


@dataclass(frozen=True)
class NoteSignature:
    """One signature line, taken apart; nothing of it is checked yet."""

    name: str
    key_id: bytes
    """Four bytes."""
    data: bytes
    """What follows the key id: for Ed25519 the 64 bytes of the signature, for a cosignature 8 bytes of time before them."""

    def line(self) -> str:
        """Return the line as it stands in a note, with its newline."""
        return f"{_DASH}{self.name} {base64.b64encode(self.key_id + self.data).decode('ascii')}\n"

    def time(self) -> int:
        """Return when a cosignature was made, in seconds since 1970; 0 where it does not say.

        The cosigner's own clock, which may step backwards; nothing here decides by it.
        """
        return int.from_bytes(self.data[:_TIME_BYTES], "big") if len(self.data) == _TIME_BYTES + _SIGNATURE_BYTES else 0


class NoteKey:
    """A public key that notes are checked with: a name, a signature type and 32 bytes of Ed25519."""

    def __init__(self, name: str, public_key_hex: str, algorithm: int = ED25519) -> None:
        """Take the key's name, its 64 hex digits (or the path of its .pub file), and the type of the signatures it makes.

        Raises:
            NoteError: the name is not one a note can carry, or the type is unknown.
            SigningKeyError: not 64 hex digits of an Ed25519 public key.
        """
        if algorithm not in (ED25519, COSIGNATURE):
            raise NoteError(f"the signature type {algorithm!r} is not one of Ed25519 or cosignature/v1", _FORMAT)
        self._verifier = Ed25519Verifier(public_key_hex)
        self.name = _checked_name(name)
        self.algorithm = algorithm
        self.public_key = bytes.fromhex(self._verifier.public_key_hex)
        self.key_id = _key_id(name, algorithm, self.public_key)

    @classmethod
    def parse(cls, vkey: str) -> NoteKey:
        """Read ``<name>+<8 hex digits>+<base64>``, the format's text form of a verifier key.

        Raises:
            NoteError: it is not one, or its id is not that of its key.
        """
        name, _, rest = vkey.partition("+") if isinstance(vkey, str) else ("", "", "")
        digits, _, encoded = rest.partition("+")
        remedy = "give it as <name>+<8 hex digits>+<base64>, as its owner published it"
        material = _decoded(encoded)
        if material is None or len(material) != 1 + _KEY_BYTES:
            raise NoteError("this is not a verifier key of a signed note", remedy)
        try:
            key = cls(name, material[1:].hex(), material[0])
        except SigningKeyError:
            raise NoteError(f"the verifier key of {name!r} holds no Ed25519 key", remedy) from None
        if digits != key.key_id.hex():
            raise NoteError(f"the verifier key of {name!r} has the id {digits[:16]!r}, not {key.key_id.hex()}", remedy)
        return key

    def __str__(self) -> str:
        """Return the text form, which ``parse`` reads."""
        encoded = base64.b64encode(bytes([self.algorithm]) + self.public_key).decode("ascii")
        return f"{self.name}+{self.key_id.hex()}+{encoded}"

    def __eq__(self, other: object) -> bool:
        """Two keys are the same if their text forms are."""
        return isinstance(other, NoteKey) and str(self) == str(other)

    def __hash__(self) -> int:
        """Agree with ``__eq__``."""
        return hash(str(self))

    def names(self, signature: NoteSignature) -> bool:
        """Return whether the signature claims to be by this key."""
        return (signature.name, signature.key_id) == (self.name, self.key_id)

    def verify(self, text: str, signature: NoteSignature) -> bool:
        """Return whether the signature is this key's over the note text; never raise."""
        signed, data = text, signature.data
        if self.algorithm == COSIGNATURE:
            time = signature.time()
            if not 0 < time < 2**63:  # tlog-cosignature: at most 2**63 - 1; tlog-witness: not zero
                return False
            signed, data = _cosigned(time, text), data[_TIME_BYTES:]
        return self.names(signature) and self._verifier.verify(signed, f"ed25519:{data.hex()}")


@dataclass(frozen=True)
class SignedNote:
    """A note as it was read: well formed, nothing more. Ignore the text until ``verified`` has been asked."""

    text: str
    """With its last newline."""
    signatures: tuple[NoteSignature, ...]

    def __str__(self) -> str:
        """Return the note as it is written."""
        return f"{self.text}\n{''.join(one.line() for one in self.signatures)}"

    def verified(self, keys: Iterable[NoteKey]) -> tuple[NoteSignature, ...]:
        """Return the signatures that were made by these keys, at least one, each once.

        Raises:
            UntrustedNote: none was; or one in the name of one of them is wrong.
            NoteError: two of the keys cannot be told apart by name and id.
        """
        trusted = list(dict.fromkeys(keys))
        good: list[NoteSignature] = []
        for signature in dict.fromkeys(self.signatures):
            known = [key for key in trusted if key.names(signature)]
            if len(known) > 1:
                raise NoteError(f"two trusted keys have the name {signature.name!r} and one id", "trust one of them")
            if not known:
                continue
            if not known[0].verify(self.text, signature):
                raise UntrustedNote(
                    f"the signature in the name of {signature.name!r} is not that of the trusted key",
                    "the note was changed or forged: compare it with another copy",
                )
            good.append(signature)
        if not good:
            named = ", ".join(sorted({repr(one.name[:60]) for one in self.signatures})[:4])
            raise UntrustedNote(f"no trusted key signed the note (its signatures name {named})", "trust its key")
        return tuple(good)


def parse_note(data: bytes | str) -> SignedNote:
    """Take a signed note apart.

    Raises:
        NoteError: it is not one, is larger than 128 kB, or has more than 100 signatures; the message says where.
    """
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    if len(data) > MAX_BYTES:
        raise NoteError(f"the note is larger than {MAX_BYTES} bytes", _FORMAT)
    try:
        whole = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NoteError(f"the note is not UTF-8 at byte {error.start}", _FORMAT) from None
    _check_text(whole, "the note")
    text, blank, lines = whole.rpartition("\n\n")
    if not blank:
        raise NoteError("the note has no blank line between text and signatures", _FORMAT)
    return SignedNote(text + "\n", parse_signatures(lines))


def parse_signatures(lines: str) -> tuple[NoteSignature, ...]:
    """Take signature lines apart, at least one.

    Raises:
        NoteError: one is malformed or there are none; the message gives its number.
    """
    if not lines.endswith("\n"):
        raise NoteError("the last signature line has no end: the note was cut short", _FORMAT)
    found = lines[:-1].split("\n")
    if len(found) > MAX_SIGNATURES:
        raise NoteError(f"the note has more than {MAX_SIGNATURES} signatures", _FORMAT)
    return tuple(_parse_signature(number, line) for number, line in enumerate(found, start=1))


def _parse_signature(number: int, line: str) -> NoteSignature:
    name, _, encoded = line.removeprefix(_DASH).partition(" ")
    data = _decoded(encoded)
    if not line.startswith(_DASH) or not is_name(name) or data is None or len(data) <= _ID_BYTES:
        raise NoteError(f"signature line {number} of the note is malformed", _FORMAT)
    return NoteSignature(name, data[:_ID_BYTES], data[_ID_BYTES:])


def sign_note(text: str, name: str, signer: Signer) -> str:
    """Return the note of this text, signed with the signer's Ed25519 key under the name ``name``.

    Raises:
        NoteError: the text does not end in a newline or has control characters; or the name cannot stand in a note.
        SigningKeyError: the signer has no Ed25519 key.
    """
    _check_text(text, "the text")
    return str(SignedNote(text, (_signature(text, NoteKey(name, _public_key(signer)), signer, b""),)))


def cosign_note(note: SignedNote, name: str, signer: Signer, time: int) -> NoteSignature:
    """Return a witness's cosignature (cosignature/v1) of the note's text, made at ``time`` (seconds since 1970).

    Raises:
        NoteError: the time is not one a cosignature can carry, or the name cannot stand in a note.
        SigningKeyError: the signer has no Ed25519 key.
    """
    if type(time) is not int or not 0 < time < 2**63:
        raise NoteError(f"a cosignature cannot carry the time {time!r}", "give whole seconds since 1970")
    key = NoteKey(name, _public_key(signer), COSIGNATURE)
    return _signature(_cosigned(time, note.text), key, signer, time.to_bytes(_TIME_BYTES, "big"))


def _signature(signed: str, key: NoteKey, signer: Signer, before: bytes) -> NoteSignature:
    value = signer.sign(signed)
    if not Ed25519Verifier(key.public_key.hex()).verify(signed, value):  # a signer may be a program of its own
        raise SigningKeyError("the signer's signature is not one by its public key", "check the signing key or command")
    return NoteSignature(key.name, key.key_id, before + bytes.fromhex(value.removeprefix("ed25519:")))


def _public_key(signer: Signer) -> str:
    public = getattr(signer, "public_key_hex", None)
    if not isinstance(public, str):
        raise SigningKeyError("a note is signed with an Ed25519 key", "`phionyx-letta keygen PATH` makes one")
    return public


def _cosigned(time: int, text: str) -> str:
    return f"cosignature/v1\ntime {time}\n{text}"


def _key_id(name: str, algorithm: int, public_key: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + bytes([algorithm]) + public_key).digest()[:_ID_BYTES]


def _check_text(text: str, what: str) -> None:
    found = _FORBIDDEN.search(text)
    if found:
        raise NoteError(f"{what} has the character U+{ord(found[0]):04X} at {found.start()}", _FORMAT)
    if not text.endswith("\n"):
        raise NoteError(f"{what} does not end in a newline", _FORMAT)


def is_name(name: object) -> bool:
    """Return whether a key of notes can have this name: no spaces of any alphabet, no plus, nothing that cannot be encoded."""
    if not isinstance(name, str) or not name or "+" in name:
        return False
    return _FORBIDDEN.search(name) is None and not any(map(str.isspace, name))


def _checked_name(name: str) -> str:
    if not is_name(name):
        raise NoteError(f"{name!r} cannot be the name of a note's key", "use a name without spaces and plus signs")
    return name


def _decoded(encoded: str) -> bytes | None:
    """Return the bytes of standard base64 in its one canonical form, None for anything else."""
    try:
        data = base64.b64decode(encoded.encode("ascii"), validate=True)
    except (ValueError, binascii.Error):
        return None
    return data if base64.b64encode(data).decode("ascii") == encoded else None
