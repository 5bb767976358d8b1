"""The real Letta Code in a home of its own, with the scripted model: what `phionyx-letta demo --letta-code` and the tests drive.

Everything lives in one temporary folder. The program is the user's (`pip install letta` since 0.32); nothing of it is changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phionyx_letta.demo.errors import DemoError
from phionyx_letta.demo.model import MODEL, ScriptedModel

__all__ = ["INSTALL", "Answer", "LettaCode", "find_program", "shell_call"]

INSTALL = "make a virtual environment of its own, in it pip install letta==0.34.12, and give --program ITS/bin/letta"
_HANDLE = f"openai-compatible/{MODEL}"
_TIMEOUT = 300.0  # s, for one start of the program on a busy machine
_TOLD_EVERY = 15.0  # s


@dataclass(frozen=True)
class Answer:
    """What the program said in one turn."""

    agent_id: str
    conversation_id: str
    text: str


def find_program(given: Path | None) -> Path:
    """The program `letta` of Letta Code: the given one, else the one on PATH.

    Raises:
        DemoError: there is none, or it is the Python server, which has the same name.
    """
    name = str(given) if given else shutil.which("letta")
    if name is None or not os.access(name, os.X_OK):
        raise DemoError(f"{given or 'the program letta'} was not found", INSTALL)
    environment = {"PATH": os.environ.get("PATH", ""), "HOME": "/nonexistent", "LETTA_CODE_TELEM": "0"}
    try:
        done = subprocess.run([name, "--version"], capture_output=True, text=True, timeout=_TIMEOUT, env=environment)
        said = f"{done.stdout} {done.stderr}"
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DemoError(f"{name} cannot be run: {type(error).__name__}", INSTALL) from None
    if "Letta Code" not in said:
        raise DemoError(f"{name} is not Letta Code", INSTALL)
    return Path(name)


def shell_call(command: str) -> str:
    """The line of a user's message that makes the scripted model run a shell command."""
    return "CALL Bash " + json.dumps({"command": command, "description": "Scripted by the demo"})


class LettaCode:
    """One user's Letta Code, headless, on its local backend."""

    def __init__(
        self, program: Path, folder: Path, model: ScriptedModel, told: Callable[[str], None] = lambda _: None
    ) -> None:
        """Take a clean home in `folder` and connect the model.

        Args:
            program: as `find_program` gives it.
            folder: empty.
            model: the scripted endpoint.
            told: hears how long an answer is waited for.

        Raises:
            DemoError: the program does not take it.
        """
        self._program, self._told = program, told
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self.letta_dir = self.home / ".letta"
        self._run("connect", "openai-compatible", "--base-url", model.base_url, "--api-key", "sk-fake")

    def ask(self, prompt: str, agent: str | None = None) -> Answer:
        """One turn of an agent, or of a new one.

        Raises:
            DemoError: the program failed, or its answer has not the form that is known.
        """
        who = ["--agent", agent] if agent else ["--new-agent"]
        said = self._run(*who, "-m", _HANDLE, "-p", prompt, "--output-format", "json")
        try:
            answer: dict[str, Any] = json.loads(said)
            return Answer(answer["agent_id"], answer["conversation_id"], str(answer["result"]))
        except (ValueError, KeyError, TypeError):
            raise DemoError(f"Letta Code answered in an unknown form: {said[:200]!r}", INSTALL) from None

    def memory(self, agent: str) -> Path:
        """The folder of an agent's memory."""
        return self.letta_dir / "lc-local-backend" / "memfs" / agent / "memory"

    def _run(self, *arguments: str) -> str:
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "LETTA_CODE_TELEM": "0",
            "DISABLE_AUTOUPDATER": "1",
        }
        command = [str(self._program), "--backend", "local", *arguments]
        with subprocess.Popen(
            command,
            env=environment,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, errors = self._waited(process)
            except BaseException:  # its children hold its pipes open
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode != 0:
            raise DemoError(f"Letta Code failed: {(errors or said).strip()[-300:]}", INSTALL)
        return said

    def _waited(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        began = time.monotonic()
        while (left := began + _TIMEOUT - time.monotonic()) > 0:
            try:
                return process.communicate(timeout=min(left, _TOLD_EVERY))
            except subprocess.TimeoutExpired:
                waited = time.monotonic() - began
                self._told(f"Letta Code has not answered for {waited:.0f} s; it is given {_TIMEOUT:.0f} s")
        raise DemoError(
            f"Letta Code gave no answer within {_TIMEOUT:.0f} s",
            "try again on a quieter machine",
        )
