"""`reconcile` on PostgreSQL: what was done past the plugin is found, adopted or undone, and nothing of Letta's is ever overwritten."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from block_rig import Block, BlockRig
from cli_helpers import error_of, run, run_json
from outbox_rig import changed, verifier_of
from sqlalchemy.orm.exc import StaleDataError
from typer.testing import CliRunner

from phionyx_letta.cli.app import app
from phionyx_letta.ledger.audit_sql import verify_ledger
from phionyx_letta.plugin.adoption import Operator, adopt, restore
from phionyx_letta.plugin.reconcile import Difference, differences

pytestmark = pytest.mark.slow  # with PostgreSQL, minutes in all

A, B = "agent-a", "agent-b"
WHO = ("--name", "Ada Operator", "--reason", "psql in the night", "--yes")


@pytest.fixture
def rig(empty_database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockRig]:
    rig = BlockRig(empty_database)
    monkeypatch.setenv("PHIONYX_LETTA_LEDGER", empty_database)
    monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", rig.key.source)
    yield rig
    rig.close()


@pytest.fixture(params=["plain", "salted"])
def recorded(request: pytest.FixtureRequest, rig: BlockRig) -> BlockRig:
    """One block that an agent has, sealed, in a ledger of each sort."""
    with rig.armed(rig.runtime(request.param)):
        rig.create("block-1", "Ada", A)
        rig.set("block-1", value="Ada likes tea", agent=A)
    rig.seal()
    return rig


@pytest.fixture
def kept(rig: BlockRig, monkeypatch: pytest.MonkeyPatch) -> BlockRig:
    """The same with content kept."""
    monkeypatch.setenv("PHIONYX_LETTA_INCLUDE_DIFF_TEXT", "1")
    with rig.armed(rig.runtime("plain", include_diff_text=True)):
        rig.create("block-1", "one\ntwo\nthree\n", A)
        rig.set("block-1", value="one\n2\nthree")
        rig.attach("block-1", B)
    rig.seal()
    return rig


def outside(*arguments: str, code: int = 1) -> list[dict[str, Any]]:
    found = run_json("reconcile", *arguments, code=code)["outside"]
    assert isinstance(found, list)
    return found


def valid(rig: BlockRig) -> bool:
    report = verify_ledger(rig.ledger, verifier=verifier_of(rig.key))
    assert report.findings == [], report.findings
    return report.verdict == "valid"


def shown(rig: BlockRig) -> Difference:
    with rig.ledger.engine.connect() as connection:
        (one,) = differences(connection, rig.key)
    return one


class TestListing:
    def test_nothing_is_listed_where_nothing_was_done_outside(self, recorded: BlockRig) -> None:
        assert outside(code=0) == []
        assert "every block is as it was recorded" in run("reconcile").stdout

    def test_what_waits_counts_as_recorded(self, recorded: BlockRig) -> None:
        with recorded.armed(recorded.runtime("plain")):
            recorded.set("block-1", value="waits")
            recorded.create("block-2", "waits", B)
            recorded.detach("block-1", A)
        assert outside(code=0) == []
        recorded.sql("update block set value = 'evil'")
        assert [one["recorded"]["envelope"] for one in outside()] == [None, None]

    @pytest.mark.parametrize(
        ("statement", "what", "columns"),
        [
            ("update block set value = 'evil'", "changed", ["value"]),
            ("update block set label = 'persona'", "changed", ["label"]),
            ("update block set description = 'evil'", "changed", ["other"]),
            ('update block set "limit" = 7', "changed", ["other"]),
            ("update block set value = 'evil', read_only = true", "changed", ["value", "other"]),
            ("delete from block", "deleted", []),
            ("delete from blocks_agents", "attachments", []),
        ],
    )
    def test_each_difference_is_named_with_what_is_known(
        self, recorded: BlockRig, statement: str, what: str, columns: list[str]
    ) -> None:
        recorded.sql(statement)
        (one,) = outside()
        assert (one["block_id"], one["what"], one["columns"]) == ("block-1", what, columns)
        assert (
            one["recorded"]["hash" if False else "after_hash"]
            == recorded.last("block-1")["mutation"]["diff"]["after_hash"]
        )
        assert one["recorded"]["producer"] == "letta.agent-a"
        assert one["recorded"]["size"] == 13
        assert (one["found"] is None) == (what == "deleted")
        page = run("reconcile").stdout
        assert "block-1" in page
        assert "Ada likes tea" not in page + json.dumps(one)

    def test_a_block_that_was_never_recorded(self, recorded: BlockRig) -> None:
        recorded.sql("insert into block values ('block-9', 'org-1', 'x', 'planted', null, 5, false, 1)")
        (one,) = outside()
        assert (one["block_id"], one["what"], one["recorded"]) == ("block-9", "created", None)
        assert outside("block-1", code=0) == []
        assert len(outside("block-9")) == 1

    def test_rows_put_into_the_outbox_by_hand_excuse_nothing(self, recorded: BlockRig) -> None:
        recorded.sql("update block set value = 'evil'")
        forged = recorded.row({**_mutation(recorded), "block_id": "block-1"})
        recorded.put((forged[0], "0" * 64))
        assert len(outside()) == 1

    def test_a_state_made_to_fit_excuses_nothing(self, rig: BlockRig) -> None:
        with rig.armed(rig.runtime("plain")):
            rig.create("block-1", "Ada", A)
        rig.seal()
        rig.sql("update block set value = 'evil'")
        rig.sql("update phionyx_block set after_hash = 'sha256:' || encode(sha256('evil'), 'hex')")
        assert outside()[0]["what"] == "changed"

    def test_an_edited_or_missing_newest_envelope_is_not_believed(self, recorded: BlockRig) -> None:
        recorded.sql("update phionyx_envelope set body = replace(body, 'letta.agent-a', 'letta.agent-b')")
        (one,) = outside()
        assert one["what"] == "record damaged"
        assert "not authentic" in run("reconcile").stdout
        (outcome,) = run_json("reconcile", "--adopt", *WHO, code=1)["outcomes"]
        assert outcome["done"] == "not done"

    def test_a_cut_end_is_not_taken_for_the_newest_record(self, recorded: BlockRig) -> None:
        recorded.sql("update block set value = 'Ada'")
        recorded.sql("delete from phionyx_envelope where seq = (select max(seq) from phionyx_envelope)")
        assert outside()[0]["what"] == "record damaged"

    def test_a_lost_salt_is_not_a_forgotten_one(self, rig: BlockRig) -> None:
        with rig.armed():
            rig.create("block-1", "Ada", A)
        rig.seal()
        rig.sql("update phionyx_salt set wrapped = null, ended = true")
        assert outside()[0]["what"] == "salt lost"
        run_json("reconcile", "--adopt", *WHO)
        assert outside(code=0) == []
        assert valid(rig)

    def test_a_forgotten_block_is_nobodys_fault_and_one_taken_up_again_is_said(self, rig: BlockRig) -> None:
        with rig.armed():
            rig.create("block-1", "Ada", A)
            rig.detach("block-1", A)
            rig.seal()
            assert outside(code=0) == []
            rig.attach("block-1", B)
            rig.seal()
        (one,) = outside(code=0)
        assert one["what"] == "forgotten"
        run_json("reconcile", "--adopt", *WHO)
        assert outside(code=0) == []
        assert valid(rig)


def _mutation(rig: BlockRig) -> dict[str, Any]:
    return changed("block-1", "Ada likes tea", "evil")


class TestAdopting:
    @pytest.mark.parametrize(
        ("statement", "kind"),
        [
            ("update block set value = 'evil'", "write"),
            ("update block set value = ''", "clear"),
            ("update block set label = 'x', description = 'd'", "write"),
            ("delete from block", "delete"),
            ("delete from blocks_agents", "write"),
            ("insert into block values ('block-2', 'org-1', 'x', 'planted', null, 5, false, 1)", "write"),
        ],
    )
    def test_links_the_history_again_and_names_the_operator(
        self, recorded: BlockRig, statement: str, kind: str
    ) -> None:
        recorded.sql(statement)
        done = run_json("reconcile", "--adopt", *WHO)
        assert ([one["done"] for one in done["outcomes"]], done["left"]) == (["adopted"], 0)
        last = recorded.envelopes()[-1]
        assert (last["subject"]["producer"], last["mutation"]["mutation_kind"]) == ("letta.unattributed", kind)
        letta = last["subject"]["metadata"]["letta"]
        assert (letta["event"], letta["operator"], letta["reason"]) == ("adopt", "Ada Operator", "psql in the night")
        assert last["mutation"]["forgetting_reason"] == ("psql in the night" if kind in ("clear", "delete") else None)
        assert outside(code=0) == []
        assert valid(recorded)
        if kind != "delete":
            with recorded.armed(recorded.runtime("plain")):
                recorded.set("block-1", value="and on")
            recorded.seal()
            assert valid(recorded)

    def test_of_a_known_content_counts_characters_and_sees_an_append(self, kept: BlockRig) -> None:
        kept.sql("update block set value = value || E'\\nmore'")
        run_json("reconcile", "--adopt", *WHO)
        last = kept.last("block-1")["mutation"]
        assert (last["mutation_kind"], last["diff"]["added_chars"], last["diff"]["removed_chars"]) == ("append", 5, 0)
        assert "+more" in last["diff"]["diff_text"]
        assert valid(kept)

    def test_asks_first(self, recorded: BlockRig) -> None:
        recorded.sql("update block set value = 'evil'")
        refused = CliRunner().invoke(app, ["reconcile", "--adopt", "--name", "A", "--reason", "b"], input="n\n")
        assert refused.exit_code == 2
        assert "changed outside" in refused.stdout
        assert len(outside()) == 1
        agreed = CliRunner().invoke(app, ["reconcile", "--adopt", "--name", "A", "--reason", "b"], input="y\n")
        assert agreed.exit_code == 0, agreed.output
        assert outside(code=0) == []

    def test_one_block_leaves_the_others(self, recorded: BlockRig) -> None:
        recorded.sql("insert into block values ('block-2', 'org-1', 'x', 'planted', null, 5, false, 1)")
        recorded.sql("update block set value = 'evil' where id = 'block-1'")
        run_json("reconcile", "block-2", "--adopt", *WHO)
        assert [one["block_id"] for one in outside()] == ["block-1"]

    def test_what_changed_since_it_was_listed_is_left_alone(self, recorded: BlockRig) -> None:
        recorded.sql("update block set value = 'evil'")
        listed = shown(recorded)
        recorded.sql("update block set value = 'another'")
        outcome = adopt(recorded.ledger, recorded.key, listed, Operator("A", "b"))
        assert (outcome.done, outcome.why) == ("not done", "it changed since it was listed; look again")
        recorded.sql("update block set value = 'Ada likes tea'")
        assert adopt(recorded.ledger, recorded.key, listed, Operator("A", "b")).why == "it is as it was recorded by now"
        assert recorded.outbox() == []

    def test_a_block_that_letta_writes_is_waited_for_and_not_overwritten(self, recorded: BlockRig) -> None:
        recorded.sql("update block set value = 'evil'")
        listed = shown(recorded)
        with recorded.armed(recorded.runtime("plain")), recorded.session() as session:
            session.get_one(Block, "block-1").value = "by Letta"
            session.flush()
            outcomes: list[Any] = []
            thread = threading.Thread(
                target=lambda: outcomes.append(restore(recorded.ledger, recorded.key, listed, Operator("A", "b")))
            )
            thread.start()
            time.sleep(0.3)
            assert outcomes == []
            session.commit()
        thread.join()
        assert outcomes[0].done == "not done"
        assert recorded.sql("select value from block") == [("by Letta",)]
        recorded.seal()

    def test_a_block_held_for_long_is_given_up(self, recorded: BlockRig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("phionyx_letta.plugin.adoption._PATIENCE_MS", 50)
        recorded.sql("update block set value = 'evil'")
        with recorded.holding("select 1 from block for update"):
            outcome = run_json("reconcile", "--adopt", *WHO, code=1)["outcomes"][0]
        assert outcome["why"] == "a transaction holds the block; try again"


class TestCheckpoints:
    """Letta's own, which undo and redo write back."""

    @pytest.fixture
    def with_history(self, rig: BlockRig) -> BlockRig:
        with rig.armed(rig.runtime("plain")):
            rig.create("block-1", "Ada", A)
            rig.checkpoint("block-1", 1, "before")
        assert outside(code=0) == []  # while they wait
        rig.seal()
        return rig

    @pytest.mark.parametrize(
        "statement",
        [
            "update block_history set value = 'evil'",
            "delete from block_history",
            "update block_history set actor_id = 'x'",
        ],
    )
    def test_changed_outside_are_listed_and_adopted(self, with_history: BlockRig, statement: str) -> None:
        assert outside(code=0) == []
        with_history.sql(statement)
        (one,) = outside()
        assert (one["what"], one["columns"]) == ("changed", ["checkpoints"])
        assert "only --adopt" in run_json("reconcile", "--restore", *WHO, code=1)["outcomes"][0]["why"]
        run_json("reconcile", "--adopt", *WHO)
        assert outside(code=0) == []
        assert valid(with_history)

    def test_are_not_recorded_in_a_salted_ledger(self, rig: BlockRig) -> None:
        with rig.armed():
            rig.create("block-1", "Ada", A)
            rig.checkpoint("block-1", 1, "4711")
        rig.seal()
        assert "history" not in rig.last("block-1")["subject"]["metadata"]["letta"]
        assert outside(code=0) == []


