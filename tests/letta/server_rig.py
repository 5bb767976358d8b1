"""A running Letta server that is armed, and what any test may do with it and ask of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psycopg

from phionyx_letta.demo.letta_server import LettaServer
from phionyx_letta.demo.model import EMBEDDING_HANDLE, MODEL_HANDLE, ScriptedModel
from phionyx_letta.signing import generate_key


@dataclass
class ServerRig:
    """The server, its database and the model's requests."""

    server: LettaServer
    database: str
    model: ScriptedModel
    rest: httpx.Client
    home: Path

    @classmethod
    @contextmanager
    def serving(
        cls, database: str, model: ScriptedModel, home: Path, settings: dict[str, str], workers: int = 1
    ) -> Iterator[Self]:
        """A server on this database; its key is made once in `home`."""
        if not (home / "key").exists():
            generate_key(home / "key")
        settings = {"PHIONYX_LETTA_SIGNING_KEY": str(home / "key"), **settings}
        with (
            LettaServer(database, model.base_url, plugin=True, schema=False, env=settings, workers=workers) as server,
            httpx.Client(base_url=server.base_url, timeout=120, trust_env=False) as rest,
        ):
            yield cls(server, database, model, rest, home)

    def agent(self, kind: str = "letta_v1_agent", *, value: str = "name: Ann", **more: Any) -> str:
        body = {
            "name": f"{kind}-{time.time_ns()}",
            "agent_type": kind,
            "model": MODEL_HANDLE,
            "embedding": EMBEDDING_HANDLE,
            "memory_blocks": [
                {"label": "human", "value": value, "description": "Who the user is."},
                {"label": "persona", "value": "I help."},
            ],
            # an agent of that kind speaks through a tool only, and without it goes on until its steps are used up
            "tools": ["core_memory_append", *(["send_message"] if kind == "memgpt_v2_agent" else [])],
            "include_base_tools": False,
            **more,
        }
        answer = self.rest.post("/v1/agents/", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def conversation(self, agent: str, **more: Any) -> str:
        answer = self.rest.post("/v1/conversations/", params={"agent_id": agent}, json=more)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def send(self, agent: str, text: str, how: str = "blocking", conversation: str | None = None) -> tuple[int, str]:
        """Send a message and wait for the end of its run: the HTTP status, and all that the client was told.

        `how` is blocking, streaming, `streaming tokens`, background or conversation.
        """
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        path = f"/v1/agents/{agent}/messages"
        if how == "blocking":
            answer = self.rest.post(path, json=body)
            return answer.status_code, answer.text
        if how == "background":
            answer = self.rest.post(f"{path}/async", json=body)
            run = f"/v1/runs/{answer.json()['id']}" if answer.status_code == 200 else ""
            if run:
                self.wait(lambda: self.rest.get(run).json()["status"] not in ("created", "running"))
                answer = self.rest.get(run)
            return answer.status_code, answer.text
        path = f"{path}/stream"
        if how == "streaming tokens":
            body["stream_tokens"] = True
        if how == "conversation":
            path, body["streaming"] = f"/v1/conversations/{conversation}/messages", True
        with self.rest.stream("POST", path, json=body) as stream:
            return stream.status_code, b"".join(stream.iter_bytes()).decode()

    def sql(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database) as connection:
            done = connection.execute(statement, values or None)
            return done.fetchall() if done.description else []

    def block(self, agent: str, label: str = "human") -> str:
        found = "select block_id from blocks_agents where agent_id = %s and block_label = %s"
        return str(self.sql(found, agent, label)[0][0])

    def wait(self, ready: Callable[[], object], seconds: float = 60, why: Callable[[], str] = lambda: "") -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, why()
            time.sleep(0.1)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command of ours on this server and its database."""
        command = [Path(sys.executable).with_name("phionyx-letta"), *arguments, "--json"]
        given = {
            "PHIONYX_LETTA_SIGNING_KEY": str(self.home / "key"),
            "LETTA_PG_URI": self.database,
            "PHIONYX_LETTA_MEMORY_STORE": self.database,
            "PHIONYX_LETTA_SERVER_URL": self.server.base_url,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        return subprocess.run(
            command, env={**os.environ, **given, **environment}, capture_output=True, text=True, check=False
        )

    def command(self, *arguments: str, code: int | None = 0, **environment: str) -> Any:
        """What it said; `code` is how it has to end, None any way."""
        done = self.run(*arguments, **environment)
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout)
