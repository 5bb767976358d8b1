"""A memory file as the target of patches: read as strict UTF-8, written atomically, and only over what was read.

What is not text of ours stays as it is: mode, owner, byte order mark, line endings, final newline. The folder is locked while a
file in it is written, so that programs using this module never interleave; an editor takes no such lock, so where the system
can, the new file is exchanged with the old one and the old one is looked at once more (`renameat2`). What remains is an editor
that keeps the file open and writes into it in that very moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from phionyx_letta.diff import content_hash
from phionyx_letta.errors import DiffConflictError, TargetRefused

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["FileTarget", "locked_folder", "read_text", "write_text"]

BOM = b"\xef\xbb\xbf"
_READ = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_DIRECTORY", 0)
_MOST = (
    128 << 20
)  # of a file that is read: what is larger is no text for a prompt, and would fill the memory of this process
_PATIENCE = 60.0  # s
_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h


class FileTarget:
    """A `Target`: one file, under its real path."""

    def __init__(self, name: str, real: str) -> None:
        """Take the name a person uses and the real path, which holds no link."""
        self.name = name
        self.real = real

    @property
    def limit(self) -> int | None:
        """A file has none."""
        return None

    @property
    def records_itself(self) -> bool:
        """A file does not."""
        return False

    def notes(self) -> list[str]:
        """Nothing beside its text."""
        return []

    @property
    def identity(self) -> str:
        """`file:` and the real path."""
        return f"file:{self.real}"

    @property
    def label(self) -> str:
        """The file's name without its folders."""
        return os.path.basename(self.real)

    def read(self) -> str | None:
        """Return the text without its byte order mark, or None where there is no file.

        Raises:
            TargetRefused: it is not a regular file of UTF-8 text, or cannot be read.
        """
        with _translated(self.real):
            try:
                with _open_folder(os.path.dirname(self.real)) as folder:
                    found = _read(folder, self.real)
            except FileNotFoundError:
                return None
        return None if found is None else found[0]

    def write(self, expected: str | None, text: str, cause: Mapping[str, Any] | None = None) -> str | None:
        """Replace `expected` by `text`; None stands for no file. Missing folders are made. Its evidence is the caller's.

        Raises:
            DiffConflictError: it holds something else by now; nothing was written.
            TargetRefused: a link is in the way by now, it is read-only, or the disk refuses.
        """
        _write(self.real, text, expected=expected, compare=True)
        return None


def read_text(path: Path) -> str | None:
    """Return a file's text, or None where there is none.

    Raises:
        TargetRefused: it is not a regular file of UTF-8 text, or cannot be read.
    """
    return FileTarget(str(path), os.path.realpath(path)).read()


def write_text(path: Path, text: str, *, locked: bool = False) -> None:
    """Write a file atomically, keeping its mode and byte order mark; a new one is for its owner alone.

    Args:
        path: the file.
        text: its new text.
        locked: whether the caller holds the folder's lock.

    Raises:
        TargetRefused: it is read-only, or the disk refuses.
    """
    _write(os.path.realpath(path), text, expected=None, compare=False, locked=locked, mode=0o600)


@contextlib.contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Hold a folder's lock, the one that every write of this module takes; it is made if it is missing.

    Raises:
        TargetRefused: it cannot be made or opened.
    """
    real = os.path.realpath(path)
    with _translated(real):
        os.makedirs(real, exist_ok=True)
        descriptor = os.open(real, _FOLDER)
    try:
        _lock(descriptor, real)
        yield
    finally:
        os.close(descriptor)  # and so the lock is gone


def _lock(descriptor: int, real: str) -> None:
    """Wait for a folder's lock, but not for ever: any program can hold it."""
    end = time.monotonic() + _PATIENCE
    while fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise TargetRefused(
                    f"another program holds the lock of the folder of {real}", "try again when it has ended"
                ) from None
            time.sleep(0.01)


