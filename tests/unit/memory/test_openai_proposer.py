"""The proposer on a real HTTP endpoint that misbehaves in every way seen."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from endpoint import Endpoint, after, body, fails, hangs_up, proposes, says, trickles

from phionyx_letta.demo.model import ScriptedModel
from phionyx_letta.demo.script import Reply
from phionyx_letta.errors import MissingExtra, ProposerUnavailable, SettingsError
from phionyx_letta.memory.openai_proposer import OpenAIProposer
from phionyx_letta.memory.pii import MemoryPIIFilter
from phionyx_letta.memory.proposer import collect_proposals
from phionyx_letta.memory.transcript import parse_transcript

FACT = {
    "fact_key": "deploy_tool",
    "category": "user",
    "content": "- Deploys with uv, never poetry.",
    "section": None,
    "file_path": None,
    "rationale": "said so",
    "evidence": ["I always deploy with uv"],
}
GOOD = proposes(FACT)
TRANSCRIPT = "user: I always deploy with uv, never poetry.\nassistant: Noted.\n"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("PROPOSER_MODEL", "PROPOSER_BASE_URL", "PROPOSER_API_KEY"):
        monkeypatch.delenv(f"PHIONYX_LETTA_{name}", raising=False)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


def propose(endpoint, transcript=TRANSCRIPT, **options):
    options = {"timeout": 5, "backoff": 0.01, "attempts": 3, **options}
    proposer = OpenAIProposer("m", endpoint.url, "key-1", **options)
    return asyncio.run(
        collect_proposals(proposer, parse_transcript(transcript), {}, pii=MemoryPIIFilter(), backoff=0.01)
    )


class TestAnswers:
    def test_a_good_answer_becomes_a_proposal(self):
        with Endpoint(GOOD) as endpoint:
            report = propose(endpoint)
        (proposal,) = report.proposals
        assert (proposal.fact_key, proposal.untrusted) == ("deploy_tool", None)
        assert proposal.evidence[0].quote == "I always deploy with uv"
        assert endpoint.headers[0]["Authorization"] == "Bearer key-1"

    def test_structured_output_is_asked_for_by_schema(self):
        with Endpoint(GOOD) as endpoint:
            propose(endpoint)
        wanted = endpoint.requests[0]["response_format"]
        assert wanted["type"] == "json_schema"
        assert wanted["json_schema"]["strict"] is True
        item = wanted["json_schema"]["schema"]["properties"]["proposals"]["items"]
        assert sorted(item["required"]) == sorted(item["properties"]) == sorted(FACT)

    @pytest.mark.parametrize("status", [400, 422])
    def test_an_endpoint_without_structured_output_is_asked_without(self, status):
        with Endpoint(fails(status), GOOD) as endpoint:
            assert len(propose(endpoint).proposals) == 1
        assert ["response_format" in request for request in endpoint.requests] == [True, False]

    def test_the_scripted_model_of_the_demo_serves_it_too(self):
        with ScriptedModel(override=lambda request: Reply(text=json.dumps([FACT]))) as endpoint:
            proposer = OpenAIProposer("m", endpoint.base_url)
            report = asyncio.run(collect_proposals(proposer, parse_transcript(TRANSCRIPT), {}, pii=MemoryPIIFilter()))
        assert len(report.proposals) == 1

    def test_one_proposer_serves_one_event_loop_after_another(self):
        with Endpoint(says("[]")) as endpoint:
            proposer = OpenAIProposer("m", endpoint.url)
            assert [asyncio.run(proposer.agenerate("x")) for _ in range(3)] == ["[]"] * 3


class TestTroubleThatPasses:
    @pytest.mark.parametrize(
        "trouble",
        {
            "rate limit": fails(429),
            "server error": fails(500),
            "bad gateway": body(b"<html>bad gateway</html>", 502),
            "overloaded": fails(529),
            "connection closed": hangs_up,
            "body cut off": body(b'{"id": "x", "choices": [', length=4000),
            "body not JSON": body(b"{'id'"),
            "body of another protocol": body(b"[1, 2]"),
            "no choices": body(b"{}"),
            "empty choices": body(b'{"choices": []}'),
            "null content": says(None),
            "blank content": says("  "),
            "answer cut off": says('{"proposals": [{"fact_key": "de', finish="length"),
            "answer not JSON": says("Sure! I would remember that they use uv."),
            "answer of another form": says('{"facts": 3}'),
            "proposals not a list": says('{"proposals": "none"}'),
            "deep nesting": says("[" * 100_000),
        }.items(),
        ids=lambda item: item[0],
    )
    def test_is_tried_again(self, trouble, caplog):
        with Endpoint(trouble[1], GOOD) as endpoint, caplog.at_level(logging.WARNING):
            assert len(propose(endpoint).proposals) == 1
        assert len(endpoint.requests) == 2
        assert caplog.records, "trouble is logged"

    def test_a_slow_answer_is_given_up_and_asked_for_again(self):
        with Endpoint(after(3, GOOD), GOOD) as endpoint:
            assert len(propose(endpoint, timeout=0.5).proposals) == 1
        assert len(endpoint.requests) == 2

    def test_a_trickle_is_given_up(self):
        with Endpoint(trickles, GOOD) as endpoint:
            assert len(propose(endpoint, timeout=0.5).proposals) == 1
        assert len(endpoint.requests) == 2

    @pytest.mark.parametrize("form", ["seconds", "date"])
    def test_retry_after_is_kept(self, form):
        asked = "1" if form == "seconds" else format_datetime(datetime.now(UTC) + timedelta(seconds=2.5), usegmt=True)
        with Endpoint(fails(429, Retry_After=asked), GOOD) as endpoint:
            propose(endpoint)
        assert 0.9 < endpoint.times[1] - endpoint.times[0] < 4

    def test_an_unreadable_retry_after_is_not_fatal(self):
        with Endpoint(fails(503, Retry_After="soon"), GOOD) as endpoint:
            assert len(propose(endpoint).proposals) == 1

    def test_pauses_grow(self):
        with Endpoint(fails(500)) as endpoint, pytest.raises(ProposerUnavailable):
            propose(endpoint, attempts=4, backoff=0.2)
        pauses = [b - a for a, b in zip(endpoint.times, endpoint.times[1:], strict=False)]
        assert 0.1 < pauses[0] < pauses[1] < pauses[2]

    def test_the_repair_round_shows_the_unusable_answer_as_data(self):
        with Endpoint(says("no \n```\nEND DATA\n"), GOOD) as endpoint:
            propose(endpoint)
        assert endpoint.prompts[1].startswith(endpoint.prompts[0])
        assert r"no \n```\nEND DATA\n" in endpoint.prompts[1]


class TestTroubleThatStays:
    @pytest.mark.parametrize(
        "trouble",
        [fails(500), fails(429), hangs_up, body(b"{}"), says("I cannot do that."), says("{", finish="length")],
        ids=["500", "429", "closed", "no choices", "not JSON", "cut off"],
    )
    def test_ends_in_one_error_after_bounded_attempts(self, trouble):
        with Endpoint(trouble) as endpoint, pytest.raises(ProposerUnavailable) as caught:
            propose(endpoint)
        assert "later" in caught.value.remedy
        assert len(endpoint.requests) <= 6

    @pytest.mark.parametrize("status", [401, 403, 404])
    def test_a_refusal_is_not_repeated(self, status):
        with Endpoint(fails(status)) as endpoint, pytest.raises(ProposerUnavailable, match=str(status)):
            propose(endpoint)
        assert len(endpoint.requests) == 1

    def test_a_wait_that_is_too_long_is_not_waited_for(self):
        with Endpoint(fails(429, Retry_After="86400")) as endpoint, pytest.raises(ProposerUnavailable, match="86400"):
            propose(endpoint)

    def test_nobody_listening(self):
        with Endpoint(GOOD) as endpoint:
            pass
        with pytest.raises(ProposerUnavailable):
            propose(endpoint)

    def test_neither_prompt_nor_key_is_in_log_or_error(self, caplog):
        with (
            Endpoint(fails(500)) as endpoint,
            caplog.at_level(logging.DEBUG, logger="phionyx_letta"),
            pytest.raises(ProposerUnavailable) as caught,
        ):
            propose(endpoint, transcript="user: the zebra password is hunter2!x\n")
        said = caplog.text + str(caught.value)
        assert "attempt 1 of 3" in said
        assert not any(word in said for word in ("zebra", "hunter2", "key-1"))


class TestSettings:
    def test_come_from_the_environment(self, monkeypatch):
        with Endpoint(says("[]")) as endpoint:
            monkeypatch.setenv("PHIONYX_LETTA_PROPOSER_MODEL", "small")
            monkeypatch.setenv("PHIONYX_LETTA_PROPOSER_BASE_URL", endpoint.url)
            monkeypatch.setenv("PHIONYX_LETTA_PROPOSER_API_KEY", "from-the-setting")
            asyncio.run(OpenAIProposer().agenerate("x"))
        assert endpoint.requests[0]["model"] == "small"
        assert endpoint.headers[0]["Authorization"] == "Bearer from-the-setting"

    def test_the_key_of_openai_goes_to_no_other_endpoint(self, monkeypatch):
        monkeypatch.setenv("OPENAI_API_KEY", "sk-of-openai")
        with Endpoint(says("[]")) as endpoint:
            asyncio.run(OpenAIProposer("m", endpoint.url).agenerate("x"))
        assert "sk-of-openai" not in str(endpoint.headers[0])

    def test_what_is_missing_is_named(self):
        with pytest.raises(SettingsError, match="PHIONYX_LETTA_PROPOSER_MODEL"):
            OpenAIProposer()
        with pytest.raises(SettingsError, match="PHIONYX_LETTA_PROPOSER_API_KEY"):
            OpenAIProposer("m")

    def test_a_missing_package_is_named(self, mocker):
        mocker.patch.dict(sys.modules, {"openai": None})
        with pytest.raises(MissingExtra, match=r"phionyx-letta\[openai\]"):
            OpenAIProposer("m", "http://127.0.0.1:1/v1")

    def test_the_package_is_not_imported_before_it_is_needed(self):
        import subprocess

        code = "import sys, phionyx_letta.memory.proposer, phionyx_letta.memory.openai_proposer; print('openai' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
