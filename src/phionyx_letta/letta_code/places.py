"""Where Letta Code keeps the memories of its agents, as measured on 0.34.12; nothing of it is guessed where it is not as expected."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phionyx_letta.letta_code.errors import MemoryUnreadable
from phionyx_letta.letta_code.objects import Entry

__all__ = ["AgentMemory", "Home", "layout_of"]

_AGENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True)
class AgentMemory:
    """One agent's memory repository."""

    agent_id: str
    path: Path


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
        """The memory folders there are, each agent once: a local one before a checkout of the cloud's."""
        found: dict[str, AgentMemory] = {}
        for parent in (self.backend / "memfs", self.letta / "agents"):
            for folder in sorted(parent.glob("*/memory")):
                agent = folder.parent.name
                if folder.is_dir() and _AGENT.fullmatch(agent):
                    found.setdefault(agent, AgentMemory(agent, folder))
        return list(found.values())


def layout_of(tree: Mapping[bytes, Entry]) -> str:
    """`v2` with a root MEMORY.md, `v1` with a folder `system`, else `unknown`."""
    if b"MEMORY.md" in tree:
        return "v2"
    return "v1" if b"system" in tree and tree[b"system"].mode == "40000" else "unknown"
