"""Chains in a folder, in the peers' layout: `<root>/<trace>/NNNNNN.json` and the index `chain.jsonl`.

An append waits for the disk once, for the envelope's file. The index makes appending quick, since only its tail is read,
but it is not what must survive: lines that a crash took are read from the envelopes beyond its end, which link to it, and
written again by the next append; half a line, or half an envelope, is repaired likewise. Not for Windows (no
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
_SIGNS = (INDEX, "000000.json")  # either shows that a folder holds a chain
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
        beyond = [entry for entry, _ in self._unindexed(folder, tail.entry)]
        return _head(beyond[-1] if beyond else tail.entry)

    def append(self, trace_id: str, envelope: Mapping[str, Any]) -> None:
        """Add an envelope built on the current head; it is durable on return; constant time.

        Raises:
            StaleHeadError: another envelope was appended since the head was read; build it again, or use `emit`.
            StoreError: the folder cannot be written.
            InvalidMutation: the envelope's own hash is wrong, or it is not JSON.
        """
        _check_envelope(trace_id, envelope)
        with self._writing(trace_id) as (folder, tail):
            head, given = _head(tail.entry), envelope["integrity"]["previous"]
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
                previous_hash=_head(tail.entry),
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

    def probe(self, trace_id: str) -> None:
        """Find out whether the chain can be written, and write nothing.

        Raises:
            StoreError: it cannot.
        """
        with self._writing(trace_id):
            pass

    def iter_chain(self, trace_id: str) -> Iterator[dict[str, Any]]:
        """Yield the chain's envelopes from the first on, one file at a time.

        Half a line at the end of the index is skipped with a logged warning: its writer was cut short before it was told
        of success.

        Raises:
            TornStoreError: a line or an envelope cannot be read, they contradict each other, or the index was cut.
        """
        folder = self._folder(trace_id)
        index = f"{folder}/{INDEX}"
        numbered, number, entry = True, -1, None
        for line_number, entry in files.entries(index):
            envelope = self._read_envelope(index, line_number, entry)
            number += 1
            numbered = numbered and _stem(entry) == number
            yield envelope
        for _, envelope in self._unindexed(folder, entry):
            number += 1
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
            folders = sorted(path for path in self.root.iterdir() if any((path / one).is_file() for one in _SIGNS))
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
                yield folder, self._completed(folder, tail)
            finally:
                os.close(lock)

    def _unindexed(self, folder: str, last: dict[str, Any] | None) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield (index entry, envelope) of the envelopes beyond the index's last entry, as far as they link to it.

        What does not link is the orphan of a writer that was cut short: it was never acknowledged, and is written over.
        """
        while True:
            name = _file_name(_stem(last) + 1 if last else 0)
            try:
                with os.fdopen(files.open_regular(f"{folder}/{name}"), "rb") as file:
                    envelope = json.loads(file.read())
                found = _entry(folder, name, envelope)
                if found["previous_hash"] != _head(last):
                    return
                if found["current_hash"] != envelope_hash(envelope, found["previous_hash"]):
                    return
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return
            last = found
            yield found, envelope

    def _completed(self, folder: str, tail: Tail) -> Tail:
        """Write the index lines that are missing at its end."""
        for entry, _ in self._unindexed(folder, tail.entry):
            line = json.dumps(entry)
            _log.warning(
                "%s/%s lacked the line of %s (lost in a crash); it is written again",
                folder,
                INDEX,
                entry["envelope_path"],
            )
            files.append_line(f"{folder}/{INDEX}", line, tail.end)
            tail = Tail(entry, tail.end + len(line) + 1)
        return tail

    def _commit(self, folder: str, tail: Tail, envelope: Mapping[str, Any]) -> None:
        """Write the envelope, make it durable, then its index line."""
        name = self._free_name(folder, tail)
        first = tail.entry is None
        try:
            files.write_file(folder, name, envelope_line(envelope))
            line = json.dumps(_entry(folder, name, envelope))
            files.append_line(f"{folder}/{INDEX}", line, tail.end, durable=first)
        except BaseException:
            self._take_back(folder, name, tail)
            raise
        if first:
            files.sync_folder(folder)

    @staticmethod
    def _take_back(folder: str, name: str, tail: Tail) -> None:
        """Undo an append whose caller is told that it failed: it must not turn up later. The index line goes first."""
        with contextlib.suppress(OSError):
            if os.path.exists(f"{folder}/{INDEX}"):
                os.truncate(f"{folder}/{INDEX}", tail.end)
            os.unlink(f"{folder}/{name}")

    def _free_name(self, folder: str, tail: Tail) -> str:
        number = _stem(tail.entry) + 1 if tail.entry else 0
        if not os.path.exists(f"{folder}/{_file_name(number)}"):
            return _file_name(number)
        # an orphan, to be written over; or, in a chain a peer began with its own numbers, an envelope of the chain
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
            with os.fdopen(files.open_regular(path), "rb") as file:
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


def _head(last: Mapping[str, Any] | None) -> str:
    return str(last["current_hash"]) if last else GENESIS_HASH


def _entry(folder: str, name: str, envelope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the index entry of an envelope; raises like any look into what may not be one."""
    return {
        "current_hash": envelope["integrity"]["current"],
        "envelope_path": f"{folder.rpartition('/')[2]}/{name}",
        "previous_hash": envelope["integrity"]["previous"],
        "turn_index": envelope["subject"]["turn_index"],
    }


def _file_name(number: int) -> str:
    return f"{number:06d}.json"


def _stem(entry: Mapping[str, Any]) -> int:
    """Return the number in an entry's file name, -1 where a foreign writer named it otherwise."""
    stem = str(entry["envelope_path"]).rpartition("/")[2].removesuffix(".json")
    return int(stem) if stem.isascii() and stem.isdigit() and len(stem) < 19 else -1


def _read_name(folder: Path) -> str:
    try:
        with os.fdopen(files.open_regular(str(folder / NAME)), "rb") as file:
            name = json.loads(file.read())["trace_id"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        name = None
    if not isinstance(name, str) or folder_of(name) != folder.name:
        raise TornStoreError(f"{folder / NAME} does not hold the folder's trace id", _RESTORE)
    return name
