"""The real program in its other two modes, the terminal interface under a pty and the App Server: recorded alike."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from phionyx_letta import Ed25519Signer
from phionyx_letta.demo.letta_code import LettaCode, shell_call
from phionyx_letta.demo.model import ScriptedModel
from phionyx_letta.letta_code.hooks import Hooks
from phionyx_letta.letta_code.places import Home
from phionyx_letta.letta_code.queue import queue_path
from phionyx_letta.letta_code.sealing import ingest, opened_ledger
from phionyx_letta.plugin.runtime import PluginKey
from phionyx_letta.settings import Settings

pytestmark = pytest.mark.slow

SIGNER = Ed25519Signer("22" * 32)
PATIENCE = 180.0  # s, on a busy machine


class Rig:
    """One agent of a Letta Code with hooks, and what the ledger says of its last commit."""

    def __init__(self, program: Path, folder: Path, model: ScriptedModel) -> None:
        self.letta, self.program, self.own = LettaCode(program, folder, model), program, folder / "own"
        self.agent = self.letta.ask("SAY hello").agent_id
        self.home = Home.find(self.letta.letta_dir)
        Hooks(self.home, self.own).install(self.home.memories(), report=True)
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.letta.home),
            "LANG": "C.UTF-8",
            "TERM": "xterm",
            "LETTA_CODE_TELEM": "0",
            "DISABLE_AUTOUPDATER": "1",
            "PHIONYX_LETTA_SIGNING_KEY": "22" * 32,
        }

    def command(self, *arguments: str) -> list[str]:
        return [str(self.program), "--backend", "local", *arguments]

    def subject(self) -> str:
        log = ["git", "-C", str(self.letta.memory(self.agent)), "log", "-1", "--format=%s"]
        return subprocess.run(log, capture_output=True, text=True, check=True).stdout.strip()

    def recorded(self) -> dict[str, Any]:
        """`metadata.letta` of the newest envelope."""
        key = PluginKey(SIGNER, "the tests")
        with opened_ledger(f"sqlite:///{self.own / 'ledger.db'}") as ledger:
            assert ingest(ledger, key, Settings(home=str(self.own)), self.home.memories()).problems == []
            *_, last = ledger.iter_chain(self.agent)
        found = last["subject"]["metadata"]["letta"]
        assert isinstance(found, dict)
        return found


@pytest.fixture
def rig(program: Path, tmp_path: Path) -> Iterator[Rig]:
    with ScriptedModel() as model:
        yield Rig(program, tmp_path, model)


def edit(word: str) -> str:
    return shell_call(f'cd "$MEMORY_DIR" && echo "Ada likes {word}." >>human.md && git commit -qam "{word}"')


def until(what: str, holds: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < PATIENCE, f"{what}: not within {PATIENCE:.0f} s"
        time.sleep(0.2)


def test_the_app_server(rig: Rig, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    arguments = ["server", "--listen", f"ws://127.0.0.1:{port}", "--openai-api"]
    body = json.dumps({"model": rig.agent, "messages": [{"role": "user", "content": edit("tea")}]}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            rig.command(*arguments),
            env=rig.environment,
            cwd=rig.letta.home,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    try:

        def listens() -> bool:
            assert server.poll() is None, (tmp_path / "server.log").read_text()
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                return True
            return False

        until("the App Server listens", listens)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            assert answer.status == 200
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    assert rig.subject() == "tea"
    said = rig.recorded()
    assert (said["path"], said["tool"], said["attribution"]) == ("human.md", "Bash", "hooks")
    assert said["conversation_id"]


@contextmanager
def terminal(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[tuple[int, Callable[[], bool]]]:
    """A program under a pty: its file to write to, and what reads what it wrote; False at its end."""
    process, file = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execve(command[0], command, environment)

    def read() -> bool:
        while select.select([file], [], [], 0)[0]:
            try:
                if not os.read(file, 1 << 16):
                    return False
            except OSError:  # the other side is closed
                return False
        return True

    try:
        yield file, read
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(file)


def test_the_terminal_interface(rig: Rig) -> None:
    """Start and end of a session are hooks here, and only here."""

    def typed(text: str) -> None:
        os.write(file, text.encode())
        for _ in range(30):  # Enter that comes with a burst of letters counts as pasted
            read()
            time.sleep(0.2)
        os.write(file, b"\r")

    command = rig.command("--agent", rig.agent, "--yolo")
    with terminal(command, rig.environment, rig.letta.home) as (file, read):
        until("the report at the start of the session", lambda: read() and reporting(rig))
        until("the report ends", lambda: read() and not reporting(rig))
        began = time.monotonic()
        until("the program takes it up", lambda: read() and time.monotonic() - began > 10)
        typed(edit("coffee"))
        until("the agent commits", lambda: read() and rig.subject() == "coffee")
        until("the turn ends", lambda: read() and any("PostToolUse" in note for note in notes(rig)))
        typed("/exit")
        until("the program ends", lambda: not read())
    assert any(note.startswith("session\n") for note in notes(rig))
    said = rig.recorded()
    assert (said["path"], said["tool"], said["attribution"]) == ("human.md", "Bash", "hooks")
    transcripts = "".join(path.read_text() for path in rig.home.backend.glob("conversations/*/messages.jsonl"))
    assert "SessionStart hook context" in transcripts
    assert "there is no ledger at" in transcripts


def reporting(rig: Rig) -> bool:
    """Whether `code verify` runs, for this program's home."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if b"\0code\0verify" in command and os.fsencode(rig.letta.home) in (process / "environ").read_bytes():
                return True
    return False


def notes(rig: Rig) -> list[str]:
    return [path.read_text(errors="replace") for path in sorted(queue_path(rig.own).glob("n.*"))]
