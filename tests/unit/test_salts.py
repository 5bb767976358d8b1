"""Salted commitments: nothing can be guessed from the ledger, everything still links and verifies, and forgetting is for good."""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
from collections.abc import Iterator

import pytest
from block_rig import Block, BlockRig
from outbox_rig import new_key, verifier_of
from sqlalchemy import update

from phionyx_letta import canonical_json
from phionyx_letta.diff import content_hash
from phionyx_letta.errors import EvidenceRefused, SettingsError
from phionyx_letta.ledger.audit_sql import verify_ledger
from phionyx_letta.ledger.salts import Salt, SaltKey, read_salts
from phionyx_letta.ledger.statements import rotate
from phionyx_letta.plugin.mutation import BlockColumns
from phionyx_letta.plugin.sealer import Sealer
from phionyx_letta.settings import load_settings

A, B = "agent-a", "agent-b"
PIN = "4711"


@pytest.fixture
def rig(empty_database: str) -> Iterator[BlockRig]:
    rig = BlockRig(empty_database)
    yield rig
    rig.close()


def valid(rig: BlockRig) -> bool:
    """The whole ledger is valid, its linkage and its tables included."""
    report = verify_ledger(rig.ledger, verifier=verifier_of(rig.key))
    assert report.findings == [], report.findings
    assert report.dimensions["block_linkage"] == "ok"
    return report.verdict == "valid"


