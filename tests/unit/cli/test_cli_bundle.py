"""`export --bundle`, `verify` of it, and `keys`: as an operator and a reviewer use them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from bundle_rows import put_row
from cli_helpers import AGENT, OTHER, Key, error_of, run, run_json, waiting_row

from phionyx_letta import Ed25519Signer, get_signer
from phionyx_letta.evidence import container
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.notes import NoteKey, cosign_note, parse_note

SCRIPT = Path(container.__file__).with_name("verify_evidence.py")
NO_SITE = [sys.executable, "-I", "-S"]


@pytest.fixture
def sealed(database: Path, key: Key, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A ledger whose server's settings are here: a key, a sink, and what the sealer signed."""
    monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", str(key.path))
    monkeypatch.setenv("PHIONYX_LETTA_SINKS", f"folder:{tmp_path / 'sink'}")
    monkeypatch.setenv("PHIONYX_LETTA_LEDGER", str(database))
    return database


def seal(database: Path, signer: Ed25519Signer, block: str) -> str:
    """One more change, sealed with a checkpoint, which comes back."""
    from phionyx_letta.plugin.checkpointing import CheckpointPolicy
    from phionyx_letta.plugin.runtime import PluginKey
    from phionyx_letta.plugin.sealer import Sealer

    ledger = SqlLedger(f"sqlite:///{database}")
    key = PluginKey(signer, "test")
    put_row(ledger, key.outbox, block, agent=AGENT)
    report = Sealer(ledger, key, checkpoints=CheckpointPolicy("test/log", key.public_key or "")).seal_pending()
    ledger.close()
    assert report.checkpoint is not None
    return report.checkpoint[1]


