"""The queue of finished sessions, in Letta's PostgreSQL: found by the sweep, closed, claimed, finished, tried again or parked.

A session is the runs of one agent and conversation until they are idle, or one run, or what was ended by hand. Any number of workers
share the queue: one closes sessions at a time (a lock of the transaction), each claims with SKIP LOCKED, and what a killed worker had
claimed is free again when its lease ends. ``hold`` fences: who lost his claim commits nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, bindparam, func, select, text, update
from sqlalchemy.exc import DBAPIError

from phionyx_letta.errors import LedgerUnavailable
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.settings import Settings

#: How long a claim holds without being renewed, s.
LEASE = 60.0
#: Longest wait before a session is tried again, s.
LONGEST_BACKOFF = 3600.0
#: Sessions closed in one transaction, rows looked at in one sweep.
_BATCH, _SWEEP = 200, 1000
#: An unfinished run nobody has under way is taken for dead when it is older than this, s; one that is said to be under way, when
#: nothing of it was stored for the second time.
_GRACE, _STALE = 60, 3600
#: Ends of runs are kept so long once their sessions are finished, and the first sweep of a process looks back half of it, days.
_KEPT = 30
#: A later sweep looks at runs that began so long before the one before it, s, and at those that were not finished then.
_OVERLAP = 3600
_CLOSING = int.from_bytes(b"phionyxC", "big")
_SLEEPTIME = "('sleeptime_agent', 'voice_sleeptime_agent')"

_session = tables.session.c


class ClaimLost(Exception):
    """Another worker has taken the session meanwhile; nothing may be stored for it."""


@dataclass(frozen=True)
class Claim:
    """A session that this process works on."""

    session_id: str
    agent_id: str
    conversation_id: str | None
    attempt: int


class SessionQueue:
    """The queue as one process uses it; ``name`` is its own among all."""

    def __init__(self, ledger: SqlLedger, settings: Settings, name: str) -> None:
        """Nothing is read yet."""
        self._ledger = ledger
        self._settings = settings
        self.name = name
        self._swept: datetime | None = None
        self._unfinished: list[str] = []

    # -- from runs to sessions -----------------------------------------------------------------------------------

    def sweep(self) -> int:
        """Note the ends that no hook could: of runs whose process died, and where the hook failed. Returns how many.

        A run is dead when no living worker has it under way; that is believed only where all of them say what they have.
        """
        with self._writing() as connection:
            if not _alone(connection):
                return 0
            since, active = _workers(connection)
            if since is None:
                return 0
            connection.execute(_FORGET, {"kept": _KEPT})
            now: datetime = connection.execute(select(func.now())).scalar_one()
            first = (
                now - timedelta(days=_KEPT // 2) if self._swept is None else self._swept - timedelta(seconds=_OVERLAP)
            )
            over: list[str] = []
            unfinished: list[str] = []
            for row in _unknown(connection, max(since, first), self._unfinished):
                dead = row.stale or (active is not None and row.id not in active and not row.young)
                (over if row.ended or dead else unfinished).append(row.id)
            note_ends(connection, over)
        self._swept, self._unfinished = now, unfinished
        return len(over)

    def close(self) -> int:
        """Make sessions of the runs that have ended, as the setting says. Returns how many."""
        if self._settings.session_end == "hand":
            return 0
        with self._writing() as connection:
            if not _alone(connection):
                return 0
            connection.execute(_EXCLUDE)
            if self._settings.session_end == "run":
                rows = connection.execute(_ENDED_RUNS, {"most": _BATCH}).all()
                return sum(_close(connection, row.agent_id, row.conversation_id, row.runs, "run") for row in rows)
            values = {"idle": self._settings.session_idle, "most": _BATCH, "stale": _STALE}
            rows = connection.execute(_IDLE, values).all()
            return sum(_close(connection, row.agent_id, row.conversation_id, row.runs, "idle") for row in rows)

    # -- working on one ------------------------------------------------------------------------------------------

    def claim(self) -> Claim | None:
        """Take the next session that is due; one that ended its worker too often is parked instead."""
        now, most = func.now(), self._settings.session_attempts
        free = (_session.claimed_until.is_(None)) | (_session.claimed_until < now)
        with self._writing() as connection:
            while True:
                row = connection.execute(
                    select(tables.session)
                    .where(_session.state == "waiting", _session.due_at <= now, free)
                    .order_by(_session.due_at, _session.session_id)
                    .limit(1)
                    .with_for_update(skip_locked=True)
                ).first()
                if row is None:
                    return None
                if row.attempts >= most:
                    detail = f"its worker ended {row.attempts} times while it was at it; last: {row.detail or 'nothing was said'}"
                    connection.execute(
                        _of(row.session_id).values(state="parked", detail=detail, finished_at=now, **_FREE)
                    )
                    continue
                lease = now + timedelta(seconds=LEASE)
                changed = {"attempts": row.attempts + 1, "claimed_by": self.name, "claimed_until": lease}
                connection.execute(_of(row.session_id).values(changed))
                return Claim(row.session_id, row.agent_id, row.conversation_id, row.attempts + 1)

    def renew(self) -> None:
        """Say that this process is still at what it claimed."""
        mine = (_session.claimed_by == self.name) & (_session.state == "waiting")
        with self._writing() as connection:
            until = func.now() + timedelta(seconds=LEASE)
            connection.execute(update(tables.session).where(mine).values(claimed_until=until))

    def hold(self, connection: Connection, claim: Claim) -> None:
        """Make sure, until this transaction ends, that the claim is still ours.

        Raises:
            ClaimLost: it is not.
        """
        mine = select(_session.session_id).where(
            _session.session_id == claim.session_id,
            _session.claimed_by == self.name,
            _session.attempts == claim.attempt,
            _session.state == "waiting",
        )
        if connection.execute(mine.with_for_update()).first() is None:
            raise ClaimLost(claim.session_id)

    def finish(self, connection: Connection, claim: Claim, state: str, **said: Any) -> None:
        """The session is done or skipped; in the caller's transaction, which holds the claim."""
        if "tokens" in said:  # attempts that failed before were paid for too
            said["tokens"] = _session.tokens + said["tokens"]
        values = {"state": state, "finished_at": func.now(), **_FREE, **said}
        connection.execute(_of(claim.session_id).values(values))

    def settle(self, claim: Claim, state: str, **said: Any) -> None:
        """The same in a transaction of its own.

        Raises:
            ClaimLost: another worker has the session.
        """
        with self._writing() as connection:
            self.hold(connection, claim)
            self.finish(connection, claim, state, **said)

    def postpone(self, claim: Claim, until: datetime, why: str) -> None:
        """Not now; this was no attempt."""
        with self._writing() as connection:
            self.hold(connection, claim)
            again = {"due_at": until, "attempts": claim.attempt - 1, "detail": why, **_FREE}
            connection.execute(_of(claim.session_id).values(again))

    def failed(self, claim: Claim, why: str, tokens: int = 0, model: str | None = None) -> bool:
        """An attempt failed: try again later, or park it when that was the last. Returns whether it was parked."""
        parked = claim.attempt >= self._settings.session_attempts
        wait = min(LONGEST_BACKOFF, self._settings.session_backoff * 2.0 ** (claim.attempt - 1))
        values: dict[str, Any] = {"detail": why[:500], "tokens": _session.tokens + tokens, **_FREE}
        if model is not None:
            values["model"] = model
        if parked:
            values |= {"state": "parked", "finished_at": func.now()}
        else:
            values["due_at"] = func.now() + timedelta(seconds=wait)
        with self._writing() as connection:
            self.hold(connection, claim)
            connection.execute(_of(claim.session_id).values(values))
        return parked

    def release(self) -> None:
        """This process ends: what it was at is free at once, and was no attempt."""
        mine = (_session.claimed_by == self.name) & (_session.state == "waiting")
        with self._writing() as connection:
            freed = update(tables.session).where(mine).values(attempts=_session.attempts - 1, **_FREE)
            connection.execute(freed)

    # -- what decides whether it is time -------------------------------------------------------------------------

    def not_yet(self, agent_id: str) -> tuple[datetime, str] | None:
        """Until when a session of this agent has to wait, by the database's clock, and why."""
        most, cooldown = self._settings.most_tokens(), self._settings.session_cooldown
        today, spent = _today(), _spent(agent_id)
        last = select(func.max(_session.finished_at)).where(_session.agent_id == agent_id, _session.state == "done")
        due = last.scalar_subquery() + timedelta(seconds=cooldown)
        asked = select(spent.scalar_subquery(), today + timedelta(days=1), due, due > func.now())
        with self._reading() as connection:
            tokens, tomorrow, rested, resting = connection.execute(asked).one()
        if most is not None and tokens >= most:
            return tomorrow, f"the agent's {most} tokens for proposals are used up for today"
        return (rested, "the cooldown since the last session") if cooldown and resting else None

    def tokens_left(self, agent_id: str) -> int | None:
        """How many tokens this agent may still take today; None for no limit."""
        most = self._settings.most_tokens()
        if most is None:
            return None
        with self._reading() as connection:
            return max(0, most - int(connection.execute(_spent(agent_id)).scalar_one()))

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with _translated(), self._ledger.engine.begin() as connection:
            yield connection

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with _translated(), self._ledger.engine.connect() as connection:
            yield connection


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        cause = str(error.orig).strip().splitlines()
        raise LedgerUnavailable(
            f"the queue of sessions cannot be used: {cause[0] if cause else type(error).__name__}",
            "check that the database answers and that this user may use its phionyx_ tables",
        ) from error


