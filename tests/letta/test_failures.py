"""What happens to an agent's write when it cannot be recorded: kept and reported in open mode, refused in closed mode.

Also the transactions that end otherwise than by a plain commit. Letta, its sessions and its retry are the real ones.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from proof import install_witness

SCRIPT = Path(__file__).parent / "scripts" / "failures.py"
OUTBOX_TROUBLES = [
    "locked",
    "renamed",
    "dropped",
    "constrained",
    "disk full",
    "deadlocked",
    "not permitted",
    "out of memory",
    "dropping rows in silence",
]
AROUND_THE_SESSION = [
    "text in a session",
    "text in a session whose caller swallows errors",
    "text on a bare engine",
    "a write inside a select",
]
KEY_TROUBLES = ["malformed key", "key file that is missing", "no key and nowhere to make one"]
ODD_VALUES = [
    "dollar quotes",
    "quotes",
    "backslashes",
    "percent",
    "not in the BMP",
    "controls",
    "escapes of surrogates, as text",
    "JSON",
    "one megabyte",
    "one megabyte of emoji",
]


@pytest.fixture(scope="module")
def found(run_in_letta: Callable[..., Any], new_letta_database: Callable[[], str]) -> dict[str, Any]:
    database = new_letta_database()
    install_witness(database)
    key = {"PHIONYX_LETTA_SIGNING_KEY": os.urandom(32).hex(), "PHIONYX_LETTA_SEALER": "0"}
    result: dict[str, Any] = run_in_letta(SCRIPT, database=database, plugin=True, env=key, timeout=300)
    return result


class TestInOpenModeTheWriteGoesOnAndTheGapIsReported:
    @pytest.mark.parametrize("trouble", OUTBOX_TROUBLES)
    def test_when_the_outbox_is(self, found: dict[str, Any], trouble: str) -> None:
        case = found[f"open: {trouble}"]
        assert case["error"] is None
        assert case["during"] == "during", "the write was to be committed while the trouble lasted"
        assert case["bulk"] == {"error": None, "value": "bulk"}
        assert case["gaps"] == 2
        assert case["named"], "the gap names the block"

    @pytest.mark.parametrize("trouble", OUTBOX_TROUBLES)
    def test_and_recording_goes_on_once_the_outbox_is_no_longer(self, found: dict[str, Any], trouble: str) -> None:
        case = found[f"open: {trouble}"]
        assert (case["after"], case["value after"]) == (None, "after")
        assert (case["rows"], case["last row"]) == (2, True)  # the block's creation, and the write afterwards

    def test_when_the_statement_timeout_strikes_in_the_outbox(self, found: dict[str, Any]) -> None:
        assert found["open: statement timeout"] == {"error": None, "value": "during", "gaps": 1, "rows": 1}

    @pytest.mark.parametrize("way", AROUND_THE_SESSION)
    def test_when_a_statement_goes_around_the_session(self, found: dict[str, Any], way: str) -> None:
        case = found[f"open: {way}"]
        assert case["error"] is None
        assert case["value"] != "before"
        assert (case["gaps"], case["rows"]) == (1, 1)

    @pytest.mark.parametrize("trouble", KEY_TROUBLES)
    def test_when_there_is(self, found: dict[str, Any], trouble: str) -> None:
        case = found[f"open: {trouble}"]
        assert (case["error"], case["written"]) == (None, True)
        assert (case["gaps"], case["rows"]) == (1, 0)
        assert case["reported"]
        assert case["last gap"]
        assert case["reported"][:40] in case["last gap"]


class TestInClosedModeTheWriteIsRefused:
    @pytest.mark.parametrize("trouble", OUTBOX_TROUBLES)
    def test_when_the_outbox_is(self, found: dict[str, Any], trouble: str) -> None:
        case = found[f"closed: {trouble}"]
        assert case["error"].startswith("EvidenceRefused: the memory write was refused")
        assert "phionyx-letta doctor" in case["error"]
        assert case["during"] == "before"
        assert case["gaps"] == 0

    @pytest.mark.parametrize("trouble", OUTBOX_TROUBLES)
    def test_also_for_a_caller_that_swallows_the_error_and_commits(self, found: dict[str, Any], trouble: str) -> None:
        bulk = found[f"closed: {trouble}"]["bulk"]
        assert bulk["error"].startswith("EvidenceRefused")
        assert bulk["value"] == "before"

    @pytest.mark.parametrize("trouble", OUTBOX_TROUBLES)
    def test_and_the_next_one_succeeds_once_the_outbox_is_no_longer(self, found: dict[str, Any], trouble: str) -> None:
        case = found[f"closed: {trouble}"]
        assert (case["after"], case["value after"]) == (None, "after")
        assert (case["rows"], case["last row"]) == (2, True)

    def test_when_the_statement_timeout_strikes_in_the_outbox(self, found: dict[str, Any]) -> None:
        case = found["closed: statement timeout"]
        assert case["error"].startswith("EvidenceRefused")
        assert (case["value"], case["gaps"], case["rows"]) == ("before", 0, 1)

    @pytest.mark.parametrize("way", AROUND_THE_SESSION)
    def test_when_a_statement_goes_around_the_session(self, found: dict[str, Any], way: str) -> None:
        case = found[f"closed: {way}"]
        if "swallows" not in way:
            assert case["error"].startswith("EvidenceRefused")
        assert case["value"] == "before"
        assert case["rows"] == 1

    @pytest.mark.parametrize("trouble", KEY_TROUBLES)
    def test_when_there_is(self, found: dict[str, Any], trouble: str) -> None:
        case = found[f"closed: {trouble}"]
        assert case["error"].startswith("EvidenceRefused")
        assert case["reported"][:40] in case["error"]
        assert case["kept"]
        assert case["rows"] == 0


def test_a_lock_on_the_outbox_that_is_gone_in_time_costs_no_evidence(found: dict[str, Any]) -> None:
    assert found["briefly locked"] == {"waited": True, "error": None, "agrees": True, "gaps": 0}


class TestTheSessionIsLeftAsItWas:
    def test_the_lock_timeout_is_the_one_from_before_whether_the_capture_succeeded_or_not(
        self, found: dict[str, Any]
    ) -> None:
        case = found["lock timeout"]
        assert case["pairs"] == [["0", "0"], ["7s", "7s"], ["0", "0"]] * 2
        assert case["outside"] == "0"


class TestValues:
    @pytest.mark.parametrize("name", ODD_VALUES)
    def test_any_that_the_database_takes_is_recorded_as_it_is(self, found: dict[str, Any], name: str) -> None:
        assert found[f"value: {name}"] == {
            "error": None,
            "hash": True,
            "size": True,
            "kept": True,
            "gaps": 0,
            "agrees": True,
        }

    def test_what_letta_removes_from_one_is_not_recorded(self, found: dict[str, Any]) -> None:
        assert found["NUL through the manager"] == {"error": None, "value": "ab", "agrees": True}

    @pytest.mark.parametrize("name", ["NUL", "a lone surrogate", "a lone surrogate through the manager"])
    def test_one_that_the_database_does_not_take_is_lettas_own_error_and_leaves_nothing(
        self, found: dict[str, Any], name: str
    ) -> None:
        assert found[f"impossible: {name}"] == {
            "refused": True,
            "value": "before",
            "gaps": 0,
            "agrees": True,
            "after": None,
            "agrees after": True,
        }


class TestTransactionsThatEndOtherwise:
    def test_what_is_rolled_back_leaves_nothing_and_what_stays_leaves_one_row(self, found: dict[str, Any]) -> None:
        case = found["rollbacks"]
        assert [error is None for error in case["errors"]] == [True, False, False]
        assert (case["value"], case["agrees"], case["gaps"]) == ("nested 3", True, 0)

    def test_a_deadlock_of_two_blocks_leaves_one_row_for_each_committed_state(self, found: dict[str, Any]) -> None:
        case = found["deadlock of two blocks"]
        assert case["deadlocks"] >= 1
        assert case["agrees"] == [True, True]
        assert case["gaps"] == 0

    def test_a_write_that_is_retried_in_its_session_after_a_deadlock_leaves_one_row(
        self, found: dict[str, Any]
    ) -> None:
        case = found["deadlock that is retried"]
        assert case["errors"] == [None, None]
        assert (case["value"], case["agrees"], case["rows"], case["gaps"]) == ("retried", True, 2, 0)

    def test_lettas_own_retry_after_a_deadlock_leaves_a_row_exactly_if_it_succeeds(self, found: dict[str, Any]) -> None:
        """In 0.16.8 it does not: it touches expired attributes outside of SQLAlchemy's greenlet."""
        case = found["deadlock that Letta retries"]
        assert case["errors"][0] is None or case["errors"][0].startswith("MissingGreenlet")
        assert case["value"] == ("retried" if case["errors"][0] is None else "before")
        assert (case["agrees"], case["gaps"]) == (True, 0)

    def test_a_write_whose_old_value_was_not_loaded_links_to_a_rivals_commit_or_fails_lettas_version_check(
        self, found: dict[str, Any]
    ) -> None:
        case = found["old value not loaded"]
        assert case["errors"][0] is None or case["errors"][0].startswith("StaleDataError")
        assert (case["errors"][1], case["agrees"], case["gaps"]) == (None, True, 0)

    def test_a_task_that_is_cancelled_anywhere_leaves_a_row_exactly_if_it_was_committed(
        self, found: dict[str, Any]
    ) -> None:
        case = found["cancellations"]
        assert 6 < case["committed"] < 126, "some were to be committed and some not"
        assert (case["agrees"], case["after"], case["agrees after"], case["gaps"]) == (True, None, True, 0)

    def test_a_connection_that_is_cut_before_the_commit_leaves_nothing(self, found: dict[str, Any]) -> None:
        assert found["connection cut"] == {
            "failed": True,
            "value": "before",
            "after": None,
            "agrees": True,
            "gaps": 0,
        }


