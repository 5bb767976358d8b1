"""The command `phionyx-letta` on SQLite ledgers, stores and files: what each command says, and the code it ends with."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import AGENT, HUMAN, NOTES, OTHER, ROOT, Key, change, error_of, run, run_json, sql, waiting_row

from phionyx_letta import (
    GENESIS_HASH,
    FilesystemEnvelopeStore,
    UnsignedSigner,
    build_memory_envelope,
    generate_key,
    get_signer,
)
from phionyx_letta.cli.app import app
from phionyx_letta.cli.reference import reference
from phionyx_letta.ledger.sql import SqlLedger

COMMANDS = (
    *("demo", "run", "doctor", "keygen", "log", "show", "explain", "verify", "seal", "baseline", "reconcile"),
    *("receipt", "export"),
    *(f"keys {one}" for one in ("rotate", "revoke", "history")),
    *(f"session {one}" for one in ("list", "show", "end", "retry")),
    *(f"code {one}" for one in ("ingest", "verify", "watch", "install", "uninstall", "status")),
    *(f"code {one}" for one in ("review", "approve", "reject", "rebase", "apply", "revert")),
    *(f"memory {one}" for one in ("propose", "review", "approve", "reject", "apply", "rebase", "revert", "log")),
)


class TestEveryCommand:
    def test_is_documented_in_the_reference_which_is_current(self) -> None:
        text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
        assert text == reference(app), "run: python -m phionyx_letta.cli.reference > docs/cli.md"
        documented = [line[3:] for line in text.splitlines() if line.startswith("## ")]
        groups = ("keys", "session", "code", "memory")
        assert [name for name in documented if name not in groups] == list(COMMANDS)
        assert "| |" not in text.replace("| | |", "")  # no option without a description

    @pytest.mark.parametrize("command", COMMANDS)
    def test_has_help_and_json(self, command: str) -> None:
        result = run(*command.split(), "--help")
        assert result.exit_code == 0
        assert "--json" in result.stdout

    @pytest.mark.parametrize("command", COMMANDS)
    def test_refuses_an_unknown_option_in_one_line(self, command: str) -> None:
        if command != "run":  # there it belongs to the command that is run
            assert "see `phionyx-letta" in error_of(*command.split(), "--no-such-option")

    @pytest.mark.parametrize("command", ["log", "verify", "seal", "baseline"])
    def test_says_how_to_give_a_ledger(self, command: str, monkeypatch: pytest.MonkeyPatch, key: Key) -> None:
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", str(key.path))
        assert "PHIONYX_LETTA_LEDGER" in error_of(command)

    @pytest.mark.parametrize(
        ("ledger", "said"),
        [
            ("mysql://host/db", "no ledger can live in mysql"),
            ("nonsense://", "no ledger"),
            ("postgresql://nobody:secret@127.0.0.1:9/none", "cannot be used"),
            ("/nowhere/at/all", "does not exist"),
            ("sqlite:////nowhere/ledger.db", "does not exist"),
        ],
    )
    def test_says_what_is_wrong_with_a_ledger(self, ledger: str, said: str) -> None:
        line = error_of("log", "--ledger", ledger)
        assert said in line
        assert "secret" not in line
        assert "Traceback" not in line

    def test_takes_the_ledger_from_the_settings(self, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LETTA_PG_URI", f"sqlite:///{database}")
        assert run_json("log")["count"] == 5
        monkeypatch.setenv("PHIONYX_LETTA_LEDGER", "/nowhere")
        assert "/nowhere" in error_of("log")

    def test_says_which_setting_is_wrong(self, monkeypatch: pytest.MonkeyPatch, database: Path) -> None:
        monkeypatch.setenv("PHIONYX_LETTA_ON_ERROR", "maybe")
        assert "PHIONYX_LETTA_ON_ERROR" in error_of("log")

    def test_of_no_name_is_not_guessed(self) -> None:
        assert "Did you mean 'verify'" in error_of("verfy")

    def test_none_given_shows_the_help(self) -> None:
        result = run()
        assert result.exit_code == 2
        assert "verify" in result.stdout

    def test_version(self) -> None:
        from phionyx_letta import __version__

        assert run("--version").stdout == f"phionyx-letta {__version__}\n"

    def test_imports_no_letta(self, database: Path) -> None:
        code = (
            "import sys\nfrom phionyx_letta.cli.app import app\n"
            "try: app(['verify', sys.argv[1]])\nexcept SystemExit: pass\n"
            "sys.exit(any(name.partition('.')[0] == 'letta' for name in sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", code, str(database)], capture_output=True)
        assert done.returncode == 0

    def test_has_no_colour_in_a_pipe(self, database: Path) -> None:
        for arguments in (("verify", database), ("log", "--ledger", database), ("doctor", "--ledger", database)):
            assert "\x1b" not in run(*arguments).output


class TestKeygen:
    def test_makes_a_pair_and_says_how_to_use_it(self, tmp_path: Path) -> None:
        path = tmp_path / "with space" / "signing.key"
        made = run_json("keygen", path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert made["public_key"] in Path(made["public_key_file"]).read_text()
        assert made["export"] == f"export PHIONYX_LETTA_SIGNING_KEY='{path}'"
        assert get_signer({"PHIONYX_LETTA_SIGNING_KEY": str(path)}).key_id == made["key_id"]

    def test_prints_no_private_key_and_overwrites_nothing(self, tmp_path: Path) -> None:
        result = run("keygen", tmp_path / "k")
        secret = (tmp_path / "k").read_text()
        assert secret.splitlines()[-1] not in result.output
        assert "exists" in error_of("keygen", tmp_path / "k")
        assert (tmp_path / "k").read_text() == secret


class TestRun:
    def script(self, *lines: str) -> str:
        return "\n".join(("import os, sys", *lines))

    def launch(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        program = "from phionyx_letta.cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", program, "run", "--", *command],
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
        )

    def test_arms_the_command_and_passes_arguments_and_exit_code_on(self) -> None:
        code = self.script(
            "from phionyx_letta.plugin import activation",
            "print(activation.is_armed(), 'letta' in sys.modules, sys.argv[1:], os.getpid())",
            "sys.exit(7)",
        )
        done = self.launch(sys.executable, "-c", code, "--json", "-x")
        assert done.returncode == 7, done.stderr
        assert done.stdout.startswith("True False ['--json', '-x']")

    def test_arms_without_the_pth_file_and_shadows_no_sitecustomize(self, tmp_path: Path) -> None:
        (tmp_path / "sitecustomize.py").write_text("import os; os.environ['THEIRS'] = __file__\n")
        alias = (
            tmp_path / "bin" / "python"
        )  # found elsewhere than in our environment, as another environment's would be
        alias.parent.mkdir()
        alias.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        alias.chmod(0o755)
        code = self.script(
            "import sitecustomize",
            "print(os.environ['THEIRS'], sitecustomize.__file__, 'bootstrap' in os.environ['PYTHONPATH'])",
            "from phionyx_letta.plugin import activation; print(activation.is_armed())",
        )
        done = self.launch(str(alias), "-c", code, PYTHONPATH=str(tmp_path))
        theirs = str(tmp_path / "sitecustomize.py")
        assert done.stdout.split() == [theirs, theirs, "True", "True"], done.stderr

    def test_an_interpreter_without_the_package_is_told_and_goes_on_or_not(self, tmp_path: Path) -> None:
        bootstrap = ROOT / "src" / "phionyx_letta" / "plugin" / "bootstrap"
        base = {"PYTHONPATH": str(bootstrap), "PATH": os.environ["PATH"], "PHIONYX_LETTA_ENABLE": "1"}
        command = [
            sys.executable,
            "-S",
            "-c",
            "import sys; sys.path[:] = [p for p in sys.path if 'src' not in p]; import sitecustomize",
        ]
        done = subprocess.run(command, capture_output=True, text=True, env={**base, "PYTHONPATH": ""})
        assert done.returncode == 1  # without our folder there is no sitecustomize at all
        code = f"import sys; sys.path.insert(0, {str(bootstrap)!r}); import sitecustomize; print('went on')"
        done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env=base)
        assert done.stdout == "went on\n"
        assert "nothing is recorded" in done.stderr
        closed = {**base, "PHIONYX_LETTA_ON_ERROR": "closed"}
        done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env=closed)
        assert (done.returncode, done.stdout) == (2, "")

    @pytest.mark.parametrize("command", ["no-such-command-anywhere", str(ROOT)])
    def test_says_that_there_is_no_such_command(self, command: str) -> None:
        result = run("run", "--", command)
        assert result.exit_code == 2
        assert command in result.stderr

    def test_needs_a_command(self) -> None:
        assert "no command" in error_of("run")


class TestLog:
    def test_shows_everything_newest_last(self, database: Path, store: Path) -> None:
        for ledger in (database, store, f"sqlite:///{database}"):
            kinds = [one["kind"] for one in run_json("log", "--ledger", ledger)["entries"]]
            assert kinds == ["write", "append", "write", "consolidate", "clear"]

    def test_fits_on_80_columns(self, database: Path) -> None:
        lines = run("log", "--ledger", database).stdout.splitlines()
        assert len(lines) == 7
        assert max(map(len, lines)) <= 80

    @pytest.mark.parametrize(
        ("options", "positions"),
        [
            (["--agent", OTHER], [0]),
            (["--trace", AGENT], [0, 1, 2, 3]),
            (["--block", HUMAN], [0, 1, 0, 3]),
            (["--block", "notes"], [2]),
            (["--kind", "clear"], [3]),
            (["--event", "create"], [0]),
            (["--run", "run-1", "--limit", "2"], [2, 3]),
            (["--run", "run-2"], []),
            (["--since", "1h"], [0, 1, 0, 2, 3]),
            (["--until", "1h ago"], []),
            (["--since", "2020-01-01", "--until", "2020-01-02T10:00:00Z"], []),
        ],
    )
    def test_filters(self, options: list[str], positions: list[int], database: Path, store: Path) -> None:
        for ledger in (database, store):
            entries = run_json("log", "--ledger", ledger, *options)["entries"]
            assert [one["position"] for one in entries] == positions

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--kind", "erase"], "write, append"),
            (["--since", "yesterday"], "ISO 8601"),
            (["--limit", "0"], "--limit"),
            (["--limit", "many"], "--limit"),
        ],
    )
    def test_explains_bad_values(self, options: list[str], said: str, database: Path) -> None:
        assert said in error_of("log", "--ledger", database, *options)

    def test_follow_shows_what_is_sealed_later(self, database: Path, key: Key) -> None:
        program = "from phionyx_letta.cli import main; main()"
        command = [sys.executable, "-u", "-c", program, "log", "--ledger", str(database), "--follow"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                for _ in range(7):
                    process.stdout.readline()
                ledger = SqlLedger(f"sqlite:///{database}")
                ledger.emit(change(AGENT, 4, NOTES, "fresh", "append", "x", "xy"), signer=key.signer)
                ledger.close()
                assert "fresh" in process.stdout.readline()
            finally:
                process.terminate()

    def test_follow_does_not_go_with_json_or_a_folder(self, database: Path, store: Path) -> None:
        assert "--follow" in run_json("log", "--ledger", database, "--follow", code=2)["error"]
        assert "folder" in run("log", "--ledger", store, "--follow").stderr

    def test_content_cannot_command_the_terminal(self, tmp_path: Path, key: Key) -> None:
        store = FilesystemEnvelopeStore(tmp_path / "evil")
        store.emit(change("t", 0, "b", "\x1b[2Jlabel\n[red]x", "write", "", "\x1b]0;title\x07"), signer=key.signer)
        for command in (("log",), ("show", "t", "0")):
            shown = run(*command, "--ledger", tmp_path / "evil").stdout
            assert "\x1b" not in shown
            assert "\\x1b" in shown


class TestShow:
    def test_by_hash_or_by_place(self, database: Path, store: Path) -> None:
        for ledger in (database, store):
            entry = run_json("log", "--ledger", ledger)["entries"][1]
            for ref in ([entry["hash"]], [f"envelope://{entry['hash']}"], [entry["hash"][7:15]], [AGENT, "1"]):
                shown = run_json("show", *ref, "--ledger", ledger)
                assert shown["position"] == 1
                assert shown["envelope"]["integrity"]["current"] == entry["hash"]

    def test_is_a_page_with_who_why_what_and_the_diff(self, database: Path, key: Key) -> None:
        page = run("show", AGENT, "1", "--ledger", database).stdout
        for said in (
            "append",
            "core_memory_append",
            "run-1",
            HUMAN,
            "+tea",
            "envelope://sha256:abab",
            key.signer.key_id,
        ):
            assert said in page
        assert max(map(len, page.splitlines())) <= 80
        assert "2 memories into s1" in run("show", AGENT, "2", "--ledger", database).stdout
        assert "retention_policy" in run("show", AGENT, "3", "--ledger", database).stdout

    def test_an_ambiguous_beginning_lists_what_it_may_be(self, tmp_path: Path) -> None:
        seen: dict[str, dict[str, Any]] = {}
        for number in count():  # two of some hundred hashes begin with the same four digits
            envelope = build_memory_envelope(
                change(f"t{number}", 0, "b", "b", "write", "", "x"),
                previous_hash=GENESIS_HASH,
                package_version="1",
                signer=UnsignedSigner(),
            )
            twice = envelope["integrity"]["current"][7:11]
            if twice in seen:
                break
            seen[twice] = envelope
        ledger = SqlLedger(f"sqlite:///{tmp_path / 'many.db'}")
        for one in (seen[twice], envelope):
            ledger.append(one["subject"]["trace_id"], one)
        ledger.close()
        line = error_of("show", twice, "--ledger", tmp_path / "many.db")
        assert "2 envelopes begin with" in line
        assert "give more digits" in line

    @pytest.mark.parametrize(
        ("ref", "code"),
        [(["0000000000"], 1), (["not-a-hash"], 2), (["ab"], 2), ([AGENT, "99"], 1), (["nobody", "0"], 1)],
    )
    def test_says_that_there_is_no_such_envelope(self, ref: list[str], code: int, database: Path, store: Path) -> None:
        for ledger in (database, store):
            error_of("show", *ref, "--ledger", ledger, code=code)


class TestSeal:
    @pytest.fixture(autouse=True)
    def _with_the_key(self, monkeypatch: pytest.MonkeyPatch, key: Key) -> None:
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", str(key.path))

    def test_seals_what_waits(self, database: Path, key: Key) -> None:
        waiting_row(key, database)
        sealed = run_json("seal", "--ledger", database)
        assert (sealed["sealed"], sealed["refused"], sealed["waiting"]) == (1, 0, 0)
        assert run_json("verify", database, "--key", key.public)["envelopes"] == 6
        assert "sealed 0" in run("seal", "--ledger", database).stdout

    def test_a_forged_row_is_refused(self, database: Path, key: Key) -> None:
        waiting_row(key, database, forge=lambda payload: payload.replace("block-hello", "block-other"))
        refused = run_json("seal", "--ledger", database, code=1)
        assert (refused["sealed"], refused["refused"]) == (0, 1)
        assert "MAC" in refused["refusals"][0]

    def test_another_key_refuses_nothing(
        self, database: Path, key: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waiting_row(key, database)
        generate_key(tmp_path / "other.key")
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", str(tmp_path / "other.key"))
        assert key.signer.key_id in error_of("seal", "--ledger", database)
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", str(key.path))
        assert run_json("seal", "--ledger", database)["sealed"] == 1

    def test_makes_no_key(self, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PHIONYX_LETTA_SIGNING_KEY")
        monkeypatch.setenv("PHIONYX_LETTA_HOME", str(tmp_path / "empty"))
        assert "no signing key" in error_of("seal", "--ledger", database)
        assert not (tmp_path / "empty").exists()

    def test_baseline_needs_the_database_of_a_letta_server(self, database: Path) -> None:
        assert "not the database of a Letta server" in error_of("baseline", "--ledger", database)


class TestDoctor:
    def findings(self, *arguments: object, code: int) -> dict[str, list[dict[str, str]]]:
        by_check: dict[str, list[dict[str, str]]] = {}
        for one in run_json("doctor", *arguments, code=code)["findings"]:
            assert set(one) == {"check", "status", "message", "remedy"}
            by_check.setdefault(one["check"], []).append(one)
        return by_check

    def test_without_a_ledger_nothing_is_measured(self) -> None:
        found = self.findings(code=2)
        assert found["ledger"][0]["status"] == "fail"
        assert "PHIONYX_LETTA_LEDGER" in found["ledger"][0]["remedy"]
        assert run_json("doctor", code=2)["status"] == "not_measured"

    def test_an_unreachable_ledger_is_not_measured(self) -> None:
        found = self.findings("--ledger", "postgresql://u:secret@127.0.0.1:9/x", code=2)
        assert "secret" not in json.dumps(found)

    def test_a_database_nobody_recorded_in_fails(self, tmp_path: Path) -> None:
        sqlite3.connect(tmp_path / "empty.db").execute("create table x (y)").connection.commit()
        found = self.findings("--ledger", tmp_path / "empty.db", code=1)
        assert "nothing was ever recorded" in found["ledger"][0]["message"]

    def test_all_is_well(self, database: Path, key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", str(key.path))
        found = self.findings("--ledger", database, code=0)
        assert key.signer.key_id in found["key here"][0]["message"]
        assert found["outbox"][0]["status"] == "ok"
        shown = run("doctor", "--ledger", database)
        assert shown.exit_code == 0
        assert max(map(len, shown.stdout.splitlines())) <= 80

    def test_names_a_refused_row(self, database: Path, key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
        waiting_row(key, database)
        sql(database, "update phionyx_outbox set refused = 'its MAC does not match'")
        found = self.findings("--ledger", database, code=1)
        assert "its MAC does not match" in found["outbox"][1]["message"]

    def test_an_outbox_nobody_seals_fails(self, database: Path, key: Key) -> None:
        waiting_row(key, database)
        assert self.findings("--ledger", database, code=0)["outbox"][0]["status"] == "ok"
        sql(
            database,
            "update phionyx_outbox set created_at = ?",
            str(datetime.now(UTC).replace(tzinfo=None) - timedelta(hours=1)),
        )
        assert "nobody seals" in self.findings("--ledger", database, code=1)["outbox"][0]["message"]

    def test_a_bad_key_fails_and_none_is_made(
        self, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PHIONYX_LETTA_HOME", str(tmp_path / "home-of-keys"))
        assert self.findings("--ledger", database, code=0)["key here"][0]["status"] == "warn"
        assert not (tmp_path / "home-of-keys").exists()
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", "/nowhere/key")
        assert self.findings("--ledger", database, code=1)["key here"][0]["status"] == "fail"

    @pytest.mark.parametrize(
        ("version", "server", "status", "said"),
        [
            ("0.16.8", True, "ok", "supported"),
            ("0.16.7", True, "warn", "tested with letta 0.16.8"),
            ("0.34.12", False, "warn", "Letta Code"),
            (None, False, "ok", "none is installed"),
        ],
    )
    def test_says_which_letta_is_here(
        self, version: str | None, server: bool, status: str, said: str, database: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from importlib.metadata import PackageNotFoundError

        from phionyx_letta.cli import examine

        def installed(_name: str) -> str:
            if version is None:
                raise PackageNotFoundError
            return version

        monkeypatch.setattr(examine, "version", installed)
        monkeypatch.setattr(examine, "_has_server", lambda: server)
        found = self.findings("--ledger", database, code=0)["letta"][0]
        assert found["status"] == status
        assert said in found["message"]