_FREE: dict[str, Any] = {"claimed_by": None, "claimed_until": None}


def _of(session_id: str) -> Any:
    return update(tables.session).where(_session.session_id == session_id)


def _today() -> Any:
    """When the day began, UTC, by the database's clock."""
    return func.date_trunc("day", func.now(), "UTC")


def _spent(agent_id: str) -> Any:
    """The tokens an agent has taken today."""
    recent = (_session.finished_at >= _today()) | (_session.due_at >= _today())
    return select(func.coalesce(func.sum(_session.tokens), 0)).where(_session.agent_id == agent_id, recent)


def _alone(connection: Connection) -> bool:
    """Whether no other worker is closing or sweeping now."""
    return bool(connection.execute(select(func.pg_try_advisory_xact_lock(_CLOSING))).scalar())


def _workers(connection: Connection) -> tuple[datetime | None, set[str] | None]:
    """Since when any worker has noted ends of runs, and what the living ones have under way; None where one does not say."""
    query = select(tables.worker.c.info, (tables.worker.c.seen_at > func.now() - timedelta(seconds=30)).label("alive"))
    since: datetime | None = None
    active: set[str] | None = set()
    for row in connection.execute(query):
        try:
            told = json.loads(row.info)
            runs, began = told.get("active_runs"), told.get("sessions_since")
            at = datetime.fromisoformat(began) if began else None
        except (ValueError, TypeError, AttributeError, RecursionError):
            runs, at = None, None
        if at is not None and at.tzinfo is not None:
            since = at if since is None else min(since, at)
        if row.alive:
            active = active | set(map(str, runs)) if active is not None and isinstance(runs, list) else None
    return since, active


