"""Git's objects, read through one running ``git cat-file --batch``: two processes a run, not one for each commit and file.

Only object ids are ever asked for, so no name from the repository reaches a command line. Trees are compared here, which needs no
configuration, no index and no attributes of the repository.
"""

from __future__ import annotations

import hashlib
import os
import re
import select
import subprocess
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import NamedTuple, TypeVar

from phionyx_letta.diff import MemoryDiff, compute_memory_diff
from phionyx_letta.ledger.log.git import GitRepository
from phionyx_letta.letta_code.errors import MemoryUnreadable, ObjectUnreadable, TooManyFiles

__all__ = [
    "ABSENT",
    "SUBMODULE",
    "SYMLINK",
    "Commit",
    "Content",
    "Entry",
    "Objects",
    "changed_files",
    "content_diff",
    "prefetch_changed",
]

#: Of a file that is compared character by character; of a larger one only hash and size are taken, in flat memory.
MAX_TEXT = 1 << 20
#: Of a commit or a tree.
_MAX_META = 64 << 20
#: Files of one commit that are recorded one by one: trees can be nested to name more than there is memory.
MAX_FILES = 20_000
_MAX_TREES, _MAX_DEPTH = 100_000, 100
_AT_ONCE = 200
_PATIENCE = 60.0  # s without a byte from git: an object can be a named pipe
_CACHED = 16 << 20
_OID = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_MAX_MESSAGE = 64 << 10
_NOTHING: frozenset[tuple[bytes, bytes, bytes]] = frozenset()
_TREE_ENTRY = {width: re.compile(rb"([0-7]{1,7}) ([^\0]*)\0(.{%d})" % width, re.DOTALL) for width in (20, 32)}
_Kept = TypeVar("_Kept")
_SUBTREE, SYMLINK, SUBMODULE = "40000", "120000", "160000"


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


@dataclass(frozen=True, slots=True)
class Content:
    """What is recorded of a file's bytes as git has them."""

    digest: str
    size: int
    length: int
    """Code points of text; bytes of anything else."""
    text: str | None
    """None for what is not UTF-8, or too large."""


ABSENT = Content("sha256:" + hashlib.sha256().hexdigest(), 0, 0, "")


def content_diff(before: Content, after: Content, *, include_text: bool) -> MemoryDiff:
    """Compare two contents; where one is not text, all of it counts as replaced."""
    if before.text is not None and after.text is not None:
        return compute_memory_diff(before.text, after.text, include_diff_text=include_text)
    same = before.digest == after.digest
    return MemoryDiff(
        before_hash=before.digest,
        after_hash=after.digest,
        before_size_bytes=before.size,
        after_size_bytes=after.size,
        added_chars=0 if same else after.length,
        removed_chars=0 if same else before.length,
        unchanged_chars=after.length if same else 0,
        counts_method="replaced",
    )


