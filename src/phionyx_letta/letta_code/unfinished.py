"""A note of a commit of ours whose work file and index entry may not have followed yet, for the next run.

It lies in PHIONYX_LETTA_HOME, not in the memory's repository: what it says is done to the work tree, so the agent must not be able to
write it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from dataclasses import astuple, dataclass
from pathlib import Path

from phionyx_letta.errors import TargetRefused
from phionyx_letta.letta_code.git_hooks import write_whole
from phionyx_letta.letta_code.reading import open_regular
from phionyx_letta.settings import load_settings

__all__ = ["Note", "Unfinished"]

#: A note that led to no commit in this time leads to none, s.
_STALE = 600.0
_LARGEST = 1 << 16
_OID = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


@dataclass(frozen=True, slots=True)
class Note:
    """What work file and index entry are to become: written before HEAD moves, removed when they have."""

    path: str
    mode: str
    old: str | None
    new: str


class Unfinished:
    """The note of one memory."""

    def __init__(self, memory: Path) -> None:
        """Take the memory's folder.

        Raises:
            SettingsError: PHIONYX_LETTA_HOME is not set and no home directory is known.
        """
        name = hashlib.sha256(os.fsencode(os.path.realpath(memory))).hexdigest()
        self._file = load_settings().home_path() / "code" / "unfinished" / name

    def write(self, note: Note) -> None:
        """Put it there, durable on return.

        Raises:
            TargetRefused: it cannot be written.
        """
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self._file, json.dumps(astuple(note)).encode(), 0o600)
        except OSError as error:
            raise TargetRefused(f"{self._file} cannot be written: {error.strerror}", "check it and the disk") from error

    def read(self) -> Note | None:
        """None where there is none, or where it is none of ours."""
        try:
            with open_regular(self._file) as file:
                path, mode, old, new = json.loads(file.read(_LARGEST))
        except (OSError, ValueError, RecursionError, TypeError):
            return None
        if not all(isinstance(one, str) for one in (path, mode, new)) or not isinstance(old, str | None):
            return None
        if not _OID.fullmatch(new) or (old is not None and not _OID.fullmatch(old)) or not _inside(path):
            return None
        return Note(path, mode, old, new)

    @property
    def stale(self) -> bool:
        """Whether it is too old to lead to a commit any more."""
        return time.time() - self._file.lstat().st_mtime > _STALE

    def remove(self) -> None:
        """Take it away."""
        with contextlib.suppress(FileNotFoundError):
            self._file.unlink()


def _inside(path: str) -> bool:
    """Whether it is a path below the memory, in its plain form."""
    parts = path.split("/")
    return not {"", ".", "..", ".git"} & set(parts) and not re.search("[\0\ud800-\udfff]", path)
