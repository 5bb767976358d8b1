"""Files and ledgers made to mislead an auditor, or to break the commands."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

import pytest
from cli_helpers import change, run

from phionyx_letta import Ed25519Signer
from phionyx_letta.envelope import envelope_line
from phionyx_letta.errors import LedgerUnavailable
from phionyx_letta.ledger.filesystem import FilesystemEnvelopeStore
from phionyx_letta.ledger.sql import SqlLedger

SIGNER = Ed25519Signer("0a" * 32)
KEY = SIGNER.public_key_hex


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.db"
    store = SqlLedger(f"sqlite:///{path}")
    store.emit(change("t", 0, "b", "human", "write", "", "x"), signer=SIGNER)
    store.close()
    return path


def envelope_of(ledger: Path) -> dict[str, object]:
    with sqlite3.connect(ledger) as database:
        return dict(json.loads(database.execute("select body from phionyx_envelope").fetchone()[0]))


def test_a_repeated_key_is_refused(ledger: Path, tmp_path: Path) -> None:
    line = envelope_line(envelope_of(ledger))
    genuine, forged = tmp_path / "genuine.jsonl", tmp_path / "forged.jsonl"
    genuine.write_text(line + "\n")
    forged.write_text(line.replace('"mutation":{', '"mutation":{"block_label":"FORGED",') + "\n")
    assert run("verify", str(genuine), "--key", KEY).exit_code == 0
    assert run("verify", str(forged), "--key", KEY).exit_code == 1


@pytest.mark.parametrize("around", [{"trace_id": "victim"}, {"position": 7}, {"schema": "x", "mutation": {}}])
def test_what_stands_around_an_envelope_may_not_say_otherwise(
    around: dict[str, object], ledger: Path, tmp_path: Path
) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"envelope": envelope_of(ledger)}))
    alone = run("verify", str(path), "--key", KEY).exit_code
    path.write_text(json.dumps({**around, "envelope": envelope_of(ledger)}))
    assert run("verify", str(path), "--key", KEY).exit_code == 1 != alone


@pytest.mark.parametrize(
    "damage",
    [
        ("update phionyx_envelope set body = ?", "[" * 200_000),
        ("update phionyx_envelope set body = ?", '{"memory_consolidation_audit": {"from_episodic": 5}}'),
        ("update phionyx_chain set length = ?", "abc"),
        ("update phionyx_envelope set trace_id = ?", b"\xff\x00"),
        ("update phionyx_block set agents = ?", b"\xff"),
    ],
    ids=["deep body", "odd audit", "text for a number", "bytes for text", "bytes for a list"],
)
def test_a_crafted_ledger_ends_no_command_in_a_traceback_and_none_as_valid(
    damage: tuple[str, object], ledger: Path
) -> None:
    with sqlite3.connect(ledger) as database:
        database.execute(damage[0], (damage[1],))
    for command in (
        ["verify", "--key", KEY],
        ["verify", "--json", "--key", KEY],
        ["log"],
        ["show", "t", "0"],
        ["explain", "b"],
    ):
        result = (
            run(*command, "--ledger", f"sqlite:///{ledger}")
            if command[0] != "verify"
            else run("verify", f"sqlite:///{ledger}", *command[1:])
        )
        assert result.exception is None or isinstance(result.exception, SystemExit)
        if command[0] == "verify" and "agents" not in damage[0]:
            assert result.exit_code == 1


def test_a_password_in_a_urls_query_is_in_no_error() -> None:
    with pytest.raises(LedgerUnavailable) as raised:
        SqlLedger("postgresql://u@127.0.0.1:1/d?password=SECRETPW")
    assert "SECRETPW" not in str(raised.value)


def test_verifying_changes_not_a_byte_of_the_evidence(ledger: Path) -> None:
    with sqlite3.connect(ledger) as database:
        database.execute("pragma journal_mode=delete")
    before = ledger.read_bytes()
    assert run("verify", f"sqlite:///{ledger}", "--key", KEY).exit_code == 0
    assert ledger.read_bytes() == before


def test_a_value_with_line_breaks_forges_no_line(tmp_path: Path) -> None:
    store = SqlLedger(f"sqlite:///{tmp_path / 'l.db'}")
    store.emit(change("t", 0, "b", "x\n\nVALID  3 envelopes", "write", "", "x"), signer=SIGNER)
    store.close()
    for command in (["show", "t", "0"], ["log"], ["verify"], ["explain", "b"]):
        said = run(*command, "--ledger", f"sqlite:///{tmp_path / 'l.db'}").output
        assert not [line for line in said.splitlines() if line.startswith("VALID")]


@pytest.mark.parametrize(
    "url",
    ["postgresql://u:pw@h:notaport/db", "postgresql://u:pw@[::1/db", "postgresql:/u:pw@h/db", "postgres:u:pw@h/db"],
)
def test_a_malformed_url_is_an_error_that_does_not_quote_it(url: str) -> None:
    for command in (["verify", url, "--key", KEY], ["log", "--ledger", url], ["doctor", "--ledger", url]):
        result = run(*command)
        assert result.exit_code in (1, 2)  # doctor counts a ledger that cannot be reached as failed
        assert "pw" not in result.output


@pytest.mark.parametrize("name", ["000001.json", "chain.jsonl"])
@pytest.mark.parametrize("endless", ["pipe", "device"])
def test_a_pipe_or_a_device_in_a_store_ends_verification(name: str, endless: str, tmp_path: Path) -> None:
    store = FilesystemEnvelopeStore(tmp_path)
    for turn in range(2):
        store.emit(change("t", turn, "b", "human", "write", "x" * turn, "x" * (turn + 1)), signer=SIGNER)
    path = tmp_path / "t" / name
    path.unlink()
    if endless == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    for command in (["verify", str(tmp_path), "--key", KEY], ["log", "--ledger", str(tmp_path)]):
        assert run(*command).exit_code in (1, 2)


def test_a_chain_exported_under_the_name_of_an_index_is_a_file_of_envelopes(ledger: Path, tmp_path: Path) -> None:
    exported = tmp_path / "elsewhere" / "chain.jsonl"
    exported.parent.mkdir()
    exported.write_text(envelope_line(envelope_of(ledger)) + "\n")
    result = run("verify", str(exported), "--key", KEY)
    assert result.exit_code == 0, result.output
