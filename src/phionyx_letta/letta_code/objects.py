"""Git's objects, read through one running ``git cat-file --batch``: a few processes a run, not one for each commit and file.

Only object ids are ever asked for, so no name from the repository reaches a command line.
"""

from __future__ import annotations

import hashlib
import os
import re
import select
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from phionyx_letta.errors import StoreError
from phionyx_letta.ledger.log.git import GitRepository
from phionyx_letta.letta_code.contents import ABSENT, Content, content_of
from phionyx_letta.letta_code.errors import MemoryUnreadable, ObjectUnreadable
from phionyx_letta.letta_code.ownership import unreadable

__all__ = ["SUBMODULE", "SUBTREE", "SYMLINK", "Commit", "Entry", "Objects", "by_name"]

#: Of a file that is compared character by character; of a larger one only hash and size are taken, in flat memory.
MAX_TEXT = 1 << 20
#: Of a commit or a tree.
_MAX_META = 64 << 20
_AT_ONCE = 200
#: Commits that are walked before git is asked what comes behind, and how many it is asked for.
_FEW, _MOST_AHEAD = 10, 5000
_PATIENCE = 60.0  # s without a byte from git: an object can be a named pipe
_CACHED = 16 << 20
_OID = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_MAX_MESSAGE = 64 << 10
_TREE_ENTRY = {width: re.compile(rb"[0-7]{1,7} [^\0]*\0.{%d}" % width, re.DOTALL) for width in (20, 32)}
_COMMIT = re.compile(
    rb"tree ([0-9a-f]{40,64})\n((?:parent [0-9a-f]{40,64}\n)*)author ([^\n]*)\ncommitter ([^\n]*)\n(?:[^\n]+\n)*(?:\n|\Z)"
)
SUBTREE, SYMLINK, SUBMODULE = "40000", "120000", "160000"
_MODES = {one.encode(): one for one in (SUBTREE, SYMLINK, SUBMODULE, "100644", "100755")}


class Entry(NamedTuple):
    """A file in a tree."""

    mode: str
    oid: str


@dataclass(frozen=True, slots=True)
class Commit:
    """What a commit object says. Names, times and the message are claims of whoever made it."""

    oid: str
    tree: str
    parents: tuple[str, ...]
    author: str
    committer: str
    message: str


