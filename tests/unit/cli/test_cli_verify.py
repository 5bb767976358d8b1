"""`verify` and `export`: what is called valid, failed or not measured, and what the verifier names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import AGENT, HUMAN, OTHER, Key, change, changes, error_of, run, run_json, sql

from phionyx_letta import FilesystemEnvelopeStore, UnsignedSigner, generate_key, verify_chain
from phionyx_letta.ledger.sql import SqlLedger


def lines_of(database: Path, tmp_path: Path, *what: str) -> Path:
    output = tmp_path / "chain.lines.jsonl"
    assert run("export", *(what or ("--all",)), "--ledger", database, "--output", output, "--force").exit_code == 0
    return output


def failed(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in report["findings"] if one["status"] == "failed"]


class TestValid:
    def test_a_database_a_store_a_chain_a_file_an_envelope(
        self, database: Path, store: Path, key: Key, tmp_path: Path
    ) -> None:
        one = tmp_path / "one.json"
        one.write_text(run("show", AGENT, "1", "--ledger", database, "--json").stdout)
        for target in (database, f"sqlite:///{database}", store, store / AGENT, lines_of(database, tmp_path), one):
            report = run_json("verify", target, "--key", key.public)
            assert report["verdict"] == "valid", target
            assert report["key_id"] == key.signer.key_id
            assert "VALID" in run("verify", target, "--key", f"{key.path}.pub").stdout

    def test_the_key_may_come_from_the_environment(
        self, database: Path, key: Key, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PHIONYX_LETTA_VERIFY_KEY", f"{key.path}.pub")
        assert run("verify", "--ledger", database).exit_code == 0

    def test_several_keys_over_the_life_of_a_chain(self, database: Path, key: Key, tmp_path: Path) -> None:
        from phionyx_letta import get_signer

        public = generate_key(tmp_path / "second.key")
        ledger = SqlLedger(f"sqlite:///{database}")
        ledger.emit(
            change(AGENT, 9, "b2", "b2", "write", "", "x"),
            signer=get_signer({"PHIONYX_LETTA_SIGNING_KEY": str(tmp_path / "second.key")}),
        )
        ledger.close()
        assert run("verify", database, "--key", key.public).exit_code == 1
        assert run("verify", database, "--key", key.public, "--key", public).exit_code == 0

    def test_a_cut_tail_cannot_be_seen_and_that_is_said(self, database: Path, key: Key, tmp_path: Path) -> None:
        path = lines_of(database, tmp_path, AGENT)
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
        report = run_json("verify", path, "--key", key.public)
        assert report["dimensions"]["checkpoint"] == "not_measured"
        assert "a cut end cannot be seen" in run("verify", path, "--key", key.public).stdout

    def test_one_chain_of_a_ledger(self, database: Path, store: Path, key: Key) -> None:
        for target in (database, store):
            report = run_json("verify", target, "--trace", OTHER, "--key", key.public)
            assert (report["verdict"], report["envelopes"], report["chains"]) == ("valid", 1, 1)
            assert "no chain" in error_of("verify", target, "--trace", "nobody", "--key", key.public)


class TestNotMeasured:
    def test_nothing_is_valid_without_a_key(self, database: Path, store: Path, tmp_path: Path) -> None:
        for target in (database, store, store / AGENT, lines_of(database, tmp_path)):
            result = run("verify", target)
            assert result.exit_code == 2
            assert "not measured: no key was given" in result.stdout
            assert "VALID" not in result.stdout
            assert run_json("verify", target, code=2)["verdict"] == "not_measured"

    def test_a_fault_is_a_fault_without_a_key_too(self, database: Path) -> None:
        sql(database, "update phionyx_envelope set body = replace(body, 'Ada', 'Eve') where position = 1")
        assert run("verify", database).exit_code == 1

    def test_an_unsigned_chain(self, tmp_path: Path, key: Key) -> None:
        FilesystemEnvelopeStore(tmp_path / "s").emit(
            change("t", 0, "b", "b", "write", "", "x"), signer=UnsignedSigner()
        )
        report = run_json("verify", tmp_path / "s", "--key", key.public, code=2)
        assert "no envelope is signed" in report["reason"]

    def test_an_empty_ledger(self, tmp_path: Path, key: Key) -> None:
        SqlLedger(f"sqlite:///{tmp_path / 'empty.db'}").close()
        assert "no envelopes" in run_json("verify", tmp_path / "empty.db", "--key", key.public, code=2)["reason"]

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (["--key", "zz"], "64 hex digits"),
            (["--key", "/nowhere/key.pub"], "64 hex digits"),
            (["--ledger", "x"], "both"),
        ],
    )
    def test_bad_input(self, given: list[str], said: str, database: Path) -> None:
        assert said in error_of("verify", database, *given)

    def test_the_private_key_is_refused(self, database: Path, key: Key) -> None:
        assert "private key" in error_of("verify", database, "--key", key.path)

    def test_what_is_no_evidence(self, tmp_path: Path, key: Key) -> None:
        (tmp_path / "nothing").mkdir()
        assert "no chain" in error_of("verify", tmp_path / "nothing")
        assert "does not exist" in error_of("verify", tmp_path / "missing")
        (tmp_path / "broken.json").write_text("{")
        error_of("verify", tmp_path / "broken.json", code=1)
        (tmp_path / "noise.jsonl").write_bytes(bytes(range(256)))
        assert run("verify", tmp_path / "noise.jsonl", "--key", key.public).exit_code == 1


BODY = "update phionyx_envelope set body = "


class TestFailed:
    @pytest.mark.parametrize(
        ("statement", "place", "dimension", "said"),
        [
            (f"{BODY} replace(body, 'retention_policy', 'user_request')", (AGENT, 3), "hashes", "content tampered"),
            (
                f"{BODY} replace(body, '\"ed25519:', '\"ed25519:00') where position = 2",
                (AGENT, 2),
                "signatures",
                "not that of a trusted key",
            ),
            (f"{BODY} '{{' where position = 1", (AGENT, 1), "database", "not JSON"),
            (f"{BODY} '[]' where position = 1", (AGENT, 1), "hashes", "malformed"),
            ("delete from phionyx_envelope where position = 1", (AGENT, 1), "continuity", "something was removed"),
            ("delete from phionyx_envelope where position = 3", (AGENT, 3), "database", "its end was cut"),
            (f"delete from phionyx_envelope where trace_id = '{OTHER}'", (OTHER, 0), "database", "none is there"),
            ("update phionyx_envelope set kind = 'write' where kind = 'clear'", (AGENT, 3), "database", "column kind"),
            (
                "update phionyx_envelope set agent_id = null where position = 1",
                (AGENT, 1),
                "database",
                "column agent_id",
            ),
            (
                "update phionyx_envelope set block_id = 'b' where position = 1",
                (AGENT, 1),
                "database",
                "column block_id",
            ),
            (
                f"update phionyx_chain set head = 'sha256:0' where trace_id = '{OTHER}'",
                (OTHER, 0),
                "database",
                "recorded head",
            ),
            (f"delete from phionyx_chain where trace_id = '{OTHER}'", (OTHER, 0), "database", "head is not recorded"),
            ("update phionyx_block set after_hash = 'sha256:0'", None, "database", "recorded state of this block"),
            ("delete from phionyx_block", None, "database", "no state is recorded"),
            (
                "update phionyx_envelope set seq = 99 where position = 3",
                None,
                "database",
                "missing in the sealing order",
            ),
        ],
    )
    def test_names_the_place_and_what_differs(
        self, statement: str, place: tuple[str, int] | None, dimension: str, said: str, database: Path, key: Key
    ) -> None:
        sql(database, statement)
        report = run_json("verify", database, "--key", key.public, code=1)
        found = [one for one in failed(report) if said in one["message"] and one["dimension"] == dimension]
        assert found, report
        if place is not None:
            assert place in [(one["trace_id"], one["position"]) for one in found]
        shown = run("verify", database, "--key", key.public)
        assert shown.exit_code == 1
        assert shown.stdout.startswith("FAILED")
        assert said in shown.stdout

    def test_names_the_block_with_expected_and_found(self, database: Path, key: Key) -> None:
        sql(database, f"{BODY} replace(body, 'retention_policy', 'user_request')")
        finding = failed(run_json("verify", database, "--key", key.public, code=1))[0]
        assert finding["block_id"] == HUMAN
        assert finding["expected"] != finding["found"]
        assert finding["expected"].startswith("sha256:")

    def test_a_write_of_a_shared_block_taken_out_whole(self, database: Path, key: Key) -> None:
        """The other agent's only envelope is removed with all its traces: block linkage across chains still shows it."""
        sql(database, f"delete from phionyx_envelope where trace_id = '{OTHER}'")
        sql(database, f"delete from phionyx_chain where trace_id = '{OTHER}'")
        sql(database, "update phionyx_envelope set seq = seq - 1 where seq > 2")
        sql(database, "update phionyx_block set seq = seq - 1 where seq > 2")
        report = run_json("verify", database, "--key", key.public, code=1)
        assert [(one["dimension"], one["trace_id"], one["position"]) for one in failed(report)] == [
            ("block_linkage", AGENT, 3)
        ]

    def test_another_key(self, database: Path, tmp_path: Path) -> None:
        public = generate_key(tmp_path / "stranger.key")
        report = run_json("verify", database, "--key", public, code=1)
        assert report["dimensions"]["key_trust"] == "failed"

    def test_a_file_with_a_changed_a_missing_and_a_moved_line(self, database: Path, tmp_path: Path, key: Key) -> None:
        def edit(lines: list[str]) -> list[list[str]]:
            return [
                [line.replace("Ada", "Eve") for line in lines],
                lines[:1] + lines[2:],
                [lines[1], lines[0], *lines[2:]],
                lines[1:],
                [*lines, lines[-1]],
                [*lines[:-1], lines[-1][:40]],
                [line.replace(AGENT, "agent-x") for line in lines],
            ]

        path = lines_of(database, tmp_path)
        for edited in edit(path.read_text().splitlines()):
            path.write_text("\n".join(edited))
            assert run("verify", path, "--key", key.public).exit_code == 1

    def test_a_store_with_an_edited_envelope_and_a_torn_index(self, store: Path, key: Key) -> None:
        path = store / AGENT / "000001.json"
        path.write_text(path.read_text().replace("core_memory_append", "core_memory_delete"))
        assert (AGENT, 1) in [
            (one["trace_id"], one["position"]) for one in failed(run_json("verify", store, "--key", key.public, code=1))
        ]
        path.unlink()
        assert "missing" in run("verify", store, "--key", key.public).stdout

    @pytest.mark.parametrize(
        "edit",
        [
            lambda envelope: envelope["mutation"].update(block_label="other"),
            lambda envelope: envelope["integrity"].update(signature="unsigned"),
            lambda envelope: envelope["integrity"].update(extra="1"),
            lambda envelope: envelope.pop("subject"),
        ],
    )
    def test_a_single_envelope(
        self, edit: Callable[[dict[str, Any]], None], store: Path, key: Key, tmp_path: Path
    ) -> None:
        path = tmp_path / "edited.json"
        envelope = json.loads((store / AGENT / "000001.json").read_text())
        edit(envelope)
        path.write_text(json.dumps(envelope))
        assert run("verify", path, "--key", key.public).exit_code == 1

    def test_many_findings_are_counted(self, tmp_path: Path, key: Key) -> None:
        ledger = SqlLedger(f"sqlite:///{tmp_path / 'l.db'}")
        for turn in range(60):
            ledger.emit(change("t", turn, "b", "b", "write", str(turn), str(turn + 1)), signer=key.signer)
        ledger.close()
        sql(tmp_path / "l.db", f"{BODY} replace(body, '\"b\"', '\"c\"')")
        assert "more findings" in run("verify", tmp_path / "l.db", "--key", key.public).stdout


