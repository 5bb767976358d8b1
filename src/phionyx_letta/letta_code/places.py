"""Where Letta Code keeps the memories of its agents, as measured on 0.34.12; nothing of it is guessed where it is not as expected."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from phionyx_letta.letta_code.errors import MemoryUnreadable
from phionyx_letta.letta_code.objects import Entry

__all__ = ["AgentMemory", "Home", "layout_of"]


@dataclass(frozen=True)
class AgentMemory:
    """One agent's memory repository."""

    agent_id: str
    path: Path
    others: tuple[Path, ...] = ()
    """More folders that would be this agent's memory. Which one its prompt is made of only Letta Code knows."""

    def recorded_at(self, path: str) -> Path:
        """The folder to look at: of several the one that was recorded before, so that none can be put in its place."""
        return next((one for one in self.others if str(one) == path), self.path)


@dataclass(frozen=True)
class Home:
    """The folders of one user's Letta Code."""

    letta: Path
    backend: Path

    @classmethod
    def find(cls, folder: Path | None = None, environment: Mapping[str, str] = os.environ) -> Home:
        """The given folder, else ``~/.letta``; the local backend in it unless LETTA_LOCAL_BACKEND_DIR says otherwise.

        Raises:
            MemoryUnreadable: no home directory is known.
        """
        try:
            letta = folder or Path.home() / ".letta"
        except RuntimeError:
            raise MemoryUnreadable("no home directory is known for this user", "give --letta-dir") from None
        backend = environment.get("LETTA_LOCAL_BACKEND_DIR") if folder is None else None
        return cls(letta, Path(backend) if backend else letta / "lc-local-backend")

    def memories(self) -> list[AgentMemory]:
        """The memories there are, each agent once: a local one before a checkout of the cloud's."""
        found: dict[str, list[Path]] = {}
        for parent in self._parents:
            for name in _names(parent):
                folder = parent / name / "memory"
                if os.path.lexists(folder):  # a link to nowhere too: reading it tells what is wrong
                    found.setdefault(quote(os.fsencode(name), safe=""), []).append(folder)  # no name is left out
        return [AgentMemory(agent, first, tuple(others)) for agent, (first, *others) in found.items()]

    def holds(self, path: Path) -> bool:
        """Whether a folder is where a memory of this Letta Code is, or was."""
        return path.parent.parent in self._parents

    @property
    def _parents(self) -> tuple[Path, Path]:
        return self.backend / "memfs", self.letta / "agents"


def _names(parent: Path) -> list[str]:
    try:
        return sorted(os.listdir(parent))
    except OSError:
        return []


def layout_of(tree: Mapping[bytes, Entry]) -> str:
    """`v2` with a root MEMORY.md, `v1` with a folder `system`, else `unknown`."""
    if b"MEMORY.md" in tree:
        return "v2"
    return "v1" if b"system" in tree and tree[b"system"].mode == "40000" else "unknown"
