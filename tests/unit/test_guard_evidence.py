"""What a guarded read compares, against an attacker who owns the database: real PostgreSQL, rows as capture writes them, no Letta.

Of Letta's tables only the columns that are read are here.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator

import pytest
from outbox_rig import Rig, changed, new_key

from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.ledger.lineage import OwnKeys
from phionyx_letta.merkle import MemoryTree, leaf_hash
from phionyx_letta.plugin.attribution import Attribution
from phionyx_letta.plugin.checkpointing import CheckpointPolicy
from phionyx_letta.plugin.evidence import NO_HISTORY, Mismatch, Reader
from phionyx_letta.plugin.logview import LogView
from phionyx_letta.plugin.mutation import BlockColumns, history_change, prompt_change, prompt_digest
from phionyx_letta.plugin.sealer import Sealer
from phionyx_letta.plugin.stored import stored_history
from phionyx_letta.plugin.watch import open_view

TABLES = """
create table block (id text primary key, value text, label text, description text, "limit" int, read_only bool);
create table messages (id text primary key, content json, text text);
create table block_history (id text primary key, block_id text, sequence_number int, value text, label text, description text,
    "limit" int, metadata_ json, actor_type text, actor_id text, organization_id text, is_deleted bool default false,
    _created_by_id text, created_at timestamptz default now())
"""
B = "block-b"


class Guarded(Rig):
    """Letta's rows beside the ledger, and a process that reads them guarded."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        for statement in TABLES.split(";"):
            self.sql(statement)
        self.outside: Checkpoint | None = None
        self.restart()

    def restart(self) -> None:
        with self.ledger.engine.connect() as connection:
            self.view = LogView(OwnKeys(connection, self.key.signer).verifies)
        public = [self.key.signer.public_key_hex]  # type: ignore[attr-defined]
        open_view(self.view, self.ledger, self.outside, "test/log", public)
        self.reader = Reader(self.view, self.key.outbox, lambda: self.outside)

    def store(self, value: str | None) -> int:
        """A write of Letta's: the row and its evidence in one transaction; the id of the row in the outbox."""
        number = self.write(B, value)
        self.set(value)
        return number

    def set(self, value: str | None) -> None:
        """As with psql: the row alone."""
        self.sql("delete from block")
        if value is not None:
            self.sql("insert into block values (%s, %s, 'human', null, 5000, false)", B, value)

    def publish(self) -> None:
        """The newest checkpoint is brought outside."""
        bodies = [row[0] for row in self.sql("select body from phionyx_envelope order by seq")]
        self.outside = Checkpoint("test/log", len(bodies), MemoryTree(leaf_hash(one.encode()) for one in bodies).root())

    def read(
        self, loaded: str | None = None, histories: tuple[str, ...] = (), since: float | None = None
    ) -> list[Mismatch]:
        """Read the block; ``loaded`` is the value that was loaded, if it is not the one that stands there."""
        [(value,)] = self.sql("select value from block where id = %s", B)
        state = BlockColumns(value if loaded is None else loaded, "human", None, 5000, False).digest()
        with self.ledger.engine.connect() as connection:
            since = time.monotonic() if since is None else since
            return self.reader.check(connection, {B: state}, histories, since=since)

    def wrong(self) -> str:
        """What is wrong with a read; that something is, is part of the question."""
        [found] = self.read()
        return found.what


@pytest.fixture
def rig(empty_database: str) -> Iterator[Guarded]:
    rig = Guarded(empty_database)
    yield rig
    rig.close()


def test_what_waits_and_what_is_sealed_is_served(rig: Guarded) -> None:
    for value in ("one", "two", "three"):
        rig.store(value)
        assert rig.read() == []
    rig.seal()
    assert rig.read() == []
    rig.store("four")
    rig.restart()
    assert rig.read() == []


@pytest.mark.parametrize("sealed", [True, False])
def test_an_edited_value_names_both_hashes(rig: Guarded, sealed: bool) -> None:
    rig.store("one")
    if sealed:
        rig.seal()
    rig.set("forged")
    [found] = rig.read()
    expected = changed(B, None, "one")["diff"]["after_hash"], changed(B, None, "forged")["diff"]["after_hash"]
    assert (found.block_id, found.recorded, found.found) == (B, *expected)


