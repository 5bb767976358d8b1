"""An attacker who owns the database, but not the signing key: nothing of his is sealed, and nothing genuine is held up.

The outbox is a real one in PostgreSQL; the attacker is plain SQL.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from outbox_rig import Rig, attached, changed, new_key, payload_of, verifier_of

from phionyx_letta.envelope import canonical_json, envelope_line
from phionyx_letta.ledger.audit import verify_lines
from phionyx_letta.ledger.audit_sql import verify_ledger
from phionyx_letta.plugin import sealer as sealing
from phionyx_letta.plugin.baseline import record_baseline
from phionyx_letta.plugin.sealing_process import seal_until
from phionyx_letta.settings import Settings

pytestmark = pytest.mark.slow  # with PostgreSQL, minutes in all

LETTAS_TABLES = """
create table block (id text primary key, organization_id text, value text, label text, description text,
                    "limit" integer, read_only boolean);
create table blocks_agents (agent_id text, block_id text);
create table block_history (id text, block_id text, sequence_number int, value text, label text, description text,
                            "limit" int, metadata_ json, actor_type text, actor_id text, organization_id text,
                            is_deleted boolean, _created_by_id text, created_at timestamptz)
"""


@pytest.fixture
def rig(empty_database: str) -> Iterator[Rig]:
    rig = Rig(empty_database)
    yield rig
    rig.close()


def only_the_genuine_are_sealed(rig: Rig, *writes: str) -> bool:
    """The block `b` went through these values and the whole ledger verifies."""
    states = [changed("b", None, value)["diff"]["after_hash"] for value in writes]
    return rig.after_hashes("b") == states and rig.findings() == []


def forged(rig: Rig, **fields: Any) -> str:
    """A payload as the plugin writes it, made by somebody without the key."""
    return canonical_json({**payload_of(rig.row(changed("b", "one", "evil"))), **fields})


GARBAGE: dict[str, str] = {
    "empty": "",
    "text": "let me in",
    "not closed": '{"v":1',
    "a list": "[1,2,3]",
    "a number": "7",
    "null": "null",
    "an empty object": "{}",
    "deeply nested": "[" * 100_000,
    "a number of 10 000 digits": "9" * 10_000,
    "not ASCII": '{"v":1,"block_id":"Ünïcödé \U0001f600"}',
    "a lone surrogate, escaped": '{"v":1,"block_id":"\\ud800"}',
    "NUL, escaped": '{"v":1,"block_id":"\\u0000"}',
    "SQL": "'); drop table phionyx_outbox; --",
}


class TestARowInsertedByHandIsRefused:
    def test_garbage(self, rig: Rig) -> None:
        rig.write("b", "one")
        garbage = [rig.put((payload, mac)) for payload in GARBAGE.values() for mac in ("", "00" * 32, "ü" * 64)]
        rig.write("b", "two")
        report = rig.seal()
        assert (report.sealed, report.refused) == (2, len(garbage))
        assert [row[0] for row in rig.outbox() if "not one this version" in row[1]] == garbage
        assert only_the_genuine_are_sealed(rig, "one", "two")

    @pytest.mark.parametrize(
        "field", ["v", "nonce", "key_id", "at", "kind", "event", "block_id", "block_label", "producer", "diff", "letta"]
    )
    def test_fields_of_another_type(self, rig: Rig, field: str) -> None:
        values = [None, 7, True, [], {}, ["x"], {"x": 1}, "\0", "\ud800", "x" * 10_000, 2**70, -1.5e300]
        for value in values:
            rig.put((forged(rig, **{field: value}), "00" * 32))
        rig.write("b", "one")
        report = rig.seal()
        assert (report.sealed, report.refused) == (1, len(values))
        assert only_the_genuine_are_sealed(rig, "one")

    def test_valid_fields_with_a_wrong_mac(self, rig: Rig) -> None:
        rig.write("b", "one")
        evil = rig.put((forged(rig), "ab" * 32))
        assert rig.seal().refused == 1
        assert "MAC does not match" in rig.refusals()[evil]
        assert only_the_genuine_are_sealed(rig, "one")

    def test_a_mac_of_another_key_under_our_keys_name(self, rig: Rig) -> None:
        payload = forged(rig)
        evil = rig.put((payload, new_key().outbox.mac(payload)))
        rig.seal()
        assert "MAC does not match" in rig.refusals()[evil]
        assert rig.envelopes() == []

    def test_a_key_nobody_has(self, rig: Rig) -> None:
        stranger = new_key()
        evil = rig.put(stranger.outbox.seal(changed("b", "one", "evil")))
        rig.write("b", "one")
        assert rig.seal().sealed == 1
        assert stranger.outbox.key_id in rig.refusals()[evil]
        assert only_the_genuine_are_sealed(rig, "one")

    def test_a_mac_in_capitals(self, rig: Rig) -> None:
        payload, mac = rig.row(changed("b", None, "one"))
        rig.put((payload, mac.upper()))
        assert rig.seal().refused == 1

    def test_a_payload_of_another_version(self, rig: Rig) -> None:
        """Even an authentic one: what its fields mean is not known here."""
        for version in (0, 2, 99, "1", 1.5):
            payload = canonical_json({**payload_of(rig.row(changed("b", "one", "future"))), "v": version})
            rig.put((payload, rig.key.outbox.mac(payload)))
        rig.write("b", "one")
        assert rig.seal().sealed == 1
        assert all("not one this version" in reason for reason in rig.refusals().values())
        assert len(rig.refusals()) == 5
        assert only_the_genuine_are_sealed(rig, "one")

    def test_it_is_reported_in_the_log_too(self, rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
        evil = rig.put((forged(rig), "ab" * 32))
        with caplog.at_level(logging.ERROR):
            report = rig.seal()
        assert report.refusals == [message.removeprefix("phionyx-letta: ") for message in caplog.messages]
        assert f"outbox row {evil} was not sealed" in caplog.text

    def test_it_is_not_reported_again_at_every_pass(self, rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
        rig.put((forged(rig), "ab" * 32))
        rig.seal()
        caplog.clear()
        rig.write("b", "one")
        assert rig.seal_afresh().refused == 0
        assert caplog.messages == []


class TestAGenuineRowThatWasChangedIsRefused:
    def test_its_payload(self, rig: Rig) -> None:
        row = rig.write("b", "one")
        rig.sql("update phionyx_outbox set payload = replace(payload, '\"human\"', '\"persona\"')")
        assert rig.seal().refused == 1
        assert "MAC does not match" in rig.refusals()[row]
        assert rig.envelopes() == []

    def test_one_byte_of_white_space(self, rig: Rig) -> None:
        rig.write("b", "one")
        rig.sql("update phionyx_outbox set payload = payload || ' '")
        assert rig.seal().refused == 1

    def test_its_mac(self, rig: Rig) -> None:
        rig.write("b", "one")
        rig.sql("update phionyx_outbox set mac = reverse(mac)")
        assert rig.seal().refused == 1

    def test_macs_that_were_swapped(self, rig: Rig) -> None:
        rig.write("b", "one")
        rig.write("c", "one")
        rig.sql("update phionyx_outbox a set mac = b.mac from phionyx_outbox b where a.id <> b.id")
        report = rig.seal()
        assert (report.sealed, report.refused) == (0, 2)

    def test_payloads_that_were_joined(self, rig: Rig) -> None:
        (first, mac), (second, _) = rig.row(changed("b", None, "one")), rig.row(changed("b", "one", "two"))
        rig.put((first[:-1] + "," + second[1:], mac))
        assert rig.seal().refused == 1

    def test_put_back_as_it_was_it_is_sealed(self, rig: Rig) -> None:
        rig.write("b", "one")
        rig.sql("update phionyx_outbox set mac = reverse(mac)")
        rig.seal()
        rig.sql("update phionyx_outbox set mac = reverse(mac)")
        assert rig.seal_afresh().sealed == 1
        assert only_the_genuine_are_sealed(rig, "one")


class TestACopyIsNotSealedTwice:
    COPY = "insert into phionyx_outbox(payload, mac) select payload, mac from phionyx_outbox where id = %s"

    def test_made_before_the_original_is_sealed(self, rig: Rig) -> None:
        row = rig.write("b", "one")
        rig.sql(self.COPY, row)
        rig.write("b", "two")
        report = rig.seal()
        assert (report.sealed, report.refused) == (2, 1)
        assert "copy" in next(iter(rig.refusals().values()))
        assert only_the_genuine_are_sealed(rig, "one", "two")

    def test_put_back_after_the_original_was_sealed(self, rig: Rig) -> None:
        row = rig.row(changed("b", None, "one"))
        rig.put(row)
        rig.seal()
        copy = rig.put(row)
        assert rig.seal().refused == 1
        assert "copy" in rig.refusals()[copy]
        assert only_the_genuine_are_sealed(rig, "one")

    def test_nor_when_its_mark_is_taken_away_again_and_again(self, rig: Rig) -> None:
        row = rig.row(changed("b", None, "one"))
        for _ in range(3):
            rig.put(row)
        for _ in range(3):
            rig.seal_afresh()
            rig.sql("update phionyx_outbox set refused = null")
        assert only_the_genuine_are_sealed(rig, "one")

    def test_nor_by_another_sealer_that_starts_later(self, rig: Rig) -> None:
        row = rig.row(changed("b", None, "one"))
        rig.put(row)
        rig.seal()
        rig.put(row)
        rig.seal()
        assert rig.seal_afresh().sealed == 0
        assert only_the_genuine_are_sealed(rig, "one")

    def test_a_nonce_that_was_used_cannot_be_used_for_another_payload(self, rig: Rig) -> None:
        """Only the key's holder could make such a row; two with one nonce are never both sealed."""
        fields = payload_of(rig.row(changed("b", None, "one")))
        other = canonical_json({**fields, "block_id": "c"})
        for payload in (canonical_json(fields), other):
            rig.put((payload, rig.key.outbox.mac(payload)))
        report = rig.seal()
        assert (report.sealed, report.refused) == (1, 1)

    def test_a_copy_under_a_lower_number_takes_the_place_of_the_original_once(self, rig: Rig) -> None:
        rig.write("c", "one")  # number 1 is taken by the sequence
        rig.sql("delete from phionyx_outbox")
        row = rig.row(changed("b", None, "one"))
        rig.put(row)
        rig.sql("insert into phionyx_outbox(id, payload, mac) overriding system value values (-5, %s, %s)", *row)
        report = rig.seal()
        assert (report.sealed, report.refused) == (1, 1)
        assert only_the_genuine_are_sealed(rig, "one")


