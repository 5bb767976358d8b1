"""The embedded PostgreSQL, and the supervision that Letta's server shares with it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phionyx_letta.demo import postgres as module
from phionyx_letta.demo.environment import letta_environment
from phionyx_letta.demo.errors import DemoError
from phionyx_letta.demo.postgres import EmbeddedPostgres
from phionyx_letta.demo.process import SupervisedProcess


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def supervise(command: list[str], folder: Path, grace: float = 5.0) -> SupervisedProcess:
    folder.mkdir()
    return SupervisedProcess(
        command, folder=folder, log=folder / "log", env={"PATH": os.environ["PATH"]}, cwd=folder, grace=grace
    )


class TestTheServer:
    def test_it_has_vectors_and_databases_of_ones_own(self, postgres: EmbeddedPostgres, empty_database: str) -> None:
        name = empty_database.rpartition("/")[2].partition("?")[0]
        assert postgres.psql("select '[3,4]'::vector <-> '[0,0]'", name) == "5"
        assert postgres.psql("select current_database(), 1", name) == f"{name}|1"

    def test_a_database_is_copied_from_another(self, postgres: EmbeddedPostgres) -> None:
        postgres.new_database("original")
        postgres.psql("create table t as select 7 as x", "original")
        postgres.new_database("copied", template="original")
        assert postgres.psql("select x from t", "copied") == "7"
        postgres.drop_database("original")
        postgres.drop_database("copied")
        postgres.drop_database("copied")

    def test_it_speaks_with_python(self, postgres: EmbeddedPostgres) -> None:
        psycopg = pytest.importorskip("psycopg")
        with psycopg.connect(postgres.uri) as connection:
            assert connection.execute("select 'ü'").fetchone() == ("ü",)

    def test_it_is_quick_unless_it_must_be_durable(self, postgres: EmbeddedPostgres) -> None:
        assert postgres.psql("show fsync") == "off"
        with EmbeddedPostgres(durable=True) as durable:  # and two at once
            assert durable.psql("show fsync") == "on"
            assert durable.port != postgres.port

    def test_it_listens_on_this_machine_only(self, postgres: EmbeddedPostgres) -> None:
        assert postgres.psql("show listen_addresses") == "127.0.0.1"

    def test_an_error_is_postgresqls_own(self, postgres: EmbeddedPostgres) -> None:
        with pytest.raises(DemoError, match="syntax error"):
            postgres.psql("selec 1")

    @pytest.mark.parametrize("name", ["", "x;", "Upper", "a" * 64])
    def test_a_name_that_is_none(self, postgres: EmbeddedPostgres, name: str) -> None:
        with pytest.raises(DemoError, match="not a database name"):
            postgres.new_database(name)


class TestStartingIt:
    def test_with_no_home_and_its_variables_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HOME")
        monkeypatch.setenv("PGHOST", "nowhere.invalid")
        monkeypatch.setenv("PGOPTIONS", "-c nonsense=1")
        with EmbeddedPostgres() as server:
            assert server.psql("select 1") == "1"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root has to step down")
    def test_as_root_where_user_namespaces_are_forbidden(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_UNSHARE", ("false",))
        with EmbeddedPostgres() as server:
            assert server.psql("select 1") == "1"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root has to step down")
    def test_as_root_from_a_home_that_nobody_may_enter(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        wheel = module._binaries().parents[1]
        private = tmp_path / "private"
        for source in (wheel, wheel.with_name(f"{wheel.name}.libs")):
            if source.is_dir():
                shutil.copytree(source, private / source.name, symlinks=True, copy_function=os.link)
        private.chmod(0o700)
        install = private / wheel.name / module._binaries().parent.name
        monkeypatch.setattr(module, "_UNSHARE", ("false",))
        monkeypatch.setattr(module, "_binaries", lambda: install / "bin")
        with EmbeddedPostgres() as server:
            assert server.psql("select 1") == "1"
        assert private.stat().st_mode & 0o777 == 0o700

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_as_an_ordinary_user(self) -> None:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "HOME": "/nonexistent"}
        python = next(filter(_nobody_can_use, [sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"]), None)
        if python is None:
            pytest.skip("this Python lies where an ordinary user cannot reach it")
        command = [*module._SETPRIV, python, "-B", "-c", _START_AND_ASK]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")
        assert done.stdout.strip() == "1", done.stderr

    def test_without_the_wheel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "find_spec", lambda name: None)
        with pytest.raises(DemoError, match=r"not installed.*phionyx-letta\[pg\]"):
            EmbeddedPostgres().start()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root has to step down")
    def test_as_root_with_no_way_down(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module.shutil, "which", lambda name: None)
        with pytest.raises(DemoError, match="ordinary user"):
            EmbeddedPostgres().start()

    def test_on_a_port_that_is_taken_first(self, monkeypatch: pytest.MonkeyPatch, postgres: EmbeddedPostgres) -> None:
        ports = iter([postgres.port, module.free_port()])
        monkeypatch.setattr(module, "free_port", lambda: next(ports))
        with EmbeddedPostgres() as server:
            assert server.psql("select 1") == "1"

    def test_one_that_does_not_start_says_why_and_leaves_nothing(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setitem(module._SETTINGS, "max_connections", "none")
        with pytest.raises(DemoError, match=r"(?s)did not start.*max_connections"):
            EmbeddedPostgres().start()
        assert list(tmp_path.iterdir()) == []


def _nobody_can_use(python: str) -> bool:
    shell = ["sh", "-c", 'exec "$0" -c "import phionyx_letta.demo.postgres"', python]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([*module._SETPRIV, *shell], capture_output=True, env=environment, cwd="/").returncode == 0


_START_AND_ASK = """
from phionyx_letta.demo.postgres import EmbeddedPostgres
with EmbeddedPostgres() as server:
    print(server.psql("select 1"))
