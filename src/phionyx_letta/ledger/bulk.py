"""Statements over many rows at once, whose text does not depend on how many.

On PostgreSQL new rows go by COPY, rows to overwrite as one JSON text and sought values as one array: one round trip each,
nothing to compile anew for a batch. Measured with the sealer: ``executemany`` and ``IN`` took three times as long, and
JSON twice as long as COPY for envelopes. SQLite has no round trips to save.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import lru_cache
from operator import itemgetter
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
    true,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

Rows = Sequence[dict[str, Any]]


def among(connection: Connection, sought: Column[Any], values: Collection[Any]) -> ColumnElement[bool]:
    """The condition that the column ``sought`` has one of these values."""
    if connection.dialect.name != "postgresql":
        return sought.in_(values)
    return sought == any_(bindparam(None, list(values), type_=postgresql.ARRAY(sought.type), unique=True))


def finite(connection: Connection, time: Column[Any]) -> ColumnElement[bool]:
    """The condition that a point in time is one: PostgreSQL knows infinite ones, which Python cannot read."""
    return func.isfinite(time) if connection.dialect.name == "postgresql" else true()


def insert_rows(connection: Connection, table: Table, rows: Rows) -> None:
    """Insert rows that all name the same columns."""
    if not rows:
        return
    names = list(rows[0])
    quote = connection.dialect.identifier_preparer.quote
    if connection.dialect.name != "postgresql":  # by the driver: SQLAlchemy makes each row's parameters anew
        places = ", ".join("?" * len(names))
        sql = f"INSERT INTO {quote(table.name)} ({', '.join(map(quote, names))}) VALUES ({places})"
        connection.exec_driver_sql(sql, list(map(itemgetter(*names), rows)))
        return
    sql = f"COPY {quote(table.name)} ({', '.join(map(quote, names))}) FROM STDIN"
    driver: Any = connection.connection.driver_connection
    error_class = connection.dialect.loaded_dbapi.Error
    try:
        with driver.cursor() as cursor, cursor.copy(sql) as copy:
            for row in rows:
                copy.write_row([row[name] for name in names])
    except (
        error_class
    ) as error:  # as SQLAlchemy would have raised it: callers tell a bad row from a lost connection by it
        raise DBAPIError.instance(sql, None, error, error_class, dialect=connection.dialect) from error


def upsert_rows(connection: Connection, table: Table, key: str, rows: Rows) -> None:
    """Insert rows, or overwrite the ones whose ``key`` is there; each key at most once."""
    if not rows:
        return
    on_postgresql = connection.dialect.name == "postgresql"
    statement = _upsert(on_postgresql, table, key, tuple(rows[0]))
    connection.execute(statement, {"rows": json.dumps(rows)} if on_postgresql else rows)


@lru_cache(maxsize=32)
def _upsert(on_postgresql: bool, table: Table, key: str, names: tuple[str, ...]) -> Insert:
    """The statement over all of ``rows`` (PostgreSQL) or over each of them (SQLite)."""
    statement: Any = sqlite.insert(table)
    if on_postgresql:
        columns = [column(name, table.c[name].type) for name in names]
        given = func.json_to_recordset(cast(bindparam("rows", type_=Text), postgresql.JSON)).table_valued(*columns)
        statement = postgresql.insert(table).from_select(names, select(*given.render_derived(with_types=True).c))
    changed = {name: statement.excluded[name] for name in names if name != key}
    return statement.on_conflict_do_update(index_elements=[key], set_=changed)  # type: ignore[no-any-return]
