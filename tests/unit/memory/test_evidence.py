"""Evidence is found in the transcript, by its words and not by its looks, and says where."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phionyx_letta.memory.evidence import Evidence, Witness, fold
from phionyx_letta.memory.pii import MemoryPIIFilter
from phionyx_letta.memory.transcript import Message, parse_transcript

PII = MemoryPIIFilter()


def witness(*said, records=None):
    return Witness(parse_transcript("\n".join(said), records), PII)


class TestFinding:
    @pytest.mark.parametrize(
        "quote",
        [
            "I always deploy with uv",
            "i ALWAYS   deploy\nwith UV",
            "always deploy",
            "Ｉ ａｌｗａｙｓ deploy",
            "  deploy with uv, never poetry. ",
            "deploy\u00a0with uv",
        ],
    )
    def test_white_space_case_and_compatibility_forms_do_not_matter(self, quote):
        found = witness("user [m1]: Hello.", "user [m2]: I always deploy with uv, never poetry.").find(quote)
        assert (found.message_index, found.role, found.message_id) == (1, "user", "m2")

    @pytest.mark.parametrize(
        "quote",
        [
            "I never deploy with uv",
            "I аlways deploy with uv",  # a Cyrillic а
            "I always depl\u200boy with uv",
            "I always … with uv",
            "lways deploy with u",  # not whole words
            "uv",
            "",
            " . ",
            "poetry deploy",
            "ı always deploy",
        ],
    )
    def test_other_words_are_not_found(self, quote):
        assert witness("user: I always deploy with uv, never poetry.").find(quote) is None

    def test_the_quote_is_given_as_the_message_has_it(self):
        assert (
            witness("user: I  always\ndeploy with UV.").find("i always deploy WITH uv").quote
            == "I always deploy with UV"
        )

    def test_scripts_without_spaces(self):
        assert witness("user: 我总是用uv部署，从不用poetry。").find("用uv部署").quote == "用uv部署"
        assert witness("user: デプロイはいつもuvです").find("いつもuv") is not None

    def test_the_users_own_words_come_before_a_tools(self):
        said = witness("system: be brief", "tool: we deploy with uv", "assistant: we deploy with uv")
        assert said.find("deploy with uv").role == "tool"  # in text, the assistant's line may be the tool's
        records = [{"role": "tool", "content": "we deploy with uv"}, {"role": "user", "content": "we deploy with uv"}]
        assert witness(records=records).find("deploy with uv").message_index == 1

    def test_several_quotes_each_once(self):
        said = witness("user: first thing", "user: second thing")
        found = said.find_all(["first thing", "FIRST thing", "third thing", "second thing"])
        assert [one.message_index for one in found] == [0, 1]

    def test_a_quote_does_not_run_over_two_messages(self):
        assert witness("user: deploy with", "user: uv always").find("deploy with uv") is None


class TestTrust:
    def test_by_role(self):
        said = witness(
            records=[{"role": r, "content": f"words of {r}"} for r in ("user", "assistant", "tool", "system", "x")]
        )
        trusted = {
            role: said.trusted(said.find(f"words of {role}")) for role in ("user", "assistant", "tool", "system", "x")
        }
        assert trusted == {"user": True, "assistant": True, "tool": False, "system": False, "x": False}

    def test_the_assistant_may_repeat_a_tool_that_has_answered(self):
        records = [
            {"role": r, "content": f"{r} {n}"} for n, r in enumerate(["user", "assistant", "tool", "assistant", "user"])
        ]
        said = witness(records=records)
        quotes = [f"{one['role']} {n}" for n, one in enumerate(records)]
        assert [said.trusted(said.find(quote)) for quote in quotes] == [True, True, False, False, True]

    def test_text_of_no_speaker_is_trusted_only_where_none_is_named(self):
        bare = witness("Use pytest always")
        assert bare.trusted(bare.find("Use pytest always"))
        labelled = witness("Use pytest always", "user: hi")
        assert not labelled.trusted(labelled.find("Use pytest always"))

    def test_what_follows_a_tool_in_text_is_not(self):
        said = witness("user: look", "tool: page", "user: always use root")
        assert not said.trusted(said.find("always use root"))


class TestPersonalData:
    @pytest.mark.parametrize(
        ("quote", "expected"),
        [
            ("my mail is ada@corp.com", "my mail is [REDACTED_EMAIL]"),
            ("my mail is [REDACTED_EMAIL]", "my mail is [REDACTED_EMAIL]"),
            ("mail is ada", "mail is [REDACTED_EMAIL]"),
            ("corp.com and my", "[REDACTED_EMAIL] and my"),
            ("415 555", "[REDACTED_PHONE]"),
            ("555 2671 at night", "[REDACTED_PHONE] at night"),
        ],
    )
    def test_leaves_no_part_of_a_value_in_a_quote(self, quote, expected):
        said = witness("user: My mail is ada@corp.com and my tel +1 415 555 2671 at night")
        assert said.find(quote).quote.casefold() == expected.casefold()

    def test_leaves_ids_of_messages(self):
        said = witness(records=[{"role": "user", "content": "some words", "id": "ada@corp.com"}])
        assert said.find("some words").message_id == "[REDACTED_EMAIL]"

    def test_stays_where_the_filter_only_reports(self):
        said = Witness(parse_transcript("user: mail ada@corp.com now"), MemoryPIIFilter(redact=False))
        assert said.find("mail ada@corp.com").quote == "mail ada@corp.com"


class TestEveryText:
    @given(st.text(min_size=1, max_size=60), st.integers(0, 59), st.integers(1, 60))
    @settings(max_examples=400, deadline=None)
    def test_a_quote_that_is_found_folds_to_what_was_asked(self, text, start, length):
        message = Message("user", text, None, 0)
        found = Witness([message], MemoryPIIFilter([])).find(text[start : start + length])
        assert found is None or fold(found.quote).replace(" ", "") != ""

    @given(
        st.lists(
            st.sampled_from(
                ["deploy", "uv", "ﬁle", "Straße", "e\u0301te", "İzmir", "한글", "ｗｉｄｅ", "\u00a0", "\n", "!"]
            ),
            min_size=3,
        )
    )
    @settings(max_examples=300, deadline=None)
    def test_the_quote_is_a_stretch_of_the_message(self, words):
        text = "".join(f"{word} " for word in words)
        found = Witness([Message("user", text, None, 0)], MemoryPIIFilter([])).find(text)
        assert found is None or found.quote == " ".join(text.split())

    @pytest.mark.parametrize("text", ["a" * 1_000_000, "ab " * 333_000, "é" * 1_000_000, "a\u0301" * 500_000])
    def test_a_megabyte_is_searched_in_reasonable_time(self, text):
        start = time.perf_counter()
        said = Witness([Message("user", text, None, 0)], MemoryPIIFilter([]))
        for quote in (text[:2000], "a" * 1999, "ab ab ab", "zzzz"):
            said.find(quote)
        assert time.perf_counter() - start < 15


def test_evidence_can_be_compared():
    assert Evidence("a", 0, "user", None) == Evidence("a", 0, "user", None)
