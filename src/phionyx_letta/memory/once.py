"""Warnings that are given once in a process: damage that stays where it is is met again at every look."""

from __future__ import annotations

import logging
import threading

__all__ = ["warn_once"]

_MOST = 10_000  # remembered; beyond it all may be said once more
_said: set[tuple[object, ...]] = set()
_mutex = threading.Lock()


def warn_once(log: logging.Logger, message: str, *arguments: object, about: object = None) -> None:
    """Log a warning unless the same one, about the same thing, was logged before."""
    said = (log.name, message, *map(str, arguments), about)
    with _mutex:
        if said in _said:
            return
        if len(_said) >= _MOST:
            _said.clear()
        _said.add(said)
    log.warning(message, *arguments)
