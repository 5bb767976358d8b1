"""Hooks that note who is at work: in Letta Code's settings.json, and one in each memory repository. Both are small shell scripts.

They only write a note and end with success; without them everything is recorded all the same, without conversation and tool call.
Two more are optional: a gate against rewritten history, and a report of `code verify` at the start of a session. What was there before
is kept, runs as before, and is put back by `uninstall`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from phionyx_letta.errors import StoreError
from phionyx_letta.letta_code.git_hooks import (
    FOLDER,
    HOOK,
    MARK,
    hooks_folder,
    is_ours,
    not_run,
    put_git_hook,
    take_git_hook,
    write_whole,
)
from phionyx_letta.letta_code.places import AgentMemory, Home
from phionyx_letta.letta_code.queue import queue_path
from phionyx_letta.letta_code.settings_hooks import SettingsHooks

__all__ = ["Hooks", "HooksState", "report_environment"]

_MOST_NOTES = 2000
_LARGEST_NOTE = 1 << 20
_LONGEST = 50  # s: before Letta Code ends the hook, and nothing is said
#: What `code verify` needs to know, when a session starts, of what was set when the hooks were installed.
_KEPT = ("SIGNING_KEY", "SIGNING_COMMAND", "PUBLIC_KEY", "VERIFY_KEY", "KEY_ID", "DEMO")

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
  t=$(command -v timeout) && t="$t {longest}"
  {report} 2>/dev/null || echo "phionyx-letta: the memory was not compared with the ledger: the check ended with $?;" \
    "run 'phionyx-letta code verify'"
  exit 0
fi
{note}{{ echo "$k"; head -c {largest}; }} 2>/dev/null >"$q/t.$$.$n" && mv "$q/t.$$.$n" "$q/n.$$.$n" 2>/dev/null
exit 0
"""
_GIT_SCRIPT = """#!/bin/sh
{mark}: notes moves of branches for `phionyx-letta code ingest`; `phionyx-letta code uninstall` removes it.
s=0
o="${{0%/*}}/{folder}/{hook}"
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
        [ ! -e "$d/packed-refs.lock" ] && [ -f "$d/packed-refs" ] && grep -qxF "$at $ref" "$d/packed-refs" 2>/dev/null && continue ;;
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


def report_environment(ledger: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The ledger's URL and the settings of the key, as a process of Letta Code needs them. A key itself is never among them."""
    found = {"PHIONYX_LETTA_LEDGER": ledger}
    for name in _KEPT:
        value = environment.get(f"PHIONYX_LETTA_{name}", "").strip()
        if name in ("SIGNING_KEY", "PUBLIC_KEY", "VERIFY_KEY"):
            keys = value.split(os.pathsep) if name == "VERIFY_KEY" else [value]
            value = os.pathsep.join(_kept_key(key, public=name != "SIGNING_KEY") for key in keys)
        if value:
            found[f"PHIONYX_LETTA_{name}"] = value
    return found


def _kept_key(key: str, *, public: bool) -> str:
    """A file's absolute path, or the digits of a public key; of a private one nothing."""
    if re.fullmatch(r"[0-9a-fA-F]{64}", key):
        return key if public else ""
    return os.path.abspath(os.path.expanduser(key)) if key else ""


