"""Several processes on one memory: nothing is lost, whoever dies; and the command against a real endpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from endpoint import Endpoint, fails, proposes
from memory_helpers import fact, memory

from phionyx_letta import Ed25519Signer, FilesystemEnvelopeStore, verify_chain
from phionyx_letta.memory.patches import check_trust

pytestmark = pytest.mark.slow

SEED = "11" * 32
KEY = Ed25519Signer(SEED)
WORKER = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[4])
from pathlib import Path
from memory_helpers import Scripted, fact, memory
from phionyx_letta import Ed25519Signer, FilesystemEnvelopeStore
from phionyx_letta.errors import DiffConflictError, IllegalTransition
folder, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
living = memory(folder, signer=Ed25519Signer("11" * 32), envelopes=FilesystemEnvelopeStore(folder / "audit"))
for number in range(count):
    said = f"likes {name}{number} tea"
    living.proposer = Scripted(fact(f"- {said}", evidence=said, section=None))
    (patch,) = asyncio.run(living.propose_from_session(f"{name}{number}", transcript=f"user: {said}"))
    print("proposed", patch.metadata["content"], flush=True)
    while True:
        try:
            living.apply(patch)
            break
        except DiffConflictError:
            patch = living.rebase(patch)
    print("applied", patch.metadata["content"], flush=True)
"""


def worker(folder: Path, name: str, count: int) -> subprocess.Popen:
    command = [sys.executable, "-c", WORKER, str(folder), name, str(count), str(Path(__file__).parent)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def lines_of(process: subprocess.Popen) -> list[str]:
    return [line.strip() for line in process.stdout.readlines() if line.endswith("\n")]


def check_all(folder: Path) -> None:
    """Every history verifies, and the evidence of the file is one unbroken chain."""
    for one in memory(folder).patch_history():
        check_trust(one, KEY.verifier())
    chain = FilesystemEnvelopeStore(folder / "audit").iter_chain(f"file:{folder / 'CLAUDE.md'}")
    assert verify_chain(chain, verifier=KEY.verifier())["valid"] is True


def test_two_that_propose_and_apply_at_once_lose_nothing(tmp_path):
    file = tmp_path / "CLAUDE.md"
    file.write_text("# Notes\n\n- mine\n")
    running = [worker(tmp_path, name, 12) for name in ("green", "black")]
    said = [line for one in running for line in lines_of(one)]
    assert [one.wait(120) for one in running] == [0, 0]
    applied = {line.removeprefix("applied ") for line in said if line.startswith("applied ")}
    assert len(applied) == 24
    lines = file.read_text().splitlines()
    assert lines[:3] == ["# Notes", "", "- mine"]
    assert sorted(lines[3:]) == sorted(applied)
    assert memory(tmp_path).store.count("applied") == 24
    check_all(tmp_path)


@pytest.mark.slow
def test_killed_at_any_moment_they_lose_nothing_that_was_said(tmp_path):
    file = tmp_path / "CLAUDE.md"
    file.write_text("# Notes\n")
    proposed, applied = set(), set()
    for moment in range(10):
        with worker(tmp_path, f"k{moment}x", 1000) as process:
            said = [process.stdout.readline().strip() for _ in range(2 + moment)]
            process.kill()
            said += lines_of(process)
        proposed |= {line.removeprefix("proposed ") for line in said if line.startswith("proposed ")}
        applied |= {line.removeprefix("applied ") for line in said if line.startswith("applied ")}
        lines = file.read_text().splitlines()
        assert applied <= set(lines)
        assert len(lines) == len(set(lines))
        known = memory(tmp_path).patch_history()
        assert proposed <= {one.metadata["content"] for one in known}
        assert set(lines) - {"# Notes"} <= {
            one.metadata["content"] for one in known if one.status in ("applied", "approved")
        }
    living = memory(tmp_path, signer=KEY, envelopes=FilesystemEnvelopeStore(tmp_path / "audit"))
    for one in living.patch_history(status="approved"):
        if one.metadata["content"] in file.read_text().splitlines():
            assert living.apply(one).status == "applied"  # its writer was killed before it could say so
    check_all(tmp_path)


class TestTheCommandAgainstAnEndpoint:
    def run(self, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        settings = {"HOME": str(folder / "home"), "PHIONYX_LETTA_PROPOSER_ATTEMPTS": "1", **environment}
        return subprocess.run(
            [sys.executable, "-m", "phionyx_letta.cli", "memory", *arguments],
            cwd=folder, env=settings, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    @pytest.fixture
    def here(self, tmp_path):
        (tmp_path / "CLAUDE.md").write_text("# Notes\n")
        (tmp_path / "session.txt").write_text("user: I like tea, write to ada@example.com\nassistant: noted\n")
        return tmp_path

    def test_a_session_becomes_a_patch_that_is_applied(self, here):
        answer = fact("- Likes tea.", evidence="I like tea")
        answer["content"] = answer.pop("proposed_addition")
        with Endpoint(
            proposes({**answer, "evidence": ["I like tea"], "category": None, "file_path": None})
        ) as endpoint:
            done = self.run(
                here,
                "propose",
                "session.txt",
                "--path",
                "CLAUDE.md",
                "--model",
                "m",
                "--base-url",
                endpoint.url,
                "--threshold",
                "1",
                "--json",
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert "ada@example.com" not in json.dumps(endpoint.requests)
        (made,) = json.loads(done.stdout)["patches"]
        assert (made["status"], made["session_id"]) == ("pending", "session.txt")
        assert self.run(here, "apply", made["patch_id"]).returncode == 0
        assert (here / "CLAUDE.md").read_text() == "# Notes\n- Likes tea.\n"

    def test_a_session_without_an_answer_is_kept_and_proposed_later(self, here):
        options = ("--path", "CLAUDE.md", "--model", "m", "--threshold", "1", "--json", "--base-url")
        with Endpoint(fails(500)) as endpoint:
            failed = self.run(here, "propose", "session.txt", *options, endpoint.url)
        assert failed.returncode == 1
        assert set(json.loads(failed.stdout)) == {"error", "remedy"}
        (kept,) = (here / ".synapsekit_memory_patches.jsonl.sessions").iterdir()
        assert "ada@example.com" not in kept.read_text()
        answer = {
            "fact_key": "tea",
            "content": "- Likes tea.",
            "section": None,
            "rationale": "r",
            "evidence": ["I like tea"],
        }
        with Endpoint(proposes({**answer, "category": None, "file_path": None})) as endpoint:
            done = self.run(here, "propose", "--kept", *options, endpoint.url)
        assert json.loads(done.stdout)["count"] == 1
        assert not kept.exists()

    def test_it_is_one_way_or_the_other(self, here):
        for arguments in (("propose",), ("propose", "session.txt", "--kept")):
            done = self.run(here, *arguments)
            assert done.returncode == 2
            assert "--kept" in done.stderr
