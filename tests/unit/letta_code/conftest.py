"""A memory and a ledger for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from code_rig import AGENT, Memory, Recorded

from phionyx_letta.ledger.sql import SqlLedger


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHIONYX_LETTA_HOME", str(tmp_path / "phionyx"))


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path / "letta" / "lc-local-backend" / "memfs" / AGENT / "memory")


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    ledger = SqlLedger(f"sqlite:///{tmp_path / 'ledger.db'}")
    yield Recorded(ledger)
    ledger.close()
