"""Signing by a program: real processes that sign, die, hang, lie and babble. Nothing waits for ever, nothing wrong is sealed."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from phionyx_letta import Ed25519Signer, get_signer
from phionyx_letta.checkpoint import Checkpoint, issue_checkpoint, open_checkpoint
from phionyx_letta.errors import PhionyxError, SigningKeyError
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.plugin.outbox import OutboxKey
from phionyx_letta.plugin.runtime import load_key
from phionyx_letta.settings import load_settings
from phionyx_letta.signing import sign_all
from phionyx_letta.signing_command import CommandSigner, load_secret

SEED = "55" * 32
KEY = Ed25519Signer(SEED)
SECRET = "ab" * 32
GOOD = """
import base64, sys
from phionyx_letta import Ed25519Signer
key = Ed25519Signer("SEED")
for line in sys.stdin:
    print(key.sign(base64.b64decode(line).decode()), flush=True)
"""


@pytest.fixture
def program(tmp_path: Path):  # type: ignore[no-untyped-def]
    """The command line of a Python program."""

    def make(code: str) -> str:
        path = tmp_path / f"signer-{len(list(tmp_path.iterdir()))}.py"
        path.write_text(code.replace("SEED", SEED))
        return shlex.join([sys.executable, str(path)])

    return make


def signer(command: str, **options: float) -> CommandSigner:
    return CommandSigner(command, KEY.public_key_hex, SECRET, **options)  # type: ignore[arg-type]


def test_it_signs_like_the_key(program) -> None:  # type: ignore[no-untyped-def]
    made = signer(program(GOOD))
    messages = [f"sha256:{number:064x}" for number in range(1234)]
    assert sign_all(made, messages) == [KEY.sign(message) for message in messages]
    assert (made.key_id, made.public_key_hex, made.algorithm) == (KEY.key_id, KEY.public_key_hex, "ed25519")
    pid = made._process.pid  # type: ignore[union-attr]
    note = issue_checkpoint(Checkpoint("test/log", 3, b"0" * 32), made)
    assert made._process.pid == pid, "one program for all"  # type: ignore[union-attr]
    assert open_checkpoint(note, [KEY.public_key_hex]).checkpoint.size == 3
    made.close()


BROKEN = {
    "it does not start": ("/nowhere/at/all", "cannot be run"),
    "it ends at once": ("exit(3)", "ended"),
    "it ends in the middle": (GOOD.replace("print(", "exit(4); print("), "ended"),
    "it hangs": ("import time\ntime.sleep(60)", "did not answer within"),
    "it stops half-way through an answer": (
        "import sys, time\nsys.stdin.readline()\nprint('ed25519:ab', end='', flush=True)\ntime.sleep(60)",
        "did not answer",
    ),
    "it says something else": (
        "import sys\nfor line in sys.stdin: print('sure', flush=True)",
        "no signature by its public key",
    ),
    "it says nothing": ("import sys\nfor line in sys.stdin: print(flush=True)", "no signature by its public key"),
    "it says too much": (
        GOOD.replace("flush=True)", "flush=False); print('x', flush=True)"),
        "more answers than|no signature",
    ),
    "it speaks without end": (
        "import sys\nsys.stdin.readline()\nwhile True: sys.stdout.write('x' * 100000)",
        "without end",
    ),
    "it signs with another key": (GOOD.replace("SEED", "66" * 32), "no signature by its public key"),
    "it signs something else": (
        GOOD.replace("base64.b64decode(line).decode()", "line"),
        "no signature by its public key",
    ),
    "it writes bytes that are no text": (
        "import sys\nfor line in sys.stdin: sys.stdout.buffer.write(bytes([255] * 9) + b'\\n'); sys.stdout.flush()",
        "no signature",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_program_is_a_clear_error(name: str, program) -> None:  # type: ignore[no-untyped-def]
    code, message = BROKEN[name]
    made = signer(code if code.startswith("/") else program(code), timeout=1.5)
    with pytest.raises(SigningKeyError, match=message) as caught:
        sign_all(made, ["sha256:" + "0" * 64, "sha256:" + "1" * 64])
    assert caught.value.remedy
    assert made._process is None, "what it may still say is not taken for an answer"


def test_a_program_that_died_is_started_again(program) -> None:  # type: ignore[no-untyped-def]
    made = signer(program(GOOD + "    exit(0)\n"))
    for number in range(3):
        assert made.sign(f"sha256:{number:064x}") == KEY.sign(f"sha256:{number:064x}")
        made._process.wait()  # type: ignore[union-attr]


def test_a_forked_child_starts_its_own(program) -> None:  # type: ignore[no-untyped-def]
    made = signer(program(GOOD))
    made.sign("a")
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[str] = context.Queue()
    child = context.Process(target=lambda: results.put(made.sign("b")))
    child.start()
    assert results.get(timeout=30) == KEY.sign("b")
    child.join()
    assert made.sign("c") == KEY.sign("c")
    made.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"PHIONYX_LETTA_SIGNING_COMMAND": "x"}, "PHIONYX_LETTA_PUBLIC_KEY is not"),
        ({"PHIONYX_LETTA_SIGNING_COMMAND": "x", "PHIONYX_LETTA_PUBLIC_KEY": "no"}, "public key"),
        ({"PHIONYX_LETTA_SIGNING_COMMAND": "'x", "PHIONYX_LETTA_PUBLIC_KEY": KEY.public_key_hex}, "cannot be read"),
        ({"PHIONYX_LETTA_SIGNING_COMMAND": "x", "PHIONYX_LETTA_SIGNING_KEY": SEED}, "both"),
    ],
)
def test_settings_that_make_no_signer(given: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SigningKeyError, match=message):
        get_signer({**given, "PHIONYX_LETTA_HOME": str(tmp_path)})


class TestSecret:
    """What authenticates rows cannot be derived from a key that nobody has, so it has a file of its own."""

    def test_it_is_made_once_and_closed_to_others(self, tmp_path: Path) -> None:
        path = tmp_path / "home" / "outbox.secret"
        assert load_secret(path) == load_secret(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert os.listdir(path.parent) == ["outbox.secret"]

    def test_workers_that_start_together_agree(self, tmp_path: Path) -> None:
        code = "import sys; from pathlib import Path; from phionyx_letta.signing_command import load_secret as load; "
        command = [sys.executable, "-c", code + "sys.stdin.read(); print(load(Path(sys.argv[1])))", str(tmp_path / "s")]
        workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(6)]
        assert len({worker.communicate(b"go")[0] for worker in workers}) == 1

    @pytest.mark.parametrize("content", [b"", b"short\n", b"\xff" * 64])
    def test_a_damaged_one_is_named(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "outbox.secret").write_bytes(content)
        with pytest.raises(SigningKeyError, match=r"in a line of 64|neither read nor made"):
            load_secret(tmp_path / "outbox.secret")

    def test_a_place_where_none_can_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(SigningKeyError, match="neither read nor made") as caught:
            load_secret(tmp_path / "file" / "outbox.secret")
        assert "PHIONYX_LETTA_HOME" in caught.value.remedy


def test_the_sealer_waits_for_a_program_that_fails(
    program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,  # type: ignore[no-untyped-def]
) -> None:
    """No row is refused, none is lost: they are sealed when it signs again."""
    from bundle_rows import put_row

    from phionyx_letta.plugin.checkpointing import CheckpointPolicy
    from phionyx_letta.plugin.sealer import Sealer

    monkeypatch.setenv("PHIONYX_LETTA_HOME", str(tmp_path))
    monkeypatch.setenv("PHIONYX_LETTA_PUBLIC_KEY", KEY.public_key_hex)
    ledger = SqlLedger(f"sqlite:///{tmp_path / 'ledger.db'}")
    for code, sealed in (("exit(1)", 0), (GOOD.replace("SEED", "66" * 32), 0), (GOOD, 3)):
        monkeypatch.setenv("PHIONYX_LETTA_SIGNING_COMMAND", program(code))
        key = load_key(load_settings())
        assert key.source == "PHIONYX_LETTA_SIGNING_COMMAND"
        assert isinstance(key.outbox, OutboxKey)
        put_row(ledger, key.outbox, f"block-{code[:9]}")
        sealer = Sealer(ledger, key, checkpoints=CheckpointPolicy("test/log", key.public_key or ""))
        if sealed:
            report = sealer.seal_pending()
            assert (report.sealed, report.refused) == (sealed, 0)
            assert report.checkpoint is not None
        else:
            with pytest.raises(PhionyxError, match="signing command"):
                sealer.seal_pending()
    assert all(
        KEY.verifier().verify(one["integrity"]["current"], one["integrity"]["signature"]) for one in ledger.iter_all()
    )
    ledger.close()
