"""Who changed the memory, and why: context variables that the wrapped functions of Letta fill and capture reads.

Nothing here is needed for a write to be captured; it only says more about it. A wrapper that cannot read what it expects
leaves the field out, it never guesses (design, decision 1).
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from phionyx_letta.errors import InvalidMutation
from phionyx_letta.memory.policy import Reviewer

_REFERENCE = re.compile(r"(?:envelope://)?(sha256:[0-9a-f]{64})\Z")
_REASON_LENGTH = 200


@dataclass
class ToolCall:
    """One call the model asked for; ``used`` once an execution was matched to it."""

    call_id: str | None
    name: str
    arguments: dict[str, Any]
    used: bool = False


@dataclass(frozen=True)
class Attribution:
    """What is known about the code that is running now. Every field may be missing."""

    agent_id: str | None = None
    agent_type: str | None = None
    run_id: str | None = None
    step_id: str | None = None
    conversation_id: str | None = None
    tool: str | None = None
    tool_id: str | None = None
    tool_type: str | None = None
    tool_call_id: str | None = None
    actor_id: str | None = None
    operation: str | None = None
    request: Mapping[str, str] | None = None
    request_agent_id: str | None = None
    parent: str | None = None
    reason: str | None = None
    reviewed: tuple[str, ...] = ()
    claim: Mapping[str, Any] | None = None
    """Of a reviewer, checked: the one write this request may make, and the patch behind it."""
    reviewer: Reviewer | None = None
    """Who that is, where there is a policy."""
    tool_calls: list[ToolCall] = field(default_factory=list)


_current: ContextVar[Attribution] = ContextVar("phionyx_letta_attribution", default=Attribution())  # noqa: B039 - frozen


def current() -> Attribution:
    """What is known about the code that is running now."""
    return _current.get()


@contextmanager
def attributed(**fields: Any) -> Iterator[None]:
    """Add these fields while the body runs."""
    token = _current.set(replace(_current.get(), **fields))
    try:
        yield
    finally:
        _current.reset(token)


def parent_reference(text: str) -> str:
    """A reference to an upstream envelope in the form the schema uses.

    Args:
        text: ``envelope://sha256:<64 hex digits>``, or the ``sha256:…`` of an envelope's ``integrity.current``.

    Raises:
        InvalidMutation: it has another form.
    """
    match = _REFERENCE.match(text.strip())
    if match is None:
        raise InvalidMutation(
            f"the parent envelope reference {text[:100]!r} is malformed",
            remedy="give envelope://sha256:<64 lower-case hex digits>, the integrity.current of the upstream envelope",
        )
    return "envelope://" + match[1]


def forgetting_reason(text: str) -> str:
    """A forgetting reason as it goes into the envelope.

    Raises:
        InvalidMutation: it is empty, longer than 200 characters or has control characters.
    """
    reason = text.strip()
    if not reason or len(reason) > _REASON_LENGTH or not reason.isprintable():
        raise InvalidMutation(
            f"the forgetting reason {text[:100]!r} is malformed",
            remedy=f"give 1 to {_REASON_LENGTH} printable characters, for example explicit_user_request",
        )
    return reason


@contextmanager
def mutation_context(*, parent_envelope: str | None = None, forgetting_reason: str | None = None) -> Iterator[None]:
    """Memory changes inside the body were caused by an upstream envelope, or are made for a reason.

    Args:
        parent_envelope: the upstream envelope, ``envelope://sha256:…``.
        forgetting_reason: recorded on clear, delete and forget.

    Raises:
        InvalidMutation: a value is malformed.
    """
    given: dict[str, Any] = {}
    if parent_envelope is not None:
        given["parent"] = parent_reference(parent_envelope)
    if forgetting_reason is not None:
        given["reason"] = globals()["forgetting_reason"](forgetting_reason)
    with attributed(**given):
        yield


# -- wrappers; their form is wrapt's: (wrapped, instance, args, kwargs) --------------------------------------------

_Wrapped = Callable[..., Awaitable[Any]]


async def around_ai_response(wrapped: _Wrapped, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``_handle_ai_response`` of LettaAgent, V2 and V3: agent, run, step, conversation and the calls of this step."""
    state = getattr(instance, "agent_state", None) or kwargs.get("agent_state")
    calls = kwargs.get("tool_calls") or [
        call for call in [kwargs.get("tool_call") or (args[0] if args else None)] if call
    ]
    with (
        attributed(  # every field is set, so that an agent called by another agent's tool inherits none of its caller's
            agent_id=getattr(state, "id", None),
            agent_type=_enum_value(getattr(state, "agent_type", None)),
            run_id=kwargs.get("run_id"),
            step_id=kwargs.get("step_id"),
            conversation_id=getattr(instance, "conversation_id", None),
            actor_id=getattr(getattr(instance, "actor", None), "id", None),
            tool_calls=[parsed for call in calls if (parsed := _tool_call(call))],
        )
    ):
        return await wrapped(*args, **kwargs)


