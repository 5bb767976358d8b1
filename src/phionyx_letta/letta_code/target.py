"""A memory file of Letta Code as the target of patches: what is read is HEAD's, and writing is a commit.

The commit goes through the repository's own hooks, Letta's validator among them, and never past them. So applying a patch runs what is
in `.git/hooks`, as the agent's own commits do. Nothing is written over a change that is not committed, nor onto another commit than
the one that was read.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phionyx_letta.diff import content_hash
from phionyx_letta.errors import DiffConflictError, TargetRefused
from phionyx_letta.letta_code.changes import block_id, file_name, label_of
from phionyx_letta.letta_code.errors import MemoryUnreadable, ObjectUnreadable, TooManyFiles
from phionyx_letta.letta_code.objects import Entry, Objects
from phionyx_letta.letta_code.places import AgentMemory
from phionyx_letta.letta_code.repository import MemoryRepository
from phionyx_letta.letta_code.trees import changed_files
from phionyx_letta.letta_code.working_tree import uncommitted
from phionyx_letta.memory.files import write_text

__all__ = ["MemfsTarget", "MemfsTargets"]

_NAME = re.compile(
    r"(?:[^/\\\x00-\x1f\x7f%.][^/\\\x00-\x1f\x7f%]{0,200}/){0,10}[^/\\\x00-\x1f\x7f%.][^/\\\x00-\x1f\x7f%]{0,200}\.md"
)
_FRONT = re.compile(r"\A---\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_DESCRIPTION = re.compile(r"^description:[ \t]*(\S.*)", re.MULTILINE)
_TIMEOUT = 120.0  # s: a repository's own hooks take part
_TRAILER = re.compile(r"[^\x20-\x7e]+")


class MemfsTargets:
    """All memory files of some agents; a target's name is the agent's id, `/`, and the path in its memory."""

    def __init__(self, memories: Sequence[AgentMemory], newest: Callable[[str], str | None] | None = None) -> None:
        """Take the memories, and what says which envelope of an agent is the newest; nothing is read yet."""
        self._memories = {one.agent_id: one for one in memories}
        self._newest = newest
        self._trailers: list[tuple[str, str]] = []
        self._subject = "Apply an approved memory patch"

    def names(self) -> list[str]:
        """The Markdown files that HEAD of each memory holds, sorted."""
        found = []
        for memory in self._memories.values():
            try:
                with Objects(MemoryRepository(memory.path).git) as objects:
                    found += [f"{memory.agent_id}/{name}" for name in _files(objects) if _NAME.fullmatch(name)]
            except (MemoryUnreadable, ObjectUnreadable, TooManyFiles):
                continue
        return sorted(found)

    def resolve(self, name: str) -> MemfsTarget:
        """The file of this name, whether it exists yet or not.

        Raises:
            TargetRefused: there is no such agent, or the path is not one of a memory file.
        """
        agent, _, path = name.partition("/")
        if agent not in self._memories or not _NAME.fullmatch(path):
            raise TargetRefused(
                f"{name!r} is no memory file of an agent here", "name it AGENT/PATH.md, as `code review` shows it"
            )
        return MemfsTarget(self, self._memories[agent], path)

    def about(self, name: str) -> str:
        """Return the description in the file's frontmatter; empty where there is none."""
        front = _FRONT.match(self.resolve(name).read() or "")
        found = _DESCRIPTION.search(front[1]) if front else None
        return found[1].strip() if found else ""

    @contextmanager
    def attributed(self, subject: str, **trailers: str) -> Iterator[None]:
        """What the commits made in this block say of themselves, in `Phionyx-…` trailers."""
        before = self._subject, self._trailers
        self._subject = subject
        self._trailers = [(name, _TRAILER.sub("?", value)[:200]) for name, value in trailers.items() if value]
        try:
            yield
        finally:
            self._subject, self._trailers = before

    def message(self, agent: str) -> str:
        """Of the next commit."""
        lines = [f"Phionyx-{name.replace('_', '-').title()}: {value}" for name, value in self._trailers]
        newest = self._newest(agent) if self._newest is not None else None
        if newest is not None:
            lines.append(f"Phionyx-Envelope: {newest}")
        return "\n".join([self._subject, "", *lines])


