"""A real Letta for the tests. It is never imported in the process of pytest: servers and scripts run in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from preloaded import Preloaded

from phionyx_letta.demo.environment import letta_environment
from phionyx_letta.demo.errors import DemoError
from phionyx_letta.demo.letta_server import LettaServer, require_letta
from phionyx_letta.demo.model import EMBEDDING_HANDLE, MODEL_HANDLE, ScriptedModel
from phionyx_letta.demo.postgres import EmbeddedPostgres

if TYPE_CHECKING:
    from letta_client.types import AgentState

_HERE = Path(__file__).parent
_TEMPLATE = "letta_template"
_CREATE_SCHEMA = "from phionyx_letta.demo.launcher import create_schema; create_schema(); print(0)"
_numbers = count(1)


class RunInLetta(Protocol):
    def __call__(
        self,
        script: str | Path,
        *arguments: str,
        database: str,
        plugin: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float = 300.0,
    ) -> Any: ...


class ServerFactory(Protocol):
    def __call__(
        self,
        database: str | None = None,
        *,
        plugin: bool = False,
        env: Mapping[str, str] | None = None,
        workers: int = 1,
        command: list[str] | None = None,
    ) -> LettaServer: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is marked `letta`."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker("letta")


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preloaded]:
    """Starts Letta's processes in a third of the processor time."""
    python = Preloaded(tmp_path_factory.mktemp("preloaded"))
    yield python
    python.close()


@pytest.fixture(autouse=True, scope="session")
def _servers_are_forked(preloaded: Preloaded) -> Iterator[None]:
    forking = SimpleNamespace(**{**vars(subprocess), "Popen": preloaded.start})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phionyx_letta.demo.process.subprocess", forking)
        yield


@pytest.fixture(scope="session")
def letta_template(postgres: EmbeddedPostgres, run_in_letta: RunInLetta) -> str:
    """The name of a database that holds Letta's tables and no rows, to be copied; nobody may stay connected to it."""
    try:
        require_letta()
    except DemoError as error:
        pytest.skip(str(error))
    run_in_letta(_CREATE_SCHEMA, database=postgres.new_database(_TEMPLATE))
    return _TEMPLATE


@pytest.fixture(scope="session")
def new_letta_database(postgres: EmbeddedPostgres, letta_template: str) -> Iterator[Callable[[], str]]:
    """Makes databases with Letta's tables, each in a tenth of a second; they go at the end of the session."""
    names: list[str] = []

    def make() -> str:
        names.append(f"letta_{next(_numbers)}")
        return postgres.new_database(names[-1], template=letta_template)

    yield make
    for name in names:
        postgres.drop_database(name)


@pytest.fixture
def database(postgres: EmbeddedPostgres, letta_template: str) -> Iterator[str]:
    """The URI of a database of one's own, with Letta's tables in it."""
    name = f"letta_{next(_numbers)}"
    yield postgres.new_database(name, template=letta_template)
    postgres.drop_database(name)


@pytest.fixture
def letta_server_factory(new_letta_database: Callable[[], str], model: ScriptedModel) -> Iterator[ServerFactory]:
    """Starts Letta servers, on a fresh database unless one is given, which end with the test."""
    with ExitStack() as servers:

        def start(
            database: str | None = None,
            *,
            plugin: bool = False,
            env: Mapping[str, str] | None = None,
            workers: int = 1,
            command: list[str] | None = None,
        ) -> LettaServer:
            server = LettaServer(
                database or new_letta_database(),
                model.base_url,
                plugin=plugin,
                env=env,
                workers=workers,
                command=command,
                schema=False,
            )
            return servers.enter_context(server)

        yield start


@pytest.fixture(scope="session")
def letta(new_letta_database: Callable[[], str], model: ScriptedModel) -> Iterator[LettaServer]:
    """One plain Letta server, without the plugin, for the whole session."""
    with LettaServer(new_letta_database(), model.base_url, schema=False) as server:
        yield server


@pytest.fixture
def new_agent() -> Callable[..., AgentState]:
    """Creates an agent on a server: ``new_agent(server, "memgpt_v2_agent", value="Ann")`` with a block `human`."""

    def create(
        server: LettaServer,
        kind: str = "letta_v1_agent",
        *,
        value: str = "Ann",
        tools: tuple[str, ...] = (),
        **more: Any,
    ) -> AgentState:
        return server.client().agents.create(
            name=f"{kind}-{time.time_ns()}",
            agent_type=kind,  # type: ignore[arg-type]
            model=MODEL_HANDLE,
            embedding=EMBEDDING_HANDLE,
            memory_blocks=[{"label": "human", "value": value}],
            tools=["core_memory_append", *tools],
            **more,
        )

    return create


@pytest.fixture(scope="session")
def run_in_letta(preloaded: Preloaded, model: ScriptedModel, tmp_path_factory: pytest.TempPathFactory) -> RunInLetta:
    """Runs a script, its source or its path, in a process that may import Letta, and returns the JSON on its last line.

    The script's ``sys.argv`` ends in ``--no-generation``: importing Letta's app writes a large file without it. A script
    costs an import of Letta (5 to 20 s), so let one script try many things.
    """

    def run(
        script: str | Path,
        *arguments: str,
        database: str,
        plugin: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float = 300.0,
    ) -> Any:
        home = tmp_path_factory.mktemp("home")
        how = [str(script)] if isinstance(script, Path) else ["-c", script]
        with (home / "stdout").open("w+b") as stdout, (home / "stderr").open("w+b") as stderr:
            process = preloaded.start(
                [sys.executable, *how, *arguments, "--no-generation"],
                env=letta_environment(database, home, model_base_url=model.base_url, plugin=plugin, extra=env),
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
        said, errors = ((home / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return _result(code, said, errors)

    return run


def _result(code: int, output: str, errors: str) -> Any:
    lines = output.splitlines()
    if code == 0 and lines:
        try:
            return json.loads(lines[-1])
        except ValueError:
            pass
    said = "\n".join([*lines[-10:], *errors.splitlines()[-40:]])
    return pytest.fail(f"the script ended with code {code} and no JSON on its last line:\n{said}", pytrace=False)
