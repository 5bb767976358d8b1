"""Which ledger a command works on, and opening it: a database, a SQLite file, a store folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from phionyx_letta.cli.failures import CommandError

if TYPE_CHECKING:
    from phionyx_letta.ledger.sql import SqlLedger

__all__ = ["database_url", "is_store", "ledger_name", "open_database", "shown_url"]

_LIKE_URL = re.compile(r"[A-Za-z][A-Za-z0-9+]*:.*[/@]")
_SQLITE_MAGIC = b"SQLite format 3\0"
_HOW = "give --ledger, or set PHIONYX_LETTA_LEDGER or LETTA_PG_URI: postgresql://user@host:port/db, sqlite:///file or a folder"


def ledger_name(given: str | None) -> str:
    """What ``--ledger`` says, else the settings, else Letta's own database.

    Raises:
        CommandError: none of them says anything.
        SettingsError: a PHIONYX_LETTA_* variable has an unusable value.
    """
    from phionyx_letta.settings import load_settings

    name = given or load_settings().ledger or os.environ.get("LETTA_PG_URI", "")
    if not name.strip():
        raise CommandError("no ledger was given", _HOW)
    return name.strip()


def is_store(name: str) -> bool:
    """Whether this is a folder rather than a database."""
    return "://" not in name and Path(name).is_dir()


def database_url(name: str) -> str:
    """The database URL of a ledger given as a URL or as a SQLite file.

    Raises:
        CommandError: it is neither.
    """
    if "://" in name:
        return name
    refuse_malformed_url(name)
    path = Path(name)
    if path.is_dir():
        raise CommandError(f"{name} is a folder, and this command needs the ledger's database", _HOW)
    if not path.is_file():
        raise CommandError(f"the ledger {name} does not exist", _HOW)
    if not is_sqlite(path):
        raise CommandError(f"{name} is not a SQLite database", _HOW)
    return f"sqlite:///{path.absolute()}"


def refuse_malformed_url(name: str) -> None:
    """Tell a URL with a slip of the pen from a file's name: it may hold a password, so it is not repeated.

    Raises:
        CommandError: it looks like a URL, and no file has this name.
    """
    if _LIKE_URL.match(name) and not Path(name).exists():
        raise CommandError("the ledger's URL is malformed", _HOW)


def is_sqlite(path: Path) -> bool:
    """Whether a file is a SQLite database."""
    with path.open("rb") as file:
        return file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC


def shown_url(ledger: SqlLedger) -> str:
    """The ledger's URL without its password, its driver and its options."""
    url = ledger.url
    return url.set(drivername=url.get_backend_name(), query={}).render_as_string(hide_password=True)


@contextmanager
def open_database(name: str, *, empty_is_fine: bool = False) -> Iterator[SqlLedger]:
    """The ledger in a database, opened for reading what is there: no table is made.

    Args:
        name: URL or SQLite file.
        empty_is_fine: also open a database without the ledger's tables.

    Raises:
        CommandError: a SQLite file does not exist, a driver is missing, or nothing was ever recorded there.
        LedgerUnavailable: the database does not answer.
    """
    from sqlalchemy import inspect
    from sqlalchemy.exc import SQLAlchemyError

    from phionyx_letta.errors import LedgerUnavailable
    from phionyx_letta.ledger import tables
    from phionyx_letta.ledger.sql import SqlLedger

    url = tables.ledger_url(database_url(name))
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").is_file():
        raise CommandError(f"the ledger {url.database or ':memory:'} does not exist", _HOW)
    if url.get_backend_name() == "postgresql" and find_spec("psycopg") is None:
        raise CommandError("the driver for PostgreSQL is not installed", "pip install 'phionyx-letta[postgres]'")
    ledger = SqlLedger(name if "://" in name else database_url(name), create=False)
    try:
        if not inspect(ledger.engine).has_table(tables.envelope.name) and not empty_is_fine:
            raise CommandError(
                f"there is no ledger in {shown_url(ledger)}: nothing was recorded there yet",
                "start Letta with PHIONYX_LETTA_ENABLE=1, then look again",
            )
        yield ledger
    except SQLAlchemyError as error:
        cause = str(getattr(error, "orig", None) or error).strip().splitlines()
        raise LedgerUnavailable(
            f"the ledger at {shown_url(ledger)} cannot be used: {cause[0] if cause else type(error).__name__}",
            "check that the database answers and that this user may read it",
        ) from error
    finally:
        ledger.close()
