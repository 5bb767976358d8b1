"""Reading bulk statements on Letta's block tables: which rows they match, which they touched, which go unseen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Delete, Insert, Update, select
from sqlalchemy.orm import ORMExecuteState

_WRITE = re.compile(
    r"\b(?:insert\s+into|update(?:\s+only)?|delete\s+from(?:\s+only)?|merge\s+into|truncate(?:\s+table)?)\s+"
    r'(?:only\s+)?(?:"?\w+"?\s*\.\s*)?"?(?:block|blocks_agents)"?(?=[\s(;,]|$)',
    re.IGNORECASE,
)


def blind_write(sql: str) -> bool:
    """Whether this SQL writes ``block`` or ``blocks_agents`` (as text: a comment that says so counts too)."""
    return _WRITE.search(sql) is not None


def matching_rows(
    connection: Connection, statement: Update | Delete, parameters: Any, columns: Sequence[Any]
) -> list[Any]:
    """The rows a bulk UPDATE or DELETE will touch, locked until the end of the transaction.

    Args:
        connection: of the session that is about to run the statement.
        statement: as given to ``Session.execute``.
        parameters: as given with it; a list is either one set of bind values each, or ORM rows keyed by ``id``.
        columns: of the statement's table, to read.
    """
    table = columns[0].table
    found: list[Any] = []
    for values in parameters if isinstance(parameters, Sequence) else [parameters or {}]:
        query = select(*columns).with_for_update(of=table)
        if statement.whereclause is not None:
            query = query.where(statement.whereclause)
        elif isinstance(values, Mapping) and "id" in values and isinstance(parameters, Sequence):
            query = query.where(table.c.id == values["id"])
            values = {}
        with connection.begin_nested():  # a failed read must not abort Letta's transaction
            found += connection.execute(query, dict(values)).all()
    return found


def pivot_result(
    state: ORMExecuteState, statement: Insert | Update | Delete, columns: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """Run a statement with RETURNING; gives its result and the rows that were really touched.

    Letta reads nothing from these results but ``rowcount``, which is kept.
    """
    result: Any = state.invoke_statement(
        statement=statement.returning(*columns),
        execution_options={"preserve_rowcount": True, "phionyx_captured": True},
    )
    rows = list(result.all())
    if getattr(result, "rowcount", -1) < 0:
        result.rowcount = len(rows)
    return result, rows
