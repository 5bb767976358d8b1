"""Counting facts: distinct sessions, one fact under many keys and words."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from phionyx_letta.memory import OccurrenceTracker
from phionyx_letta.memory.facts import normalised_key, same_fact


class TestEveryTracker:
    def test_sessions_count_not_hits(self, new_tracker):
        tracker = new_tracker()
        for _ in range(5):
            tracker.record_occurrence("deploy_uv", "s1", "uses uv")
        assert tracker.get_count("deploy_uv") == 1
        assert not tracker.has_reached_threshold("deploy_uv", 2)
        tracker.record_occurrence("deploy_uv", "s2", "uv again")
        assert new_tracker().has_reached_threshold("deploy_uv", 2)

    def test_a_key_is_the_same_however_it_is_spelled(self, new_tracker):
        tracker = new_tracker()
        tracker.record_occurrence("Deploy-Tool: uv", "s1")
        tracker.record_occurrence("deploy_tool_uv", "s2")
        assert tracker.get_count("deploy tool UV") == 2

    def test_another_key_that_says_the_same_counts_for_the_fact(self, new_tracker):
        tracker = new_tracker()
        tracker.record_occurrence("pytest", "s1", content="The user prefers pytest for tests.")
        record = tracker.record_occurrence("test_framework", "s2", content="Prefers pytest for testing")
        assert (record.fact_key, record.count) == ("pytest", 2)
        other = tracker.record_occurrence("unittest", "s3", content="The user prefers unittest for tests.")
        assert other.count == 1

    def test_a_record_says_when_where_and_on_what(self, new_tracker):
        tracker = new_tracker()
        tracker.record_occurrence("k", "s1", "one", content="It says this.")
        record = tracker.record_occurrence("k", "s2", "two")
        assert record.session_ids == ["s1", "s2"]
        assert record.sample_evidence == ["one", "two"]
        assert record.first_seen <= record.last_seen
        assert new_tracker().get_mature_facts(2) == [record]
        assert new_tracker().get_mature_facts(3) == []

    def test_evidence_is_a_sample(self, new_tracker):
        tracker = new_tracker()
        for number in range(20):
            record = tracker.record_occurrence("k", "s", f"evidence {number}")
        assert len(record.sample_evidence) == 5

    def test_it_remembers_the_newest_patch_and_forgets_a_fact(self, new_tracker):
        tracker = new_tracker()
        tracker.record_occurrence("k", "s")
        tracker.note_patch("K", "p1", "what it says")
        (record,) = new_tracker().get_mature_facts(1)
        assert (record.patch_id, record.content) == ("p1", "what it says")
        tracker.remove("k")
        tracker.remove("never known")
        assert new_tracker().get_count("k") == 0

    @pytest.mark.slow
    def test_processes_at_once_lose_no_count(self, where, new_tracker):
        script = """
import sys
from phionyx_letta.memory import OccurrenceTracker, SqlOccurrenceTracker
where = sys.argv[1]
tracker = SqlOccurrenceTracker(where) if "://" in where else OccurrenceTracker(where + ".json")
for number in range(20):
    tracker.record_occurrence("k", f"{sys.argv[2]}-{number}")
"""
        running = [subprocess.Popen([sys.executable, "-c", script, where, name]) for name in "abc"]
        assert [one.wait(120) for one in running] == [0, 0, 0]
        assert new_tracker().get_count("k") == 60


class TestTheFile:
    def test_nothing_is_kept_without_a_path(self):
        tracker = OccurrenceTracker()
        tracker.record_occurrence("k", "s")
        assert tracker.get_count("k") == 1
        assert OccurrenceTracker().get_count("k") == 0

    def test_a_file_of_the_peers_is_read_and_its_hits_become_sessions(self, tmp_path):
        path = tmp_path / "o.json"
        kept = {"fact_key": "k", "first_seen": "2026-01-01", "last_seen": "2026-01-02", "sample_evidence": ["e"]}
        path.write_text(
            json.dumps(
                {
                    "k": {**kept, "count": 3, "session_ids": ["s", "s", "t"]},
                    "K!": {**kept, "count": 1, "session_ids": ["u"]},
                }
            )
        )
        assert OccurrenceTracker(path).get_count("k") == 3

    @pytest.mark.parametrize("data", [b"[]", b"{half", b"\xff", b"null", b""])
    def test_a_damaged_file_is_put_aside_not_overwritten(self, tmp_path, data, caplog):
        path = tmp_path / "o.json"
        path.write_bytes(data)
        with caplog.at_level(logging.WARNING):
            OccurrenceTracker(path).record_occurrence("k", "s")
        assert OccurrenceTracker(path).get_count("k") == 1
        assert [one.read_bytes() for one in tmp_path.glob("o.json.damaged-*")] == [data]
        assert str(path) in caplog.text

    def test_a_damaged_record_leaves_the_others(self, tmp_path):
        path = tmp_path / "o.json"
        path.write_text('{"a": 3, "b": {"session_ids": ["s"]}, "c": {"session_ids": 1}}')
        assert [one.fact_key for one in OccurrenceTracker(path).get_mature_facts(1)] == ["b"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("The user prefers pytest for tests.", "User prefers pytest for testing"),
        ("I always deploy with uv", "always deploys with uv"),
        ("Uses Python 3.11", "The user uses python 3.11."),
        ("uv, always", "always uv"),
    ],
)
def test_the_same_fact_in_other_words(one, other):
    assert same_fact(one, other)
    assert same_fact(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("prefers tabs", "prefers taps"),
        ("Uses Python 3.11", "Uses Python 3.12"),
        ("Likes tea", "Likes coffee"),
        ("Always deploys with uv", "Never deploys with uv"),
        ("Deploys with uv", "Does not deploy with uv"),
        ("uses C", "uses C++"),
        ("The port is 80", "The port is 8080"),
        ("tea", "teas"),
        ("", ""),
    ],
)
def test_another_fact(one, other):
    assert not same_fact(one, other)


def test_keys_of_any_script_are_kept():
    assert normalised_key("Şehir: İzmir") != normalised_key("Şehir: Ankara")
    assert normalised_key("!!") == "fact"