class TestNumbersThatWereTamperedWith:
    FREE = "alter table phionyx_outbox alter column id set generated by default"

    def test_two_writes_of_one_block_in_the_wrong_order_show_in_the_linkage(
        self, rig: Rig, caplog: pytest.LogCaptureFixture
    ) -> None:
        rig.write("b", "one")
        second, third = rig.write("b", "two"), rig.write("b", "three")
        rig.sql(self.FREE)
        for old, new in ((second, 900), (third, second), (900, third)):
            rig.sql("update phionyx_outbox set id = %s where id = %s", new, old)
        with caplog.at_level(logging.ERROR):
            assert rig.seal().sealed == 3
        assert "block b was last recorded as" in caplog.text
        assert {finding["dimension"] for finding in rig.findings()} == {"block_linkage"}
        assert {finding["block_id"] for finding in rig.findings()} == {"b"}

    def test_a_number_that_was_sealed_before_holds_nobody_up(self, rig: Rig) -> None:
        used = rig.write("b", "one")
        rig.seal()
        rig.sql(self.FREE)
        rig.sql("update phionyx_outbox set id = %s where id = %s", used, rig.write("b", "two"))
        rig.write("b", "three")
        assert rig.seal().sealed == 2
        assert rig.outbox() == []
        assert only_the_genuine_are_sealed(rig, "one", "two", "three")

    def test_a_sequence_that_was_set_back_holds_nobody_up(self, rig: Rig) -> None:
        for value in ("one", "two"):
            rig.write("b", value)
        rig.seal()
        rig.sql("alter table phionyx_outbox alter column id restart with 1")
        for value in ("three", "four", "five"):
            rig.write("b", value)
        assert rig.seal().sealed == 3
        assert only_the_genuine_are_sealed(rig, "one", "two", "three", "four", "five")

    def test_the_largest_number_there_is(self, rig: Rig) -> None:
        rig.sql("insert into phionyx_outbox(id, payload, mac) overriding system value values (%s, 'x', '')", 2**63 - 1)
        rig.write("b", "one")
        assert rig.seal().sealed == 1
        assert only_the_genuine_are_sealed(rig, "one")


