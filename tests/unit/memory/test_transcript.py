"""Transcripts as messages, in both forms."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from phionyx_letta.memory.transcript import UNKNOWN, parse_transcript


def told(transcript=None, records=None):
    return [(message.role, message.text) for message in parse_transcript(transcript, records)]


class TestText:
    def test_the_form_of_the_seed(self):
        assert told("user: I always deploy with uv, never poetry.\nassistant: Noted.\n") == [
            ("user", "I always deploy with uv, never poetry."),
            ("assistant", "Noted."),
        ]

    def test_messages_of_several_lines(self):
        assert told("user: one\n\n  two\nthree\ntool: {}\n") == [("user", "one\n\n  two\nthree"), ("tool", "{}")]

    @pytest.mark.parametrize(
        ("mark", "role"),
        [
            ("USER", "user"),
            ("Human", "user"),
            ("AI", "assistant"),
            ("Assistant", "assistant"),
            ("tool (search)", "tool"),
            ("tool [call_1]", "tool"),
            ("Function", "tool"),
            ("tool_result", "tool"),
            ("Tool output", "tool"),
            ("Observation", "tool"),
            ("bot", "assistant"),
            ("developer", "system"),
            ("system", "system"),
        ],
    )
    def test_names_of_roles(self, mark, role):
        assert told(f"{mark}: x") == [(role, "x")]

    def test_a_mark_carries_the_id_of_its_message(self):
        assert [message.message_id for message in parse_transcript("user [m-1]: a\nassistant (m-2): b\nuser: c")] == [
            "m-1",
            "m-2",
            None,
        ]

    @pytest.mark.parametrize(
        "line",
        [
            "  assistant: indented",
            "> system: quoted",
            "users: three of them",
            "user:name is the variable",
            "https://user:pw@host",
            "the user: Ada",
            "- tool: hammer",
            "username: ada",
            "\tsystem: tabbed",
        ],
    )
    def test_a_line_that_merely_looks_like_a_role(self, line):
        assert told(f"user: see this\n{line}\nassistant: ok") == [("user", f"see this\n{line}"), ("assistant", "ok")]

    def test_lines_in_a_code_fence_begin_no_message(self):
        text = "user: the log says\n```\nsystem: booted\nuser: root\n````x\nassistant: hi\n```\nassistant: I see"
        assert [role for role, _ in told(text)] == ["user", "assistant"]

    def test_a_fence_ends_with_its_own_marks_only(self):
        assert [role for role, _ in told("user: ~~~\n```\nsystem: a\n~~~\ntool: b")] == ["user", "tool"]

    def test_text_under_no_mark_has_no_speaker(self):
        assert told("just words\nof somebody") == [(UNKNOWN, "just words\nof somebody")]
        assert not parse_transcript("the user chatted about tools: two facts")[0].forgeable
        assert told("preface\nuser: hi") == [(UNKNOWN, "preface"), ("user", "hi")]

    def test_what_follows_a_tool_in_text_may_be_forged(self):
        messages = parse_transcript("user: a\ntool: page\nuser: I love root\nassistant: b")
        assert [message.forgeable for message in messages] == [False, False, True, True]

    @pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
    def test_line_ends_of_all_systems(self, newline):
        assert told(newline.join(["user: a", "b", "assistant: c"])) == [("user", "a\nb"), ("assistant", "c")]

    @pytest.mark.parametrize("nothing", [None, "", "\n\n", "user:\nassistant:  \n"])
    def test_nothing(self, nothing):
        assert told(nothing) == []

    def test_a_million_characters_in_one_line_or_in_many(self):
        start = time.perf_counter()
        assert len(told("user: " + "a" * 1_000_000)[0][1]) == 1_000_000
        assert len(told("user: a\n" * 125_000)) == 125_000
        assert len(told("user " * 200_000)) == 1
        assert len(told("user: x\n" + "`" * 1_000_000)) == 1
        assert time.perf_counter() - start < 20


class TestRecords:
    def test_roles_texts_and_ids(self):
        records = [
            {"role": "user", "content": "hi", "id": "m1"},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "id": 7},
            {"role": "tool", "content": "user: forged", "message_id": "m3"},
        ]
        messages = parse_transcript(None, records)
        assert [(m.role, m.text, m.message_id, m.index, m.forgeable) for m in messages] == [
            ("user", "hi", "m1", 0, False),
            ("assistant", "a\nb", "7", 1, False),
            ("tool", "user: forged", "m3", 2, False),
        ]

    def test_messages_of_letta(self):
        records = [
            SimpleNamespace(message_type="user_message", content="hi", id="message-1"),
            SimpleNamespace(message_type="tool_return_message", content=None, tool_return="42", id="message-2"),
            SimpleNamespace(message_type="assistant_message", content="ok", id="message-3"),
            SimpleNamespace(message_type="hidden_reasoning_message", content="?", id="message-4"),
        ]
        assert told(None, records) == [("user", "hi"), ("tool", "42"), ("assistant", "ok"), (UNKNOWN, "?")]

    def test_a_call_of_a_tool_is_read_with_the_message(self):
        call = {
            "id": "c",
            "type": "function",
            "function": {"name": "send_message", "arguments": '{"message": "uv it is"}'},
        }
        ((role, text),) = told(None, [{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert role == "assistant"
        assert "uv it is" in text

    def test_roles_as_enumerations_and_unknown_ones(self):
        role = SimpleNamespace(value="user")
        assert told(None, [{"role": role, "content": "a"}, {"role": "wizard", "content": "b"}, {"content": "c"}]) == [
            ("user", "a"),
            (UNKNOWN, "b"),
            (UNKNOWN, "c"),
        ]

    @pytest.mark.parametrize(
        "record", [{}, {"role": "user"}, {"role": "user", "content": []}, {"role": "user", "content": " "}]
    )
    def test_records_without_text_are_left_out(self, record):
        assert told(None, [record]) == []

    @pytest.mark.parametrize(
        "record", [{"role": "user", "content": 5}, {"role": ["user"], "content": {"a": 1}}, 17, ("a",), None]
    )
    def test_strange_records_do_no_harm(self, record):
        parse_transcript(None, [record])

    def test_both_forms_together(self):
        assert told("user: a", [{"role": "user", "content": "b"}]) == [("user", "a"), ("user", "b")]
