"""The functions of Letta that are wrapped to learn who and why. A missing or changed one is reported, never guessed.

Written down here are the parameters each wrapper relies on; a target without them is left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

from phionyx_letta.plugin.attribution import (
    around_ai_response,
    around_execute_tool,
    around_operation,
    around_sandbox_environment,
    around_sleeptime_step,
)


@dataclass(frozen=True)
class Target:
    """One function: where it is, what its wrapper reads, the wrapper."""

    module: str
    path: str
    needs: tuple[str, ...]
    wrapper: Callable[..., Any]
    generator: bool = False
    """It is an asynchronous generator, not a coroutine."""

    @property
    def name(self) -> str:
        """Dotted name, as `doctor` shows it."""
        return f"{self.module}.{self.path}"


def _operations(module: str, owner: str, methods: dict[str, str]) -> list[Target]:
    return [Target(module, f"{owner}.{name}", ("actor",), around_operation(event)) for name, event in methods.items()]


_STEP = ("run_id", "step_id")
TARGETS: tuple[Target, ...] = (
    Target(
        "letta.agents.letta_agent_v3", "LettaAgentV3._handle_ai_response", (*_STEP, "tool_calls"), around_ai_response
    ),
    Target(
        "letta.agents.letta_agent_v2", "LettaAgentV2._handle_ai_response", (*_STEP, "tool_call"), around_ai_response
    ),
    Target("letta.agents.letta_agent", "LettaAgent._handle_ai_response", (*_STEP, "tool_call"), around_ai_response),
    Target(
        "letta.services.tool_executor.tool_execution_manager",
        "ToolExecutionManager.execute_tool_async",
        ("function_name", "function_args", "tool"),
        around_execute_tool,
    ),
    Target(
        "letta.services.tool_sandbox.base",
        "AsyncToolSandboxBase._gather_env_vars",
        ("is_local",),
        around_sandbox_environment,
    ),
    *(
        Target(
            f"letta.groups.{module}", f"{owner}._participant_agent_step", ("response_messages",), around_sleeptime_step
        )
        for module, owner in (
            ("sleeptime_multi_agent_v3", "SleeptimeMultiAgentV3"),
            ("sleeptime_multi_agent_v4", "SleeptimeMultiAgentV4"),
        )
    ),
    *_operations(
        "letta.services.block_manager",
        "BlockManager",
        {
            "create_or_update_block_async": "create_or_update_block",
            "batch_create_blocks_async": "batch_create_blocks",
            "update_block_async": "update_block",
            "delete_block_async": "delete_block",
            "bulk_update_block_values_async": "bulk_update_block_values",
            "undo_checkpoint_block": "undo",
            "redo_checkpoint_block": "redo",
        },
    ),
    *_operations(
        "letta.services.agent_manager",
        "AgentManager",
        {
            "create_agent_async": "create_agent",
            "update_agent_async": "update_agent",
            "delete_agent_async": "delete_agent",
            "modify_block_by_label_async": "modify_block_by_label",
            "attach_block_async": "attach_block",
            "detach_block_async": "detach_block",
        },
    ),
    *_operations(
        "letta.services.conversation_manager",
        "ConversationManager",
        {"create_conversation": "create_conversation", "delete_conversation": "delete_conversation"},
    ),
    *_operations(
        "letta.services.group_manager",
        "GroupManager",
        {"create_group_async": "create_group", "modify_group_async": "modify_group"},
    ),
)


def guarded_steps(around_step: Callable[..., Any]) -> tuple[Target, ...]:
    """Where an agent sends its prompt: what guarded reads wrap besides."""
    return tuple(
        Target(f"letta.agents.{module}", f"{owner}._step", ("messages",), around_step, generator=True)
        for module, owner in (("letta_agent_v3", "LettaAgentV3"), ("letta_agent_v2", "LettaAgentV2"))
    )


#: The last two have targets for agents that propose only.
MODULES: tuple[str, ...] = (
    *dict.fromkeys(target.module for target in TARGETS),
    "letta.services.block_manager_git",
    "letta.agents.letta_agent_batch",
)

FOUND, MISSING, CHANGED = "wrapped", "missing", "changed"


class Wrapping:
    """What was wrapped in this process, and how to undo it."""

    def __init__(self, more: tuple[Target, ...] = ()) -> None:
        """Nothing is wrapped yet. ``more`` targets have to be in ``MODULES``, and stand in for those of their name."""
        self.targets = tuple({target.name: target for target in (*TARGETS, *more)}.values())
        self.status: dict[str, str] = {}
        self._originals: dict[str, tuple[Any, str, Any]] = {}

    def wrap_module(self, module: ModuleType) -> None:
        """Wrap the targets of one imported module; each once."""
        for target in self.targets:
            if target.module == module.__name__ and target.name not in self._originals:
                self.status[target.name] = self._wrap(module, target)

    def _wrap(self, module: ModuleType, target: Target) -> str:
        owner_name, method = target.path.split(".")
        owner = getattr(module, owner_name, None)
        original = getattr(owner, "__dict__", {}).get(method)
        if original is None:
            return MISSING
        try:
            parameters = inspect.signature(original).parameters
        except (TypeError, ValueError):
            return CHANGED
        is_fit = inspect.isasyncgenfunction if target.generator else inspect.iscoroutinefunction
        if not is_fit(inspect.unwrap(original)) or not set(target.needs) <= parameters.keys():
            return CHANGED
        setattr(owner, method, wrapt.FunctionWrapper(original, target.wrapper))
        self._originals[target.name] = (owner, method, original)
        return FOUND

    def unwrap_all(self) -> None:
        """Put every original back."""
        for owner, method, original in self._originals.values():
            setattr(owner, method, original)
        self._originals.clear()
        self.status.clear()
