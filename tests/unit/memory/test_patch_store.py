"""Stores of patches: all of them keep the same promises; the JSONL file some more."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from memory_helpers import patch

from phionyx_letta.errors import InvalidPatch, LedgerUnavailable, PatchNotFound, StoreError
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.memory import OccurrenceTracker, PatchStore, SqlPatchStore
from phionyx_letta.memory.stored import PatchSummary


def several(store, *statuses: str) -> list:
    made = []
    for number, status in enumerate(statuses):
        made.append(store.save(patch(after=f"{number}\n", created_at=f"2026-01-0{number + 1}T00:00:00+00:00")))
        if status != "pending":
            made[-1].status = status
            store.update(made[-1])
    return made


class TestEveryStore:
    def test_what_is_saved_is_there_for_others(self, new_store):
        one = patch(before="ğ\r\n", after="\U0001f600\r\n", metadata={"x": [1, 2.5, None, {"y": "z"}]}, session_id="s")
        new_store().save(one)
        assert new_store().get(one.patch_id) == one
        assert new_store().get("nothing") is None

    def test_after_a_reload_a_patch_has_its_newest_status_only(self, new_store):
        applied, pending = several(new_store(), "applied", "pending")
        store = new_store()
        assert [one.patch_id for one in store.pending_patches()] == [pending.patch_id]
        assert [one.patch_id for one in store.list_by_status("applied")] == [applied.patch_id]
        assert store.status(applied.patch_id) == "applied"
        assert (store.count(), store.count("pending"), store.count("rejected")) == (2, 1, 0)

    def test_lists_are_oldest_first_and_cut_at_the_old_end(self, new_store):
        made = several(new_store(), *["pending"] * 4)
        store = new_store()
        assert [one.patch_id for one in store.list_by_status()] == [one.patch_id for one in made]
        assert [one.patch_id for one in store.list_by_status(limit=2)] == [one.patch_id for one in made[2:]]
        assert store.list_by_status(limit=0) == []
        assert store.list_by_status("pending", limit=9) == made

    def test_summaries_say_what_lists_show(self, new_store):
        one = patch(rationale='say "what", "after_content": "x"', session_id=None, category="user")
        new_store().save(one)
        assert new_store().summaries() == [
            PatchSummary(
                one.patch_id, "pending", one.created_at, "CLAUDE.md", "user", None, "living-memory", one.rationale
            )
        ]

    def test_ids_are_found_by_their_beginning(self, new_store):
        store = new_store()
        for name in ("abc1", "abc2", "a%c", "xyz"):
            store.save(patch(patch_id=name))
        assert store.find("abc") == ["abc1", "abc2"]
        assert store.find("a%") == ["a%c"]
        assert store.find("nothing") == []

    def test_an_id_is_saved_once(self, new_store):
        one = new_store().save(patch())
        with pytest.raises(InvalidPatch, match=one.patch_id):
            new_store().save(one)

    def test_what_was_never_saved_cannot_be_updated(self, new_store):
        with pytest.raises(PatchNotFound, match="not found"):
            new_store().update(patch())

    def test_a_patch_that_is_not_json_is_refused_and_harms_nothing(self, new_store):
        store = new_store()
        with pytest.raises(InvalidPatch, match="not JSON"):
            store.save(patch(metadata={"x": float("nan")}))
        kept = store.save(patch())
        assert new_store().list_by_status() == [kept]

    def test_two_that_are_open_see_each_others_changes(self, new_store):
        first, second = new_store(), new_store()
        one = first.save(patch())
        other = second.save(patch())
        one.status = "applied"
        second.update(one)
        assert first.status(one.patch_id) == "applied"
        assert first.pending_patches() == [other]

    def test_it_is_held_by_one_and_may_be_entered_again(self, new_store):
        store = new_store()
        with store.exclusive(), store.exclusive():
            store.save(patch())
            with store.exclusive():
                assert store.count() == 1
        assert new_store().count() == 1


WRITER = """
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from phionyx_letta.memory import MemoryPatch
from phionyx_letta.memory.opening import open_store
store = open_store(sys.argv[1])
for number in range(int(sys.argv[2])):
    patch = store.save(MemoryPatch("f", "", "x" * 5000, "", "r", patch_id=f"{sys.argv[3]}-{number}"))
    patch.status = "approved"
    store.update(patch)
    print(patch.patch_id, flush=True)
