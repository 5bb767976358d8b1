"""The peers' own programs as judges, each in an environment of its own; nothing of theirs is kept here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import phionyx_letta
from phionyx_letta import (
    Ed25519Signer,
    Ed25519Verifier,
    FilesystemEnvelopeStore,
    MemoryMutationContext,
    UnsignedSigner,
    compute_memory_diff,
    verify_chain,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("uv") is None, reason="uv makes the peers' environments"),
]

LETTA = "phionyx-letta==0.1.0a3"
MCP = "phionyx-mcp-server==0.2.2"
SYNAPSEKIT = "synapsekit==2.0.1"
SEED = "11" * 32
TRACE = "agent-0f3c1a52"

WRITE_PEERS_CHAINS = """
import sys
from phionyx_letta import *
from phionyx_letta import GENESIS_HASH
root, seed = sys.argv[1:]
store = FilesystemEnvelopeStore(root=root)
for trace, signer in (("signed", Ed25519Signer(seed)), ("unsigned", UnsignedSigner())):
    for turn in range(3):
        context = MemoryMutationContext(
            trace_id=trace, turn_index=turn, producer="p", block_id="b", block_label="l", mutation_kind="write",
            diff=compute_memory_diff("a" * turn, "a" * (turn + 1)), metadata={"k": "\\u00fc"})
        store.append(trace, build_memory_envelope(
            context, previous_hash=store.head(trace), package_version="0.1.0a3", signer=signer))
"""


def isolated(requirement: str, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command where only `requirement` is installed."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PHIONYX", "VIRTUAL_ENV"))
    }
    return subprocess.run(
        ["uv", "run", "--quiet", "--isolated", "--no-project", "--with", requirement, *command],
        capture_output=True,
        text=True,
        env={**kept, **environment},
        timeout=300,
    )


@pytest.fixture(scope="module")
def signer() -> Ed25519Signer:
    return Ed25519Signer(SEED)


def written(root: Path, signer: Ed25519Signer | UnsignedSigner, trace: str = TRACE) -> FilesystemEnvelopeStore:
    """Write a chain with two mutations in one turn."""
    store = FilesystemEnvelopeStore(root)
    for place in range(4):
        context = MemoryMutationContext(
            trace_id=trace,
            turn_index=place // 2,
            producer="letta.agent",
            block_id="block-1",
            block_label="human",
            mutation_kind="append",
            diff=compute_memory_diff("é" * place, "é" * (place + 1), include_diff_text=True),
            metadata={"letta": {"event": "update"}, 1: "\U0001f600\ud800"},
        )
        store.emit(context, signer=signer)
    return store


def fetched_tests(requirement: str, folder: Path) -> Path:
    """The folder of tests in a peer's source distribution."""
    fetched = isolated(
        "pip",
        *("python", "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--no-binary", ":all:", "--dest", str(folder), requirement),
    )
    archives = list(folder.glob("*.tar.gz"))
    assert archives, fetched.stderr
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    (tests,) = folder.glob("*/tests")
    return tests


def test_the_first_packages_own_tests_pass_against_ours(tmp_path):
    shutil.copytree(fetched_tests(LETTA, tmp_path), tmp_path / "oracle")
    source = Path(phionyx_letta.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "."],
        cwd=tmp_path / "oracle",
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
    )
    assert run.stdout.splitlines()[-1].startswith("26 passed"), run.stdout


ALIASES = """
import sys, types
import phionyx_letta.cli.memory, phionyx_letta.memory
package, cli = types.ModuleType("synapsekit"), types.ModuleType("synapsekit.cli")
package.__path__ = cli.__path__ = []
package.memory, package.cli, cli.memory = phionyx_letta.memory, cli, phionyx_letta.cli.memory
sys.modules.update({
    "synapsekit": package, "synapsekit.memory": phionyx_letta.memory,
    "synapsekit.cli": cli, "synapsekit.cli.memory": phionyx_letta.cli.memory,
})
"""
LIVING_MEMORY_TESTS = (
    *("memory/test_living_memory.py", "memory/test_living_memory_audit_regressions.py"),
    "cli/test_memory_cli.py",
)


