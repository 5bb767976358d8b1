"""Transcripts of finished sessions, as messages: the seed's text form, and records of a framework.

A record says who spoke. The text form only shows it: ``user: …`` at the start of a line. Text that holds such a line
cannot be told from two messages, so whoever reads the roles of a text transcript must not trust what follows a tool's
output (see :attr:`Message.forgeable`); records have no such limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Role of text whose speaker is not stated.
UNKNOWN = "unknown"

_ROLES = {
    "user": "user",
    "human": "user",
    "user_message": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "agent": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant_message": "assistant",
    "reasoning_message": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_result": "tool",
    "tool_return": "tool",
    "tool_return_message": "tool",
    "tool_call_message": "assistant",
    "system": "system",
    "developer": "system",
    "system_message": "system",
}
_ROLE_LINE = re.compile(
    r"(user|human|assistant|ai|agent|bot|model|system|developer|observation|ipython|"
    r"(?:tool|function)(?:[ _-]?(?:call|result|output|response|return|message)s?)?)"
    r"(?:[ \t]*[\[(]([^\])\n]{1,80})[\])])?[ \t]{0,4}:(?=[ \t\n]|$)[ \t]?",
    re.IGNORECASE,
)
# A role in a form that is not the seed's: "**Tool:** …", "[user] …", records as JSON. Such text is not a summary by its caller.
_OTHER_FORM = re.compile(
    r"^[^\w\n]{0,8}(?:user|human|assistant|ai|agent|bot|system|developer|tool|function|observation)\b[ \t]{0,3}(?:[^\w\s]|$)"
    r"|[\"']role[\"']\s{0,3}:",
    re.IGNORECASE | re.MULTILINE,
)
_MACHINE_ID = re.compile(r"(?:[a-z]{1,20}-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a session.

    ``role`` is user, assistant, tool, system or ``UNKNOWN``; ``index`` counts from 0. ``forgeable`` is true where the
    text may be a tool's all the same: it follows a tool's output, or names its speakers in a form that is not read.
    """

    role: str
    text: str
    message_id: str | None
    index: int
    forgeable: bool = False


def is_machine_id(text: str) -> bool:
    """Return whether a text is a random id as Letta makes them (`message-<uuid>`).

    No personal data, though one in ten thousand looks like an IBAN to the filter (measured), and changed it names nothing.
    """
    return _MACHINE_ID.fullmatch(text) is not None


def parse_transcript(
    transcript: str | None, session_records: Sequence[Mapping[str, Any] | object] | None = None
) -> list[Message]:
    """Return the messages of a session, empty ones left out; with both given, the records come after the text.

    Args:
        transcript: the seed's text: ``role: text``, a role at the start of a line beginning a message, other lines
            continuing it. Indented lines, quoted lines and lines inside a code fence begin nothing.
        session_records: mappings or objects with ``role`` (or Letta's ``message_type``), ``content`` (text, or a list
            of parts) and, if they have one, ``id``; or plain text.
    """
    parts = list(_from_text(transcript)) if transcript else []
    parts += [part for record in session_records or () for part in _from_record(record)]
    kept = [part for part in parts if part[1].strip()]
    return [
        Message(role, text, identity, index, forgeable) for index, (role, text, identity, forgeable) in enumerate(kept)
    ]


_Part = tuple[str, str, str | None, bool]


def _from_text(transcript: str) -> Iterator[_Part]:
    role, identity, forgeable = UNKNOWN, None, _OTHER_FORM.search(transcript) is not None
    lines: list[str] = []
    fence = ""
    after_tool = False
    for line in transcript.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        start = None if fence else _ROLE_LINE.match(line)
        if start is None:
            fence = _fence_after(line, fence)
            lines.append(line)
            continue
        yield role, "\n".join(lines).strip("\n"), identity, forgeable
        role, identity = _role(start[1]), start[2]
        forgeable = after_tool
        after_tool = after_tool or role == "tool"
        body = line[start.end() :]
        lines, fence = [body], _fence_after(body, "")
    yield role, "\n".join(lines).strip("\n"), identity, forgeable


def _role(name: str) -> str:
    name = name.lower()
    return "tool" if name.startswith(("tool", "function")) else _ROLES[name]


def _fence_after(line: str, fence: str) -> str:
    """The code fence that is open after `line`, when `fence` was open before it ("" for none), by CommonMark's rule."""
    found = _FENCE.match(line)
    if not found:
        return fence
    marks = found[1]
    if not fence:
        return marks
    closes = marks[0] == fence[0] and len(marks) >= len(fence) and not line[found.end() :].strip()
    return "" if closes else fence


def _from_record(record: Mapping[str, Any] | object) -> Iterator[_Part]:
    if isinstance(record, str):
        yield UNKNOWN, record, None, False
        return
    get = record.get if isinstance(record, Mapping) else lambda name: getattr(record, name, None)
    stated = get("role") or get("message_type") or get("type") or ""
    stated = getattr(stated, "value", stated)
    role = _ROLES.get(str(stated).lower(), UNKNOWN)
    identity = get("id") or get("message_id")
    content = next((value for name in _CONTENT if (value := get(name)) not in (None, "", [])), "")
    text = "\n".join(filter(None, (_text_of(content), _text_of(get("tool_calls") or ""))))
    yield role, text, None if identity is None else str(identity), False


_CONTENT = ("content", "text", "tool_return", "reasoning", "message", "tool_call", "output", "input")


def _text_of(content: Any) -> str:
    """The text of a message's content, whatever its shape; what is not text is given as JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "\n".join(filter(None, map(_text_of, content)))
    if isinstance(content, Mapping):
        inner = content.get("text", content.get("content"))
        return _text_of(inner) if inner is not None else json.dumps(content, ensure_ascii=False, default=str)
    inner = getattr(content, "text", None)
    return inner if isinstance(inner, str) else str(content)
