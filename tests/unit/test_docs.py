"""What the README, the docs and the examples say is true of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from phionyx_letta.memory.policy import Policy
from phionyx_letta.settings import Settings, load_settings

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]


def test_the_python_in_the_readme_runs_as_written(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["record_and_verify", "caught", "living_memory"])
def test_each_example_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        env={"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert ("valid = True" in done.stdout) == (name != "caught")
    assert ("valid = False" in done.stdout) == (name == "caught")


def test_the_settings_and_the_policy_of_the_examples_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "examples" / "sessions"
    said = dict(line.split("=", 1) for line in (folder / "server.env").read_text().splitlines() if line[:1] == "P")
    assert {name.removeprefix("PHIONYX_LETTA_").lower() for name in said} <= set(Settings.model_fields)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert load_settings().most_tokens() == 83_333
    ada, grace = Policy.load(str(folder / "reviewers.toml")).reviewers
    assert (ada.may_write("project-x"), ada.may_write("persona"), grace.may_write("persona")) == (True, False, True)
    script = (folder / "review.sh").read_text()
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0


def test_every_setting_is_documented() -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    for name in Settings.model_fields:
        assert f"| `PHIONYX_LETTA_{name.upper()}` |" in page


def test_every_test_that_the_docs_name_exists() -> None:
    named = set(re.findall(r"`(tests/[\w/.]+)`", (ROOT / "docs" / "guarantees.md").read_text()))
    assert len(named) > 8
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_command_in_the_readme_exists() -> None:
    known = set(re.findall(r"^## ([\w-]+)$", (ROOT / "docs" / "cli.md").read_text(), re.MULTILINE))
    used = set(re.findall(r"phionyx-letta ([a-z]+)", README)) - {"is"}
    assert used <= known, used - known


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_links_between_the_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
