"""A Python that has imported what Letta imports, and forks itself for each Letta the tests start.

Two thirds of the 10 to 25 s of processor time a Letta takes to start are spent on importing anthropic, openai, google.genai and
others (measured); CI starts about a hundred. Nothing of Letta and nothing of ours is imported before the fork: each process
imports Letta itself, under its own environment, armed as the ``.pth`` file arms it. Tests of the start itself (the demo, the
command, two workers, another version) start their Python anew.

``python preloaded.py SOCKET`` is that Python: it ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any, NoReturn

# fmt: off
#: What Letta 0.16.8 imports from elsewhere in more than 0.05 s, but for grpc and markitdown (onnxruntime): they start threads,
#: which a fork has not.
_HEAVY = [
    "anthropic.types.beta.messages", "apscheduler.schedulers.asyncio", "asyncpg",
    "datamodel_code_generator.parser.jsonschema", "fastapi", "fastmcp", "google.genai",
    "marshmallow_sqlalchemy", "mcp", "mistralai", "numpy", "openai.types.chat",
    "opentelemetry.instrumentation.requests", "pydantic_settings", "sqlalchemy.dialects.postgresql",
    "sqlalchemy.ext.asyncio", "yaml",
]
# fmt: on
_SUPERVISOR = "supervisor.py"


class Preloaded:
    """The client's side: starts the preloaded Python, and processes from it.

    Args:
        folder: of its own, for the socket.
    """

    def __init__(self, folder: Path) -> None:
        """Start it, and do not wait until it has imported."""
        self._address = str(folder / "socket")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._address)
        self._listener.listen(64)  # whoever connects before the imports are done waits in this queue
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__, str(self._listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[self._listener.fileno()],
            env={name: value for name, value in os.environ.items() if not name.startswith(("LETTA_", "PHIONYX_"))},
        )

    def close(self) -> None:
        """End the preloaded Python; what it has started goes on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._listener.close()

    def start(self, command: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        """As :class:`subprocess.Popen`, with a fork in place of a new Python where ``command`` is one this can fork."""
        words = [str(part) for part in command]
        if not _may_be_forked(words) or how["env"].get("PYTHONPATH") != os.environ.get("PYTHONPATH"):
            return subprocess.Popen(words, **how)
        return _Forked(self._address, words, **how)


def _may_be_forked(command: Sequence[str]) -> bool:
    """A script or module of this very Python; several workers are uvicorn's to start."""
    if command[0] != sys.executable or command[-2:] == ["--workers", "2"]:
        return False
    script, *arguments = _script(command)
    return Path(script).name != _SUPERVISOR or _may_be_forked(arguments[3:])


def _script(command: Sequence[str]) -> list[str]:
    """What follows the interpreter and its options -I and -S, which matter to a Python that starts only."""
    return list(dropwhile(lambda part: part in ("-I", "-S"), command[1:]))


class _Forked(subprocess.Popen[bytes]):
    """Enough of :class:`subprocess.Popen` for what the tests do with one: pid, pipes, poll, wait, kill."""

    def __init__(
        self,
        address: str,
        command: list[str],
        *,
        stdin: int | None = None,
        stdout: int | io.IOBase | None = None,
        stderr: int | io.IOBase | None = None,
        env: Mapping[str, str],
        cwd: Path,
        start_new_session: bool = False,
    ) -> None:
        self.args, self.returncode, self._said = command, None, b""  # type: ignore[assignment]
        self.stdin, self.stdout, self.stderr = None, None, None
        ours: list[int] = []
        theirs: list[int] = []
        for number, given in enumerate((stdin, stdout, stderr)):
            if given == subprocess.PIPE:
                reading, writing = os.pipe()
                ours.append(writing if number == 0 else reading)
                theirs.append(reading if number == 0 else writing)
            elif given == subprocess.DEVNULL:
                theirs.append(os.open(os.devnull, os.O_RDWR))
            else:
                theirs.append(os.dup(number if given is None else given if isinstance(given, int) else given.fileno()))
        if stdin == subprocess.PIPE:
            self.stdin = os.fdopen(ours.pop(0), "wb", 0)
        if stdout == subprocess.PIPE:
            self.stdout = os.fdopen(ours.pop(0), "rb", 0)
        if stderr == subprocess.PIPE:
            self.stderr = os.fdopen(ours.pop(0), "rb", 0)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(address)
        wanted = {"command": command, "env": dict(env), "cwd": str(cwd), "session": start_new_session}
        body = json.dumps(wanted).encode()
        socket.send_fds(self._connection, [b"%10d" % len(body)], theirs)
        self._connection.sendall(body)
        for descriptor in theirs:
            os.close(descriptor)
        self.pid = int(self._line(None) or "")

    def _line(self, timeout: float | None) -> str | None:
        while b"\n" not in self._said:
            ready, _, _ = select.select([self._connection], [], [], timeout)
            if not ready:
                return None
            chunk = self._connection.recv(64)
            if not chunk:
                return "-9"  # the preloaded Python is gone, and with it whoever would know
            self._said += chunk
        line, self._said = self._said.split(b"\n", 1)
        return line.decode()

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and (line := self._line(timeout)) is not None:
            self.returncode = int(line)
            self._connection.close()
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def __del__(self, *_args: Any, **_options: Any) -> None:
        self._connection.close()


# -- the preloaded Python --------------------------------------------------------------------------------------------


class _Become(BaseException):
    """Unwinds a forked process to the top, where it runs a command as if it had been started with it."""

    def __init__(self, command: list[str]) -> None:
        self.command = command


def _serve(listener: socket.socket) -> NoReturn:
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [], 0.02 if running else None)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            with running.pop(pid) as connection, contextlib.suppress(OSError):
                connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        if sys.stdin in ready:
            sys.exit()
        if listener in ready:
            connection, _ = listener.accept()
            pid = _fork(connection, [listener, *running.values()])
            running[pid] = connection
            connection.sendall(b"%d\n" % pid)