"""


class TestSeveralProcesses:
    def run(self, where: str, count: int, name: str) -> subprocess.Popen:
        path = where if "://" in where else f"{where}.jsonl"
        return subprocess.Popen(
            [sys.executable, "-c", WRITER, path, str(count), name], stdout=subprocess.PIPE, text=True
        )

    @pytest.mark.slow
    def test_writers_at_once_lose_nothing(self, where, new_store):
        writers = [self.run(where, 25, name) for name in "abc"]
        assert [one.wait(120) for one in writers] == [0, 0, 0]
        for one in writers:
            one.stdout.close()
        store = new_store()
        assert store.count("approved") == store.count() == 75
        assert {one.patch_id for one in store.list_by_status()} == {
            f"{name}-{number}" for name in "abc" for number in range(25)
        }

    @pytest.mark.slow
    def test_a_writer_killed_at_any_moment_keeps_what_it_was_told_is_kept(self, where, new_store):
        told: set[str] = set()
        for moment in range(8):
            with self.run(where, 100_000, f"k{moment}") as process:
                for _ in range(2 + 3 * moment):
                    told.add(process.stdout.readline().strip())
                process.kill()
                told |= {line.strip() for line in process.stdout.readlines() if line.endswith("\n")}
            store = new_store()
            assert told <= {one.patch_id for one in store.list_by_status("approved")}
            store.save(patch(patch_id=f"after-{moment}"))
            assert new_store().get(f"after-{moment}") is not None


@pytest.mark.slow
def test_many_that_open_one_new_database_at_once_all_can(tmp_path):
    """SQLite does not wait where two change the journal's mode (one in nine of these failed)."""
    for number in range(40):
        url = f"sqlite:///{tmp_path / f'{number}.db'}"
        together = threading.Barrier(6)

        def opened(url=url, together=together):
            together.wait()
            SqlLedger(url).close()

        with ThreadPoolExecutor(6) as pool:
            for one in [pool.submit(opened) for _ in range(6)]:
                one.result()


class TestTheFile:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "patches.jsonl"

    def test_its_lines_are_those_of_the_seed(self, path):
        one = PatchStore(path).save(patch())
        (line,) = path.read_text().splitlines()
        assert json.loads(line) == one.to_dict()

    def test_lines_in_another_order_are_read(self, path):
        one = patch()
        path.write_text(json.dumps(one.to_dict(), sort_keys=True) + "\n")
        assert PatchStore(path).pending_patches() == [one]

    @pytest.mark.parametrize("content", ["short\n", "x" * 9000])
    def test_lists_show_lines_in_another_order_too(self, path, content):
        one = patch(before=content, after=content + "b\n", session_id="s")
        for order in (list(one.to_dict()), sorted(one.to_dict()), ["file_path", "after_content", *one.to_dict()]):
            path.write_text(json.dumps({name: one.to_dict()[name] for name in order}) + "\n")
            (shown,) = PatchStore(path).summaries()
            assert shown == PatchSummary(
                one.patch_id, "pending", one.created_at, "CLAUDE.md", "general", "s", "living-memory", "why"
            )

    @pytest.mark.parametrize(
        "foreign",
        [
            *(b"[]", b"{}", b"null", b"half a li", b"\xff\xfe", b"1e999", b"[" * 5000),
            b'{"patch_id": "x", "status": "pending", "created_at": }',
            b'{"patch_id": "x", "status": "pending", "created_at": "a", "status": "applied"}',
        ],
        ids=lambda line: line[:12].decode("latin-1"),
    )
    def test_foreign_lines_are_passed_over_and_named(self, path, foreign, caplog):
        store = PatchStore(path)
        one = store.save(patch())
        with path.open("ab") as file:
            file.write(foreign + b"\n\n")
        other = store.save(patch())
        with caplog.at_level(logging.WARNING):
            assert PatchStore(path).list_by_status() == [one, other]
        assert str(path) in caplog.text
        assert store.list_by_status() == [one, other]

    @pytest.mark.slow
    def test_half_a_line_at_the_end_swallows_nothing(self, path, caplog):
        store = PatchStore(path)
        one = store.save(patch())
        whole = path.read_bytes()
        for cut in range(1, len(whole)):
            path.write_bytes(whole + whole[:cut])
            store = PatchStore(path)
            assert store.list_by_status() == [one]
            other = store.save(patch())
            assert PatchStore(path).list_by_status() == [one, other]

    def test_half_a_line_is_named_once(self, path, caplog):
        path.write_text('{"half')
        store = PatchStore(path)
        for _ in range(3):
            assert store.list_by_status() == []
        assert caplog.text.count("half a line") == 1

    def test_half_a_line_that_ends_like_a_whole_one_hides_no_older_state(self, path):
        store = PatchStore(path)
        one = store.save(patch(metadata={"a": {"b": "c"}}))
        line = path.read_bytes()
        cut = line[: line.index(b'"c"}') + 4]
        path.write_bytes(line + cut)
        other = PatchStore(path).save(patch())
        assert PatchStore(path).list_by_status() == [one, other]

    def test_a_damaged_newest_line_leaves_the_state_before_it(self, path, caplog):
        store = PatchStore(path)
        one = store.save(patch())
        one.status = "applied"
        store.update(one)
        first, second = path.read_bytes().splitlines()
        path.write_bytes(first + b"\n" + second.replace(b'"rationale"', b"rationale") + b"\n")
        with caplog.at_level(logging.WARNING):
            assert PatchStore(path).get(one.patch_id).status == "pending"
        assert one.patch_id in caplog.text

    def test_a_list_reads_no_content(self, path):
        store = PatchStore(path)
        for _ in range(3):
            store.save(patch(after="x" * 100_000))
        damaged = path.read_bytes().replace(b"xxxx", b"x\x00\xffx")
        path.write_bytes(damaged)
        assert [one.rationale for one in PatchStore(path).summaries("pending")] == ["why"] * 3

    def test_a_file_that_was_replaced_is_read_anew(self, path):
        store = PatchStore(path)
        store.save(patch())
        other = PatchStore(path.with_name("other")).save(patch())
        path.with_name("other").replace(path)
        assert store.list_by_status() == [other]
        path.unlink()
        assert store.list_by_status() == []

    def test_a_file_that_was_rewritten_in_place_is_read_anew(self, path):
        store = PatchStore(path)
        one = store.save(patch())
        path.write_text(path.read_text().replace('"why"', '"why, and more"'))
        assert store.get(one.patch_id).rationale == "why, and more"

    def test_a_full_disk_is_an_error_and_leaves_nothing_half_written(self, path, monkeypatch):
        store = PatchStore(path)
        one = store.save(patch())
        size = path.stat().st_size

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as broken:
            broken.setattr("os.fsync", full)
            with pytest.raises(StoreError, match="No space left"):
                store.save(patch())
        assert path.stat().st_size == size
        assert store.list_by_status() == [one]

    def test_a_path_that_cannot_be_one_is_an_error(self, tmp_path):
        with pytest.raises(StoreError, match=str(tmp_path)):
            PatchStore(tmp_path).save(patch())
        with pytest.raises(StoreError, match=str(tmp_path)):
            PatchStore(tmp_path).list_by_status()
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError):
            PatchStore(tmp_path / "file" / "patches.jsonl").save(patch())

    def test_only_its_owner_can_read_it(self, path):
        PatchStore(path).save(patch())
        assert path.stat().st_mode & 0o077 == 0


