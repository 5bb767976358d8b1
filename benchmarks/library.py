"""The library alone: diffs, verification, import. No database, no Letta."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chains import SEED, write_signed_chain
from measuring import interleaved, medians, quiet, ratio, seconds
from shapes import nasty_pairs

from phionyx_letta import ChainVerifier, Ed25519Signer, Ed25519Verifier, compute_memory_diff

if TYPE_CHECKING:
    from catalogue import Bench

Measured = tuple[float, dict[str, Any]]
_CHUNK = 10_000


def diff_rewrite(bench: Bench) -> Measured:
    """One diff of two unrelated texts of 100 000 characters (letters, spaces, newlines), the median of the rounds."""
    source = random.Random(7)
    letters = "etaoinshrdlu etaoin \n"
    old, new = ("".join(source.choices(letters, k=100_000)) for _ in range(2))
    compute_memory_diff("a", "b")
    with quiet():
        taken = [seconds(lambda: compute_memory_diff(old, new)) for _ in range(bench.rounds(5))]
    return statistics.median(taken) * 1e3, {"longest_ms": max(taken) * 1e3}


def diff_longest(bench: Bench) -> Measured:
    """The longest a single diff holds the interpreter over shapes that are made to be slow.

    Per shape the quickest of the rounds counts: what disturbs a round is the machine, and what the work costs is never
    less than its quickest round.
    """
    worst, where = 0.0, ""
    rounds = bench.rounds(5)
    compute_memory_diff("a", "b")
    for name, old, new in nasty_pairs():
        with quiet():
            taken = min(seconds(lambda old=old, new=new: compute_memory_diff(old, new)) for _ in range(rounds))
        if taken > worst:
            worst, where = taken, name
    return worst * 1e3, {"shape": where}


def verify_rate(bench: Bench) -> Measured:
    """Envelopes a second, read line by line from a file and verified, against bare signatures a second.

    The same signatures are checked by `cryptography` alone directly before or after each chunk of 10 000 envelopes. Reading
    and parsing the JSON is part of our time, taking signature and message out of it is not part of theirs.
    """
    chunks = min(bench.rounds(10), 10)
    path = _chain_file(bench)
    verifier = Ed25519Verifier(Ed25519Signer(SEED).public_key_hex)
    bare_key = _bare_key(verifier.public_key_hex)
    chain = ChainVerifier(verifier=verifier, expected_trace="agent-bench")
    with path.open("rb") as ours, path.open("rb") as theirs:

        def verified() -> float:
            return seconds(lambda: [chain.feed(ours.readline()) for _ in range(_CHUNK)])

        def bare() -> float:
            parts = [json.loads(theirs.readline())["integrity"] for _ in range(_CHUNK)]
            signed = [(bytes.fromhex(one["signature"][8:]), one["current"].encode("ascii")) for one in parts]
            return seconds(lambda: [bare_key.verify(*one) for one in signed])

        with quiet():
            pairs = interleaved(chunks, verified, bare)
    report = chain.result()
    if report["valid"] is not True or report["checked"] != chunks * _CHUNK:
        raise RuntimeError(f"the chain does not verify: {report['reason']}")
    ours_s, bare_s = medians(pairs)
    return ratio(pairs), {
        "envelopes_per_s": _CHUNK / ours_s,
        "bare_per_s": _CHUNK / bare_s,
        "envelopes": chunks * _CHUNK,
    }


def pii_cost(bench: Bench) -> Measured:
    """The filter over this project's own prose: README and the operator's page."""
    from phionyx_letta.memory.pii import MemoryPIIFilter

    root = Path(__file__).parents[1]
    text = "".join((root / name).read_text(encoding="utf-8") for name in ("README.md", "docs/operating.md"))
    look, size = MemoryPIIFilter(), len(text.encode()) / 1000
    look.check(text)
    with quiet():
        taken = [seconds(lambda: look.check(text)) for _ in range(bench.rounds(10))]
    return statistics.median(taken) * 1e3 / size, {"kilobytes": size}


_MEMORY = """
import json, resource, sys
from phionyx_letta import Ed25519Verifier, verify_chain
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def stream(count):
    with open(sys.argv[1], "rb") as file:
        for _ in range(count):
            yield file.readline()
out = []
for count in (10_000, 100_000):
    report = verify_chain(stream(count), verifier=Ed25519Verifier(sys.argv[2]))
    assert report["valid"] is True and report["checked"] == count, report["reason"]
    out.append(peak())
print(json.dumps(out))
"""


def verify_memory(bench: Bench) -> Measured:
    """Peak memory of a process that verifies 10 000 envelopes, then 100 000: how much the ten times longer chain adds."""
    command = [sys.executable, "-c", _MEMORY, str(_chain_file(bench)), Ed25519Signer(SEED).public_key_hex]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    small, large = (peak / 1024 for peak in json.loads(said))
    return large - small, {"peak_MB": large}


_IMPORT = "import sys; {}; print(len(sys.modules), sorted({{'letta', 'openai', 'sqlalchemy', 'pydantic'}} & set(sys.modules)))"
_ALL_NAMES = "import phionyx_letta as p; [getattr(p, name) for name in p.__all__]"


def import_time(bench: Bench) -> Measured:
    """A Python that imports the package, less one that imports nothing, started in turn.

    The package loads a module when one of its names is first used, so the details also say what all of them cost, and which
    heavy packages that loads (none of Letta, OpenAI, SQLAlchemy, pydantic).
    """
    nothing, package, names = (_IMPORT.format(code) for code in ("pass", "import phionyx_letta", _ALL_NAMES))
    _start(names)  # writes the bytecode, where it is not there yet
    pairs = interleaved(bench.rounds(15), lambda: _start(nothing)[0], lambda: _start(package)[0])
    whole = interleaved(bench.rounds(15), lambda: _start(nothing)[0], lambda: _start(names)[0])
    loaded, heavy = _start(names)[1].split(maxsplit=1)
    details = {
        "start_ratio": ratio(pairs),
        "modules": int(_start(package)[1].split()[0]) - int(_start(nothing)[1].split()[0]),
        "all_names_ms": _extra(whole) * 1e3,
        "all_names_modules": int(loaded),
        "heavy": heavy.strip(),
    }
    return _extra(pairs) * 1e3, details


def _extra(pairs: list[tuple[float, float]]) -> float:
    return statistics.median(b - a for a, b in pairs)


def _start(code: str) -> tuple[float, str]:
    said: list[str] = []
    command = [sys.executable, "-c", code]

    def start() -> None:
        said.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    return seconds(start), said[0]


def _chain_file(bench: Bench) -> Path:
    """A signed chain of 100 000 envelopes, one a line; written once in a run."""
    path = bench.folder / "chain.jsonl"
    if not path.exists():
        write_signed_chain(path, 100_000)
    return path


def _bare_key(public_key_hex: str) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key_hex))
