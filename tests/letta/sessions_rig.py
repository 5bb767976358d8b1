"""A running Letta server that proposes after each session, and what a test may do with it and ask of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server_rig import ServerRig

from phionyx_letta.demo.model import ScriptedModel

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


class Rig(ServerRig):
    """And what is proposed after its sessions."""

    def say(self, agent: str, text: str = TALK, how: str = "blocking", conversation: str | None = None) -> str:
        """Send a message; the text of the answer."""
        status, said = self.send(agent, text, how, conversation)
        assert status == 200, said
        return said

    def value(self, agent: str, label: str = "human") -> str:
        answer = self.rest.get(f"/v1/agents/{agent}/core-memory/blocks/{label}")
        assert answer.status_code == 200, answer.text
        return str(answer.json()["value"])

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


@contextmanager
def proposing(database: str, model: ScriptedModel, home: Path, workers: int = 1, **more: str) -> Iterator[Rig]:
    """A server on this database whose sessions end after a second of silence; `more` settings go over that."""
    settings = {
        "PHIONYX_LETTA_SESSIONS": "on",
        "PHIONYX_LETTA_SESSION_IDLE": "1",
        "PHIONYX_LETTA_SESSION_THRESHOLD": "1",
        **more,
    }
    with Rig.serving(database, model, home, settings, workers) as rig:
        yield rig
