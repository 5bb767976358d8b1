"""What the scripted model answers, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phionyx_letta.demo.script import DONE, SUMMARY, UNKNOWN, Reply, ToolCall, plan

TEA = 'CALL core_memory_append {"label": "human", "content": "tea"}'
JAM = 'CALL core_memory_append {"label": "human", "content": "jam"}'
DREAM = 'SLEEP_CALL memory_rethink {"label": "human", "new_memory": "dreamt"}'
MADE = {"role": "assistant", "tool_calls": [{"id": "call_1"}]}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ask(*messages: dict[str, Any], tools: tuple[str, ...] = ("core_memory_append",), **more: Any) -> Reply:
    offered = [{"type": "function", "function": {"name": name, "parameters": {"properties": {}}}} for name in tools]
    return plan({"messages": [{"role": "system", "content": "You are kind."}, *messages], "tools": offered, **more})


def contents(reply: Reply) -> list[str]:
    return [call.arguments["content"] for call in reply.calls]


class TestOneCallAStep:
    def test_the_first_call_comes_first(self) -> None:
        assert contents(ask(user(f"hello\n{TEA}\n{JAM}"))) == ["tea"]

    def test_the_next_follows_once_the_first_was_made(self) -> None:
        assert contents(ask(user(f"{TEA}\n{JAM}"), MADE, {"role": "tool", "content": "OK"})) == ["jam"]

    def test_then_it_speaks(self) -> None:
        assert ask(user(TEA), MADE) == Reply(text=DONE)
        assert ask(user(f"{TEA}\nSAY good night"), MADE) == Reply(text="good night")

    def test_it_recalls_what_the_system_prompt_says_and_nothing_else(self) -> None:
        assert ask(user("I am kind.\nRECALL kind")) == Reply(text="You are kind.")
        assert ask(user("I take the window seat.\nRECALL seat")) == Reply(text=UNKNOWN)

    def test_parallel_lines_share_a_step(self) -> None:
        text = f"PAR{TEA}\nPAR{JAM}\n{TEA}"
        assert contents(ask(user(text))) == ["tea", "jam"]
        assert contents(ask(user(text), MADE)) == ["tea"]

    def test_a_later_message_without_a_script_repeats_nothing(self) -> None:
        assert ask(user(TEA), MADE, user("thank you")) == Reply(text=DONE)

    def test_a_later_script_replaces_an_earlier_one(self) -> None:
        assert contents(ask(user(TEA), user(JAM))) == ["jam"]

    def test_without_tools_it_only_speaks(self) -> None:
        assert ask(user(TEA), tools=()) == Reply(text=DONE)

    def test_an_empty_conversation_is_no_error(self) -> None:
        assert plan({}) == Reply(text=DONE)

    @pytest.mark.parametrize("line", ["CALL core_memory_append tea", "CALL core_memory_append {tea}"])
    def test_a_line_that_cannot_be_read_is_named(self, line: str) -> None:
        with pytest.raises(ValueError, match="core_memory_append"):
            ask(user(line))


class TestAgentsOfEachKind:
    def test_text_packed_in_json(self) -> None:
        assert contents(ask(user(json.dumps({"type": "user_message", "message": f"{TEA}\n{JAM}"})))) == ["tea"]

    def test_text_in_parts(self) -> None:
        assert contents(ask(user([{"type": "text", "text": TEA}]))) == ["tea"]

    def test_an_agent_that_speaks_through_a_tool(self) -> None:
        reply = ask(user("hello"), tools=("core_memory_append", "send_message"))
        assert reply.calls == (ToolCall("send_message", {"message": DONE}),)

    def test_an_agent_that_must_call_something(self) -> None:
        reply = ask(user("hello"), tools=("memory_rethink", "memory_finish_edits"), tool_choice="required")
        assert [call.tool for call in reply.calls] == ["memory_finish_edits"]

    def test_the_arguments_letta_adds_are_filled_in(self) -> None:
        properties = {"thinking": {}, "request_heartbeat": {}, "label": {}, "content": {}}
        tool = {"function": {"name": "core_memory_append", "parameters": {"properties": properties}}}
        (call,) = plan({"messages": [user(TEA)], "tools": [tool]}).calls
        assert call.arguments["thinking"]
        assert call.arguments["request_heartbeat"] is True


class TestSleeptimeAgents:
    NOTICE = "You are a sleeptime agent - a background agent"

    def transcript(self, *lines: str) -> dict[str, Any]:
        return user("\n".join([self.NOTICE, "Messages:", *lines, "assistant: ok, done"]))

    def test_make_their_own_calls_only(self) -> None:
        assert ask(self.transcript(f"user: {TEA}", DREAM)).calls[0].tool == "memory_rethink"
        assert ask(self.transcript(f"user: {DREAM}", TEA)).calls[0].tool == "memory_rethink"
        assert ask(self.transcript(f"user: {TEA}")) == Reply(text=DONE)

    def test_find_them_in_packed_transcripts(self) -> None:
        packed = json.dumps({"message": f"{TEA}\n{DREAM}"})
        assert ask(self.transcript(f"user: {packed}")).calls[0].tool == "memory_rethink"

    def test_are_known_by_their_system_message(self) -> None:
        system = {"role": "system", "content": "You are Letta-Sleeptime-Memory, ..."}
        assert ask(system, user(f"{TEA}\n{DREAM}")).calls[0].tool == "memory_rethink"

    def test_leave_theirs_to_them(self) -> None:
        assert contents(ask(user(f"{DREAM}\n{TEA}"))) == ["tea"]
        assert ask(user(DREAM)) == Reply(text=DONE)


class TestSummaries:
    def test_a_transcript_is_summarised_and_not_replayed(self) -> None:
        assert (
            ask(user(f"<start_transcript>\n[user] hi\n{TEA}\n<end_transcript>\n. Generate the summary.")).text
            == SUMMARY
        )

    def test_also_when_the_agent_is_asked_in_the_middle_of_its_script(self) -> None:
        assert ask(user(f"{TEA}\n{JAM}"), MADE, user("Keep it short. Only output the summary.")).text == SUMMARY