def _unknown(connection: Connection, first: datetime, ids: list[str]) -> Iterator[Any]:
    """Runs whose end was not noted: of those that began since then, and of these."""
    values: dict[str, Any] = {"first": first, "ids": ids, "most": _SWEEP, "grace": _GRACE, "stale": _STALE}
    began, last = "-infinity", ""
    while rows := connection.execute(_UNKNOWN, {**values, "began": began, "id": last}).all():
        yield from rows
        began, last = rows[-1].created_at, rows[-1].id


def _close(connection: Connection, agent_id: str, conversation_id: str | None, runs: list[str], ended_by: str) -> bool:
    session_id = f"session-{min(runs).removeprefix('run-')}"
    values = {"session_id": session_id, "agent_id": agent_id, "conversation_id": conversation_id}
    connection.execute(tables.session.insert(), {**values, "ended_by": ended_by, "state": "waiting"})
    ours = tables.run_end.c.run_id.in_(runs)
    connection.execute(update(tables.run_end).where(ours).values(session_id=session_id))
    return True


def note_ends(connection: Connection, runs: Sequence[str]) -> None:
    """Note that these runs are over: their process is, or says good-bye."""
    if runs:
        note = text("insert into phionyx_run(run_id) select unnest(cast(:ids as text[])) on conflict do nothing")
        connection.execute(note, {"ids": list(runs)})


def end_by_hand(ledger: SqlLedger, agent_id: str, conversation_id: str | None) -> list[str]:
    """End the open sessions of an agent now; with a conversation only its own. Returns their ids."""
    values = {"agent": agent_id, "conversation": conversation_id}
    with _translated(), ledger.engine.begin() as connection:
        connection.execute(select(func.pg_advisory_xact_lock(_CLOSING)))
        connection.execute(_EXCLUDE)
        rows = connection.execute(_BY_HAND, values).all()
        for row in rows:
            _close(connection, row.agent_id, row.conversation_id, row.runs, "hand")
        return [f"session-{min(row.runs).removeprefix('run-')}" for row in rows]


