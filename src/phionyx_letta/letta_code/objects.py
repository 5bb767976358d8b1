"""Git's objects, read through one running ``git cat-file --batch``: a few processes a run, not one for each commit and file.

Only object ids are ever asked for, so no name from the repository reaches a command line. Git does not check what it reads against
the id it was asked for, and who can write to the repository can put other bytes in an object's place: every object is hashed here.
"""

from __future__ import annotations

import hashlib
import os
import re
import select
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from phionyx_letta.errors import StoreError
from phionyx_letta.ledger.log.git import GitRepository
from phionyx_letta.letta_code.contents import ABSENT, Content, content_of
from phionyx_letta.letta_code.errors import MemoryUnreadable, ObjectMalformed, ObjectUnreadable
from phionyx_letta.letta_code.ownership import unreadable
from phionyx_letta.letta_code.turns import OVER, Turn, TurnOver

__all__ = ["SUBMODULE", "SUBTREE", "SYMLINK", "Commit", "Entry", "Objects", "by_name"]

#: Of a file that is compared character by character; of a larger one only hash and size are taken, in flat memory.
MAX_TEXT = 1 << 20
#: Of a tree: a hundred thousand files, or more.
_MAX_TREE = 8 << 20
#: Of a commit; what follows is only hashed.
_MAX_COMMIT = 1 << 20
_AT_ONCE = 200
_HEAD = "HEAD^{commit}"
#: Commits that are walked before git is asked what comes behind, and how many it is asked for.
_FEW, _MOST_AHEAD = 10, 5000
_THEN = 2.0  # s without a byte from git, after it was silent once for all of a turn's patience
#: Bytes of commits and of anything else that are kept: a long history is walked from its end, and then told from its beginning.
_COMMITS, _OTHERS = 12 << 20, 6 << 20
_OID = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_MAX_MESSAGE = 64 << 10
#: An entry, and its name.
_TREE_ENTRY = {width: re.compile(rb"([0-7]{1,7} ([^\0/]+)\0.{%d})" % width, re.DOTALL) for width in (20, 32)}
_COMMIT = re.compile(
    rb"tree ([0-9a-f]{40,64})\n((?:parent [0-9a-f]{40,64}\n)*)author ([^\n]*)\ncommitter ([^\n]*)(?:\n|\Z)"
)
SUBTREE, SYMLINK, SUBMODULE = "40000", "120000", "160000"
_TYPES = {one.encode(): one for one in ("blob", "tree", "commit", "tag")}
_MODES = {one.encode(): one for one in (SUBTREE, SYMLINK, SUBMODULE, "100644", "100755")}
_KINDS = {0o04: SUBTREE, 0o12: SYMLINK, 0o10: ""}


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


@dataclass(slots=True)
class _Budget:
    """What of one kind is kept, in the order it came."""

    most: int
    used: int = 0
    held: deque[tuple[str, int]] = field(default_factory=deque)


