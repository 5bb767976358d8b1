"""`receipt`: proves offline that something was forgotten, and gives nothing away."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from block_rig import BlockRig
from cli_helpers import error_of, run, run_json
from outbox_rig import new_key

from phionyx_letta.diff import content_hash
from phionyx_letta.plugin.checkpointing import CheckpointPolicy
from phionyx_letta.plugin.sealer import Sealer
from phionyx_letta.signing import load_verifier

A, B = "agent-a", "agent-b"


class Forgetting:
    """A block that was forgotten, with its log."""

    def __init__(self, rig: BlockRig, folder: Path) -> None:
        self.rig, self.folder = rig, folder
        self.public = rig.key.signer.public_key_hex  # type: ignore[attr-defined]

    def seal(self, *, checkpoint: bool = True) -> None:
        policy = CheckpointPolicy("test/log", self.public) if checkpoint else None
        Sealer(self.rig.ledger, self.rig.key, checkpoints=policy).seal_pending()

    def receipt(self, *options: str) -> dict[str, Any]:
        digest = self.rig.envelopes()[-1]["integrity"]["current"]
        done = run("receipt", digest, *options)
        assert done.exit_code == 0, done.output
        made: dict[str, Any] = json.loads(done.stdout)
        return made

    def verified(self, receipt: object, *options: str, code: int = 0) -> dict[str, Any]:
        path = self.folder / "receipt.json"
        path.write_text(json.dumps(receipt))
        return run_json("verify", path, *(options or ("--key", self.public)), code=code)


@pytest.fixture
def forgetting(empty_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Forgetting]:
    rig = BlockRig(empty_database)
    monkeypatch.setenv("PHIONYX_LETTA_LEDGER", empty_database)
    yield Forgetting(rig, tmp_path)
    rig.close()


@pytest.fixture
def forgotten(forgetting: Forgetting) -> Forgetting:
    with forgetting.rig.armed():
        forgetting.rig.create("block-0", "other", A)
        forgetting.rig.create("block-1", "4711", A)
        forgetting.rig.detach("block-1", A, "explicit_user_request")
    forgetting.seal()
    return forgetting


class TestSays:
    def test_who_why_when_which_block_and_how_much(self, forgotten: Forgetting) -> None:
        made = forgotten.receipt()
        said = made["statement"]
        assert (said["forgotten"], said["event"], said["reason"]) == ("forget", "detach", "explicit_user_request")
        assert (said["block_id"], said["block_label"], said["chain"], said["position"]) == ("block-1", "human", A, 2)
        assert (said["sizes"]["before_size_bytes"], said["producer"]) == (4, "letta.server")
        assert made["salt"]["state"] == "destroyed"
        report = forgotten.verified(made)
        assert (report["verdict"], report["dimensions"]["receipt"], report["dimensions"]["checkpoint"]) == (
            "valid",
            "ok",
            "ok",
        )
        assert forgotten.verified(made, "--key", new_key().signer.public_key_hex, code=1)["verdict"] == "failed"  # type: ignore[attr-defined]

    def test_without_a_key_nothing_is_valid(self, forgotten: Forgetting) -> None:
        path = forgotten.folder / "receipt.json"
        path.write_text(json.dumps(forgotten.receipt()))
        assert run_json("verify", path, code=2)["verdict"] == "not_measured"

    def test_nothing_that_can_be_guessed(self, forgotten: Forgetting) -> None:
        text = json.dumps(forgotten.receipt())
        stored = set(re.findall("[0-9a-f]{64}", text))
        assert '"4711"' not in text
        assert stored.isdisjoint(hashlib.sha256(f"{number:04}".encode()).hexdigest() for number in range(10_000))

    def test_of_a_shared_block_that_the_salt_lives_until_the_next_write(self, forgetting: Forgetting) -> None:
        rig = forgetting.rig
        with rig.armed():
            rig.create("block-1", "4711", A, B)
            rig.detach("block-1", A)
            forgetting.seal()
            digest = rig.envelopes()[-1]["integrity"]["current"]
            assert forgetting.receipt()["salt"]["state"] == "not destroyed yet"
            rig.set("block-1", value="other")
            forgetting.seal()
        made = json.loads(run("receipt", digest).stdout)
        assert made["salt"]["state"] == "destroyed"
        assert made["destruction"]["subject"]["metadata"]["letta"]["event"] == "update"
        assert forgetting.verified(made)["verdict"] == "valid"
        assert forgetting.verified({**made, "destruction": None}, code=1)["verdict"] == "failed"

    def test_a_deletion_and_a_log_without_a_checkpoint(self, forgetting: Forgetting) -> None:
        with forgetting.rig.armed():
            forgetting.rig.create("block-1", "4711")
            forgetting.rig.delete("block-1", "retention")
        forgetting.seal(checkpoint=False)
        made = forgetting.receipt()
        assert (made["statement"]["forgotten"], made["inclusion"]) == ("delete", None)
        report = forgetting.verified(made)
        assert (report["verdict"], report["dimensions"]["checkpoint"]) == ("valid", "not_measured")

    def test_and_is_written_to_a_file_once(self, forgotten: Forgetting) -> None:
        digest = forgotten.rig.envelopes()[-1]["integrity"]["current"]
        path = forgotten.folder / "r.json"
        assert "salt destroyed" in run("receipt", digest, "-o", path).stdout
        assert "VALID" in run("verify", path, "--key", forgotten.public).stdout
        assert "cannot be written" in error_of("receipt", digest, "-o", path)


class TestRefuses:
    def test_bare_hashes_unless_told(self, forgetting: Forgetting) -> None:
        with forgetting.rig.armed(forgetting.rig.runtime("plain")):
            forgetting.rig.create("block-1", "4711", A)
            forgetting.rig.detach("block-1", A)
        forgetting.seal()
        digest = forgetting.rig.envelopes()[-1]["integrity"]["current"]
        assert "are bare" in error_of("receipt", digest, code=1)
        made = forgetting.receipt("--guessable")
        assert made["salt"]["state"].startswith("none")
        assert content_hash("4711") in json.dumps(made)
        assert forgetting.verified(made)["verdict"] == "valid"

    def test_content_always(self, forgetting: Forgetting) -> None:
        with forgetting.rig.armed(forgetting.rig.runtime("plain", include_diff_text=True)):
            forgetting.rig.create("block-1", "4711")
            forgetting.rig.delete("block-1")
        forgetting.seal()
        digest = forgetting.rig.envelopes()[-1]["integrity"]["current"]
        assert "keeps the content" in error_of("receipt", digest, "--guessable", code=1)

    def test_what_forgot_nothing(self, forgotten: Forgetting) -> None:
        digest = forgotten.rig.envelopes()[0]["integrity"]["current"]
        assert "nothing was forgotten" in error_of("receipt", digest, code=1)
        assert "no envelope has a hash" in error_of("receipt", "ffffffff" * 8, code=1)


def _edits(made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path, value in (
        (("statement", "reason"), "nobody asked"),
        (("statement", "at"), "2020-01-01T00:00:00+00:00"),
        (("statement", "block_id"), "block-0"),
        (("statement", "more"), 1),
        (("salt", "state"), "not destroyed yet"),
        (("envelope", "mutation", "forgetting_reason"), "x"),
        (("envelope", "integrity", "signature"), "unsigned"),
        (("envelope", "subject"), None),
        (("inclusion", "index"), 1),
        (("inclusion", "index"), -1),
        (("inclusion", "index"), True),
        (("inclusion", "proof"), []),
        (("inclusion", "proof"), ["zz"]),
        (("inclusion", "proof"), 7),
        (("inclusion", "checkpoint"), "x"),
        (("inclusion",), []),
        (("destruction",), {}),
        (("destruction",), made["envelope"] | {"x": 1}),
        (("schema2",), 1),
    ):
        edited = copy.deepcopy(made)
        place: Any = edited
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        yield edited


def test_edited_anywhere_it_fails_and_ends_in_no_traceback(forgotten: Forgetting) -> None:
    made = forgotten.receipt()
    for edited in _edits(made):
        assert forgotten.verified(edited, code=1)["verdict"] == "failed", edited
    for name in made:
        without = {key: value for key, value in made.items() if key != name}
        assert forgotten.verified(without, code=1)["verdict"] == "failed"


def test_it_needs_no_database_to_verify(forgotten: Forgetting) -> None:
    import subprocess
    import sys

    path = forgotten.folder / "receipt.json"
    path.write_text(json.dumps(forgotten.receipt()))
    script = (
        "import sys, json; sys.modules['sqlalchemy'] = None\n"
        "from phionyx_letta.ledger.receipt import verify_receipt\n"
        "from phionyx_letta.signing import TrustedKeys, load_verifier\n"
        f"keys = TrustedKeys([load_verifier({forgotten.public!r})])\n"
        f"print(verify_receipt(json.load(open({str(path)!r})), verifier=keys).verdict)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "valid\n"
    assert load_verifier(forgotten.public).verify("x", "y") is False
