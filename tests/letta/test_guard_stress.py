"""Guarded reads refuse no legitimate read: writers of several processes, with a sealer, without one, and with it again."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from phionyx_letta.signing import generate_key

SCRIPT = Path(__file__).parent / "scripts" / "guard_stress.py"
PROCESSES, WRITERS, SECONDS = 2, 8, 30


def together(run_in_letta: Callable[..., Any], database: str, home: Path, sealer: str) -> list[dict[str, Any]]:
    settings = {
        "PYTHONWARNINGS": "ignore",
        "PHIONYX_LETTA_SIGNING_KEY": str(home / "key"),
        "PHIONYX_LETTA_SINKS": f"folder:{home / 'outside'}",
        "PHIONYX_LETTA_ON_ERROR": "closed",
        "PHIONYX_LETTA_GUARD": "reject",
        "PHIONYX_LETTA_SEALER": sealer,
    }

    def run(seed: int) -> Any:
        how = [str(seed), str(WRITERS), str(SECONDS)]
        return run_in_letta(SCRIPT, *how, database=database, plugin=True, env=settings, timeout=600)

    with ThreadPoolExecutor(PROCESSES) as pool:
        running = []
        for seed in range(PROCESSES):
            running.append(pool.submit(run, seed))
            wait_for_the_first(database, running[0])
        return [one.result() for one in running]


def wait_for_the_first(database: str, first: Future[Any]) -> None:
    """Two Lettas that start on an empty database at once may both insert their defaults, and one of them ends."""
    deadline = time.monotonic() + 180
    with psycopg.connect(database, autocommit=True) as connection:
        while connection.execute("select to_regclass('stress')").fetchone() == (None,) and not first.done():
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.slow
def test_sixteen_writers_in_two_processes_are_never_refused(
    new_letta_database: Callable[[], str], run_in_letta: Callable[..., Any], tmp_path: Path
) -> None:
    database = new_letta_database()
    generate_key(tmp_path / "key")
    for sealer in ("1", "0", "1"):  # running; stopped, so that all waits; running again, so that all of it is taken up
        for result in together(run_in_letta, database, tmp_path, sealer):
            assert result["refused"] == 0, result["told"]
            assert result["refusals"] == []
            assert result["checked"] > 100
            assert {"write", "read", "undo", "agent", "message", "new"} <= result["done"].keys()
    with psycopg.connect(database) as connection:
        [(sealed, waiting)] = connection.execute(
            "select (select count(*) from phionyx_envelope), (select count(*) from phionyx_outbox)"
        ).fetchall()
    assert (sealed > 300, waiting) == (True, 0)