class Objects:
    """The objects of one repository; use as a context manager."""

    def __init__(self, repository: GitRepository, turn: Turn | None = None) -> None:
        """Start nothing yet; where the turn ends, whatever is read next raises `TurnOver`."""
        self._repository = repository
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer, self._read = b"", 0  # what git wrote, and how much of it was taken
        self._answered = b""
        self._cache: dict[str, Commit | Content | frozenset[bytes]] = {}
        self._commits, self._others = _Budget(_COMMITS), _Budget(_OTHERS)
        self._turn = turn or Turn()
        self._patience = self._turn.silence

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
        """The commit HEAD stands at, also by way of a tag object; None where there is none yet.

        Raises:
            MemoryUnreadable: this is no repository git can read, or the commit is not there.
        """
        try:
            _, oid, size = self._ask(_HEAD)
        except ObjectUnreadable as error:
            if self._process is None:
                raise unreadable(self._repository.path, error.message) from None
            named = self.git("rev-parse", "--verify", "--quiet", "HEAD", failing_is_none=True)
            if named:  # which is not the same as none
                raise MemoryUnreadable(
                    f"HEAD of {self._repository.path} is {named[:64]}, which is missing or leads to no commit",
                    f"check it: git -C {self._repository.path} fsck",
                ) from None
            return None
        self._skip(size + 1)
        return oid

    def commit(self, oid: str) -> Commit:
        """A commit, by its own bytes: neither grafts nor replacements nor a shallow boundary change what it says.

        Raises:
            ObjectUnreadable: it is not there, or is none.
        """
        self._turn.left()  # what is kept takes time too: who asks has more to do with it
        cached = self._cache.get(oid)
        if isinstance(cached, Commit):
            return cached
        return self._keep_commit(oid, self._wanted(oid, "commit"))

    def _keep_commit(self, oid: str, size: int) -> Commit:
        data = self._checked(oid, "commit", size, _MAX_COMMIT)
        head, _, message = data.partition(b"\n\n")
        found = _COMMIT.match(head)
        if found is not None:
            tree, parents = found[1].decode("ascii"), tuple(found[2].decode("ascii").replace("parent ", "").split())
            author, committer = found[3], found[4]
        else:  # no author, or lines in another order: git takes it all the same
            fields: dict[bytes, list[bytes]] = {}
            for line in head.split(b"\n"):
                name, _, value = line.partition(b" ")
                fields.setdefault(name, []).append(value)
            author, committer, first = (fields.get(name, [b""])[0] for name in (b"author", b"committer", b"tree"))
            tree, *others = (one.decode("ascii", "replace") for one in (first, *fields.get(b"parent", [])))
            parents = tuple(others)
        if not all(len(one) == len(oid) and _OID.fullmatch(one) for one in (tree, *parents)):
            raise ObjectMalformed(f"the commit {oid} is malformed")
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
        return self._keep_entries(oid, self._wanted(oid, "tree"))

    def _keep_entries(self, oid: str, size: int) -> frozenset[bytes]:
        data = self._checked(oid, "tree", size, _MAX_TREE)
        if size > _MAX_TREE:
            raise ObjectMalformed(f"the tree {oid} is too large")
        width = len(oid) // 2
        named = dict(_TREE_ENTRY[width].findall(data))
        found = frozenset(named)
        if sum(map(len, found)) != len(data):
            raise ObjectMalformed(f"the tree {oid} is malformed")  # repeated entries too
        if len(set(named.values())) != len(found):
            raise ObjectMalformed(f"the tree {oid} has two entries of one name")
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
        self._turn.left()  # files are compared for as long as a turn lasts, also where all of them are two objects
        if entry is None:
            return ABSENT
        if entry.mode == SUBMODULE:
            return content_of(entry.oid.encode())
        cached = self._cache.get(entry.oid)
        if isinstance(cached, Content):
            return cached
        return self._keep_content(entry.oid, self._wanted(entry.oid, "blob"))

    def _keep_content(self, oid: str, size: int) -> Content:
        if size <= MAX_TEXT:
            found = content_of(self._checked(oid, "blob", size, MAX_TEXT))
        else:
            digest = hashlib.sha256()
            self._checked(oid, "blob", size, 0, digest)
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
            said = self.git("rev-list", "--first-parent", f"--max-count={_MOST_AHEAD}", oid, "--", failing_is_none=True)
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
                    self._keep_next(oid)
            except (ObjectUnreadable, OSError):
                self._end()
                return

    def _keep_next(self, oid: str) -> None:
        kind, size = self._header()
        try:
            if kind == "blob":
                self._keep_content(oid, size)
            elif kind == "tree":
                self._keep_entries(oid, size)
            elif kind == "commit":
                self._keep_commit(oid, size)
            elif kind:
                self._skip(size + 1)
        except ObjectUnreadable:
            if self._process is None:  # else this one was read to its end, and the answers go on
                raise

    def sizes(self, oids: Iterable[str]) -> dict[str, int]:
        """What git says of the sizes of objects, in bytes, without their content; it is not checked against their ids."""
        wanted = [oid for oid in dict.fromkeys(oids) if _OID.fullmatch(oid)]
        if not wanted:
            return {}
        given = "".join(f"{oid}\n" for oid in wanted).encode()
        try:
            said = self.git("cat-file", "--batch-check=%(objectname) %(objectsize)", given=given)
        except StoreError:
            return {}
        words = (line.split(" ") for line in (said or "").splitlines())
        return {word[0]: int(word[1]) for word in words if len(word) == 2 and word[1].isdigit()}

    def git(self, *arguments: str, given: bytes = b"", failing_is_none: bool = False) -> str | None:
        """What another git command says of the repository; it has to end in the time in which git has to say something.

        Raises:
            MemoryUnreadable: it failed, or did not end in the last turn it has.
            TurnOver: it did not end.
        """
        left, began = self._turn.left(), time.monotonic()
        most = min(self._patience, left)
        try:
            return self._repository.run(*arguments, given=given, failing_is_none=failing_is_none, timeout=most)
        except StoreError as error:
            if time.monotonic() - began >= most:
                self._silent(left)
            raise MemoryUnreadable(error.message, error.remedy) from error

    # -- the running git ----------------------------------------------------------------------------------------

    def _wanted(self, oid: str, wanted: str) -> int:
        """Ask for an object of this kind, and return its size."""
        kind, _, size = self._ask(oid)
        if kind != wanted:
            self._skip(size + 1)
            raise ObjectUnreadable(f"{oid} is not a {wanted} but a {kind}")
        return size

    def _checked(self, oid: str, kind: str, size: int, most: int, also: hashlib._Hash | None = None) -> bytes:
        """Read an object to its end and compare its hash with its id; return its first `most` bytes."""
        start = f"{kind} {size}\0".encode()
        digest = hashlib.sha1(start, usedforsecurity=False) if len(oid) == 40 else hashlib.sha256(start)
        if size <= most:
            data = self._take(size)
            self._take(1)
            digest.update(data)
        else:
            data, left = self._take(most), size - most
            digest.update(data)
            while left:
                piece = self._some(left)
                left -= len(piece)
                digest.update(piece)
                if also is not None:
                    also.update(piece)
            self._skip(1)
        if digest.hexdigest() != oid:
            raise ObjectUnreadable(f"the object {oid} is not what its id says: it was changed or is damaged")
        return data

    def _remember(self, oid: str, found: Commit | Content | frozenset[bytes], size: int) -> None:
        budget = self._commits if isinstance(found, Commit) else self._others
        if size > budget.most // 4 or oid in self._cache:
            return
        self._cache[oid] = found
        budget.held.append((oid, size))
        budget.used += size
        while budget.used > budget.most:
            first, size = budget.held.popleft()
            del self._cache[first]
            budget.used -= size

    def _ask(self, name: str) -> tuple[str, str, int]:
        """Kind, id and size; the bytes and a line feed follow."""
        if name != _HEAD and not _OID.fullmatch(name):
            raise ObjectUnreadable(f"{name[:80]!r} is no object id")
        try:
            self._send([name])
            kind, size = self._header()
        except OSError:
            self._end()
            raise ObjectUnreadable(f"git ended when it was asked for {name}") from None
        if not kind:
            raise ObjectUnreadable(f"the object {name} is missing")
        return kind, self._answered.decode("ascii", "replace"), size

    def _send(self, names: Sequence[str]) -> None:
        process = self._running()
        assert process.stdin is not None
        os.write(process.stdin.fileno(), "".join(f"{name}\n" for name in names).encode())

    def _header(self) -> tuple[str, int]:
        """Kind and size of the next answer; no kind where the object is missing."""
        while (end := self._buffer.find(b"\n", self._read)) < 0:
            self._fill()
        words = self._buffer[self._read : end].split(b" ")
        self._read = end + 1
        if len(words) != 3 or not words[2].isdigit():
            return "", 0
        self._answered = words[0]
        return _TYPES.get(words[1], "other"), int(words[2])

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
        left = self._turn.left()
        if not select.select([descriptor], [], [], min(self._patience, left))[0]:
            self._end()
            self._silent(left)
            raise ObjectUnreadable("git does not answer: an object may be a named pipe, or the disk hangs")
        piece = os.read(descriptor, 1 << 18)
        if not piece:
            self._end()
            raise ObjectUnreadable("git ended: an object is damaged")
        self._buffer, self._read = self._buffer[self._read :] + piece, 0

    def _silent(self, left: float) -> None:
        """Git said nothing for as long as it may, of the s left; it returns where that is the last word.

        Raises:
            TurnOver: the turn is over, or there is another for what does not answer.
        """
        if left <= self._patience:
            raise TurnOver(OVER)
        if not self._turn.final:
            raise TurnOver(f"git said nothing for {self._patience:.0f} s", silent=True)
        self._patience = min(self._patience, _THEN)

    def _some(self, most: int) -> bytes:
        if self._read == len(self._buffer):
            self._fill()
        piece = self._buffer[self._read : self._read + most]
        self._read += len(piece)
        return piece

    def _take(self, size: int) -> bytes:
        end = self._read + size
        if end <= len(self._buffer):
            piece, self._read = self._buffer[self._read : end], end
            return piece
        pieces, left = list[bytes](), size
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
        found[name] = Entry(_MODES.get(mode) or _mode(mode), oid.hex())
    return found


def _mode(mode: bytes) -> str:
    """As git reads one it does not write itself (`canon_mode`): the kind counts, and what is none is a submodule."""
    kind = _KINDS.get(int(mode, 8) >> 12 & 0o17, SUBMODULE)
    return kind or mode.decode("ascii").lstrip("0")
