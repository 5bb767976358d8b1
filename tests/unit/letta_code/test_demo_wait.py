"""The demo waits for Letta Code aloud, and not for ever; what it started ends with it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from phionyx_letta.demo import letta_code
from phionyx_letta.demo.errors import DemoError
from phionyx_letta.demo.letta_code import LettaCode
from phionyx_letta.demo.model import ScriptedModel


def test_a_program_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letta_code, "_TIMEOUT", 1.5)
    monkeypatch.setattr(letta_code, "_TOLD_EVERY", 0.3)
    program, child = tmp_path / "letta", tmp_path / "child"
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $! >{child}\nwait\n")
    program.chmod(0o755)
    told: list[str] = []
    with ScriptedModel() as model, pytest.raises(DemoError, match="gave no answer within 2 s"):
        LettaCode(program, tmp_path, model, told.append)
    assert told
    assert "has not answered for" in told[0]
    state = subprocess.run(["ps", "-o", "stat=", "-p", child.read_text().strip()], capture_output=True, text=True)
    assert state.stdout.strip()[:1] in ("", "Z"), "its child went with it"
