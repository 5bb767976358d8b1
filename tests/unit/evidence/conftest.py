"""One history, bundled whole and in part, for all tests that only read it."""

from __future__ import annotations

from pathlib import Path

import pytest
from bundle_rig import History, Members, read


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    made = History(tmp_path_factory.mktemp("history")).live(range(3))
    made.outside.write_text("\n".join(made.notes), encoding="utf-8")
    return made


@pytest.fixture(scope="session")
def whole(history: History, tmp_path_factory: pytest.TempPathFactory) -> Members:
    return read(history.bundle(tmp_path_factory.mktemp("whole") / "whole.zip"))


@pytest.fixture(scope="session")
def part(history: History, tmp_path_factory: pytest.TempPathFactory) -> Members:
    return read(history.bundle(tmp_path_factory.mktemp("part") / "part.zip", ["agent-b"]))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "evidence.zip"