class Objects:
    """The objects of one repository; use as a context manager."""

    def __init__(self, repository: GitRepository) -> None:
        """Start nothing yet."""
        self._repository = repository
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._answered = ""
        self._cache: OrderedDict[str, tuple[object, int]] = OrderedDict()
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
                raise MemoryUnreadable(
                    f"git cannot read the repository {self._repository.path}",
                    f"check it: git -C {self._repository.path} fsck",
                ) from None
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
        cached = self._known(oid, Commit)
        if cached is not None:
            return cached
        data = self._meta(oid, "commit")
        head, _, message = data.partition(b"\n\n")
        fields: dict[str, list[str]] = {}
        for line in head.split(b"\n"):
            name, _, value = line.partition(b" ")
            fields.setdefault(name.decode("ascii", "replace"), []).append(value.decode("utf-8", "replace"))
        tree, parents = fields.get("tree", [""])[0], tuple(fields.get("parent", []))
        if not all(_OID.fullmatch(one) for one in (tree, *parents)):
            raise ObjectUnreadable(f"the commit {oid} is malformed")
        author, committer = (fields.get(name, [""])[0] for name in ("author", "committer"))
        commit = Commit(oid, tree, parents, author, committer, message[:_MAX_MESSAGE].decode("utf-8", "replace"))
        self._remember(oid, commit, len(data) + 800)
        return commit

    def entries(self, oid: str) -> frozenset[tuple[bytes, bytes, bytes]]:
        """The entries of a tree as they stand there: mode, name and binary id.

        Raises:
            ObjectUnreadable: it is not there, or is none.
        """
        cached = self._known(oid, frozenset)
        if cached is not None:
            return cached
        return self._keep_entries(oid, self._meta(oid, "tree"))

    def _keep_entries(self, oid: str, data: bytes) -> frozenset[tuple[bytes, bytes, bytes]]:
        width = len(oid) // 2
        found = frozenset(_TREE_ENTRY[width].findall(data))
        if sum(map(len, chain.from_iterable(found))) + 2 * len(found) != len(data):
            raise ObjectUnreadable(f"the tree {oid} is malformed")  # repeated entries too
        self._remember(oid, found, 3 * len(data) + 200)
        return found

    def tree(self, oid: str) -> dict[bytes, Entry]:
        """The entries of a tree by name.

        Raises:
            ObjectUnreadable: it is not there, or is none.
        """
        return _by_name(self.entries(oid))

    def content(self, entry: Entry | None) -> Content:
        """What a tree's entry holds: of a link its target, of a submodule the commit it names.

        Raises:
            ObjectUnreadable: it is not there, or is no file.
        """
        if entry is None:
            return ABSENT
        if entry.mode == SUBMODULE:
            return _content_of(entry.oid.encode())
        cached = self._known(entry.oid, Content)
        if cached is not None:
            return cached
        kind, _, size = self._ask(entry.oid)
        if kind != "blob":
            self._skip(size + 1)
            raise ObjectUnreadable(f"{entry.oid} is not a file but a {kind}")
        return self._keep_content(entry.oid, size)

    def _keep_content(self, oid: str, size: int) -> Content:
        if size <= MAX_TEXT:
            found = _content_of(self._take(size + 1)[:-1])
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

    def prefetch(self, oids: Iterable[str]) -> None:
        """Read trees and files that are about to be asked for, without waiting for each; what cannot be read is left out."""
        wanted = [oid for oid in dict.fromkeys(oids) if oid not in self._cache and _OID.fullmatch(oid)]
        for start in range(0, len(wanted), _AT_ONCE):
            part = wanted[start : start + _AT_ONCE]
            try:
                self._send(part)  # all of it fits into the pipe, so neither side waits for the other
                for oid in part:
                    kind, size = self._header()
                    if kind == "blob":
                        self._keep_content(oid, size)
                    elif kind == "tree" and size <= _MAX_META:
                        self._keep_entries(oid, self._take(size + 1)[:-1])
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

    def _known(self, oid: str, kind: type[_Kept]) -> _Kept | None:
        found = self._cache.get(oid)
        if found is None or not isinstance(found[0], kind):
            return None
        self._cache.move_to_end(oid)
        return found[0]

    def _remember(self, oid: str, found: object, size: int) -> None:
        if size > _CACHED // 4:
            return
        self._cache[oid] = found, size
        self._cached += size
        while self._cached > _CACHED:
            self._cached -= self._cache.popitem(last=False)[1][1]

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
        words = self._line().decode("ascii", "replace").split()
        if len(words) != 3 or not words[2].isdecimal():
            return "", 0
        self._answered = words[0]
        return words[1], int(words[2])

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = self._stack.enter_context(self._repository.started("cat-file", "--batch"))
            self._buffer = b""
        return self._process

    def _end(self) -> None:
        self._process, self._buffer = None, b""
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
        self._buffer += piece

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            self._fill()
        line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
        return line

    def _some(self, most: int) -> bytes:
        if not self._buffer:
            self._fill()
        piece, self._buffer = self._buffer[:most], self._buffer[most:]
        return piece

    def _take(self, size: int) -> bytes:
        pieces = []
        while size:
            pieces.append(self._some(size))
            size -= len(pieces[-1])
        return b"".join(pieces)

    def _skip(self, size: int) -> None:
        while size:
            size -= len(self._some(size))


def changed_files(
    objects: Objects, before: str | None, after: str | None
) -> Iterator[tuple[bytes, Entry | None, Entry | None]]:
    """Yield (path, entry before, entry after) for each file two trees differ in, sorted by path.

    Raises:
        ObjectUnreadable: a tree cannot be read.
        TooManyFiles: there are more than `MAX_FILES`.
    """
    left, trees = MAX_FILES, [_MAX_TREES]
    for one in _walk(objects, before, after, b"", 0, trees):
        left -= 1
        if left < 0:
            raise TooManyFiles(f"more than {MAX_FILES} files change at once")
        yield one


def prefetch_changed(objects: Objects, pairs: Sequence[tuple[str | None, str | None]]) -> None:
    """Read ahead the trees that comparing these pairs of trees takes, two levels deep."""
    objects.prefetch(oid for pair in pairs for oid in pair if oid)
    below: list[str] = []
    for before, after in pairs:
        try:
            old, new = (objects.entries(oid) if oid else _NOTHING for oid in (before, after))
        except ObjectUnreadable:
            continue
        below += [oid.hex() for mode, _, oid in old ^ new if mode == b"40000"]
    objects.prefetch(below[: 10 * _AT_ONCE])


def _walk(
    objects: Objects, before: str | None, after: str | None, folder: bytes, depth: int, trees: list[int]
) -> Iterator[tuple[bytes, Entry | None, Entry | None]]:
    if before == after:
        return
    trees[0] -= 1
    if depth > _MAX_DEPTH or trees[0] < 0:
        raise TooManyFiles(
            f"more than {_MAX_TREES} folders change at once, or they are nested more than {_MAX_DEPTH} deep"
        )
    old, new = (objects.entries(oid) if oid else _NOTHING for oid in (before, after))
    gone, come = _by_name(old - new), _by_name(new - old)
    for name in sorted(gone.keys() | come.keys()):
        one, other = gone.get(name), come.get(name)
        path = folder + name
        one_tree, other_tree = (entry.oid if entry and entry.mode == _SUBTREE else None for entry in (one, other))
        one, other = (None if entry and entry.mode == _SUBTREE else entry for entry in (one, other))
        if one or other:
            yield path, one, other
        if one_tree or other_tree:
            yield from _walk(objects, one_tree, other_tree, path + b"/", depth + 1, trees)


def _by_name(entries: Iterable[tuple[bytes, bytes, bytes]]) -> dict[bytes, Entry]:
    return {name: Entry(mode.decode("ascii").lstrip("0"), oid.hex()) for mode, name, oid in entries}


def _content_of(data: bytes) -> Content:
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return Content(digest, len(data), len(data), None)
    return Content(digest, len(data), len(text), text)
