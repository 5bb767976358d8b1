"""Every way a block changes inside a Letta process (findings on Letta 0.16.8, "Every way a block changes"): one test a way.

The managers and models are Letta's own, on PostgreSQL; the expected content is written here, its hash computed anew.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from phionyx_letta import envelope_schema

SCRIPT = Path(__file__).parent / "scripts" / "manager_paths.py"


@dataclass(frozen=True)
class Change:
    """What one envelope must say. `trace` and `block` name ids of the script; "new" stands for an id nobody knows."""

    kind: str
    event: str
    block: str
    before: str
    after: str
    trace: str = ""
    operation: str | None = None
    label: str | None = None
    reason: str | None = None


def write(event: str, block: str, before: str, after: str, **more: Any) -> Change:
    return Change("write", event, block, before, after, **more)


def attach(block: str, content: str, agent: str, operation: str | None) -> Change:
    return write("attach", block, content, content, trace=agent, operation=operation)


def detach(block: str, content: str, agent: str, operation: str | None) -> Change:
    reason = f"letta.{operation or 'detach'}"
    return Change("forget", "detach", block, content, content, trace=agent, operation=operation, reason=reason)


UPDATE = "update_block"
EXPECTED: dict[str, list[Change]] = {
    "create": [write("create", "block", "", "a", operation="create_or_update_block")],
    "append": [Change("append", "update", "block", "a", "ab", operation=UPDATE)],
    "no change": [],
    "write": [write("update", "block", "ab", "xyz", operation=UPDATE)],
    "clear": [Change("clear", "update", "block", "xyz", "", operation=UPDATE)],
    "None is no change": [],
    "rename": [write("rename", "block", "", "", operation=UPDATE, label="renamed")],
    "description": [write("update_description", "block", "", "", operation=UPDATE)],
    "limit": [write("update_limit", "block", "", "", operation=UPDATE)],
    "read only": [write("update_read_only", "block", "", "", operation=UPDATE)],
    "several columns": [write("update", "block", "", "one", operation=UPDATE, label="human")],
    "bulk update": [write("update", "block", "one", "bulk", operation="bulk_update_block_values")],
    "checkpoint": [write("checkpoint", "block", "bulk", "bulk")],
    "undo": [write("undo", "block", "two", "bulk", operation="undo")],
    "redo": [write("redo", "block", "bulk", "two", operation="redo")],
    "batch create": [
        write("create", "first of batch", "", "1", operation="batch_create_blocks"),
        write("create", "second of batch", "", "2", operation="batch_create_blocks"),
    ],
    "delete unattached": [Change("delete", "delete", "first of batch", "1", "", operation="delete_block")],
    "plain attribute": [write("update", "bulk", "start", "attribute")],
    "two flushes in one transaction": [
        write("update", "bulk", "attribute", "first"),
        write("update", "bulk", "first", "second"),
    ],
    "rolled back after a flush": [],
    "rolled back to a savepoint": [],
    "old value not loaded": [write("update", "bulk", "second", "after expiry")],
    "update(Block)": [write("update", "bulk", "after expiry", "orm")],
    "update(table)": [write("update", "bulk", "orm", "core")],
    "update that matches nothing": [],
    "update to the same": [],
    "update by primary key": [write("update", "bulk", "core", "by key")],
    "insert(table)": [write("create", "inserted", "", "v")],
    "insert that conflicts": [],
    "delete(Block)": [Change("delete", "delete", "inserted", "v", "")],
    "create agent": [
        write("create", "persona", "", "p", operation="create_agent"),
        attach("shared", "s", "agent", "create_agent"),
        attach("persona", "p", "agent", "create_agent"),
    ],
    "attach": [attach("extra", "x", "agent", "attach_block")],
    "attach again": [],
    "modify by label": [
        Change("append", "update", "extra", "x", "xy", trace="agent", operation="modify_block_by_label")
    ],
    "write of an attached block": [write("update", "extra", "xy", "z", trace="agent", operation=UPDATE)],
    "update_agent(block_ids)": [
        detach("extra", "z", "agent", "update_agent"),
        detach("persona", "p", "agent", "update_agent"),
    ],
    "detach": [detach("shared", "s", "agent", "detach_block")],
    "delete attached block": [
        detach("extra", "z", "agent", "delete_block"),
        Change("delete", "delete", "extra", "z", "", operation="delete_block"),
    ],
    "pivot insert": [attach("shared", "s", "agent", None)],
    "pivot insert that conflicts": [],
    "pivot delete": [detach("shared", "s", "agent", None)],
    "group with a shared block": [
        attach("shared", "s", "agent", "create_group"),
        attach("shared", "s", "other", "create_group"),
    ],
    "write of a block two agents share": [Change("append", "update", "shared", "s", "sh", operation=UPDATE)],
    "conversation with an isolated block": [
        write("create", "new", "", "sh", trace="agent", operation="create_conversation")
    ],
    "end of that conversation": [Change("delete", "delete", "new", "sh", "", operation="delete_conversation")],
    "git sync creates": [write("create", "new", "", "from git"), attach("new", "from git", "other", None)],
    "git sync writes": [Change("append", "update", "new", "from git", "from git 2", trace="other")],
    "git sync deletes": [
        detach("new", "from git 2", "other", None),
        Change("delete", "delete", "new", "from git 2", ""),
    ],
    "delete agent": [detach("shared", "sh", "agent", "delete_agent")],
    "delete(Agent)": [detach("shared", "sh", "other", None)],
}
#: What Letta itself refuses in the script; every other case must end without an error.
ERRORS = {"rolled back after a flush": "RuntimeError"}


@pytest.fixture(scope="module")
def done(run_in_letta: Callable[..., Any], new_letta_database: Callable[[], str]) -> dict[str, Any]:
    result: dict[str, Any] = run_in_letta(SCRIPT, database=new_letta_database(), plugin=True)
    return result


def content_hash(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("name", EXPECTED)
def test_every_way_a_block_changes_leaves_exactly_its_envelopes(name: str, done: dict[str, Any]) -> None:
    case, ids = done["cases"][name], done["ids"]
    assert case["error"] == ERRORS.get(name)
    found = case["envelopes"]
    assert len(found) == len(EXPECTED[name]), [one["subject"]["metadata"] for one in found]
    expected = EXPECTED[name]
    if all(change.block != "new" for change in expected):  # the blocks of one statement come in no particular order
        found = sorted(found, key=lambda one: (one["mutation"]["block_id"], one["subject"]["trace_id"]))
        expected = sorted(expected, key=lambda change: (ids[change.block], ids[change.trace or change.block]))
    for envelope, change in zip(found, expected, strict=True):
        _check(envelope, change, ids)


def _check(envelope: dict[str, Any], change: Change, ids: dict[str, str]) -> None:
    mutation, subject = envelope["mutation"], envelope["subject"]
    letta = subject["metadata"]["letta"]
    assert (mutation["mutation_kind"], letta["event"]) == (change.kind, change.event)
    assert mutation["diff"]["before_hash"] == content_hash(change.before)
    assert mutation["diff"]["after_hash"] == content_hash(change.after)
    assert mutation["diff"]["after_size_bytes"] == len(change.after.encode())
    assert mutation["diff"]["unchanged_chars"] + mutation["diff"]["added_chars"] == len(change.after)
    assert mutation["diff"]["diff_text"] is None, "content is kept only when asked for"
    if change.block != "new":
        assert mutation["block_id"] == ids[change.block]
    assert subject["trace_id"] == (ids[change.trace] if change.trace else mutation["block_id"])
    assert letta.get("operation") == change.operation
    assert mutation["forgetting_reason"] == change.reason
    if change.label:
        assert mutation["block_label"] == change.label
    if change.operation:
        assert letta["actor_id"] == ids["user"]
    assert envelope["integrity"]["signature"].startswith("ed25519:")


def test_every_envelope_fits_the_schema(done: dict[str, Any]) -> None:
    schema = Draft202012Validator(envelope_schema())
    envelopes = [envelope for case in done["cases"].values() for envelope in case["envelopes"]]
    assert len(envelopes) > 40
    for envelope in envelopes:
        schema.validate(envelope)


def test_six_concurrent_updates_leave_one_envelope_for_each_that_succeeded(done: dict[str, Any]) -> None:
    found = done["cases"]["six at once"]["envelopes"]
    assert len(found) == int(done["ids"]["race successes"]) >= 1
    assert {one["mutation"]["block_id"] for one in found} == {done["ids"]["race"]}


def test_a_cancelled_update_leaves_an_envelope_exactly_if_it_was_committed(done: dict[str, Any]) -> None:
    history = [*done["cases"]["six at once"]["envelopes"], *done["cases"]["cancelled mid-update"]["envelopes"]]
    diffs = [one["mutation"]["diff"] for one in history]
    assert all(old["after_hash"] == new["before_hash"] for old, new in itertools.pairwise(diffs))
    assert diffs[-1]["after_hash"] == content_hash(done["ids"]["race value"])


def test_a_rename_says_both_labels_and_a_description_only_its_hashes(done: dict[str, Any]) -> None:
    renamed = done["cases"]["rename"]["envelopes"][0]["subject"]["metadata"]["letta"]
    assert renamed["label"] == {"before": "human", "after": "renamed"}
    described = done["cases"]["description"]["envelopes"][0]["subject"]["metadata"]["letta"]
    assert described["description"]["after_hash"] == content_hash("about")
    limited = done["cases"]["limit"]["envelopes"][0]["subject"]["metadata"]["letta"]
    assert limited["limit"]["after"] == 4321
    several = done["cases"]["several columns"]["envelopes"][0]["subject"]["metadata"]["letta"]
    assert several["changed"] == ["value", "label", "read_only"]
