"""What the line that Python runs at every start costs and does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOADED = "import sys; print(' '.join(sorted(m for m in sys.modules if m.split('.')[0] in {'phionyx_letta', 'wrapt'})))"
ARMED = (
    "import sys; a = sys.modules.get('phionyx_letta.plugin.activation'); "
    "print(a is not None and a.is_armed(), 'sqlalchemy' in sys.modules, 'pydantic' in sys.modules)"
)


def run(*arguments: str, **env: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PHIONYX_")}
    done = subprocess.run([sys.executable, *arguments], env=clean | env, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.strip()


def test_off_it_loads_nothing() -> None:
    assert run("-c", LOADED) == ""


@pytest.mark.parametrize("value", ["0", "false", "no", "off", " "])
def test_a_false_value_arms_nothing(value: str) -> None:
    assert run("-c", ARMED, PHIONYX_LETTA_ENABLE=value).startswith("False")


@pytest.mark.parametrize("value", ["1", "true", "on"])
def test_on_it_arms_and_loads_neither_a_database_nor_pydantic(value: str) -> None:
    assert run("-c", ARMED, PHIONYX_LETTA_ENABLE=value) == "True False False"


def test_alembic_is_left_alone_however_it_is_started(tmp_path: Path) -> None:
    (tmp_path / "alembic.py").write_text(ARMED)
    (tmp_path / "alembic").write_text(ARMED)
    assert run(str(tmp_path / "alembic"), "upgrade", "head", PHIONYX_LETTA_ENABLE="1").startswith("False")
    assert run("-m", "alembic", "upgrade", PHIONYX_LETTA_ENABLE="1", PYTHONPATH=str(tmp_path)).startswith("False")


def test_a_letta_without_the_expected_models_is_reported_and_not_broken(tmp_path: Path) -> None:
    models = tmp_path / "letta" / "orm"
    models.mkdir(parents=True)
    (tmp_path / "letta" / "__init__.py").touch()
    (models / "__init__.py").write_text("class Block: pass\n")
    script = "import letta.orm, phionyx_letta.plugin.activation as a; print(a.worker().unsupported)"
    env = {"PHIONYX_LETTA_ENABLE": "1", "PYTHONPATH": str(tmp_path), "PHIONYX_LETTA_SIGNING_KEY": "11" * 32}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | env, capture_output=True, text=True)
    assert done.stdout.strip() == "letta.orm has no BlocksAgents"
    assert "captures nothing" in done.stderr
    closed = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | env | {"PHIONYX_LETTA_ON_ERROR": "closed"},
        capture_output=True,
        text=True,
    )
    assert closed.returncode != 0
    assert "UnsupportedLetta" in closed.stderr
    assert "letta==0.16.8" in closed.stderr


def test_a_malformed_setting_is_named_and_stops_letta_only_in_closed_mode(tmp_path: Path) -> None:
    models = tmp_path / "letta" / "orm"
    models.mkdir(parents=True)
    (tmp_path / "letta" / "__init__.py").touch()
    (models / "__init__.py").touch()
    env = {"PHIONYX_LETTA_ENABLE": "1", "PYTHONPATH": str(tmp_path), "PHIONYX_LETTA_LOCK_TIMEOUT_MS": "soon"}
    script = [sys.executable, "-c", "import letta.orm; print('imported')"]
    opened = subprocess.run(script, env=os.environ | env, capture_output=True, text=True)
    assert opened.stdout.strip() == "imported"
    closed = subprocess.run(
        script, env=os.environ | env | {"PHIONYX_LETTA_ON_ERROR": "closed"}, capture_output=True, text=True
    )
    assert closed.returncode != 0
    for done in (opened, closed):
        assert "PHIONYX_LETTA_LOCK_TIMEOUT_MS" in done.stderr
