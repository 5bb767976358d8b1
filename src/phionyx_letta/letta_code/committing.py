"""One approved file as a commit of a memory repository: through its hooks, on the commit that was read, and nothing besides.

The commit is made step by step as `git commit` makes it, but from an index of its own. Before HEAD moves (by compare-and-swap, so
never over a commit of somebody else) neither the work tree nor the index was touched: whoever is killed there, or refused by a hook,
leaves nothing. Then the work file and its index entry follow, each only where it still is what HEAD held before. A note in
PHIONYX_LETTA_HOME lets the next run finish that for one that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import stat
import tempfile
import time
from pathlib import Path

from phionyx_letta.errors import DiffConflictError, TargetRefused
from phionyx_letta.letta_code.contents import content_of
from phionyx_letta.letta_code.errors import MemoryUnreadable, ObjectUnreadable
from phionyx_letta.letta_code.objects import MAX_TEXT, Entry, Objects
from phionyx_letta.letta_code.plumbing import Plumbing
from phionyx_letta.letta_code.reading import open_regular
from phionyx_letta.letta_code.repository import MemoryRepository
from phionyx_letta.letta_code.trees import changed_files
from phionyx_letta.letta_code.unfinished import Note, Unfinished
from phionyx_letta.memory.files import FileTarget

__all__ = ["MemoryCommit", "MovedOn", "entry_at", "require_inside"]

_TRIES, _PAUSE, _PATIENCE = 10, 0.2, 5.0  # s: how long somebody else's git may hold the index
#: What `git commit` goes on from, and another commit would disturb.
_UNDER_WAY = ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "rebase-merge", "rebase-apply")
_MAX_MESSAGE = 64 << 10
_CLAIM = re.compile(r"^[ \t]*phionyx-.*$", re.IGNORECASE | re.MULTILINE)


class MovedOn(Exception):
    """HEAD is another commit by now; nothing was written."""


class MemoryCommit:
    """The repository of one memory, held against other processes of ours; use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Take the memory's folder.

        Raises:
            MemoryUnreadable: there is no repository.
        """
        self._path = path
        self._git_dir = MemoryRepository(path).git_dir
        self._git = Plumbing(path)
        self._note = Unfinished(path)
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
            blob = self._git.run("hash-object", "-w", "--no-filters", "--stdin", given=data)
            self._git.run("read-tree", base, extra=own)
            self._git.run("update-index", "--add", "--cacheinfo", f"{mode},{blob},{path}", extra=own)
            tree = self._git.run("write-tree", extra=own)
            said = Path(folder, "message")
            said.write_text(message, encoding="utf-8")
            self._git.hook("pre-commit", extra=own)
            self._git.hook("prepare-commit-msg", str(said), "message", extra=own)
            self._git.hook("commit-msg", str(said), extra=own)
            if self._git.run("write-tree", extra=own) != tree:
                raise self._changed("what was approved")
            new = self._git.run("commit-tree", tree, "-p", base, given=self._kept_claims(said, message))
        self._require_exact(base, new, path, old, Entry(mode, blob), data)
        self._note.write(Note(path, mode, old.oid if old else None, blob))
        self._move_head(base, new, message.partition("\n")[0])
        told = self.settle()
        with contextlib.suppress(TargetRefused):
            self._git.hook("post-commit")
        return told

    def _changed(self, what: str) -> TargetRefused:
        return TargetRefused(
            f"a hook of {self._path} changes {what}, so nothing was committed",
            "correct the hook, or edit the patch to what it wants: `phionyx-letta code review -i`",
        )

    def _kept_claims(self, file: Path, given: str) -> bytes:
        """The message as hooks left it, if it still says of the patch and the reviewer what was given."""
        try:
            with open_regular(file) as opened:
                data = opened.read(_MAX_MESSAGE + 1)
        except OSError:
            data = b""
        text = data.decode("utf-8", "replace")
        if len(data) > _MAX_MESSAGE or sorted(_CLAIM.findall(text)) != sorted(_CLAIM.findall(given)):
            raise self._changed("what the commit says of its patch")
        return data

    def _require_exact(self, base: str, new: str, path: str, old: Entry | None, entry: Entry, data: bytes) -> None:
        """Read the commit as everybody will: on `base`, and different from it in this file and these bytes alone."""
        with Objects(MemoryRepository(self._path).git) as objects:
            made = objects.commit(new)
            changed = changed_files(objects, objects.commit(base).tree, made.tree)
            same = objects.content(entry).digest == content_of(data).digest
        if not same or made.parents != (base,) or changed != ([(path.encode(), old, entry)] if old != entry else []):
            raise TargetRefused(
                f"the commit in {self._path} would hold something else than what was approved",
                f"look for what is in the place of its objects: git -C {self._path} replace --list",
            )

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
            self._git.move_head(base, new, subject)
        except TargetRefused:
            head = self._head()
            if head == new:  # the reference moved, and what came after failed
                return
            self._note.remove()
            if head != base:
                raise MovedOn from None
            raise

    def _head(self) -> str | None:
        with Objects(MemoryRepository(self._path).git) as objects:
            return objects.head()

    # -- what follows it ----------------------------------------------------------------------------------------

    def staged(self) -> dict[bytes, Entry]:
        """What the index holds, by path; of a file in conflict an id that no object has."""
        index = self._git_dir / "index"
        if os.path.lexists(index) and not stat.S_ISREG(index.lstat().st_mode):  # git would wait at a pipe
            raise TargetRefused(f"{index} is not a regular file", "remove it: git reset makes it anew")
        found = {}
        for line in self._git.run("ls-files", "--stage", "-z").split("\0")[:-1]:
            (mode, oid, stage), name = line.partition("\t")[0].split(" "), line.partition("\t")[2]
            found[name.encode("utf-8", "surrogateescape")] = Entry(mode, oid if stage == "0" else "")
        return found

    def settle(self) -> list[str]:
        """Let work file and index entry follow a commit of ours, of this run or of one that was killed.

        Returns:
            What was left as it is because a person or the agent changed it meanwhile.
        """
        note = self._note.read()
        if note is None:
            return []
        try:
            return self._settled(note)
        except (MemoryUnreadable, ObjectUnreadable, TargetRefused) as error:  # the note stays, for the next run
            return [f"the commit is made, but the work file or the index does not follow yet: {error.message}"]

    def _settled(self, note: Note) -> list[str]:
        with Objects(MemoryRepository(self._path).git) as objects:
            head = objects.head()
            entry = entry_at(objects, head, note.path) if head else None
            if (entry.oid if entry else None) != note.new:
                if self._note.stale:
                    self._note.remove()
                return []
            before = objects.content(Entry(note.mode, note.old)).text if note.old else None
            after = objects.content(Entry(note.mode, note.new)).text
        told = [*self._settle_file(note.path, before, after), *self._settle_index(note)]
        told += self._clear_up(note.path, {before, after})
        self._note.remove()
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
        require_inside(self._path, path)
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

    def _settle_index(self, note: Note) -> list[str]:
        end = time.monotonic() + _PATIENCE
        for attempt in range(_TRIES):
            try:
                entry = self.staged().get(note.path.encode())
                oid = entry.oid if entry else None
                if oid == note.old:
                    self._git.run("update-index", "--add", "--cacheinfo", f"{note.mode},{note.new},{note.path}")
                elif oid != note.new:
                    return [f"{note.path} was staged in {self._path} meanwhile and is left as it is"]
                return []
            except TargetRefused:
                if attempt == _TRIES - 1 or time.monotonic() > end:
                    raise
                time.sleep(_PAUSE)
        return []


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