def test_an_old_state_is_refused_though_it_was_genuine(rig: Guarded) -> None:
    for value in ("one", "two"):
        rig.store(value)
    rig.set("one")
    assert rig.read()
    rig.seal()
    assert rig.read()
    rig.restart()
    assert rig.read()


def test_a_row_with_no_record_is_refused(rig: Guarded) -> None:
    rig.set("from nowhere")
    assert rig.wrong() == "nothing is recorded of it"


class TestRowsOfTheOutbox:
    def test_a_forged_one_counts_for_nothing(self, rig: Guarded) -> None:
        rig.store("one")
        payload, mac = rig.row(changed(B, "one", "forged"))
        rig.put((payload, "00" * 32))
        rig.put((payload.replace("human", "hUman"), mac))
        assert rig.read() == []
        rig.set("forged")
        assert rig.read()

    def test_a_sealed_one_that_is_put_back_counts_for_nothing(self, rig: Guarded) -> None:
        rig.store("one")
        old = rig.sql("select payload, mac from phionyx_outbox")[0]
        for value in ("", "one", "two"):  # so that the old one would even follow from what is there
            rig.store(value)
        rig.store("")
        rig.seal()
        rig.put(old)
        rig.set("one")
        assert rig.wrong() == "its value is not what was recorded"
        rig.restart()
        assert rig.wrong() == "its value is not what was recorded"

    def test_a_copy_of_one_that_waits_counts_once(self, rig: Guarded) -> None:
        rig.store("one")
        old = rig.sql("select payload, mac from phionyx_outbox")[0]
        rig.store("two")
        rig.put(old)
        assert rig.read() == []
        rig.set("one")
        assert rig.read()

    def test_those_that_were_put_in_another_order_do_not_follow_each_other(self, rig: Guarded) -> None:
        first = rig.store("one")
        rig.store("two")
        rig.sql("update phionyx_outbox set id = default where id = %s", first)
        rig.set("one")
        assert rig.wrong() == "writes that wait to be sealed do not follow each other"

    def test_one_that_was_marked_as_refused_still_counts(self, rig: Guarded) -> None:
        rig.store("one")
        rig.seal()
        rig.store("two")
        rig.sql("update phionyx_outbox set refused = 'so there'")
        assert rig.read() == []
        rig.set("one")
        assert rig.read()

    def test_one_that_is_gone_was_seen_and_is_missed(self, rig: Guarded) -> None:
        rig.store("one")
        rig.seal()
        rig.store("two")
        assert rig.read() == []
        rig.sql("delete from phionyx_outbox")
        rig.set("one")
        assert "neither in the outbox nor in the log" in rig.wrong()

    def test_another_hosts_key_is_not_believed_until_its_row_is_sealed_by_a_trusted_one(self, rig: Guarded) -> None:
        rig.store("one")
        other = new_key()
        rig.put(other.outbox.seal(changed(B, "one", "two")))
        rig.set("two")
        assert rig.read()


