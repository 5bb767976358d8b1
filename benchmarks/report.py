"""How rows look: on the terminal, as JSON, and in docs/performance.md between two markers."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from catalogue import Benchmark

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
Row = dict[str, Any]
_HEAD = ["| benchmark | compared | figure | bound | |", "|---|---|---|---|---|"]
_PACKAGES = ("letta", "sqlalchemy", "cryptography", "rapidfuzz")


def row(benchmark: Benchmark, figure: float | None, details: dict[str, Any]) -> Row:
    """One row; ``figure`` is None where nothing could be measured."""
    holds = None if figure is None else benchmark.holds(figure)
    status = "not measured" if figure is None else {True: "ok", False: "over", None: "no bound"}[holds]
    return {
        "name": benchmark.name,
        "compares": benchmark.compares,
        "figure": None if figure is None else round(figure, 4),
        "unit": benchmark.unit,
        "bound": benchmark.bound,
        "bound_is": "at least" if benchmark.at_least else "at most",
        "status": status,
        "details": details,
    }


def listing(benchmarks: Sequence[Benchmark]) -> str:
    """Names and what they compare."""
    return "\n".join(f"{one.name:<24}{one.compares}" for one in benchmarks)


def line(one: Row) -> str:
    """A row for the terminal."""
    details = "  ".join(f"{name}={_number(value)}" for name, value in one["details"].items())
    return (
        f"{one['name']:<23} {one['compares']:<52} {_figure(one):>15}  {_bound(one):<20} {one['status']:<12} {details}"
    )


def machine(rows: Sequence[Row]) -> dict[str, Any]:
    """What the figures depend on; nothing that names the machine."""
    found: dict[str, Any] = {"cores": os.cpu_count(), "python": platform.python_version()}
    postgres = [one["details"]["postgresql"] for one in rows if "postgresql" in one["details"]]
    if postgres:
        found["postgresql"] = postgres[0]
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine_line(found: dict[str, Any]) -> str:
    """The same as a sentence."""
    return "Measured on " + ", ".join(
        f"{value} cores" if name == "cores" else f"{_NAMES.get(name, name)} {value}" for name, value in found.items()
    )


_NAMES = {"python": "Python", "postgresql": "PostgreSQL", "letta": "Letta", "sqlalchemy": "SQLAlchemy"}


def written(page: str, rows: Sequence[Row], found: dict[str, Any]) -> str:
    """The page with these rows in its table; rows that were not measured this time keep their place.

    Raises:
        ValueError: the page has no markers.
    """
    before, begin, rest = page.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    lines = {name: text for text in table.splitlines() if (name := _name_in(text))}
    lines.update({one["name"]: _markdown(one) for one in rows if one["status"] != "not measured"})
    from catalogue import BENCHMARKS

    ordered = [lines[name] for name in BENCHMARKS if name in lines]
    body = [*_HEAD, *ordered, "", machine_line(found) + "."]
    return before + begin + "\n" + "\n".join(body) + "\n" + end + after


def names_in(page: str) -> list[str]:
    """The benchmarks that have a row in the page's table."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    return [name for text in table.splitlines() if (name := _name_in(text))]


def _name_in(text: str) -> str | None:
    match = re.match(r"\| `([^`]+)` \|", text)
    return match[1] if match else None


def _markdown(one: Row) -> str:
    return f"| `{one['name']}` | {one['compares']} | {_figure(one)} | {_bound(one)} | {one['status']} |"


def _figure(one: Row) -> str:
    return "-" if one["figure"] is None else f"{_number(one['figure'])} {one['unit']}"


def _bound(one: Row) -> str:
    sign = "≥" if one["bound_is"] == "at least" else "≤"
    return "-" if one["bound"] is None else f"{sign} {_number(one['bound'])} {one['unit']}"


def _number(value: Any) -> str:
    if not isinstance(value, float | int) or isinstance(value, bool):
        return str(value)
    return (
        f"{value:,.0f}".replace(",", " ") if abs(value) >= 100 else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
    )
