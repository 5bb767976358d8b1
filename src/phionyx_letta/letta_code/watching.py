"""`code watch`: records memories when they change, and proposes from conversations that ended. Several at once do no harm."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from phionyx_letta.errors import PhionyxError, ProposerUnavailable
from phionyx_letta.letta_code.delivering import check_sinks, deliver_again
from phionyx_letta.letta_code.errors import MemoryUnreadable
from phionyx_letta.letta_code.hooks import Hooks
from phionyx_letta.letta_code.places import AgentMemory, Home
from phionyx_letta.letta_code.proposals import Proposals
from phionyx_letta.letta_code.queue import queue_path, read_notes
from phionyx_letta.letta_code.reading import open_regular
from phionyx_letta.letta_code.repository import MemoryRepository
from phionyx_letta.letta_code.rounds import Slow
from phionyx_letta.letta_code.sealing import Ingested, ingest, missing_memories, opened_ledger
from phionyx_letta.letta_code.sessions import Session, Sessions
from phionyx_letta.memory.patches import CODE_SESSION
from phionyx_letta.plugin.runtime import PluginKey
from phionyx_letta.settings import Settings

__all__ = ["Pass", "Watch"]

_log = logging.getLogger("phionyx_letta")
_NEVER: Any = object()

#: Everything is looked at again after so many passes, whatever the files say: a clock may stand still.
_FULL_EVERY = 150
#: And so is what could not be read.
_AGAIN_EVERY = 15
#: Branches of a memory that are looked at in between.
_MOST_BRANCHES = 100
_LONGEST_HEAD = 4096
#: The first and the longest pause after a checkpoint that a sink did not take, or a proposer that did not answer, s.
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0
_LAST_ANSWER = 5.0  # s that a question may go on when the service is told to end


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

        Raises:
            SettingsError: a sink that is set cannot be one.
        """
        check_sinks(key, settings)
        self._url, self._key, self._settings, self._home = url, key, settings, home
        self._proposer, self._idle = proposer, idle
        self._sessions = Sessions(home.backend, settings.home_path())
        self._known: dict[str, AgentMemory] = {}
        self._marks: dict[str, Any] = {}
        self._passes = 0
        self._failed: set[str] = set()
        self._missing = True  # those that went before, or while nothing could be recorded
        self._slow = Slow()
        self._ask_pause, self._ask_at = _FIRST_PAUSE, 0.0
        self._undelivered = bool(settings.sinks)  # not known: whoever ran before may have ended too early
        self._pause, self._again_at = _FIRST_PAUSE, 0.0

    def run(self, stop: threading.Event, poll: float, told: Callable[[Pass], None]) -> None:
        """Look every `poll` seconds until told to stop; an error is told and the next look tries again.

        A proposer is asked beside that: a long conversation is hundreds of questions, and a model may take minutes for one.
        """
        asked, errors = SimpleQueue[Pass](), list[str]()

        def ask() -> None:
            while not stop.is_set():
                asked.put(self.propose(stop))
                stop.wait(poll)

        asking = threading.Thread(target=ask, daemon=True)
        while not stop.is_set():
            found = self.record()
            if self._proposer is not None and asking.ident is None:
                asking.start()
            while not asked.empty():
                one = asked.get()
                found.patches += one.patches
                errors = one.errors
            found.errors += errors
            told(found)
            stop.wait(poll)
        if asking.ident is not None:
            asking.join(_LAST_ANSWER)  # what it does then is cut off, as by a kill, and done again by the next one

    def look(self) -> Pass:
        """Record what changed and propose from what ended. What goes wrong is told and tried again, whatever it is."""
        found = self.record()
        if self._proposer is not None:
            asked = self.propose(threading.Event())
            found.patches += asked.patches
            found.errors += asked.errors
        return found

    def record(self) -> Pass:
        """Record what changed."""
        found = Pass()
        with self._guarded(found, str(self._home.letta)) as whole:
            memories = self._home.memories()
            self._cover(memories, found)
            changed = self._changed(memories, found)
            if changed or self._missing or (self._undelivered and time.monotonic() >= self._again_at):
                self._record(changed, found)
            if self._undelivered:
                found.errors.append("not every sink took the newest checkpoint; it is offered again")
        if whole.error is not None:
            self._marks.clear()
            self._missing = True
        return found

    @contextmanager
    def _guarded(self, found: Pass, what: str) -> Iterator[_Guard]:
        """Tell any error of one thing, so that the others go on; one that should not be is logged as it came about."""
        guard = _Guard()
        try:
            yield guard
        except (PhionyxError, OSError) as error:
            guard.error = error
            found.errors.append(str(error) if what in str(error) else f"{what}: {error}")
        except Exception as error:
            guard.error = error
            found.errors.append(f"{what}: {type(error).__name__}: {error}; it is tried again")
            _log.exception("phionyx-letta: %s failed", what)

    def _cover(self, memories: Sequence[AgentMemory], found: Pass) -> None:
        hooks = Hooks(self._home, self._settings.home_path())
        if hooks.installed:
            for memory in memories:
                with self._guarded(found, _name(memory)):
                    hooks.cover([memory])

    def _record(self, changed: Sequence[AgentMemory], found: Pass) -> None:
        with opened_ledger(self._url) as ledger:
            changed = [*changed, *(missing_memories(ledger, self._key, self._home) if self._missing else [])]
            self._missing = False
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

    def _changed(self, memories: Sequence[AgentMemory], found: Pass) -> list[AgentMemory]:
        self._passes += 1
        if self._passes % _FULL_EVERY == 0:
            self._marks.clear()
        if self._passes % _AGAIN_EVERY == 0:
            for agent in self._failed:
                self._marks.pop(agent, None)
            self._failed.clear()
        marks: dict[str, Any] = {}
        for memory in memories:
            marks[memory.agent_id] = None
            with self._guarded(found, _name(memory)) as looked:
                marks[memory.agent_id] = _marks(memory.path)
            if looked.error is not None:
                self._failed.add(memory.agent_id)
        changed = [memory for memory in memories if self._marks.get(memory.agent_id, _NEVER) != marks[memory.agent_id]]
        self._marks = marks
        gone = [memory for agent, memory in self._known.items() if agent not in marks]
        self._known = {memory.agent_id: memory for memory in memories}
        return changed + gone

    def _proposed(self, session: Session, memory: AgentMemory) -> list[str]:
        proposals = Proposals(self._url, [memory], self._key.signer, proposer=self._proposer)
        asked = proposals.living.propose_from_session(
            f"{CODE_SESSION}{session.conversation}", session_records=session.records
        )
        return [patch.patch_id for patch in asyncio.run(asked)]

    def propose(self, stop: threading.Event) -> Pass:
        """Propose from what ended, until told to stop."""
        found = Pass()
        if time.monotonic() < self._ask_at:
            return found
        with self._guarded(found, str(self._home.letta)):
            ended = read_notes(queue_path(self._settings.home_path())).sessions
            known = self._known
            for session in self._sessions.finished(self._idle, ended):
                if stop.is_set():
                    break
                if session.agent_id not in known:
                    self._sessions.later(session)
                    continue
                memory = known[session.agent_id]
                with self._guarded(found, f"{_name(memory)}, conversation {session.conversation}") as asked:
                    found.patches += self._proposed(session, memory)
                    self._sessions.done(session)
                if asked.error is not None:
                    self._sessions.later(session)
                if isinstance(
                    asked.error, ProposerUnavailable
                ):  # it may be this conversation: then another one is next
                    self._ask_at = time.monotonic() + self._ask_pause
                    self._ask_pause = min(2 * self._ask_pause, _LONGEST_PAUSE)
                    break
                self._ask_pause = _FIRST_PAUSE
            found.errors += [f"{name}: {why}" for name, why in self._sessions.unknown.items()]
        return found


