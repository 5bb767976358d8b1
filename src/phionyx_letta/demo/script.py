"""The language in which a user's message tells the scripted model what to do.

A message may hold, each on a line of its own::

    CALL core_memory_append {"label": "human", "content": "likes tea"}
    PARCALL core_memory_append {"label": "human", "content": "p1"}
    SLEEP_CALL memory_rethink {"label": "human", "new_memory": "rewritten"}
    SAY any text
    RECALL seat

``CALL`` is one tool call and takes one step of the agent; consecutive ``PARCALL`` lines are made together in one
step; ``SAY`` is the text of the last answer, otherwise it is :data:`DONE`. ``RECALL`` answers with the line of the system
prompt, and so of the agent's memory, that has this word, or :data:`UNKNOWN`. The newest user message with such lines
counts, and how far it has come is read off the conversation itself: the endpoint keeps no state, so agents, workers
and retries do not disturb each other.

A proposer of Living Memory, which is shown a session as data, proposes what its messages name with lines of this form::

    REMEMBER {"fact_key": "editor", "content": "- Uses vim.", "evidence": ["I use vim"]}

A sleeptime agent reads what the foreground agent was told as a transcript inside one message. It makes the
``SLEEP_CALL`` lines and no other, and every other agent ignores those. A request to summarise a conversation is
answered with a summary, whatever the conversation says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

DONE = "ok, done"
UNKNOWN = "I do not know."
SUMMARY = "Summary: the conversation so far, in one line."

_LINE = re.compile(r"\s*(?:\w+: )?(?P<verb>CALL|PARCALL|SLEEP_CALL|SAY|RECALL) (?P<rest>.*\S)\s*")
_CALL = re.compile(r"(?P<tool>[\w.-]+) (?P<arguments>\{.*\})")
PROPOSER = "You maintain the long-term memory of an assistant."
_REMEMBER = re.compile(r"^\s*REMEMBER (\{.*\})\s*$", re.MULTILINE)
_SLEEPTIME = re.compile(r"Letta-Sleeptime|You are a sleeptime agent")
_SUMMARISE = re.compile(r"Only output the summary|Generate the summary\.|being evicted from the BEGINNING")
_FOREGROUND, _BACKGROUND = {"CALL", "PARCALL", "SAY", "RECALL"}, {"SLEEP_CALL"}
# tools that end a turn, in order of preference when an answer without a tool is not allowed
_CLOSING_TOOLS = ("send_message", "memory_finish_edits", "finish_rethinking_memory")


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool by name, with its arguments."""

    tool: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What the model answers: tool calls, or text."""

    calls: tuple[ToolCall, ...] = ()
    text: str | None = None


@dataclass
class _Script:
    steps: list[list[ToolCall]] = field(default_factory=list)
    text: str = DONE
    recall: str | None = None
    found: bool = False


def plan(request: dict[str, Any]) -> Reply:
    """Decide the answer to one chat-completions request, which is read only.

    Raises:
        ValueError: a script line's arguments are not a JSON object.
    """
    messages: list[dict[str, Any]] = request.get("messages") or []
    tools = [tool["function"]["name"] for tool in request.get("tools") or [] if "function" in tool]
    if messages and text_of(messages[-1]).startswith(PROPOSER):
        return Reply(text=_proposals(text_of(messages[-1])))
    if _asks_for_summary(messages):
        return Reply(text=SUMMARY)
    script, done = _current(messages, _BACKGROUND if _is_sleeptime(messages) else _FOREGROUND)
    if tools and done < len(script.steps):
        return Reply(calls=tuple(_complete(call, request) for call in script.steps[done]))
    text = script.text if script.recall is None else _recalled(script.recall, messages)
    return _closing(text, tools, forced=request.get("tool_choice") not in (None, "auto", "none"), request=request)


def _proposals(prompt: str) -> str:
    """The answer of a proposer: one proposal for each REMEMBER line of the session, once."""
    found: dict[str, None] = {}
    for line in prompt.splitlines():
        try:
            shown = json.loads(line.rstrip(","))
        except ValueError:
            continue
        if isinstance(shown, dict) and isinstance(shown.get("text"), str) and "role" in shown:
            found.update(dict.fromkeys(_REMEMBER.findall(shown["text"])))
    return json.dumps({"proposals": [json.loads(one) for one in found]})


def _recalled(word: str, messages: Sequence[dict[str, Any]]) -> str:
    """The last line with this word that the agent knows without being told."""
    known = "\n".join(text_of(one) for one in messages if one.get("role") in ("system", "developer"))
    lines = [line.strip(" -") for line in known.splitlines() if re.search(rf"\b{re.escape(word)}\b", line)]
    return lines[-1] if lines else UNKNOWN


def text_of(message: dict[str, Any]) -> str:
    """A message's text, whether it came as a string or as parts."""
    content = message.get("content") or ""
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content if isinstance(part, dict))
    return str(content)


