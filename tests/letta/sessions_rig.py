"""A running Letta server that proposes after each session, and what a test may do with it and ask of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg

from phionyx_letta.demo.letta_server import LettaServer
from phionyx_letta.demo.model import EMBEDDING_HANDLE, MODEL_HANDLE, ScriptedModel
from phionyx_letta.signing import generate_key

UV = {
    "fact_key": "deploy_tool",
    "content": "- Deploys with uv.",
    "evidence": ["I always deploy with uv"],
    "rationale": "said so",
}


def remember(said: str, **proposal: Any) -> str:
    """What a user says, and what the scripted proposer makes of it."""
    return f"{said}\nREMEMBER {json.dumps(proposal or UV)}"


TALK = remember("I always deploy with uv, never with anything else, for all my work.")


@dataclass
class Rig:
    """The server, its database and the model's requests."""

    server: LettaServer
    database: str
    model: ScriptedModel
    rest: httpx.Client
    home: Path
    settings: dict[str, str] = field(default_factory=dict)

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

    def say(self, agent: str, text: str = TALK, how: str = "blocking", conversation: str | None = None) -> str:
        """Send a message; the text of the answer. Only `background` may come back before the run has ended."""
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        path = f"/v1/agents/{agent}/messages"
        if how == "blocking":
            answer = self.rest.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.text
        if how == "background":
            answer = self.rest.post(f"{path}/async", json=body)
            assert answer.status_code == 200, answer.text
            self.wait(
                lambda: self.rest.get(f"/v1/runs/{answer.json()['id']}").json()["status"] not in ("created", "running")
            )
            return answer.text
        path = f"{path}/stream"
        if how == "conversation":
            path, body = f"/v1/conversations/{conversation}/messages", {**body, "streaming": True}
        with self.rest.stream("POST", path, json=body) as stream:
            said = b"".join(stream.iter_bytes()).decode()
            assert stream.status_code == 200, said
            return said

    def conversation(self, agent: str) -> str:
        answer = self.rest.post("/v1/conversations/", params={"agent_id": agent}, json={})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def sql(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database) as connection:
            done = connection.execute(statement, values or None)
            return done.fetchall() if done.description else []

    def value(self, agent: str, label: str = "human") -> str:
        answer = self.rest.get(f"/v1/agents/{agent}/core-memory/blocks/{label}")
        assert answer.status_code == 200, answer.text
        return str(answer.json()["value"])

    def block(self, agent: str, label: str = "human") -> str:
        return str(self.rest.get(f"/v1/agents/{agent}/core-memory/blocks/{label}").json()["id"])

    def sessions(self, agent: str) -> list[dict[str, Any]]:
        found = self.command("session", "list", "--agent", agent)
        return list(found["sessions"])

    def patches(self, agent: str) -> list[dict[str, Any]]:
        statement = "select body from phionyx_patch where newest and file_path like %s order by seq"
        return [json.loads(body) for (body,) in self.sql(statement, f"letta:{agent}/%")]

    def finished(self, agent: str, count: int = 1, seconds: float = 60) -> list[tuple[Any, ...]]:
        """Wait until so many sessions of the agent are finished; their state, patches and detail, oldest first."""
        statement = (
            "select state, patches, detail, attempts, tokens, model, session_id from phionyx_session "
            "where agent_id = %s and finished_at is not null order by ended_at"
        )
        self.wait(
            lambda: len(self.sql(statement, agent)) >= count,
            seconds,
            lambda: f"{self.queue(agent)}\n{self.server.tail(30)}",
        )
        return self.sql(statement, agent)

    def queue(self, agent: str) -> list[tuple[Any, ...]]:
        return self.sql("select * from phionyx_session where agent_id = %s", agent)

    def asked(self) -> int:
        """How often a proposer was asked."""
        return sum("You maintain the long-term memory" in json.dumps(body) for body in self.model.chats)

    def wait(self, ready: Callable[[], object], seconds: float = 60, why: Callable[[], str] = lambda: "") -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, why()
            time.sleep(0.1)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
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

    def command(self, *arguments: str, code: int = 0, **environment: str) -> Any:
        done = self.run(*arguments, **environment)
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout)


@contextmanager
def proposing(database: str, model: ScriptedModel, home: Path, workers: int = 1, **more: str) -> Iterator[Rig]:
    """A server on this database whose sessions end after a second of silence; `more` settings go over that."""
    if not (home / "key").exists():
        generate_key(home / "key")
    settings = {
        "PHIONYX_LETTA_SIGNING_KEY": str(home / "key"),
        "PHIONYX_LETTA_SESSIONS": "on",
        "PHIONYX_LETTA_SESSION_IDLE": "1",
        "PHIONYX_LETTA_SESSION_THRESHOLD": "1",
        **more,
    }
    with (
        LettaServer(database, model.base_url, plugin=True, schema=False, env=settings, workers=workers) as server,
        httpx.Client(base_url=server.base_url, timeout=120, trust_env=False) as rest,
    ):
        yield Rig(server, database, model, rest, home, settings)