async def around_execute_tool(wrapped: _Wrapped, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``ToolExecutionManager.execute_tool_async``: the tool, and which of the step's calls this is."""
    name = kwargs.get("function_name", args[0] if args else None)
    arguments = kwargs.get("function_args", args[1] if len(args) > 1 else None)
    tool = kwargs.get("tool", args[2] if len(args) > 2 else None)
    state = getattr(instance, "agent_state", None)
    agent_id = getattr(state, "id", None)
    here = current()
    stranger = {} if agent_id == here.agent_id else dict.fromkeys(("run_id", "conversation_id"))
    with attributed(
        **stranger,
        agent_id=agent_id,
        agent_type=_enum_value(getattr(state, "agent_type", None)),
        step_id=kwargs.get("step_id"),
        tool=name,
        tool_id=getattr(tool, "id", None),
        tool_type=_enum_value(getattr(tool, "tool_type", None)),
        tool_call_id=_matching_call(here.tool_calls, name, arguments) if not stranger else None,
        actor_id=getattr(getattr(instance, "actor", None), "id", None) or here.actor_id,
    ):
        return await wrapped(*args, **kwargs)


async def around_sleeptime_step(wrapped: _Wrapped, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``_participant_agent_step`` of the sleeptime groups: which messages the sleeptime agent was shown."""
    messages = kwargs.get("response_messages") or []
    with attributed(reviewed=tuple(str(message.id) for message in messages if getattr(message, "id", None))):
        return await wrapped(*args, **kwargs)


async def around_sandbox_environment(
    wrapped: _Wrapped, _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``_gather_env_vars`` of the sandboxes: a tool is not handed our settings, where the signing key is among them.

    A tool in the local sandbox is still a program of the server's user: what keeps an agent from approving its own patches for good
    is a reviewer's key that is not on the server (docs/sessions.md).
    """
    environment = await wrapped(*args, **kwargs)
    if not isinstance(environment, dict):
        return environment
    return {name: value for name, value in environment.items() if not str(name).startswith("PHIONYX_LETTA_")}


def around_operation(operation: str) -> Callable[..., Awaitable[Any]]:
    """A manager's method: its name, the actor, and the agent it was called for when nothing closer is known."""

    async def wrapper(wrapped: _Wrapped, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        here = current()
        actor = kwargs.get("actor") or next((arg for arg in args[::-1] if type(arg).__name__ == "User"), None)
        agent_id = kwargs.get("agent_id") or next(
            (a for a in args if isinstance(a, str) and a.startswith("agent-")), None
        )
        with attributed(
            operation=operation if here.operation is None else here.operation,
            **_known(
                actor_id=getattr(actor, "id", None),
                request_agent_id=here.request_agent_id or agent_id,
            ),
        ):
            return await wrapped(*args, **kwargs)

    return wrapper


def _known(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _enum_value(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "value", value))


def _tool_call(call: Any) -> ToolCall | None:
    function = getattr(call, "function", None)
    name = getattr(function, "name", None)
    if not isinstance(name, str):
        return None
    try:
        arguments = json.loads(getattr(function, "arguments", None) or "{}")
    except ValueError:
        arguments = {}
    return ToolCall(getattr(call, "id", None), name, arguments if isinstance(arguments, dict) else {})


#: Letta takes these out of the arguments before it executes a call.
_CONTROL_ARGUMENTS = {"request_heartbeat", "thinking", "inner_thoughts"}


def _matching_call(calls: list[ToolCall], name: Any, arguments: Any) -> str | None:
    """The id of the call with this name and these arguments; the executor is not told it, so it is matched.

    Two equal calls of one step are taken in their order. Arguments that Letta changed on the way (prefilled by a tool
    rule) leave the name, if only one call of the step has it.
    """
    named = [call for call in calls if call.name == name and not call.used]
    exact = [call for call in named if _plain(call.arguments) == _plain(arguments)]
    candidates = exact or (named if len(named) == 1 else [])
    if not candidates:
        return None
    candidates[0].used = True
    return candidates[0].call_id


def _plain(arguments: Any) -> Any:
    if not isinstance(arguments, Mapping):
        return arguments
    return {name: value for name, value in arguments.items() if name not in _CONTROL_ARGUMENTS}