class TestTheDatabase:
    def test_one_that_does_not_answer_is_an_error(self):
        with pytest.raises(LedgerUnavailable, match="cannot be used"):
            SqlPatchStore("postgresql://nobody@127.0.0.1:1/none")

    def test_every_state_of_a_patch_stays(self, tmp_path, ledgers):
        ledger = ledgers(f"sqlite:///{tmp_path / 'ledger.db'}")
        store = SqlPatchStore(ledger)
        several(store, "approved", "pending")
        with ledger.engine.connect() as connection:
            rows = connection.exec_driver_sql("select status, newest from phionyx_patch order by seq").all()
        assert [tuple(row) for row in rows] == [("pending", 0), ("approved", 1), ("pending", 1)]

    def test_a_damaged_row_leaves_the_state_before_it(self, tmp_path, ledgers, caplog):
        ledger = ledgers(f"sqlite:///{tmp_path / 'ledger.db'}")
        store = SqlPatchStore(ledger)
        (one,) = several(store, "approved")
        with ledger.engine.begin() as connection:
            connection.exec_driver_sql("update phionyx_patch set body = '[]' where newest")
        assert store.get(one.patch_id).status == "pending"
        assert store.list_by_status() == []
        assert "phionyx_patch" in caplog.text


class TestDamageIsNamedOnce:
    def test_each_damaged_line_however_often_the_store_is_read(self, tmp_path, caplog):
        path = tmp_path / "patches.jsonl"
        path.write_text('garbage\n{"patch_id": "abd", "status": "pending", "x"}\n')
        for _ in range(3):
            store = PatchStore(path)
            for _ in range(3):
                store.list_by_status()
                store.get("abd")
        assert [record.getMessage().count("byte") for record in caplog.records] == [1, 1]

    def test_other_damage_in_the_same_place_is_named_again(self, tmp_path, caplog):
        path = tmp_path / "patches.jsonl"
        for line in ("garbage\n", "rubbish\n"):
            path.write_text(line)
            PatchStore(path).count()
        assert len(caplog.records) == 2

    def test_damaged_occurrences(self, tmp_path, caplog):
        path = tmp_path / "facts.json"
        path.write_text('{"a": 5}')
        for _ in range(3):
            OccurrenceTracker(path).get_count("a")
        assert len(caplog.records) == 1