class TestExport:
    def test_lines_are_the_stored_envelopes(self, database: Path, tmp_path: Path, key: Key) -> None:
        answer = run_json("export", AGENT, "--ledger", database, "--output", tmp_path / "x.jsonl")
        assert (answer["envelopes"], answer["chains"]) == (4, 1)
        envelopes = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
        assert verify_chain(envelopes, expected_trace=AGENT)["valid"]
        ledger = SqlLedger(f"sqlite:///{database}")
        bodies = [row.body for row in ledger.select(trace_id=AGENT)]
        ledger.close()
        assert (tmp_path / "x.jsonl").read_text().splitlines() == bodies

    def test_a_folder_is_a_store(self, database: Path, store: Path, tmp_path: Path) -> None:
        for ledger in (database, store):
            output = tmp_path / f"out-{ledger.name}"
            assert (
                run_json("export", "--all", "--ledger", ledger, "--output", output, "--format", "folder")["chains"] == 2
            )
            copied, original = FilesystemEnvelopeStore(output), FilesystemEnvelopeStore(store)
            assert sorted(copied.traces()) == [AGENT, OTHER]
            assert copied.head(AGENT) != original.head(OTHER)
            assert [path.name for path in sorted((output / AGENT).glob("*.json"))] == [
                f"{n:06d}.json" for n in range(4)
            ]

    def test_the_whole_ledger_links_in_one_file(self, database: Path, tmp_path: Path, key: Key) -> None:
        report = run_json("verify", lines_of(database, tmp_path), "--key", key.public)
        assert report["dimensions"]["block_linkage"] == "ok"
        part = run_json("verify", lines_of(database, tmp_path, AGENT), "--key", key.public)
        assert (part["verdict"], part["dimensions"]["block_linkage"]) == ("valid", "not_measured")

    @pytest.mark.parametrize("form", ["jsonl", "folder"])
    def test_overwrites_only_when_told_to(self, form: str, database: Path, tmp_path: Path) -> None:
        command = ("export", "--all", "--ledger", database, "--output", tmp_path / "out", "--format", form)
        assert run(*command).exit_code == 0
        assert "--force" in error_of(*command)
        assert run(*command, "--force").exit_code == 0
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []

    def test_force_removes_no_foreign_folder(self, database: Path, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("x")
        error_of(
            "export", "--all", "--ledger", database, "--output", tmp_path / "mine", "--format", "folder", "--force"
        )
        assert (tmp_path / "mine" / "thesis.txt").exists()

    def test_a_tampered_chain_goes_to_lines_as_it_is_and_not_into_a_folder(
        self, database: Path, tmp_path: Path, key: Key
    ) -> None:
        sql(database, f"{BODY} replace(body, 'retention_policy', 'user_request')")
        line = error_of("export", AGENT, "--ledger", database, "--output", tmp_path / "f", "--format", "folder", code=1)
        assert "position 3" in line
        assert not (tmp_path / "f").exists()
        assert run("verify", lines_of(database, tmp_path, AGENT), "--key", key.public).exit_code == 1

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["--all"],
            ["nobody", "--output", "{tmp}/x"],
            [AGENT, "--all", "--output", "{tmp}/x"],
            ["--all", "-o", "/proc/x/y"],
        ],
    )
    def test_bad_input(self, arguments: list[str], database: Path, tmp_path: Path) -> None:
        result = run("export", "--ledger", database, *(one.format(tmp=tmp_path) for one in arguments))
        assert result.exit_code in (1, 2)
        assert result.stderr.startswith("error: ")
        assert "format" in error_of("export", "--all", "-o", tmp_path / "x", "--format", "zip", "--ledger", database)

    def test_a_moved_chain_folder_still_names_its_chain(self, store: Path, tmp_path: Path, key: Key) -> None:
        shutil.copytree(store / AGENT, tmp_path / "elsewhere" / AGENT)
        assert run("verify", tmp_path / "elsewhere" / AGENT, "--key", key.public).exit_code == 0
        assert "not 'x'" in error_of("verify", store / AGENT, "--trace", "x")


