"""What is to be seen of the queue of sessions: lists, one session, and the figures `doctor` and `log` give. Reads only."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, select, text

from phionyx_letta.ledger import tables
from phionyx_letta.ledger.sql import SqlLedger

_session = tables.session.c


def list_sessions(
    ledger: SqlLedger, *, state: str | None = None, agent_id: str | None = None, limit: int = 30
) -> list[dict[str, Any]]:
    """Sessions, newest last, the open ones among them.

    Args:
        ledger: in Letta's database.
        state: open, waiting, done, skipped or parked; None for all.
        agent_id: only of this agent.
        limit: at most so many, the newest.
    """
    with ledger.engine.connect() as connection:
        found = [_shown(row) for row in _ended(connection, state, agent_id, limit)] if state != "open" else []
        if state in (None, "open"):
            found += [_shown(row) for row in connection.execute(_OPEN, {"agent": agent_id, "most": limit})]
    return sorted(found, key=lambda one: one["ended_at"])[-limit:]


def find_sessions(ledger: SqlLedger, prefix: str) -> list[str]:
    """The ids that begin so, ten at most."""
    query = select(_session.session_id).where(_session.session_id.startswith(prefix, autoescape=True))
    with ledger.engine.connect() as connection:
        return list(connection.execute(query.order_by(_session.session_id).limit(10)).scalars())


def show_session(ledger: SqlLedger, session_id: str) -> dict[str, Any]:
    """All about one session: the fields of `list_sessions`, ``run_ids`` and the patches ``proposed``."""
    patch = tables.patch.c
    with ledger.engine.connect() as connection:
        [row] = connection.execute(_LISTED.where(_session.session_id == session_id)).all()
        runs = select(tables.run_end.c.run_id).where(tables.run_end.c.session_id == session_id)
        run_ids = list(connection.execute(runs.order_by(tables.run_end.c.ended_at)).scalars())
        query = select(patch.patch_id, patch.status, patch.file_path, patch.rationale, patch.created_at)
        found = connection.execute(query.where(patch.newest, patch.session_id == session_id).order_by(patch.seq))
        proposed = [dict(one._mapping) for one in found]
    return {**_shown(row), "run_ids": run_ids, "proposed": proposed}


def counts(connection: Connection) -> dict[str, Any]:
    """How many sessions are in each state, the age of the oldest that is due, s, and the newest that were parked."""
    rows = connection.execute(_COUNTS).all()
    parked = connection.execute(
        select(_session.session_id, _session.detail)
        .where(_session.state == "parked")
        .order_by(_session.finished_at.desc())
        .limit(5)
    )
    return {
        "states": {row.state: row.n for row in rows},
        "oldest_due_s": max((float(row.due) for row in rows if row.due is not None), default=0.0),
        "tokens_today": sum(int(row.today or 0) for row in rows),
        "parked": [dict(row._mapping) for row in parked],
    }


def _ended(connection: Connection, state: str | None, agent_id: str | None, limit: int) -> list[Any]:
    query = _LISTED.order_by(_session.ended_at.desc(), _session.session_id).limit(limit)
    if state is not None:
        query = query.where(_session.state == state)
    if agent_id is not None:
        query = query.where(_session.agent_id == agent_id)
    return list(connection.execute(query))


def _shown(row: Any) -> dict[str, Any]:
    given = dict(row._mapping)
    age = (datetime.now(UTC) - given["ended_at"]).total_seconds()
    times = {name: value.isoformat() for name, value in given.items() if isinstance(value, datetime)}
    return {**given, **times, "age_s": max(0.0, round(age, 1))}


_RUNS = (
    select(text("count(*)"))
    .select_from(tables.run_end)
    .where(tables.run_end.c.session_id == _session.session_id)
    .scalar_subquery()
    .label("runs")
)
_NAMES = (
    *("session_id", "agent_id", "conversation_id", "ended_by", "ended_at", "state", "due_at", "attempts", "claimed_by"),
    *("finished_at", "model", "tokens", "patches", "detail"),
)
_LISTED = select(*(_session[name] for name in _NAMES), _RUNS)
_OPEN = text(
    """
    select null as session_id, u.agent_id, u.conversation_id, null as ended_by, max(r.ended_at) as ended_at, 'open' as state,
        null as due_at, 0 as attempts, null as claimed_by, null as finished_at, null as model, 0 as tokens, 0 as patches,
        case when (array_agg(u.stop_reason order by r.ended_at desc))[1] = 'requires_approval'
            then 'the last run waits for an approval' end as detail,
        count(*) as runs
    from phionyx_run r join runs u on u.id = r.run_id
    where r.session_id is null and (cast(:agent as text) is null or u.agent_id = :agent)
    group by u.agent_id, u.conversation_id order by max(r.ended_at) desc limit :most
    """
)
_COUNTS = text(
    """
    select state, count(*) as n, extract(epoch from now() - min(due_at) filter (where state = 'waiting' and due_at < now())) as due,
        sum(tokens) filter (where ended_at >= date_trunc('day', now())) as today
    from phionyx_session group by state order by state
    """
)