class Objects:
    """The objects of one repository; use as a context manager."""

    def __init__(self, repository: GitRepository) -> None:
        """Start nothing yet."""
        self._repository = repository
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer, self._read = b"", 0  # what git wrote, and how much of it was taken
        self._answered = ""
        self._cache: dict[str, Commit | Content | frozenset[bytes]] = {}
        self._sizes = deque[tuple[str, int]]()  # in the order they came
        self._cached = 0

    def __enter__(self) -> Objects:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End git."""
        self._end()

    # -- what is asked ------------------------------------------------------------------------------------------

    def head(self) -> str | None:
        """The commit HEAD stands at, None where there is none yet.

        Raises:
            MemoryUnreadable: this is no repository git can read, or the commit is not there.
        """
        try:
            kind, oid, size = self._ask("HEAD")
        except ObjectUnreadable:
            if self._process is None:
                raise unreadable(self._repository.path) from None
            named = self._repository.run("rev-parse", "--verify", "--quiet", "HEAD", failing_is_none=True)
            if named:  # a commit that is missing, which is not the same as none
                raise MemoryUnreadable(
                    f"HEAD of {self._repository.path} is {named[:64]}, which is missing",
                    f"check it: git -C {self._repository.path} fsck",
                ) from None
            return None
        self._skip(size + 1)
        return oid if kind == "commit" else None

    def commit(self, oid: str) -> Commit:
        """A commit, by its own bytes: neither grafts nor replacements nor a shallow boundary change what it says.

        Raises:
            ObjectUnreadable: it is not there, or is none.
        """
        cached = self._cache.get(oid)
        if isinstance(cached, Commit):
            return cached
        return self._keep_commit(oid, self._meta(oid, "commit"))

    def _keep_commit(self, oid: str, data: bytes) -> Commit:
        found = _COMMIT.match(data)
        if found is not None:
            tree, parents = found[1].decode("ascii"), tuple(found[2].decode("ascii").replace("parent ", "").split())
            author, committer, message = found[3], found[4], data[found.end() :]
        else:  # no author, or lines in another order: git takes it all the same
            head, _, message = data.partition(b"\n\n")
            fields: dict[bytes, list[bytes]] = {}
            for line in head.split(b"\n"):
                name, _, value = line.partition(b" ")
                fields.setdefault(name, []).append(value)
            author, committer, first = (fields.get(name, [b""])[0] for name in (b"author", b"committer", b"tree"))
            tree, *others = (one.decode("ascii", "replace") for one in (first, *fields.get(b"parent", [])))
            parents = tuple(others)
        if not all(len(one) == len(oid) and _OID.fullmatch(one) for one in (tree, *parents)):
            raise ObjectUnreadable(f"the commit {oid} is malformed")
        said = (part.decode("utf-8", "replace") for part in (author, committer, message[:_MAX_MESSAGE]))
        commit = Commit(oid, tree, parents, *said)
        self._remember(oid, commit, len(data) + 800)
        return commit

    def entries(self, oid: str) -> frozenset[bytes]:
        """The entries of a tree as they stand there, each the bytes of mode, name and id.

        Raises:
            ObjectUnreadable: it is not there, or is none.
        """
        cached = self._cache.get(oid)
        if isinstance(cached, frozenset):
            return cached
        return self._keep_entries(oid, self._meta(oid, "tree"))

    def _keep_entries(self, oid: str, data: bytes) -> frozenset[bytes]:
        found = frozenset(_TREE_ENTRY[len(oid) // 2].findall(data))
        if sum(map(len, found)) != len(data):
            raise ObjectUnreadable(f"the tree {oid} is malformed")  # repeated entries too
        self._remember(oid, found, 2 * len(data) + 60 * len(found) + 200)
        return found

    def tree(self, oid: str) -> dict[bytes, Entry]:
        """The entries of a tree by name.

        Raises:
            ObjectUnreadable: it is not there, or is none.
        """
        return by_name(self.entries(oid))

    def content(self, entry: Entry | None) -> Content:
        """What a tree's entry holds: of a link its target, of a submodule the commit it names.

        Raises:
            ObjectUnreadable: it is not there, or is no file.
        """
        if entry is None:
            return ABSENT
        if entry.mode == SUBMODULE:
            return content_of(entry.oid.encode())
        cached = self._cache.get(entry.oid)
        if isinstance(cached, Content):
            return cached
        kind, _, size = self._ask(entry.oid)
        if kind != "blob":
            self._skip(size + 1)
            raise ObjectUnreadable(f"{entry.oid} is not a file but a {kind}")
        return self._keep_content(entry.oid, size)

    def _keep_content(self, oid: str, size: int) -> Content:
        if size <= MAX_TEXT:
            found = content_of(self._take(size + 1)[:-1])
        else:
            digest, left = hashlib.sha256(), size
            while left:
                piece = self._some(left)
                digest.update(piece)
                left -= len(piece)
            self._skip(1)
            found = Content("sha256:" + digest.hexdigest(), size, size, None)
        self._remember(oid, found, 500 + (found.size if found.text is not None else 0))
        return found

    def first_parents(self, oid: str) -> Iterator[Commit]:
        """Yield a commit and its first parents, down to the first that cannot be read or has none.

        Where there are many, git is asked for their ids beforehand, so that nobody waits for each: what they say is read here.
        """
        at, walked, ahead, more = oid, 0, deque[str](), True
        while at:
            if walked >= _FEW and at not in self._cache:
                if not ahead and more:
                    ahead.extend(self._named_ahead(at))
                    more = len(ahead) == _MOST_AHEAD
                self.prefetch(ahead.popleft() for _ in range(min(_AT_ONCE, len(ahead))))
            try:
                commit = self.commit(at)
            except ObjectUnreadable:
                return
            yield commit
            walked += 1
            at = commit.parents[0] if commit.parents else ""

    def _named_ahead(self, oid: str) -> list[str]:
        try:
            said = self._repository.run(
                "rev-list", "--first-parent", f"--max-count={_MOST_AHEAD}", oid, "--", failing_is_none=True
            )
        except StoreError:
            return []
        return (said or "").split()

    def prefetch(self, oids: Iterable[str]) -> None:
        """Read objects that are about to be asked for, without waiting for each; what cannot be read is left out."""
        wanted = [oid for oid in dict.fromkeys(oids) if oid not in self._cache and _OID.fullmatch(oid)]
        for start in range(0, len(wanted), _AT_ONCE):
            part = wanted[start : start + _AT_ONCE]
            try:
                self._send(part)  # all of it fits into the pipe, so neither side waits for the other
                for oid in part:
                    kind, size = self._header()
                    if kind == "blob":
                        self._keep_content(oid, size)
                    elif kind in ("tree", "commit") and size <= _MAX_META:
                        keep = self._keep_entries if kind == "tree" else self._keep_commit
                        keep(oid, self._take(size + 1)[:-1])
                    elif kind:
                        self._skip(size + 1)
            except (ObjectUnreadable, OSError):
                self._end()
                return

    # -- the running git ----------------------------------------------------------------------------------------

    def _meta(self, oid: str, wanted: str) -> bytes:
        kind, _, size = self._ask(oid)
        if kind != wanted or size > _MAX_META:
            self._skip(size + 1)
            raise ObjectUnreadable(f"{oid} is not a {wanted}" if kind != wanted else f"the {wanted} {oid} is too large")
        return self._take(size + 1)[:-1]

    def _remember(self, oid: str, found: Commit | Content | frozenset[bytes], size: int) -> None:
        if size > _CACHED // 4 or oid in self._cache:
            return
        self._cache[oid] = found
        self._sizes.append((oid, size))
        self._cached += size
        while self._cached > _CACHED:
            first, size = self._sizes.popleft()
            del self._cache[first]
            self._cached -= size

    def _ask(self, name: str) -> tuple[str, str, int]:
        """Kind, id and size; the bytes and a line feed follow."""
        if name != "HEAD" and not _OID.fullmatch(name):
            raise ObjectUnreadable(f"{name[:80]!r} is no object id")
        try:
            self._send([name])
            kind, size = self._header()
        except OSError:
            self._end()
            raise ObjectUnreadable(f"git ended when it was asked for {name}") from None
        if not kind:
            raise ObjectUnreadable(f"the object {name} is missing")
        return kind, self._answered, size

    def _send(self, names: Sequence[str]) -> None:
        process = self._running()
        assert process.stdin is not None
        os.write(process.stdin.fileno(), "".join(f"{name}\n" for name in names).encode())

    def _header(self) -> tuple[str, int]:
        """Kind and size of the next answer; no kind where the object is missing."""
        words = self._line().decode("ascii", "replace").split(" ")
        if len(words) != 3 or not words[2].isdecimal():
            return "", 0
        self._answered, kind, size = words
        return kind, int(size)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = self._stack.enter_context(self._repository.started("cat-file", "--batch"))
            self._buffer, self._read = b"", 0
        return self._process

    def _end(self) -> None:
        self._process, self._buffer, self._read = None, b"", 0
        self._stack.close()

    def _fill(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        if not select.select([descriptor], [], [], _PATIENCE)[0]:
            self._end()
            raise ObjectUnreadable("git does not answer: an object may be a named pipe, or the disk hangs")
        piece = os.read(descriptor, 1 << 18)
        if not piece:
            self._end()
            raise ObjectUnreadable("git ended: an object is damaged")
        self._buffer, self._read = self._buffer[self._read :] + piece, 0

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\n", self._read)) < 0:
            self._fill()
        line = self._buffer[self._read : end]
        self._read = end + 1
        return line

    def _some(self, most: int) -> bytes:
        if self._read == len(self._buffer):
            self._fill()
        piece = self._buffer[self._read : self._read + most]
        self._read += len(piece)
        return piece

    def _take(self, size: int) -> bytes:
        piece = self._some(size)
        if len(piece) == size:
            return piece
        pieces, left = [piece], size - len(piece)
        while left:
            pieces.append(self._some(left))
            left -= len(pieces[-1])
        return b"".join(pieces)

    def _skip(self, size: int) -> None:
        while size:
            size -= len(self._some(size))


def by_name(entries: Iterable[bytes]) -> dict[bytes, Entry]:
    """Entries of a tree by their names."""
    found = {}
    for entry in entries:
        mode, _, rest = entry.partition(b" ")
        name, _, oid = rest.partition(b"\0")
        found[name] = Entry(_MODES.get(mode) or mode.decode("ascii").lstrip("0"), oid.hex())
    return found
