"""SQL of ours on the connection of Letta's own transaction: past SQLAlchemy's events, in one round trip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.util import await_only


def run_simple(connection: Connection, statements: Sequence[str]) -> int:
    """Send statements on the connection of Letta's transaction, past SQLAlchemy's own events; the rows the last one touched."""
    driver: Any = connection.connection.driver_connection
    if type(driver).__module__.startswith("asyncpg"):
        # without arguments asyncpg uses the simple protocol: one round trip, and the answer is the last statement's
        status = str(await_only(driver.execute(";".join(statements))))
        return int(status.rpartition(" ")[2]) if status.startswith("INSERT") else 0
    cursor = connection.connection.cursor()
    try:
        for statement in statements:
            cursor.execute(statement)
        return int(cursor.rowcount)
    finally:
        cursor.close()
