"""The benchmarks run, and the page of their figures names them all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = ROOT / "benchmarks" / "run.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(RUN), *arguments], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def names() -> list[str]:
    listed = run("--list")
    assert listed.returncode == 0, listed.stderr
    return [line.split()[0] for line in listed.stdout.splitlines()]


@pytest.fixture(scope="module")
def report():
    """The runner's module for tables, importable only from its own folder."""
    sys.path.insert(0, str(RUN.parent))
    try:
        import report

        yield report
    finally:
        sys.path.remove(str(RUN.parent))


def test_every_promise_of_speed_is_a_benchmark(names):
    assert set(names) == {
        *(f"write-{kind}-{how}" for kind in ("free", "attached") for how in ("2k", "20k", "16")),
        *("capture-cpu", "seal-lag", "sealer", "guard-step", "guard-read", "run-latency", "session-memory"),
        *("bundle-verify", "bundle-hashes", "bundle-script", "bundle-memory"),
        *("filesystem-append", "filesystem-append-peer", "patch-store"),
        *("diff-append", "diff-rewrite-100k", "diff-longest"),
        *("verify", "verify-memory", "pii", "import"),
        *("code-ingest", "code-again", "code-memory", "code-hook"),
    }


def test_one_benchmark_gives_one_json_object():
    done = run("diff-rewrite-100k", "import", "--rounds", "1", "--json")
    assert done.returncode in (0, 1), done.stderr  # whether a bound holds is not for a busy machine to say
    said = json.loads(done.stdout)
    rows = {row["name"]: row for row in said["benchmarks"]}
    assert set(rows) == {"diff-rewrite-100k", "import"}
    assert rows["diff-rewrite-100k"]["figure"] > 0
    assert rows["diff-rewrite-100k"]["bound"] == 1000
    assert {row["status"] for row in rows.values()} <= {"ok", "over"}
    assert rows["import"]["details"]["heavy"] == "[]"
    assert said["machine"]["cores"] >= 1


@pytest.mark.slow
def test_the_sealer_benchmark_verifies_what_it_sealed():
    done = run("sealer", "--rounds", "1", "--json")
    assert done.returncode in (0, 1), done.stderr
    (row,) = json.loads(done.stdout)["benchmarks"]
    assert row["figure"] > 0
    assert "postgresql" in row["details"]


def test_an_unknown_name_is_refused():
    done = run("no-such-benchmark")
    assert done.returncode == 2
    assert "no-such-benchmark" in done.stderr


def test_the_page_of_figures_has_a_row_for_each(names, report):
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert report.names_in(page) == names


def test_the_page_explains_each(names):
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").partition("## How they are measured")[2]
    explained = [name for name in names if f"`{name}`" in page or (name.startswith("write-") and "`write-…`" in page)]
    assert set(names) - set(explained) <= {"diff-append", "diff-rewrite-100k"}


def test_writing_keeps_the_rows_that_were_not_measured(report):
    def row(name: str, figure: float) -> dict:
        return {
            "name": name,
            "compares": "a / b",
            "figure": figure,
            "unit": "x",
            "bound": 2,
            "bound_is": "at most",
            "status": "ok",
            "details": {},
        }

    sys.path.insert(0, str(RUN.parent))
    page = f"above\n{report.BEGIN}\n{report.END}\nbelow\n"
    once = report.written(page, [row("sealer", 1.0), row("import", 1.5)], {"cores": 2})
    twice = report.written(once, [row("sealer", 1.25)], {"cores": 4})
    assert report.names_in(twice) == ["sealer", "import"]
    assert "1.25 x" in twice
    assert "1.50 x" in twice
    assert "4 cores" in twice
    assert twice.startswith("above\n")
    assert twice.endswith("below\n")
