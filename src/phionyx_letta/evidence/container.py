"""The zip of a bundle: which members it has, written once and read as a stream, however hostile it is.

A bundle has exactly these members, no folders, nothing before or after, no comment; a manifest gives the size and the SHA-256 of
each. The manifest is no evidence (whoever changes a member can change it too): it tells damage from attack. Nothing is ever
extracted, and of no member is more in memory than a line.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from phionyx_letta._lines import parse_unique
from phionyx_letta.errors import TornStoreError

__all__ = [
    "CHECKPOINTS",
    "ENVELOPES",
    "FORMAT",
    "HISTORY",
    "KEYS",
    "LAYOUT",
    "MANIFEST",
    "MAX_SMALL",
    "MEMBERS",
    "SCRIPT",
    "BundleReader",
    "BundleWriter",
    "looks_like_zip",
]

FORMAT = "phionyx-letta/evidence/v1"
MANIFEST, ENVELOPES, LAYOUT = "manifest.json", "envelopes.jsonl", "log.txt"
CHECKPOINTS, HISTORY, KEYS = "checkpoints", "key-history", "keys.txt"
SCRIPT, README, SCHEMA = "verify_evidence.py", "README.md", "schema.json"
#: All members; the log's layout is not there where a store has no log.
MEMBERS = (README, SCRIPT, SCHEMA, KEYS, HISTORY, CHECKPOINTS, LAYOUT, ENVELOPES, MANIFEST)
_OPTIONAL = {LAYOUT}

#: The largest member that is read at once, bytes.
MAX_SMALL = 4_000_000
#: The largest directory of a zip that is read, bytes; ours has less than one kB.
_MAX_DIRECTORY = 100_000
#: The most a member may inflate to, as a multiple of what is stored; ours are written without compression beyond half of it.
_MAX_RATIO = 200
_PIECE = 1 << 18
_DATE = (1980, 1, 1, 0, 0, 0)  # the same evidence gives the same bytes
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
)
#: How the last 22 bytes of a zip without a comment begin.
_END, _END_BYTES = b"PK\5\6", 22
_AROUND = "something stands before or after the zip in its file"
_AGAIN = "get it again from whoever exported it"


def looks_like_zip(path: Path) -> bool:
    """Return whether the file says that it is a zip, at its start or by its name."""
    with path.open("rb") as file:
        return file.read(2) == b"PK" or path.suffix == ".zip"


class BundleWriter:
    """Writes the members one after the other, and the manifest at the end."""

    def __init__(self, path: Path, *, compressed: bool = True) -> None:
        """Create the file."""
        self._zip = zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED)
        self._members: dict[str, dict[str, Any]] = {}

    def add(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write one member as a stream."""
        digest, size = hashlib.sha256(), 0
        with self._zip.open(self._info(name), "w", force_zip64=True) as member:
            for piece in _gathered(pieces):
                digest.update(piece)
                size += len(piece)
                member.write(piece)
        self._members[name] = {"bytes": size, "sha256": digest.hexdigest()}

    def close(self, facts: dict[str, Any]) -> None:
        """Write the manifest with these facts and finish the file."""
        manifest = {"format": FORMAT, **facts, "members": self._members}
        self._zip.writestr(self._info(MANIFEST), json.dumps(manifest, indent=1) + "\n")
        self._zip.close()

    def _info(self, name: str) -> zipfile.ZipInfo:
        info = zipfile.ZipInfo(name, _DATE)
        info.compress_type = self._zip.compression
        info.external_attr = 0o644 << 16
        return info

    def abandon(self) -> None:
        """Let go of the file, which stays unfinished."""
        self._zip.close()

    @property
    def inflates(self) -> bool:
        """Whether a member compresses so well that readers would take it for a bomb: then write it uncompressed."""
        return any(info.file_size * 2 > _limit(info) for info in self._zip.infolist())