@pytest.mark.slow
class TestOverRestInClosedMode:
    def test_a_write_that_cannot_be_recorded_is_answered_503_with_the_reason_and_the_remedy(
        self, letta_server_factory: Any, new_letta_database: Callable[[], str], new_agent: Callable[..., Any]
    ) -> None:
        database = new_letta_database()
        settings = {"PHIONYX_LETTA_ON_ERROR": "closed", "PHIONYX_LETTA_SIGNING_KEY": os.urandom(32).hex()}
        server = letta_server_factory(database, plugin=True, env=settings)
        client = server.client()
        block = client.blocks.create(label="human", value="before")
        agent = new_agent(server, value="Ann")
        with psycopg.connect(database) as holder:
            holder.execute("lock table phionyx_outbox in access exclusive mode")
            status, answer = patch(f"{server.base_url}/v1/blocks/{block.id}", {"value": "during"})
            client.agents.messages.create(
                agent_id=agent.id,
                messages=[{"role": "user", "content": 'CALL core_memory_append {"label": "human", "content": "tea"}'}],
            )
            during = client.blocks.retrieve(block.id).value
            in_memory = client.agents.blocks.retrieve("human", agent_id=agent.id).value
            holder.rollback()
        assert status == 503
        assert "the memory write was refused" in answer["detail"]
        assert "phionyx-letta doctor" in answer["detail"]
        assert (during, in_memory) == ("before", "Ann")
        assert patch(f"{server.base_url}/v1/blocks/{block.id}", {"value": "after"})[0] == 200
        assert client.blocks.retrieve(block.id).value == "after"


def patch(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and JSON body of a PATCH."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="PATCH"
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
