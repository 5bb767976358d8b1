"""Measures what the project promises about speed: ``uv run python benchmarks/run.py [NAME…] [--json] [--rounds N]``.

Prints a row per benchmark; exit 1 when a bound is missed, 2 when something could not be measured. ``--write`` puts the
rows into docs/performance.md. Figures need a quiet machine; ``--rounds`` takes more or fewer pairs than usual.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path

import report
from catalogue import BENCHMARKS, Bench, Benchmark
from measuring import NotMeasured

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmarks named on the command line; all of them by default."""
    parser = argparse.ArgumentParser(description="What the project promises about speed, measured.")
    parser.add_argument("name", nargs="*", help="of a benchmark; all by default")
    parser.add_argument("--list", action="store_true", help="print the names and what they compare")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=_positive, help="pairs to measure, in place of each benchmark's own number")
    parser.add_argument("--write", action="store_true", help="put the rows into docs/performance.md")
    asked = parser.parse_args(arguments)
    unknown = [name for name in asked.name if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; --list prints the names")
    chosen = [BENCHMARKS[name] for name in asked.name or BENCHMARKS]
    if asked.list:
        print(report.listing(chosen))
        return 0
    rows = _measure(chosen, asked.rounds, quiet=asked.json)
    where = report.machine(rows)
    if asked.json:
        print(json.dumps({"machine": where, "benchmarks": rows}, indent=1))
    else:
        print(report.machine_line(where))
    if asked.write:
        PAGE.write_text(report.written(PAGE.read_text(encoding="utf-8"), rows, where), encoding="utf-8")
    statuses = {row["status"] for row in rows}
    return 1 if "over" in statuses else 2 if "not measured" in statuses else 0


def _measure(chosen: list[Benchmark], rounds: int | None, *, quiet: bool) -> list[report.Row]:
    rows = []
    with ExitStack() as things:
        bench = Bench(rounds, things)
        for benchmark in chosen:
            try:
                figure, details = benchmark.measure(bench)
                row = report.row(benchmark, figure, details)
            except NotMeasured as error:
                row = report.row(benchmark, None, {"why": str(error)})
            rows.append(row)
            if not quiet:
                print(report.line(row), flush=True)
    return rows


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