def guessed(text: str, salts: list[bytes] | None = None, *, exhaustive: bool = False) -> set[str]:
    """The 4-digit values some hash in the text is one of, tried bare, under each salt, and as the state of a plain block."""
    stored = {bytes.fromhex(one) for one in re.findall(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", text)}
    found = set()
    for value in {f"{number:04}" for number in range(0, 10_000, 1 if exhaustive else 97)} | {PIN, "0815"}:
        bare = BlockColumns(value, "human", limit=5000)
        tries = [hashlib.sha256(value.encode()).digest(), bytes.fromhex(bare.digest()[7:])]
        tries += [bytes.fromhex(BlockColumns("x", "human", description=value, limit=5000).digest()[7:])]
        for salt in salts or []:
            tries += [hmac.digest(salt, value.encode(), "sha256"), bytes.fromhex(bare.digest(salt=salt)[7:])]
        if stored.intersection(tries):
            found.add(value)
    return found


def opened_salts(rig: BlockRig) -> list[bytes]:
    """What a thief of the database and of the signing key has."""
    key = SaltKey.of(rig.key.signer)
    rows = rig.sql("select block_id, name, wrapped from phionyx_salt where wrapped is not null")
    return [salt.value for row in rows if (salt := key.opened(row[0], row[1], bytes(row[2])))]


class TestGuessing:
    def test_a_plain_ledger_can_be_guessed(self, rig: BlockRig) -> None:
        """The control: the same search finds the value where hashes are bare."""
        with rig.armed(rig.runtime("plain")):
            rig.create("block-1", PIN, A)
        rig.seal()
        assert guessed(rig.stored_text()) == {PIN}

    def test_of_a_live_block_needs_the_database_and_the_key(self, rig: BlockRig) -> None:
        with rig.armed():
            rig.create("block-1", PIN, A)
            rig.set("block-1", description="0815")
        assert guessed(rig.stored_text()) == set()  # while it waits
        rig.seal()
        text = rig.stored_text()
        assert guessed(text) == set()
        assert guessed("\n".join(canonical_json(e) for e in rig.envelopes())) == set()
        assert guessed(text, opened_salts(rig)) == {PIN, "0815"}

    @pytest.mark.parametrize("how", ["detach", "delete"])
    def test_of_a_forgotten_block_finds_nothing_even_with_the_key(self, rig: BlockRig, how: str) -> None:
        with rig.armed():
            rig.create("block-1", PIN, A)
            rig.set("block-1", value="0815")
            rig.set("block-1", label="pin")
            rig.seal()
            assert guessed(rig.stored_text(), opened_salts(rig)) == {PIN, "0815"}
            rig.detach("block-1", A, "explicit_user_request") if how == "detach" else rig.delete("block-1")
        before = opened_salts(rig)
        assert guessed(rig.stored_text(), before) == {PIN, "0815"}  # the forgetting waits to be sealed
        rig.seal()
        assert opened_salts(rig) == []
        assert guessed(rig.stored_text(), exhaustive=True) == set()
        last = rig.last("block-1")["subject"]["metadata"]["letta"]
        assert last["salt_destroyed"] == last["salt"]
        assert valid(rig)


class TestLinkage:
    def test_holds_over_every_sort_of_change(self, rig: BlockRig) -> None:
        with rig.armed():
            rig.create("block-1", "a", A)
            rig.set("block-1", value="a b", agent=A)
            rig.set("block-1", label="renamed", limit=10, read_only=True, description="d")
            rig.attach("block-1", B)
            rig.set("block-1", value="")
            rig.set("block-1", value="a b")
            rig.detach("block-1", A)
            with rig.session() as session:
                session.execute(update(Block).where(Block.id == "block-1").values(value="bulk"))
            rig.detach("block-1", B)
            rig.delete("block-1")
        rig.seal()
        events = [e["subject"]["metadata"]["letta"]["event"] for e in rig.envelopes()]
        assert events == [
            *("create", "attach", "update", "rename", "attach", "update", "update", "detach", "update", "detach"),
            "delete",
        ]
        diffs = [e["mutation"]["diff"] for e in rig.envelopes()]
        assert {diff["commitment"] for diff in diffs} == {"hmac-sha256"}
        for event, diff in zip(events, diffs, strict=True):
            assert (diff["before_hash"] == diff["after_hash"]) == (event in ("attach", "detach", "rename"))
        assert valid(rig)
        assert guessed(rig.stored_text()) == set()

    @pytest.mark.parametrize("seal_often", [True, False])
    def test_goes_on_after_forgetting(self, rig: BlockRig, seal_often: bool) -> None:
        seal = rig.seal if seal_often else list
        with rig.armed():
            rig.create("block-1", PIN, A)
            seal()
            rig.detach("block-1", A)
            seal()
            rig.attach("block-1", A)
            seal()
            rig.set("block-1", value="new", agent=A)
            seal()
            rig.set("block-1", value="newer", agent=A)
        rig.seal()
        assert valid(rig)
        if not seal_often:  # it was taken up again before its forgetting was sealed: the next write lets the salt go
            with rig.armed():
                rig.set("block-1", value="newest")
            rig.seal()
            assert valid(rig)
        assert PIN not in guessed(rig.stored_text(), opened_salts(rig))
        assert [one[1:] for one in rig.salts()] == [(True, True), (False, False)]

    def test_of_a_shared_block_goes_on_under_a_new_salt(self, rig: BlockRig) -> None:
        with rig.armed():
            rig.create("block-1", PIN, A, B)
            rig.detach("block-1", A)
            rig.seal()
            assert rig.salts() == [("block-1", True, False)]  # the other agent still has it
            assert guessed(rig.stored_text(), opened_salts(rig)) == {PIN}
            rig.set("block-1", value="other", agent=B)
            rig.seal()
        assert rig.salts() == [("block-1", True, True), ("block-1", False, False)]
        assert guessed(rig.stored_text(), opened_salts(rig)) == set()
        letta = rig.last("block-1")["subject"]["metadata"]["letta"]
        assert (
            letta["salt_before"]
            == letta["salt_destroyed"]
            == rig.envelopes()[-2]["subject"]["metadata"]["letta"]["salt"]
        )
        assert valid(rig)

    def test_a_write_in_the_moment_of_forgetting_is_kept_and_can_be_compared_with_nothing(self, rig: BlockRig) -> None:
        with rig.armed():
            rig.create("block-1", PIN, A)
            rig.seal()
            with rig.session() as session:  # captured, not committed
                session.get_one(Block, "block-1").value = "0815"
                session.flush()
                rig.detach("block-1", A)
                rig.seal()
            rig.seal()
            assert valid(rig)
            assert opened_salts(rig) == []
            assert guessed(rig.stored_text()) == set()
            rig.set("block-1", value="next")
            rig.seal()
        assert valid(rig)

    def test_an_edit_past_letta_shows(self, rig: BlockRig) -> None:
        with rig.armed():
            rig.create("block-1", "a", A)
            rig.sql("update block set value = 'evil' where id = 'block-1'")
            rig.set("block-1", value="evil b")
        rig.seal()
        assert [f["dimension"] for f in rig.findings()] == ["block_linkage"]

    @pytest.mark.parametrize(
        "attack", ["delete from phionyx_salt", "update phionyx_salt set wrapped = null, ended = true"]
    )
    def test_salts_taken_away_hide_no_edit(self, rig: BlockRig, attack: str) -> None:
        with rig.armed():
            rig.create("block-1", "a", A)
            rig.seal()
            rig.sql(attack)
            rig.sql("update block set value = 'evil' where id = 'block-1'")
            rig.set("block-1", value="evil b")
        rig.seal()
        assert [f["dimension"] for f in rig.findings()] == ["block_linkage"]

    def test_salts_swapped_between_blocks_open_nothing(self, rig: BlockRig) -> None:
        with rig.armed():
            rig.create("block-1", "a", A)
            rig.create("block-2", "a", A)
        key = SaltKey.of(rig.key.signer)
        rig.sql("update phionyx_salt set block_id = case block_id when 'block-1' then 'block-2' else 'block-1' end")
        with rig.ledger.engine.connect() as connection:
            kept = read_salts(connection, key, ["block-1", "block-2"])
        assert [one.salt for one in kept.values()] == [None, None]


class TestSwitchingOn:
    def test_links_to_the_bare_history(self, rig: BlockRig) -> None:
        with rig.armed(rig.runtime("plain")):
            rig.create("block-1", "a", A)
            rig.create("block-2", "b", A)
            rig.seal()
            rig.set("block-2", value="waits")
        with rig.armed():
            rig.set("block-1", value="a b")
            rig.set("block-2", value="c")
            rig.seal()
            rig.set("block-1", value="a b c")
        rig.seal()
        assert valid(rig)

    def test_no_bare_hash_of_what_was_never_recorded_gets_in(self, rig: BlockRig) -> None:
        rig.create("block-1", PIN, A)  # the plugin was off
        with rig.armed():
            rig.set("block-1", value="other")
        rig.seal()
        assert guessed(rig.stored_text()) == set()
        assert valid(rig)

    def test_a_salted_ledger_stays_salted(self, rig: BlockRig) -> None:
        with rig.armed():
            rig.create("block-1", "a", A)
        with rig.armed(rig.runtime("plain", include_diff_text=True)):
            rig.set("block-1", value=PIN)
        rig.seal()
        assert guessed(rig.stored_text()) == set()
        assert rig.last("block-1")["mutation"]["diff"]["diff_text"] is None
        assert valid(rig)

    @pytest.mark.parametrize("salted", [True, False])
    def test_the_baseline_is_salted_with_the_ledger(self, rig: BlockRig, salted: bool) -> None:
        rig.create("block-1", PIN, A)
        rig.baseline(salted=salted)
        assert guessed(rig.stored_text()) == (set() if salted else {PIN})
        with rig.armed():
            rig.set("block-1", value="b")
        rig.seal()
        assert valid(rig)

    def test_and_keeping_the_text_exclude_each_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PHIONYX_LETTA_COMMITMENTS", "Salted")
        assert load_settings().commitments == "salted"
        monkeypatch.setenv("PHIONYX_LETTA_INCLUDE_DIFF_TEXT", "1")
        with pytest.raises(SettingsError, match="PHIONYX_LETTA_COMMITMENTS"):
            load_settings()


class TestTwoWorkers:
    def test_learn_of_each_others_salts(self, rig: BlockRig) -> None:
        one, two = rig.runtime(), rig.runtime()
        for round_ in range(3):
            for runtime in (one, two):
                with rig.armed(runtime):
                    if round_ == 0 and runtime is one:
                        rig.create("block-1", "0", A)
                    rig.set("block-1", value=f"{round_} {id(runtime)}")
            with rig.armed(one):
                rig.detach("block-1", A)
                rig.seal()
                rig.attach("block-1", A)
        with rig.armed(two):
            rig.set("block-1", value="last")
        rig.seal()
        assert (one.counts["gaps"], two.counts["gaps"]) == (0, 0)
        assert valid(rig)
        assert sum(not destroyed for _, _, destroyed in rig.salts()) == 1

    def test_a_worker_lets_go_of_what_another_destroyed(self, rig: BlockRig) -> None:
        runtime = rig.runtime()
        with rig.armed(runtime):
            rig.create("block-1", PIN, A)
            rig.detach("block-1", A)
        rig.seal()
        assert runtime.salting is not None
        assert runtime.salting.get("block-1") is not None
        with rig.ledger.engine.connect() as connection:
            runtime.salting.forget_destroyed(connection)
        assert runtime.salting.get("block-1") is None

    def test_a_rolled_back_salt_is_not_relied_on(self, rig: BlockRig) -> None:
        rig.create("block-1", "a", A)
        with rig.armed() as runtime:
            with rig.session() as session:
                session.get_one(Block, "block-1").value = "b"
                session.flush()
                session.rollback()
            rig.set("block-1", value="c")
            assert runtime.counts["gaps"] == 0
        rig.seal()
        assert len(rig.envelopes()) == 1
        assert valid(rig)

    def test_with_another_key_break_the_linkage_and_say_so(self, rig: BlockRig, empty_database: str) -> None:
        with rig.armed():
            rig.create("block-1", "a", A)
        rig.seal()
        other = BlockRig(empty_database, new_key())
        with other.armed():
            other.set("block-1", value="b")
        other.seal()
        assert "block_linkage" in {f["dimension"] for f in rig.findings(rig.key, other.key)}
        other.close()


def test_sixteen_writers_and_a_sealer_that_forget_all_the_time(rig: BlockRig) -> None:
    rig.create("block-0", "0", A)
    for number in range(1, 4):
        rig.create(f"block-{number}", "0", A)
    rig.baseline(salted=True)
    failures: list[BaseException] = []
    stop = threading.Event()

    def write(me: int) -> None:
        try:
            for round_ in range(12):
                rig.set_locked(f"block-{(me + round_) % 4}", f"{me} {round_}")
        except BaseException as error:
            failures.append(error)

    def seal() -> None:
        sealer = Sealer(rig.ledger, rig.key)
        while not stop.wait(0.01):
            sealer.seal_pending()

    with rig.armed() as runtime:
        threads = [threading.Thread(target=write, args=(me,)) for me in range(16)]
        sealing = threading.Thread(target=seal)
        for thread in (*threads, sealing):
            thread.start()
        for round_ in range(10):
            rig.detach(f"block-{round_ % 4}", A)
            rig.attach(f"block-{round_ % 4}", A)
        for thread in threads:
            thread.join()
        stop.set()
        sealing.join()
        assert (failures, runtime.counts["gaps"]) == ([], 0)
    rig.seal()
    assert len([e for e in rig.envelopes() if e["subject"]["metadata"]["letta"]["event"] == "update"]) == 16 * 12
    assert valid(rig)


class TestTheQuery:
    def test_a_gap_is_a_gap_where_the_salts_cannot_be_kept(self, rig: BlockRig) -> None:
        with rig.armed() as runtime:
            rig.create("block-1", "a", A)
            rig.sql("alter table phionyx_salt rename to elsewhere")
            rig.create("block-2", "b")
            assert runtime.counts["gaps"] == 1
            rig.set("block-1", value="c")
        assert rig.sql("select value from block order by id") == [("c",), ("b",)]

    def test_closed_means_closed(self, rig: BlockRig) -> None:
        with rig.armed(rig.runtime(on_error="closed")):
            rig.sql("alter table phionyx_salt rename to elsewhere")
            with pytest.raises(EvidenceRefused):
                rig.create("block-1", "a")
        assert rig.sql("select 1 from block") == []

    def test_a_locked_table_is_waited_for_no_longer_than_the_setting_says(self, rig: BlockRig) -> None:
        with rig.armed(rig.runtime(lock_timeout_ms=50)) as runtime:
            with rig.holding("lock table phionyx_salt in access exclusive mode"):
                rig.create("block-1", "a")
            assert runtime.counts["gaps"] == 1

    def test_a_block_id_that_looks_like_sql_is_only_an_id(self, rig: BlockRig) -> None:
        with rig.armed() as runtime:
            rig.create("x'); drop table block; --$p", "a", A)
            rig.set("x'); drop table block; --$p", value="b")
            assert runtime.counts["gaps"] == 0
        rig.seal()
        assert valid(rig)


def test_salted_hashes_are_the_librarys(rig: BlockRig) -> None:
    salt = Salt("n", b"s" * 32)
    assert "s" * 8 not in repr(salt)
    with rig.armed() as runtime:
        rig.create("block-1", "content ü", A)
        assert runtime.salting is not None
        used = runtime.salting.get("block-1")
    rig.seal()
    assert used is not None
    assert rig.last("block-1")["mutation"]["diff"]["after_hash"] == content_hash("content ü", salt=used.value)


def test_rows_put_into_the_table_by_hand_take_no_salts_place(rig: BlockRig) -> None:
    with rig.armed():
        rig.create("block-1", "a", A)
        rig.sql("insert into phionyx_salt(name, block_id, wrapped) values ('x', 'block-1', 'garbage')")
    with rig.armed():  # a worker that remembers nothing
        rig.set("block-1", value="b")
    rig.seal()
    assert len(rig.salts()) == 2
    assert valid(rig)


def test_a_salt_put_back_after_it_was_destroyed_is_destroyed_again(rig: BlockRig) -> None:
    with rig.armed():
        rig.create("block-1", PIN, A)
        ((old,),) = rig.sql("select wrapped from phionyx_salt")
        rig.detach("block-1", A)
        rig.seal()
        rig.sql("update phionyx_salt set wrapped = %s, ended = false", old)
    with rig.armed():
        rig.set("block-1", value="b")
    rig.seal()
    assert opened_salts(rig) == []
    assert valid(rig)


def test_a_new_signing_key_takes_the_salts_over(rig: BlockRig) -> None:
    with rig.armed():
        rig.create("block-1", "a", A)
    rig.seal()
    new = new_key()
    rotate(rig.ledger, rig.key.signer, new.signer, "test/log")
    old, rig.key = rig.key, new
    rig.sealer = Sealer(rig.ledger, new)
    with rig.armed():
        rig.set("block-1", value="b")
    rig.seal()
    assert rig.findings(old, new) == []
    assert len(rig.salts()) == 1


def test_guarded_reads_and_salts_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHIONYX_LETTA_COMMITMENTS", "salted")
    monkeypatch.setenv("PHIONYX_LETTA_GUARD", "report")
    with pytest.raises(SettingsError, match="PHIONYX_LETTA_GUARD=off"):
        load_settings()
