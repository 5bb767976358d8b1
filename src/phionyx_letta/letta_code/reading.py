"""Opening a file of somebody else's folder: a regular file, no link, and no named pipe that would never end."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

__all__ = ["open_regular"]

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def open_regular(path: Path | bytes) -> BufferedReader:
    """Open the file for reading.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
        ValueError: the path holds a NUL.
    """
    descriptor = os.open(path, _FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path!r} is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
