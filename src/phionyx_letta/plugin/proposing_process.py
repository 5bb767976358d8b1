"""The worker's handle on the process that proposes, and the one thing it does for it in the server: ask the agent's own model.

Everything costly (transcripts, the filter for personal data, diffs) happens in a process of its own, for the reason the sealer has one
(docs/adr/0001). Only Letta knows how to reach an agent's model, so the prompt comes up a pipe, Letta's ``LLMClient`` is asked
in a thread with its own event loop, and the answer goes down again. No run is created by it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import IO, Any

from phionyx_letta.plugin.child_process import ChildProcess
from phionyx_letta.plugin.runtime import logger

#: How long a worker waits for the process at its end, s; what it was at is taken up by another worker, or at the next start.
_FAREWELL = 3.0
#: Asks a model: the request of the process, to what goes back to it.
Ask = Callable[[dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]


class ProposingProcess(ChildProcess):
    """Starts the process and answers it."""

    def __init__(self, url: str, name: str, ask: Ask) -> None:
        """Nothing is started yet.

        Args:
            url: of the database.
            name: of this worker.
            ask: how to ask an agent's model.
        """
        first = {"url": url, "name": name}
        super().__init__("phionyx_letta.plugin.sessions", first, farewell=_FAREWELL, answers=True)
        self._ask = ask
        self._writing = threading.Lock()

    def start(self) -> None:
        """Start it, and the thread that answers it."""
        super().start()
        assert self._process is not None
        threading.Thread(
            target=self._answer_all, args=(self._process,), name="phionyx-letta-model", daemon=True
        ).start()

    def stop(self) -> bool:
        """End it if it does not go: the queue stands that, and a thread of the server reads its pipe."""
        went = super().stop()
        if not went and self._process is not None:
            self._process.kill()
        return went

    def disown(self) -> None:
        """In a forked child: the parent's lock may have been held."""
        super().disown()
        self._writing = threading.Lock()

    def _answer_all(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        try:
            asyncio.run(self._answering(process.stdout))
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

    def _say(self, message: Mapping[str, Any]) -> None:
        with self._writing:
            super()._say(message)
