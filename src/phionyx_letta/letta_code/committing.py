"""One approved file as a commit of a memory repository: through its hooks, on the commit that was read, and nothing besides.

The commit is made step by step as `git commit` makes it, but from an index of its own. Before HEAD moves (by compare-and-swap, so
never over a commit of somebody else) neither the work tree nor the index was touched: whoever is killed there, or refused by a hook,
leaves nothing. Then the work file and its index entry follow, each only where it still is what HEAD held before. A note in the git
directory lets the next run finish that for one that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phionyx_letta.errors import DiffConflictError, TargetRefused
from phionyx_letta.letta_code.errors import MemoryUnreadable, ObjectUnreadable
from phionyx_letta.letta_code.objects import MAX_TEXT, Entry, Objects
from phionyx_letta.letta_code.reading import open_regular
from phionyx_letta.letta_code.repository import MemoryRepository
from phionyx_letta.memory.files import FileTarget

__all__ = ["MemoryCommit", "MovedOn", "entry_at", "require_inside"]

_NOTE = "phionyx-patch"
_OID = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_TIMEOUT = 120.0  # s, for one git command: a repository's own hooks take part
_GRACE = 5.0  # s: git takes its locks away when it is told to end
_TRIES, _PAUSE = 10, 0.2  # s: how long somebody else's git may hold the index
#: A note that led to no commit in this time leads to none, s.
_STALE = 600.0
#: What `git commit` goes on from, and another commit would disturb.
_UNDER_WAY = ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "rebase-merge", "rebase-apply")
_SETTINGS = ("core.fsmonitor=false", "core.splitIndex=false", "core.fsync=all", "commit.gpgSign=false")
_IDENTITY = {
    f"GIT_{role}_{part}": value
    for role in ("AUTHOR", "COMMITTER")
    for part, value in (("NAME", "phionyx-letta"), ("EMAIL", "phionyx-letta@localhost"))
}


class MovedOn(Exception):
    """HEAD is another commit by now; nothing was written."""


@dataclass(frozen=True, slots=True)
class _Note:
    """What work file and index entry are to become: written before HEAD moves, removed when they have."""

    path: str
    mode: str
    old: str | None
    new: str


class MemoryCommit:
    """The repository of one memory, held against other processes of ours; use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Take the memory's folder.

        Raises:
            MemoryUnreadable: there is no repository.
        """
        self._path = path
        self._git_dir = MemoryRepository(path).git_dir
        self._note = self._git_dir / _NOTE
        self._lock = -1

    def __enter__(self) -> MemoryCommit:
        """Hold it.

        Raises:
            TargetRefused: another process does.
        """
        try:
            self._lock = os.open(self._git_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.__exit__()
            raise TargetRefused(
                f"another process writes to the memory {self._path}, or it cannot be written: {error.strerror}",
                "try again when it has ended",
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        """Let it go."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- the commit ---------------------------------------------------------------------------------------------

    def commit(self, base: str, path: str, old: Entry | None, data: bytes, message: str) -> list[str]:
        """Make one file hold `data`, on the commit `base`.

        Args:
            base: what HEAD was when `old` was read from it.
            path: of the file in the memory.
            old: what `base` holds there; None where it has no such file.
            data: the file's new content, as it is.
            message: of the commit.

        Returns:
            What a person should know; empty where all is as it should be.

        Raises:
            MovedOn: HEAD is no longer `base`.
            TargetRefused: a hook refuses it, changes it, or git cannot do it; nothing was changed.
        """
        self._require_quiet()
        mode = old.mode if old else "100644"
        with tempfile.TemporaryDirectory(prefix="phionyx-letta-") as folder:
            own = {"GIT_INDEX_FILE": os.path.join(folder, "index"), "GIT_EDITOR": ":"}
            blob = self._git("hash-object", "-w", "--no-filters", "--stdin", given=data)
            self._git("read-tree", base, extra=own)
            self._git("update-index", "--add", "--cacheinfo", f"{mode},{blob},{path}", extra=own)
            tree = self._git("write-tree", extra=own)
            said = Path(folder, "message")
            said.write_text(message, encoding="utf-8")
            self._hook("pre-commit", extra=own)
            self._hook("prepare-commit-msg", str(said), "message", extra=own)
            self._hook("commit-msg", str(said), extra=own)
            if self._git("write-tree", extra=own) != tree:
                raise TargetRefused(
                    f"a hook of {self._path} changes what was approved, so nothing was committed",
                    "correct the patch to what the hook wants: memory edit",
                )
            new = self._git("commit-tree", tree, "-p", base, "-F", str(said))
        self._write_note(_Note(path, mode, old.oid if old else None, blob))
        self._move_head(base, new, message.partition("\n")[0])
        told = self.settle()
        self._hook("post-commit", may_fail=True)
        return told

    def _require_quiet(self) -> None:
        for name in _UNDER_WAY:
            if os.path.lexists(self._git_dir / name):
                raise TargetRefused(
                    f"a merge or rebase is under way in {self._path} ({name})", "finish or abort it, then apply again"
                )
        if os.path.lexists(self._git_dir / "index.lock"):
            raise TargetRefused(
                f"git is at work in {self._path} (index.lock)",
                "apply again when it has ended; where no git is running, remove the file",
            )

    def _move_head(self, base: str, new: str, subject: str) -> None:
        try:
            self._git("update-ref", "-m", f"commit: {subject}", "HEAD", new, base)
        except TargetRefused:
            head = self._head()
            if head == new:  # the reference moved, and what came after failed
                return
            self._note.unlink(missing_ok=True)
            if head != base:
                raise MovedOn from None
            raise

    def _head(self) -> str | None:
        with Objects(MemoryRepository(self._path).git) as objects:
            return objects.head()

    # -- what follows it ----------------------------------------------------------------------------------------

    def staged(self) -> dict[bytes, Entry]:
        """What the index holds, by path; of a file in conflict an id that no object has."""
        found = {}
        for line in self._git("ls-files", "--stage", "-z").split("\0")[:-1]:
            (mode, oid, stage), name = line.partition("\t")[0].split(" "), line.partition("\t")[2]
            found[name.encode("utf-8", "surrogateescape")] = Entry(mode, oid if stage == "0" else "")
        return found

    def settle(self) -> list[str]:
        """Let work file and index entry follow a commit of ours, of this run or of one that was killed.

        Returns:
            What was left as it is because a person or the agent changed it meanwhile.
        """
        note = self._read_note()
        if note is None:
            return []
        try:
            return self._settled(note)
        except (MemoryUnreadable, ObjectUnreadable, TargetRefused) as error:  # the note stays, for the next run
            return [f"the commit is made, but the work file or the index does not follow yet: {error.message}"]

    def _settled(self, note: _Note) -> list[str]:
        with Objects(MemoryRepository(self._path).git) as objects:
            head = objects.head()
            entry = entry_at(objects, head, note.path) if head else None
            if (entry.oid if entry else None) != note.new:
                if time.time() - self._note.lstat().st_mtime > _STALE:
                    self._note.unlink(missing_ok=True)
                return []
            before = objects.content(Entry(note.mode, note.old)).text if note.old else None
            after = objects.content(Entry(note.mode, note.new)).text
        told = [*self._settle_file(note.path, before, after), *self._settle_index(note)]
        told += self._clear_up(note.path, {before, after})
        self._note.unlink(missing_ok=True)
        return told

    def _settle_file(self, path: str, before: str | None, after: str | None) -> list[str]:
        file = FileTarget(path, os.path.join(os.path.realpath(self._path), path))
        left = f"{path} was changed in {self._path} meanwhile and is left as it is, not committed and without the patch"
        try:
            now = file.read()
            if now == _unmarked(after) or after is None:
                return []
            if now != _unmarked(before):
                return [left]
            require_inside(self._path, path)
            file.write(now, _unmarked(after) or "")
        except DiffConflictError:
            return [left]
        return []

    def _clear_up(self, path: str, known: set[str | None]) -> list[str]:
        """Remove the copy that a killed `FileTarget` left beside the file; one that holds anything else is somebody's edit."""
        told = []
        folder, name = os.path.split(os.path.join(self._path, path))
        for copy in Path(folder).glob(f".{glob.escape(name[:180])}.????????????.tmp"):
            with contextlib.suppress(OSError, UnicodeDecodeError), open_regular(copy) as file:
                text = file.read(MAX_TEXT + 1).decode()
                # a part of it, where it was killed while writing
                if any(one is not None and one.startswith(text) for one in known):
                    copy.unlink()
                    continue
            told.append(f"{copy} holds an edit of {path} that was not committed")
        return told

    def _settle_index(self, note: _Note) -> list[str]:
        for attempt in range(_TRIES):
            try:
                entry = self.staged().get(note.path.encode())
                oid = entry.oid if entry else None
                if oid == note.old:
                    self._git("update-index", "--add", "--cacheinfo", f"{note.mode},{note.new},{note.path}")
                elif oid != note.new:
                    return [f"{note.path} was staged in {self._path} meanwhile and is left as it is"]
                return []
            except TargetRefused:
                if attempt == _TRIES - 1:
                    raise
                time.sleep(_PAUSE)
        return []

    def _write_note(self, note: _Note) -> None:
        text = json.dumps([note.path, note.mode, note.old, note.new])
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            with open(os.open(self._note, flags, 0o600), "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise TargetRefused(f"{self._note} cannot be written: {error.strerror}", "check it and the disk") from error

    def _read_note(self) -> _Note | None:
        """None where there is none, or where it was cut short: then HEAD was not moved yet."""
        try:
            with open_regular(self._note) as file:
                path, mode, old, new = json.loads(file.read(1 << 16))
        except (OSError, ValueError, RecursionError, TypeError):
            return None
        oids = [one for one in (old, new) if one is not None]
        if not all(isinstance(one, str) for one in (path, mode, *oids)) or not all(map(_OID.fullmatch, oids)):
            return None
        return _Note(path, mode, old, new)

    # -- git ----------------------------------------------------------------------------------------------------

    def _hook(self, name: str, *arguments: str, extra: Mapping[str, str] | None = None, may_fail: bool = False) -> None:
        try:
            self._git("hook", "run", "--ignore-missing", name, "--", *arguments, extra=extra or {})
        except TargetRefused:
            if not may_fail:
                raise

    def _git(self, *arguments: str, given: bytes = b"", extra: Mapping[str, str] | None = None) -> str:
        """Git with the repository's hooks, but none of the caller's GIT_* variables; return what it wrote.

        No option is given that git hands on to hooks and that changes what they see (`--literal-pathspecs` made Letta's validator
        find no file).

        Raises:
            TargetRefused: it, or a hook, failed or did not end.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        own = {
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_CEILING_DIRECTORIES": os.path.dirname(os.path.realpath(self._path)),
            "LANGUAGE": "en",
        }
        command = ["git", "-C", str(self._path), *(word for one in _SETTINGS for word in ("-c", one))]
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            code = _ended(
                [*command, *arguments],
                {**kept, **own, **_IDENTITY, **(extra or {})},
                given,
                output.fileno(),
                errors.fileno(),
            )
            output.seek(0)
            errors.seek(0)
            if code == 0:
                return output.read().decode("utf-8", "surrogateescape").removesuffix("\n")
            said = (errors.read() or output.read()).decode("utf-8", "replace").strip()[-400:]
        shown = "".join(char if char.isprintable() else " " for char in said)
        if arguments[0] == "hook" and "is not a git command" in said:
            raise TargetRefused("this git is too old to run a repository's hooks", "use git 2.36 or newer")
        raise TargetRefused(
            f"the memory's repository refuses it ({' '.join(arguments[: 1 + 3 * (arguments[0] == 'hook')])}): {shown}",
            "correct the patch (memory edit) or the repository, and apply again",
        )


def entry_at(objects: Objects, commit: str, path: str) -> Entry | None:
    """What a commit holds at a path; None where that is no file.

    Raises:
        ObjectUnreadable: a tree on the way is missing.
    """
    entry: Entry | None = Entry("40000", objects.commit(commit).tree)
    for part in path.encode().split(b"/"):
        if entry is None or entry.mode != "40000":
            return None
        entry = objects.tree(entry.oid).get(part)
    return entry if entry is None or entry.mode != "40000" else None


def require_inside(memory: Path, path: str) -> None:
    """Refuse a file whose folder is reached through a link.

    Raises:
        TargetRefused: it is.
    """
    root = os.path.realpath(memory)
    folder = os.path.dirname(os.path.join(root, path))
    if os.path.realpath(folder) != folder:
        raise TargetRefused(f"{path} leads out of the memory through a link", "remove the link")


def _unmarked(text: str | None) -> str | None:
    """Without a byte order mark, which `FileTarget` keeps by itself."""
    return None if text is None else text.removeprefix("\ufeff")


def _ended(command: list[str], environment: dict[str, str], given: bytes, output: int, errors: int) -> int:
    """Run to the end and return the code. Files, not pipes: what a hook leaves running in the background would keep a pipe open."""
    with tempfile.TemporaryFile() as source:
        source.write(given)
        source.seek(0)
        try:
            process = subprocess.Popen(
                command, stdin=source, stdout=output, stderr=errors, env=environment, start_new_session=True
            )
        except OSError as error:
            raise TargetRefused(f"git cannot be run: {error.strerror}", "install git, or check its rights") from error
    try:
        return process.wait(_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise TargetRefused(
            f"git {' '.join(command[-4:])} did not end within {_TIMEOUT:.0f} s", "check the repository's hooks"
        ) from None
    finally:
        if process.returncode is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
            return
