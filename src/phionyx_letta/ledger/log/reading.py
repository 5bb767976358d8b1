"""Reading checkpoints back, from a file, a folder or a git repository, oldest to newest, one at a time.

Nothing that is found stops the reading: what is no checkpoint, or not one of a trusted key, comes as a record too, with its
place, so that the reader of the report can look at it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from phionyx_letta.checkpoint import Checkpoint, SignedCheckpoint, open_checkpoint
from phionyx_letta.errors import NoteError, StoreError
from phionyx_letta.keys import Statement, statements_in
from phionyx_letta.ledger.log.git import BRANCH, GitRepository, is_repository
from phionyx_letta.ledger.log.paragraphs import FILE, notes_in
from phionyx_letta.notes import NoteKey, parse_note

__all__ = ["CheckpointRecord", "read_checkpoints", "read_statements"]


@dataclass(frozen=True)
class CheckpointRecord:
    """What stands at one place of a source: a verified checkpoint, or the reason why it is none."""

    place: str
    """File and line, or commit."""
    signed: SignedCheckpoint | None
    problem: NoteError | None = None
    """`UntrustedNote` where it is well formed but no trusted key signed it."""
    origin: str | None = None
    """Of which log it is, or claims to be; None where that cannot be read."""


def read_checkpoints(
    source: str | os.PathLike[str],
    public_keys: Sequence[str],
    *,
    witnesses: Sequence[NoteKey] = (),
    branch: str = BRANCH,
) -> Iterator[CheckpointRecord]:
    """Yield what a source holds, oldest to newest; a folder that is a git repository too gives both, its file first.

    Args:
        source: a file of notes, a folder with one named ``checkpoints``, or a git repository.
        public_keys: of the log, each as 64 hex digits.
        witnesses: whose cosignatures are verified too.
        branch: of the git repository.

    Raises:
        StoreError: there is no such source, or it cannot be read.
    """
    yield from _records(_notes(Path(source), branch), public_keys, witnesses)


def read_statements(source: str | os.PathLike[str], *, branch: str = BRANCH) -> Iterator[Statement]:
    """Yield the statements about keys that such a source holds; their signatures are not checked here.

    Raises:
        StoreError: there is no such source, or it cannot be read.
    """
    return statements_in(note for _, note, _ in _notes(Path(source), branch) if note is not None)


def _notes(path: Path, branch: str) -> Iterator[tuple[str, bytes | None, str]]:
    found = False
    folder = os.path.isdir(path)
    file = path / FILE if folder else path
    if os.path.lexists(file):
        found = True
        yield from _file_notes(file)
    if folder and is_repository(path) and (not found or GitRepository(path).tip(branch)):
        found = True
        yield from GitRepository(path).notes(branch)
    if not found:
        raise StoreError(
            f"there are no checkpoints at {path}",
            f"give a file of them, a folder with one named {FILE}, or a git repository",
        )


def _records(
    notes: Iterable[tuple[str, bytes | None, str]], public_keys: Sequence[str], witnesses: Sequence[NoteKey]
) -> Iterator[CheckpointRecord]:
    for place, note, problem in notes:
        if note is None:
            yield CheckpointRecord(place, None, NoteError(problem, "a writer was cut short, or the source was edited"))
            continue
        try:
            signed = open_checkpoint(note, public_keys, witnesses=witnesses)
        except NoteError as error:
            yield CheckpointRecord(place, None, error, _claimed_origin(note))
        else:
            yield CheckpointRecord(place, signed, origin=signed.checkpoint.origin)


def _claimed_origin(note: bytes) -> str | None:
    try:
        return Checkpoint.parse(parse_note(note).text).origin
    except NoteError:
        return None


def _file_notes(path: Path) -> Iterator[tuple[str, bytes | None, str]]:
    try:
        with _regular(path) as file:
            for line, note, problem in notes_in(file):
                yield f"{path}, line {line}", note, problem
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}", "check the path and its permissions") from error


def _regular(path: Path) -> BinaryIO:
    """Open a regular file; anything else (a pipe would be waited on for ever) is refused."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StoreError(f"{path} is not a file", "give a file of checkpoints")
    return os.fdopen(descriptor, "rb")
