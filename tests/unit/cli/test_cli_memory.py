"""`phionyx-letta memory`, on real files and stores."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from cli_helpers import error_of, run, run_json
from typer.testing import CliRunner, Result

from phionyx_letta import Ed25519Signer, FilesystemEnvelopeStore, verify_chain
from phionyx_letta.cli.app import app
from phionyx_letta.memory import LivingMemory, MemoryPatch, PatchStore
from phionyx_letta.memory.patches import transition

KEY = Ed25519Signer("11" * 32)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A project with a memory file, where the commands run."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "CLAUDE.md").write_text("a\n")
    return folder


def stored(name: str = "CLAUDE.md", before: str = "a\n", after: str = "a\nb\n", signer=None, **more) -> MemoryPatch:
    one = MemoryPatch(name, before, after, "", more.pop("rationale", "because it was said"), **more)
    if signer is not None:
        transition(one, "pending", by="living-memory", signer=signer)
    return PatchStore(".synapsekit_memory_patches.jsonl").save(one)


def answered(text: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["memory", *arguments], input=text)


class TestTheWholeWay:
    def test_apply_and_revert_in_the_seeds_words(self, here):
        one = stored()
        done = run("memory", "apply", one.patch_id)
        assert done.stdout.startswith(f"Applied patch {one.patch_id} to CLAUDE.md\n")
        assert (here / "CLAUDE.md").read_text() == "a\nb\n"
        done = run("memory", "revert", one.patch_id)
        assert done.stdout.startswith(f"Reverted patch {one.patch_id} — restored CLAUDE.md\n")
        assert (here / "CLAUDE.md").read_text() == "a\n"

    def test_approve_by_name_and_reason_then_apply(self, here):
        one = stored()
        said = run_json("memory", "approve", one.patch_id[:6], "--by", "ada", "--reason", "true")
        assert (said["patch_id"], said["status"]) == (one.patch_id, "approved")
        assert run_json("memory", "apply", one.patch_id)["status"] == "applied"
        (first, *_) = run_json("memory", "review", "--patch-id", one.patch_id)["history"]
        assert (first["by"], first["reason"]) == ("ada", "true")

    def test_reject(self, here):
        one = stored()
        assert (
            run("memory", "reject", one.patch_id, "--reason", "no").stdout
            == f"Rejected patch {one.patch_id} to CLAUDE.md\n"
        )
        assert run_json("memory", "log", "--status", "rejected")["count"] == 1

    def test_a_conflict_and_its_rebase(self, here):
        one = stored(before="a\nz\n", after="a\nz\nb\n")
        (here / "CLAUDE.md").write_text("mine\na\nz\n")
        said = run("memory", "apply", one.patch_id)
        assert said.exit_code == 1
        assert said.stderr.startswith("error: Cannot apply: CLAUDE.md has diverged")
        assert (here / "CLAUDE.md").read_text() == "mine\na\nz\n"
        new = run_json("memory", "rebase", one.patch_id)
        assert new["status"] == "pending"
        run("memory", "apply", new["patch_id"])
        assert (here / "CLAUDE.md").read_text() == "mine\na\nz\nb\n"

    def test_an_applied_patch_leaves_an_envelope_signed_with_the_configured_key(self, here, monkeypatch):
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", "11" * 32)
        one = stored(signer=KEY)
        assert run("memory", "apply", one.patch_id, "--ledger", "audit").exit_code == 0
        assert run("memory", "revert", one.patch_id, "--ledger", "audit").exit_code == 0
        chain = FilesystemEnvelopeStore("audit").iter_chain(f"file:{here / 'CLAUDE.md'}")
        report = verify_chain(chain, verifier=KEY.verifier())
        assert (report["valid"], report["checked"]) == (True, 2)
        assert run("verify", "audit", "--key", KEY.public_key_hex).exit_code == 0

    def test_evidence_goes_to_the_default_folder_and_into_a_database(self, here):
        run("memory", "apply", stored().patch_id)
        assert len(list(FilesystemEnvelopeStore().traces())) == 1
        run("memory", "apply", stored(before="a\nb\n", after="c\n").patch_id, "--ledger", f"sqlite:///{here}/ledger.db")
        assert run_json("log", "--ledger", str(here / "ledger.db"))["count"] == 1

    @pytest.mark.parametrize("ledger", [None, "an audit", "sqlite:///{here}/ledger.db"])
    @pytest.mark.parametrize("key", ["", "11" * 32])
    def test_it_says_where_the_envelope_went_and_the_command_it_prints_runs(self, here, monkeypatch, ledger, key):
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", key)
        more = ["--ledger", ledger.format(here=here)] if ledger else []
        one = stored(signer=KEY if key else None)
        for act in ("apply", "revert"):
            lines = run("memory", act, one.patch_id, *more).stdout.splitlines()
            where = (
                str(FilesystemEnvelopeStore().root)
                if ledger is None
                else "an audit"
                if "audit" in ledger
                else "ledger.db"
            )
            assert lines[1].startswith("Recorded in ")
            assert where in lines[1]
            program, *words = shlex.split(lines[2])
            assert program == "phionyx-letta"
            checked = run(*words)
            assert checked.exit_code == (0 if key else 2), checked.stdout
        said = run_json("memory", "apply", stored(signer=KEY if key else None).patch_id, *more)["evidence"]
        assert said["trace_id"] == f"file:{here / 'CLAUDE.md'}"
        assert run(*shlex.split(said["verify"])[1:]).exit_code == (0 if key else 2)

    def test_a_password_in_the_ledgers_url_is_not_repeated(self, here, empty_database):
        from sqlalchemy import make_url

        from phionyx_letta.ledger import tables

        server = make_url(tables.ledger_url(empty_database))
        url = server.set(drivername="postgresql", password="s3cret/pw").render_as_string(hide_password=False)
        said = run("memory", "apply", stored().patch_id, "--ledger", url).stdout
        assert "Recorded in postgresql://" in said
        assert "s3cret" not in said

    def test_a_store_in_a_database(self, here):
        where = f"sqlite:///{here}/patches.db"
        living = LivingMemory(["CLAUDE.md"], store_path=where)
        one = living.store.save(MemoryPatch("CLAUDE.md", "a\n", "b\n", "", "why"))
        living.store.ledger.close()
        assert run_json("memory", "apply", one.patch_id, "--store-path", where)["status"] == "applied"
        assert run_json("memory", "log", "--store-path", where)["patches"][0]["status"] == "applied"


class TestReview:
    def test_nothing_pending_here_while_a_servers_database_is_named(self, here, monkeypatch):
        monkeypatch.setenv("LETTA_PG_URI", "postgresql://letta@127.0.0.1/letta")
        assert 'export PHIONYX_LETTA_MEMORY_STORE="$LETTA_PG_URI"' in run("memory", "review").stdout
        monkeypatch.setenv("PHIONYX_LETTA_MEMORY_STORE", "patches.jsonl")
        assert run("memory", "review").stdout == "No pending memory patches to review.\n"

    def test_nothing_pending(self, here):
        assert run("memory", "review").stdout == "No pending memory patches to review.\n"
        assert run("memory", "log").stdout == "No patches found.\n"
        assert run_json("memory", "review") == {"patches": [], "count": 0}

    def test_the_list_names_each(self, here):
        one, other = stored(), stored(rationale="another reason")
        text = run("memory", "review").stdout
        assert one.patch_id in text
        assert other.patch_id in text
        assert "another reason" in text

    @pytest.mark.parametrize("status", ["pending", "applied"])
    def test_what_does_not_verify_is_marked_in_the_lists(self, here, monkeypatch, status):
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", "11" * 32)
        one = stored(signer=KEY)
        forged = {**one.to_dict(), "status": status, "after_content": "evil"}
        with Path(".synapsekit_memory_patches.jsonl").open("a") as file:
            file.write(json.dumps(forged) + "\n")
        lists = [("log",)] + [("review",)] * (status == "pending")
        for command in lists:
            assert "NOT valid: the history of patch" in run("memory", *command).stdout
            (shown,) = run_json("memory", *command)["patches"]
            assert (shown["patch_id"], bool(shown["signature_note"])) == (one.patch_id, True)
        assert run("memory", "reject", one.patch_id).exit_code == 0
        assert "NOT valid" not in run("memory", "log").stdout

    def test_one_in_detail(self, here, monkeypatch):
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", "11" * 32)
        evidence = [{"quote": "a quote", "role": "user", "message_index": 3, "context": "before a quote after"}]
        one = stored(
            signer=KEY,
            category="user",
            session_id="s7",
            metadata={
                "evidence": evidence,
                "untrusted": "only a tool said it",
                "file_seen": "first 9 of 99 characters",
                "pii": {"email": 2},
                "section": "Notes",
            },
        )
        text = run("memory", "review", "--patch-id", one.patch_id[:5]).stdout
        for expected in (
            f"Patch ID:     {one.patch_id}",
            "Signature:    ed25519, valid",
            "Seen:         the model was shown the first 9 of 99 characters of the file",
            "Trust:        untrusted: only a tool said it",
            "PII:          replaced 2 email",
            "Evidence:     user, message 3: “a quote”",
            "in context: before a quote after",
            "Category:     user, section Notes",
            "session s7",
            "Rationale:    because it was said",
            "Target:       as it was when the patch was made",
            "Changes:      +1 −0 lines",
            "+b",
        ):
            assert expected in text

    def test_what_a_patch_says_cannot_command_the_terminal(self, here):
        one = stored(rationale="\x1b[2J\u202eevil\nSignature:    ed25519, valid", after="a\n\x1b]0;x\x07\r\u202e\n")
        text = (
            run("memory", "review", "--patch-id", one.patch_id).stdout
            + run("memory", "review").stdout
            + run("memory", "log").stdout
        )
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "\nSignature:    ed25519, valid" not in text

    def test_a_forged_one_is_marked(self, here, monkeypatch):
        one = stored(signer=KEY)
        assert "NOT valid: the signature of patch" in run("memory", "review", "--patch-id", one.patch_id).stdout
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", "22" * 32)
        assert "NOT valid" in run("memory", "review", "--patch-id", one.patch_id).stdout
        monkeypatch.setenv("PHIONYX_LETTA_VERIFY_KEY", KEY.public_key_hex)
        assert "ed25519, valid" in run("memory", "review", "--patch-id", one.patch_id).stdout


class TestInteractively:
    def test_approve_reject_and_skip(self, here):
        ones = [stored(rationale=f"number {number}") for number in range(3)]
        done = answered("a\nr\nnot true\ns\n", "review", "--interactive", "--by", "ada")
        assert done.exit_code == 0, done.output
        assert [PatchStore(".synapsekit_memory_patches.jsonl").status(one.patch_id) for one in ones] == [
            "approved",
            "rejected",
            "pending",
        ]
        step = PatchStore(".synapsekit_memory_patches.jsonl").get(ones[1].patch_id).history[-1]
        assert (step["by"], step["reason"]) == ("ada", "not true")

    def test_edit(self, here, monkeypatch):
        one = stored()
        editor = here / "editor"
        editor.write_text(f"#!{sys.executable}\nimport sys\nopen(sys.argv[1], 'a').write('mine\\n')\n")
        editor.chmod(0o755)
        monkeypatch.setenv("EDITOR", str(editor))
        monkeypatch.delenv("VISUAL", raising=False)
        assert answered("e\n", "review", "-i").exit_code == 0
        (new,) = run_json("memory", "log", "--status", "approved")["patches"]
        run("memory", "apply", new["patch_id"])
        assert (here / "CLAUDE.md").read_text() == "a\nb\nmine\n"
        assert run_json("memory", "log", "--status", "rejected")["patches"][0]["patch_id"] == one.patch_id

    def test_quit_nonsense_and_the_end_of_input(self, here):
        stored()
        assert answered("x\nq\n", "review", "-i").exit_code == 0
        assert answered("", "review", "-i").exit_code == 130
        assert run_json("memory", "review")["count"] == 1
        assert answered("", "review", "-i", "--json").exit_code == 2

    def test_one_that_fails_does_not_stop_the_others(self, here):
        stored(signer=KEY)  # no key is configured here
        stored()
        done = answered("a\na\n", "review", "-i")
        assert done.exit_code == 1
        assert "no key is configured" in done.stderr
        assert run_json("memory", "log", "--status", "approved")["count"] == 1


class TestErrors:
    @pytest.mark.parametrize("act", ["apply", "revert", "approve", "reject", "rebase"])
    def test_an_unknown_id(self, here, act):
        assert "Patch 'ffff' not found." in error_of("memory", act, "ffff", code=1)
        assert "Patch '' not found." in error_of("memory", act, "", code=1)

    def test_an_ambiguous_one(self, here):
        for name in ("abc1", "abc2"):
            stored(patch_id=name)
        assert "2 patches begin with 'abc': abc1, abc2" in error_of("memory", "apply", "abc", code=1)

    def test_a_wrong_status(self, here):
        one = stored()
        run("memory", "apply", one.patch_id)
        assert f"Patch {one.patch_id} has status 'applied', cannot apply." in error_of(
            "memory", "apply", one.patch_id, code=1
        )

    def test_a_signature_that_does_not_verify(self, here):
        one = stored(signer=KEY)
        assert error_of("memory", "apply", one.patch_id, code=1).startswith(
            "error: Cannot apply: the signature of patch"
        )
        assert (here / "CLAUDE.md").read_text() == "a\n"

    def test_a_target_outside_the_managed_paths(self, here):
        (here / "notes.txt").write_text("a\n")
        assert "outside the managed paths" in error_of("memory", "apply", stored("notes.txt").patch_id, code=1)
        assert run("memory", "apply", stored("notes.txt").patch_id, "--path", "*.txt").exit_code == 0

    def test_managed_paths_by_setting(self, here, monkeypatch):
        monkeypatch.setenv("PHIONYX_LETTA_MEMORY_PATHS", os.pathsep.join(["*.txt", "other/**"]))
        assert "outside the managed paths" in error_of("memory", "apply", stored().patch_id, code=1)

    def test_options_that_mean_nothing(self, here):
        assert "no status 'done'" in error_of("memory", "log", "--status", "done")
        assert "no format 'xml'" in error_of("memory", "log", "--format", "xml")

    def test_a_secret_signs_and_a_wrong_one_is_told(self, here, monkeypatch):
        monkeypatch.setenv("PHIONYX_LETTA_MEMORY_SECRET", "s")
        living = LivingMemory(["CLAUDE.md"], signature_secret="s")
        one = MemoryPatch("CLAUDE.md", "a\n", "b\n", "", "why")
        transition(one, "pending", by="x", signer=living.signer)
        living.store.save(one)
        monkeypatch.setenv("PHIONYX_LETTA_MEMORY_SECRET", "t")
        assert "not signed by a trusted key" in error_of("memory", "apply", one.patch_id, code=1)
        monkeypatch.setenv("PHIONYX_LETTA_MEMORY_SECRET", "s")
        assert run("memory", "apply", one.patch_id).exit_code == 0

    def test_a_store_that_is_a_folder(self, here):
        assert "cannot be used" in error_of("memory", "log", "--store-path", ".")
        assert "cannot be used" in error_of("memory", "apply", "x", "--store-path", ".")

    def test_a_sentence_is_followed_by_what_to_do_as_another(self, here):
        said = error_of("memory", "apply", "ffff", code=1)
        assert said == "error: Patch 'ffff' not found. `phionyx-letta memory log` shows what there is\n"
        one = stored()
        run("memory", "apply", one.patch_id)
        assert error_of("memory", "apply", one.patch_id, code=1).endswith(
            "cannot apply. Only pending or approved patches can\n"
        )

    def test_a_rebase_without_a_merge_does_not_offer_itself(self, here):
        one = stored(after="b\n")
        (here / "CLAUDE.md").write_text("mine\n")
        assert error_of("memory", "rebase", one.patch_id, code=1) == (
            "error: Cannot rebase: CLAUDE.md has diverged since the patch was made; the same lines were changed: "
            "edit the file by hand, and reject the patch\n"
        )

    def test_a_name_with_a_lone_surrogate(self, here):
        line = stored().to_dict() | {"file_path": "a\ud800.md", "patch_id": "abc"}
        with Path(".synapsekit_memory_patches.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        assert error_of("memory", "apply", "abc", code=1)

    def test_what_path_means_is_told_for_each_command(self, here):
        assert "nothing else is ever written" in " ".join(run("memory", "apply", "--help").stdout.split())
        assert "sent to the model" in " ".join(run("memory", "propose", "--help").stdout.split())


class TestLog:
    def test_json_in_both_spellings(self, here):
        one = stored()
        said = json.loads(run("memory", "log", "--format", "json", "--limit", "20").stdout)
        assert said == run_json("memory", "log")
        assert said["patches"][0]["patch_id"] == one.patch_id

    def test_the_newest_are_kept(self, here):
        ones = [stored(created_at=f"2026-01-0{number}T00:00:00+00:00") for number in range(1, 5)]
        assert [one["patch_id"] for one in run_json("memory", "log", "-n", "2")["patches"]] == [
            one.patch_id for one in ones[2:]
        ]


class TestPropose:
    def test_paths_must_be_named(self, here):
        (here / "session.txt").write_text("user: hello\n")
        assert "no managed files are named" in error_of("memory", "propose", "session.txt")

    @pytest.mark.parametrize("name", ["missing.txt", "."])
    def test_a_session_that_cannot_be_read(self, here, name):
        assert "cannot be read" in error_of("memory", "propose", name, "--path", "*.md")

    @pytest.mark.parametrize(
        ("name", "data"), [("s.txt", b"\xff\xfe"), ("s.json", b"{}"), ("s.jsonl", b"[1]\n"), ("s.json", b"[[]")]
    )
    def test_a_session_that_is_none(self, here, name, data):
        (here / name).write_bytes(data)
        assert name in error_of("memory", "propose", name, "--path", "*.md")


class TestWhatWasReviewed:
    def test_approve_and_apply_are_bound_to_the_digest_that_review_shows(self, here):
        one = stored()
        seen = run_json("memory", "review", "--patch-id", one.patch_id)["content"]
        assert seen in run("memory", "review", "--patch-id", one.patch_id).stdout
        assert run_json("memory", "review")["patches"][0]["content"] == seen
        assert run_json("memory", "approve", one.patch_id, "--content", seen)["content"] == seen
        altered = {**one.to_dict(), "after_content": "a\nevil\n"}
        with Path(".synapsekit_memory_patches.jsonl").open("a") as file:
            file.write(json.dumps(altered) + "\n")
        for act in ("approve", "apply"):
            said = error_of("memory", act, one.patch_id, "--content", seen, code=1)
            assert "is not what was reviewed" in said
            assert "review it again" in said.lower()
        assert (here / "CLAUDE.md").read_text() == "a\n"

    def test_interactive_review_binds_by_itself(self, here, monkeypatch):
        """What is approved is what was on the screen, not what was put there while the person read it."""
        one = stored()
        store = PatchStore(".synapsekit_memory_patches.jsonl")

        def read_slowly(*_, **__):
            store.update(MemoryPatch.from_dict({**one.to_dict(), "after_content": "a\nevil\n"}))
            return "a"

        monkeypatch.setattr("typer.prompt", read_slowly)
        done = answered("", "review", "-i")
        assert done.exit_code == 1
        assert "is not what was reviewed" in done.stderr
        assert store.status(one.patch_id) == "pending"

    def test_the_policy_counts_at_the_command_line_too(self, here, monkeypatch):
        one = stored(signer=KEY)
        ada = Ed25519Signer("22" * 32)
        (here / "who.toml").write_text(f'[[reviewer]]\nname = "ada"\nkey = "{ada.public_key_hex}"\n')
        monkeypatch.setenv("PHIONYX_LETTA_REVIEWERS", "who.toml")
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", "11" * 32)
        assert "no reviewer's" in error_of("memory", "apply", one.patch_id, "--by", "ada", code=1)
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", "22" * 32)
        monkeypatch.setenv("PHIONYX_LETTA_VERIFY_KEY", KEY.public_key_hex)
        assert run_json("memory", "approve", one.patch_id)["status"] == "approved"
        assert run_json("memory", "apply", one.patch_id)["status"] == "applied"
        monkeypatch.setenv("PHIONYX_LETTA_REVIEWERS", "none.toml")
        assert "cannot be read" in error_of("memory", "revert", one.patch_id)

    def test_show_and_verify_check_who_decided(self, here, monkeypatch):
        one = stored(signer=KEY)
        ada = Ed25519Signer("22" * 32)
        for name, key in (("who", ada), ("other", KEY)):
            (here / f"{name}.toml").write_text(f'[[reviewer]]\nname = "ada"\nkey = "{key.public_key_hex}"\n')
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_KEY", "22" * 32)
        monkeypatch.setenv("PHIONYX_LETTA_VERIFY_KEY", KEY.public_key_hex)
        run("memory", "apply", one.patch_id, "--by", "ada", "--ledger", f"sqlite:///{here}/ledger.db")
        given = ("ledger.db", "--key", ada.public_key_hex)
        assert run_json("verify", *given)["dimensions"]["reviewers"] == "not_measured"
        assert "give --reviewers" in run("verify", *given).stdout
        assert run_json("verify", *given, "--reviewers", "who.toml")["dimensions"]["reviewers"] == "ok"
        failed = run_json("verify", *given, "--reviewers", "other.toml", code=1)
        assert failed["dimensions"]["reviewers"] == "failed"
        both = ("--reviewers", "other.toml", "--reviewers", "who.toml")
        assert run_json("verify", *given, *both)["dimensions"]["reviewers"] == "ok"
        place = ("show", f"file:{here / 'CLAUDE.md'}", "0", "--ledger", "ledger.db")
        assert run_json(*place)["reviewer_signature"] == "not_measured"
        assert run_json(*place, "--reviewers", "who.toml")["reviewer_signature"] == "ok"
        assert "signed by the reviewer's key" in run(*place, "--reviewers", "who.toml").stdout
        assert "no key of the reviewer" in run(*place, "--reviewers", "other.toml").stdout
        assert run_json(*place, "--reviewers", "other.toml", code=1)["reviewer_signature"] == "failed"
        monkeypatch.setenv("PHIONYX_LETTA_REVIEWERS", "who.toml")
        shown = run_json(*place)
        assert shown["reviewer_signature"] == "ok"
        (here / "one.json").write_text(json.dumps(shown))
        assert run_json("verify", "one.json", "--key", ada.public_key_hex)["dimensions"]["reviewers"] == "ok"
        assert "cannot be read" in error_of("verify", *given, "--reviewers", "none.toml")
