"""A memory file of Letta Code as the target of patches: what is read is HEAD's, and writing is a commit.

The commit goes through the repository's own hooks, Letta's validator among them, and never past them. So applying a patch runs what is
in `.git/hooks`, as the agent's own commits do. Nothing is written over a change that is not committed, nor onto another commit than
the one that was read.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from phionyx_letta.diff import content_hash
from phionyx_letta.errors import DiffConflictError, TargetRefused
from phionyx_letta.letta_code.changes import block_id, file_name, label_of
from phionyx_letta.letta_code.committing import MemoryCommit, MovedOn, entry_at, require_inside
from phionyx_letta.letta_code.errors import MemoryUnreadable, ObjectUnreadable, TooManyFiles
from phionyx_letta.letta_code.objects import MAX_TEXT, Entry, Objects
from phionyx_letta.letta_code.places import AgentMemory
from phionyx_letta.letta_code.repository import MemoryRepository
from phionyx_letta.letta_code.trees import changed_files
from phionyx_letta.letta_code.working_tree import committed_files, differences

__all__ = ["MemfsTarget", "MemfsTargets"]

_NAME = re.compile(
    r"(?:[^/\\\x00-\x1f\x7f%.][^/\\\x00-\x1f\x7f%]{0,200}/){0,10}[^/\\\x00-\x1f\x7f%.][^/\\\x00-\x1f\x7f%]{0,200}\.md"
)
_FRONT = re.compile(r"\A---\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_DESCRIPTION = re.compile(r"^description:[ \t]*(\S.*)", re.MULTILINE)
_TRAILER = re.compile(r"[^\x20-\x7e]+")


class MemfsTargets:
    """All memory files of some agents; a target's name is the agent's id, `/`, and the path in its memory."""

    def __init__(self, memories: Sequence[AgentMemory], newest: Callable[[str], str | None] | None = None) -> None:
        """Take the memories, and what says which envelope of an agent is the newest; nothing is read yet."""
        self._memories = {one.agent_id: one for one in memories}
        self._newest = newest
        self.told: list[str] = []
        """What a person should know of what was written: work files that were left as they are."""
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
                f"{name!r} is no memory file of an agent here",
                "name it AGENT/PATH.md, as `phionyx-letta code review` shows it",
            )
        return MemfsTarget(self, self._memories[agent], path)

    def settle(self, name: str) -> None:
        """Let the work file follow the commit of a run that was killed in between, in the memory this file is of."""
        memory = self._memories.get(name.partition("/")[0])
        if memory is not None:
            with contextlib.suppress(MemoryUnreadable, TargetRefused), MemoryCommit(memory.path) as repository:
                self.told += repository.settle()

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
                entry = entry_at(objects, self._base, self._path) if self._base else None
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
            DiffConflictError: the file is another by now; nothing was written.
            TargetRefused: HEAD is another commit, something is not committed, the frontmatter is not valid, or a hook of the
                repository refuses it; nothing was written.
        """
        base = self._base
        now = self.read()
        if now != expected:
            raise _conflict(self._path, expected, now)
        if base != self._base or self._base is None:
            raise self._moved_on()
        data = _encoded(self._path, text)
        _require_frontmatter(self._path, text, expected)
        require_inside(self._memory.path, self._path)
        try:
            with MemoryCommit(self._memory.path) as repository:
                self._targets.told += repository.settle()
                old = self._require_clean(repository)
                message = self._targets.message(self._memory.agent_id)
                self._targets.told += repository.commit(self._base, self._path, old, data, message)
        except MovedOn:
            found = self.read()
            if found != expected:
                raise _conflict(self._path, expected, found) from None
            raise self._moved_on() from None
        except (MemoryUnreadable, ObjectUnreadable, TooManyFiles) as error:
            raise TargetRefused(f"{self._path} cannot be written: {error.message}", error.remedy) from error
        return None

    def _moved_on(self) -> TargetRefused:
        return TargetRefused(
            f"the memory of {self._memory.agent_id} got another commit meanwhile, or has none", "apply the patch again"
        )

    def _require_clean(self, repository: MemoryCommit) -> Entry | None:
        """Refuse where work tree or index hold what HEAD does not; return what HEAD has at the path."""
        with Objects(MemoryRepository(self._memory.path).git) as objects:
            committed = committed_files(objects, self._base)
            dirty = differences(objects, self._memory.path, committed)
        own, staged = self._path.encode(), repository.staged()
        blocking = [one["path"] for one in dirty if one["state"] != "untracked" or one["path"] == file_name(own)]
        blocking += [
            file_name(name) for name in staged.keys() | committed.keys() if staged.get(name) != committed.get(name)
        ]
        if blocking:
            raise TargetRefused(
                f"{', '.join(sorted({one or 'a part' for one in blocking})[:5])} in the memory of"
                f" {self._memory.agent_id} is not committed",
                "let the agent commit it, or undo it; then apply the patch again",
            )
        return committed.get(own)


def _files(objects: Objects) -> list[str]:
    head = objects.head()
    tree = objects.commit(head).tree if head else None
    return [
        file_name(path)
        for path, _, entry in changed_files(objects, None, tree)
        if entry and entry.mode.startswith("100")
    ]


def _conflict(path: str, expected: str | None, found: str | None) -> DiffConflictError:
    return DiffConflictError(
        path,
        content_hash(expected or ""),
        content_hash(found or ""),
        "merge it with what the file holds now: `phionyx-letta code rebase`",
    )


def _encoded(path: str, text: str) -> bytes:
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        raise TargetRefused(f"the new text of {path} is no UTF-8", "remove its lone surrogates") from None
    if b"\0" in data or len(data) > MAX_TEXT:
        raise TargetRefused(
            f"the new text of {path} holds NUL bytes or is over {MAX_TEXT >> 20} MiB",
            "memory is text of files that fit",
        )
    return data


def _require_frontmatter(path: str, text: str, before: str | None) -> None:
    """What Letta's validator wants, said before anything is written; files that never had a frontmatter (MEMORY.md) need none."""
    if path.rpartition("/")[2] == "MEMORY.md" or (before is not None and not _FRONT.match(before)):
        return
    front = _FRONT.match(text)
    if front is None or not _DESCRIPTION.search(front[1]):
        raise TargetRefused(
            f"{path} would have no valid frontmatter", "keep the `---` block with a description at its beginning"
        )