def by_script(path: Path, *arguments: str, python: list[str] | None = None, **environment: str) -> tuple[int, str]:
    command = [*(python or [sys.executable]), str(SCRIPT), str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


class TestBundle:
    def test_from_export_to_verdict(self, sealed: Path, key: Key, tmp_path: Path) -> None:
        note = seal(sealed, key.signer, "block-new")
        outside, path = tmp_path / "outside", tmp_path / "evidence.zip"
        outside.write_text(note)
        made = run_json("export", "--bundle", "-o", path, "--checkpoint", outside)
        assert (made["envelopes"], made["log_size"], made["checkpoints"], made["public_keys"]) == (6, 6, 1, 1)
        for arguments in (["--key", key.public], ["--key", f"{key.path}.pub", "--checkpoint", str(outside)]):
            report = run_json("verify", path, *arguments)
            assert (report["verdict"], report["covered"], report["dimensions"]["checkpoint"]) == ("valid", 6, "ok")
            assert by_script(path, *arguments)[0] == 0
        assert "NOT MEASURED" in run("verify", path).stdout
        assert by_script(path)[0] == 2

    def test_one_agents_chain(self, sealed: Path, key: Key, tmp_path: Path) -> None:
        seal(sealed, key.signer, "block-new")
        path = tmp_path / "evidence.zip"
        assert run_json("export", "--bundle", OTHER, "-o", path)["envelopes"] == 1
        report = run_json("verify", path, "--key", key.public)
        assert (report["verdict"], report["dimensions"]["inclusion"]) == ("valid", "ok")
        assert run("export", "--bundle", OTHER, AGENT, "-o", path, "--force").exit_code == 0
        assert (
            run_json("verify", path, "--key", key.public)["dimensions"]["checkpoint"] == "ok"
        )  # that is all of the log

    def test_from_a_store_without_a_log(self, store: Path, key: Key, tmp_path: Path) -> None:
        path = tmp_path / "evidence.zip"
        run_json("export", "--bundle", "--ledger", store, "-o", path)
        report = run_json("verify", path, "--key", key.public)
        assert (report["verdict"], report["dimensions"]["inclusion"]) == ("valid", "not_measured")
        assert by_script(path, "--key", key.public)[0] == 0

    def test_the_script_in_the_bundle_is_the_one_of_the_package(self, sealed: Path, key: Key, tmp_path: Path) -> None:
        path = tmp_path / "evidence.zip"
        run_json("export", "--bundle", "-o", path)
        with zipfile.ZipFile(path) as file:
            assert file.read("verify_evidence.py") == SCRIPT.read_bytes()
            assert b"verify_evidence.py evidence.zip --key" in file.read("README.md")
        assert run("export", "--bundle", "-o", tmp_path / "again.zip").exit_code == 0

    @pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
    def test_by_openssl_where_cryptography_is_not(self, sealed: Path, key: Key, tmp_path: Path) -> None:
        seal(sealed, key.signer, "block-new")
        path = tmp_path / "evidence.zip"
        run_json("export", "--bundle", "-o", path)
        code, said = by_script(path, "--key", key.public, python=NO_SITE)
        assert (code, "signatures by openssl" in said) == (0, True), said
        assert by_script(path, "--key", "ab" * 32, python=NO_SITE)[0] == 1

    def test_by_neither_is_not_measured(self, sealed: Path, key: Key, tmp_path: Path) -> None:
        path = tmp_path / "evidence.zip"
        run_json("export", "--bundle", "-o", path)
        code, said = by_script(path, "--key", key.public, python=NO_SITE, PATH="/nowhere")
        assert (code, "NOT MEASURED" in said) == (2, True), said

    def test_used_wrongly(self, sealed: Path, key: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "evidence.zip"
        assert "give TRACE or --all" in error_of("export", "-o", path)
        assert "a bundle takes" in error_of("export", "--bundle")
        assert "no chain 'nobody'" in error_of("export", "--bundle", "nobody", "-o", path, code=1)
        assert "only a bundle takes" in error_of("export", AGENT, "-o", path, "--key", key.public)
        assert "several chains" in error_of("export", AGENT, OTHER, "-o", path)
        assert "there are no checkpoints at" in error_of(
            "export", "--bundle", "-o", path, "--checkpoint", tmp_path / "x"
        )
        assert not path.exists()
        run_json("export", "--bundle", "-o", path)
        assert "exists" in error_of("export", "--bundle", "-o", path)
        assert "as a whole" in error_of("verify", path, "--trace", AGENT)
        assert "from a key on" in error_of("verify", path, "--keys", path)
        path.write_bytes(b"PK broken")
        assert run("verify", path, "--key", key.public).exit_code == 1

    def test_the_script_used_wrongly(self, key: Key, tmp_path: Path) -> None:
        empty = tmp_path / "empty.zip"
        empty.write_bytes(b"")
        assert by_script(tmp_path / "nothing.zip")[0] == 2
        assert by_script(empty, "--key", key.public)[0] == 1
        for arguments in (["--key", "no"], ["--key", str(key.path)], ["--checkpoint", "x"], ["--keys", "x"]):
            code, said = by_script(empty, *arguments)
            assert (code, said.startswith("error: ")) == (2, True), said


class TestRotation:
    def test_the_new_key_takes_the_old_ones_name(self, sealed: Path, key: Key, tmp_path: Path) -> None:
        waiting_row(key, sealed)
        inode = key.path.stat().st_ino
        result = run_json("keys", "rotate")
        assert (result["signer"], result["log_size"], result["undelivered"]) == (key.public, 6, [])
        assert result["old_key_destroyed"] is True
        assert get_signer({"PHIONYX_LETTA_SIGNING_KEY": str(key.path)}).public_key_hex == result["subject"]  # type: ignore[attr-defined]
        assert sorted(os.listdir(key.path.parent)) == ["signing.key", "signing.key.old.pub", "signing.key.pub"]
        assert key.path.stat().st_ino != inode
        new = get_signer({"PHIONYX_LETTA_SIGNING_KEY": str(key.path)})
        seal(sealed, new, "block-later")  # type: ignore[arg-type]
        for arguments in ([], ["--checkpoint", tmp_path / "sink"]):
            assert run_json("verify", sealed, "--key", key.public, *arguments)["verdict"] == "valid"
        path = tmp_path / "evidence.zip"
        run_json("export", "--bundle", "-o", path, "--key", key.public)
        assert run_json("verify", path, "--key", key.public)["verdict"] == "valid"
        assert by_script(path, "--key", key.public)[0] == 0
        assert run("verify", sealed, "--key", result["subject"]).exit_code == 1

    def test_the_old_file_is_overwritten_before_it_goes(self, sealed: Path, key: Key) -> None:
        os.link(key.path, key.path.parent / "kept")
        secret = key.path.read_text().splitlines()[-1]
        run_json("keys", "rotate")
        left = (key.path.parent / "kept").read_bytes()
        assert left == b"\0" * len(left)
        assert all(secret.encode() not in file.read_bytes() for file in key.path.parent.iterdir())

    def test_it_can_be_kept_or_be_elsewhere(
        self, sealed: Path, key: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_json("keys", "rotate", "--keep-old")
        assert (key.path.parent / "signing.key.old").exists()
        result = run_json("keys", "rotate", "--new", tmp_path / "third.key")
        assert not key.path.exists()
        assert result["use"] == f"PHIONYX_LETTA_SIGNING_KEY={tmp_path / 'third.key'}"
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", str(tmp_path / "third.key"))
        assert run_json("verify", sealed, "--key", key.public)["verdict"] == "valid"
        assert "is the key that signs now" in error_of("keys", "rotate", "--new", tmp_path / "third.key")

    @pytest.mark.parametrize("step", ["overwritten", "public keys moved"])
    def test_interrupted_after_it_was_recorded(
        self, step: str, sealed: Path, key: Key, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from phionyx_letta.cli import keyfiles

        real, calls = os.replace, []

        def dies(*arguments: object) -> None:
            calls.append(arguments)
            if len(calls) > (0 if step == "overwritten" else 2):
                raise OSError("power cut")
            real(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(keyfiles.os, "replace", dies)
        assert run("keys", "rotate").exit_code != 0
        monkeypatch.undo()
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", str(key.path))
        result = run_json("keys", "rotate", "--ledger", sealed)
        assert result["signer"] == key.public
        assert sorted(os.listdir(key.path.parent)) == ["signing.key", "signing.key.old.pub", "signing.key.pub"]
        assert len(run_json("keys", "history", "--ledger", sealed)["statements"]) == 1

    def test_a_worker_that_lives_forbids_it(self, sealed: Path, key: Key) -> None:
        from datetime import UTC, datetime

        from phionyx_letta.ledger import tables

        ledger = SqlLedger(f"sqlite:///{sealed}")
        with ledger.engine.begin() as connection:
            row = {
                "worker_id": "host:1",
                "seen_at": datetime.now(UTC),
                "armed": True,
                "key_id": key.signer.key_id,
                "info": "{}",
            }
            connection.execute(tables.worker.insert().values(**row))
        ledger.close()
        assert "the worker host:1 runs with this key" in error_of("keys", "rotate")
        assert key.path.exists()

    def test_to_a_program(self, sealed: Path, key: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        new = Ed25519Signer("77" * 32)
        program = tmp_path / "signer.py"
        program.write_text(
            "import base64, sys\nfrom phionyx_letta import Ed25519Signer\nkey = Ed25519Signer('77' * 32)\n"
            "for line in sys.stdin: print(key.sign(base64.b64decode(line).decode()), flush=True)\n"
        )
        command = f"{sys.executable} {program}"
        assert "belong together" in error_of("keys", "rotate", "--new-command", command)
        result = run_json("keys", "rotate", "--new-command", command, "--new-public-key", new.public_key_hex)
        assert (result["subject"], result["old_key_destroyed"], key.path.exists()) == (new.public_key_hex, True, False)
        monkeypatch.delenv("PHIONYX_LETTA_SIGNING_KEY")
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_COMMAND", command)
        monkeypatch.setenv("PHIONYX_LETTA_PUBLIC_KEY", new.public_key_hex)
        assert run_json("seal")["key_id"] == new.key_id
        assert run_json("verify", sealed, "--key", key.public)["verdict"] == "valid"

    def test_a_sink_that_is_down_is_named_and_tried_again(self, sealed: Path, key: Key, tmp_path: Path) -> None:
        (tmp_path / "sink").write_text("not a folder")
        assert len(run_json("keys", "rotate")["undelivered"]) == 1
        assert run("keys", "history", "--publish").exit_code == 1
        (tmp_path / "sink").unlink()
        assert run_json("keys", "history", "--publish")["undelivered"] == []
        assert "key-rotation/v1" in (tmp_path / "sink" / "checkpoints").read_text()

    def test_without_a_key(self, database: Path) -> None:
        assert "no Ed25519 signing key" in error_of("keys", "rotate", "--ledger", database)


class TestRevocation:
    @pytest.fixture
    def cosigned(self, sealed: Path, key: Key, tmp_path: Path) -> tuple[Path, str]:
        """Checkpoints of 6, 7 and 8 envelopes, cosigned by a witness a day apart; then the key is replaced."""
        witness = Ed25519Signer("99" * 32)
        notes = []
        for day in range(3):
            note = parse_note(seal(sealed, key.signer, f"block-{day}"))
            time = 1_767_225_600 + day * 86_400  # 2026-01-01
            notes.append(f"{note}{cosign_note(note, 'witness.example', witness, time).line()}")
        (tmp_path / "outside").write_text("\n".join(notes))
        run_json("keys", "rotate")
        return tmp_path / "outside", str(NoteKey("witness.example", witness.public_key_hex, 4))

    def test_by_what_a_witness_saw_before(
        self, sealed: Path, key: Key, cosigned: tuple[Path, str], tmp_path: Path
    ) -> None:
        outside, witness = cosigned
        how = ("--from", "2026-01-02T12:00:00Z", "--checkpoint", outside, "--witness", witness)
        assert run_json("keys", "revoke", key.public, *how)["log_size"] == 7
        report = run_json("verify", sealed, "--key", key.public, code=1)
        assert report["dimensions"]["key_trust"] == "failed"
        assert [one["found"] for one in report["findings"] if one["dimension"] == "signatures"] == [key.signer.key_id]
        run_json("keys", "history", "--output", tmp_path / "statements")
        path = tmp_path / "evidence.zip"
        run_json("export", "--bundle", "-o", path, "--key", key.public)
        assert by_script(path, "--key", key.public)[0] == 1
        assert "key-revocation/v1" in (tmp_path / "statements").read_text()

    def test_by_the_operators_word_or_nothing_at_all(self, sealed: Path, key: Key, cosigned: tuple[Path, str]) -> None:
        outside, _ = cosigned
        assert (
            run_json("keys", "revoke", key.public, "--from", "2026-01-01", "--checkpoint", outside, "--up-to", 8)[
                "log_size"
            ]
            == 8
        )
        assert run("verify", sealed, "--key", key.public).exit_code == 0
        assert run_json("keys", "revoke", key.public, "--from", "2026-01-01", "--nothing")["log_size"] == 0
        assert run("verify", sealed, "--key", key.public).exit_code == 1

    def test_what_shows_nothing(self, sealed: Path, key: Key, cosigned: tuple[Path, str]) -> None:
        outside, witness = cosigned
        for how in (
            ("--from", "2026-01-01", "--checkpoint", outside, "--witness", witness),
            ("--from", "2026-06-01", "--checkpoint", outside),
            ("--from", "2026-06-01"),
        ):
            assert "no checkpoint is shown to be older" in error_of("keys", "revoke", key.public, *how)
        assert "is no date" in error_of("keys", "revoke", key.public, "--from", "yesterday")

    def test_the_signing_key_itself(self, sealed: Path, key: Key) -> None:
        assert "keys rotate" in error_of("keys", "revoke", key.public, "--from", "2026-01-01", "--nothing")