def test_the_second_packages_tests_of_living_memory_pass_against_ours(tmp_path):
    """In an environment that holds our base install and what runs their tests, nothing else; theirs is never installed."""
    tests, oracle = fetched_tests(SYNAPSEKIT, tmp_path), tmp_path / "oracle"
    oracle.mkdir()
    for name in LIVING_MEMORY_TESTS:
        shutil.copy(tests / name, oracle)
    (oracle / "conftest.py").write_text(ALIASES)
    ours = ("--with", str(Path(phionyx_letta.__file__).parents[2]), "--with", "pytest-asyncio")
    run = isolated(
        "pytest",
        *(
            "--directory",
            str(oracle),
            *ours,
            "python",
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            ".",
            ".",
        ),
        HOME=str(tmp_path / "home"),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].startswith("20 passed")


class TestTheMcpServersVerifier:
    def verdict(self, root: Path, key: str, trace: str = TRACE) -> tuple[int, dict]:
        run = isolated(
            MCP,
            *("phionyx-mcp", "verify-chain", "--trace", trace),
            PHIONYX_MCP_AUDIT_ROOT=str(root),
            PHIONYX_MCP_VERIFY_KEY=key,
        )
        return run.returncode, json.loads(run.stdout)

    def test_it_accepts_our_store(self, tmp_path, signer):
        written(tmp_path, signer)
        code, verdict = self.verdict(tmp_path, signer.public_key_hex)
        assert (code, verdict["valid"], verdict["checked"]) == (0, True, 4)
        assert verdict["assurance"]["overall_assurance"] == "E2"

    def test_it_and_ours_name_the_same_edited_envelope(self, tmp_path, signer):
        store = written(tmp_path, signer)
        path = tmp_path / TRACE / "000002.json"
        path.write_text(path.read_text().replace('"human"', '"other"'))
        code, theirs = self.verdict(tmp_path, signer.public_key_hex)
        ours = verify_chain(store.iter_chain(TRACE), verifier=Ed25519Verifier(signer.public_key_hex))
        assert code == 1
        for name in ("valid", "checked", "broken_at"):
            assert ours[name] == theirs[name]

    def test_our_reports_share_its_keys_and_words(self, tmp_path, signer):
        store = written(tmp_path, signer)
        _, theirs = self.verdict(tmp_path, signer.public_key_hex)
        ours = verify_chain(store.iter_chain(TRACE), verifier=Ed25519Verifier(signer.public_key_hex))
        assert set(theirs) <= set(ours)
        assert set(theirs["assurance"]) <= set(ours["assurance"])
        for name in ("schema", "hash_continuity", "signature_valid", "overall_assurance"):
            assert ours["assurance"][name] == theirs["assurance"][name]


@pytest.fixture(scope="module")
def peers_root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("peer")
    run = isolated(LETTA, "python", "-c", WRITE_PEERS_CHAINS, str(root), SEED)
    assert run.returncode == 0, run.stderr
    return root


class TestChainsTheFirstPackageWrote:
    def test_a_signed_one_verifies_with_the_key(self, peers_root, signer):
        verifier = Ed25519Verifier(signer.public_key_hex)
        result = verify_chain(FilesystemEnvelopeStore(peers_root).iter_chain("signed"), verifier=verifier)
        assert (result["valid"], result["checked"]) == (True, 3)
        assert result["assurance"]["overall_assurance"] == "E2"

    def test_an_unsigned_one_is_not_measured(self, peers_root, signer):
        verifier = Ed25519Verifier(signer.public_key_hex)
        result = verify_chain(FilesystemEnvelopeStore(peers_root).iter_chain("unsigned"), verifier=verifier)
        assert result["valid"] is None
        assert result["measurement_status"] == "NOT_MEASURED"

    def test_it_is_told_that_such_a_chain_does_not_name_its_agent(self, peers_root, signer):
        verifier = Ed25519Verifier(signer.public_key_hex)
        chain = FilesystemEnvelopeStore(peers_root).iter_chain("signed")
        (finding,) = verify_chain(chain, verifier=verifier, expected_trace="signed")["findings"]
        assert (finding["dimension"], finding["status"]) == ("continuity", "not_measured")

    def test_ours_continues_it(self, peers_root, signer, tmp_path):
        copied = Path(shutil.copytree(peers_root, tmp_path / "copy"))
        store = written(copied, signer, trace="signed")
        result = verify_chain(store.iter_chain("signed"), verifier=Ed25519Verifier(signer.public_key_hex))
        assert (result["valid"], result["checked"]) == (True, 7)
