"""Finished conversations of Letta Code, from the transcripts its local backend writes in every mode (measured on 0.34.12).

A conversation is finished when nothing was added to its transcript for a while, or when a hook noted its end, which happens only
with a terminal. Which part of it was proposed from is remembered, so it may be taken up again later.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phionyx_letta.letta_code.errors import MemoryUnreadable
from phionyx_letta.letta_code.reading import open_regular

__all__ = ["Session", "Sessions"]

_VERSION = 3
_LARGEST = 32 << 20
_MOST_AT_ONCE = 64 << 20  # of all transcripts that are read in one look; the others have their turn in the next
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
        self.unknown: dict[str, str] = {}
        """Transcripts whose form is not known, and why: of another version of Letta Code."""
        self._looked: dict[str, tuple[int, int, frozenset[str]]] = {}
        """How those were when they were read: they are not read again before they change."""

    def finished(self, idle: float, ended: set[str]) -> Iterator[Session]:
        """Yield each conversation with something new that is idle for so many seconds, or whose id is in `ended`."""
        done, left = self._done(), _MOST_AT_ONCE
        for path in sorted(self._folder.glob("*/messages.jsonl")):
            folder = path.parent.name
            with contextlib.suppress(OSError):
                found = path.lstat()
                if not stat.S_ISREG(found.st_mode) or found.st_size <= done.get(folder, 0) or found.st_size > _LARGEST:
                    continue
                idling = time.time() - found.st_mtime >= idle
                state = (found.st_size, found.st_mtime_ns, frozenset[str]() if idling else frozenset(ended))
                if self._looked.get(folder) == state or not (idling or ended) or found.st_size > left:
                    continue
                left -= found.st_size
                session = self._read(path, done.get(folder, 0))
                if session is not None and (idling or session.conversation in ended):
                    yield session
                self._looked[folder] = (
                    state  # not again before it changes: nothing is new in it, or its agent is not here
                )

    def look_again(self) -> None:
        """Read those again that were read and not proposed from."""
        self._looked.clear()

    def done(self, session: Session) -> None:
        """Remember that a conversation was proposed from, up to here."""
        sizes = {**self._done(), session.folder: session.size}
        self._memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._memory.with_suffix(".new")
        new.write_text(json.dumps(sizes))
        os.replace(new, self._memory)

    def _done(self) -> dict[str, int]:
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
