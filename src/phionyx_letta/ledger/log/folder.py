"""A folder as a sink: one file of checkpoints that is only ever appended to, durably, by any number of processes.

Nothing in it is overwritten or cut off, so the file may carry the append-only attribute (``chattr +a``) or lie on write-once
storage. What a writer left half-written is closed with a blank line by the next one, and named by whoever reads.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

from phionyx_letta.checkpoint import Checkpoint, open_checkpoint
from phionyx_letta.errors import NoteError, SinkConflict, SinkError
from phionyx_letta.ledger.log.paragraphs import FILE, notes_in
from phionyx_letta.ledger.log.sink import Published, follows

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["FolderSink"]

_LOCK = f".{FILE}.lock"
_TAIL_BYTES = 65_536
_TRIES = 5

_log = logging.getLogger("phionyx_letta")


class FolderSink:
    """Checkpoints in ``<folder>/checkpoints``."""

    interval = 0.0

    def __init__(self, folder: str | os.PathLike[str], public_keys: Sequence[str]) -> None:
        """Use this folder; it is made when first written to.

        Args:
            folder: where the file is.
            public_keys: of the log, each as 64 hex digits: what others put into the file does not count as held.

        Raises:
            SinkError: the platform has no ``fcntl`` (Windows).
        """
        if fcntl is None:  # pragma: no cover - Windows
            raise SinkError("this platform has no fcntl, so writers cannot be kept apart", "use a git repository")
        self._folder = Path(folder)
        self._file = self._folder / FILE
        self._keys = tuple(public_keys)
        self._seen: tuple[int, int, int] | None = None  # device, inode and size of the file when last looked at
        self.name = f"folder {self._folder}"

    def deliver(self, offered: Published, /) -> None:
        """Append the checkpoint, unless the file has one that it leads to; it is durable on return.

        Raises:
            SinkConflict: the file's newest checkpoint and the log do not agree, or the file was cut or replaced.
            SinkError: it cannot be written.
        """
        with self._translated():
            self._folder.mkdir(parents=True, exist_ok=True)
            for _ in range(_TRIES):
                with self._opened() as descriptor:
                    held = self._newest(descriptor, offered.checkpoint.origin)
                    if not follows(held, offered, self.name):  # asks the database: never under the lock
                        os.fsync(descriptor)  # its writer may have been ended before it could
                        return
                with self._locked(), self._opened() as descriptor:
                    if self._newest(descriptor, offered.checkpoint.origin) == held:
                        self._append(descriptor, offered.note)
                        return
        raise SinkError(f"{self.name} is busy: other sealers keep writing to it", "it is tried again")

    def _append(self, descriptor: int, note: str) -> None:
        size = os.fstat(descriptor).st_size
        end = os.pread(descriptor, 2, max(0, size - 2))
        gap = b"" if size == 0 or end == b"\n\n" else b"\n" if end.endswith(b"\n") else b"\n\n"
        if gap:
            _log.warning(
                "phionyx-letta: %s ended in half a checkpoint (a writer was cut short); it is kept", self._file
            )
        _write_all(descriptor, gap + note.encode() + b"\n")
        os.fsync(descriptor)
        if size == 0:
            _sync_folder(self._folder)
            _sync_folder(self._folder.parent)
        self._look(descriptor)

    def _newest(self, descriptor: int, origin: str) -> Checkpoint | None:
        """Return the last checkpoint of the log in the file; only its end is read, as a rule."""
        self._look(descriptor)
        size = os.fstat(descriptor).st_size
        start = max(0, size - _TAIL_BYTES)
        tail = os.pread(descriptor, size - start, start)
        if start:  # what stands at the start of the window may be the half of something
            tail = tail.partition(b"\n\n")[2]
        for _, note, _ in reversed(list(notes_in(BytesIO(tail)))):
            found = self._held(note, origin)
            if found is not None:
                return found
        return self._last_of_all(origin) if start else None

    def _last_of_all(self, origin: str) -> Checkpoint | None:
        last = None
        with open(self._file, "rb") as file:
            for _, note, _ in notes_in(file):
                last = self._held(note, origin) or last
        return last

    def _held(self, note: bytes | None, origin: str) -> Checkpoint | None:
        """Return the checkpoint, if it is one of the log and signed by it."""
        if note is None or not note.startswith(origin.encode() + b"\n"):
            return None
        with contextlib.suppress(NoteError):
            return open_checkpoint(note, self._keys, origin=origin).checkpoint
        return None

    def _look(self, descriptor: int) -> None:
        """Notice a file that is shorter than it was, or another one; said once, then it is written to as it is.

        Raises:
            SinkConflict: it is.
        """
        status = os.fstat(descriptor)
        seen, self._seen = self._seen, (status.st_dev, status.st_ino, status.st_size)
        if seen is not None and (seen[:2] != self._seen[:2] or status.st_size < seen[2]):
            raise SinkConflict(
                f"{self._file} was cut or replaced since it was last written", "compare it with another copy"
            )

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self._file, flags, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SinkError(f"{self._file} is not a file", "choose another folder")
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self._folder / _LOCK, flags, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or self._file
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise SinkError(f"no space is left for {where}", "free some space; it is tried again") from error
            if error.errno == errno.ELOOP:
                raise SinkError(f"{where} is a symbolic link", "choose another folder") from error
            raise SinkError(
                f"{where} cannot be written: {error.strerror}", "choose a folder the server's user may write"
            ) from error


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