def _read(folder: int, real: str) -> tuple[str, os.stat_result, bool] | None:
    """Return text, state, and whether there is a byte order mark; None where there is no file."""
    try:
        descriptor = os.open(os.path.basename(real), _READ, dir_fd=folder)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise TargetRefused(f"{real} is not a regular file", "memory is kept in plain text files")
        data = file.read(_MOST + 1)
    if len(data) > _MOST:
        raise TargetRefused(f"{real} has more than {_MOST >> 20} MiB", "memory is kept in plain text files; split it")
    mark = data.startswith(BOM)
    try:
        text = data.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TargetRefused(
            f"{real} is not UTF-8 text (byte {error.start + len(BOM) * mark})",
            "convert it to UTF-8; it was left as it is",
        ) from None
    if "\0" in text:
        raise TargetRefused(f"{real} holds NUL bytes, so it is not text", "convert it to UTF-8; it was left as it is")
    return text, state, mark


def _write(
    real: str, text: str, *, expected: str | None, compare: bool, locked: bool = False, mode: int = 0o666
) -> None:
    name = os.path.basename(real)
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        raise TargetRefused(
            f"the new text of {real} cannot be written as UTF-8", "remove its lone surrogates"
        ) from None
    if "\0" in text:
        raise TargetRefused(f"the new text of {real} holds NUL bytes", "remove them: it would be no text any more")
    with _translated(real):
        os.makedirs(os.path.dirname(real), exist_ok=True)
        with _open_folder(os.path.dirname(real)) as folder:
            if not locked:
                _lock(folder, real)
            found = _read(folder, real)
            if compare and (found[0] if found else None) != expected:
                raise _conflict(real, expected, found[0] if found else None)
            if found and not found[1].st_mode & 0o222:
                raise TargetRefused(f"{real} is read-only", "chmod u+w it if patches may change it")
            whole = BOM + data if found and found[2] else data
            temporary = _written(folder, name, whole, found[1] if found else None, mode)
            try:
                if found is None:
                    _create(folder, temporary, name)
                else:
                    _replace(folder, temporary, name, real, found[0])
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=folder)
            os.fsync(folder)


def _written(folder: int, name: str, data: bytes, like: os.stat_result | None, mode: int) -> str:
    """Write a new file beside the old one, with its mode and, where allowed, its owner (else with `mode`); return its name."""
    temporary = f".{name[:180]}.{secrets.token_hex(6)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600 if like else mode, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if like is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(descriptor, like.st_uid, like.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(like.st_mode))
            os.fsync(descriptor)
    except BaseException:
        os.unlink(temporary, dir_fd=folder)
        raise
    return temporary


def _create(folder: int, temporary: str, name: str) -> None:
    """Give a new file its name; fails where somebody was faster."""
    try:
        os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        os.close(
            os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, dir_fd=folder)
        )  # no hard links here
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def _replace(folder: int, temporary: str, name: str, real: str, expected: str) -> None:
    """Put the new file in the old one's place; if the old one was edited meanwhile, put that back."""
    if not _exchange(folder, temporary, name):
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        return
    try:
        old = _read(folder, os.path.join(os.path.dirname(real), temporary))
    except TargetRefused:
        old = None
    if old is None or old[0] != expected:
        _exchange(folder, temporary, name)
        raise _conflict(real, expected, old[0] if old else None)


def _exchange(folder: int, one: str, other: str) -> bool:
    """Swap two names at once; False where this system or file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if rename(folder, os.fsencode(one), folder, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def _open_folder(path: str) -> Iterator[int]:
    """Open a real path's folder step by step, so that a link put in its way since is not followed."""
    descriptor = os.open("/", _FOLDER)
    try:
        for part in path.split("/"):
            if part:
                deeper = os.open(part, _FOLDER, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = deeper
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _translated(real: str) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise _conflict(real, None, "") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise TargetRefused(f"{real} is reached through a link, or through a file", "name the real file") from None
        raise TargetRefused(f"{real} cannot be used: {error.strerror}", "check its permissions and the disk") from None


def _conflict(real: str, expected: str | None, found: str | None) -> DiffConflictError:
    hashes = ("" if text is None else content_hash(text) for text in (expected, found))
    return DiffConflictError(real, *hashes)