"""


class TestNothingIsLeftBehind:
    def test_after_use(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with EmbeddedPostgres() as server:
            pid = server.pid
            assert [entry.name[:11] for entry in tmp_path.iterdir()] == ["phionyx-pg-"]
        assert not is_running(pid)
        assert list(tmp_path.iterdir()) == []

    def test_after_a_crash_of_the_server(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with EmbeddedPostgres() as server:
            server.kill()
            with pytest.raises(DemoError, match="connection"):
                server.psql("select 1")
        assert list(tmp_path.iterdir()) == []

    def test_when_the_parent_is_killed(self, tmp_path: Path) -> None:
        script = _START_AND_ASK.replace(
            'server.psql("select 1")', "server.pid, flush=True); __import__('time').sleep(60"
        )
        environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert is_running(pid)
            parent.send_signal(signal.SIGKILL)
        assert wait_for(lambda: not is_running(pid))
        assert wait_for(lambda: list(tmp_path.iterdir()) == [])


class TestSupervision:
    def test_a_command_that_ends_is_noticed(self, tmp_path: Path) -> None:
        process = supervise(["sh", "-c", "echo bye; exit 3"], tmp_path / "own")
        assert wait_for(lambda: process.exit_code() is not None)
        assert process.exit_code() == 3
        assert process.tail() == "bye"
        process.stop()
        process.stop()
        assert not (tmp_path / "own").exists()

    def test_a_command_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(DemoError, match=r"/no/such/program could not be started.*No such file"):
            supervise(["/no/such/program"], tmp_path / "own")
        assert not (tmp_path / "own").exists()

    def test_a_command_that_does_not_want_to_end(self, tmp_path: Path) -> None:
        script = f"trap '' TERM; touch {tmp_path}/deaf; while :; do sleep 0.1; done"
        process = supervise(["sh", "-c", script], tmp_path / "own", grace=0.3)
        assert wait_for((tmp_path / "deaf").exists)
        process.stop()
        assert process.exit_code() == -signal.SIGKILL

    @pytest.mark.parametrize("end", [SupervisedProcess.kill, SupervisedProcess.stop])
    def test_its_children_end_with_it(self, tmp_path: Path, end: Callable[[SupervisedProcess], None]) -> None:
        said = tmp_path / "child"
        process = supervise(
            ["sh", "-c", f"sleep 100 & echo $! > {said}.new; mv {said}.new {said}; wait"], tmp_path / "own"
        )
        assert wait_for(said.exists)
        end(process)
        assert wait_for(lambda: not is_running(int(said.read_text())))
        process.stop()

    def test_a_ctrl_c_in_the_terminal_is_not_for_it(self, tmp_path: Path) -> None:
        process = supervise(["sleep", "100"], tmp_path / "own")
        assert os.getsid(process.pid) != os.getsid(0)
        process.stop()
        assert process.exit_code() == -signal.SIGTERM


class TestTheEnvironmentOfLetta:
    def test_of_the_callers_only_what_is_known_is_passed_on(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for name in ("ANTHROPIC_API_KEY", "LETTA_PG_POOL_SIZE", "HTTPS_PROXY", "PYTHONDONTWRITEBYTECODE"):
            monkeypatch.setenv(name, "x")
        monkeypatch.setenv("PHIONYX_LETTA_ON_ERROR", "closed")
        monkeypatch.setenv("PHIONYX_LETTA_ENABLE", "1")
        made = letta_environment("postgresql://x", tmp_path, model_base_url="http://127.0.0.1:1/v1")
        assert made["PHIONYX_LETTA_ON_ERROR"] == "closed"
        assert not {"ANTHROPIC_API_KEY", "LETTA_PG_POOL_SIZE", "HTTPS_PROXY", "PHIONYX_LETTA_ENABLE"} & made.keys()
        assert "PYTHONDONTWRITEBYTECODE" not in made
        assert made["HOME"] == str(tmp_path)

    def test_the_plugin_is_armed_when_asked_for_and_the_extra_variables_win(self, tmp_path: Path) -> None:
        made = letta_environment(
            "postgresql://x", tmp_path, model_base_url="http://x", plugin=True, extra={"LETTA_PG_URI": "other"}
        )
        assert made["PHIONYX_LETTA_ENABLE"] == "1"
        assert made["LETTA_PG_URI"] == "other"
        assert json.dumps(made)  # strings only
