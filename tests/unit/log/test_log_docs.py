"""The page on the log is followed to the letter, on a true log and on attacked ones."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from log_rig import ORIGIN

from phionyx_letta import Ed25519Signer, envelope_line
from phionyx_letta.checkpoint import Checkpoint, issue_checkpoint
from phionyx_letta.ledger.log.folder import FolderSink
from phionyx_letta.ledger.log.sink import Published
from phionyx_letta.merkle import MemoryTree, consistency_proof, leaf_hash

PAGE = (Path(__file__).parents[3] / "docs" / "log.md").read_text()
(SCRIPT,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(COMMAND,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def evidence(tmp_path: Path, signer: Ed25519Signer, chain) -> Path:
    tree = MemoryTree()
    sink = FolderSink(tmp_path, [signer.public_key_hex])
    lines = [envelope_line(envelope) for envelope in chain(signer, 11)]
    for number, line in enumerate(lines, start=1):
        tree.append(leaf_hash(line.encode()))
        if number in (1, 4, 7, 11):
            point = Checkpoint(ORIGIN, tree.size, tree.root())
            sink.deliver(
                Published(point, issue_checkpoint(point, signer), lambda old, new: consistency_proof(tree, old, new))
            )
    (tmp_path / "envelopes.jsonl").write_text("".join(line + "\n" for line in lines))
    (tmp_path / "key.pub").write_text(f"# phionyx-letta public key\n{signer.public_key_hex}\n")
    return tmp_path


def by_hand(folder: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def signature_verifies(folder: Path) -> bool:
    return subprocess.run(COMMAND.split(), cwd=folder, capture_output=True).returncode == 0


def test_a_true_log(evidence: Path) -> None:
    code, said = by_hand(evidence)
    assert (code, said.count("the root is the one that was signed")) == (0, 4), said


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_its_signature_by_openssl(evidence: Path) -> None:
    by_hand(evidence)
    assert signature_verifies(evidence)
    text = (evidence / "text").read_text()
    (evidence / "text").write_text(text.replace("\n11\n", "\n12\n"))
    assert not signature_verifies(evidence)


@pytest.mark.parametrize("keep", range(11))
def test_a_log_cut_at_any_place(evidence: Path, keep: int) -> None:
    lines = (evidence / "envelopes.jsonl").read_text().splitlines(keepends=True)
    (evidence / "envelopes.jsonl").write_text("".join(lines[:keep]))
    code, said = by_hand(evidence)
    assert code == 1
    assert "the end was cut off" in said


@pytest.mark.parametrize("place", range(11))
def test_a_log_changed_at_any_place(evidence: Path, place: int) -> None:
    lines = (evidence / "envelopes.jsonl").read_text().splitlines(keepends=True)
    lines[place] = lines[place].replace('"block-1"', '"block-2"')
    (evidence / "envelopes.jsonl").write_text("".join(lines))
    code, said = by_hand(evidence)
    assert code == 1
    assert "the past was rewritten" in said
