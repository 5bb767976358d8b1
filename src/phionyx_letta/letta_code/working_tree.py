"""What of an agent's memory is not committed, and so neither in its prompt nor in the ledger.

The files are compared with HEAD byte by byte. `git status` is not asked: a repository can name programs for it to run.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phionyx_letta.letta_code.changes import file_name
from phionyx_letta.letta_code.errors import ObjectUnreadable, TooManyFiles
from phionyx_letta.letta_code.objects import SUBMODULE, SYMLINK, Entry, Objects
from phionyx_letta.letta_code.reading import open_regular
from phionyx_letta.letta_code.trees import changed_files

__all__ = ["committed_files", "differences", "uncommitted"]

#: Files that are looked at, and findings that are told.
_MOST, _TOLD = 20_000, 200
#: Bytes of a file that is compared, and of all; of files over `_SMALL` git is asked for the size first.
_LARGEST, _ALL, _SMALL = 64 << 20, 128 << 20, 64 << 10


def uncommitted(objects: Objects, path: Path, tip: str | None) -> list[dict[str, Any]]:
    """Return `{"path", "state"}` for each file that is not what HEAD has: modified, deleted, untracked, not_compared.

    Ignored files count as untracked. At most 200 are told, those that HEAD has first, and how many more there are.
    """
    try:
        found = differences(objects, path, committed_files(objects, tip))
    except (ObjectUnreadable, TooManyFiles) as error:
        return [{"path": "", "state": "not_compared", "why": error.message}]
    if len(found) <= _TOLD:
        return found
    first = sorted(found, key=lambda one: one["state"] == "untracked")[:_TOLD]
    return [*first, {"path": "", "state": "not_told", "why": f"{len(found) - _TOLD} more files"}]


def committed_files(objects: Objects, commit: str | None) -> dict[bytes, Entry]:
    """Every file of a commit, submodules and links included.

    Raises:
        ObjectUnreadable, TooManyFiles: they cannot be told.
    """
    tree = objects.commit(commit).tree if commit else None
    return {name: new for name, _, new in changed_files(objects, None, tree) if new is not None}


def differences(objects: Objects, path: Path, committed: Mapping[bytes, Entry]) -> list[dict[str, Any]]:
    """Every file below that is not what was committed, as `uncommitted` tells it; what it does not look at is `not_compared`."""
    root = os.fsencode(path)
    there, whole = _files(root, committed)
    lengths = {name: _length(os.path.join(root, name)) for name in there & committed.keys()}
    known = objects.sizes(committed[name].oid for name, length in lengths.items() if length > _SMALL)
    found, left = [], _ALL
    for name in sorted(committed.keys() | there):
        entry, length = committed.get(name), lengths.get(name, 0)
        if entry is None:
            state: str | None = "untracked"
        elif entry.mode == SUBMODULE:
            continue
        elif name not in there:
            state = "deleted"
        elif known.get(entry.oid, length) != length:
            state = "modified"
        elif length > min(left, _LARGEST):
            state = "not_compared"
        else:
            left -= length
            oid = _blob(os.path.join(root, name), entry, length)
            state = "not_compared" if oid is None else None if oid == entry.oid else "modified"
        if state is not None:
            found.append({"path": file_name(name), "state": state})
    if not whole:
        found.append({"path": "", "state": "not_compared", "why": f"there are more than {_MOST} files"})
    return found


def _length(path: bytes) -> int:
    """Bytes of a regular file; 0 of anything else."""
    try:
        found = os.lstat(path)
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _files(root: bytes, committed: Mapping[bytes, Entry]) -> tuple[set[bytes], bool]:
    """Every file below, links included, by its path; and whether these are all."""
    submodules = {name for name, entry in committed.items() if entry.mode == SUBMODULE}
    found: set[bytes] = set()
    folders = [b""]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(os.path.join(root, folder)) as entries:
                for entry in entries:
                    name = folder + entry.name
                    if entry.name == b".git" or name in submodules:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(name + b"/")
                    elif entry.is_symlink() or entry.is_file(follow_symlinks=False) or name in committed:
                        found.add(name)  # pipes, sockets and devices are no files to git
                    if len(found) + len(folders) > _MOST:
                        return found, False
        except OSError:
            continue
    return found, True


def _blob(path: bytes, entry: Entry, length: int) -> str | None:
    """The object id the file would have; None if it cannot be told, or is no file of this length any more."""
    digest = hashlib.sha1(usedforsecurity=False) if len(entry.oid) == 40 else hashlib.sha256()
    try:
        if stat.S_ISLNK(os.lstat(path).st_mode):
            if entry.mode != SYMLINK:
                return ""
            target = os.readlink(path)
            digest.update(b"blob %d\0" % len(target) + target)
            return digest.hexdigest()
        if entry.mode == SYMLINK:
            return ""
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size != length:
                return None
            digest.update(b"blob %d\0" % length)
            while length and (piece := file.read(min(length, 1 << 18))):
                digest.update(piece)
                length -= len(piece)
    except OSError:
        return None
    return digest.hexdigest()
