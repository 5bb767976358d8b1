"""What the middleware says of the server, and what keeps a server from starting that would not keep a promise."""

from __future__ import annotations

import asyncio
import types
from typing import Any

import pytest

from phionyx_letta.memory.claims import CLAIM_HEADER, SERVER_HEADER
from phionyx_letta.plugin import activation
from phionyx_letta.plugin.headers import AttributionMiddleware


def answer(*headers: tuple[str, str], armed: bool) -> tuple[int, dict[str, str]]:
    """Status and headers of the answer to one request."""
    sent: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    scope = {"type": "http", "method": "PATCH", "path": "/v1/blocks/b", "headers": raw}
    asyncio.run(AttributionMiddleware(app, armed=armed)(scope, receive, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


@pytest.mark.parametrize("armed", [True, False])
def test_a_server_introduces_itself_only_where_writes_are_watched(armed: bool) -> None:
    status, headers = answer((SERVER_HEADER, "?"), armed=armed)
    assert status == 200
    assert (SERVER_HEADER.lower() in headers) == armed


@pytest.mark.parametrize("armed", [True, False])
def test_a_claim_nobody_can_check_is_refused(armed: bool) -> None:
    assert answer((CLAIM_HEADER, "e30.e30"), armed=armed)[0] == 403


@pytest.mark.parametrize(
    ("name", "value"), [("ON_ERROR", "closed"), ("GUARD", "reject"), ("PROPOSE_ONLY", "tag:asks-first")]
)
def test_what_would_break_a_promise_keeps_letta_from_starting(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_module: types.ModuleType) -> None:
        raise ValueError("this Letta does not fit")

    activation._attempt(fails, types)  # by default it goes on, and says so
    monkeypatch.setenv(f"PHIONYX_LETTA_{name}", value)
    with pytest.raises(ValueError, match="does not fit"):
        activation._attempt(fails, types)
