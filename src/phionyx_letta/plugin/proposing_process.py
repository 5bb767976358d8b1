"""The worker's handle on the process that proposes, and the one thing it does for it in the server: ask the agent's own model.

Everything costly (transcripts, the filter for personal data, diffs) happens in a process of its own, for the reason the sealer has one
(docs/adr/0001). Only Letta knows how to reach an agent's model, so the prompt comes up a pipe, Letta's ``LLMClient`` is asked
in a thread with its own event loop, and the answer goes down again. No run is created by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import IO, Any

from phionyx_letta.plugin.runtime import logger

#: How long a worker waits for the process at its end, s; what it was at is taken up by another worker, or at the next start.
_FAREWELL = 3.0
#: Asks a model: the request of the process, to what goes back to it.
Ask = Callable[[dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]


class ProposingProcess:
    """Starts the process and answers it."""

    def __init__(self, url: str, name: str, ask: Ask) -> None:
        """Nothing is started yet.

        Args:
            url: of the database, with its password: it never becomes an argument.
            name: of this worker.
            ask: how to ask an agent's model.
        """
        self._url = url
        self._name = name
        self._ask = ask
        self._process: subprocess.Popen[str] | None = None
        self._writing = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def alive(self) -> bool:
        """Whether it runs."""
        return self.pid is not None

    def start(self) -> None:
        """Start it, and the thread that answers it; the plugin is off in it."""
        environment = {name: value for name, value in os.environ.items() if name != "PHIONYX_LETTA_ENABLE"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "phionyx_letta.plugin.sessions"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._say({"url": self._url, "name": self._name})
        threading.Thread(
            target=self._answer_all, args=(self._process,), name="phionyx-letta-model", daemon=True
        ).start()

    def stop(self) -> None:
        """Ask it to go, wait a little, then end it: the queue stands that, and a thread of the server reads its pipe."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            self._pipe(self._process.stdin).close()
        try:
            self._process.wait(_FAREWELL)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def disown(self) -> None:
        """In a forked child: let go of the parent's pipes, or the process would outlive the parent."""
        if self._process is not None:
            self._pipe(self._process.stdin).close()
            self._pipe(self._process.stdout).close()
            self._process = None
        self._writing = threading.Lock()

    def _answer_all(self, process: subprocess.Popen[str]) -> None:
        try:
            asyncio.run(self._answering(self._pipe(process.stdout)))
        except Exception as error:  # the process is started again when it ended; nothing of Letta's hangs on this
            logger.error("phionyx-letta: proposals stopped: %s: %s", type(error).__name__, error)
            process.kill()

    async def _answering(self, requests: IO[str]) -> None:
        loop = asyncio.get_running_loop()
        at_work: set[asyncio.Task[None]] = set()
        while line := await loop.run_in_executor(None, requests.readline):
            task = asyncio.create_task(self._answer(json.loads(line)))
            at_work.add(task)
            task.add_done_callback(at_work.discard)
        for task in at_work:
            task.cancel()

    async def _answer(self, request: dict[str, Any]) -> None:
        try:
            answer = await self._ask(request)
        except (
            Exception
        ) as error:  # whatever Letta's clients raise; the text may quote the prompt, so only its kind is told
            answer = {"error": f"the agent's model gave no answer ({type(error).__name__})"}
        await asyncio.to_thread(self._say, {"id": request["id"], **answer})

    def _say(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        with self._writing, contextlib.suppress(OSError, ValueError):  # it may have ended
            pipe = self._pipe(self._process.stdin)
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe
