"""Folder names for trace ids: readable where they can be, one folder per id always, and the id told by the folder.

Lower-case ids of ASCII letters, digits, `.`, `_` and `-` are their own names. Every other byte of the UTF-8 form is
written `%XX`, capitals too, so that ids differing in case stay apart on file systems that ignore it; a leading dot too.
Names too long for a file system end in a hash, and the id is then kept in a file in the folder.
"""

from __future__ import annotations

import hashlib
import re

__all__ = ["folder_of", "is_long", "trace_of"]

_PLAIN = re.compile(rb"[a-z0-9_.-]")
_ORDINARY = re.compile(rb"[a-z0-9_-][a-z0-9_.-]*")
_EMPTY = "%"
_LONG = "%~"  # never part of an encoded id: a percent sign there is followed by two hex digits
_MAX = 180
_KEPT = 80


def folder_of(trace_id: str) -> str:
    """Return the folder name of a trace id (at most 180 ASCII characters)."""
    data = trace_id.encode("utf-8", "surrogatepass")
    if not data:
        return _EMPTY
    if _ORDINARY.fullmatch(data) and len(data) <= _MAX:
        return trace_id
    name = "".join(chr(byte) if _PLAIN.match(bytes([byte])) else f"%{byte:02X}" for byte in data)
    if name[0] == ".":
        name = "%2E" + name[1:]
    if len(name) <= _MAX:
        return name
    return f"{name[:_KEPT]}{_LONG}{hashlib.sha256(data).hexdigest()}"


def is_long(folder: str) -> bool:
    """Return whether the id must be read from the folder's own file."""
    return _LONG in folder


def trace_of(folder: str) -> str:
    """Return the trace id of a folder name that is not `is_long`; names nobody encoded (a peer's) are their own ids."""
    if folder == _EMPTY:
        return ""
    name = folder.encode("utf-8", "surrogateescape")
    data = re.sub(rb"%([0-9A-F]{2})", lambda found: bytes([int(found[1], 16)]), name)
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return folder
