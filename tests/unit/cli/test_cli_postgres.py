"""`doctor`, `seal` and `baseline` on PostgreSQL, on tables shaped like Letta's: workers, gaps, blocks changed past the plugin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from bundle_rows import put_row
from cli_helpers import AGENT, Key, error_of, run, run_json
from sqlalchemy import text

from phionyx_letta import __version__, compute_memory_diff, generate_key, get_signer
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.plugin.outbox import OutboxKey

_LETTA = (
    'create table block (id varchar primary key, organization_id varchar, value text, label varchar, description text, "limit" int,'
    " read_only bool)",
    "create table blocks_agents (agent_id varchar, block_id varchar)",
    "create table block_history (id varchar, block_id varchar, sequence_number int, value text, label varchar, description text,"
    ' "limit" int, metadata_ json, actor_type varchar, actor_id varchar, organization_id varchar, is_deleted bool,'
    " _created_by_id varchar, created_at timestamptz)",
    "insert into block values ('block-1', 'org-1', 'hello ü', 'human', null, 100, false)",
    "insert into block values ('block-2', null, '', 'empty', 'd', 5, true)",
    f"insert into blocks_agents values ('{AGENT}', 'block-1')",
)


@pytest.fixture
def ledger(empty_database: str, key: Key, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqlLedger]:
    monkeypatch.setenv("PHIONYX_LETTA_LEDGER", empty_database)
    monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", str(key.path))
    ledger = SqlLedger(empty_database)
    for statement in _LETTA:
        execute(ledger, statement)
    yield ledger
    ledger.close()


def execute(ledger: SqlLedger, statement: str) -> None:
    with ledger.engine.begin() as connection:
        connection.execute(text(statement))


def worker(ledger: SqlLedger, key: Key, *, silent: float = 0, armed: bool = True, **info: Any) -> None:
    known = {
        "pid": 42,
        "host": "h",
        "version": __version__,
        "letta": "0.16.8",
        "unsupported": None,
        "on_error": "open",
        "key_source": "FILE",
        "key_error": None,
        "targets": {"a.B.c": "wrapped"},
        "captured": 3,
        "gaps": 0,
        "last_gaps": [],
    }
    row = {
        "worker_id": f"h:42:{silent}",
        "seen_at": datetime.now(UTC) - timedelta(seconds=silent),
        "armed": armed,
        "key_id": key.signer.key_id,
        "info": json.dumps({**known, **info}),
    }
    with ledger.engine.begin() as connection:
        connection.execute(tables.worker.insert().values(row))


def messages(check: str, status: str, code: int) -> str:
    report = run_json("doctor", code=code)
    return " | ".join(
        f"{one['message']} -> {one['remedy']}"
        for one in report["findings"]
        if one["check"].startswith(check) and one["status"] == status
    )


class TestBaseline:
    def test_gives_every_block_a_beginning(self, ledger: SqlLedger, key: Key) -> None:
        worker(ledger, key)
        assert "2 blocks have no record" in messages("blocks", "warn", 0)
        done = run_json("baseline")
        assert (done["blocks"], done["unrecorded"], done["sealed"]) == (2, 0, 2)
        assert run_json("log", "--event", "baseline")["count"] == 2
        assert run_json("verify", "--key", key.public)["verdict"] == "valid"
        assert run_json("doctor")["status"] == "ok"
        assert "0 blocks had no record" in run("baseline").stdout

    def test_makes_the_tables_where_nothing_was_recorded(self, ledger: SqlLedger) -> None:
        tables.metadata.drop_all(ledger.engine)
        assert "no ledger in" in error_of("log")
        assert run_json("baseline")["sealed"] == 2


class TestBlocks:
    @pytest.fixture(autouse=True)
    def _recorded(self, ledger: SqlLedger, key: Key) -> None:
        worker(ledger, key)
        assert run("baseline").exit_code == 0

    def test_one_changed_past_letta_is_named(self, ledger: SqlLedger) -> None:
        execute(ledger, "update block set value = 'evil' where id = 'block-1'")
        assert "block-1 (human) was changed outside" in messages("blocks", "fail", 1)
        assert run_json("doctor", code=1)["blocks"]["changed_outside"][0]["block_id"] == "block-1"

    def test_one_removed_past_letta_is_named(self, ledger: SqlLedger) -> None:
        execute(ledger, "delete from block where id = 'block-2'")
        assert "block-2 (empty) was removed outside" in messages("blocks", "fail", 1)

    def test_one_with_a_write_that_waits_is_passed_over(self, ledger: SqlLedger, key: Key) -> None:
        execute(ledger, "update block set value = 'new' where id = 'block-1'")
        mutation = {
            "at": datetime.now(UTC).isoformat(),
            "kind": "write",
            "event": "update",
            "block_id": "block-1",
            "block_label": "human",
            "producer": "letta.api",
            "letta": {"event": "update"},
            "diff": compute_memory_diff("hello ü", "new").to_dict(),
        }
        payload, mac = OutboxKey.of(key.signer).seal(mutation)
        with ledger.engine.begin() as connection:
            connection.execute(tables.outbox.insert().values(payload=payload, mac=mac))
        assert run_json("doctor")["outbox"]["waiting"] == 1
        assert run_json("seal")["sealed"] == 1
        assert run_json("doctor")["status"] == "ok"
        assert run_json("verify", "--key", key.public)["dimensions"]["block_linkage"] == "ok"


class TestWorkers:
    def test_none_means_that_nothing_is_recorded(self, ledger: SqlLedger) -> None:
        assert "nothing is being recorded" in messages("workers", "fail", 1)

    @pytest.mark.parametrize(
        ("info", "status", "said"),
        [
            ({}, "ok", "3 changes captured"),
            (
                {"gaps": 2, "last_gaps": [{"at": "now", "what": "locked", "block_ids": ["block-9"]}]},
                "fail",
                "locked (block-9)",
            ),
            ({"key_error": "no key"}, "fail", "no key"),
            ({"armed": False, "unsupported": "letta.orm has no Block"}, "fail", "letta.orm has no Block"),
            ({"letta": "0.15.0"}, "warn", "runs letta 0.15.0"),
            ({"version": "0.1.0"}, "warn", "has plugin 0.1.0"),
            ({"targets": {"a.B.c": "changed", "d.E.f": "not imported"}}, "warn", "c is changed"),
            ({"targets": "nonsense", "last_gaps": 3, "gaps": 1}, "fail", "not told"),
        ],
    )
    def test_each_tells_what_is_wrong_with_it(
        self,
        info: dict[str, Any],
        status: str,
        said: str,
        ledger: SqlLedger,
        key: Key,
    ) -> None:
        worker(ledger, key, **info)
        code = 1 if status == "fail" else 0
        assert said in messages("worker 42", status, code)
        assert max(map(len, run("doctor").stdout.splitlines())) <= 80

    def test_silence_of_half_a_minute_is_death(self, ledger: SqlLedger, key: Key) -> None:
        worker(ledger, key, silent=31)
        assert "nothing is being recorded" in messages("workers", "fail", 1)
        worker(ledger, key)
        assert "silent for 3" in messages("worker 42", "warn", 0)

    def test_keys_that_differ_are_told(
        self, ledger: SqlLedger, key: Key, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker(ledger, key)
        generate_key(tmp_path / "other")
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", str(tmp_path / "other"))
        assert key.signer.key_id in messages("keys", "warn", 0)


def test_verify_and_follow_the_whole_ledger_on_postgresql(ledger: SqlLedger, key: Key) -> None:
    run("baseline")
    execute(ledger, "update phionyx_envelope set body = replace(body, 'human', 'robot')")
    report = run_json("verify", "--key", key.public, code=1)
    assert {"hashes", "database"} <= {one["dimension"] for one in report["findings"]}
    assert "secret" not in json.dumps(report)


def test_points_in_time_that_python_cannot_read_hide_nothing(ledger: SqlLedger, key: Key) -> None:
    worker(ledger, key)
    assert run("baseline").exit_code == 0
    execute(ledger, "insert into phionyx_worker select 'forged', 'infinity', armed, key_id, info from phionyx_worker")
    execute(ledger, "insert into phionyx_outbox(payload, mac, created_at) values ('{}', '', '-infinity')")
    report = run_json("doctor")
    assert report["outbox"]["waiting"] == 1
    assert [one["worker_id"] for one in report["workers"]] == ["h:42:0"]


class TestLog:
    def test_a_checkpoint_covers_what_was_sealed(self, ledger: SqlLedger, key: Key) -> None:
        worker(ledger, key)
        assert run("baseline").exit_code == 0
        assert "covers 2 of 2 envelopes" in messages("log", "ok", 0)
        assert "PHIONYX_LETTA_SINKS" in messages("sinks", "ok", 0)

    def test_a_missing_end_is_named(self, ledger: SqlLedger, key: Key) -> None:
        worker(ledger, key)
        assert run("baseline").exit_code == 0
        execute(ledger, "delete from phionyx_envelope where seq = 1")
        assert "the end is missing" in messages("log", "fail", 1)

    def test_how_sinks_stand(self, ledger: SqlLedger, key: Key) -> None:
        worker(ledger, key)
        assert run("baseline").exit_code == 0
        now = datetime.now(UTC).isoformat()
        for name, seen, info in (
            ("k folder /good", now, {"delivered_size": 2}),
            ("k folder /bad", now, {"failing_since": "2026", "failures": 3, "last_error": "no space"}),
            ("k folder /old", "2020-01-01T00:00:00+00:00", {"delivered_size": 1}),
            ("k folder /odd", "infinity", ["x"]),
        ):
            with ledger.engine.begin() as connection:
                connection.execute(tables.sink.insert().values(name=name, seen_at=seen, info=json.dumps(info)))
        assert "at 2 of 2" in messages("sink folder /good", "ok", 1)
        assert "failing since 2026, 3 times: no space" in messages("sink folder /bad", "fail", 1)
        assert "not told" in messages("sink folder /old", "warn", 1)
        assert "not told" in messages("sink folder /odd", "warn", 1)


class TestKeysAndBundles:
    """A rotation between two writes, then evidence of both, on PostgreSQL."""

    def test_a_bundle_over_a_rotation(self, ledger: SqlLedger, key: Key, tmp_path: Path) -> None:
        execute(ledger, "drop table block, block_history")  # the rows below are about blocks that are not in it
        for turn in range(2):
            for agent in ("agent-a", "agent-b"):
                current = get_signer({"PHIONYX_LETTA_SIGNING_KEY": str(key.path)})
                put_row(ledger, OutboxKey.of(current), f"block-{agent}-{turn}", agent=agent)
            assert run_json("seal")["sealed"] == 2
            if turn == 0:
                rotated = run_json("keys", "rotate")
                assert (rotated["signer"], rotated["log_size"]) == (key.public, 2)
        assert run_json("verify", "--key", key.public)["verdict"] == "valid"
        for traces in ([], ["agent-a"]):
            path = tmp_path / f"evidence-{len(traces)}.zip"
            run_json("export", "--bundle", *traces, "-o", path, "--key", key.public)
            report = run_json("verify", path, "--key", key.public)
            assert (report["verdict"], report["dimensions"]["key_trust"]) == ("valid", "ok")

    def test_a_worker_that_was_seen_lately_forbids_a_rotation(self, ledger: SqlLedger, key: Key) -> None:
        for age, code in ((5, 2), (600, 0)):
            with ledger.engine.begin() as connection:
                connection.execute(tables.worker.delete())
                seen = datetime.now(UTC) - timedelta(seconds=age)
                row = {"worker_id": "w", "seen_at": seen, "armed": True, "key_id": key.signer.key_id, "info": "{}"}
                connection.execute(tables.worker.insert().values(**row))
            assert run("keys", "rotate").exit_code == code
