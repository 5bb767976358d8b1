"""Whether two agents' memories are one git repository: a link can make another agent's memory pass for one's own."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from phionyx_letta.letta_code.cursor import Cursor
from phionyx_letta.letta_code.errors import MemoryUnreadable
from phionyx_letta.letta_code.repository import MemoryRepository

__all__ = ["owners"]

Memory = tuple[str, Path]
"""An agent, and its memory's folder."""


def owners(memories: Sequence[Memory], cursors: Mapping[str, Cursor]) -> dict[str, Memory]:
    """Agents whose memory is another agent's repository, each with that one.

    It is the agent's in whose folder it lies; else of the only one that was recorded there; else of none of them, since each could
    have linked to it. Who is named now at a folder takes the place of who was recorded at that very folder.

    Args:
        memories: that are about to be recorded.
        cursors: what the ledger knows of agents, these and others.
    """
    here = platform.node()
    named, folders = {agent for agent, _ in memories}, {path for _, path in memories}
    known = [(agent, Path(one.path)) for agent, one in sorted(cursors.items()) if one.host == here and one.path]
    recorded = [(agent, path) for agent, path in known if agent in named or path not in folders]
    groups: dict[tuple[int, int], list[Memory]] = {}
    for memory in dict.fromkeys([*memories, *recorded]):
        if (found := _identity(memory[1])) is not None:
            groups.setdefault(found, []).append(memory)
    refused = {}

    def rank(one: Memory) -> tuple[bool, bool]:
        return not _lies_within(one[1]), one not in recorded

    for group in groups.values():
        first = min(group, key=rank)
        others = sorted((one for one in group if one[0] != first[0]), key=rank)
        refused.update({agent: first for agent, _ in others})
        if others and not _lies_within(first[1]) and rank(others[0]) == rank(first):
            refused[first[0]] = others[0]
    return {agent: refused[agent] for agent, _ in memories if agent in refused}


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of the folder with branches and objects, which work trees of one repository share."""
    try:
        found = os.stat(MemoryRepository(path).common_dir)
    except (MemoryUnreadable, OSError, ValueError):
        return None  # recording it tells what is wrong
    return found.st_dev, found.st_ino


def _lies_within(path: Path) -> bool:
    """Whether the repository is in its agent's own folder, and not by way of a link."""
    folder = os.path.join(os.path.realpath(path.parent.parent), path.parent.name)
    try:
        real = os.path.realpath(MemoryRepository(path).common_dir)
    except (MemoryUnreadable, OSError, ValueError):
        return False
    return os.path.commonpath([folder, real]) == folder