class TestRestoring:
    def test_writes_the_last_recorded_content_back_and_records_both(self, kept: BlockRig) -> None:
        kept.sql("update block set value = 'evil', label = 'persona'")
        done = run_json("reconcile", "--restore", *WHO)
        assert [one["done"] for one in done["outcomes"]] == ["restored"]
        assert kept.sql("select value, label, version from block") == [("one\n2\nthree", "human", 3)]
        events = [e["subject"]["metadata"]["letta"]["event"] for e in kept.envelopes()][-2:]
        assert events == ["adopt", "restore"]
        assert outside(code=0) == []
        assert valid(kept)
        kept.sql("update block set value = 'evil again'")  # and it can be restored once more
        run_json("reconcile", "--restore", *WHO)
        assert kept.sql("select value from block") == [("one\n2\nthree",)]
        assert valid(kept)

    def test_what_letta_read_before_cannot_overwrite_it(self, kept: BlockRig) -> None:
        kept.sql("update block set value = 'evil'")

        def write() -> None:
            with kept.session() as session:
                block = session.get_one(Block, "block-1")
                run_json("reconcile", "--restore", *WHO)
                block.value = "evil and more"

        with pytest.raises(StaleDataError):
            write()
        assert kept.sql("select value from block") == [("one\n2\nthree",)]

    @pytest.mark.parametrize(
        ("statement", "why"),
        [
            ("delete from block", "its row is gone"),
            ('update block set "limit" = 3', "only their hash was kept"),
            ("delete from blocks_agents", "only --adopt"),
            ("update block set id = 'block-9'", "nothing is recorded"),
        ],
    )
    def test_says_what_cannot_be_known(self, kept: BlockRig, statement: str, why: str) -> None:
        kept.sql(
            "delete from blocks_agents where agent_id = 'agent-a'" if "id = 'block-9'" in statement else "select 1"
        )
        kept.sql("alter table blocks_agents drop constraint if exists blocks_agents_block_id_fkey")
        kept.sql(statement)
        done = run_json("reconcile", "--restore", *WHO, code=1)
        assert any(why in one["why"] for one in done["outcomes"])

    def test_content_that_was_not_kept_is_not_guessed(self, recorded: BlockRig) -> None:
        recorded.sql("update block set value = 'evil'")
        done = run_json("reconcile", "--restore", *WHO, code=1)
        assert "was not kept" in done["outcomes"][0]["why"]
        assert recorded.sql("select value from block") == [("evil",)]

    def test_a_forged_diff_is_not_written_back(self, kept: BlockRig) -> None:
        kept.sql("update block set value = 'evil'")
        kept.sql("update phionyx_envelope set body = replace(body, '+one', '+won') where position = 0")
        done = run_json("reconcile", "--restore", *WHO, code=1)
        assert "was not kept" in done["outcomes"][0]["why"]

    def test_a_cleared_block_is_known_to_be_empty(self, recorded: BlockRig) -> None:
        with recorded.armed(recorded.runtime("plain")):
            recorded.set("block-1", value="")
        recorded.seal()
        recorded.sql("update block set value = 'evil'")
        run_json("reconcile", "--restore", *WHO)
        assert recorded.sql("select value from block") == [("",)]
        assert valid(recorded)


class TestUse:
    def test_wrong_use_is_told(self, recorded: BlockRig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert "more than one of" in error_of("reconcile", "--adopt", "--restore", *WHO)
        assert "--name is missing" in error_of("reconcile", "--adopt", "--reason", "x", "--yes")
        assert "--reason is missing" in error_of("reconcile", "--adopt", "--name", "x\ny", "--name", "x", "--yes")
        assert "there is no block" in error_of("reconcile", "block-7")
        assert "there is no block" in error_of("reconcile", "block\x00")
        assert run_json("reconcile", "--adopt", "--name", "x", "--reason", "y", code=2)["error"] == "--json cannot ask"
        monkeypatch.delenv("PHIONYX_LETTA_SIGNING_KEY")
        assert "no signing key" in error_of("reconcile")

    def test_a_ledger_without_letta_has_no_blocks(self, database: Path, rig: BlockRig) -> None:
        assert "not the database of a Letta server" in error_of("reconcile", "--ledger", database)
