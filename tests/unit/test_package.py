"""What an auditor installs, and what importing it loads."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import metadata, requires

HEAVY = (
    "letta",
    "openai",
    "sqlalchemy",
    "pydantic",
    "pydantic_settings",
    "typer",
    "rich",
    "wrapt",
    "psycopg",
    "asyncpg",
)


def test_the_base_install_needs_neither_letta_nor_a_model_client_nor_a_database_driver() -> None:
    base = [line for line in requires("phionyx-letta") or () if "extra ==" not in line]
    names = {re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0] for line in base}
    assert names == {
        *("cryptography", "rapidfuzz", "sqlalchemy", "pydantic-settings", "typer", "rich", "wrapt"),
        *("merge3", "markdown-it-py", "phonenumberslite", "python-stdnum"),  # Living Memory
    }


def test_the_extras_are_the_documented_ones() -> None:
    assert set(metadata("phionyx-letta").get_all("Provides-Extra") or ()) == {
        *("letta", "openai", "pg", "postgres", "presidio"),
    }


def test_importing_the_library_loads_nothing_heavy() -> None:
    script = f"import sys, phionyx_letta; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_it_is_typed_and_says_its_licence() -> None:
    from importlib.resources import files

    assert (files("phionyx_letta") / "py.typed").is_file()
    assert metadata("phionyx-letta")["License-Expression"] == "AGPL-3.0-or-later"
