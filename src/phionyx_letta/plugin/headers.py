"""The request headers that say what caused a memory change, and which request it was.

A reviewer's claim (``memory.claims``) is checked here; an unsigned or foreign one is answered 403.

A pure ASGI middleware: its context variable reaches the flush events of blocking, streaming, background and REST
requests. A malformed header is answered 400 before anything is written.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from phionyx_letta import __version__
from phionyx_letta.errors import DiffConflictError, EvidenceRefused, InvalidMutation, ReadRefused, UntrustedPatch
from phionyx_letta.memory.claims import CLAIM_HEADER, SERVER_HEADER, read_claim
from phionyx_letta.memory.policy import PolicyFile
from phionyx_letta.plugin import attribution
from phionyx_letta.signing import Verifier

PARENT_HEADER = "X-Phionyx-Parent-Envelope"
REASON_HEADER = "X-Phionyx-Forgetting-Reason"
_AGENT_IN_PATH = re.compile(r"/(agent-[0-9a-f-]{36})(?:/|$)")

_Scope = MutableMapping[str, Any]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_Serving = Callable[[asyncio.AbstractEventLoop], None]
_App = Callable[[_Scope, Callable[[], Awaitable[Any]], _Send], Awaitable[None]]


class AttributionMiddleware:
    """Sets the request's part of the attribution while Letta handles it."""

    def __init__(
        self,
        app: _App,
        verifier: Verifier | None = None,
        policy: PolicyFile | None = None,
        serving: _Serving | None = None,
        armed: bool = True,
    ) -> None:
        """Wrap the application; ``verifier`` or ``policy`` check reviewers' claims, ``serving`` is told the server's event loop.

        Where writes are not watched, ``armed`` is False and the server does not introduce itself as one that is.
        """
        self._app = app
        self._verifier = verifier
        self._policy = policy
        self._serving = serving
        self._armed = armed

    async def __call__(self, scope: _Scope, receive: Callable[[], Awaitable[Any]], send: _Send) -> None:
        """Handle one request; anything but HTTP passes through."""
        if self._serving is not None:
            self._serving(asyncio.get_running_loop())
            self._serving = None
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            fields = _fields(scope)
            claim = _header(scope["headers"], CLAIM_HEADER)
            if claim is not None:
                policy = self._policy.current() if self._policy is not None else None
                fields["claim"], fields["reviewer"] = read_claim(claim, self._verifier, policy)
        except InvalidMutation as error:
            await _answer(send, 400, str(error))
            return
        except UntrustedPatch as error:
            await _answer(send, 403, str(error))
            return
        if self._armed and (claim is not None or _header(scope["headers"], SERVER_HEADER) is not None):
            send = _introduced(send)
        with attribution.attributed(**fields):
            await self._app(scope, receive, send)


def _introduced(send: _Send) -> _Send:
    """Say in the answer that this server is armed."""

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            named = (SERVER_HEADER.lower().encode(), __version__.encode())
            message = {**message, "headers": [*message.get("headers", ()), named]}
        await send(message)

    return sending


def _fields(scope: _Scope) -> dict[str, Any]:
    path = scope.get("path", "")
    fields: dict[str, Any] = {"request": {"method": scope.get("method", ""), "path": path}}
    agent = _AGENT_IN_PATH.search(path)
    if agent is not None:
        fields["request_agent_id"] = agent[1]
    parent, reason = (_header(scope["headers"], name) for name in (PARENT_HEADER, REASON_HEADER))
    if parent is not None:
        fields["parent"] = _checked(PARENT_HEADER, attribution.parent_reference, parent)
    if reason is not None:
        fields["reason"] = _checked(REASON_HEADER, attribution.forgetting_reason, reason)
    return fields


def _header(headers: Iterable[tuple[bytes, bytes]], name: str) -> str | None:
    """The header's text; more than one is malformed, and said so by joining them with a line break."""
    values = [value for key, value in headers if key.lower() == name.lower().encode()]
    if not values:
        return None
    try:
        return b"\n".join(values).decode("utf-8")
    except UnicodeDecodeError:
        return b"\n".join(values).decode("latin-1")


def _checked(name: str, check: Callable[[str], str], value: str) -> str:
    try:
        return check(value)
    except InvalidMutation as error:
        raise InvalidMutation(f"{name}: {error.message}", remedy=error.remedy) from error


async def _answer(send: _Send, status: int, detail: str) -> None:
    body = json.dumps({"detail": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refused_response(_request: Any, error: EvidenceRefused) -> Any:
    """Answer of the REST API when closed mode refused a write: 503, with the reason and the remedy."""
    from starlette.responses import JSONResponse

    return JSONResponse({"detail": str(error)}, status_code=503)


async def conflict_response(_request: Any, error: DiffConflictError) -> Any:
    """Answer of the REST API when a reviewed write found other content than was reviewed: 409."""
    from starlette.responses import JSONResponse

    return JSONResponse({"detail": str(error)}, status_code=409)


async def forbidden_response(_request: Any, error: UntrustedPatch) -> Any:
    """Answer of the REST API when a write is not this reviewer's to decide about: 403."""
    from starlette.responses import JSONResponse

    return JSONResponse({"detail": str(error)}, status_code=403)


async def unserved_response(_request: Any, error: ReadRefused) -> Any:
    """Answer of the REST API when a guarded read was refused: 409, with what was recorded, what was found and the remedy."""
    from starlette.responses import JSONResponse

    return JSONResponse({"detail": str(error)}, status_code=409)


def watch(
    app: Any,
    verifier: Verifier | None = None,
    policy: PolicyFile | None = None,
    serving: _Serving | None = None,
    armed: bool = True,
) -> None:
    """Put the middleware outermost in a Starlette application, started or not."""
    from starlette.middleware import Middleware

    ours = Middleware(AttributionMiddleware, verifier=verifier, policy=policy, serving=serving, armed=armed)
    app.user_middleware.insert(0, ours)
    app.middleware_stack = None  # rebuilt at the next request
    app.add_exception_handler(EvidenceRefused, refused_response)
    app.add_exception_handler(ReadRefused, unserved_response)
    app.add_exception_handler(DiffConflictError, conflict_response)
    app.add_exception_handler(UntrustedPatch, forbidden_response)


def unwatch(app: Any) -> None:
    """Take the middleware out again."""
    app.user_middleware[:] = [item for item in app.user_middleware if item.cls is not AttributionMiddleware]
    app.middleware_stack = None
    app.exception_handlers.pop(EvidenceRefused, None)
    app.exception_handlers.pop(ReadRefused, None)
    app.exception_handlers.pop(DiffConflictError, None)
    app.exception_handlers.pop(UntrustedPatch, None)
