"""Chains in a folder, in the peers' layout: `<root>/<trace>/NNNNNN.json` and the index `chain.jsonl`.

The index is the commit: an envelope file counts once its index line is complete, so a crash leaves at most an orphan file
or half an index line, and the next append repairs both. Appending reads only the tail of the index. Not for Windows (no
`fcntl`); on network file systems the lock is as good as their `flock`. Keys and signatures are none of its business.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from phionyx_letta.envelope import (
    GENESIS_HASH,
    MemoryMutationContext,
    Signs,
    build_memory_envelope,
    envelope_hash,
    envelope_line,
)
from phionyx_letta.errors import InvalidMutation, StaleHeadError, StoreError, TornStoreError
from phionyx_letta.ledger import index as files
from phionyx_letta.ledger.folders import folder_of, is_long, trace_of
from phionyx_letta.ledger.index import Tail
from phionyx_letta.version import __version__

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["FilesystemEnvelopeStore"]

ENV_ROOT = "PHIONYX_LETTA_AUDIT_ROOT"
INDEX, LOCK, NAME = "chain.jsonl", ".lock", "trace_id.json"
_RESTORE = "restore it from a copy"

_log = logging.getLogger(__name__)


class FilesystemEnvelopeStore:
    """An `EnvelopeStore` in a folder."""

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        """Use `root`, else `PHIONYX_LETTA_AUDIT_ROOT`, else `~/.phionyx/letta_audit`; create nothing before an append.

        Raises:
            StoreError: no home directory is known, or the platform has no `fcntl` (Windows).
        """
        if fcntl is None:  # pragma: no cover - Windows
            raise StoreError("this platform has no fcntl, so writers cannot be kept apart", "use the SQL ledger")
        self.root = Path(root) if root is not None else _default_root()
        self._base = os.fspath(self.root)  # paths are built from text: pathlib would double the cost of an append
        self._positions: dict[str, tuple[str, int]] = {}  # folder to (head, its position), to spare reading it again

    def head(self, trace_id: str) -> str:
        """Return the chain's last hash, `GENESIS_HASH` for a chain that does not exist; constant time.

        Raises:
            TornStoreError: the index ends in something that is not an index line.
        """
        folder = self._folder(trace_id)
        tail = self._settled_tail(folder)
        if tail.torn:
            files.warn_torn(f"{folder}/{INDEX}")
        return _head(tail)

    def append(self, trace_id: str, envelope: Mapping[str, Any]) -> None:
        """Add an envelope built on the current head; it is durable on return; constant time.

        Raises:
            StaleHeadError: another envelope was appended since the head was read; build it again, or use `emit`.
            StoreError: the folder cannot be written.
            InvalidMutation: the envelope's own hash is wrong, or it is not JSON.
        """
        _check_envelope(trace_id, envelope)
        with self._writing(trace_id) as (folder, tail):
            head, given = _head(tail), envelope["integrity"]["previous"]
            if head != given:
                raise StaleHeadError(
                    f"the chain {trace_id!r} has moved on: its head is {head}, the envelope was built on {given}",
                    "build it again on store.head(), or use store.emit()",
                )
            self._commit(folder, tail, envelope)
            self._positions.pop(folder, None)

    def emit(
        self,
        ctx: MemoryMutationContext,
        *,
        signer: Signs,
        package_version: str = __version__,
        memory_audit_parent_ref: str | None = None,
        timestamp_utc: str | None = None,
        organization_id: str | None = None,
    ) -> dict[str, Any]:
        """Build the envelope of `ctx` on the chain's head and append it, as one step no other writer can come between.

        Raises:
            StoreError: the folder cannot be written.
            InvalidMutation: the metadata are not JSON.
        """
        with self._writing(ctx.trace_id) as (folder, tail):
            position = self._next_position(folder, tail)
            envelope = build_memory_envelope(
                ctx,
                previous_hash=_head(tail),
                package_version=package_version,
                signer=signer,
                memory_audit_parent_ref=memory_audit_parent_ref,
                position=position,
                timestamp_utc=timestamp_utc,
                organization_id=organization_id,
            )
            self._commit(folder, tail, envelope)
            self._positions[folder] = envelope["integrity"]["current"], position
        return envelope

    def iter_chain(self, trace_id: str) -> Iterator[dict[str, Any]]:
        """Yield the chain's envelopes from the first on, one file at a time.

        Half a line at the end of the index is skipped with a logged warning: its writer was cut short before it was told
        of success.

        Raises:
            TornStoreError: a line or an envelope cannot be read, they contradict each other, or the index was cut.
        """
        folder = self._folder(trace_id)
        index = f"{folder}/{INDEX}"
        numbered, number = True, -1
        for line_number, entry in files.entries(index):
            envelope = self._read_envelope(index, line_number, entry)
            number += 1
            numbered = numbered and _stem(entry) == number
            yield envelope
        if numbered and os.path.exists(f"{folder}/{_file_name(number + 2)}"):  # one more may be an orphan, two cannot
            raise TornStoreError(
                f"{index} ends at line {number + 1}, but envelopes beyond it exist: the index was cut",
                "restore the index from a copy, or export the chain from its ledger again",
            )

    def traces(self) -> Iterator[str]:
        """Yield the trace ids of all chains, in the order of their folders' names.

        Raises:
            TornStoreError: a folder's trace id cannot be told.
        """
        if not self.root.is_dir():
            return
        with files.translated(self._base):
            folders = sorted(path for path in self.root.iterdir() if (path / INDEX).is_file())
        for folder in folders:
            yield _read_name(folder) if is_long(folder.name) else trace_of(folder.name)

    def _folder(self, trace_id: str) -> str:
        if not isinstance(trace_id, str):
            raise StoreError(f"the trace id is {type(trace_id).__name__}, not text", "pass a str")
        name = folder_of(trace_id)
        folder = f"{self._base}/{name}"
        if name == trace_id or os.path.exists(folder):
            return folder
        return self._peers_folder(trace_id) or folder

    def _peers_folder(self, trace_id: str) -> str | None:
        """Return the folder a peer wrote for an id with capitals, where it exists under exactly that name."""
        if not trace_id.replace("-", "").replace("_", "").isalnum() or not trace_id.isascii():
            return None
        try:
            return f"{self._base}/{trace_id}" if trace_id in os.listdir(self._base) else None
        except OSError:
            return None

    @contextlib.contextmanager
    def _writing(self, trace_id: str) -> Iterator[tuple[str, Tail]]:
        """Hold the chain's lock; yield its folder and the repaired end of its index."""
        folder = self._folder(trace_id)
        index = f"{folder}/{INDEX}"
        with files.translated(folder):
            if not os.path.isdir(folder):
                os.makedirs(folder, exist_ok=True)
                files.sync_folder(self._base)
            lock = os.open(f"{folder}/{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                tail = files.read_tail(index)
                if tail.entry is None and is_long(folder):
                    files.write_file(folder, NAME, json.dumps({"trace_id": trace_id}))
                if tail.torn or tail.unterminated:
                    tail = files.repair(index, tail)
                yield folder, tail
            finally:
                os.close(lock)

    def _commit(self, folder: str, tail: Tail, envelope: Mapping[str, Any]) -> None:
        """Write the envelope, make it durable, then its index line."""
        name = self._free_name(folder, tail)
        files.write_file(folder, name, envelope_line(envelope))  # durable before the index names it
        integrity = envelope["integrity"]
        entry = {
            "current_hash": integrity["current"],
            "envelope_path": f"{folder.rpartition('/')[2]}/{name}",
            "previous_hash": integrity["previous"],
            "turn_index": envelope["subject"]["turn_index"],
        }
        files.append_line(f"{folder}/{INDEX}", json.dumps(entry), tail.end)
        if tail.entry is None:
            files.sync_folder(folder)

    def _free_name(self, folder: str, tail: Tail) -> str:
        number = _stem(tail.entry) + 1 if tail.entry else 0
        if not os.path.exists(f"{folder}/{_file_name(number)}"):
            return _file_name(number)
        # a crash's orphan, to be written over; or, in a chain a peer began with its own numbers, an envelope of the chain
        used = {_stem(entry) for _, entry in files.entries(f"{folder}/{INDEX}")}
        while number in used:
            number = max(used) + 1
        return _file_name(number)

    def _next_position(self, folder: str, tail: Tail) -> int:
        """Return the 0-based place of the next envelope: after the last one's, else by counting the index."""
        if tail.entry is None:
            return 0
        head, known = self._positions.get(folder, ("", 0))
        if head == tail.entry["current_hash"]:
            return known + 1
        last = self._read_envelope(f"{folder}/{INDEX}", None, tail.entry)
        position = last["subject"].get("position") if isinstance(last.get("subject"), dict) else None
        if type(position) is int:
            return position + 1
        return sum(1 for _ in files.entries(f"{folder}/{INDEX}"))  # a chain begun without positions

    def _read_envelope(self, index: str, line_number: int | None, entry: dict[str, Any]) -> dict[str, Any]:
        where = f"{index}, line {line_number}" if line_number else f"{index}, last line"
        relative = entry["envelope_path"]
        if relative.startswith("/") or ".." in relative.split("/"):
            raise TornStoreError(f"{where}: the envelope path leads out of the store", _RESTORE)
        path = f"{self._base}/{relative}"
        try:
            with open(path, "rb") as file:
                envelope = json.loads(file.read())
            current = envelope["integrity"]["current"]
        except FileNotFoundError:
            raise TornStoreError(f"{where}: {path} is missing", _RESTORE) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise TornStoreError(f"{where}: {path} is not an envelope", _RESTORE) from None
        except OSError as error:
            raise StoreError(f"{where}: {path} cannot be read: {error.strerror}", "check its permissions") from None
        if current != entry["current_hash"]:
            message = f"{where} names {entry['current_hash'][:80]}, but {path} holds {str(current)[:80]}"
            raise TornStoreError(message, "one of the two was edited; compare with a copy")
        return envelope  # type: ignore[no-any-return]

    def _settled_tail(self, folder: str) -> Tail:
        """Read the end of an index; where it looks torn, once more while no writer is at work."""
        index = f"{folder}/{INDEX}"
        with files.translated(folder):
            tail = files.read_tail(index)
            if not tail.torn:
                return tail
            try:
                lock = os.open(f"{folder}/{LOCK}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return tail
            try:
                fcntl.flock(lock, fcntl.LOCK_SH)
                return files.read_tail(index)
            finally:
                os.close(lock)


def _default_root() -> Path:
    given = os.environ.get(ENV_ROOT, "").strip()
    if given:
        return Path(given)
    try:
        return Path.home() / ".phionyx" / "letta_audit"
    except RuntimeError:
        raise StoreError("no home directory is known for this user", f"set {ENV_ROOT} to a folder") from None


def _check_envelope(trace_id: str, envelope: Mapping[str, Any]) -> None:
    """Refuse what could never verify: a chain is append-only, so it must not enter."""
    try:
        integrity, subject = envelope["integrity"], envelope["subject"]
        current, previous, turn = integrity["current"], integrity["previous"], subject["turn_index"]
        found = envelope_hash(envelope, previous)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise InvalidMutation("this is not an envelope", "build it with build_memory_envelope()") from None
    if type(turn) is not int or not isinstance(previous, str) or current != found:
        raise InvalidMutation("the envelope's hash is not that of its content", "append it as it was built")
    if subject.get("trace_id", trace_id) != trace_id:  # the peers' contract allows it; expected_trace will tell
        _log.warning("an envelope that names the chain %r is appended to %r", subject["trace_id"], trace_id)


def _head(tail: Tail) -> str:
    return str(tail.entry["current_hash"]) if tail.entry else GENESIS_HASH


def _file_name(number: int) -> str:
    return f"{number:06d}.json"


def _stem(entry: Mapping[str, Any]) -> int:
    """Return the number in an entry's file name, -1 where a foreign writer named it otherwise."""
    stem = str(entry["envelope_path"]).rpartition("/")[2].removesuffix(".json")
    return int(stem) if stem.isascii() and stem.isdigit() and len(stem) < 19 else -1


def _read_name(folder: Path) -> str:
    try:
        name = json.loads((folder / NAME).read_bytes())["trace_id"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        name = None
    if not isinstance(name, str) or folder_of(name) != folder.name:
        raise TornStoreError(f"{folder / NAME} does not hold the folder's trace id", _RESTORE)
    return name
