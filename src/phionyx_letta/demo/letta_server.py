"""A real Letta server for the length of a ``with`` block, in a process group of its own that dies with this process.

Everything the server writes goes to one temporary folder, which is removed afterwards; its database is the caller's
(:class:`phionyx_letta.demo.postgres.EmbeddedPostgres` is one). Letta itself is never imported here, only in the
process that is started.

``python -m phionyx_letta.demo.letta_server`` is that process, see :mod:`phionyx_letta.demo.launcher`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from phionyx_letta.demo.environment import letta_environment
from phionyx_letta.demo.errors import DemoError
from phionyx_letta.demo.launcher import MODULE, create_schema, keep_nltk_offline, main
from phionyx_letta.demo.process import ATTEMPTS, SupervisedProcess, free_port

if TYPE_CHECKING:
    from letta_client import Letta

__all__ = ["LettaServer", "create_schema", "create_schema_in", "require_letta"]

#: Called about once a second while the server starts, with what is going on and for how many seconds.
Progress = Callable[[str, float], None]
_TAIL = 40  # lines of the log in an error message
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, whatever proxies are set


class LettaServer:
    """A Letta server on a free port of 127.0.0.1.

    Args:
        database_uri: a PostgreSQL database with pgvector available.
        model_base_url: the OpenAI-compatible endpoint, for instance ``ScriptedModel.base_url``.
        plugin: arm phionyx-letta inside the server.
        env: further environment variables, such as ``PHIONYX_LETTA_*``; they go over what is set here.
        workers: uvicorn worker processes.
        schema: create Letta's tables first; False where they are known to exist (saves little with one worker, a
            Letta import with more).
        command: run this instead of our own launcher, ``{port}`` replaced: for instance
            ``["phionyx-letta", "run", "--", "letta", "server", "--host", "127.0.0.1", "--port", "{port}"]``.
        timeout: seconds the server may take to become healthy (10 to 25 alone, 80 for two workers on two busy cores).
        progress: told what is going on.

    Raises:
        DemoError: on entering, when Letta is not installed, or when the server does not become healthy (with the end
            of its log).
    """

    def __init__(
        self,
        database_uri: str,
        model_base_url: str,
        *,
        plugin: bool = False,
        env: Mapping[str, str] | None = None,
        workers: int = 1,
        schema: bool = True,
        command: Sequence[str] | None = None,
        timeout: float = 300.0,
        progress: Progress | None = None,
    ) -> None:
        """Say what the server shall be like; nothing is started yet."""
        self._database_uri = database_uri
        self._model_base_url = model_base_url
        self._plugin = plugin
        self._env = dict(env or {})
        self._workers = workers
        self._schema = schema
        self._command = command
        self._timeout = timeout
        self._progress = progress or (lambda stage, seconds: None)
        self._process: SupervisedProcess | None = None
        self._folder: Path | None = None
        self._client: Letta | None = None
        self._last_words = ""
        self.port = 0
        self.log = Path()

    def __enter__(self) -> LettaServer:
        """Start the server."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the server."""
        self.stop()

    @property
    def base_url(self) -> str:
        """Where the REST API is served."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process id of the server, which leads its process group and, with several workers, is their parent."""
        return self._running().pid

    def start(self) -> None:
        """Start the server and wait until it is healthy; ``with`` calls this.

        Raises:
            DemoError: Letta is not installed, or the server does not become healthy.
        """
        require_letta()
        if self._command is not None and self._schema:
            create_schema_in(self._database_uri)
        for _ in range(ATTEMPTS):
            self._folder = Path(tempfile.mkdtemp(prefix="phionyx-letta-"))
            try:
                self._launch(self._folder)
                if self._wait_until_healthy():
                    return
            except BaseException:
                self.stop()
                raise
            self.stop()
        raise DemoError(f"the Letta server found no free port in {ATTEMPTS} attempts")

    def stop(self) -> None:
        """Shut the server down, by force after ten seconds, and remove its folder. Calling it again does nothing."""
        self._last_words = self.tail()
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            self._process.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """SIGKILL the server with all its workers, as a crash would; the log stays until :meth:`stop`."""
        self._running().kill()

    def exit_code(self) -> int | None:
        """None while the server runs, else its exit code."""
        return self._running().exit_code()

    def tail(self, lines: int = _TAIL) -> str:
        """The last lines of the server's log; after :meth:`stop`, those from just before it."""
        said = self._process.tail(lines) if self._process is not None else ""
        return said or self._last_words

    def client(self) -> Letta:
        """The one client of this server, closed with it; it sends no request twice and waits 120 s for each answer."""
        from letta_client import Letta

        if self._client is None:
            self._client = Letta(base_url=self.base_url, max_retries=0, timeout=120.0)
        return self._client

    def _running(self) -> SupervisedProcess:
        if self._process is None:
            raise DemoError("the Letta server is not running", "Use it inside a `with` block.")
        return self._process

    def _launch(self, folder: Path) -> None:
        self.port = free_port()
        self.log = folder / "letta.log"
        environment = letta_environment(
            self._database_uri, folder, model_base_url=self._model_base_url, plugin=self._plugin, extra=self._env
        )
        self._process = SupervisedProcess(self._arguments(), folder=folder, log=self.log, env=environment, cwd=folder)

    def _arguments(self) -> list[str]:
        if self._command is not None:
            return [part.replace("{port}", str(self.port)) for part in self._command]
        schema = ["--schema"] if self._schema else []
        return [sys.executable, "-m", MODULE, str(self.port), "--workers", str(self._workers), *schema]

    def _wait_until_healthy(self) -> bool:
        """True once the server answers, False when its port was taken.

        Raises:
            DemoError: it ended, or took longer than it may.
        """
        process, began, reported = self._running(), time.monotonic(), 0.0
        while (passed := time.monotonic() - began) < self._timeout:
            if process.exit_code() is not None:
                if "address already in use" in self.tail(200).lower():
                    return False
                raise DemoError(f"the Letta server ended with code {process.exit_code()}:\n{self.tail()}")
            if self._is_healthy():
                return True
            if passed >= reported + 1:
                reported = passed
                self._progress("starting the Letta server", passed)
            time.sleep(0.1)
        raise DemoError(f"the Letta server was not healthy after {self._timeout:.0f} s:\n{self.tail()}")

    def _is_healthy(self) -> bool:
        try:
            with _DIRECT.open(f"{self.base_url}/v1/health/", timeout=5) as answer:
                return bool(json.load(answer).get("status") == "ok")
        except (OSError, ValueError):
            return False


def require_letta() -> None:
    """Check that the Letta server is installed, without importing it (which would write to HOME).

    Raises:
        DemoError: it is not, or what is installed under that name is another program.
    """
    spec = find_spec("letta")
    places = (spec and spec.submodule_search_locations) or ()
    if not any((Path(place) / "server" / "rest_api" / "app.py").is_file() for place in places):
        raise DemoError(
            "the Letta server is not installed",
            "Install it on Python 3.11 to 3.13: pip install 'phionyx-letta[letta,pg]'",
        )


def create_schema_in(database_uri: str) -> None:
    """Create Letta's tables in a database, in a process of its own (its import of Letta takes 5 to 16 s).

    Raises:
        DemoError: with the end of what that process said.
    """
    require_letta()
    with tempfile.TemporaryDirectory(prefix="phionyx-letta-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", MODULE, "--schema"],
            env=letta_environment(database_uri, Path(folder), model_base_url="http://127.0.0.1:9/v1"),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    if done.returncode:
        said = "\n".join(done.stderr.splitlines()[-_TAIL:])
        raise DemoError(f"Letta's tables could not be created:\n{said}")


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a worker process: multiprocessing imports the parent's main module under this name
    keep_nltk_offline()
