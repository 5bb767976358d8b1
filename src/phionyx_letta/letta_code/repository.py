"""One memory repository: where HEAD is, and what its reflogs say of where it was.

A reflog is written before its reference moves, under the reference's lock; so both are read until neither changed and no lock was
there, and then the log is complete up to the tip. Who can write to the repository can also write its logs: what they say is checked
against objects, and the tip decides.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Any

from phionyx_letta.ledger.log.git import GitRepository, is_repository
from phionyx_letta.letta_code.errors import MemoryUnreadable
from phionyx_letta.letta_code.objects import Objects
from phionyx_letta.letta_code.reading import open_regular

__all__ = ["HEAD_LOG", "LogEntry", "LogPlace", "LogRead", "MemoryRepository", "Snapshot"]

HEAD_LOG = "HEAD"
#: Of a name of any length only the commits are needed; git writes no `>` into one.
_ENTRY = re.compile(
    rb"([0-9a-f]{40}(?:[0-9a-f]{24})?) ([0-9a-f]{40}(?:[0-9a-f]{24})?) (?:[^>]*> (\d{1,12}) [+-]\d{4}(?:\t(.*))?)?"
)
_REF = re.compile(r"ref: (refs/[^\x00-\x20\x7f~^:?*\[\\]{1,1000})\n?")
_PIECE = 64 << 10  # of a line; what is longer is read in pieces, of which the first says what it is
#: Of a reflog that is read on, and of one that is searched for its place; what comes after it is skipped and told.
_MAX_READ = 32 << 20
#: As many lines as that can hold if each names two commits.
_MAX_LINES = 400_000
_TRIES, _PAUSE = 40, 0.025  # s: how long a reference may be moving


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line of a reflog: a move of a reference. All of it is a claim."""

    old: str | None
    new: str | None
    at: str
    """UTC, ISO 8601; empty where it is not told."""
    action: str
    """The message up to its first colon: `commit`, `commit (amend)`, `reset`, `merge letta/…`; what follows may be content."""


@dataclass(frozen=True, slots=True)
class LogPlace:
    """How far a reflog was read: the offset after the last line, its length and its hash, by which it is found again."""

    offset: int = 0
    length: int = 0
    digest: str = ""
    unparsed: int = 0
    """Lines before it that say nothing of any commit, which is not told yet."""
    skipped: int = 0
    """Bytes before it that were not read, since there are too many, which is not told yet."""

    @classmethod
    def of(cls, stored: Any) -> LogPlace:
        """From what `stored` gave."""
        offset, length, digest, *untold = stored
        return cls(int(offset), int(length), str(digest), *map(int, untold))

    def stored(self) -> list[Any]:
        """As JSON."""
        return [self.offset, self.length, self.digest, self.unparsed, self.skipped]

    def told(self) -> LogPlace:
        """The same, once it is told what was not read."""
        return replace(self, unparsed=0, skipped=0)


@dataclass(slots=True)
class LogRead:
    """What is new in a reflog."""

    entries: list[LogEntry] = field(default_factory=list)
    places: list[LogPlace] = field(default_factory=list)
    """After each entry."""
    end: LogPlace = LogPlace()
    """After the last line, whatever it says."""
    found: bool = True
    """False: the line read last is not in it any more, and `entries` are all there are."""
    exists: bool = True
    unreadable: bool = False
    """Something is there that is not read: a link, a pipe, or what nobody may read."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """HEAD and its logs at one moment."""

    tip: str | None
    """The commit; None where there is none yet."""
    ref: str
    """The branch HEAD stands for; empty where it is detached."""
    logs: dict[str, LogRead]
    """By name: `HEAD_LOG`, that of the branch, and that of the branch HEAD left."""


class MemoryRepository:
    """A folder with a git repository, opened for reading."""

    def __init__(self, path: Path) -> None:
        """Find the git directory by its files; no command is run.

        Raises:
            MemoryUnreadable: there is none.
        """
        self.path = path
        self.git = GitRepository(path)
        if not is_repository(path):
            raise MemoryUnreadable(f"there is no git repository at {path}", "check the path of the agent's memory")
        self.git_dir = _git_dir(path)
        self.common_dir = _common_dir(self.git_dir)

    def snapshot(self, objects: Objects, places: dict[str, LogPlace], left: str | None = None) -> Snapshot:
        """HEAD's commit and what its logs hold after `places`, as they stand together.

        Args:
            objects: of the repository.
            places: how far its logs are read.
            left: the branch HEAD stood for when they were: it may have moved on before HEAD left it.

        Raises:
            MemoryUnreadable: HEAD is neither a commit nor a branch, or git cannot read the repository.
        """
        for attempt in range(_TRIES):
            ref, tip = self._ref(), objects.head()
            names = list(dict.fromkeys([HEAD_LOG, *(name for name in (ref, left) if name)]))
            before = self._marks(names)
            logs = {name: self._log(name, places.get(name, LogPlace())) for name in names}
            quiet = not any(os.path.lexists(self._file(f"{name}.lock")) for name in names)
            still = self._marks(names) == before and self._ref() == ref and objects.head() == tip
            if still and (quiet or attempt == _TRIES - 1):  # a lock that stays was left by a git that was killed
                return Snapshot(tip, ref, logs)
            time.sleep(_PAUSE)
        raise MemoryUnreadable(f"{self.path} keeps changing while it is read", "it is tried again in the next run")

    def replaced(self, objects: Objects) -> list[str]:
        """The references under `refs/replace`: Letta Code reads with git, which puts what they name in the place of objects.

        Raises:
            StoreError: git cannot tell.
        """
        said = objects.git("for-each-ref", "--format=%(refname)=%(objectname)", "refs/replace/") or ""
        return said.split()

    def shallow(self) -> frozenset[str]:
        """The commits at which a shallow clone's history was cut off, as the repository claims."""
        data = _read(self.common_dir / "shallow", _MAX_READ) or b""
        return frozenset(data.decode("ascii", "replace").split())

    def _ref(self) -> str:
        head = self.git_dir / "HEAD"
        try:  # core.preferSymlinkRefs; git takes such a link for a branch by its text, and so it is not followed here
            text = f"ref: {os.readlink(head)}"
        except OSError:
            text = (_read(head, 4096) or b"").decode("utf-8", "replace")
        if re.fullmatch(r"[0-9a-f]{40}(?:[0-9a-f]{24})?\n?", text):
            return ""
        named = _REF.fullmatch(text)
        if named is None or ".." in named[1] or "//" in named[1]:
            raise MemoryUnreadable(
                f"HEAD of {self.path} is neither a commit nor a branch", f"check it: git -C {self.path} status"
            )
        return named[1]

    def _file(self, name: str) -> Path:
        return (self.git_dir if name.startswith(HEAD_LOG) else self.common_dir) / name

    def _marks(self, names: list[str]) -> list[tuple[int, int, int] | None]:
        return [_mark(self._log_file(name)) for name in names]

    def _log_file(self, name: str) -> Path:
        return (self.git_dir if name == HEAD_LOG else self.common_dir) / "logs" / name

    def _log(self, name: str, place: LogPlace) -> LogRead:
        path = self._log_file(name)
        try:
            opened = open_regular(path)
        except (OSError, ValueError):
            return LogRead(exists=False, found=not place.length, unreadable=os.path.lexists(path))
        with opened as file:
            start = _find(file, place)
            found = LogRead(found=start is not None, end=place if start is not None else LogPlace())
            at, end, unparsed = start or 0, b"", place.unparsed
            for offset, first, last in _lines(file, at):
                at, end = offset, last
                entry = _parsed(first)
                if entry is None:
                    unparsed += 1
                else:
                    found.entries.append(entry)
                    found.places.append(replace(_place(at, end), unparsed=unparsed, skipped=place.skipped))
            last_place, skipped = _place(at, end) if end else found.end, place.skipped
            size = os.fstat(file.fileno()).st_size
            if size - at > _PIECE:  # more than a line that is being written
                last_place = _last_place(file, size)
                skipped += last_place.offset - at
            if last_place.length:
                found.end = replace(last_place, unparsed=unparsed, skipped=skipped)
        return found


