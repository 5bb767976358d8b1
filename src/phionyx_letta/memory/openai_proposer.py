"""A proposer on any endpoint that speaks OpenAI's protocol, through the ``openai`` SDK (the extra ``openai``).

It asks for structured output by JSON schema and goes without where the endpoint refuses that. Time-outs, rate limits,
server errors and answers that are cut off or empty are logged and tried again, later each time; when every attempt is
used up, :class:`ProposerUnavailable` tells the caller to keep the session. Neither prompts nor keys are logged.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any

from phionyx_letta.errors import MissingExtra, ProposerUnavailable, SettingsError
from phionyx_letta.memory.answers import ANSWER_SCHEMA
from phionyx_letta.settings import load_settings

_log = logging.getLogger(__name__)
_KEEP = "the session is unchanged; propose from it again later"


class OpenAIProposer:
    """Asks a chat model of an OpenAI-compatible endpoint.

    Args:
        model: name of the model; default: ``PHIONYX_LETTA_PROPOSER_MODEL``.
        base_url: the endpoint, with its ``/v1``; default: ``PHIONYX_LETTA_PROPOSER_BASE_URL``, else OpenAI's own.
        api_key: default: ``PHIONYX_LETTA_PROPOSER_API_KEY``, else, at OpenAI's own endpoint, ``OPENAI_API_KEY``.
        timeout: seconds for one whole answer; default: ``PHIONYX_LETTA_PROPOSER_TIMEOUT_S``.
        attempts: requests for one answer before giving up; default: ``PHIONYX_LETTA_PROPOSER_ATTEMPTS``.
        backoff: seconds before the second attempt, doubled for each further one, with some chance.
        longest_wait: longest pause, in seconds; an endpoint that asks for a longer one is unavailable.

    Raises:
        SettingsError: no model is named, or no key for OpenAI's own endpoint.
        MissingExtra: the package ``openai`` is not installed.
    """

    def __init__(
        self,
        model: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float | None = None,
        attempts: int | None = None,
        backoff: float = 1.0,
        longest_wait: float = 60.0,
    ) -> None:
        """Take the arguments, then the settings; nothing is connected yet."""
        settings = load_settings()
        self.model = model or settings.proposer_model or ""
        if not self.model:
            raise SettingsError("no model is named for the proposer", remedy="set PHIONYX_LETTA_PROPOSER_MODEL")
        self.base_url = base_url or settings.proposer_base_url
        stated = settings.proposer_api_key.get_secret_value() if settings.proposer_api_key else None
        self._api_key = api_key or stated or self._key_of_the_endpoint()
        self._timeout = settings.proposer_timeout_s if timeout is None else timeout
        self._attempts = settings.proposer_attempts if attempts is None else attempts
        self._backoff = backoff
        self._longest_wait = longest_wait
        self._structured = True
        self.tokens = 0
        """What all answers so far cost, as the endpoint counts."""
        self._openai = _sdk()

    def _key_of_the_endpoint(self) -> str:
        if self.base_url:
            return "none"  # OPENAI_API_KEY is not for other endpoints, and a local one needs no key
        if key := os.environ.get("OPENAI_API_KEY"):
            return key
        raise SettingsError(
            "no key is set for the proposer",
            remedy="set PHIONYX_LETTA_PROPOSER_API_KEY, or PHIONYX_LETTA_PROPOSER_BASE_URL for an endpoint that needs none",
        )

    async def agenerate(self, prompt: str) -> str:
        """Return the model's answer to `prompt`.

        Raises:
            ProposerUnavailable: the endpoint refuses the request, or no attempt brought a whole answer.
        """
        reason = "it was not asked"
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._answer(prompt)
            except _Retry as error:
                reason = error.reason
                _log.warning("proposer, attempt %d of %d: %s", attempt, self._attempts, reason)
                if attempt < self._attempts:
                    await asyncio.sleep(self._pause(attempt, error.retry_after))
        raise ProposerUnavailable(f"the model endpoint gave no usable answer: {reason}", remedy=_KEEP)

    def _pause(self, attempt: int, asked: float | None) -> float:
        if asked is None:
            return min(self._longest_wait, self._backoff * 2.0 ** (attempt - 1) * random.uniform(0.75, 1.25))
        if asked > self._longest_wait:
            raise ProposerUnavailable(f"the model endpoint asks to wait {asked:.0f} s", remedy=_KEEP)
        return asked

    async def _answer(self, prompt: str) -> str:
        """One attempt; without structured output from the moment the endpoint refuses it.

        Raises:
            _Retry: it may go better later.
            ProposerUnavailable: it will not.
        """
        openai = self._openai
        try:
            async with asyncio.timeout(self._timeout):  # the SDK's own counts each read, and a trickle has many
                completion = await self._request(prompt)
                usage = getattr(completion, "usage", None)
                self.tokens += int(getattr(usage, "total_tokens", None) or 0)
                return _text_of(completion)
        except (TimeoutError, openai.APITimeoutError):
            raise _Retry(f"no answer within {self._timeout:g} s") from None
        except openai.APIStatusError as error:
            status = error.status_code
            if status in (400, 422) and self._structured:
                self._structured = False
                _log.info("the endpoint refuses a JSON schema (HTTP %d); asking without", status)
                return await self._answer(prompt)
            if status in (408, 409, 425, 429) or status >= 500:
                raise _Retry(f"HTTP {status}", _retry_after(error.response.headers)) from None
            raise ProposerUnavailable(
                f"the model endpoint refuses the request with HTTP {status}",
                remedy="check PHIONYX_LETTA_PROPOSER_MODEL, _BASE_URL and _API_KEY; the session is unchanged",
            ) from None
        except openai.OpenAIError as error:
            raise _Retry(type(error).__name__) from None
        except (ValueError, TypeError, AttributeError, LookupError) as error:  # a body that is not the protocol's
            raise _Retry(f"malformed answer ({type(error).__name__})") from None

    async def _request(self, prompt: str) -> Any:
        options: dict[str, Any] = {}
        if self._structured:
            schema = {"name": "proposals", "strict": True, "schema": ANSWER_SCHEMA}
            options["response_format"] = {"type": "json_schema", "json_schema": schema}
        # a client of its own for each call: callers run one event loop after another
        connections = self._openai.DefaultAsyncHttpxClient(verify=_certificates(), timeout=self._timeout)
        async with self._openai.AsyncOpenAI(
            api_key=self._api_key,
            base_url=self.base_url,
            timeout=self._timeout,
            max_retries=0,
            http_client=connections,
        ) as client:
            return await client.chat.completions.create(
                model=self.model, messages=[{"role": "user", "content": prompt}], **options
            )


class _Retry(Exception):
    """An attempt failed in a way that may pass."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after = retry_after


@lru_cache(maxsize=1)
def _certificates() -> ssl.SSLContext:
    """Read once: one for each of two clients at a time made the process grow by 86 kB with every call (measured)."""
    import httpx

    context: ssl.SSLContext = httpx.create_ssl_context()
    return context


def _text_of(completion: Any) -> str:
    choice = completion.choices[0]
    text = choice.message.content
    if choice.finish_reason == "length":
        raise _Retry("the answer is cut off")
    if not isinstance(text, str) or not text.strip():
        raise _Retry("the answer is empty")
    return text


def _retry_after(headers: Any) -> float | None:
    """Seconds by Retry-After (RFC 9110, section 10.2.3: a number or a date), None without a readable one."""
    value = headers.get("retry-after")
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def _sdk() -> Any:
    try:
        import openai
    except ImportError as error:
        raise MissingExtra(
            "the proposer needs the package openai, which is not installed",
            remedy='install it with pip install "phionyx-letta[openai]", or give LivingMemory a proposer of your own',
        ) from error
    return openai
