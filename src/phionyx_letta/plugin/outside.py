"""The newest checkpoint that was brought outside the database, for guarded reads: from the sinks this machine can read.

A folder's file is looked at whenever it changed; a git repository every second, since git takes milliseconds to answer.
Webhooks and witnesses cannot be asked.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.errors import PhionyxError
from phionyx_letta.ledger.log.git import BRANCH, GitRepository
from phionyx_letta.ledger.log.paragraphs import FILE, notes_in
from phionyx_letta.ledger.log.sink import largest
from phionyx_letta.notes import MAX_BYTES

__all__ = ["OutsideCheckpoints"]

_GIT_INTERVAL = 1.0
_AGAIN_BYTES = 8_192  # read again, in case that the end was half-written when it was read first

_log = logging.getLogger("phionyx_letta")


class OutsideCheckpoints:
    """Reads the sinks that are named in ``PHIONYX_LETTA_SINKS``; knows the largest checkpoint it ever saw."""

    def __init__(self, sinks: str, origin: str, public_keys: Sequence[str]) -> None:
        """Read nothing yet.

        Args:
            sinks: as in the setting.
            origin: of the log.
            public_keys: of the log, each as 64 hex digits.
        """
        names = [name.partition(":") for name in sinks.split()]
        self._folders = [Path(rest) / FILE for kind, _, rest in names if kind == "folder"]
        self._repositories = [rest for kind, _, rest in names if kind == "git"]
        self._origin = origin
        self._keys = tuple(public_keys)
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._offsets: dict[str, int] = {}
        self._tips: dict[str, str] = {}
        self._git_at = float("-inf")
        self._held: Checkpoint | None = None
        self.problem: str | None = None
        """Why a sink could not be read when it was last tried; None if all could."""

    @property
    def any(self) -> bool:
        """Whether there is a sink that can be read."""
        return bool(self._folders or self._repositories)

    def newest(self) -> Checkpoint | None:
        """The largest signed checkpoint of the log that is or was outside; costs a ``stat`` where nothing changed."""
        for file in self._folders:
            self._look(file)
        return self._held

    def ask_repositories(self) -> None:
        """Ask the git repositories, at most once a second: for a thread of its own, not for a reader."""
        if time.monotonic() - self._git_at < _GIT_INTERVAL:
            return
        self._git_at = time.monotonic()
        for path in self._repositories:
            try:
                repository = GitRepository(path)
                tip = repository.tip(BRANCH)
                if tip is None or tip == self._tips.get(path):
                    continue
                notes = (note for _, note, _ in repository.notes(BRANCH, after=self._tips.get(path)))
                found = largest(notes, self._origin, self._keys, self._held)
                with self._lock:
                    self._tips[path] = tip
                    self._hold(found)
            except (PhionyxError, OSError) as error:
                self._tips.pop(path, None)  # it may have been set back: all of it is read again
                self._report(f"the git repository {path} cannot be read: {error}")

    def _look(self, file: Path) -> None:
        try:
            status = os.stat(file)
        except FileNotFoundError:
            return  # nothing was delivered yet
        except OSError as error:
            self._report(f"{file} cannot be read: {error.strerror}")
            return
        key = (status.st_ino, status.st_size, status.st_mtime_ns)
        name = str(file)
        if self._seen.get(name) == key:
            return
        with self._lock:
            try:
                self._read(file, name, status.st_size)
                self._seen[name] = key
            except OSError as error:
                self._report(f"{file} cannot be read: {error.strerror}")

    def _read(self, file: Path, name: str, size: int) -> None:
        known = self._offsets.get(name, 0)
        start = max(0, known - _AGAIN_BYTES) if size >= known else 0
        with open(file, "rb") as source:
            source.seek(start)
            if start:  # the half of something may stand here
                while source.readline(MAX_BYTES) not in (b"\n", b""):
                    continue
            self._hold(largest((note for _, note, _ in notes_in(source)), self._origin, self._keys, self._held))
            self._offsets[name] = source.tell()
        self.problem = None

    def _hold(self, found: Checkpoint | None) -> None:
        if found is not None and (self._held is None or found.size > self._held.size):
            self._held = found

    def _report(self, problem: str) -> None:
        if problem != self.problem:
            _log.error("phionyx-letta: checkpoints from outside: %s", problem)
        self.problem = problem