class TestTheLog:
    def test_a_database_that_was_set_back_is_refused_by_who_saw_it_and_after_a_restart(self, rig: Guarded) -> None:
        rig.store("one")
        rig.seal()
        rig.sql("create table kept as select * from phionyx_envelope")
        rig.store("two")
        rig.seal()
        rig.publish()
        assert rig.read() == []
        for table in ("phionyx_envelope", "phionyx_outbox", "phionyx_chain", "phionyx_block", "phionyx_log"):
            rig.sql(f"delete from {table}")
        rig.sql("insert into phionyx_envelope select * from kept")
        rig.set("one")
        assert "its end was cut, or the database was set back" in rig.wrong()
        rig.restart()
        assert "its end was cut, or the database was set back" in rig.wrong()

    def test_and_so_is_one_whose_agents_wrote_on(self, rig: Guarded) -> None:
        rig.store("one")
        rig.seal()
        rig.store("two")
        rig.seal()
        rig.publish()
        assert rig.read() == []
        rig.sql("delete from phionyx_envelope where seq = 1")
        rig.sql("delete from phionyx_block")
        rig.sql("delete from phionyx_log")
        rig.sql("update phionyx_chain set head = (select current_hash from phionyx_envelope), length = 1")
        rig.values[B] = "one"
        for value in ("other", "another"):
            rig.store(value)
        rig.seal_afresh()
        assert rig.read()
        rig.restart()
        assert "are not those of a checkpoint from outside" in rig.wrong()

    def test_an_envelope_that_was_edited_in_place_shows_at_the_start(self, rig: Guarded) -> None:
        rig.store("one")
        rig.seal()
        rig.publish()
        rig.sql("update phionyx_envelope set body = replace(body, 'human', 'hUman')")
        rig.restart()
        assert "not those of a checkpoint" in rig.wrong()

    def test_a_forged_envelope_never_comes_under_a_checkpoint_that_makes_it_believed(self, rig: Guarded) -> None:
        public = rig.key.signer.public_key_hex  # type: ignore[attr-defined]
        rig.sealer = Sealer(rig.ledger, rig.key, checkpoints=CheckpointPolicy("test/log", public))
        rig.store("one")
        signed = [rig.seal().checkpoint]
        [(body,)] = rig.sql("select body from phionyx_envelope")
        forged = json.loads(body)
        evil = BlockColumns("evil", "human", None, 5000, False)
        forged["mutation"]["diff"]["after_hash"] = "sha256:" + hashlib.sha256(b"evil").hexdigest()
        forged["subject"]["metadata"]["letta"].update(state=evil.digest(), nonce="ab" * 16)
        line = json.dumps(forged, sort_keys=True, separators=(",", ":"))
        rig.sql(
            "insert into phionyx_envelope (seq, trace_id, position, current_hash, turn_index, at, block_id, block_label, kind, body,"
            " leaf) select 1, 'x', 0, 'x', 0, at, block_id, block_label, kind, %s, %s from phionyx_envelope",
            line,
            leaf_hash(line.encode()),
        )
        rig.write("another", "genuine")
        signed.append(rig.seal().checkpoint)
        rig.outside = [one for one in signed if one is not None][-1][0]
        rig.restart()
        assert rig.read() == []
        rig.set("evil")
        assert rig.wrong() == "its value is not what was recorded"

    def test_a_copy_of_an_old_envelope_at_the_end_says_nothing(self, rig: Guarded) -> None:
        for value in ("one", "two"):
            rig.store(value)
        rig.seal()
        assert rig.read() == []
        rig.sql("alter table phionyx_envelope drop constraint phionyx_envelope_current_hash_key")
        rig.sql(
            "insert into phionyx_envelope (seq, trace_id, position, current_hash, turn_index, at, block_id, block_label, kind, body,"
            " leaf) select 2, trace_id, 7, current_hash, turn_index, at, block_id, block_label, kind, body, leaf"
            " from phionyx_envelope where seq = 0"
        )
        assert rig.read() == []
        rig.set("one")
        assert rig.read()
        rig.restart()
        assert rig.wrong() == "its value is not what was recorded"


def test_who_loaded_before_the_newest_write_is_served_what_was_true_then(rig: Guarded) -> None:
    rig.store("one")
    rig.seal()
    assert rig.read() == []
    began = time.monotonic()
    rig.store("two")
    assert rig.read(loaded="one", since=began) == []
    rig.seal()
    assert rig.read(loaded="one", since=began) == []
    time.sleep(0.01)
    assert rig.read(loaded="one"), "a load that begins now cannot give it"
    assert rig.read(loaded="zero", since=began)


def test_an_older_snapshot_than_what_is_known_is_taken_again(rig: Guarded) -> None:
    rig.store("one")
    rig.seal()
    with rig.ledger.engine.connect().execution_options(isolation_level="REPEATABLE READ") as old:
        state = BlockColumns("one", "human", None, 5000, False).digest()
        assert rig.reader.check(old, {B: state}, since=time.monotonic()) == []
        rig.store("two")
        rig.seal()
        assert rig.read() == []
        found = rig.reader.check(old, {B: state}, since=time.monotonic())
    assert found, "a snapshot that stays old is never taken for a rollback of this block, and never served"


