"""Who really spoke, told from the form in which Letta stores messages."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from phionyx_letta.errors import SettingsError
from phionyx_letta.plugin.letta_sessions import MOST_CHARS, _records, read_records, said_by_user
from phionyx_letta.plugin.sessions import WithinBudget
from phionyx_letta.settings import load_settings


def records(role: str, said: str = "", **more: Any) -> list[tuple[str, str]]:
    columns = {
        "text": None,
        "content": [{"type": "text", "text": said}],
        "tool_calls": [],
        "tool_returns": None,
        "sender_id": None,
    }
    row = SimpleNamespace(id="message-1", role=role, **{**columns, **more})
    return [(one["role"], one["content"]) for one in _records(row)]


def packed(kind: str, **more: str) -> str:
    return json.dumps({"type": kind, "time": "now", **more})


class TestAMessageOfTheRoleUser:
    def test_is_the_users_words_packed_or_not(self) -> None:
        assert records("user", "I use uv") == [("user", "I use uv")]
        assert records("user", packed("user_message", message="I use uv")) == [("user", "I use uv")]
        assert records("user", content=None, text="I use uv") == [("user", "I use uv")]
        assert records("user", '{"a": 1} is my config') == [("user", '{"a": 1} is my config')]

    def test_is_not_where_letta_or_another_agent_wrote_it(self) -> None:
        for text in (
            packed("heartbeat", reason="I use uv"),
            packed("system_alert", message="I use uv"),
            packed("login"),
            "<system-reminder>\nI use uv",
        ):
            assert [role for role, _ in records("user", text)] == ["system"]
        assert [role for role, _ in records("user", "I use uv", sender_id="agent-1")] == ["tool"]
        assert [role for role, _ in records("user", "[Incoming message from agent with ID 'agent-1'] I use uv")] == [
            "tool"
        ]


class TestAMessageOfAnAgent:
    def test_speaks_through_its_tool_and_calls_others(self) -> None:
        said = {"function": {"name": "send_message", "arguments": json.dumps({"message": "Hello"})}}
        called = {"function": {"name": "search", "arguments": '{"q": "uv"}'}}
        found = records("assistant", "hm", tool_calls=[said, called])
        assert found == [("assistant", "hm"), ("assistant", "Hello"), ("assistant", '(calls search with {"q": "uv"})')]

    def test_with_damaged_calls_is_read_as_far_as_it_goes(self) -> None:
        damaged = [None, {}, {"function": {"name": "send_message", "arguments": "{"}}]
        assert records("assistant", "", tool_calls=damaged) == [("assistant", "(calls send_message with {)")]


class TestAToolsAnswer:
    def test_is_a_tools(self) -> None:
        assert records("tool", "uv is best") == [("tool", "uv is best")]
        assert records("tool", "", tool_returns=[{"func_response": "uv"}]) == [("tool", "uv")]

    def test_is_taken_out_of_what_letta_packs_it_in(self) -> None:
        packed = json.dumps({"status": "OK", "message": 'uv is\n"best"', "time": "now"})
        assert records("tool", packed) == [("tool", 'uv is\n"best"')]
        assert records("tool", json.dumps({"status": "OK", "message": {"a": 1}, "time": "now"})) == [
            ("tool", '{"a": 1}')
        ]
        assert records("tool", '{"status": "OK"}') == [("tool", '{"status": "OK"}')]

    def test_counts_for_nothing_the_user_said(self) -> None:
        found = [{"role": "tool", "content": "abc", "id": "1"}, {"role": "user", "content": "ab", "id": "2"}]
        assert said_by_user(found) == 2


class TestALongSession:
    def read(self, *newest_first: tuple[str, str]) -> list[dict[str, Any]]:
        rows = [
            SimpleNamespace(
                id=f"message-{number}",
                role=role,
                text=said,
                content=None,
                tool_calls=[],
                tool_returns=None,
                sender_id=None,
            )
            for number, (role, said) in enumerate(newest_first)
        ]
        connection: Any = SimpleNamespace(execute=lambda *_: SimpleNamespace(all=lambda: rows))
        return read_records(connection, "agent-1", ["run-1"])

    @pytest.mark.parametrize("size", [MOST_CHARS, MOST_CHARS + 1, 10 * MOST_CHARS])
    def test_of_one_message_is_read_up_to_the_limit(self, size: int) -> None:
        [one] = self.read(("user", "x" * size))
        assert one["content"] == "x" * MOST_CHARS

    def test_is_read_in_part_where_an_older_message_goes_beyond_the_limit(self) -> None:
        found = self.read(("assistant", "ok"), ("user", "y" * MOST_CHARS), ("user", "never read"))
        assert [(one["role"], len(one["content"])) for one in found] == [("user", MOST_CHARS - 2), ("assistant", 2)]
        assert said_by_user(found) == MOST_CHARS - 2

    def test_keeps_its_order(self) -> None:
        assert [one["content"] for one in self.read(("user", "c"), ("assistant", "b"), ("user", "a"))] == [
            "a",
            "b",
            "c",
        ]


class TestTheBudgetOfADay:
    def test_ends_the_questions_about_a_session_when_it_is_spent(self) -> None:
        class Model:
            model, tokens = "m", 0

            async def agenerate(self, prompt: str) -> str:
                self.tokens += 60
                return prompt

        model = WithinBudget(Model(), left=100)

        async def ask() -> list[str]:
            return [await model.agenerate("part") for _ in range(4)]

        assert asyncio.run(ask()) == ["part", "part", '{"proposals": []}', '{"proposals": []}']
        assert (model.model, model.tokens, model.unread) == ("m", 120, 2)


class TestWhatAnAgentMayCostInADay:
    def test_is_the_lower_of_tokens_and_money(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert load_settings().most_tokens() == 200_000
        assert load_settings().cost(10) is None
        monkeypatch.setenv("PHIONYX_LETTA_SESSION_PRICE", "2.5")
        monkeypatch.setenv("PHIONYX_LETTA_SESSION_COST", "0.1")
        assert load_settings().most_tokens() == 40_000
        assert load_settings().cost(40_000) == pytest.approx(0.1)
        monkeypatch.setenv("PHIONYX_LETTA_SESSION_TOKENS", "7")
        assert load_settings().most_tokens() == 7

    def test_is_no_limit_where_none_is_set_and_needs_a_price(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PHIONYX_LETTA_SESSION_TOKENS", "0")
        assert load_settings().most_tokens() is None
        monkeypatch.setenv("PHIONYX_LETTA_SESSION_COST", "1")
        with pytest.raises(SettingsError, match="needs PHIONYX_LETTA_SESSION_PRICE"):
            load_settings()
