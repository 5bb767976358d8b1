"""Processes that end with the one that started them: our side of :mod:`phionyx_letta.demo.supervisor`.

What is here knows neither PostgreSQL nor Letta.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from phionyx_letta.demo.errors import DemoError

#: How often a server is started anew because another process took its port first.
ATTEMPTS = 5
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


class SupervisedProcess:
    """A command that runs until :meth:`stop`, :meth:`kill` or the death of this process, and whose folder then
    disappears.

    A child that this process forks without ``exec`` holds the pipe as well: the command ends when the last of them has.

    Args:
        command: program and arguments.
        folder: a directory made for this process alone; it is removed when the process has been stopped, whoever
            stopped it.
        log: a file, usually inside ``folder``, that receives standard output and standard error.
        env: the whole environment of the command.
        stop_signal: the polite signal.
        grace: seconds between the polite signal and SIGKILL.

    Raises:
        DemoError: the command could not be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        log: Path,
        env: Mapping[str, str],
        cwd: Path,
        stop_signal: signal.Signals = signal.SIGTERM,
        grace: float = 10.0,
    ) -> None:
        """Start the command."""
        self.folder = folder
        self.log = log
        self._grace = grace
        self._exit_code: int | None = None
        self._unread = b""
        arguments = [str(grace), str(int(stop_signal)), str(folder), *command]
        with log.open("ab") as output:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        self.pid = self._read_pid(command[0])

    def _read_pid(self, program: str) -> int:
        line = self._next_line(timeout=30.0)
        if line is None or not line.startswith("PID "):
            reason = self.tail(5)
            self.stop()
            raise DemoError(f"{program} could not be started: {reason or 'no reason given'}")
        return int(line.removeprefix("PID "))

    def _next_line(self, timeout: float) -> str | None:
        """The next line the supervisor said, or None when it said nothing within ``timeout`` seconds or is gone."""
        assert self._supervisor.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._supervisor.stdout], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._supervisor.stdout.fileno(), 4096) if ready else b""
            if not chunk:
                return None
            self._unread += chunk
        line, self._unread = self._unread.split(b"\n", 1)
        return line.decode()

    def exit_code(self) -> int | None:
        """The command's exit code (minus the signal's number when one ended it), or None while it runs."""
        assert self._supervisor.stdout is not None
        if self._exit_code is None and not self._supervisor.stdout.closed:
            line = self._next_line(timeout=0.0)
            if line is not None and line.startswith("EXIT "):
                self._exit_code = int(line.removeprefix("EXIT "))
            elif line is None and self._supervisor.poll() is not None:
                self._exit_code = self._supervisor.returncode
        return self._exit_code

    def tail(self, lines: int = 40) -> str:
        """The last ``lines`` lines of the log; empty when there is none."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def kill(self) -> None:
        """SIGKILL the command's process group and wait until it is gone; the folder stays until :meth:`stop`.

        Group members whose new parent has not yet collected them are waited for two seconds at most: they no longer run.
        """
        if self.exit_code() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        _wait(lambda: self.exit_code() is not None, 10.0)
        _wait(lambda: not _group_exists(self.pid), 2.0)

    def stop(self) -> None:
        """End the command politely, wait for it, and remove its folder. Calling it again does nothing."""
        assert self._supervisor.stdin is not None
        assert self._supervisor.stdout is not None
        if self._supervisor.stdin.closed:
            return
        self._supervisor.stdin.close()
        try:
            self._supervisor.wait(self._grace + 10)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        self.exit_code()
        self._supervisor.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)


def _group_exists(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists, and is another user's
        return True
    return True


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free at this moment. Another process may take it first: callers try again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