def try_again(ledger: SqlLedger, session_id: str) -> bool:
    """Put a parked session back into the queue; False where there is no such parked one."""
    parked = (_session.session_id == session_id) & (_session.state == "parked")
    values = {"state": "waiting", "attempts": 0, "due_at": func.now(), "finished_at": None, **_FREE}
    with _translated(), ledger.engine.begin() as connection:
        return bool(connection.execute(update(tables.session).where(parked).values(values)).rowcount)


#: When anything of a run was stored last.
_LAST_SIGN = (
    "greatest({0}.created_at, {0}.updated_at, (select max(m.created_at) from messages m where m.run_id = {0}.id))"
)
_UNKNOWN = text(
    f"""
    select u.id, u.created_at, u.completed_at is not null as ended, u.created_at > now() - make_interval(secs => :grace) as young,
        {_LAST_SIGN.format("u")} < now() - make_interval(secs => :stale) as stale
    from runs u
    where (u.created_at >= cast(:first as timestamptz) or u.id = any(cast(:ids as text[])))
        and (u.created_at, u.id) > (cast(:began as timestamptz), :id)
        and not exists (select 1 from phionyx_run r where r.run_id = u.id)
    order by u.created_at, u.id limit :most
    """
)
_FORGET = text(
    """
    delete from phionyx_run r where r.ended_at < now() - make_interval(days => :kept) and r.session_id is not null
        and not exists (select 1 from phionyx_session s where s.session_id = r.session_id and s.state in ('waiting', 'parked'))
    """
)
#: Runs that are not an agent's talk: gone with their agent, a sleeptime agent's, or started for one.
_EXCLUDE = text(
    f"""
    update phionyx_run r set session_id = ''
    where r.session_id is null and not exists (
        select 1 from runs u join agents a on a.id = u.agent_id
        where u.id = r.run_id and coalesce(a.agent_type, '') not in {_SLEEPTIME}
            and coalesce(u.metadata_ ->> 'run_type', '') not like 'sleeptime%')
    """
)
_OPEN = "from phionyx_run r join runs u on u.id = r.run_id where r.session_id is null"
#: Each run, and before it those of the same talk that ended waiting for an approval: ``back`` numbers them from the newest.
_ENDED_RUNS = text(
    f"""
    select agent_id, conversation_id, array_agg(run_id order by created_at, run_id) as runs
    from (
        select u.agent_id, u.conversation_id, r.run_id, r.ended_at, u.created_at,
            count(*) filter (where u.stop_reason is distinct from 'requires_approval') over (
                partition by u.agent_id, u.conversation_id order by u.created_at desc, r.run_id desc) as back
        {_OPEN}
    ) o
    where back > 0 group by agent_id, conversation_id, back order by min(ended_at) limit :most
    """
)
#: One whose process died long ago, before anybody swept, is not.
_RUNNING = f"""
    exists (select 1 from runs w where w.agent_id = o.agent_id and w.conversation_id is not distinct from o.conversation_id
        and w.completed_at is null and w.status in ('created', 'running')
        and {_LAST_SIGN.format("w")} >= now() - make_interval(secs => :stale)
        and not exists (select 1 from phionyx_run e where e.run_id = w.id))
"""
_GROUPED = f"""
    select u.agent_id, u.conversation_id, array_agg(r.run_id order by r.ended_at, r.run_id) as runs, max(r.ended_at) as last,
        (array_agg(u.stop_reason order by r.ended_at desc, r.run_id desc))[1] as stop_reason
    {_OPEN} group by u.agent_id, u.conversation_id
"""
#: A run that waits for a person's approval is not the end, nor is one while another is under way.
_IDLE = text(
    f"""
    select o.* from ({_GROUPED}) o
    where o.last < now() - make_interval(secs => :idle) and o.stop_reason is distinct from 'requires_approval' and not {_RUNNING}
    order by o.last limit :most
    """
)
_BY_HAND = text(
    f"""
    select o.* from ({_GROUPED}) o
    where o.agent_id = :agent and (cast(:conversation as text) is null or o.conversation_id = :conversation)
    order by o.last
    """
).bindparams(bindparam("conversation", type_=tables.session.c.conversation_id.type))
