"""The one tree of errors: every error says what is wrong (`message`) and what to do about it (`remedy`).

Nothing here carries key material or memory content in its text; callers may log any of these errors as they are.
"""

from __future__ import annotations

__all__ = [
    "DiffConflictError",
    "EvidenceRefused",
    "IllegalTransition",
    "InvalidMutation",
    "InvalidPatch",
    "LedgerUnavailable",
    "MissingExtra",
    "NoteError",
    "PatchNotFound",
    "PhionyxError",
    "ProofError",
    "ProposerUnavailable",
    "ReadRefused",
    "SettingsError",
    "SigningKeyError",
    "SinkConflict",
    "SinkError",
    "StaleHeadError",
    "StoreError",
    "TargetRefused",
    "TornStoreError",
    "UnsupportedLetta",
    "UntrustedNote",
    "UntrustedPatch",
]


def said(message: str, remedy: str) -> str:
    """Return what is wrong and what to do about it as one line; a message that is a sentence stays one."""
    if not remedy:
        return message
    return (
        f"{message} {remedy[:1].upper()}{remedy[1:]}" if message.endswith((".", "!", "?")) else f"{message}; {remedy}"
    )


class PhionyxError(Exception):
    """Root of the tree; `str()` shows the message and, on the same line, the remedy."""

    def __init__(self, message: str, remedy: str = "") -> None:
        """Keep `message` (what is wrong) and `remedy` (what the reader can do; may be empty)."""
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        """Return the message and the remedy as one line."""
        return said(self.message, self.remedy)


class InvalidMutation(PhionyxError, ValueError):
    """What was given cannot become an envelope: an unknown kind, a wrong type, metadata that is not JSON."""


class SettingsError(PhionyxError, ValueError):
    """A PHIONYX_LETTA_* variable is missing or has an unusable value; the message names it."""


class SigningKeyError(PhionyxError, ValueError):
    """A key is missing, malformed, of the wrong sort, or would be overwritten."""


class StoreError(PhionyxError):
    """A store of envelopes cannot do what was asked of it."""


class StaleHeadError(StoreError):
    """The envelope was built on a head that another writer has since replaced; build it again on the new one."""


class TornStoreError(StoreError):
    """A store holds something unreadable or contradictory; the message names the file and the line."""


class LedgerUnavailable(StoreError):
    """The ledger cannot be reached, is full, or did not answer in time."""


class ProofError(PhionyxError, ValueError):
    """No proof can be made: a size or an index the log does not have, or hashes that are not hashes."""


class NoteError(PhionyxError, ValueError):
    """A signed note, a checkpoint or a key in their formats is malformed; the message says where."""


class UntrustedNote(NoteError):
    """A well-formed note that no trusted key signed, or with a wrong signature in a trusted key's name."""


class SinkError(PhionyxError):
    """A sink did not take a checkpoint; it is offered again."""


class SinkConflict(SinkError):
    """What a sink holds cannot be the past of the log: the log went back, was forked, or the sink was changed."""


class EvidenceRefused(PhionyxError):
    """In `closed` mode: no evidence could be recorded, so the write is refused."""


class ReadRefused(PhionyxError):
    """A guarded read: what the database holds is not what was recorded, or that cannot be told."""


class UnsupportedLetta(PhionyxError):
    """The Letta found here is not one this package can instrument."""


class MissingExtra(PhionyxError, ImportError):
    """An optional package is chosen but not installed; the remedy names the extra."""


class ProposerUnavailable(PhionyxError):
    """The model behind Living Memory gave no usable answer after every retry; the session is to be kept for later."""


class InvalidPatch(PhionyxError, ValueError):
    """What was given is not a memory patch: a field is missing or has the wrong type."""


class PatchNotFound(PhionyxError, KeyError):
    """No patch, or more than one, has the id that was given."""


class IllegalTransition(PhionyxError, ValueError):
    """The patch's status does not allow what was asked; the table of transitions says what it allows."""


class PatchChanged(PhionyxError, RuntimeError):
    """The stored patch is not the one that was reviewed: it was altered or replaced since; nothing was decided."""


class UntrustedPatch(PhionyxError):
    """A patch's signature or history does not verify, so it is never applied."""


class TargetRefused(PhionyxError, ValueError):
    """A target is outside the managed paths, or cannot be read or written without loss."""


class DiffConflictError(PhionyxError, RuntimeError):
    """The target no longer holds what the patch was made for; nothing was written."""

    def __init__(self, file_path: str, expected_hash: str, actual_hash: str, remedy: str = "") -> None:
        """Keep the target and both content hashes (`sha256:<hex>`; empty where the target does not exist)."""
        super().__init__(f"{file_path} has diverged since the patch was made", remedy)
        self.file_path = file_path
        self.expected_hash = expected_hash
        self.actual_hash = actual_hash
