"""A process beside the worker, which starts it and ends with it: the end of the pipe to it is the end of the worker.

The database's URL holds a password: it goes down the pipe and never becomes an argument. ``PHIONYX_LETTA_*`` reach the process
through the environment; the plugin is off in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import IO, Any


class ChildProcess:
    """The worker's handle on it."""

    def __init__(self, module: str, first: Mapping[str, Any], *, farewell: float, answers: bool = False) -> None:
        """Nothing is started yet.

        Args:
            module: what it runs.
            first: what it is told first, as JSON on a line.
            farewell: how long it is waited for at the end, s.
            answers: whether its output is read by this process.
        """
        self._module = module
        self._first = first
        self._farewell = farewell
        self._answers = answers
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def alive(self) -> bool:
        """Whether it runs."""
        return self.pid is not None

    def start(self) -> None:
        """Start it."""
        environment = {name: value for name, value in os.environ.items() if name != "PHIONYX_LETTA_ENABLE"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if self._answers else subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self._say(self._first)

    def stop(self) -> bool:
        """Ask it to finish and go, and wait a little. Returns whether it went."""
        if self._process is None:
            return True
        with contextlib.suppress(OSError):
            _pipe(self._process.stdin).close()
        try:
            self._process.wait(self._farewell)
        except subprocess.TimeoutExpired:
            return False
        return True

    def disown(self) -> None:
        """In a forked child: let go of the parent's pipes, or the process would outlive the parent."""
        if self._process is not None:  # these are the child's copies only
            _pipe(self._process.stdin).close()
            if self._answers:
                _pipe(self._process.stdout).close()
            self._process = None

    def _say(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        with contextlib.suppress(OSError, ValueError):  # it may have ended; then it is started again
            pipe = _pipe(self._process.stdin)
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