class TestCheckpointsOfABlock:
    @pytest.fixture
    def kept(self, rig: Guarded) -> Guarded:
        for number, value in enumerate(("one", "two", "three"), 1):
            rig.store(value)
            rig.sql(
                'insert into block_history (id, block_id, sequence_number, value, label, "limit", actor_type, actor_id)'
                " values (%s, %s, %s, %s, 'human', 5000, 'LettaUser', 'user-1')",
                f"h{number}",
                B,
                number,
                value,
            )
            with rig.ledger.engine.connect() as connection:
                digest = stored_history(connection, B)
            rig.put(rig.row(history_change(B, "human", digest, Attribution(), organization_id="org-1")))
        rig.seal()
        rig.sql("insert into block_history (id, block_id, sequence_number, value) values ('other', 'block-c', 1, 'x')")
        assert rig.read(histories=(B,)) == []
        return rig

    @pytest.mark.parametrize(
        "edit",
        [
            "update block_history set value = 'forged' where id = 'h1'",
            "update block_history set actor_id = 'user-2' where id = 'h1'",
            "update block_history set created_at = created_at - interval '1 day' where id = 'h2'",
            "update block_history set metadata_ = '{\"a\": 1}' where id = 'h2'",
            "delete from block_history where id = 'h2'",
            "delete from block_history where block_id = 'block-b'",
            "update block_history set sequence_number = 4 - sequence_number where block_id = 'block-b'",
            "insert into block_history (id, block_id, sequence_number, value) values ('h9', 'block-b', 9, 'x')",
            "update block_history set block_id = 'block-b', sequence_number = 4 where id = 'other'",
        ],
    )
    def test_any_edit_of_a_row_or_of_their_set_is_found(self, kept: Guarded, edit: str) -> None:
        kept.sql(edit)
        [found] = kept.read(histories=(B,))
        assert found.what == "its checkpoints are not those that were recorded"
        assert kept.read() == [], "a read that does not use them is served"

    def test_a_block_without_checkpoints_has_none(self, rig: Guarded) -> None:
        rig.store("one")
        assert rig.read(histories=(B,)) == []
        rig.sql("insert into block_history (id, block_id, sequence_number, value) values ('h', %s, 1, 'x')", B)
        [found] = rig.read(histories=(B,))
        assert found.recorded == NO_HISTORY


class TestSystemMessages:
    def stored(self, rig: Guarded, said: str) -> str:
        digest = prompt_digest([{"type": "text", "text": said, "signature": None}])
        rig.put(rig.row(prompt_change("message-1", digest, "agent-1", Attribution(), organization_id="org-1")))
        rig.sql("delete from messages")
        rig.sql(
            "insert into messages values ('message-1', json_build_array(json_build_object('type','text','text',%s::text)))",
            said,
        )
        return digest

    def read(self, rig: Guarded, digest: str, since: float | None = None) -> list[Mismatch]:
        with rig.ledger.engine.connect() as connection:
            since = time.monotonic() if since is None else since
            return rig.reader.check(connection, {"message-1": digest}, since=since)

    def test_the_newest_is_served_and_another_is_not(self, rig: Guarded) -> None:
        old = self.stored(rig, "you are Ann")
        rig.seal()
        assert self.read(rig, old) == []
        began = time.monotonic()
        new = self.stored(rig, "you are Bob")
        assert self.read(rig, new) == []
        assert self.read(rig, old, since=began) == [], "it was loaded before"
        assert self.read(rig, prompt_digest([{"type": "text", "text": "you are Eve"}]))
        rig.seal()
        assert self.read(rig, new) == []
        assert self.read(rig, old)

    def test_one_with_no_record_has_none(self, rig: Guarded) -> None:
        [found] = self.read(rig, "sha256:" + "00" * 32)
        assert (found.recorded, found.what) == (None, "nothing is recorded of it")

    def test_a_text_in_the_old_column_counts_where_there_are_no_parts(self) -> None:
        parts = [{"type": "text", "text": "a\x00b"}]
        assert prompt_digest([], "a") == prompt_digest(None, "a") == prompt_digest([{"type": "text", "text": "a"}], "b")
        assert prompt_digest(parts) == prompt_digest([{"type": "text", "text": "ab"}])
