"""Every store and every tracker there is, for tests that must hold for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.memory import OccurrenceTracker, PatchStore, SqlOccurrenceTracker, SqlPatchStore
from phionyx_letta.memory.occurrences import Occurrences
from phionyx_letta.memory.stored import Patches

KINDS = ["file", "sqlite", "postgresql"]
_numbers = count(1)


@pytest.fixture(params=KINDS)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A path, or the URL of a database of its own."""
    if request.param == "file":
        yield str(tmp_path / "stored")
    elif request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.db'}"
    else:
        server, name = request.getfixturevalue("postgres"), f"memory_{next(_numbers)}"
        yield server.new_database(name)
        server.drop_database(name)


@pytest.fixture
def ledgers() -> Iterator[Callable[[str], SqlLedger]]:
    """Open ledgers that are closed in the end."""
    opened: list[SqlLedger] = []

    def open_ledger(url: str) -> SqlLedger:
        opened.append(SqlLedger(url))
        return opened[-1]

    yield open_ledger
    for one in opened:
        one.close()


@pytest.fixture
def new_store(where: str, ledgers: Callable[[str], SqlLedger]) -> Callable[[], Patches]:
    """Open the store anew, as another process would."""
    return lambda: SqlPatchStore(ledgers(where)) if "://" in where else PatchStore(f"{where}.jsonl")


@pytest.fixture
def new_tracker(where: str, ledgers: Callable[[str], SqlLedger]) -> Callable[[], Occurrences]:
    """Open the tracker anew."""
    return lambda: SqlOccurrenceTracker(ledgers(where)) if "://" in where else OccurrenceTracker(f"{where}.json")
