"""What hooks noted: small files in a folder of their own, written by shell scripts, read when memory is recorded.

A note says who was at work when a branch moved: what the agent's own processes claim. Nothing depends on one being there.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from phionyx_letta.letta_code.reading import open_regular

__all__ = ["Notes", "queue_path", "read_notes"]

#: A note is kept so long for runs to come, s: the tool call of a commit is noted after the commit.
_KEPT = 600
#: A tool call that is noted so long after a commit did not make it, s.
_LONGEST_CALL = 600.0
_LARGEST = 1 << 20
_MOST = 5000
_MOST_BYTES = 32 << 20  # of all notes together


def queue_path(home: Path) -> Path:
    """The folder of notes, in PHIONYX_LETTA_HOME."""
    return home / "code" / "queue"


@dataclass(frozen=True, slots=True)
class _Call:
    at: float
    tool: str
    tool_call_id: str


@dataclass(frozen=True, slots=True)
class _Commit:
    at: float
    agent: str
    conversation: str


@dataclass
class Notes:
    """What was noted, ready to be asked about commits."""

    folder: Path | None = None
    commits: dict[str, _Commit] = field(default_factory=dict)
    calls: dict[str, list[_Call]] = field(default_factory=dict)
    sessions: dict[tuple[str, str], float] = field(default_factory=dict)
    """(agent, conversation) of sessions that ended, and when the last one did."""
    files: list[tuple[float, Path]] = field(default_factory=list)

    def about(self, agent: str, commit: str) -> dict[str, Any]:
        """Who made a commit, as far as hooks noted it: conversation, agent at work, tool call."""
        noted = self.commits.get(commit)
        if noted is None or not (noted.agent or noted.conversation):  # a person's own git has neither
            return {}
        found: dict[str, Any] = {"attribution": "hooks"}
        if noted.conversation:
            found["conversation_id"] = noted.conversation
        if noted.agent and noted.agent != agent:
            found["by_agent"] = noted.agent
        calls = self.calls.get(noted.agent, [])
        at = bisect_left(calls, noted.at, key=lambda call: call.at)
        if at < len(calls) and calls[at].at - noted.at <= _LONGEST_CALL:
            found["tool"], found["tool_call_id"] = calls[at].tool, calls[at].tool_call_id
        return found

    def forget_old(self) -> None:
        """Remove the notes that no later run can need."""
        for at, path in self.files:
            if not time.time() - _KEPT <= at <= time.time() + _KEPT:
                with contextlib.suppress(OSError):
                    path.unlink()


def read_notes(folder: Path) -> Notes:
    """Read every whole note; what is none is removed with the old ones."""
    notes = Notes(folder)
    for at, path, text in _files(folder):
        notes.files.append((at, path))
        kind, _, rest = text.partition("\n")
        if kind == "ref":
            agent, conversation, _, *lines = [*rest.split("\n"), "", "", ""]
            for words in (line.split(" ") for line in lines):
                if len(words) == 3 and words[2].startswith(("refs/heads/", "HEAD")):
                    notes.commits.setdefault(words[1], _Commit(at, _short(agent), _short(conversation)))
        elif kind in ("tool", "session"):
            _read_event(notes, kind, at, rest)
    for calls in notes.calls.values():
        calls.sort(key=lambda call: call.at)
    return notes


def _read_event(notes: Notes, kind: str, at: float, text: str) -> None:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(said, Mapping):
        return
    agent = _short(said.get("agent_id"))
    if kind == "tool":
        notes.calls.setdefault(agent, []).append(
            _Call(at, _short(said.get("tool_name")), _short(said.get("tool_call_id")))
        )
    else:
        notes.sessions[agent, _short(said.get("conversation_id"))] = at


def _files(folder: Path) -> Iterator[tuple[float, Path, str]]:
    """Notes as they came: who made a commit noted it before those who moved other branches to it.

    What is none (a link, a pipe, one that is being written) or more than is read at once comes without its text, so that it is
    removed with the old ones.
    """
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for one in islice((one for one in entries if one.name.startswith(("n.", "t."))), _MOST):
            with contextlib.suppress(OSError):
                found.append((one.stat(follow_symlinks=False).st_mtime, one.name))
    left = _MOST_BYTES
    for at, name in sorted(found):
        path, text = folder / name, ""
        if name.startswith("n."):
            with contextlib.suppress(OSError), open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size <= min(_LARGEST, left):
                    left -= size
                    text = file.read(size).decode("utf-8", "replace")
        yield at, path, text


def _short(value: object) -> str:
    return value[:200] if isinstance(value, str) else ""