class BundleReader:
    """Reads a bundle; a wrong container is an error, a wrong member is named in ``problems``."""

    def __init__(self, file: BinaryIO) -> None:
        """Read the directory and the manifest.

        Raises:
            TornStoreError: it is no zip, or not one with the members of a bundle.
        """
        self.problems: list[str] = []
        try:
            self._zip = zipfile.ZipFile(_Bounded(file))
        except (*_DAMAGE, _TooMuch) as error:
            raise TornStoreError(f"it is no zip that can be read ({_said(error)})", _AGAIN) from None
        _check_directory(self._zip)
        file.seek(-_END_BYTES, io.SEEK_END)
        if file.read(len(_END)) != _END:
            raise TornStoreError(_AROUND, _AGAIN)
        self.manifest = self._read_manifest()
        members = self.manifest.get("members")
        self._declared: dict[str, Any] = members if isinstance(members, dict) else {}
        if set(self._declared) != {*self._zip.namelist()} - {MANIFEST}:
            self.problems.append("the manifest does not list the members that are there")

    def has(self, name: str) -> bool:
        """Return whether there is such a member."""
        return name in self._zip.namelist()

    def read(self, name: str) -> bytes:
        """Return a small member; what is wrong with it is a problem, and it is then empty."""
        with self.stream(name) as member:
            data = member.read(MAX_SMALL + 1)
        if len(data) > MAX_SMALL:
            self.problems.append(f"{name} is larger than {MAX_SMALL} bytes")
            return b""
        return data

    @contextmanager
    def stream(self, name: str) -> Iterator[BinaryIO]:
        """Open a member; damage ends the reading and is a problem, as is another size or hash than the manifest's."""
        try:
            member = self._zip.open(name)
        except (*_DAMAGE, _TooMuch) as error:
            self.problems.append(f"{name} is damaged ({_said(error)})")
            yield io.BytesIO()
            return
        with member:
            checked = _Checked(member)
            yield io.BufferedReader(checked, _PIECE)
            checked.drain()
        if checked.fault is not None:
            self.problems.append(f"{name} is damaged ({checked.fault})")
        elif self._declared.get(name) != {"bytes": checked.size, "sha256": checked.digest.hexdigest()}:
            self.problems.append(f"{name} is not the file the manifest tells of")

    def _read_manifest(self) -> dict[str, Any]:
        try:
            with self._zip.open(MANIFEST) as member:
                manifest = parse_unique(member.read(_MAX_DIRECTORY))
        except (*_DAMAGE, _TooMuch, RecursionError):
            manifest = None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise TornStoreError(f"its manifest is not one of {FORMAT}", f"{_AGAIN}, or use the version that wrote it")
        return manifest


class _TooMuch(Exception):
    """More is asked for at once than any bundle needs."""


class _Bounded:
    """A file that does not give much at once: a zip may claim a directory of gigabytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(_PIECE + 1 if size < 0 else size) if size <= _PIECE else b""
        if size > _PIECE or len(data) > _PIECE:
            raise _TooMuch("its directory is larger than a bundle's")
        return data


class _Checked(io.RawIOBase):
    """What is read of a member, counted and hashed; damage ends it, as its end would."""

    def __init__(self, member: IO[bytes]) -> None:
        self._member = member
        self.digest = hashlib.sha256()
        self.size = 0
        self.fault: str | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if self.fault is not None:
            return 0
        try:
            piece = self._member.read(min(len(buffer), _PIECE))
        except (*_DAMAGE, _TooMuch) as error:
            self.fault = _said(error)
            return 0
        self.digest.update(piece)
        self.size += len(piece)
        buffer[: len(piece)] = piece
        return len(piece)

    def drain(self) -> None:
        """Read what is left: who stopped early has found a fault, and the sum is checked all the same."""
        scratch = bytearray(_PIECE)
        while self.readinto(memoryview(scratch)):
            pass


def _check_directory(file: zipfile.ZipFile) -> None:
    names = file.namelist()
    wrong = (
        sorted({name for name in names if name not in MEMBERS or names.count(name) > 1}) if len(names) < 99 else names
    )
    if wrong:
        raise TornStoreError(f"it has a member {wrong[0][:60]!r} that no bundle has, or twice", _AGAIN)
    missing = [name for name in MEMBERS if name not in names and name not in _OPTIONAL]
    if missing:
        raise TornStoreError(f"it has no {missing[0]}", _AGAIN)
    infos = file.infolist()
    if file.comment or min(info.header_offset for info in infos) != 0:
        raise TornStoreError(_AROUND, _AGAIN)
    for info in infos:
        if info.flag_bits & 0x1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise TornStoreError(f"its member {info.filename} is encrypted, or packed in a way no bundle is", _AGAIN)
        if info.file_size > _limit(info):
            raise TornStoreError(f"its member {info.filename} inflates to {info.file_size} bytes: it is a bomb", _AGAIN)


def _limit(info: zipfile.ZipInfo) -> int:
    return max(MAX_SMALL, info.compress_size * _MAX_RATIO)


def _gathered(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join small pieces: each write of a zip costs more than a line is long."""
    held, size = [], 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _PIECE:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


def _said(error: BaseException) -> str:
    words = str(error).split("\n")[0][:80]
    return "".join(char if char.isprintable() else "?" for char in words) or type(error).__name__