class MemfsTarget:
    """One memory file."""

    def __init__(self, targets: MemfsTargets, memory: AgentMemory, path: str) -> None:
        """See `MemfsTargets.resolve`."""
        self._targets, self._memory, self._path = targets, memory, path
        self._base: str | None = None

    @property
    def name(self) -> str:
        """What `MemfsTargets.resolve` finds it by."""
        return f"{self._memory.agent_id}/{self._path}"

    @property
    def identity(self) -> str:
        """As the ledger names the block."""
        return block_id(self._memory.agent_id, file_name(self._path.encode()))

    @property
    def label(self) -> str:
        """The frontmatter's name."""
        return label_of(self._path, self.read())

    @property
    def limit(self) -> int | None:
        """None: Letta Code sets none."""
        return None

    @property
    def records_itself(self) -> bool:
        """False: the next ingest records the commit."""
        return False

    def notes(self) -> list[str]:
        """Nothing: one agent has this memory."""
        return []

    def read(self) -> str | None:
        """What HEAD holds, None where it has no such file.

        Raises:
            TargetRefused: it is no file of text, or the repository cannot be read.
        """
        try:
            with Objects(MemoryRepository(self._memory.path).git) as objects:
                self._base = objects.head()
                entry = _entry(objects, self._base, self._path)
                if entry is None:
                    return None
                content = objects.content(entry)
        except (MemoryUnreadable, ObjectUnreadable) as error:
            raise TargetRefused(f"{self._path} cannot be read: {error.message}", error.remedy) from error
        if content.text is None or not entry.mode.startswith("100"):
            raise TargetRefused(f"{self._path} is no file of text", "patches change text only")
        return content.text

    def write(self, expected: str | None, text: str, cause: Mapping[str, Any] | None = None) -> str | None:
        """Commit `text` in place of `expected`, on the commit that was read; what caused it stands in the trailers (`attributed`).

        Raises:
            DiffConflictError: HEAD is another commit by now; nothing was written.
            TargetRefused: something is not committed, the frontmatter is not valid, or a hook of the repository refuses it.
        """
        base = self._base
        now = self.read()
        if now != expected or (base is not None and base != self._base):
            raise DiffConflictError(
                self._path, content_hash(expected or ""), content_hash(now or ""), "rebase the patch"
            )
        self._require_clean()
        _require_frontmatter(self._path, text, expected)
        path = self._memory.path / self._path
        folder, root = path.parent.resolve(), self._memory.path.resolve()
        if root not in (folder, *folder.parents):
            raise TargetRefused(f"{self._path} leads out of the memory through a link", "remove the link")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
        try:
            self._git("add", "--", self._path)
            self._git(
                "commit", "--quiet", "--only", "-m", self._targets.message(self._memory.agent_id), "--", self._path
            )
        except TargetRefused:
            self._put_back(path, expected)
            raise
        self._check_parent(now, text)
        return None

    def _require_clean(self) -> None:
        with Objects(MemoryRepository(self._memory.path).git) as objects:
            dirty = uncommitted(objects, self._memory.path, self._base)
        blocking = [
            one["path"] for one in dirty if one["state"] != "untracked" or one["path"] == file_name(self._path.encode())
        ]
        if blocking:
            raise TargetRefused(
                f"{', '.join(blocking[:5])} in the memory of {self._memory.agent_id} is not committed",
                "let the agent commit it, or undo it; then apply the patch again",
            )

    def _put_back(self, path: Path, expected: str | None) -> None:
        self._git("reset", "--quiet", "--", self._path, may_fail=True)
        if expected is None:
            path.unlink(missing_ok=True)
        else:
            write_text(path, expected)

    def _check_parent(self, before: str | None, text: str) -> None:
        """Another commit may have come in between: if it changed this file, ours is taken back by a commit of its own."""
        with Objects(MemoryRepository(self._memory.path).git) as objects:
            head = objects.head()
            parents = objects.commit(head).parents if head else ()
            if parents[:1] == ((self._base,) if self._base else ()):
                return
            entry = _entry(objects, parents[0], self._path) if parents else None
            found = objects.content(entry).text if entry else None
        if found != before:
            self._git("revert", "--no-edit", "HEAD")
            raise DiffConflictError(
                self._path, content_hash(before or ""), content_hash(found or ""), "rebase the patch"
            )

    def _git(self, *arguments: str, may_fail: bool = False) -> None:
        """Git with the repository's hooks, but none of the caller's GIT_* variables."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment |= {
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_AUTHOR_NAME": "phionyx-letta",
            "GIT_AUTHOR_EMAIL": "phionyx-letta@localhost",
            "GIT_COMMITTER_NAME": "phionyx-letta",
            "GIT_COMMITTER_EMAIL": "phionyx-letta@localhost",
        }
        command = ["git", "-C", str(self._memory.path), "-c", "core.fsmonitor=false", "-c", "commit.gpgSign=false"]
        try:
            done = subprocess.run(
                [*command, "--literal-pathspecs", *arguments],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                env=environment,
                timeout=_TIMEOUT,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TargetRefused(
                f"git {arguments[0]} did not end: {type(error).__name__}", "check the repository"
            ) from error
        if done.returncode and not may_fail:
            said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-400:]
            shown = "".join(char if char.isprintable() else " " for char in said)
            raise TargetRefused(f"the memory's repository refuses it: {shown}", "correct the patch: memory edit")


def _files(objects: Objects) -> list[str]:
    head = objects.head()
    tree = objects.commit(head).tree if head else None
    return [
        file_name(path)
        for path, _, entry in changed_files(objects, None, tree)
        if entry and entry.mode.startswith("100")
    ]


def _entry(objects: Objects, commit: str | None, path: str) -> Entry | None:
    if commit is None:
        return None
    entry: Entry | None = Entry("40000", objects.commit(commit).tree)
    for part in path.encode().split(b"/"):
        if entry is None or entry.mode != "40000":
            return None
        entry = objects.tree(entry.oid).get(part)
    return entry if entry is None or entry.mode != "40000" else None


def _require_frontmatter(path: str, text: str, before: str | None) -> None:
    """What Letta's validator wants, said before anything is written; files that never had a frontmatter (MEMORY.md) need none."""
    if path.rpartition("/")[2] == "MEMORY.md" or (before is not None and not _FRONT.match(before)):
        return
    front = _FRONT.match(text)
    if front is None or not _DESCRIPTION.search(front[1]):
        raise TargetRefused(
            f"{path} would have no valid frontmatter", "keep the `---` block with a description at its beginning"
        )
