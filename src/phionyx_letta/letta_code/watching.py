"""`code watch`: records memories when they change, and proposes from conversations that ended. Several at once do no harm."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from phionyx_letta.errors import PhionyxError, ProposerUnavailable
from phionyx_letta.letta_code.delivering import deliver_again
from phionyx_letta.letta_code.hooks import Hooks
from phionyx_letta.letta_code.places import AgentMemory, Home
from phionyx_letta.letta_code.proposals import Proposals
from phionyx_letta.letta_code.queue import queue_path, read_notes
from phionyx_letta.letta_code.rounds import Slow
from phionyx_letta.letta_code.sealing import Ingested, ingest, missing_memories, opened_ledger
from phionyx_letta.letta_code.sessions import Sessions
from phionyx_letta.plugin.runtime import PluginKey
from phionyx_letta.settings import Settings

__all__ = ["Pass", "Watch"]

#: Everything is looked at again after so many passes, whatever the files say: a clock may stand still.
_FULL_EVERY = 150
#: And so is what could not be read.
_AGAIN_EVERY = 15
#: Branches of a memory that are looked at in between.
_MOST_BRANCHES = 100
#: The first and the longest pause after a checkpoint that a sink did not take, s.
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0


@dataclass
class Pass:
    """What one look did."""

    ingested: Ingested | None = None
    patches: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Watch:
    """Looks again and again."""

    def __init__(
        self, url: str, key: PluginKey, settings: Settings, home: Home, *, proposer: Any = None, idle: float = 600
    ) -> None:
        """Take the ledger's URL, the key, and Letta Code's folders.

        Args:
            url: of the ledger; patches are kept in it too.
            key: signs.
            settings: of PHIONYX_LETTA_*.
            home: Letta Code's folders.
            proposer: asked about conversations that ended; None for nobody.
            idle: how long nothing happens in a conversation before it counts as ended, s.
        """
        self._url, self._key, self._settings, self._home = url, key, settings, home
        self._proposer, self._idle = proposer, idle
        self._sessions = Sessions(home.backend, settings.home_path())
        self._known: dict[str, AgentMemory] = {}
        self._marks: dict[str, Any] = {}
        self._passes = 0
        self._failed: set[str] = set()
        self._slow = Slow()
        self._undelivered = bool(settings.sinks)  # not known: whoever ran before may have ended too early
        self._pause, self._again_at = _FIRST_PAUSE, 0.0

    def run(self, stop: threading.Event, poll: float, told: Callable[[Pass], None]) -> None:
        """Look every `poll` seconds until told to stop; an error is told and the next look tries again."""
        while not stop.is_set():
            told(self.look())
            stop.wait(poll)

    def look(self) -> Pass:
        """Record what changed and propose from what ended."""
        found = Pass()
        try:
            memories = self._home.memories()
            hooks = Hooks(self._home, self._settings.home_path())
            if hooks.installed:
                hooks.cover(memories)
            changed = self._changed(memories)
            if changed or self._passes == 1 or (self._undelivered and time.monotonic() >= self._again_at):
                self._record(changed, found)
            if self._undelivered:
                found.errors.append("not every sink took the newest checkpoint; it is offered again")
            if self._proposer is not None:
                self._propose(memories, found)
        except (PhionyxError, OSError) as error:
            self._marks.clear()
            found.errors.append(str(error))
        return found

    def _record(self, changed: Sequence[AgentMemory], found: Pass) -> None:
        with opened_ledger(self._url) as ledger:
            changed = [*changed, *(missing_memories(ledger, self._key, self._home) if self._passes == 1 else [])]
            if changed:
                found.ingested = ingest(ledger, self._key, self._settings, changed, slow=self._slow)
                for agent in found.ingested.unfinished:  # goes on in the next look
                    self._marks.pop(agent, None)
                found.errors += [problem["what"] for problem in found.ingested.problems]
                self._failed |= {problem["agent_id"] for problem in found.ingested.problems}
            delivered = found.ingested.delivered if found.ingested is not None else None
            if delivered is None and self._undelivered and time.monotonic() >= self._again_at:
                delivered = deliver_again(ledger, self._key, self._settings) is not False
        if delivered is not None:
            self._undelivered = not delivered
            self._again_at = time.monotonic() + self._pause
            self._pause = _FIRST_PAUSE if delivered else min(2 * self._pause, _LONGEST_PAUSE)

    def _changed(self, memories: Sequence[AgentMemory]) -> list[AgentMemory]:
        self._passes += 1
        if self._passes % _FULL_EVERY == 0:
            self._marks.clear()
        if self._passes % _AGAIN_EVERY == 0:
            for agent in self._failed:
                self._marks.pop(agent, None)
            self._failed.clear()
        marks = {memory.agent_id: _marks(memory.path) for memory in memories}
        changed = [memory for memory in memories if self._marks.get(memory.agent_id) != marks[memory.agent_id]]
        self._marks = marks
        gone = [memory for agent, memory in self._known.items() if agent not in marks]
        self._known = {memory.agent_id: memory for memory in memories}
        return changed + gone

    def _propose(self, memories: Sequence[AgentMemory], found: Pass) -> None:
        ended = {conversation for _, conversation in read_notes(queue_path(self._settings.home_path())).sessions}
        known = {memory.agent_id: memory for memory in memories}
        for session in self._sessions.finished(self._idle, ended):
            if session.agent_id not in known:
                continue
            proposals = Proposals(self._url, [known[session.agent_id]], self._key.signer, proposer=self._proposer)
            try:
                patches = asyncio.run(
                    proposals.living.propose_from_session(
                        f"letta-code:{session.conversation}", session_records=session.records
                    )
                )
            except ProposerUnavailable as error:
                found.errors.append(str(error))
                return
            found.patches += [patch.patch_id for patch in patches]
            self._sessions.done(session)
        found.errors += [f"{name}: {why}" for name, why in self._sessions.unknown.items()]


def _marks(path: Path) -> list[tuple[int, int, int] | None]:
    """What changes when HEAD, its branch or a reflog does."""
    git = path / ".git"
    found: list[tuple[int, int, int] | None] = []
    for name in ("HEAD", "logs/HEAD", "packed-refs", "refs/heads", "logs/refs/heads"):
        one = git / name
        for file in [one, *(_some_below(one) if name.endswith("heads") else [])]:
            try:
                state = os.lstat(file)
                found.append((state.st_mtime_ns, state.st_size, state.st_ino))
            except (OSError, ValueError):
                found.append(None)
    return found


def _some_below(folder: Path) -> list[Path]:
    """None of a folder that cannot be listed: that is for the one who records it to tell."""
    try:
        with os.scandir(folder) as entries:
            return sorted(folder / one.name for one in islice(entries, _MOST_BRANCHES))
    except (OSError, ValueError):
        return []
