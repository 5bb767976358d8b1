"""Hooks only note; they are merged with what is there, chained to it, and taken out without a trace."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from code_rig import AGENT, ENVIRONMENT, KEY, Memory, Recorded, letta

from phionyx_letta.errors import StoreError
from phionyx_letta.letta_code.hooks import Hooks
from phionyx_letta.letta_code.ingest import Recorder
from phionyx_letta.letta_code.places import Home
from phionyx_letta.letta_code.queue import queue_path, read_notes


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "own home's folder"


@pytest.fixture
def home(memory: Memory, tmp_path: Path) -> Home:
    return Home.find(tmp_path / "letta")


@pytest.fixture
def hooks(home: Home, own: Path) -> Hooks:
    return Hooks(home, own)


def settings_of(home: Home) -> dict[str, object]:
    found = json.loads((home.letta / "settings.json").read_text())
    assert isinstance(found, dict)
    return found


def event(home: Home, name: str, said: dict[str, object]) -> None:
    """As Letta Code runs a hook: its command through a shell, JSON on standard input."""
    entry = settings_of(home)["hooks"][name][-1]["hooks"][0]  # type: ignore[index]
    done = subprocess.run(["sh", "-c", entry["command"]], input=json.dumps(said).encode(), capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


MINE = '{"theme":"dark",   "hooks": {"PostToolUse":[{"matcher":"Bash","hooks":[{"type":"command","command":"mine"}]}]}}'


class TestSettings:
    @pytest.mark.parametrize("before", [MINE, '{"ü": 1}', "{}\n", None])
    def test_put_in_and_taken_out_byte_for_byte(self, hooks: Hooks, home: Home, before: str | None) -> None:
        path = home.letta / "settings.json"
        if before is not None:
            path.write_text(before)
            path.chmod(0o640)
        assert hooks.install(home.memories()).settings == "installed"
        installed = path.read_bytes()
        assert hooks.install(home.memories()).settings == "installed"
        assert path.read_bytes() == installed, "doing it again changes nothing"
        if before == MINE:
            assert settings_of(home)["hooks"]["PostToolUse"][0]["hooks"][0]["command"] == "mine"  # type: ignore[index]
            assert stat.S_IMODE(path.stat().st_mode) == 0o640
        hooks.uninstall(home.memories())
        assert (path.read_text() if path.exists() else None) == before

    def test_what_others_wrote_since_is_kept(self, hooks: Hooks, home: Home) -> None:
        path = home.letta / "settings.json"
        path.write_text(MINE)
        hooks.install(home.memories())
        path.write_text(json.dumps({**settings_of(home), "lastAgent": "a"}))
        assert hooks.state(home.memories()).settings == "installed"
        hooks.uninstall(home.memories())
        assert settings_of(home) == {**json.loads(MINE), "lastAgent": "a"}

    def test_hooks_the_user_turned_off_stay_off(self, hooks: Hooks, home: Home) -> None:
        (home.letta / "settings.json").write_text('{"hooks": {"disabled": true}}')
        assert hooks.install(home.memories()).settings == "disabled"
        assert settings_of(home)["hooks"]["disabled"] is True  # type: ignore[index]
        hooks.uninstall(home.memories())
        assert (home.letta / "settings.json").read_text() == '{"hooks": {"disabled": true}}'

    def test_a_projects_settings_cannot_turn_them_off(self, hooks: Hooks, home: Home) -> None:
        hooks.install(home.memories())
        assert settings_of(home)["hooks"]["disabled"] is False  # type: ignore[index]

    @pytest.mark.parametrize("text", ["not json", "[]", '{"hooks": []}', '{"hooks": {"PostToolUse": {}}}'])
    def test_settings_of_another_shape_are_left_alone(self, hooks: Hooks, home: Home, text: str) -> None:
        (home.letta / "settings.json").write_text(text)
        with pytest.raises(StoreError, match=r"settings\.json"):
            hooks.install(home.memories())
        assert (home.letta / "settings.json").read_text() == text
        assert hooks.state(home.memories()).settings == "unreadable"


class TestGitHook:
    def test_chained_to_the_one_that_is_there(self, hooks: Hooks, home: Home, memory: Memory, tmp_path: Path) -> None:
        hook = memory.path / ".git" / "hooks" / "reference-transaction"
        log = tmp_path / "log"
        hook.write_text(
            f'#!/bin/sh\necho "$1" >>{log}\ncat >>{log}\n[ "$1" = prepared ] && [ -e {tmp_path}/no ] && exit 1\nexit 0\n'
        )
        hook.chmod(0o755)
        mine = hook.read_bytes()
        assert hooks.install(home.memories()).repositories == {AGENT: "installed"}
        head = memory.commit({"a.md": "1"})
        assert f"{head} refs/heads/main" in log.read_text()
        assert {"prepared", "committed"} <= set(log.read_text().split())
        (tmp_path / "no").touch()
        with pytest.raises(AssertionError, match="ref updates aborted by hook"):
            memory.commit({"a.md": "2"})
        hooks.uninstall(home.memories())
        assert hook.read_bytes() == mine
        assert sorted(path.name for path in hook.parent.glob("reference-transaction*")) == ["reference-transaction"]

    def test_agents_made_later_are_covered(self, hooks: Hooks, home: Home, memory: Memory) -> None:
        hooks.install(home.memories())
        later = Memory(home.backend / "memfs" / "agent-later" / "memory")
        assert hooks.state(home.memories()).repositories == {AGENT: "installed", "agent-later": "missing"}
        hooks.cover(home.memories())
        later.commit({"a.md": "1"})
        assert hooks.state(home.memories()).waiting > 0

    def test_a_link_in_the_repository_leads_nowhere(
        self, hooks: Hooks, home: Home, memory: Memory, tmp_path: Path
    ) -> None:
        (tmp_path / "elsewhere").mkdir()
        folder = memory.path / ".git" / "hooks"
        for one in folder.iterdir():
            one.unlink()
        folder.rmdir()
        folder.symlink_to(tmp_path / "elsewhere")
        assert "is not a folder" in hooks.install(home.memories()).repositories[AGENT]
        assert list((tmp_path / "elsewhere").iterdir()) == []

    def test_nothing_they_meet_fails_a_commit(self, hooks: Hooks, home: Home, memory: Memory, own: Path) -> None:
        hooks.install(home.memories())
        memory.commit({"a.md": "1"})
        queue_path(own).chmod(0o500)
        memory.commit({"a.md": "2"})
        queue_path(own).chmod(0o700)
        for path in queue_path(own).iterdir():
            path.unlink()
        queue_path(own).rmdir()
        memory.commit({"a.md": "3"})
        queue_path(own).write_text("a file in its place")
        memory.commit({"a.md": "4"})


class TestNotes:
    def test_a_commit_gets_its_conversation_and_its_tool_call(
        self, hooks: Hooks, home: Home, memory: Memory, own: Path, recorded: Recorded
    ) -> None:
        hooks.install(home.memories())
        os.environ.update(LETTA_AGENT_ID=AGENT, LETTA_CONVERSATION_ID="conv-1")
        ENVIRONMENT.update(LETTA_AGENT_ID=AGENT, LETTA_CONVERSATION_ID="conv-1")
        try:
            head = memory.commit({"a.md": "1"})
        finally:
            for name in ("LETTA_AGENT_ID", "LETTA_CONVERSATION_ID"):
                del os.environ[name], ENVIRONMENT[name]
        time.sleep(0.02)
        event(
            home,
            "PostToolUse",
            {"agent_id": AGENT, "tool_name": "Bash", "tool_call_id": "call-1", "tool_input": {"x": "secret"}},
        )
        time.sleep(0.02)
        event(home, "PostToolUse", {"agent_id": AGENT, "tool_name": "Read", "tool_call_id": "call-2"})
        event(home, "SessionEnd", {"agent_id": AGENT, "conversation_id": "conv-1"})
        plain = memory.commit({"a.md": "2"})
        notes = read_notes(queue_path(own))
        assert notes.sessions == [(AGENT, "conv-1")]
        Recorder(recorded.ledger, KEY, notes=notes).record(AGENT, memory.path)
        said = {letta(one)["commit"]: letta(one) for one in recorded.envelopes()}
        assert {name: said[head][name] for name in ("conversation_id", "tool", "tool_call_id", "attribution")} == {
            "conversation_id": "conv-1",
            "tool": "Bash",
            "tool_call_id": "call-1",
            "attribution": "hooks",
        }
        assert "conversation_id" not in said[plain]
        assert "secret" not in json.dumps(said)

    def test_old_notes_go(self, own: Path) -> None:
        queue_path(own).mkdir(parents=True)
        old, new = queue_path(own) / "n.1.0", queue_path(own) / "n.2.0"
        for path in (old, new):
            path.write_text("ref\nagent\nconv\n")
        os.utime(old, (1, 1))
        read_notes(queue_path(own)).forget_old()
        assert (old.exists(), new.exists()) == (False, True)

    @pytest.mark.parametrize(
        "text", [b"", b"\xff\xff", b"ref", b"tool\n{", b"tool\n[]", b"tool\n" + b"[" * 100_000, b"session\n{}"]
    )
    def test_notes_of_any_shape_harm_nothing(self, own: Path, text: bytes) -> None:
        queue_path(own).mkdir(parents=True)
        (queue_path(own) / "n.1.0").write_bytes(text)
        os.mkfifo(queue_path(own) / "n.2.0")
        assert read_notes(queue_path(own)).about(AGENT, "x") == {}

    def test_the_queue_does_not_grow_without_end(self, hooks: Hooks, home: Home, own: Path) -> None:
        hooks.install(home.memories())
        for number in range(2100):
            (queue_path(own) / f"n.x.{number}").touch()
        event(home, "PostToolUse", {"agent_id": AGENT})
        assert hooks.state([]).waiting == 2100

    def test_a_hook_takes_no_time(self, hooks: Hooks, home: Home) -> None:
        """Compared with the cheapest program there is, so that a busy machine does not decide."""
        hooks.install(home.memories())
        script = str(hooks._script)

        def timed(command: list[str]) -> list[float]:
            taken = []
            for _ in range(40):
                started = time.perf_counter()
                subprocess.run(command, input=b'{"agent_id":"a"}', check=True)
                taken.append(time.perf_counter() - started)
            return sorted(taken)

        nothing, hook = timed(["sh", "-c", ":"]), timed(["sh", script, "tool"])
        print(
            f"\nhook: median {hook[20] * 1e3:.1f} ms, p97 {hook[38] * 1e3:.1f} ms; an empty shell {nothing[20] * 1e3:.1f} ms"
        )
        assert hook[20] - nothing[20] < 0.05
        assert sys.executable not in Path(script).read_text()
