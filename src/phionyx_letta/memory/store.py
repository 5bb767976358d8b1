"""The seed's store of patches: an append-only JSONL file.

Each line is one state of a patch; the newest of a patch is its state. The few fields that lists need stand first in a line, so
that a store of thousands of patches opens without reading their content. Writers of several processes are kept apart by a lock on
the file, each line is on the disk when `save` or `update` return, and half a line that a crash left is closed before the next one
is written. Lines that are not patches are named in the log and passed over; nothing is ever removed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, get_args

from phionyx_letta._canonical import JSON_ERRORS
from phionyx_letta.errors import InvalidPatch, PatchNotFound, StoreError
from phionyx_letta.memory.once import warn_once
from phionyx_letta.memory.patches import MemoryPatch, PatchStatus
from phionyx_letta.memory.stored import HEAD, PatchSummary, patch_json

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["LONGEST_WAIT", "PatchStore", "exclusive_file"]

_HEAD_END = b', "after_content": '  # cannot stand inside a JSON text: there every quote has a backslash before it
_FIRST, _SECOND = b'{"patch_id": "', b'", "status": "'
_STATUS_AT = {f'{status}"'[:8].encode(): status.encode() for status in get_args(PatchStatus)}
"""The first eight bytes of a status tell which it is. No regular expression: half as quick (measured)."""
_BRACE = ord("}")
LONGEST_WAIT = 30.0  # s, for another process that holds what is needed; holding it takes milliseconds
_PIECE = 1 << 20  # bytes read at once: what fits the processor's caches is twice as quick
_log = logging.getLogger(__name__)


_Place = tuple[int, int, bytes, Any]
"""Where the newest line of a patch stands: offset, length, status, and the place of the line before it, or None. Bare tuples: half
the time of opening a store is making these."""


class PatchStore:
    """The seed's store: one JSONL file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Use the file at `path`; it is made with the first patch."""
        self.path = Path(path)
        self._places: dict[str, _Place] = {}
        self._read_to = 0
        self._last_read = b""
        self._torn_at: int | None = None
        self._file_id: tuple[int, int] | None = None
        self._mutex = threading.RLock()
        self._held: FileIO | None = None

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the store alone, among all processes; may be entered again by the thread that holds it."""
        with self._mutex:
            if self._held is not None:
                yield
                return
            with exclusive_file(self.path) as self._held:
                try:
                    yield
                finally:
                    self._held = None

    @contextlib.contextmanager
    def acting(self, target: str) -> Iterator[None]:
        """Be alone with those who act on any target of this store, see `Patches.acting`."""
        with exclusive_file(Path(f"{self.path}.acts.lock")):
            yield

    def save(self, patch: MemoryPatch) -> MemoryPatch:
        """Add a patch; it is durable on return.

        Raises:
            InvalidPatch: its id is taken, or it is not JSON.
            StoreError: the file cannot be written.
        """
        with self.exclusive():
            self._refresh()
            if patch.patch_id in self._places:
                raise InvalidPatch(f"there is a patch {patch.patch_id} already", "use update() for a new state of it")
            self._append(patch)
        return patch

    def update(self, patch: MemoryPatch) -> None:
        """Record a new state of a patch; it is durable on return. Signing it is the caller's.

        Raises:
            PatchNotFound: it was never saved.
            StoreError: the file cannot be written.
        """
        with self.exclusive():
            self._refresh()
            if patch.patch_id not in self._places:
                raise PatchNotFound(f"Patch '{patch.patch_id}' not found", "save() it first")
            self._append(patch)

    def get(self, patch_id: str) -> MemoryPatch | None:
        """Return the newest state of a patch that can be read, or None; damaged lines are named in the log.

        Raises:
            StoreError: the file cannot be read.
        """
        with self._reading() as file:
            place = self._places.get(patch_id)
            return None if place is None or file is None else self._patch_at(file, patch_id, place)

    def find(self, prefix: str) -> list[str]:
        """Return the ids that begin with this text."""
        with self._reading():
            return [patch_id for patch_id in self._places if patch_id.startswith(prefix)]

    def first(self) -> str | None:
        """Return the id of the oldest patch, by which the store is known, or None where it is empty."""
        with self._reading():
            return next(iter(self._places), None)

    @property
    def folder(self) -> str | None:
        """The real path of the folder it is in."""
        return os.path.realpath(self.path.parent)

    def status(self, patch_id: str) -> str | None:
        """Return a patch's status without reading its content, or None where there is no such patch."""
        with self._reading():
            place = self._places.get(patch_id)
            return None if place is None else place[2].decode()

    def summaries(self, status: str | None = None, *, limit: int | None = None) -> list[PatchSummary]:
        """Return what lists show, without reading content; the newest `limit` of them, oldest first."""
        with self._reading() as file:
            chosen = self._chosen(status, limit)
            return [] if file is None else [self._summary_at(file, *one) for one in chosen]

    def list_by_status(self, status: str | None = None, *, limit: int | None = None) -> list[MemoryPatch]:
        """Return patches in this status now, or all; the newest `limit` of them, oldest first."""
        with self._reading() as file:
            if file is None:
                return []
            found = [self._patch_at(file, patch_id, place) for patch_id, place in self._chosen(status, limit)]
            return [patch for patch in found if patch is not None]

    def pending_patches(self) -> list[MemoryPatch]:
        """Return the patches that wait for a decision."""
        return self.list_by_status("pending")

    def count(self, status: str | None = None) -> int:
        """Return how many patches are in this status now, or all."""
        wanted = None if status is None else status.encode()
        with self._reading():
            return sum(wanted is None or place[2] == wanted for place in self._places.values())

    # -- the file ------------------------------------------------------------------------------------------------

    def _chosen(self, status: str | None, limit: int | None) -> list[tuple[str, _Place]]:
        wanted = None if status is None else status.encode()
        chosen = [one for one in self._places.items() if wanted is None or one[1][2] == wanted]
        return chosen if limit is None else chosen[max(0, len(chosen) - max(0, limit)) :]

    @contextlib.contextmanager
    def _reading(self) -> Iterator[FileIO | None]:
        """Bring the index up to date and yield the file; None where there is none."""
        with self._mutex:
            if self._held is not None:
                self._refresh()
                yield self._held
                return
            try:
                with self._translated():
                    file = FileIO(self.path)
            except FileNotFoundError:
                self._forget()
                yield None
                return
            with file:
                _lock(file, self.path, shared=True)  # no line is half written while we look
                self._index(file)
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_UN)
                yield file

    def _refresh(self) -> None:
        assert self._held is not None
        self._index(self._held)

    def _forget(self) -> None:
        self._places, self._read_to, self._last_read, self._file_id = {}, 0, b"", None

    def _index(self, file: FileIO) -> None:
        """Take in the lines that were added since the last look; all of them where the file was replaced, cut or rewritten."""
        with self._translated():
            state = os.fstat(file.fileno())
            same = (state.st_dev, state.st_ino) == self._file_id and state.st_size >= self._read_to
            if not same or self._before(file, self._read_to) != self._last_read:
                self._forget()
                self._file_id = (state.st_dev, state.st_ino)
            if state.st_size == self._read_to:
                return
            self._index_lines(file, state.st_size)
            self._last_read = self._before(file, self._read_to)

    @staticmethod
    def _before(file: FileIO, offset: int) -> bytes:
        """Some bytes before this place: they tell whether what was read is still there."""
        start = max(0, offset - 256)
        return _read_at(file, start, offset - start)

    def _index_lines(self, file: FileIO, size: int) -> None:
        """Take in every whole line beyond what was read, piece by piece; of lines in our order only the beginning is looked at."""
        piece = _PIECE
        while self._read_to < size:
            data = _read_at(file, self._read_to, min(piece, size - self._read_to))
            taken = self._index_piece(data)
            self._read_to += taken
            if not taken and len(data) < piece:  # the end
                if data.strip() and self._torn_at != self._read_to:
                    self._torn_at = self._read_to
                    message = "%s ends in half a line: its writer was cut short before it could say so"
                    warn_once(_log, message, self.path.absolute(), about=self._read_to)
                return
            piece = _PIECE if taken else 2 * piece  # a line longer than the piece

    def _index_piece(self, data: bytes) -> int:
        """Take in the whole lines of a piece and return how many bytes they are."""
        start, base, places = 0, self._read_to, self._places
        find, known = data.find, places.get
        while (end := find(b"\n", start)) >= 0:
            head = data[start : start + 128]
            identity, _, rest = head[len(_FIRST) :].partition(_SECOND)
            status = _STATUS_AT.get(rest[:8])
            if status and head.startswith(_FIRST) and data[end - 1] == _BRACE and b"\\" not in identity:
                patch_id = identity.decode("utf-8", "replace")
                places[patch_id] = (base + start, end - start, status, known(patch_id))
            else:
                self._index_foreign(data[start:end], base + start)
            start = end + 1
        return start

    def _index_foreign(self, line: bytes, offset: int) -> None:
        patch = self._parsed(line, offset) if line.strip() else None
        if patch is not None:
            before = self._places.get(patch.patch_id)
            self._places[patch.patch_id] = (offset, len(line), patch.status.encode(), before)

    def _patch_at(self, file: FileIO, patch_id: str, place: _Place | None) -> MemoryPatch | None:
        """Read a patch; where its newest line is damaged, the state before it."""
        while place is not None:
            offset, length, status, before = place
            with self._translated():
                patch = self._parsed(_read_at(file, offset, length), None)
            if patch is not None and (patch.patch_id, patch.status.encode()) == (patch_id, status):
                return patch
            message = "%s: the line of patch %s at byte %d is damaged; the state before it counts"
            warn_once(_log, message, self.path.absolute(), patch_id, offset)
            place = before
            if place is not None:
                self._places[patch_id] = place
        self._places.pop(patch_id, None)
        return None

    def _summary_at(self, file: FileIO, patch_id: str, place: _Place) -> PatchSummary:
        """Read what a list shows, without its content where the line is in our order."""
        offset, length, status, _ = place
        head, found, _ = _read_at(file, offset, min(length, 4096)).partition(_HEAD_END)
        data = _object(head + b"}") if found else {}
        if not set(HEAD) <= set(data):  # a long beginning, or a line in another order
            data = _object(_read_at(file, offset, length))
        texts = {name: "" if data.get(name) is None else str(data[name]) for name in HEAD}
        session = texts["session_id"] if data.get("session_id") else None
        return PatchSummary(
            patch_id,
            status.decode(),
            texts["created_at"],
            texts["file_path"],
            texts["category"],
            session,
            texts["author"],
            texts["rationale"],
        )

    def _parsed(self, line: bytes, offset: int | None) -> MemoryPatch | None:
        """Read a line; None where it is no patch, which is named in the log unless the caller does (no offset)."""
        try:
            return MemoryPatch.from_dict(json.loads(line, object_pairs_hook=_unique))
        except (*JSON_ERRORS, InvalidPatch) as error:
            message = "%s: the line at byte %d is not a patch (%s); it is passed over"
            if offset is not None:
                warn_once(_log, message, self.path.absolute(), offset, type(error).__name__, about=hash(line))
            return None

    def _append(self, patch: MemoryPatch) -> None:
        """Write one line at the end, wait for the disk, and take it into the index; undo it where the disk refuses."""
        line = patch_json(patch).encode("ascii") + b"\n"
        file = self._held
        assert file is not None
        with self._translated():
            end = os.fstat(file.fileno()).st_size
            torn = end > 0 and _read_at(file, end - 1, 1) != b"\n"
            data = (b"\n" if torn else b"") + line
            try:
                _write_all(file, data)
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), end)  # the caller is told that it failed: it must not turn up later
                raise
        self._index(file)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreError(
                f"the patch store {self.path} cannot be used: {error.strerror}", "check its permissions and the disk"
            ) from None