def _fork(connection: socket.socket, others: list[socket.socket]) -> int:
    length, descriptors, _, _ = socket.recv_fds(connection, 10, 3)
    body = b""
    while len(body) < int(length):
        body += connection.recv(65536)
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    for other in (connection, *others):
        other.close()
    wanted = json.loads(body)
    if wanted["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(wanted["env"])
    time.tzset()
    os.chdir(wanted["cwd"])
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    raise _Become(wanted["command"])


class _ForkedAgain:
    """What the supervisor starts: a fork too, without leaving this Python."""

    def __init__(self, command: list[str], *, preexec_fn: Any, **_options: Any) -> None:
        self.pid, self._code = os.fork(), None
        if self.pid == 0:
            os.setsid()
            preexec_fn()
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.close(nothing)
            os.dup2(2, 1)
            raise _Become(command)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.005)
        return code


def _run(command: list[str]) -> None:
    """Run a command line of Python in this process, as a Python that had just started would."""
    sys.orig_argv = command
    what, *arguments = _script(command)
    if Path(what).name == _SUPERVISOR:
        program = runpy.run_path(what)
        program["main"].__globals__["subprocess"] = types.SimpleNamespace(Popen=_ForkedAgain, DEVNULL=None)
        sys.exit(program["main"](arguments))
    for place in sys.path:  # what `site` does at the start of a Python that is armed
        armed = Path(place) / "phionyx_letta.pth"
        if armed.is_file():
            exec(armed.read_text())
            break
    sys.path[0] = "" if what in ("-m", "-c") else str(Path(what).parent)
    if what == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    source = arguments.pop(0) if what == "-c" else Path(what).read_text()
    sys.argv = [what, *arguments]
    module = types.ModuleType("__main__")
    if what != "-c":
        module.__file__ = what
    sys.modules["__main__"] = module
    exec(compile(source, "<string>" if what == "-c" else what, "exec"), module.__dict__)


def _main() -> None:
    gc.disable()
    for name in _HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    task: list[str] | None = None
    while True:
        try:
            if task is None:
                _serve(socket.socket(fileno=int(sys.argv[1])))
            _run(task)
            return
        except _Become as become:
            task = become.command


if __name__ == "__main__":
    _main()
