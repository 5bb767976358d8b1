"""Guarded reads that refuse need captures that refuse: anything else does not start, and `doctor` says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phionyx_letta.errors import SettingsError
from phionyx_letta.settings import load_settings


def test_reject_needs_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHIONYX_LETTA_GUARD", "Reject")
    with pytest.raises(SettingsError, match=r"GUARD=reject needs PHIONYX_LETTA_ON_ERROR=closed.*set both"):
        load_settings()
    monkeypatch.setenv("PHIONYX_LETTA_ON_ERROR", "closed")
    assert load_settings().guard == "reject"
    monkeypatch.setenv("PHIONYX_LETTA_GUARD", "report")
    monkeypatch.delenv("PHIONYX_LETTA_ON_ERROR")
    assert load_settings().guard == "report"
    monkeypatch.setenv("PHIONYX_LETTA_GUARD", "on")
    with pytest.raises(SettingsError, match="PHIONYX_LETTA_GUARD has an unusable value"):
        load_settings()


def test_doctor_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("phionyx-letta"), "doctor", "--ledger", f"sqlite:///{tmp_path}/none.db"],
        env={**os.environ, "PHIONYX_LETTA_GUARD": "reject", "PHIONYX_LETTA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "GUARD=reject needs" in done.stdout.replace("\n", " ")


@pytest.mark.parametrize("on_error", ["open", "closed"])
def test_a_server_that_could_not_be_guarded_does_not_start(tmp_path: Path, on_error: str) -> None:
    """The import of Letta's models fails, whatever ON_ERROR says; here they are models that capture cannot watch."""
    (tmp_path / "letta").mkdir()
    (tmp_path / "letta" / "__init__.py").touch()
    (tmp_path / "letta" / "orm.py").touch()
    settings = {
        "PHIONYX_LETTA_ENABLE": "1",
        "PHIONYX_LETTA_ON_ERROR": on_error,
        "PHIONYX_LETTA_GUARD": "reject",
        "PHIONYX_LETTA_SIGNING_KEY": "11" * 32,
        "PYTHONPATH": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", "import phionyx_letta.plugin as p; p.install(); import letta.orm; print('unguarded')"],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "unguarded" not in done.stdout
    wanted = "GUARD=reject needs" if on_error == "open" else "letta.orm has no Block"
    assert wanted in done.stderr