def test_the_changes_of_the_tests_are_what_they_say() -> None:
    assert [one.mutation_kind for one in changes()] == ["write", "append", "write", "consolidate", "clear"]


class TestCheckpoints:
    """`--checkpoint`: the database or the exported ledger against what was kept outside."""

    @pytest.fixture
    def outside(self, database: Path, key: Key, tmp_path: Path) -> Path:
        from phionyx_letta.ledger.log.folder import FolderSink
        from phionyx_letta.ledger.log.sink import Published
        from phionyx_letta.ledger.writer import LedgerWriter

        ledger = SqlLedger(f"sqlite:///{database}")
        with ledger.writing() as connection:
            assert connection is not None
            signed = LedgerWriter(connection, key.signer).log.issue(key.signer, "test/log")
        folder = tmp_path / "outside"
        FolderSink(folder, [key.public]).deliver(Published(*signed, ledger.consistency_proof))
        ledger.close()
        return folder

    def test_the_database_and_its_export_are_covered(
        self, database: Path, outside: Path, key: Key, tmp_path: Path
    ) -> None:
        for target in (database, lines_of(database, tmp_path)):
            for source in (outside, outside / "checkpoints"):
                report = run_json("verify", target, "--key", key.public, "--checkpoint", source)
                assert (report["verdict"], report["dimensions"]["checkpoint"]) == ("valid", "ok")
                assert report["covered"] == report["envelopes"]
        assert (
            "checkpoints cover the first"
            in run("verify", database, "--key", key.public, "--checkpoint", outside).stdout
        )

    def test_a_cut_end_fails(self, database: Path, outside: Path, key: Key, tmp_path: Path) -> None:
        path = lines_of(database, tmp_path)
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
        report = run_json("verify", path, "--key", key.public, "--checkpoint", outside, code=1)
        assert report["dimensions"]["checkpoint"] == "failed"
        assert "the end is missing" in report["reason"]

    def test_checkpoints_of_another_key_measure_nothing(
        self, database: Path, outside: Path, key: Key, tmp_path: Path
    ) -> None:
        other = generate_key(tmp_path / "other.key")
        report = run_json("verify", database, "--key", other, "--checkpoint", outside, code=1)
        assert report["dimensions"]["checkpoint"] == "not_measured"
        (outside / "checkpoints").write_text("nothing\n")
        report = run_json("verify", database, "--key", key.public, "--checkpoint", outside, code=2)
        assert "no checkpoint of a trusted key" in report["reason"]

    def test_what_cannot_be_compared_is_a_clear_error(
        self, database: Path, store: Path, outside: Path, key: Key, tmp_path: Path
    ) -> None:
        given = ("--checkpoint", outside)
        assert "public key" in error_of("verify", database, *given)
        assert "--trace" in error_of("verify", database, "--key", key.public, "--trace", AGENT, *given)
        assert "sealing" in error_of("verify", store, "--key", key.public, *given)
        assert "no checkpoints at" in error_of(
            "verify", database, "--key", key.public, "--checkpoint", tmp_path / "none"
        )
