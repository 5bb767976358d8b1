"""End to end with the real program, headless: its own commits, hooks and validator, and a version of it that is not known."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phionyx_letta.cli.app import app
from phionyx_letta.demo.errors import DemoError
from phionyx_letta.demo.letta_code import LettaCode, find_program, shell_call
from phionyx_letta.demo.model import ScriptedModel
from phionyx_letta.errors import TargetRefused
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.letta_code.places import AgentMemory
from phionyx_letta.letta_code.target import MemfsTargets

pytestmark = pytest.mark.slow

EDIT = 'cd "$MEMORY_DIR" && echo "Ada likes tea." >>human.md && git commit -qam "learnt"'
INVALID = (
    'cd "$MEMORY_DIR" && echo "no front" >bad.md && git add bad.md && git commit -qm "bad"; git reset -q; rm bad.md'
)
REFLECT = (
    'cd "$MEMORY_DIR" && git worktree add -q ../memory-worktrees/reflection-1 -b letta/reflection/1 && '
    "cd ../memory-worktrees/reflection-1 && echo 'Ada thinks.' >>human.md && git commit -qam reflected && "
    'cd "$MEMORY_DIR" && git merge -q letta/reflection/1 && git worktree remove --force ../memory-worktrees/reflection-1'
)


def code(*arguments: str, environment: dict[str, str]) -> dict[str, object]:
    done = CliRunner().invoke(app, ["code", *arguments, "--json"], env=environment)
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_what_an_agent_does_is_recorded_with_its_conversation(program: Path, tmp_path: Path) -> None:
    environment = {"PHIONYX_LETTA_HOME": str(tmp_path / "own")}
    with ScriptedModel() as model:
        letta = LettaCode(program, tmp_path, model)
        where = ["--letta-dir", str(letta.letta_dir)]
        first = letta.ask("SAY hello")
        state = code("install", *where, environment=environment)
        assert state["settings"] == "installed"
        assert state["repositories"] == {first.agent_id: "installed"}
        talked = letta.ask("\n".join(map(shell_call, (EDIT, INVALID, REFLECT))), first.agent_id)
        result = code("ingest", *where, environment=environment)
    assert result["problems"] == []
    (agent,) = result["agents"]  # type: ignore[misc]
    assert (agent["layout"], agent["gaps"], agent["uncommitted"], agent["rewrites"]) == ("v2", [], [], 0)
    with closing(SqlLedger(f"sqlite:///{tmp_path}/own/ledger.db")) as ledger:
        envelopes = list(ledger.iter_chain(first.agent_id))
    told = [(one["subject"]["metadata"]["letta"]["path"], one["mutation"]["mutation_kind"]) for one in envelopes]
    assert told[-2:] == [("human.md", "append"), ("human.md", "consolidate")]
    assert {path for path, kind in told[:-2] if kind == "write"} >= {"MEMORY.md", "human.md", "persona.md"}
    said = envelopes[-2]["subject"]["metadata"]["letta"]
    assert said["conversation_id"] == talked.conversation_id
    assert (said["tool"], said["attribution"]) == ("Bash", "hooks")
    assert said["claims"]["author"]["email"] == f"{first.agent_id}@letta.com"
    assert code("verify", *where, environment=environment)["agents"][0]["status"] == "ok"  # type: ignore[index]
    assert code("uninstall", *where, environment=environment)["settings"] == "missing"


def test_a_patch_goes_through_letta_s_own_validator(program: Path, tmp_path: Path) -> None:
    """Which looks at what is staged, in an index that is not the repository's own."""
    with ScriptedModel() as model:
        letta = LettaCode(program, tmp_path, model)
        agent = letta.ask("SAY hello").agent_id
    memory = letta.memory(agent)
    target = MemfsTargets([AgentMemory(agent, memory)]).resolve(f"{agent}/human.md")
    text = target.read()
    assert text is not None
    without = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("name:"))
    assert without != text

    def state() -> list[str]:
        asked = (["rev-parse", "HEAD"], ["status", "--porcelain"])
        return [subprocess.check_output(["git", "-C", str(memory), *one], text=True) for one in asked]

    before = state()
    with pytest.raises(TargetRefused, match="missing required field 'name'"):
        target.write(text, without)
    assert state() == before
    target.write(text, f"{text}Likes tea.\n")
    assert target.read() == (memory / "human.md").read_text() == f"{text}Likes tea.\n"
    assert state()[1] == ""


def test_the_demo(program: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "phionyx_letta.cli", "demo", "--letta-code", "--program", str(program), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout)
    assert (result["verdict"], result["code_verify"]) == ("valid", "rewritten")
    assert {"write", "append", "delete"} & set(result["kinds"])


def test_the_python_server_is_not_taken_for_letta_code(tmp_path: Path) -> None:
    impostor = tmp_path / "letta"
    impostor.write_text("#!/bin/sh\necho 0.16.8\n")
    impostor.chmod(0o755)
    with pytest.raises(DemoError, match="is not Letta Code"):
        find_program(impostor)
