"""Hooks only note; they are merged with what is there, chained to it, and taken out without a trace."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from code_rig import AGENT, ENVIRONMENT, KEY, Memory, Recorded, letta

from phionyx_letta.errors import StoreError
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.letta_code import hooks as hooks_module
from phionyx_letta.letta_code import queue
from phionyx_letta.letta_code.hooks import Hooks, report_environment
from phionyx_letta.letta_code.ingest import Recorder
from phionyx_letta.letta_code.places import Home
from phionyx_letta.letta_code.queue import queue_path, read_notes
from phionyx_letta.memory import files
from phionyx_letta.plugin.runtime import PluginKey
from phionyx_letta.signing import generate_key, get_signer


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


def commands(home: Home) -> list[str]:
    hooks: Any = settings_of(home)["hooks"]
    return [
        one["command"]
        for name, event in hooks.items()
        if name != "disabled"
        for entry in event
        for one in entry["hooks"]
    ]


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

    def test_a_session_that_runs_on_after_they_are_taken_out(self, hooks: Hooks, home: Home) -> None:
        """It keeps the commands it read when it began, and takes exit 2 for a refusal, which is told to the agent."""
        hooks.install(home.memories(), report=True)
        entries = [settings_of(home)["hooks"][name][-1] for name in ("PostToolUse", "SessionEnd", "SessionStart")]  # type: ignore[index]
        hooks.uninstall(home.memories())
        for entry in entries:
            done = subprocess.run(["bash", "-c", entry["hooks"][0]["command"]], input=b"{}", capture_output=True)
            assert (done.returncode, done.stdout) == (0, b"")

    def test_an_entry_that_somebody_edited_is_not_left_behind(self, hooks: Hooks, home: Home) -> None:
        hooks.install(home.memories())
        settings: Any = settings_of(home)
        (ours,) = settings["hooks"]["PostToolUse"]
        ours["hooks"][0] = {"type": "command", "command": ours["hooks"][0]["command"].removesuffix(" || true")}
        ours["hooks"].append({"type": "command", "command": "mine"})
        del settings["hooks"]["SessionEnd"][0]["hooks"][0]["quiet"]
        edited = json.dumps(settings)
        (home.letta / "settings.json").write_text(edited)
        assert hooks.state(home.memories()).settings == "missing"
        assert hooks.install(home.memories()).settings == "installed"
        assert sum("hook.sh" in command for command in commands(home)) == 2
        (home.letta / "settings.json").write_text(edited)
        hooks.uninstall(home.memories())
        assert commands(home) == ["mine"]

    def test_a_script_that_is_gone_is_told(self, hooks: Hooks, home: Home) -> None:
        hooks.install(home.memories())
        hooks._script.unlink()
        assert hooks.state(home.memories()).settings == "partly"

    def test_a_home_that_is_named_from_here(self, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The hooks run wherever a session works."""
        monkeypatch.chdir(tmp_path)
        Hooks(home, Path("own")).install(home.memories())
        assert all(f"sh {tmp_path}/own/" in command for command in commands(home))
        monkeypatch.chdir("/")
        event(home, "PostToolUse", {"agent_id": AGENT})
        assert Hooks(home, tmp_path / "own").state([]).waiting == 1

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

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ('{"a": 1e400}', "1e400"),
            ('{"a": [1.10]}', "1.10"),
            ('{"a": -0}', "-0"),
            ('{"a": NaN}', "NaN"),
            ('{"a": 123456789012345678.9}', "123456789012345678.9"),
            ('{"hooks": {}, "hooks": {"PostToolUse": []}}', "'hooks' twice"),
            ('{"hooks": {"Stop": [{"x": 1, "x": 2}]}}', "'x' twice"),
        ],
    )
    def test_what_would_not_be_kept_as_it_is_written_is_refused(
        self, hooks: Hooks, home: Home, text: str, named: str
    ) -> None:
        (home.letta / "settings.json").write_text(text)
        with pytest.raises(StoreError, match=r"settings\.json") as caught:
            hooks.install(home.memories())
        assert named in caught.value.message
        assert (home.letta / "settings.json").read_text() == text

    def test_where_they_cannot_be_taken_out_of_the_settings_they_all_stay(self, hooks: Hooks, home: Home) -> None:
        hooks.install(home.memories())
        path = home.letta / "settings.json"
        path.write_text(path.read_text().replace("{", '{"price": 1.10,', 1))
        with pytest.raises(StoreError, match=r"1\.10"):
            hooks.uninstall(home.memories())
        path.write_text(path.read_text().replace("1.10", "1.1"))
        assert hooks.state(home.memories()).repositories == {AGENT: "installed"}
        assert hooks.uninstall(home.memories()).repositories == {AGENT: "missing"}

    def test_numbers_as_javascript_writes_them_stay(self, hooks: Hooks, home: Home) -> None:
        kept = '"a": [0.1, 1.5, -2, 12345678901234567890, 1e+21]'
        (home.letta / "settings.json").write_text("{" + kept + "}")
        hooks.install(home.memories())
        written = (home.letta / "settings.json").read_text()
        assert "".join(written.split()).startswith("{" + kept.replace(" ", ""))

    def test_what_was_written_between_two_installs_is_kept(self, hooks: Hooks, home: Home) -> None:
        path = home.letta / "settings.json"
        path.write_text(MINE)
        hooks.install(home.memories())
        path.write_text(json.dumps({**settings_of(home), "lastAgent": "a"}))
        hooks.install(home.memories(), report=True)
        hooks.uninstall(home.memories())
        assert settings_of(home) == {**json.loads(MINE), "lastAgent": "a"}

    def test_two_installs_with_nothing_in_between_go_back_byte_for_byte(self, hooks: Hooks, home: Home) -> None:
        path = home.letta / "settings.json"
        path.write_text(MINE)
        hooks.install(home.memories())
        hooks.install(home.memories(), report=True)
        hooks.install(home.memories(), report=False)
        hooks.uninstall(home.memories())
        assert path.read_text() == MINE

    @pytest.mark.parametrize("act", ["install", "uninstall"])
    def test_what_is_written_in_that_very_moment_is_kept(
        self, hooks: Hooks, home: Home, act: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between reading settings.json and putting the new one in its place."""
        path = home.letta / "settings.json"
        path.write_text(MINE)
        if act == "uninstall":
            hooks.install(home.memories())
        exchange, left = files._exchange, [1]

        def exchanged(*arguments: Any) -> bool:
            if left[0] and str(arguments[2]) == path.name:
                left[0] = 0
                path.write_text(json.dumps({**settings_of(home), "lastAgent": "a"}))
            return exchange(*arguments)

        monkeypatch.setattr(files, "_exchange", exchanged)
        getattr(hooks, act)(home.memories())
        assert left == [0]
        assert settings_of(home)["lastAgent"] == "a"
        assert hooks.state(home.memories()).settings == ("installed" if act == "install" else "missing")
        hooks.uninstall(home.memories())
        assert settings_of(home) == {**json.loads(MINE), "lastAgent": "a"}

    @pytest.mark.parametrize("record", ["x", "[]", "{}", "[" * 100_000, '{"after": 1, "added_disabled": false}', None])
    def test_a_record_of_any_shape_harms_nothing(self, hooks: Hooks, home: Home, own: Path, record: str | None) -> None:
        (home.letta / "settings.json").write_text(MINE)
        hooks.install(home.memories())
        (kept,) = (own / "code").glob("*/installed.json")
        kept.unlink()
        if record is None:
            os.mkfifo(kept)
        else:
            kept.write_text(record)
        assert hooks.install(home.memories(), report=True).report
        hooks.uninstall(home.memories())
        found = settings_of(home)
        assert found.pop("hooks") in ({**json.loads(MINE)["hooks"], "disabled": False}, json.loads(MINE)["hooks"])
        assert found == {"theme": "dark"}

    def test_settings_that_are_a_link_stay_one(self, hooks: Hooks, home: Home, tmp_path: Path) -> None:
        real = tmp_path / "dotfiles.json"
        real.write_text(MINE)
        (home.letta / "settings.json").symlink_to(real)
        assert hooks.install(home.memories()).settings == "installed"
        hooks.uninstall(home.memories())
        assert ((home.letta / "settings.json").is_symlink(), real.read_text()) == (True, MINE)

    def test_a_pipe_in_the_place_of_the_settings(self, hooks: Hooks, home: Home) -> None:
        os.mkfifo(home.letta / "settings.json")
        with pytest.raises(StoreError, match=r"settings\.json is not a regular file"):
            hooks.install(home.memories())
        assert hooks.state(home.memories()).settings == "unreadable"

    def test_a_lone_surrogate_stays(self, hooks: Hooks, home: Home) -> None:
        (home.letta / "settings.json").write_text('{"x": "\\ud800"}')
        hooks.install(home.memories())
        (home.letta / "settings.json").write_text(json.dumps({**settings_of(home), "y": 1}))
        hooks.uninstall(home.memories())
        assert settings_of(home) == {"x": "\ud800", "y": 1}


class TestGitHook:
    @pytest.mark.parametrize("moment", ["a second name", "a second name alone", "both names"])
    def test_an_installation_that_was_cut_short(self, hooks: Hooks, home: Home, memory: Memory, moment: str) -> None:
        hook = memory.path / ".git" / "hooks" / "reference-transaction"
        original = hook.with_name(hook.name + ".phionyx-original")
        hook.write_text("#!/bin/sh\nexit 0\n")
        hook.chmod(0o755)
        mine = hook.read_bytes()
        os.link(hook, original)
        if moment == "a second name alone":
            hook.unlink()
        elif moment == "both names":
            hooks.install(home.memories())
            assert "phionyx-letta" in hook.read_text()
            assert original.read_bytes() == mine
        hooks.uninstall(home.memories())
        assert (hook.read_bytes(), original.exists()) == (mine, False)
        os.link(hook, original)
        assert hooks.install(home.memories()).repositories == {AGENT: "installed"}
        hooks.uninstall(home.memories())
        assert (hook.read_bytes(), original.exists()) == (mine, False)

    def test_there_is_a_hook_at_every_moment(
        self, hooks: Hooks, home: Home, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hook = memory.path / ".git" / "hooks" / "reference-transaction"
        hook.write_text("#!/bin/sh\nexit 0\n")
        seen = []
        for name in ("link", "rename", "replace"):
            step = getattr(os, name)
            monkeypatch.setattr(
                os, name, lambda *given, step=step, **named: (step(*given, **named), seen.append(hook.exists()))
            )
        hooks.install(home.memories())
        hooks.uninstall(home.memories())
        assert len(seen) >= 3
        assert all(seen)

    def test_a_hook_that_is_a_link_is_not_written_through(
        self, hooks: Hooks, home: Home, memory: Memory, tmp_path: Path
    ) -> None:
        real, hook = tmp_path / "real", memory.path / ".git" / "hooks" / "reference-transaction"
        real.write_text("#!/bin/sh\nexit 0\n")
        hook.symlink_to(real)
        hooks.install(home.memories())
        assert real.read_text() == "#!/bin/sh\nexit 0\n"
        hooks.uninstall(home.memories())
        assert hook.readlink() == real

    def test_hooks_that_git_does_not_run_are_told(
        self, hooks: Hooks, home: Home, memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hooks.install(home.memories())
        memory.git("config", "core.hooksPath", "/dev/null")
        assert "core.hooksPath" in hooks.state(home.memories()).repositories[AGENT]
        memory.git("config", "core.hooksPath", ".git/hooks")
        assert hooks.state(home.memories()).repositories[AGENT] == "installed"
        memory.git("config", "--unset", "core.hooksPath")
        (tmp_path / ".gitconfig").write_text(f"[core]\n\thooksPath = {tmp_path}\n")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert str(tmp_path) in hooks.state(home.memories()).repositories[AGENT]

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

    @pytest.mark.parametrize("way", ["its name", "its neighbour", "a link"])
    def test_one_that_asks_what_it_is_called_or_what_is_beside_it(
        self, hooks: Hooks, home: Home, memory: Memory, tmp_path: Path, way: str
    ) -> None:
        folder, log = memory.path / ".git" / "hooks", tmp_path / "log"
        script = {
            "its name": f'case $(basename "$0") in reference-transaction) echo ran >>{log} ;; *) exit 3 ;; esac',
            "its neighbour": f'. "$(dirname "$0")/common.sh" || exit 3\necho ran >>{log}',
            "a link": f'[ "$(basename "$0")" = reference-transaction ] && echo ran >>{log}',
        }[way]
        (folder / "common.sh").write_text("true\n")
        hook = folder / ("dispatch" if way == "a link" else "reference-transaction")
        hook.write_text(f"#!/bin/sh\n{script}\n")
        hook.chmod(0o755)
        if way == "a link":
            (folder / "reference-transaction").symlink_to("dispatch")
        before = sorted(os.listdir(folder))
        hooks.install(home.memories())
        hooks.cover(home.memories())
        memory.commit({"a.md": "1"})
        assert "ran" in log.read_text()
        assert hooks.state(home.memories()).waiting > 0
        hooks.uninstall(home.memories())
        assert sorted(os.listdir(folder)) == before

    def test_a_folder_of_the_agent_s_in_its_place_is_not_written_through(
        self, hooks: Hooks, home: Home, memory: Memory, tmp_path: Path
    ) -> None:
        folder = memory.path / ".git" / "hooks"
        (tmp_path / "elsewhere").mkdir()
        (folder / "phionyx-original").symlink_to(tmp_path / "elsewhere")
        (folder / "reference-transaction").write_text("#!/bin/sh\n")
        assert hooks.install(home.memories()).repositories == {AGENT: "missing"}
        hooks.uninstall(home.memories())
        assert list((tmp_path / "elsewhere").iterdir()) == []

    @pytest.mark.parametrize("what", ["pipe at a temporary name", "a terabyte with our mark"])
    def test_what_one_agent_puts_there_keeps_no_other_from_its_hook(
        self, hooks: Hooks, home: Home, memory: Memory, what: str
    ) -> None:
        hooks.install(home.memories())
        hook = memory.path / ".git" / "hooks" / "reference-transaction"
        if what.startswith("pipe"):
            hook.unlink()
            os.mkfifo(hook.with_name(f"{hook.name}.{os.getpid()}.new"))
        else:
            os.truncate(hook, 1 << 40)
        Memory(home.backend / "memfs" / "agent-later" / "memory")
        hooks.cover(home.memories())
        assert hooks.state(home.memories()).repositories == {AGENT: "installed", "agent-later": "installed"}
        assert hook.stat().st_size < 1 << 20

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


class TestGate:
    def refused(self, memory: Memory, *arguments: str) -> None:
        head = memory.head()
        with pytest.raises(AssertionError, match="the gate lets no commit be taken off refs/heads/main"):
            memory.git(*arguments)
        assert memory.head() == head

    def test_no_commit_is_taken_off_a_branch(self, hooks: Hooks, home: Home, memory: Memory, tmp_path: Path) -> None:
        assert hooks.install(home.memories(), gate=True).gate
        first = memory.commit({"a.md": "1"})
        memory.commit({"a.md": "2"})
        self.refused(memory, "commit", "-q", "--amend", "-m", "other")
        self.refused(memory, "reset", "-q", "--hard", first)
        self.refused(memory, "update-ref", "refs/heads/main", first)
        self.refused(memory, "update-ref", "-d", "refs/heads/main")
        other = Memory(tmp_path / "other")
        other.commit({"b.md": "1"})
        self.refused(memory, "fetch", "-q", "--update-head-ok", str(other.path), "+main:main")
        assert hooks.install(home.memories()).gate, "doing it again changes nothing"
        assert not hooks.install(home.memories(), gate=False).gate
        memory.git("reset", "-q", "--hard", first)

    def test_what_only_adds_goes_through(self, hooks: Hooks, home: Home, memory: Memory, tmp_path: Path) -> None:
        """Reflection too: its own branches come, are rewritten and go."""
        hooks.install(home.memories(), gate=True)
        memory.commit({"a.md": "1"})
        tree = tmp_path / "reflection"
        memory.git("worktree", "add", "-q", str(tree), "-b", "letta/reflection/1")
        worktree = Memory(tree, new=False)
        worktree.commit({"b.md": "1"})
        worktree.commit({"b.md": "2"}, "amended", "--amend")
        memory.commit({"a.md": "2"})
        memory.git("merge", "-q", "--no-edit", "letta/reflection/1")
        memory.git("worktree", "remove", "--force", str(tree))
        memory.git("branch", "-q", "-D", "letta/reflection/1")
        memory.git("revert", "--no-edit", "HEAD~1")
        memory.git("gc", "-q")
        memory.git("pack-refs", "--all", "--prune")
        self.refused(memory, "update-ref", "-d", "refs/heads/main")
        memory.commit({"a.md": "3"})
        assert hooks.state(home.memories()).waiting > 0

    def test_an_existing_hook_decides_first(self, hooks: Hooks, home: Home, memory: Memory, tmp_path: Path) -> None:
        hook = memory.path / ".git" / "hooks" / "reference-transaction"
        hook.write_text(f"#!/bin/sh\ncat >>{tmp_path}/log\nexit 0\n")
        hook.chmod(0o755)
        hooks.install(home.memories(), gate=True)
        head = memory.commit({"a.md": "1"})
        assert f"{head} refs/heads/main" in (tmp_path / "log").read_text()
        self.refused(memory, "commit", "-q", "--amend", "-m", "other")
        hooks.uninstall(home.memories())
        memory.git("commit", "-q", "--amend", "-m", "other")


class TestReport:
    def told(self, home: Home, agent: str = AGENT, key: str | None = "22" * 32) -> str:
        entry = settings_of(home)["hooks"]["SessionStart"][-1]["hooks"][0]  # type: ignore[index]
        given = json.dumps({"event_type": "SessionStart", "agent_id": agent}).encode()
        environment = {**os.environ, **({"PHIONYX_LETTA_SIGNING_KEY": key} if key else {})}
        done = subprocess.run(["sh", "-c", entry["command"]], input=given, capture_output=True, env=environment)
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout.decode()

    @pytest.mark.slow
    def test_what_differs_is_told_when_a_session_starts(
        self, hooks: Hooks, home: Home, memory: Memory, own: Path
    ) -> None:
        assert hooks.install(home.memories(), report=True).report
        memory.commit({"a.md": "1"})
        own.mkdir(exist_ok=True)
        with closing(SqlLedger(f"sqlite:///{own / 'ledger.db'}")) as ledger:
            Recorder(ledger, KEY).record(AGENT, memory.path)
            assert self.told(home) == "", "nothing is said where all is well"
            memory.git("commit", "-q", "--amend", "-m", "other")
            assert "does not lead on from what was recorded" in self.told(home)
        assert "was not compared" in self.told(home, "agent-nobody")
        assert not hooks.install(home.memories(), report=False).report
        assert "SessionStart" not in settings_of(home)["hooks"]  # type: ignore[operator]

    def test_the_users_own_stay(self, hooks: Hooks, home: Home) -> None:
        mine = '{"hooks": {"SessionStart": [{"hooks": [{"type": "command", "command": "mine"}]}]}}'
        (home.letta / "settings.json").write_text(mine)
        hooks.install(home.memories(), report=True)
        assert [one["hooks"][0]["command"] == "mine" for one in settings_of(home)["hooks"]["SessionStart"]] == [  # type: ignore[index]
            True,
            False,
        ]
        hooks.uninstall(home.memories())
        assert (home.letta / "settings.json").read_text() == mine

    @pytest.mark.slow
    def test_nothing_of_the_session_s_folder_is_run(
        self, hooks: Hooks, home: Home, memory: Memory, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Python would put the folder a session works in before its own modules."""
        hooks.install(home.memories(), report=True)
        memory.commit({"a.md": "1"})
        SqlLedger(f"sqlite:///{own / 'ledger.db'}").close()
        project = tmp_path / "project"
        for name in ("phionyx_letta/__init__.py", "phionyx_letta/cli/__init__.py", "json.py", "typer.py"):
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            (project / name).write_text("print('all is well'); raise SystemExit\n")
        monkeypatch.chdir(project)
        assert "nothing was recorded yet: run `phionyx-letta code ingest`\n" in self.told(home)

    @pytest.mark.slow
    def test_that_no_key_is_known_is_told(self, hooks: Hooks, home: Home, memory: Memory, own: Path) -> None:
        hooks.install(home.memories(), report=True)
        memory.commit({"a.md": "1"})
        with closing(SqlLedger(f"sqlite:///{own / 'ledger.db'}")) as ledger:
            Recorder(ledger, KEY).record(AGENT, memory.path)
        assert "signatures were not checked" in self.told(home, key=None)

    def test_a_check_that_fails_is_told(
        self, hooks: Hooks, home: Home, own: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        Hooks(home, own).install(home.memories(), report=True)
        assert "the check ended with 127; run 'phionyx-letta code verify'" in self.told(home)

    def test_a_check_that_does_not_end_is_told(
        self, home: Home, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slow = tmp_path / "slow"
        slow.write_text("#!/bin/sh\nexec sleep 600\n")
        slow.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(slow))
        monkeypatch.setattr(hooks_module, "_LONGEST", 1)
        Hooks(home, own).install(home.memories(), report=True)
        assert "the check ended with 124" in self.told(home)

    @pytest.mark.slow
    def test_it_reads_the_ledger_and_the_key_of_the_installation(
        self, home: Home, memory: Memory, own: Path, tmp_path: Path
    ) -> None:
        key, ledger = tmp_path / "a key", tmp_path / "else where.db"
        generate_key(key)
        environment = report_environment(f"sqlite:///{ledger}", {"PHIONYX_LETTA_SIGNING_KEY": str(key)})
        Hooks(home, own, environment).install(home.memories(), report=True)
        (script,) = (own / "code").glob("*/hook.sh")
        assert stat.S_IMODE(script.stat().st_mode) == 0o700
        memory.commit({"a.md": "1"})
        signer = get_signer({"PHIONYX_LETTA_SIGNING_KEY": str(key)})
        with closing(SqlLedger(f"sqlite:///{ledger}")) as opened:
            Recorder(opened, PluginKey(signer, "a file")).record(AGENT, memory.path)
        assert self.told(home, key=None) == "", "nothing is said where all is well"

    def test_a_key_itself_is_not_written_down(self) -> None:
        found = report_environment("x", {"PHIONYX_LETTA_SIGNING_KEY": "22" * 32, "PHIONYX_LETTA_KEY_ID": "k"})
        assert found == {"PHIONYX_LETTA_LEDGER": "x", "PHIONYX_LETTA_KEY_ID": "k"}

    def test_public_keys_are(self, tmp_path: Path) -> None:
        given = {"PHIONYX_LETTA_PUBLIC_KEY": "33" * 32, "PHIONYX_LETTA_VERIFY_KEY": f"a.pub{os.pathsep}{'44' * 32}"}
        assert report_environment("x", given) == {
            "PHIONYX_LETTA_LEDGER": "x",
            "PHIONYX_LETTA_PUBLIC_KEY": "33" * 32,
            "PHIONYX_LETTA_VERIFY_KEY": f"{Path('a.pub').absolute()}{os.pathsep}{'44' * 32}",
        }

    @pytest.mark.parametrize("what", ["a link", "a file", "foreign"])
    def test_a_queue_that_is_not_ours(self, hooks: Hooks, home: Home, own: Path, tmp_path: Path, what: str) -> None:
        queue = queue_path(own)
        queue.parent.mkdir(parents=True)
        if what == "a link":
            (tmp_path / "open").mkdir()
            queue.symlink_to(tmp_path / "open")
        elif what == "a file":
            queue.touch()
        elif os.geteuid() == 0:
            queue.mkdir()
            os.chown(queue, 12345, 12345)
        else:
            pytest.skip("only root can give a folder away")
        with pytest.raises(StoreError, match="queue"):
            hooks.install(home.memories())
        assert not (home.letta / "settings.json").exists()

    def test_a_queue_that_is_open_to_all_is_closed(self, hooks: Hooks, home: Home, own: Path) -> None:
        queue_path(own).mkdir(parents=True)
        queue_path(own).chmod(0o777)
        hooks.install(home.memories())
        assert stat.S_IMODE(queue_path(own).stat().st_mode) == 0o700
        (queue_path(own) / "n.folder").mkdir()
        hooks.uninstall(home.memories())
        assert (queue_path(own) / "n.folder").is_dir()
        assert not hooks.installed


def test_two_of_one_home_do_not_touch_each_other(hooks: Hooks, home: Home, own: Path, tmp_path: Path) -> None:
    second = Home.find(tmp_path / "second")
    Memory(second.backend / "memfs" / "agent-2" / "memory").commit({"a.md": "1"})
    (second.letta / "settings.json").write_text(MINE)
    (home.letta / "settings.json").write_text(MINE)
    others = Hooks(second, own)
    hooks.install(home.memories())
    others.install(second.memories())
    (queue_path(own) / "n.1.0").write_text("ref\n")
    assert hooks.uninstall(home.memories()).settings == "missing"
    assert (home.letta / "settings.json").read_text() == MINE
    assert others.installed
    assert (queue_path(own) / "n.1.0").exists()
    event(second, "PostToolUse", {"agent_id": "agent-2"})
    assert others.state(second.memories()).waiting == 2
    others.uninstall(second.memories())
    assert ((second.letta / "settings.json").read_text(), list(own.rglob("*"))) == (MINE, [])


def test_the_report_looks_where_the_backend_is(memory: Memory, own: Path, tmp_path: Path) -> None:
    (tmp_path / ".letta").mkdir()
    home = Home(tmp_path / ".letta", tmp_path / "letta" / "lc-local-backend")
    memory.commit({"a.md": "1"})
    Hooks(home, own, {"PHIONYX_LETTA_SIGNING_KEY": "22" * 32}).install(home.memories(), report=True)
    SqlLedger(f"sqlite:///{own / 'ledger.db'}").close()
    entry = settings_of(home)["hooks"]["SessionStart"][-1]["hooks"][0]  # type: ignore[index]
    done = subprocess.run(
        ["sh", "-c", entry["command"]],
        input=json.dumps({"agent_id": AGENT}).encode(),
        capture_output=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert f"{AGENT}: nothing was recorded yet" in done.stdout.decode()


class TestNotes:
    def test_no_more_is_read_than_fits(self, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(queue, "_MOST_BYTES", 1000)
        queue_path(own).mkdir(parents=True)
        for number in range(10):
            said = json.dumps({"agent_id": f"agent-{number}", "conversation_id": "x" * 150})
            (queue_path(own) / f"n.{number}.0").write_text(f"session\n{said}")
        notes = read_notes(queue_path(own))
        assert (len(notes.sessions), len(notes.files)) == (4, 10)

    @pytest.mark.parametrize("name", ["tool_name", "tool_call_id", "agent_id"])
    def test_a_note_that_is_no_text(self, memory: Memory, own: Path, recorded: Recorded, name: str) -> None:
        head = memory.commit({"a.md": "1"})
        queue_path(own).mkdir(parents=True)
        said = {"agent_id": AGENT, "tool_name": "Bash", "tool_call_id": "c", name: "\ud800"}
        (queue_path(own) / "n.1.0").write_text(f"ref\n{AGENT}\nconv\n/\n{'0' * 40} {head} refs/heads/main\n")
        (queue_path(own) / "n.2.0").write_text("tool\n" + json.dumps(said))
        Recorder(recorded.ledger, KEY, notes=read_notes(queue_path(own))).record(AGENT, memory.path)
        assert recorded.audit().verdict == "valid"

    def test_notes_of_the_future_go_too(self, own: Path) -> None:
        queue_path(own).mkdir(parents=True)
        (queue_path(own) / "n.1.0").write_text("ref\n")
        os.utime(queue_path(own) / "n.1.0", (time.time() + 1e6, time.time() + 1e6))
        read_notes(queue_path(own)).forget_old()
        assert list(queue_path(own).iterdir()) == []

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
        assert list(notes.sessions) == [(AGENT, "conv-1")]
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

    def test_what_is_no_note_goes_too(self, own: Path, tmp_path: Path) -> None:
        """Else it would count for ever among those that may wait."""
        folder = queue_path(own)
        folder.mkdir(parents=True)
        os.mkfifo(folder / "n.1.0")
        (folder / "n.2.0").symlink_to(tmp_path / "nowhere")
        (folder / "t.3.0").write_text("of a hook that was killed")
        read_notes(folder).forget_old()
        assert len(list(folder.iterdir())) == 3
        for path in folder.iterdir():
            os.utime(path, (1, 1), follow_symlinks=False)
        read_notes(folder).forget_old()
        assert list(folder.iterdir()) == []

    def test_who_made_a_commit_noted_it_first(self, own: Path) -> None:
        """Who moves another branch to it notes it too, and may have any process id."""
        folder = queue_path(own)
        folder.mkdir(parents=True)
        for name, agent, at in (("n.9.0", "agent-maker", 1000), ("n.10.0", "agent-merger", 2000)):
            (folder / name).write_text(f"ref\n{agent}\nconv\n/\n{'0' * 40} {'1' * 40} refs/heads/main\n")
            os.utime(folder / name, (at, at))
        assert read_notes(folder).about(AGENT, "1" * 40)["by_agent"] == "agent-maker"

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

    @pytest.mark.parametrize("waiting", [0, 1700])
    def test_a_hook_takes_no_time(self, hooks: Hooks, home: Home, memory: Memory, own: Path, waiting: int) -> None:
        """In processor time, which a busy machine does not decide; both commands are what Letta Code and git run.

        Also where many notes wait, and with the gate.
        """
        first = memory.commit({"a.md": "1"})
        second = memory.commit({"a.md": "2"})
        memory.git("reset", "-q", "--hard", first)
        hooks.install(home.memories(), gate=waiting > 0)
        for number in range(waiting):
            (queue_path(own) / f"n.x.{number}").touch()
        entry = settings_of(home)["hooks"]["PostToolUse"][-1]["hooks"][0]  # type: ignore[index]
        hook = home.memories()[0].path / ".git" / "hooks" / "reference-transaction"
        moved = f"{first} {second} refs/heads/main\n".encode()
        commands = {
            "PostToolUse": (["sh", "-c", entry["command"]], b'{"agent_id":"a"}'),
            "reference-transaction": ([str(hook), "committed"], moved),
            "reference-transaction prepared": ([str(hook), "prepared"], moved),
        }
        for name, (command, given) in commands.items():
            taken = []
            for _ in range(100):
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run(command, input=given, check=True, cwd=memory.path)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            p99 = sorted(taken)[98]
            print(f"\n{name}: median {sorted(taken)[50] * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms of the processor")
            assert p99 < 0.05
            assert sys.executable not in Path(hook).read_text()
