"""Statements over many rows at once, whose text does not depend on how many.

On PostgreSQL rows go as one JSON text and sought values as one array: one round trip, one plan, and nothing to compile
anew for each batch; ``executemany`` and ``IN`` halved what the sealer does in a second (psycopg quotes arrays of long texts
in Python, so JSON for those). SQLite has no round trips to save.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Insert,
    Table,
    Text,
    any_,
    bindparam,
    cast,
    column,
    func,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite

Rows = Sequence[dict[str, Any]]


def among(connection: Connection, sought: Column[Any], values: Collection[Any]) -> ColumnElement[bool]:
    """The condition that the column ``sought`` has one of these values."""
    if connection.dialect.name != "postgresql":
        return sought.in_(values)
    return sought == any_(bindparam(None, list(values), type_=postgresql.ARRAY(sought.type), unique=True))


def insert_rows(connection: Connection, table: Table, rows: Rows) -> None:
    """Insert rows that all name the same columns."""
    if rows:
        _execute(connection, table, None, rows)


def upsert_rows(connection: Connection, table: Table, key: str, rows: Rows) -> None:
    """Insert rows, or overwrite the ones whose ``key`` is there; each key at most once."""
    if rows:
        _execute(connection, table, key, rows)


def _execute(connection: Connection, table: Table, key: str | None, rows: Rows) -> None:
    on_postgresql = connection.dialect.name == "postgresql"
    statement = _insert(on_postgresql, table, key, tuple(rows[0]))
    connection.execute(statement, {"rows": json.dumps(rows)} if on_postgresql else rows)


@lru_cache(maxsize=32)
def _insert(on_postgresql: bool, table: Table, key: str | None, names: tuple[str, ...]) -> Insert:
    """The statement over all of ``rows`` (PostgreSQL) or over each of them (SQLite)."""
    statement: Any = sqlite.insert(table)
    if on_postgresql:
        columns = [column(name, table.c[name].type) for name in names]
        given = func.json_to_recordset(cast(bindparam("rows", type_=Text), postgresql.JSON)).table_valued(*columns)
        statement = postgresql.insert(table).from_select(names, select(*given.render_derived(with_types=True).c))
    if key is not None:
        changed = {name: statement.excluded[name] for name in names if name != key}
        statement = statement.on_conflict_do_update(index_elements=[key], set_=changed)
    return statement  # type: ignore[no-any-return]
