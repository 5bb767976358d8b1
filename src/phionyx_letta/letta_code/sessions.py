"""Finished conversations of Letta Code, from the transcripts its local backend writes in every mode (measured on 0.34.12).

A conversation is finished when nothing was added to its transcript for a while, or when a hook noted its end, which happens only
with a terminal. Which part of it was proposed from is remembered, so it may be taken up again later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phionyx_letta.letta_code.errors import MemoryUnreadable
from phionyx_letta.letta_code.git_hooks import write_whole
from phionyx_letta.letta_code.reading import open_regular

__all__ = ["Session", "Sessions"]

_VERSION = 3
_LARGEST = 32 << 20
_MOST_AT_ONCE = 64 << 20  # of all transcripts that are read in one look; the others have their turn in the next
#: What is added so long after its end was noted belongs to it, s.
_LATE = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 30.0, 3600.0  # s
_REMINDER = "<system-reminder>"
_ROLES = {"user": "user", "assistant": "assistant", "toolResult": "tool", "system": "system"}


@dataclass(frozen=True)
class Session:
    """One finished conversation, or the part of it that is new."""

    conversation: str
    agent_id: str
    records: list[dict[str, Any]]
    folder: str
    size: int


class Sessions:
    """The transcripts below one local backend."""

    def __init__(self, backend: Path, own_home: Path) -> None:
        """Take the backend's folder, and PHIONYX_LETTA_HOME for what is remembered."""
        self._folder = backend / "conversations"
        self._memory = own_home / "code" / "sessions.json"
        #: Conversations are numbered, so that those of another Letta Code have the same names.
        self._prefix = hashlib.sha256(os.fsencode(backend.absolute())).hexdigest()[:16] + "/"
        self.unknown: dict[str, str] = {}
        """Transcripts that are not read, and why: of another version of Letta Code, or too large."""
        self._looked: dict[str, tuple[int, int, frozenset[tuple[str, str]]]] = {}
        """How those were when they were read: they are not read again before they change."""
        self._later: dict[str, tuple[float, float]] = {}
        """When those are read again that were not proposed from, and the pause before that, s."""
        self._unsaved: dict[str, int] = {}

    def finished(self, idle: float, ended: Mapping[tuple[str, str], float]) -> Iterator[Session]:
        """Yield each conversation with something new that came to its end.

        Args:
            idle: how long nothing is added to a conversation that ended, s.
            ended: (agent, conversation) whose end was noted, and when: it may go on after that.
        """
        done, left = self._done(), _MOST_AT_ONCE
        self.unknown = {name: why for name, why in self.unknown.items() if (self._folder / name).exists()}
        for path in sorted(self._folder.glob("*/messages.jsonl")):
            folder = path.parent.name
            with contextlib.suppress(OSError):
                found, start = path.lstat(), done.get(folder, 0)
                if not stat.S_ISREG(found.st_mode) or found.st_size in (0, start):
                    continue
                idling = time.time() - found.st_mtime >= idle
                over = frozenset(who for who, at in ended.items() if not idling and found.st_mtime <= at + _LATE)
                state = (found.st_size, found.st_mtime_ns, over)
                waits = time.monotonic() < self._later.get(folder, (0.0, 0.0))[0]
                if waits or not (idling or over) or self._looked.get(folder) == state:
                    continue
                if found.st_size > _LARGEST:
                    self.unknown[folder] = f"a transcript has more than {_LARGEST >> 20} MiB"
                    continue
                if found.st_size > left:
                    continue
                left -= found.st_size
                self._looked[folder] = state  # nothing is new in it, or it is proposed from
                session = self._read(path, start if start < found.st_size else 0)  # else it was written anew
                if session is not None and (idling or (session.agent_id, session.conversation) in over):
                    yield session

    def later(self, session: Session) -> None:
        """It was not proposed from: it is read again after a while, each time a longer one."""
        _, pause = self._later.get(session.folder, (0.0, _FIRST_PAUSE / 2))
        pause = min(2 * pause, _LONGEST_PAUSE)
        self._later[session.folder] = time.monotonic() + pause, pause
        self._looked.pop(session.folder, None)

    def done(self, session: Session) -> None:
        """Remember that a conversation was proposed from, up to here.

        Raises:
            OSError: it cannot be written down; until this process ends it is remembered all the same.
        """
        self._later.pop(session.folder, None)
        self._unsaved[session.folder] = session.size
        kept = {**self._kept(), **{self._prefix + folder: size for folder, size in self._unsaved.items()}}
        self._memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(self._memory, json.dumps(kept).encode(), 0o600)
        self._unsaved.clear()

    def _done(self) -> dict[str, int]:
        """By folder, how much of its transcript was proposed from."""
        kept = {
            name.removeprefix(self._prefix): size
            for name, size in self._kept().items()
            if name.startswith(self._prefix)
        }
        return {**kept, **self._unsaved}

    def _kept(self) -> dict[str, int]:
        with contextlib.suppress(OSError, ValueError, RecursionError), open_regular(self._memory) as file:
            found = json.loads(file.read(_LARGEST))
            if isinstance(found, dict):
                return {str(name): size for name, size in found.items() if isinstance(size, int)}
        return {}

    def _read(self, path: Path, start: int) -> Session | None:
        with open_regular(path) as file:
            data = file.read(_LARGEST)
        try:
            conversation, agent, records = _records(data, start)
        except MemoryUnreadable as error:
            self.unknown[path.parent.name] = error.message
            return None
        self.unknown.pop(path.parent.name, None)
        return Session(conversation, agent, records, path.parent.name, len(data)) if records else None


def _records(data: bytes, start: int) -> tuple[str, str, list[dict[str, Any]]]:
    """Conversation, agent, and the messages that begin after `start` bytes.

    Raises:
        MemoryUnreadable: the form is not the one of version 3.
    """
    conversation, agent, records, offset = "", "", list[dict[str, Any]](), 0
    for number, line in enumerate(data.splitlines(keepends=True)):
        offset += len(line)
        if not line.endswith(b"\n"):
            break  # it is being written
        try:
            said = json.loads(line)
            kind, version = said["type"], said.get("version")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise MemoryUnreadable(f"line {number + 1} of a transcript is in an unknown form") from None
        if number == 0:
            if kind != "session" or version != _VERSION:
                raise MemoryUnreadable(f"a transcript is of version {str(version)[:20]}, and {_VERSION} is known")
            conversation = str(said.get("id", ""))
        elif kind == "message" and isinstance(message := said.get("message"), dict):
            metadata = message.get("metadata")
            agent = str(metadata.get("agent_id", agent)) if isinstance(metadata, dict) else agent
            if offset > start:
                records += _parts(message, str(said.get("id", "")))
    return conversation, agent, records


def _parts(message: dict[str, Any], identity: str) -> list[dict[str, Any]]:
    """A message as records; what Letta Code puts into the user's message itself is not the user's."""
    role, content = _ROLES.get(str(message.get("role")), "system"), message.get("content")
    texts = (
        [content]
        if isinstance(content, str)
        else [str(part.get("text")) for part in content or [] if isinstance(part, dict) and part.get("type") == "text"]
        if isinstance(content, list)
        else []
    )
    return [
        {
            "role": "system" if role == "user" and text.lstrip().startswith(_REMINDER) else role,
            "content": text,
            "id": identity,
        }
        for text in texts
    ]
