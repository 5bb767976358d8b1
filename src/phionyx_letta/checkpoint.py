"""Checkpoints (https://c2sp.org/tlog-checkpoint): a signed note that says how a log stood.

Three lines: the origin (which log), the size (how many leaves) and the root of the Merkle tree over them, signed by the
log's key under the origin's name. A log signs no checkpoint that its earlier ones do not begin: two that contradict each
other prove that the log was rewritten, whoever did it. The text of a checkpoint can never be taken for that of an
envelope's signature, which has no newline, so one Ed25519 key may serve both.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phionyx_letta.errors import NoteError, UntrustedNote
from phionyx_letta.merkle import HASH_BYTES, MAX_SIZE
from phionyx_letta.notes import NoteKey, NoteSignature, SignedNote, parse_note, sign_note
from phionyx_letta.signing import Signer

__all__ = ["Checkpoint", "SignedCheckpoint", "issue_checkpoint", "open_checkpoint"]

_SIZE = re.compile(r"0|[1-9][0-9]{0,18}")
_FORMAT = "see https://c2sp.org/tlog-checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says."""

    origin: str
    size: int
    root: bytes
    extensions: tuple[str, ...] = ()
    """Further lines; ours have none, those of other logs are kept."""

    def __post_init__(self) -> None:
        """Refuse what could not be written.

        Raises:
            NoteError: an empty or broken line, a size or a root that is not one.
        """
        lines = (self.origin, *self.extensions)
        if not all(isinstance(line, str) and line and "\n" not in line for line in lines):
            raise NoteError("a line of the checkpoint is empty", _FORMAT)
        if type(self.size) is not int or not 0 <= self.size <= MAX_SIZE:
            raise NoteError(f"{self.size!r} is not the size of a log", _FORMAT)
        if type(self.root) is not bytes or len(self.root) != HASH_BYTES:
            raise NoteError("the root of the checkpoint is not a hash of 32 bytes", _FORMAT)

    @property
    def text(self) -> str:
        """The note text that is signed."""
        lines = (self.origin, str(self.size), base64.b64encode(self.root).decode("ascii"), *self.extensions)
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Checkpoint:
        """Read a checkpoint's note text.

        Raises:
            NoteError: it is not one; the message names the line.
        """
        lines = text.removesuffix("\n").split("\n")
        if len(lines) < 3 or not text.endswith("\n"):
            raise NoteError("a checkpoint has at least three lines: origin, size, root", _FORMAT)
        origin, size, root, *extensions = lines
        if not _SIZE.fullmatch(size) or int(size) > MAX_SIZE:
            raise NoteError(f"line 2 of the checkpoint, {size[:40]!r}, is not a size", _FORMAT)
        return cls(origin, int(size), _root(root), tuple(extensions))


@dataclass(frozen=True)
class SignedCheckpoint:
    """A checkpoint whose signature by the log was verified."""

    checkpoint: Checkpoint
    note: SignedNote
    cosignatures: tuple[NoteSignature, ...]
    """By trusted witnesses, verified."""


def issue_checkpoint(checkpoint: Checkpoint, signer: Signer) -> str:
    """Return the checkpoint as a note signed by the log's key, which is named as the origin.

    Raises:
        NoteError: the origin has a space or a plus sign, so no key can have its name.
        SigningKeyError: the signer has no Ed25519 key.
    """
    return sign_note(checkpoint.text, checkpoint.origin, signer)


def open_checkpoint(
    data: bytes | str,
    public_keys: Iterable[str],
    *,
    witnesses: Sequence[NoteKey] = (),
    origin: str | None = None,
) -> SignedCheckpoint:
    """Read a signed checkpoint and verify that one of the log's trusted keys signed it.

    Args:
        data: the note.
        public_keys: the log's, each as 64 hex digits; the key's name in the note is the origin.
        witnesses: whose cosignatures are verified too; they do not stand in for the log's own signature.
        origin: the log that is expected; None takes any (one key may serve several logs, so compare it yourself).

    Raises:
        NoteError: it is not a checkpoint.
        UntrustedNote: no trusted key of the log signed it, a signature is wrong, or it is another log's.
    """
    note = parse_note(data)
    checkpoint = Checkpoint.parse(note.text)
    if origin is not None and checkpoint.origin != origin:
        raise UntrustedNote(
            f"the checkpoint is of the log {checkpoint.origin[:200]!r}, not of {origin!r}", "give that log's own"
        )
    log_keys = [NoteKey(checkpoint.origin, key) for key in public_keys]
    good = note.verified([*log_keys, *witnesses])
    if not any(key.names(one) for key in log_keys for one in good):
        raise UntrustedNote("a witness signed the checkpoint, but no trusted key of the log did", "trust the log's key")
    return SignedCheckpoint(checkpoint, note, tuple(one for one in good if not any(key.names(one) for key in log_keys)))


def _root(encoded: str) -> bytes:
    try:
        root = base64.b64decode(encoded.encode("ascii"), validate=True)
    except (ValueError, binascii.Error):
        root = b""
    if len(root) != HASH_BYTES or base64.b64encode(root).decode("ascii") != encoded:
        raise NoteError(f"line 3 of the checkpoint, {encoded[:60]!r}, is not the base64 of a hash", _FORMAT)
    return root
