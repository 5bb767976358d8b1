"""What a session is made of, read from Letta's tables: the agent and its model, and the messages as a transcript's records.

Who really spoke decides what may be believed later, so it is told from the stored form: what Letta packs into a user's message is
not the user's (heartbeats, alerts, summaries), and neither is what another agent sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text

#: Most characters of messages read of one session; the newest are read, and of the message that goes beyond it the beginning.
MOST_CHARS = 400_000
_MOST_MESSAGES = 5000


@dataclass(frozen=True)
class Agent:
    """An agent as the proposer needs it."""

    agent_id: str
    agent_type: str
    name: str
    tags: frozenset[str]
    llm_config: Mapping[str, Any] | None
    organization_id: str | None
    user_id: str | None

    @property
    def model(self) -> str:
        """The name of its model."""
        config = self.llm_config or {}
        return str(config.get("handle") or config.get("model") or "?")


def read_agent(connection: Connection, agent_id: str) -> Agent | None:
    """The agent, or None where it was deleted."""
    found = connection.execute(_AGENT, {"agent": agent_id}).first()
    if found is None:
        return None
    tags = connection.execute(_TAGS, {"agent": agent_id}).scalars()
    config = found.llm_config if isinstance(found.llm_config, dict) else None
    user = found.user_id
    return Agent(
        agent_id, found.agent_type or "", found.name or "", frozenset(tags), config, found.organization_id, user
    )


def read_runs(connection: Connection, session_id: str) -> list[str]:
    """The runs of a session, in the order they ended."""
    return list(connection.execute(_RUNS, {"session": session_id}).scalars())


def read_records(connection: Connection, agent_id: str, runs: list[str]) -> list[dict[str, Any]]:
    """The messages of these runs as records with role, content and id, oldest first."""
    rows = connection.execute(_MESSAGES, {"agent": agent_id, "runs": runs, "most": _MOST_MESSAGES}).all()
    records: list[dict[str, Any]] = []
    left = MOST_CHARS
    for row in rows:  # newest first
        for one in reversed(list(_records(row))):
            if left <= 0:
                return records[::-1]
            records.append({**one, "content": one["content"][:left]})
            left -= len(one["content"])
    return records[::-1]


def said_by_user(records: list[dict[str, Any]]) -> int:
    """How much the user said, characters."""
    return sum(len(one["content"]) for one in records if one["role"] == "user")


def _records(row: Any) -> Iterator[dict[str, Any]]:
    content = _content(row)
    role = row.role
    if role == "user":
        role, content = _unpacked(content)
        if (row.sender_id or "").startswith("agent-") or content.startswith("[Incoming message from agent"):
            role = "tool"
    elif role not in ("assistant", "tool", "system"):
        role = "tool" if role == "approval" else "unknown"
    if role == "tool" and not content:
        content = "\n".join(str(one.get("func_response") or "") for one in _list(row.tool_returns))
    if role == "tool":
        content = _returned(content)
    if content.strip():
        yield {"role": role, "content": content, "id": row.id}
    if role == "assistant":
        spoken, called = _calls(row)
        if spoken:
            yield {"role": "assistant", "content": spoken, "id": row.id}
        if called:
            yield {"role": "assistant", "content": called, "id": row.id}


def _content(row: Any) -> str:
    parts = [part.get("text") for part in _list(row.content) if isinstance(part, dict) and part.get("type") == "text"]
    return "\n".join(part for part in parts if isinstance(part, str)) or (row.text or "")


def _unpacked(content: str) -> tuple[str, str]:
    """Letta's older agents pack a user's message into JSON; what else is packed so is Letta's own."""
    if content.lstrip().startswith("{"):
        try:
            packed = json.loads(content)
        except (ValueError, RecursionError):
            return "user", content
        if isinstance(packed, dict) and isinstance(packed.get("type"), str):
            said = packed.get("message")
            if packed["type"] == "user_message" and isinstance(said, str):
                return "user", said
            if {"time"} <= packed.keys():
                return "system", content
    if content.startswith("<system-reminder>"):
        return "system", content
    return "user", content


def _returned(content: str) -> str:
    """What a tool answered, out of the JSON Letta packs it in: else no words of two lines could be quoted."""
    if content.lstrip().startswith("{"):
        try:
            packed = json.loads(content)
        except (ValueError, RecursionError):
            return content
        if isinstance(packed, dict) and {"status", "message", "time"} == packed.keys():
            return packed["message"] if isinstance(packed["message"], str) else json.dumps(packed["message"])
    return content


def _calls(row: Any) -> tuple[str, str]:
    """What the assistant said through its tool for speaking, and the other calls as text."""
    spoken, called = [], []
    for call in _list(row.tool_calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        name, arguments = str(function.get("name")), str(function.get("arguments") or "")
        if name == "send_message":
            try:
                spoken.append(str(json.loads(arguments).get("message") or ""))
                continue
            except (ValueError, AttributeError, RecursionError):
                pass
        called.append(f"(calls {name} with {arguments})")
    return "\n".join(filter(None, spoken)), "\n".join(called)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


_AGENT = text(
    """
    select a.agent_type, a.name, a.llm_config, a.organization_id, coalesce(a._last_updated_by_id, a._created_by_id) as user_id
    from agents a where a.id = :agent and not a.is_deleted
    """
)
_TAGS = text("select tag from agents_tags where agent_id = :agent")
_RUNS = text("select run_id from phionyx_run where session_id = :session order by ended_at, run_id")
_MESSAGES = text(
    """
    select m.id, m.role, m.text, m.content, m.tool_calls, m.tool_returns, m.sender_id
    from messages m where m.agent_id = :agent and m.run_id = any(:runs) and m.role <> 'system' and not m.is_deleted
    order by m.sequence_id desc limit :most
    """
)
