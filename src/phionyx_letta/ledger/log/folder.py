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
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.errors import SinkConflict, SinkError
from phionyx_letta.ledger.log.paragraphs import FILE, notes_in
from phionyx_letta.ledger.log.sink import Published, follows, largest
from phionyx_letta.notes import MAX_BYTES

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["FolderSink"]

_LOCK = f".{FILE}.lock"
_LOCK_SECONDS = 5.0
_AGAIN_BYTES = 8_192  # read again, in case that the end was half-written when it was read first
_BUFFER = 262_144
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
        self._read: dict[str, tuple[int, Checkpoint | None]] = {}  # by origin: how far, and the largest until there
        self._known: dict[str, Checkpoint] = {}  # the largest it ever had, even if it was cut since
        self.name = f"folder {self._folder}"

    def deliver(self, offered: Published, /) -> None:
        """Append the checkpoint, unless the file has one that it leads to; it is durable on return.

        Raises:
            SinkConflict: the file's largest checkpoint and the log do not agree, or the file was cut or replaced.
            SinkError: it cannot be written.
        """
        origin = offered.checkpoint.origin
        with self._translated():
            self._folder.mkdir(parents=True, exist_ok=True)
            for _ in range(_TRIES):
                with self._opened() as file:
                    held = self._largest(file, origin)
                    if self._known.get(origin) != held:
                        follows(self._known.get(origin), offered, self.name)
                    if not follows(held, offered, self.name):  # asks the database, so not under the lock
                        os.fsync(file)  # its writer may have been ended before it could
                        return
                with self._locked(), self._opened() as file:
                    if self._largest(file, origin) == held:
                        self._append(file, offered.note)
                        self._known[origin] = offered.checkpoint
                        return
        raise SinkError(f"{self.name} is busy: other sealers keep writing to it", "it is tried again")

    def _append(self, file: BinaryIO, note: str) -> None:
        descriptor = file.fileno()
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

    def _largest(self, file: BinaryIO, origin: str) -> Checkpoint | None:
        """Return the file's largest checkpoint of the log; what was read before is not read again."""
        self._look(file.fileno())
        read, held = self._read.get(origin, (0, None))
        start = max(0, read - _AGAIN_BYTES)
        file.seek(start)
        if start:  # the half of something may stand here
            while file.readline(MAX_BYTES) not in (b"\n", b""):
                continue
        held = largest((note for _, note, _ in notes_in(file)), origin, self._keys, held)
        self._read[origin] = file.tell(), held
        if held is not None and (origin not in self._known or held.size > self._known[origin].size):
            self._known[origin] = held
        return held

    def _look(self, descriptor: int) -> None:
        """Notice a file that is shorter than it was, or another one; said once, then it is written to as it is.

        Raises:
            SinkConflict: it is.
        """
        status = os.fstat(descriptor)
        seen, self._seen = self._seen, (status.st_dev, status.st_ino, status.st_size)
        if seen is not None and (seen[:2] != self._seen[:2] or status.st_size < seen[2]):
            self._read.clear()
            raise SinkConflict(
                f"{self._file} was cut or replaced since it was last written", "compare it with another copy"
            )

    @contextlib.contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(self._file, flags, 0o644), "rb", buffering=_BUFFER) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise SinkError(f"{self._file} is not a file", "choose another folder")
            yield file

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self._folder / _LOCK, flags, 0o644)
        try:
            _wait_for(lock, self.name)
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


def _wait_for(lock: int, name: str) -> None:
    """Take the lock, but not wait for ever: whoever can open the file could hold it."""
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise SinkError(
                    f"{name} is locked by another process", "find out who holds it: it is tried again"
                ) from None
            time.sleep(0.01)
        else:
            return


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