def _place(offset: int, last: bytes) -> LogPlace:
    return LogPlace(offset, len(last), hashlib.sha256(last).hexdigest())


def _last_place(file: BufferedReader, size: int) -> LogPlace:
    """After the last line of a log that is not read to its end, or after all of it where that line has no end in reach."""
    start = max(0, size - _PIECE)
    file.seek(start)
    tail = file.read(size - start)
    tail = tail[: tail.rfind(b"\n") + 1] or tail
    return _place(start + len(tail), tail[tail.rfind(b"\n", 0, -1) + 1 :])


def _find(file: BufferedReader, place: LogPlace) -> int | None:
    """Where to read on: after the line read last, wherever it stands by now (old lines expire); None if it is gone."""
    if not place.length:
        return 0
    file.seek(max(0, place.offset - place.length))
    if place.offset >= place.length and hashlib.sha256(file.read(place.length)).hexdigest() == place.digest:
        return place.offset
    for offset, _, last in _lines(file, 0):
        if len(last) == place.length and hashlib.sha256(last).hexdigest() == place.digest:
            return offset
    return None


def _lines(file: BufferedReader, start: int) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (offset after the line, its first piece, its last piece) of whole lines, until as much is read as is at once."""
    file.seek(start)
    offset, lines, first = start, 0, b""
    while offset - start < _MAX_READ and lines < _MAX_LINES and (piece := file.readline(_PIECE)):
        offset += len(piece)
        first = first or piece
        if piece.endswith(b"\n"):
            yield offset, first, piece
            first = b""
            lines += 1


def _parsed(line: bytes) -> LogEntry | None:
    match = _ENTRY.match(line.rstrip(b"\n"))
    if match is None:
        return None
    old, new, seconds, message = match.groups()
    action = (message or b"").partition(b":")[0][:200].decode("utf-8", "replace")
    try:
        at = datetime.fromtimestamp(int(seconds or b""), UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        at = ""
    return LogEntry(_real(old), _real(new), at, "".join(char if char.isprintable() else "?" for char in action))


def _real(oid: bytes) -> str | None:
    return None if not oid.strip(b"0") else oid.decode("ascii")


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read(path: Path, most: int) -> bytes | None:
    """The file's first bytes; None for what is no regular file (a named pipe would never end)."""
    with contextlib.suppress(OSError, ValueError), open_regular(path) as file:
        return file.read(most)
    return None


def _git_dir(path: Path) -> Path:
    """The git directory of a work tree, of a linked one too (its `.git` is a file that names it)."""
    dot = path / ".git"
    if not os.path.lexists(dot):
        return path
    named = _read(dot, 4096)
    if named is None or not named.startswith(b"gitdir: "):
        return dot
    if b"\0" in named:
        raise MemoryUnreadable(f"the file {dot} names no folder", "check it: it holds a NUL")
    return path / os.fsdecode(named[8:].strip())


def _common_dir(git_dir: Path) -> Path:
    named = _read(git_dir / "commondir", 4096)
    return git_dir / os.fsdecode(named.strip()) if named else git_dir
