"""What proposals cost an agent: its run over REST, beside a proposer that takes 5 s for each answer, against a server without.

Two real servers with one worker each, on databases of their own and one scripted model; every run is a session. They take turns.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from measuring import interleaved, medians, ratio, seconds

from phionyx_letta.demo.letta_server import LettaServer
from phionyx_letta.demo.model import EMBEDDING_HANDLE, MODEL_HANDLE, ScriptedModel
from phionyx_letta.demo.script import PROPOSER, Reply, plan, text_of
from phionyx_letta.signing import generate_key

if TYPE_CHECKING:
    from catalogue import Bench

Measured = tuple[float, dict[str, Any]]
#: How long the proposer takes, s.
SLOW = 5.0
_FIRST_RUNS = 5
_FACT = {"fact_key": "tool", "content": "- Deploys with uv.", "evidence": ["I always deploy with uv"]}
_SAID = f"I always deploy with uv, never with anything else.\nREMEMBER {json.dumps(_FACT)}"


class SessionPair:
    """A server without and one with proposals, and an agent on each."""

    def __init__(self, uris: tuple[str, str], folder: Path) -> None:
        """``uris`` are of two databases with Letta's tables."""
        self._uris, self._folder = uris, folder / "sessions"
        self._model = ScriptedModel(override=_slowly)
        self._servers: list[LettaServer] = []
        self._runs: list[tuple[httpx.Client, str]] = []

    def start(self) -> None:
        """Start both servers and make the agents."""
        self._folder.mkdir()
        generate_key(self._folder / "key")
        self._model.__enter__()
        for uri, sessions in zip(self._uris, ("off", "on"), strict=True):
            settings = {
                "PHIONYX_LETTA_SIGNING_KEY": str(self._folder / "key"),
                "PHIONYX_LETTA_SESSIONS": sessions,
                "PHIONYX_LETTA_SESSION_END": "run",
                "PHIONYX_LETTA_SESSION_THRESHOLD": "1",
                "PHIONYX_LETTA_SESSION_TOKENS": "0",
            }
            server = LettaServer(uri, self._model.base_url, plugin=True, schema=False, env=settings)
            server.start()
            self._servers.append(server)
            rest = httpx.Client(base_url=server.base_url, timeout=120, trust_env=False)
            self._runs.append((rest, _agent(rest)))
        for which in (0, 1) * _FIRST_RUNS:
            self.run(which)

    def run(self, which: int) -> float:
        """Let the agent without (0) or with (1) proposals answer; s."""
        rest, agent = self._runs[which]
        body = {"messages": [{"role": "user", "content": _SAID}]}
        return seconds(lambda: rest.post(f"/v1/agents/{agent}/messages", json=body).raise_for_status())

    def asked(self) -> int:
        """How often the proposer was asked so far."""
        return sum(text_of(chat["messages"][-1]).startswith(PROPOSER) for chat in self._model.chats)

    def close(self) -> None:
        """End both."""
        for rest, _ in self._runs:
            rest.close()
        for server in self._servers:
            server.stop()
        self._model.__exit__(None, None, None)


def latency(bench: Bench) -> Measured:
    """An agent's run over REST with proposals against without."""
    pair = bench.sessions
    before = pair.asked()
    pairs = interleaved(bench.rounds(40), lambda: pair.run(0), lambda: pair.run(1))
    off, on = medians(pairs)
    details = {"off_ms": off * 1000, "on_ms": on * 1000, "proposer_asked": pair.asked() - before}
    return ratio(pairs), details


def _slowly(request: dict[str, Any]) -> Reply:
    if text_of(request["messages"][-1]).startswith(PROPOSER):
        time.sleep(SLOW)
    return plan(request)


def _agent(rest: httpx.Client) -> str:
    body = {
        "name": "benchmark",
        "agent_type": "letta_v1_agent",
        "model": MODEL_HANDLE,
        "embedding": EMBEDDING_HANDLE,
        "memory_blocks": [{"label": "human", "value": "Name: Ada."}],
        "include_base_tools": False,
    }
    return str(rest.post("/v1/agents/", json=body).raise_for_status().json()["id"])
