"""Our hooks in Letta Code's settings.json, beside the user's own; taken out again without a trace.

Letta Code and the user write that file too: it is replaced only where it still is what was merged with.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phionyx_letta.errors import DiffConflictError, StoreError, TargetRefused
from phionyx_letta.letta_code.git_hooks import write_whole
from phionyx_letta.letta_code.reading import open_regular
from phionyx_letta.memory.files import FileTarget, read_text

__all__ = ["EVENTS", "REPORT", "SettingsHooks"]

EVENTS = {"PostToolUse": "tool", "SessionEnd": "session"}
REPORT = {"SessionStart": "start"}
_ALL = {**EVENTS, **REPORT}
_TRIES = 5
_LARGEST_RECORD = 16 << 20


@dataclass(frozen=True)
class _Record:
    """What is needed to put settings.json back."""

    after: str
    """Hash of what was written: where the file is another by now, somebody wrote to it."""
    added_disabled: bool
    whole: bool = False
    """Whether `before` is what to go back to; else only our entries are taken out."""
    before: str | None = None
    """The file without our entries; None where there was none."""


class SettingsHooks:
    """The hooks in one settings.json."""

    def __init__(self, settings: Path, record: Path, script: Path) -> None:
        """Take the file, where its original is kept, and the script that the hooks run; nothing is written yet."""
        self._settings, self._record, self._script = settings, record, script

    def merge(self, report: bool | None) -> None:
        """Put our entries in; doing it again changes nothing.

        Args:
            report: with the one at the start of a session, or without it; None leaves that as it is.

        Raises:
            StoreError: the file is not what can be merged with, or cannot be written.
        """
        self._changed(lambda before, settings: self._merged(before, settings, report))

    def restore(self) -> None:
        """Take our entries out: byte for byte where nobody wrote to the file since.

        Raises:
            StoreError: the file cannot be read or written.
        """
        self._changed(self._restored)

    def state(self) -> tuple[str, bool]:
        """How the hooks stand (see `HooksState.settings`), and whether the report is among them."""
        try:
            before, settings = self._load()
        except StoreError:
            return "unreadable", False
        if before is None:
            return "no settings", False
        hooks = settings.get("hooks", {})
        there = [self._entry(event) in hooks.get(event, []) for event in EVENTS]
        report = self._entry("SessionStart") in hooks.get("SessionStart", [])
        if not all(there) or not self._script.is_file():
            return "partly" if any((*there, report)) else "missing", report
        return "disabled" if hooks.get("disabled") is True else "installed", report

    # -- what becomes of it -------------------------------------------------------------------------------------

    def _changed(self, change: Callable[[str | None, dict[str, Any]], str | None]) -> None:
        """Write what `change` makes of the file; again, where somebody wrote to it meanwhile."""
        for attempt in range(_TRIES):
            before, settings = self._load()
            after = change(before, settings)
            if after == before:
                return
            try:
                self._replace(before, after)
                return
            except DiffConflictError as error:
                if attempt == _TRIES - 1:
                    raise StoreError(f"{self._settings} is written to all the time", "end Letta Code first") from error
            except TargetRefused as error:
                raise StoreError(error.message, error.remedy) from error

    def _replace(self, before: str | None, after: str | None) -> None:
        file = FileTarget(str(self._settings), os.path.realpath(self._settings))
        if after is not None:
            file.write(before, after)
            if before is None:
                os.chmod(file.real, 0o600)
        elif file.read() == before:
            os.unlink(file.real)
        else:
            raise DiffConflictError(file.real, "", "")

    def _merged(self, before: str | None, settings: dict[str, Any], report: bool | None) -> str | None:
        hooks = settings.setdefault("hooks", {})
        ours_before = any(self._without_ours(hooks.get(event, [])) != hooks.get(event, []) for event in _ALL)
        changed = report is False and self._take_out(hooks, REPORT)
        for event in (*EVENTS, *(REPORT if report else ())):
            entry, there = self._entry(event), hooks.get(event, [])
            if entry not in there:  # but perhaps one that somebody edited, or that an older version wrote
                hooks[event] = [*self._without_ours(there), entry]
                changed = True
        added_disabled = "disabled" not in hooks
        if added_disabled:  # else a project's settings could turn them off
            hooks["disabled"] = False
        if not changed and not added_disabled:
            return before
        after = _dumped(settings)
        known = self._read_record() if ours_before else None
        if not ours_before:
            record = _Record(_digest(after), added_disabled, True, before)
        elif known is not None and known.after == _digest(before):  # nobody else wrote since
            record = _Record(_digest(after), known.added_disabled or added_disabled, known.whole, known.before)
        else:
            record = _Record(_digest(after), added_disabled or (known is not None and known.added_disabled))
        self._write_record(record)
        return after

    def _restored(self, before: str | None, settings: dict[str, Any]) -> str | None:
        record = self._read_record()
        if before is None:
            return None
        if record is not None and record.whole and record.after == _digest(before):
            return record.before
        hooks = settings.get("hooks", {})
        changed = self._take_out(hooks, _ALL)
        if record is not None and record.added_disabled and hooks.get("disabled") is False:
            del hooks["disabled"]
            changed = True
        if settings.get("hooks") == {}:
            del settings["hooks"]
        return _dumped(settings) if changed else before

    def _take_out(self, hooks: dict[str, Any], events: Iterable[str]) -> bool:
        """Our entries of these events; whether there was one."""
        found = False
        for event in events:
            before = hooks.get(event, [])
            after = self._without_ours(before)
            if after != before:
                found = True
                hooks[event] = after
                if not after:
                    del hooks[event]
        return found

    def _without_ours(self, entries: list[Any]) -> list[Any]:
        """The entries of an event without what runs our script, also where somebody edited that."""
        found = []
        for entry in entries:
            inner = entry.get("hooks") if isinstance(entry, dict) else None
            kept = [one for one in inner if not self._runs_ours(one)] if isinstance(inner, list) else inner
            if kept == inner:
                found.append(entry)
            elif kept:
                found.append({**entry, "hooks": kept})
        return found

    def _runs_ours(self, hook: Any) -> bool:
        command = hook.get("command") if isinstance(hook, dict) else None
        return isinstance(command, str) and shlex.quote(str(self._script)) in command

    def _entry(self, event: str) -> dict[str, Any]:
        # a session that runs on keeps its hooks when they are uninstalled, and a shell that finds no script ends with 2: a refusal
        command = f"sh {shlex.quote(str(self._script))} {_ALL[event]} || true"
        timeout = 60_000 if event in REPORT else 5000  # ms
        entry: dict[str, Any] = {"hooks": [{"type": "command", "command": command, "timeout": timeout, "quiet": True}]}
        return {"matcher": "*", **entry} if event == "PostToolUse" else entry

    # -- the two files ------------------------------------------------------------------------------------------

    def _load(self) -> tuple[str | None, dict[str, Any]]:
        try:
            text = read_text(self._settings)
        except TargetRefused as error:
            raise StoreError(error.message, error.remedy) from error
        if text is None:
            return None, {}
        try:
            settings = json.loads(
                text, parse_float=_exact, parse_int=_exact_int, parse_constant=_refused, object_pairs_hook=_once
            )
        except _NotKept as error:
            raise StoreError(
                f"{self._settings} holds {error}, which would not be kept as it is, so nothing is written to it",
                "write that as plain JSON: one value for each key, and numbers in their shortest form",
            ) from None
        except (ValueError, RecursionError):
            settings = None
        hooks = settings.get("hooks", {}) if isinstance(settings, dict) else None
        if not isinstance(hooks, dict) or not all(isinstance(hooks.get(event, []), list) for event in _ALL):
            raise StoreError(
                f"{self._settings} is not what Letta Code 0.34 writes, so nothing is merged into it",
                "mend it, or ask for this version of Letta Code to be supported",
            )
        return text, settings

    def _read_record(self) -> _Record | None:
        """None where there is none, or what is there is none: then only our entries are taken out."""
        with contextlib.suppress(OSError, ValueError, RecursionError, TypeError), open_regular(self._record) as file:
            record = _Record(**json.loads(file.read(_LARGEST_RECORD)))
            if isinstance(record.before, str | None) and isinstance(record.after, str):
                return record
        return None

    def _write_record(self, record: _Record) -> None:
        try:
            write_whole(self._record, json.dumps(asdict(record)).encode(), 0o600)
        except OSError as error:
            raise StoreError(f"{self._record} cannot be written: {error.strerror}", "check its folder") from error


class _NotKept(ValueError):
    """What would be another after it is read and written."""


def _exact(written: str) -> float:
    number = float(written)
    if json.dumps(number) != written:
        raise _NotKept(f"the number {written[:40]}")
    return number


def _exact_int(written: str) -> int:
    number = int(written)
    if str(number) != written:
        raise _NotKept(f"the number {written[:40]}")
    return number


def _refused(written: str) -> float:
    raise _NotKept(f"{written}, which is no JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise _NotKept(f"the key {twice[:40]!r} twice in one object")
    return found


def _dumped(settings: dict[str, Any]) -> str:
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can only write escaped
        return json.dumps(settings, indent=2) + "\n"
    return text


def _digest(text: str | None) -> str:
    return "" if text is None else hashlib.sha256(text.encode()).hexdigest()
