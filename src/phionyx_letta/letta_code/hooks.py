"""Hooks that note who is at work: in Letta Code's settings.json, and one in each memory repository. Both are small shell scripts.

They only write a note and end with success; without them everything is recorded all the same, without conversation and tool call.
Two more are optional: a gate against rewritten history, and a report of `code verify` at the start of a session. What was there before
is kept, runs as before, and is put back by `uninstall`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shlex
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phionyx_letta.errors import StoreError
from phionyx_letta.letta_code.places import AgentMemory, Home
from phionyx_letta.letta_code.queue import queue_path

__all__ = ["Hooks", "HooksState"]

_EVENTS = {"PostToolUse": "tool", "SessionEnd": "session"}
_REPORT = {"SessionStart": "start"}
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
if [ "$k" = start ]; then
  {report} 2>/dev/null
  exit 0
fi
{note}{{ echo "$k"; head -c {largest}; }} 2>/dev/null >"$q/t.$$.$n" && mv "$q/t.$$.$n" "$q/n.$$.$n" 2>/dev/null
exit 0
"""
_GIT_SCRIPT = """#!/bin/sh
{mark}: notes moves of branches for `phionyx-letta code ingest`; `phionyx-letta code uninstall` removes it.
s=0
o="$0{before}"
k=$1
[ "$k" = committed ] || [ -x "$o" ] || [ -e {gate} ] || exit 0
i=$(cat; echo x)
i=${{i%x}}
if [ -x "$o" ]; then
  printf %s "$i" | "$o" "$@"
  s=$?
fi
if [ "$k" = prepared ] && [ $s = 0 ] && [ -e {gate} ]; then
  printf %s "$i" | while read -r old new ref; do
    case $ref in refs/heads/letta/*) continue ;; refs/heads/*) ;; *) continue ;; esac
    at=$(git rev-parse --verify --quiet "$ref^0") || continue
    case $new in
      "$at") continue ;;
      *[!0]*) git merge-base --is-ancestor "$at" "$new" 2>/dev/null && continue ;;
      *) d=$(git rev-parse --git-common-dir) # git gc moves a branch into packed-refs, then deletes its own file
        [ ! -e "$d/packed-refs.lock" ] && grep -qxF "$at $ref" "$d/packed-refs" 2>/dev/null && continue ;;
    esac
    echo "phionyx-letta: the gate lets no commit be taken off $ref; 'phionyx-letta code install --no-gate' lifts it" >&2
    exit 1
  done || s=1
fi
[ "$k" = committed ] || exit $s
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
    gate: bool = False
    """Whether rewritten history is refused."""
    report: bool = False
    """Whether `code verify` is reported at the start of a session."""


class Hooks:
    """The hooks of one user's Letta Code."""

    def __init__(self, home: Home, own_home: Path) -> None:
        """Take Letta Code's folders and PHIONYX_LETTA_HOME; nothing is written yet."""
        self._settings = home.letta / "settings.json"
        self._folder = own_home / "code"
        self._queue = queue_path(own_home)
        self._script = self._folder / "hook.sh"
        self._record = self._folder / "installed.json"
        self._gate = self._folder / "gate"
        environment = {"PHIONYX_LETTA_HOME": str(own_home.absolute())}
        told = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        command = [sys.executable, "-m", "phionyx_letta.cli", "code", "verify", "--at-start"]
        self._verify = " ".join([*told, *map(shlex.quote, [*command, "--letta-dir", str(home.letta.absolute())])])

    @property
    def installed(self) -> bool:
        """Whether they were installed and not uninstalled since."""
        return self._record.is_file()

    def install(
        self, memories: Iterable[AgentMemory], *, gate: bool | None = None, report: bool | None = None
    ) -> HooksState:
        """Put the hooks in place; doing it again changes nothing.

        Args:
            memories: whose repositories get one.
            gate: refuse what takes commits off a branch, or no longer; None leaves it as it is.
            report: report `code verify` at the start of a session, or no longer; None leaves it as it is.

        Raises:
            StoreError: settings.json is not what can be merged with, or a file cannot be written.
        """
        memories = list(memories)
        with _translated(self._folder):
            self._queue.mkdir(mode=0o700, parents=True, exist_ok=True)
            note = _NOTE.format(queue=shlex.quote(str(self._queue)), most=_MOST_NOTES)
            script = _EVENT_SCRIPT.format(mark=_MARK, note=note, largest=_LARGEST_NOTE, report=self._verify)
            _write(self._script, script.encode(), 0o755)
            if gate:
                self._gate.touch(mode=0o600)
            elif gate is False:
                self._gate.unlink(missing_ok=True)
        self._merge_settings(report)
        self.cover(memories)
        return self.state(memories)

    def cover(self, memories: Iterable[AgentMemory]) -> None:
        """Put the hook into memory repositories that do not have it: of agents that were made since."""
        note = _NOTE.format(queue=shlex.quote(str(self._queue)), most=_MOST_NOTES)
        gate = shlex.quote(str(self._gate))
        script = _GIT_SCRIPT.format(mark=_MARK, note=note, before=_BEFORE, gate=gate).encode()
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
            for path in [*self._queue.glob("[nt].*"), self._script, self._record, self._gate]:
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
        settings, report = self._settings_state()
        return HooksState(settings, found, waiting, self._gate.exists(), report)

    # -- settings.json --------------------------------------------------------------------------------------------

    def _entry(self, event: str) -> dict[str, Any]:
        command = f"sh {shlex.quote(str(self._script))} {({**_EVENTS, **_REPORT})[event]}"
        timeout = 60_000 if event in _REPORT else 5000  # ms
        entry: dict[str, Any] = {"hooks": [{"type": "command", "command": command, "timeout": timeout, "quiet": True}]}
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
        if not isinstance(hooks, dict) or not all(
            isinstance(hooks.get(event, []), list) for event in (*_EVENTS, *_REPORT)
        ):
            raise StoreError(
                f"{self._settings} is not what Letta Code 0.34 writes, so nothing is merged into it",
                "mend it, or ask for this version of Letta Code to be supported",
            )
        return data, settings

    def _merge_settings(self, report: bool | None) -> None:
        before, settings = self._load()
        hooks = settings.setdefault("hooks", {})
        changed = False
        for event in (*_EVENTS, *(_REPORT if report else ())):
            entry = self._entry(event)
            if entry not in hooks.setdefault(event, []):
                hooks[event].append(entry)
                changed = True
        if report is False:
            changed = self._take_out(hooks, _REPORT) or changed
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
            self._take_out(hooks, {**_EVENTS, **_REPORT})
            if record.get("added_disabled") and hooks.get("disabled") is False:
                del hooks["disabled"]
            if settings.get("hooks") == {}:
                del settings["hooks"]
            if json.dumps(settings) != kept:
                text = json.dumps(settings, indent=2, ensure_ascii=False)
                _write(self._settings, text.encode("utf-8", "surrogatepass") + b"\n", _mode_of(self._settings, 0o600))

    def _take_out(self, hooks: dict[str, Any], events: Iterable[str]) -> bool:
        """Our entries of these events; whether there was one."""
        found = False
        for event in events:
            if self._entry(event) in hooks.get(event, []):
                found = True
                hooks[event] = [one for one in hooks[event] if one != self._entry(event)]
                if not hooks[event]:
                    del hooks[event]
        return found

    def _settings_state(self) -> tuple[str, bool]:
        """How the hooks of settings.json stand, and whether the report is among them."""
        try:
            before, settings = self._load()
        except StoreError:
            return "unreadable", False
        if before is None:
            return "no settings", False
        hooks = settings.get("hooks", {})
        there = [self._entry(event) in hooks.get(event, []) for event in (*_EVENTS, *_REPORT)]
        report = there.pop()
        if not all(there):
            return "partly" if any((*there, report)) else "missing", report
        return "disabled" if hooks.get("disabled") is True else "installed", report


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