class Hooks:
    """The hooks of one user's Letta Code."""

    def __init__(self, home: Home, own_home: Path, environment: Mapping[str, str] | None = None) -> None:
        """Take Letta Code's folders and PHIONYX_LETTA_HOME; nothing is written yet.

        Args:
            home: Letta Code's folders.
            own_home: PHIONYX_LETTA_HOME.
            environment: what the report at the start of a session is to find, see `report_environment`.
        """
        letta, own_home = home.letta.absolute(), own_home.absolute()  # hooks run in any folder
        self._all = own_home / "code"
        self._folder = self._all / hashlib.sha256(os.fsencode(letta)).hexdigest()[:16]  # each Letta Code's own
        self._queue = queue_path(own_home)
        self._script = self._folder / "hook.sh"
        self._record = self._folder / "installed.json"
        self._gate = self._folder / "gate"
        self._in_settings = SettingsHooks(home.letta / "settings.json", self._record, self._script)
        told = {**(environment or {}), "PHIONYX_LETTA_HOME": str(own_home)}
        # -P: else Python would import what lies in the folder that the session works in, which anybody may have written
        command = [sys.executable, "-P", "-m", "phionyx_letta.cli", "code", "verify", "--at-start"]
        if home.backend == home.letta / "lc-local-backend":
            command += ["--letta-dir", str(letta)]
        else:  # which is only found without that option
            told["LETTA_LOCAL_BACKEND_DIR"] = str(home.backend.absolute())
        words = [f"{name}={shlex.quote(value)}" for name, value in told.items()]
        self._verify = " ".join([*words, "$t", *map(shlex.quote, command)])

    @property
    def installed(self) -> bool:
        """Whether they were installed and not uninstalled since."""
        with _translated(self._folder):
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
            self._make_queue()
            self._folder.mkdir(mode=0o700, exist_ok=True)
            note = _NOTE.format(queue=shlex.quote(str(self._queue)), most=_MOST_NOTES)
            script = _EVENT_SCRIPT.format(
                mark=MARK, note=note, largest=_LARGEST_NOTE, report=self._verify, longest=_LONGEST
            )
            write_whole(self._script, script.encode(), 0o700)
            if gate:
                self._gate.touch(mode=0o600)
            elif gate is False:
                self._gate.unlink(missing_ok=True)
        self._in_settings.merge(report)
        self.cover(memories)
        return self.state(memories)

    def cover(self, memories: Iterable[AgentMemory]) -> None:
        """Put the hook into memory repositories that do not have it: of agents that were made since."""
        note = _NOTE.format(queue=shlex.quote(str(self._queue)), most=_MOST_NOTES)
        gate = shlex.quote(str(self._gate))
        script = _GIT_SCRIPT.format(mark=MARK, note=note, folder=FOLDER, hook=HOOK, gate=gate).encode()
        for memory in memories:
            with contextlib.suppress(OSError, ValueError):  # of one memory: the others get theirs
                hooks = hooks_folder(memory.path, make=True)
                if isinstance(hooks, Path):
                    put_git_hook(hooks, script)

    def uninstall(self, memories: Iterable[AgentMemory]) -> HooksState:
        """Take the hooks out and put back what was there; notes that wait are removed.

        Raises:
            StoreError: settings.json cannot be written, or not as it is; nothing was taken out.
        """
        memories = list(memories)
        self._in_settings.restore()  # first, since it may refuse: then nothing is half done
        for memory in memories:
            with contextlib.suppress(OSError, ValueError):
                hooks = hooks_folder(memory.path)
                if isinstance(hooks, Path):
                    take_git_hook(hooks)
        with _translated(self._folder):
            others = any(one != self._record for one in self._all.glob("*/installed.json"))  # whose notes wait too
            notes = [] if others else self._notes("[nt].*")
            for path in [*notes, self._script, self._record, self._gate]:
                if not path.is_dir():  # somebody else's: it stays, and so does the folder it is in
                    path.unlink(missing_ok=True)
            for folder in (self._folder, *(() if others else (self._queue, self._all))):
                with contextlib.suppress(OSError):
                    folder.rmdir()
        return self.state(memories)

    def state(self, memories: Iterable[AgentMemory]) -> HooksState:
        """How they stand; nothing is changed."""
        with _translated(self._folder):
            settings, report = self._in_settings.state()
            found = {memory.agent_id: _standing(memory.path) for memory in memories}
            return HooksState(settings, found, len(self._notes("n.*")), self._gate.exists(), report)

    def _notes(self, pattern: str) -> list[Path]:
        return list(self._queue.glob(pattern)) if self._queue.is_dir() else []

    def _make_queue(self) -> None:
        """What is noted there holds tool input: the folder is one of ours, for us alone, and no link to another."""
        self._queue.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._queue.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise StoreError(f"{self._queue} is not a folder of this user", "remove it, or set PHIONYX_LETTA_HOME")
        self._queue.chmod(0o700)


def _standing(memory: Path) -> str:
    """`installed`, `missing`, or why it cannot be there or is not run."""
    hooks = hooks_folder(memory)
    if isinstance(hooks, str):
        return hooks
    return (not_run(memory, hooks) or "installed") if is_ours(hooks / HOOK) else "missing"


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path} cannot be used: {error.strerror}", "check its owner, its mode and the disk"
        ) from error