@dataclass
class _Guard:
    error: Exception | None = None


def _name(memory: AgentMemory) -> str:
    return f"{memory.agent_id} ({memory.path})"


def _marks(path: Path) -> list[tuple[int, int, int, int] | None]:
    """What changes when HEAD, its branch or a reflog does; times alone can be put back, but not that of the last change (ctime)."""
    try:
        repository = MemoryRepository(path)
        git, common = repository.git_dir, repository.common_dir
    except MemoryUnreadable:
        git = common = path / ".git"
    files = [
        path / ".git",
        git / "HEAD",
        git / "logs" / "HEAD",
        common / "packed-refs",
        common / "reftable/tables.list",
    ]
    for folder in (common / "refs" / "heads", common / "logs" / "refs" / "heads"):
        files += [folder, *_some_below(folder)]
    if branch := _branch(git):
        files += [common / branch, common / "logs" / branch]
    found: list[tuple[int, int, int, int] | None] = []
    for file in files:
        try:
            state = os.lstat(file)
            found.append((state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino))
        except (OSError, ValueError):
            found.append(None)
    return found


def _branch(git: Path) -> str | None:
    """The file of the branch HEAD stands for, which may lie deeper than the first branches do."""
    with suppress(OSError, ValueError), open_regular(git / "HEAD") as file:
        named = os.fsdecode(file.read(_LONGEST_HEAD)).strip().removeprefix("ref: ")
        return named if named.startswith("refs/") and ".." not in named else None
    return None


def _some_below(folder: Path) -> list[Path]:
    """None of a folder that cannot be listed: that is for the one who records it to tell."""
    try:
        with os.scandir(folder) as entries:
            return sorted(folder / one.name for one in islice(entries, _MOST_BRANCHES))
    except (OSError, ValueError):
        return []
