"""`explain`: each line of a block and the change that brought it, as far as that can be known."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from cli_helpers import AGENT, HUMAN, Key, change, error_of, run, run_json
from hypothesis import given
from hypothesis import strategies as st

from phionyx_letta import Ed25519Signer, FilesystemEnvelopeStore, MemoryMutationContext, compute_memory_diff
from phionyx_letta.decisions import decide, kept
from phionyx_letta.diff import content_hash
from phionyx_letta.ledger.blame import blame
from phionyx_letta.ledger.sql import SqlLedger

BLOCK = "block-cccccccc-0000-4000-8000-000000000003"
TEXTS = ["", "Ada", "Ada\nLikes tea.", "Ada\nLikes tea.\nLives in Lisbon.", "Ada\nLikes coffee.\nLives in Lisbon."]
PATCH = {
    "patch_id": "p1",
    "event": "apply",
    "reviewer": "ada",
    "session": "session-1",
    "evidence_messages": ["message-1"],
}


def history(kept: bool) -> list[MemoryMutationContext]:
    made = []
    for turn, (before, after) in enumerate(pairwise(TEXTS)):
        said = {"letta": {"event": "update", "agent_id": AGENT, "tool": "memory_insert", "run_id": f"run-{turn}"}}
        more = {"living_memory": PATCH} if turn == 2 else {}
        one = change(AGENT, turn, BLOCK, "notes", "write", before, after, metadata={**said, **more})
        made.append(one if kept else replace(one, diff=compute_memory_diff(before, after)))
    return made


def ledger_of(path: Path, key: Key, *, kept: bool, current: str | None = None, patch: bool = False) -> Path:
    ledger = SqlLedger(f"sqlite:///{path}")
    for one in history(kept):
        ledger.emit(one, signer=key.signer)
    ledger.close()
    with sqlite3.connect(path) as connection:
        if current is not None:  # the columns of Letta's that count
            connection.execute("create table block (id text, label text, value text)")
            connection.execute("create table blocks_agents (agent_id text, block_id text)")
            connection.execute("insert into block values (?, 'notes', ?)", (BLOCK, current))
            connection.execute("insert into blocks_agents values (?, ?)", (AGENT, BLOCK))
        if patch:
            body = {"before_content": TEXTS[2], "after_content": TEXTS[3]}
            connection.execute(
                "insert into phionyx_patch (patch_id, newest, status, created_at, file_path, category, author, rationale, body) "
                "values ('p1', 1, 'applied', '', ?, 'user', 'x', 'she said where she lives', ?)",
                (f"letta:{AGENT}/{BLOCK}/notes", json.dumps(body)),
            )
    connection.close()
    return path


def origins(answer: dict) -> list[list[int]]:
    places = {one["hash"]: one["position"] for one in answer["changes"]}
    return [[places[one] for one in line["changes"]] for line in answer["lines"]]


@pytest.mark.parametrize("named", [BLOCK, f"{AGENT}/notes"])
def test_with_content_kept_each_line_names_its_change_and_who_and_why(tmp_path: Path, key: Key, named: str) -> None:
    answer = run_json("explain", named, "--ledger", ledger_of(tmp_path / "l.db", key, kept=True, current=TEXTS[-1]))
    assert [line["text"] for line in answer["lines"]] == TEXTS[-1].split("\n")
    assert origins(answer) == [[0], [3], [2]]
    assert all(line["certain"] and not line["unrecorded"] for line in answer["lines"])
    assert (answer["block_id"], answer["label"], answer["agents"], answer["notes"]) == (BLOCK, "notes", [AGENT], [])
    by_patch = answer["changes"][2]
    assert (by_patch["who"], by_patch["patch"]["evidence_messages"]) == ("ada", ["message-1"])
    assert answer["changes"][0]["who"] == AGENT
    assert "run run-0" in answer["changes"][0]["why"]


def test_the_page_shows_the_lines_with_hash_and_name_and_nothing_to_command_the_terminal(
    tmp_path: Path, key: Key
) -> None:
    path = ledger_of(tmp_path / "l.db", key, kept=True, current=TEXTS[-1] + "\n\x1b[2J")
    shown = run("explain", BLOCK, "--ledger", path).stdout
    assert "Lives in Lisbon." in shown
    assert "reviewer ada" in shown
    assert "session session-1" in shown
    assert "unrecorded" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("who", "status", "said"),
    [(None, "not_measured", "give --reviewers"), ("ada", "ok", ""), ("bob", "failed", "no key of the reviewer")],
)
def test_the_name_of_a_reviewer_is_checked_or_called_unchecked(
    tmp_path: Path, key: Key, monkeypatch: pytest.MonkeyPatch, who: str | None, status: str, said: str
) -> None:
    ada, bob = Ed25519Signer("11" * 32), Ed25519Signer("22" * 32)
    policy = tmp_path / "who.toml"
    policy.write_text(f'[[reviewer]]\nname = "ada"\nkey = "{(ada if who == "ada" else bob).public_key_hex}"\n')
    decision = decide(PATCH, BLOCK, content_hash(TEXTS[2]), content_hash(TEXTS[3]), ada, ada.key_id)
    monkeypatch.setitem(globals(), "PATCH", kept(decision, salted=False))
    given = ["explain", BLOCK, "--ledger", ledger_of(tmp_path / "l.db", key, kept=True)]
    given += ["--reviewers", policy] if who else []
    answer = run_json(*given, code=1 if status == "failed" else 0)
    assert [one["reviewer_signature"] for one in answer["changes"]] == [None, None, status, None]
    page = " ".join(run(*given).stdout.split())
    assert said in page
    assert ("by ada," in page) == (status == "ok")
    assert ("says ada" in page) == (status != "ok")


def test_without_content_what_is_known_is_said(tmp_path: Path, key: Key) -> None:
    """Only the text there is now, by its hash: each line is from one of the changes that added something."""
    answer = run_json("explain", BLOCK, "--ledger", ledger_of(tmp_path / "l.db", key, kept=False, current=TEXTS[-1]))
    assert origins(answer) == [[0, 1, 2, 3]] * 3
    assert not any(line["certain"] or line["unrecorded"] for line in answer["lines"])
    assert answer["notes"] == []


def test_a_patch_knows_texts_that_the_ledger_did_not_keep(tmp_path: Path, key: Key) -> None:
    path = ledger_of(tmp_path / "l.db", key, kept=False, current=TEXTS[-1], patch=True)
    answer = run_json("explain", BLOCK, "--ledger", path)
    assert origins(answer) == [[0, 1], [3], [2]]
    assert answer["changes"][2]["rationale"] == "she said where she lives"


def test_a_text_that_is_not_known_has_no_lines_but_its_changes(tmp_path: Path, key: Key) -> None:
    store = tmp_path / "store"
    for one in history(kept=False):
        FilesystemEnvelopeStore(store).emit(one, signer=key.signer)
    answer = run_json("explain", f"{AGENT}/notes", "--ledger", store)
    assert answer["lines"] is None
    assert "was not kept" in answer["notes"][0]
    assert [one["position"] for one in answer["changes"]] == [0, 1, 2, 3]
    assert "says ada decided" in " ".join(run("explain", BLOCK, "--ledger", store).stdout.split())


def test_what_nobody_recorded_is_called_that(tmp_path: Path, key: Key) -> None:
    changed = TEXTS[-1] + "\nOwes me money."
    answer = run_json("explain", BLOCK, "--ledger", ledger_of(tmp_path / "l.db", key, kept=True, current=changed))
    last = answer["lines"][-1]
    assert (last["text"], last["changes"], last["unrecorded"], last["certain"]) == ("Owes me money.", [], True, True)
    assert "something else than what was last recorded" in answer["notes"][0]


def test_after_a_clear_there_is_nothing_to_explain_and_an_unknown_block_is_an_error(database: Path) -> None:
    answer = run_json("explain", HUMAN, "--ledger", database)
    assert answer["lines"] == []
    assert "block itself was not found" in answer["notes"][0]
    assert "nothing is recorded of a block 'nobody'" in error_of("explain", "nobody", "--ledger", database, code=1)
    assert "nothing is recorded" in error_of("explain", f"{AGENT}/nothing", "--ledger", database, code=1)


def test_show_leads_from_an_upstream_envelope_to_the_changes_it_caused(database: Path, store: Path) -> None:
    """All of this database name it; it is in no ledger here."""
    upstream = "envelope://sha256:" + "ab" * 32
    shown = run_json("show", upstream, "--ledger", database)
    assert shown["envelope"] is None
    assert [one["block_label"] for one in shown["caused"]] == ["human", "human", "human", "notes", "human"]
    assert {one["parent"] for one in shown["caused"]} == {upstream}
    page = run("show", upstream, "--ledger", database).stdout
    assert "is not in this ledger" in page
    assert "it caused 5 changes" in page
    first = run_json("show", shown["caused"][0]["hash"], "--ledger", database)
    assert (first["position"], first["caused"]) == (0, [])
    assert "no envelope has a hash" in error_of("show", upstream, "--ledger", store, code=1)


_LINES = st.lists(st.sampled_from(["a", "b", "c", ""]), max_size=6).map("\n".join)


@given(st.lists(_LINES, min_size=2, max_size=6), st.data())
def test_no_line_is_laid_to_a_change_that_did_not_touch_it(texts: list[str], data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.booleans(), min_size=len(texts) - 1, max_size=len(texts) - 1))
    pairs = zip(pairwise(texts), kept, strict=True)
    diffs = [compute_memory_diff(old, new, include_diff_text=keep).to_dict() for (old, new), keep in pairs]
    found = blame(diffs, current=texts[-1])
    assert found.lines is not None
    assert "\n".join(line.text for line in found.lines) == texts[-1]
    assert not found.unrecorded
    for line in found.lines:
        assert line.changes or line.unrecorded
        assert all(content_hash(texts[one]) != content_hash(texts[one + 1]) for one in line.changes)
        if len(line.changes) == 1 and not line.unrecorded:
            assert line.text in texts[line.changes[0] + 1].split("\n")