def _current(messages: Sequence[dict[str, Any]], verbs: set[str]) -> tuple[_Script, int]:
    """The newest script of the conversation, and how many of its steps have been made."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get("role") == "user":
            script = _parse(_lines(text_of(messages[index])), verbs)
            if script.found:
                later = messages[index + 1 :]
                return script, sum(1 for m in later if m.get("role") == "assistant" and m.get("tool_calls"))
    return _Script(), 0


def _parse(lines: Iterable[str], verbs: set[str]) -> _Script:
    script, parallel = _Script(), False
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None or match["verb"] not in verbs:
            continue
        script.found = True
        if match["verb"] == "SAY":
            script.text = match["rest"]
            continue
        if match["verb"] == "RECALL":
            script.recall = match["rest"]
            continue
        call = _parse_call(match["rest"])
        if match["verb"] == "PARCALL" and parallel:
            script.steps[-1].append(call)
        else:
            script.steps.append([call])
        parallel = match["verb"] == "PARCALL"
    return script


def _parse_call(text: str) -> ToolCall:
    match = _CALL.fullmatch(text)
    if match is None:
        raise ValueError(f'not a script line: {text!r}; write it as: CALL tool {{"argument": "value"}}')
    try:
        return ToolCall(match["tool"], json.loads(match["arguments"]))
    except ValueError as error:
        raise ValueError(f"the arguments of {match['tool']} are not JSON: {error}") from None


def _lines(text: str) -> list[str]:
    """The lines of a user's message, out of the JSON that Letta's older agents pack it in, also inside a transcript."""
    lines: list[str] = []
    for line in _unpack(text).splitlines():
        unpacked = _unpack(line.partition(": ")[2]) if line.startswith("user: {") else line
        lines += unpacked.splitlines()
    return lines


def _unpack(text: str) -> str:
    if text.lstrip().startswith("{"):
        try:
            packed = json.loads(text)
        except ValueError:
            return text
        if isinstance(packed, dict) and isinstance(packed.get("message"), str):
            return str(packed["message"])
    return text


def _is_sleeptime(messages: Sequence[dict[str, Any]]) -> bool:
    return any(_SLEEPTIME.search(text_of(m)) for m in messages if m.get("role") in ("system", "developer", "user"))


def _asks_for_summary(messages: Sequence[dict[str, Any]]) -> bool:
    edges = [*messages[:1], *messages[-1:]]
    return any(_SUMMARISE.search(text_of(message)) for message in edges if message.get("role") != "assistant")


def _closing(text: str, tools: Sequence[str], *, forced: bool, request: dict[str, Any]) -> Reply:
    """The end of a turn: plain text, or a closing tool where the agent is of a kind that only speaks through tools."""
    if "send_message" in tools:
        return Reply(calls=(_complete(ToolCall("send_message", {"message": text}), request),))
    if forced and tools:
        tool = next((name for name in _CLOSING_TOOLS if name in tools), tools[0])
        return Reply(calls=(_complete(ToolCall(tool, {}), request),))
    return Reply(text=text)


def _complete(call: ToolCall, request: dict[str, Any]) -> ToolCall:
    """Add the arguments that Letta's older agents put into every tool and insist on."""
    extra: dict[str, Any] = {}
    for tool in request.get("tools") or []:
        function = tool.get("function", {})
        if function.get("name") == call.tool:
            properties = function.get("parameters", {}).get("properties", {})
            if "thinking" in properties:
                extra["thinking"] = "scripted"
            if "request_heartbeat" in properties:
                extra["request_heartbeat"] = call.tool not in _CLOSING_TOOLS
    return ToolCall(call.tool, {**extra, **call.arguments})