class TestARowThatWasRemoved:
    def test_shows_at_the_next_write_of_that_block(self, rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
        rig.write("b", "one")
        removed = rig.write("b", "two")
        rig.sql("delete from phionyx_outbox where id = %s", removed)
        rig.write("b", "three")
        with caplog.at_level(logging.ERROR):
            assert rig.seal().sealed == 2
        assert "a change in between was not recorded" in caplog.text
        (finding,) = rig.findings()
        assert finding["dimension"] == "block_linkage"
        assert finding["block_id"] == "b"
        assert finding["expected"] == changed("b", None, "one")["diff"]["after_hash"]
        assert finding["found"] == changed("b", None, "two")["diff"]["after_hash"]

    def test_of_the_blocks_creation_shows_at_once(self, rig: Rig) -> None:
        """The first envelope of a block that does not begin with nothing: the block was not always recorded."""
        rig.sql("delete from phionyx_outbox where id = %s", rig.write("b", "one"))
        rig.write("b", "two")
        rig.seal()
        (envelope,) = rig.envelopes()
        assert envelope["mutation"]["diff"]["before_hash"] == changed("b", None, "one")["diff"]["after_hash"]
        assert envelope["subject"]["metadata"]["letta"]["event"] == "update"


class TestAGenuineRowThatWasMarkedRefused:
    MARK = "update phionyx_outbox set refused = 'so there' where id = %s"

    def test_is_sealed_by_the_next_sealer(self, rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
        row = rig.write("b", "one")
        rig.sql(self.MARK, row)
        assert rig.seal_afresh().sealed == 1
        assert f"outbox row {row} was marked refused but is genuine" in caplog.text
        assert only_the_genuine_are_sealed(rig, "one")

    def test_is_sealed_by_the_sealer_that_runs(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sealing, "REFUSED_INTERVAL", 0.0)
        rig.seal()
        rig.sql(self.MARK, rig.write("b", "one"))
        assert rig.seal().sealed == 1

    def test_is_sealed_though_nothing_else_is_ever_written(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        """The loop of the sealing process: an outbox with refused rows only is not an empty one."""
        monkeypatch.setattr(sealing, "REFUSED_INTERVAL", 0.05)
        stop = threading.Event()
        running = threading.Thread(
            target=seal_until, args=(stop, rig.ledger, rig.key, Settings(baseline="off", poll_ms=5))
        )
        running.start()
        try:
            rig.write("b", "one")
            wait_until(lambda: rig.outbox() == [])
            rig.put_refused(rig.row(changed("b", "one", "two")))
            wait_until(lambda: len(rig.envelopes()) == 2)
        finally:
            stop.set()
            running.join()
        assert only_the_genuine_are_sealed(rig, "one", "two")

    def test_is_found_behind_thousands_of_forged_ones(self, rig: Rig) -> None:
        rig.put_many([("garbage", "")] * 3000)
        assert rig.seal().refused == 3000
        rig.sql(self.MARK, rig.write("b", "one"))
        assert rig.seal_afresh().sealed == 1
        assert only_the_genuine_are_sealed(rig, "one")

    def test_rows_of_one_block_keep_their_order(self, rig: Rig) -> None:
        for value in ("one", "two", "three"):
            rig.write("b", value)
        rig.sql("update phionyx_outbox set refused = 'so there'")
        assert rig.seal_afresh().sealed == 3
        assert only_the_genuine_are_sealed(rig, "one", "two", "three")


class TestGenuineRowsAreNotHeldUp:
    def test_by_thousands_of_forged_ones(self, rig: Rig) -> None:
        rig.write("b", "one")
        rig.put_many([("garbage", "")] * 2000)
        rig.write("b", "two")
        rig.put_many([(forged(rig, nonce=f"{number:032x}"), "00" * 32) for number in range(1000)])
        rig.write("b", "three")
        report = rig.seal()
        assert (report.sealed, report.refused) == (3, 3000)
        assert only_the_genuine_are_sealed(rig, "one", "two", "three")

    def test_by_payloads_of_many_megabytes(self, rig: Rig) -> None:
        """A batch is bounded in bytes too: the sealer never holds a hundred of them at once."""
        rig.write("b", "one")
        rig.sql("insert into phionyx_outbox(payload, mac) select repeat('x', 30000000), '' from generate_series(1, 12)")
        rig.write("b", "two")
        with rig.ledger.writing() as connection:
            rows, more = rig.sealer._rows(connection)
            assert sum(len(row.payload) for row in rows) < 100_000_000
            assert more
        report = rig.seal()
        assert (report.sealed, report.refused) == (2, 12)
        assert only_the_genuine_are_sealed(rig, "one", "two")

    def test_by_a_worker_from_the_future_with_a_key_of_the_attackers(self, rig: Rig) -> None:
        """Rows wait for the host that has their key while that host lives: a forged sign of life must not last."""
        stranger = new_key()
        rig.see_worker(stranger.outbox.key_id, "now() + interval '100 years'")
        rig.put(stranger.outbox.seal(changed("b", "one", "evil")))
        rig.write("b", "one")
        assert rig.seal().sealed == 1
        assert only_the_genuine_are_sealed(rig, "one")

    def test_by_an_authentic_row_no_envelope_can_be_built_from(self, rig: Rig) -> None:
        """A fault of ours, as a future one may be; each of these once held up every row behind it."""
        good = payload_of(rig.row(changed("b", "one", "two")))
        bad = [
            {"kind": "nonsense"},
            {"at": "yesterday"},
            {"diff": {"before_hash": 1}},
            {"diff": {**good["diff"], "unknown": 1}},
            {"letta": []},
            {"letta": {"run_id": ["r"]}},
            {"block_id": "\x00"},
            {"block_label": "\ud800"},
            {"agent_id": "a\x00b"},
            {"organization_id": 7},
            {"event": "attach", "diff": None},
            {"event": "baseline", "agents": 7},
            {"audit": {"x": 1}, "kind": "consolidate"},
            {"parent": 7},
            {"reason": []},
        ]
        rig.write("b", "one")
        for number, fields in enumerate(bad):
            payload = canonical_json({**good, "nonce": f"{number:032x}", **fields})
            rig.put((payload, rig.key.outbox.mac(payload)))
        rig.write("b", "two")
        report = rig.seal()
        assert (report.sealed, report.refused) == (2, len(bad)), report.refusals
        assert only_the_genuine_are_sealed(rig, "one", "two")

    def test_by_a_chain_whose_head_was_tampered_with(self, rig: Rig) -> None:
        """Its own rows cannot be sealed and say why; those of other chains are."""
        rig.write("b", "one")
        rig.write("c", "one")
        rig.seal()
        rig.sql("delete from phionyx_chain where trace_id = 'b'")
        held = rig.write("b", "two")
        rig.write("c", "two")
        report = rig.seal()
        assert (report.sealed, report.refused) == (1, 1)
        assert "unique" in rig.refusals()[held]
        assert rig.findings() == []

    def test_the_baseline_is_taken_though_forged_rows_wait(self, rig: Rig) -> None:
        for statement in LETTAS_TABLES.split(";"):
            rig.sql(statement)
        rig.sql("insert into block values ('old', 'org-1', 'value', 'human', null, 5000, false)")
        for field in ("block_id", "nonce", "key_id"):
            rig.put((forged(rig, **{field: ["x"]}), "00" * 32))
        while record_baseline(rig.ledger, rig.key.outbox, "test"):
            rig.seal()
        assert [e["subject"]["metadata"]["letta"]["event"] for e in rig.envelopes()] == ["baseline"]

    def test_a_forged_row_about_a_block_does_not_keep_its_baseline_out(self, rig: Rig) -> None:
        for statement in LETTAS_TABLES.split(";"):
            rig.sql(statement)
        rig.sql("insert into block values ('b', 'org-1', 'value', 'human', null, 5000, false)")
        rig.put((forged(rig), "00" * 32))
        stop = threading.Event()
        running = threading.Thread(target=seal_until, args=(stop, rig.ledger, rig.key, Settings(poll_ms=5)))
        running.start()
        try:
            wait_until(lambda: len(rig.envelopes()) == 1)
        finally:
            stop.set()
            running.join()
        assert [e["subject"]["metadata"]["letta"]["event"] for e in rig.envelopes()] == ["baseline"]


class TestTheLedgerAfterwards:
    def test_every_attack_at_once_leaves_one_valid_ledger(self, rig: Rig) -> None:
        genuine = [str(number) for number in range(60)]
        for number, value in enumerate(genuine):
            rig.write("b", value)
            rig.put((list(GARBAGE.values())[number % len(GARBAGE)], "00" * 32))
            rig.put((forged(rig, nonce=f"{number:032x}"), f"{number:064x}"))
            rig.sql(
                "insert into phionyx_outbox(payload, mac) select payload, mac from phionyx_outbox order by id limit 1"
            )
            if number % 7 == 0:
                rig.put(rig.row(attached("b", "agent-1")))
                rig.put(rig.row(attached("b", "agent-1", "detach")))
            if number % 11 == 0:
                rig.seal()
                rig.sql("update phionyx_outbox set refused = null")
        rig.seal()
        updates = [e for e in rig.envelopes() if e["subject"]["metadata"]["letta"]["event"] in ("create", "update")]
        assert [e["mutation"]["diff"]["after_hash"] for e in updates] == [
            changed("b", None, value)["diff"]["after_hash"] for value in genuine
        ]
        assert rig.findings() == []
        assert len({json.dumps(e, sort_keys=True) for e in rig.envelopes()}) == len(rig.envelopes())


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    waiting = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        waiting.wait(0.02)
    assert condition()


def test_a_row_sealed_twice_by_clearing_the_ledgers_memory_of_it_shows_in_every_verification(
    rig: Rig, tmp_path: Path
) -> None:
    """The columns `nonce` and `outbox_id` are the attacker's; the nonce in the signed envelope is not."""
    rig.put(rig.row(changed("b", None, "A")))
    copied = rig.row(changed("b", "A", "B"))
    rig.put(copied)
    rig.put(rig.row(changed("b", "B", "A")))
    rig.seal()
    rig.sql("update phionyx_envelope set nonce = null, outbox_id = null")
    rig.put(copied)
    rig.seal()
    assert len(rig.envelopes()) == 4, "the sealer cannot know"
    in_database = verify_ledger(rig.ledger, verifier=verifier_of(rig.key))
    assert in_database.verdict == "failed"
    exported = tmp_path / "chains.jsonl"
    exported.write_text("".join(envelope_line(envelope) + "\n" for envelope in rig.envelopes()))
    with exported.open("rb") as lines:
        report = verify_lines(lines, verifier=verifier_of(rig.key))
    assert report.verdict == "failed"
    assert "sealed twice" in str(report.findings)


def test_a_damaged_list_of_agents_holds_up_no_sealing(rig: Rig) -> None:
    rig.write("b1", "one")
    rig.seal()
    for damage in ("[" * 100_000, '{"x": 1}', "[1]", "no json"):
        rig.sql("update phionyx_block set agents = %s where block_id = 'b1'", damage)
        rig.write("b1", f"after {damage[:3]}")
        rig.write("b2", f"after {damage[:3]}")
        assert rig.seal().sealed == 2
    assert rig.findings() == []


class TestRecordedStates:
    """`phionyx_block` says what an attach repeats and which chain an unattributed write goes to: it is authenticated."""

    @pytest.fixture
    def recorded(self, rig: Rig) -> Rig:
        rig.put(rig.row(attached("b", "agent-1")))
        rig.write("b", "one")
        rig.seal()
        return rig

    @pytest.mark.parametrize(
        "lie",
        [
            "after_hash = 'sha256:' || repeat('0', 64)",
            "after_hash = null",
            "after_size = 4711",
            "chars = 4711",
            "label = 'other'",
            "agents = '[\"agent-9\"]'",
            "seq = 0",
            "mac = null",
            "mac = 'é'",
            "mac = repeat('0', 64)",
            "block_id = 'c'",
        ],
    )
    def test_a_changed_state_is_never_signed(self, recorded: Rig, lie: str, caplog: pytest.LogCaptureFixture) -> None:
        rig = recorded
        rig.sql(f"update phionyx_block set {lie}")
        block = "c" if lie.startswith("block_id") else "b"
        rig.put(rig.row(attached(block, "agent-2")))
        rig.put(rig.row(changed(block, "two", "three")))
        assert rig.seal_afresh().sealed == 2
        attach, write = rig.envelopes()[-2:]
        assert attach["subject"]["metadata"]["letta"]["content"] == "not recorded"
        assert attach["mutation"]["diff"]["after_size_bytes"] == 0
        assert write["subject"]["trace_id"] == block, "whose block it is cannot be known"
        assert "is not used" in caplog.text

    def test_the_row_of_another_block_is_no_state(self, recorded: Rig) -> None:
        rig = recorded
        rig.write("c", "other")
        rig.seal()
        rig.sql(
            "update phionyx_block b set after_hash = c.after_hash, mac = c.mac from phionyx_block c"
            " where b.block_id = 'b' and c.block_id = 'c'"
        )
        rig.put(rig.row(attached("b", "agent-2")))
        rig.seal_afresh()
        assert rig.envelopes()[-1]["subject"]["metadata"]["letta"]["content"] == "not recorded"

    def test_an_old_state_put_back_shows_in_the_linkage(self, recorded: Rig) -> None:
        rig = recorded
        (old,) = rig.sql("select * from phionyx_block")
        rig.write("b", "two")
        rig.seal()
        rig.sql("delete from phionyx_block")
        rig.sql(f"insert into phionyx_block values ({', '.join(['%s'] * len(old))})", *old)
        rig.put(rig.row(attached("b", "agent-2")))
        rig.seal_afresh()
        report = verify_ledger(rig.ledger, verifier=verifier_of(rig.key))
        assert report.dimensions["block_linkage"] == "failed"

    def test_what_another_key_recorded_is_left_open_and_verifies(self, recorded: Rig) -> None:
        other = Rig(recorded.url)
        try:
            other.put(other.row(attached("b", "agent-2")))
            other.put(other.row(changed("b", "one", "two")))
            assert other.seal().sealed == 2
            report = verify_ledger(recorded.ledger, verifier=verifier_of(recorded.key, other.key))
        finally:
            other.close()
        assert report.verdict == "valid", report.findings
        assert recorded.envelopes()[-2]["subject"]["metadata"]["letta"]["content"] == "not recorded"

    def test_after_an_open_attach_the_ledger_verifies(self, recorded: Rig) -> None:
        rig = recorded
        rig.sql("update phionyx_block set after_size = 4711")
        rig.put(rig.row(attached("b", "agent-2")))
        rig.seal_afresh()
        assert verify_ledger(rig.ledger, verifier=verifier_of(rig.key)).verdict == "valid"


def test_a_changed_count_of_turns_shows(rig: Rig) -> None:
    rig.write("b", "one")
    rig.seal()
    rig.sql("update phionyx_chain set turns = 7")
    rig.write("b", "two")
    rig.seal_afresh()
    report = verify_ledger(rig.ledger, verifier=verifier_of(rig.key))
    assert report.verdict == "failed"
    assert "skips turns" in str(report.findings)


def test_a_repeated_key_in_a_stored_envelope_is_refused(rig: Rig) -> None:
    """Readers of JSON differ in which of the two they take."""
    rig.write("b", "one")
    rig.seal()
    body = rig.sql("select body from phionyx_envelope")[0][0]
    for lie in (
        body.replace('"producer":', '"producer":"somebody","producer":'),
        body.replace('"signature":', '"signature":"unsigned","signature":'),
    ):
        assert lie != body
        rig.sql("update phionyx_envelope set body = %s", lie)
        for verifier in (verifier_of(rig.key), None):
            report = verify_ledger(rig.ledger, verifier=verifier)
            assert report.verdict == "failed"
            assert "repeats a key" in str(report.findings)
