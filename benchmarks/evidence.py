"""Bundles of evidence: hashes alone and with every signature, beside the bare primitives; the memory it takes; the script."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chains import SEED, envelopes
from measuring import interleaved, medians, quiet, ratio, seconds

from phionyx_letta import Ed25519Signer
from phionyx_letta.evidence import container
from phionyx_letta.evidence.exporting import write_bundle
from phionyx_letta.evidence.verifying import verify_bundle
from phionyx_letta.keys import Keyring
from phionyx_letta.ledger.gathering import gather
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.ledger.writer import LedgerWriter

if TYPE_CHECKING:
    from catalogue import Bench

Measured = tuple[float, dict[str, Any]]
SIZE = 100_000
_BATCH = 1000
_SIGNER = Ed25519Signer(SEED)
_KEY = _SIGNER.public_key_hex


def signatures(bench: Bench) -> Measured:
    """A bundle of 100 000 envelopes verified, log and all, against its signatures checked by `cryptography` alone.

    The bare rate is taken over 10 000 of them before or after each round.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    path, key = _bundle(bench, SIZE), Ed25519PublicKey.from_public_bytes(bytes.fromhex(_KEY))
    with zipfile.ZipFile(path) as file, file.open("envelopes.jsonl") as lines:
        parts = [json.loads(lines.readline())["integrity"] for _ in range(10_000)]
    signed = [(bytes.fromhex(one["signature"][8:]), one["current"].encode("ascii")) for one in parts]

    def bare() -> float:
        return seconds(lambda: [key.verify(*one) for one in signed]) * SIZE / len(signed)

    return _rates(bench, bare, lambda: seconds(lambda: _verify(path, with_key=True)))


def hashes(bench: Bench) -> Measured:
    """The same bundle without a key: hashes, chains and the log, against SHA-256 of the same lines, twice each as it is needed."""
    path = _bundle(bench, SIZE)
    with zipfile.ZipFile(path) as file, file.open("envelopes.jsonl") as lines:
        found = [lines.readline() for _ in range(10_000)]

    def bare() -> float:
        return seconds(lambda: [hashlib.sha256(one).digest() for one in found for _ in range(2)]) * SIZE / len(found)

    return _rates(bench, bare, lambda: seconds(lambda: _verify(path, with_key=False)))


def _rates(bench: Bench, bare: Any, ours: Any) -> Measured:
    with quiet():
        pairs = interleaved(bench.rounds(3), ours, bare)
    taken, primitives = medians(pairs)
    return ratio(pairs), {"envelopes_s": SIZE / taken, "bare_s": SIZE / primitives}


def script(bench: Bench) -> Measured:
    """The verifier that travels in the bundle, as a process, with every signature by `cryptography`; without a key in the details."""
    path, command = (
        _bundle(bench, SIZE),
        [sys.executable, str(Path(container.__file__).with_name("verify_evidence.py"))],
    )

    def run(*arguments: str, code: int) -> float:
        def work() -> None:
            assert subprocess.run([*command, str(path), *arguments], capture_output=True).returncode == code

        return SIZE / seconds(work)

    return run("--key", _KEY, code=0), {"hashes_alone_s": run(code=2)}


_MEMORY = """
import json, re, sys
from pathlib import Path
from phionyx_letta.evidence.verifying import verify_bundle
from phionyx_letta.keys import Keyring
out = []
for path in sys.argv[2:]:
    report = verify_bundle(Path(path), keys=Keyring([sys.argv[1]]))
    assert report.verdict == "valid", report.reason
    out.append(int(re.search(r"VmHWM:\\s+([0-9]+)", Path("/proc/self/status").read_text())[1]))
print(json.dumps(out))
"""


def memory(bench: Bench) -> Measured:
    """Peak memory of a process that verifies a bundle of 10 000 envelopes, then one of 100 000.

    By the kernel's high-water mark since the process began: that of `getrusage` begins with its parent's.
    """
    paths = [str(_bundle(bench, size)) for size in (SIZE // 10, SIZE)]
    done = subprocess.run([sys.executable, "-c", _MEMORY, _KEY, *paths], check=True, capture_output=True, text=True)
    small, large = (peak / 1024 for peak in json.loads(done.stdout))
    return large - small, {"peak_MB": large, "zip_MB": Path(paths[1]).stat().st_size / 1e6}


def _verify(path: Path, *, with_key: bool) -> None:
    report = verify_bundle(path, keys=Keyring([_KEY]) if with_key else None)
    assert report.verdict == ("valid" if with_key else "not_measured"), report.reason
    assert report.envelopes == SIZE


def _bundle(bench: Bench, size: int) -> Path:
    """A bundle of a whole ledger with a checkpoint per batch; written once in a run."""
    path = bench.folder / f"evidence-{size}.zip"
    if not path.exists():
        ledger, notes = SqlLedger(f"sqlite:///{bench.folder / f'evidence-{size}.db'}"), []
        made = envelopes("agent-bench", size, _SIGNER, nonces=True)
        for _ in range(size // _BATCH):
            with ledger.writing() as connection:
                assert connection is not None
                writer = LedgerWriter(connection, _SIGNER)
                for _ in range(_BATCH):
                    writer.add(next(made))
                writer.flush()
                notes.append(writer.log.issue(_SIGNER, "bench/log")[1])
        with gather(ledger, []) as material:
            write_bundle(path, material, public_keys=[_KEY], checkpoints=notes, created_utc="2026-01-01T00:00:00+00:00")
        ledger.close()
    return path
