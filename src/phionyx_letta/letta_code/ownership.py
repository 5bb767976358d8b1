"""Why git does not read a memory: mostly because it belongs to somebody else, as where the ingest runs as another user."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from phionyx_letta.letta_code.errors import MemoryUnreadable

__all__ = ["unreadable"]


def unreadable(path: Path, why: str) -> MemoryUnreadable:
    """The error for a repository that git does not open (`safe.directory` of git-config)."""
    real = os.path.realpath(path)
    for one in (path, path / ".git"):
        try:
            owner = one.stat().st_uid
        except OSError:
            continue
        if owner != os.geteuid():
            return MemoryUnreadable(
                f"git refuses to read the repository {path}: it belongs to another user (number {owner})",
                f"allow it, as the user who runs this: git config --global --add safe.directory {shlex.quote(real)}",
            )
    return MemoryUnreadable(f"git cannot read the repository {path}: {why}", f"check it: git -C {path} fsck")
