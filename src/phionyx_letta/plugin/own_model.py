"""Asks the model of an agent through Letta's own client: its key, its endpoint, and no run, step or message of it.

Runs in a thread of the server with an event loop of its own. Letta's database connections belong to the server's loop, so the one
thing that needs them, the key a user brought along, is fetched there.
"""

from __future__ import annotations

import asyncio
from typing import Any

#: The user message and nothing else: what to do stands in it (``memory.prompting``).
_MOST_TOKENS = 8192


class OwnModel:
    """Asks for one process; ``loop`` is the server's own, once it is known."""

    def __init__(self, timeout: float) -> None:
        """Take the longest wait for one answer, s."""
        self._timeout = timeout
        self.loop: asyncio.AbstractEventLoop | None = None

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ask; the answer has ``text`` and ``tokens``.

        Args:
            request: ``prompt``, and of the agent ``llm_config``, ``organization_id`` and ``user_id``.
        """
        from letta.llm_api.llm_client import LLMClient
        from letta.schemas.enums import AgentType, MessageRole, ProviderCategory
        from letta.schemas.letta_message_content import TextContent
        from letta.schemas.llm_config import LLMConfig
        from letta.schemas.message import Message
        from letta.schemas.user import User

        config = LLMConfig(**request["llm_config"]).model_copy(
            update={
                "put_inner_thoughts_in_kwargs": False,
                "response_format": None,
                "parallel_tool_calls": False,
            }
        )
        if config.max_tokens is None:
            config.max_tokens = _MOST_TOKENS
        named = {"id": request["user_id"]} if request.get("user_id") else {}
        actor = User(name="phionyx-letta", organization_id=request["organization_id"], **named)
        client = LLMClient.create(provider_type=config.model_endpoint_type, actor=actor)
        if client is None:
            raise LookupError("Letta has no client for this model")
        message = Message(role=MessageRole.user, content=[TextContent(text=request["prompt"])])
        data = client.build_request_data(AgentType.letta_v1_agent, [message], config, tools=[])
        async with asyncio.timeout(self._timeout):
            if config.provider_category == ProviderCategory.byok:
                key = await self._brought_along(config, actor)

                async def overrides(_config: Any) -> tuple[Any, None, None]:
                    return key, None, None

                client.get_byok_overrides_async = overrides
            answer = await client.request_async(data, config)
            completion = await client.convert_response_to_chat_completion(answer, [message], config)
        return {"text": completion.choices[0].message.content or "", "tokens": int(completion.usage.total_tokens or 0)}

    async def _brought_along(self, config: Any, actor: Any) -> str | None:
        from letta.services.provider_manager import ProviderManager

        if self.loop is None:
            raise LookupError("the server has not started")
        fetching = ProviderManager().get_override_key_async(config.provider_name, actor=actor)
        key: str | None = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(fetching, self.loop))
        return key or None