@contextlib.contextmanager
def exclusive_file(path: Path) -> Iterator[FileIO]:
    """Open a file for appending, alone among all processes; it is made if it is missing.

    Raises:
        StoreError: it cannot be made or opened, or another process does not let go of it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        created = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if created:
            _sync_folder(path.parent)
    except OSError as error:
        raise StoreError(f"{path} cannot be used: {error.strerror}", "check its permissions and the disk") from None
    with FileIO(descriptor, "r+") as file:
        _lock(file, path)  # gone when it is closed
        yield file


def _lock(file: FileIO, path: Path, *, shared: bool = False) -> None:
    """Lock a file, waiting a while for whoever has it."""
    if fcntl is None:
        return
    deadline = time.monotonic() + LONGEST_WAIT
    while True:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"another process has held {path} for {LONGEST_WAIT:.0f} s; nothing was done",
                    f"wait for it, or end it: `fuser {path}` names it; nothing is lost by that",
                ) from None
            time.sleep(0.01)
        else:
            return


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except JSON_ERRORS:
        return {}
    return found if isinstance(found, dict) else {}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")
    return found


def _read_at(file: FileIO, offset: int, size: int) -> bytes:
    """Read exactly what is there, wherever the file's own position is."""
    parts = []
    while size > 0 and (part := os.pread(file.fileno(), size, offset)):
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return b"".join(parts)


def _write_all(file: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
