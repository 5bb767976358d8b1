"""Hooks that note who is at work: in Letta Code's settings.json, and one in each memory repository. Both are small shell scripts.

They only write a note and end with success; without them everything is recorded all the same, without conversation and tool call.
What was there before is kept, runs as before, and is put back by `uninstall`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phionyx_letta.errors import StoreError
from phionyx_letta.letta_code.places import AgentMemory, Home
from phionyx_letta.letta_code.queue import queue_path

__all__ = ["Hooks", "HooksState"]

_EVENTS = {"PostToolUse": "tool", "SessionEnd": "session"}
_GIT_HOOK = "reference-transaction"
_BEFORE = ".phionyx-original"
_MARK = "# phionyx-letta"
_MOST_NOTES = 2000
_LARGEST_NOTE = 1 << 20

_NOTE = """q={queue}
[ -d "$q" ] || exit 0
umask 077
set -- "$q"/n.*
[ $# -lt {most} ] || exit 0
n=0
while [ -e "$q/n.$$.$n" ]; do n=$((n + 1)); done
"""
_EVENT_SCRIPT = """#!/bin/sh
{mark}: notes a tool call or the end of a session for `phionyx-letta code ingest`; `phionyx-letta code uninstall` removes it.
k=$1
{note}{{ echo "$k"; head -c {largest}; }} 2>/dev/null >"$q/t.$$.$n" && mv "$q/t.$$.$n" "$q/n.$$.$n" 2>/dev/null
exit 0
"""
_GIT_SCRIPT = """#!/bin/sh
{mark}: notes moves of branches for `phionyx-letta code ingest`; `phionyx-letta code uninstall` removes it.
s=0
o="$0{before}"
k=$1
if [ -x "$o" ]; then
  i=$(cat; echo x)
  i=${{i%x}}
  printf %s "$i" | "$o" "$@"
  s=$?
  [ "$k" = committed ] || exit $s
else
  [ "$k" = committed ] || exit 0
  i=$(cat)
fi
{note}{{ printf 'ref\\n%s\\n%s\\n%s\\n' "$LETTA_AGENT_ID" "$LETTA_CONVERSATION_ID" "$PWD"; printf '%s\\n' "$i"; }} \\
  2>/dev/null >"$q/t.$$.$n" && mv "$q/t.$$.$n" "$q/n.$$.$n" 2>/dev/null
exit $s
"""


@dataclass(frozen=True)
class HooksState:
    """How the hooks stand."""

    settings: str
    """`installed`, `missing`, `partly`, `disabled` (by the user), `no settings` or `unreadable`."""
    repositories: dict[str, str]
    """By agent: `installed`, `missing`, or why it cannot be."""
    waiting: int
    """Notes not read yet."""


class Hooks:
    """The hooks of one user's Letta Code."""

    def __init__(self, home: Home, own_home: Path) -> None:
        """Take Letta Code's folders and PHIONYX_LETTA_HOME; nothing is written yet."""
        self._settings = home.letta / "settings.json"
        self._folder = own_home / "code"
        self._queue = queue_path(own_home)
        self._script = self._folder / "hook.sh"
        self._record = self._folder / "installed.json"

    @property
    def installed(self) -> bool:
        """Whether they were installed and not uninstalled since."""
        return self._record.is_file()

    def install(self, memories: Iterable[AgentMemory]) -> HooksState:
        """Put the hooks in place; doing it again changes nothing.

        Raises:
            StoreError: settings.json is not what can be merged with, or a file cannot be written.
        """
        memories = list(memories)
        with _translated(self._folder):
            self._queue.mkdir(mode=0o700, parents=True, exist_ok=True)
            note = _NOTE.format(queue=shlex.quote(str(self._queue)), most=_MOST_NOTES)
            _write(self._script, _EVENT_SCRIPT.format(mark=_MARK, note=note, largest=_LARGEST_NOTE).encode(), 0o755)
        self._merge_settings()
        self.cover(memories)
        return self.state(memories)

    def cover(self, memories: Iterable[AgentMemory]) -> None:
        """Put the hook into memory repositories that do not have it: of agents that were made since."""
        note = _NOTE.format(queue=shlex.quote(str(self._queue)), most=_MOST_NOTES)
        script = _GIT_SCRIPT.format(mark=_MARK, note=note, before=_BEFORE).encode()
        for memory in memories:
            hooks = _hooks_folder(memory.path, make=True)
            if isinstance(hooks, Path):
                with contextlib.suppress(OSError):
                    _put_git_hook(hooks, script)

    def uninstall(self, memories: Iterable[AgentMemory]) -> HooksState:
        """Take the hooks out and put back what was there; notes that wait are removed.

        Raises:
            StoreError: settings.json cannot be written.
        """
        memories = list(memories)
        for memory in memories:
            hooks = _hooks_folder(memory.path)
            if isinstance(hooks, Path):
                with contextlib.suppress(OSError):
                    _take_git_hook(hooks)
        self._restore_settings()
        with _translated(self._folder):
            for path in [*self._queue.glob("[nt].*"), self._script, self._record]:
                path.unlink(missing_ok=True)
            for folder in (self._queue, self._folder):
                with contextlib.suppress(OSError):
                    folder.rmdir()
        return self.state(memories)

    def state(self, memories: Iterable[AgentMemory]) -> HooksState:
        """How they stand; nothing is changed."""
        found = {}
        for memory in memories:
            hooks = _hooks_folder(memory.path)
            ours = isinstance(hooks, Path) and _is_ours(hooks / _GIT_HOOK)
            found[memory.agent_id] = hooks if isinstance(hooks, str) else "installed" if ours else "missing"
        waiting = len(list(self._queue.glob("n.*"))) if self._queue.is_dir() else 0
        return HooksState(self._settings_state(), found, waiting)

    # -- settings.json --------------------------------------------------------------------------------------------

    def _entry(self, event: str) -> dict[str, Any]:
        command = f"sh {shlex.quote(str(self._script))} {_EVENTS[event]}"
        entry: dict[str, Any] = {"hooks": [{"type": "command", "command": command, "timeout": 5000, "quiet": True}]}
        return {"matcher": "*", **entry} if event == "PostToolUse" else entry

    def _load(self) -> tuple[bytes | None, dict[str, Any]]:
        try:
            data = self._settings.read_bytes()
        except FileNotFoundError:
            return None, {}
        except OSError as error:
            raise StoreError(
                f"{self._settings} cannot be read: {error.strerror}", "check its owner and mode"
            ) from error
        try:
            settings = json.loads(data)
        except (ValueError, RecursionError):
            settings = None
        hooks = settings.get("hooks", {}) if isinstance(settings, dict) else None
        if not isinstance(hooks, dict) or not all(isinstance(hooks.get(event, []), list) for event in _EVENTS):
            raise StoreError(
                f"{self._settings} is not what Letta Code 0.34 writes, so nothing is merged into it",
                "mend it, or ask for this version of Letta Code to be supported",
            )
        return data, settings

    def _merge_settings(self) -> None:
        before, settings = self._load()
        hooks = settings.setdefault("hooks", {})
        changed = False
        for event in _EVENTS:
            entry = self._entry(event)
            if entry not in hooks.setdefault(event, []):
                hooks[event].append(entry)
                changed = True
        added_disabled = "disabled" not in hooks
        if added_disabled:  # else a project's settings could turn them off
            hooks["disabled"] = False
        with _translated(self._settings):
            if changed or added_disabled:
                after = json.dumps(settings, indent=2, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
                record = {
                    "before": None if before is None else base64.b64encode(before).decode("ascii"),
                    "after": hashlib.sha256(after).hexdigest(),
                    "added_disabled": added_disabled,
                }
                if self.installed:  # a part was taken out since: the first original stays the one to go back to
                    record = {**json.loads(self._record.read_bytes()), "after": record["after"]}
                _write(self._record, json.dumps(record).encode(), 0o600)
                self._settings.parent.mkdir(parents=True, exist_ok=True)
                _write(self._settings, after, _mode_of(self._settings, 0o600))

    def _restore_settings(self) -> None:
        """Byte for byte where nobody wrote to it since; else only our entries are taken out."""
        record: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(self._record.read_bytes())
        before, settings = self._load()
        if before is None:
            return
        with _translated(self._settings):
            if record and hashlib.sha256(before).hexdigest() == record["after"]:
                if record["before"] is None:
                    self._settings.unlink()
                else:
                    _write(self._settings, base64.b64decode(record["before"]), _mode_of(self._settings, 0o600))
                return
            hooks = settings.get("hooks", {})
            kept = json.dumps(settings)
            for event in _EVENTS:
                if event in hooks:
                    hooks[event] = [one for one in hooks[event] if one != self._entry(event)]
                    if not hooks[event]:
                        del hooks[event]
            if record.get("added_disabled") and hooks.get("disabled") is False:
                del hooks["disabled"]
            if settings.get("hooks") == {}:
                del settings["hooks"]
            if json.dumps(settings) != kept:
                text = json.dumps(settings, indent=2, ensure_ascii=False)
                _write(self._settings, text.encode("utf-8", "surrogatepass") + b"\n", _mode_of(self._settings, 0o600))

    def _settings_state(self) -> str:
        try:
            before, settings = self._load()
        except StoreError:
            return "unreadable"
        if before is None:
            return "no settings"
        hooks = settings.get("hooks", {})
        there = [self._entry(event) in hooks.get(event, []) for event in _EVENTS]
        if not all(there):
            return "partly" if any(there) else "missing"
        return "disabled" if hooks.get("disabled") is True else "installed"


def _hooks_folder(memory: Path, *, make: bool = False) -> Path | str:
    """The repository's folder of hooks, made if asked for, or why none can be put there: a link in it may lead anywhere."""
    git = memory / ".git"
    for folder in (git, git / "hooks"):
        try:
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                return f"{folder} is not a folder"
        except FileNotFoundError:
            if folder == git:
                return "there is no git repository"
            if make:
                with contextlib.suppress(OSError):
                    folder.mkdir()
        except OSError as error:
            return f"{folder}: {error.strerror}"
    return git / "hooks"


def _put_git_hook(hooks: Path, script: bytes) -> None:
    hook, original = hooks / _GIT_HOOK, hooks / (_GIT_HOOK + _BEFORE)
    if os.path.lexists(hook) and not _is_ours(hook):
        if os.path.lexists(original):
            return  # two originals: neither is lost, and `state` says that ours is missing
        os.rename(hook, original)
    if not _is_ours(hook) or hook.read_bytes() != script:
        _write(hook, script, 0o755)


def _take_git_hook(hooks: Path) -> None:
    hook, original = hooks / _GIT_HOOK, hooks / (_GIT_HOOK + _BEFORE)
    if not _is_ours(hook):
        return
    if os.path.lexists(original):
        os.replace(original, hook)
    else:
        hook.unlink()


def _is_ours(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode) and _MARK.encode() in path.read_bytes()[:200]
    except OSError:
        return False


def _mode_of(path: Path, default: int) -> int:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return default


def _write(path: Path, data: bytes, mode: int) -> None:
    """All or nothing; a link at `path` is followed, as whoever put it there wants."""
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    os.replace(temporary, path)


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written: {error.strerror}", "check its owner, its mode and the disk"
        ) from error
