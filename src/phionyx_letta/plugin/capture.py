"""Captures every change of a core-memory block in the transaction that makes it (design, decisions 1 and 2).

Letta writes blocks through SQLAlchemy's unit of work and the pivot ``blocks_agents`` through statements; both pass the
session events used here, with exact before and after. SQL that goes around the session (``text()``, a bare engine) is seen
but has no before and after: it is a gap in ``open`` mode and refused in ``closed`` mode. psql is not seen at all.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Delete, Engine, Insert, Update, event, select
from sqlalchemy.orm import ORMExecuteState, PassiveFlag, Session, UOWTransaction
from sqlalchemy.orm.attributes import get_history

from phionyx_letta.diff import content_hash
from phionyx_letta.errors import DiffConflictError, EvidenceRefused, StoreError, UntrustedPatch
from phionyx_letta.memory.policy import Reviewer
from phionyx_letta.plugin import attribution
from phionyx_letta.plugin.guard import DIRTY, OWN, PROMPTS
from phionyx_letta.plugin.mutation import BARE, COMPILE, RECORDED, BlockColumns, attachment_change, block_change
from phionyx_letta.plugin.outbox import ROLLBACK_SQL, STALE_SALT, SaltUse, capture_sql
from phionyx_letta.plugin.salting import SaltingCapture
from phionyx_letta.plugin.simple import run_simple
from phionyx_letta.plugin.statements import blind_write, matching_rows, pivot_result
from phionyx_letta.plugin.stored import compiled_prompts, stored_checkpoints

if TYPE_CHECKING:
    from phionyx_letta.plugin.propose_only import ProposeOnly
    from phionyx_letta.plugin.run_ends import RunEnds
    from phionyx_letta.plugin.runtime import Runtime

# A tuple: isinstance is several times quicker with it than with a union, and this runs for every statement of Letta's.
_WRITES = (Insert, Update, Delete)
_BEFORE = "phionyx_before"
_DETACHED = "phionyx_detached"
#: True while a flush runs: its own SQL is not a blind write. Letta's greenlets share the context of their task.
_flushing: ContextVar[bool] = ContextVar("phionyx_letta_flushing", default=False)

Mutation = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """What a write did to one block; how its content is committed to is settled when it is recorded."""

    block_id: str
    before: BlockColumns | None
    after: BlockColumns | None
    organization_id: str | None


class Capture:
    """The session events, and what they need: Letta's models and the plugin's runtime."""

    def __init__(
        self, runtime: Runtime, orm: Any, run_ends: RunEnds | None = None, propose_only: ProposeOnly | None = None
    ) -> None:
        """Take the models from the imported module ``letta.orm``; ``run_ends`` is told of every flush too.

        ``propose_only`` may refuse a change.
        """
        self._runtime = runtime
        self._run_ends = run_ends
        self._propose_only = propose_only
        self._block, self._pivot, self._agent = orm.Block, orm.BlocksAgents, orm.Agent
        self._message, self._history = orm.Message, orm.BlockHistory
        self._guarded = runtime.settings.guard != "off"
        table, pivot = orm.Block.__table__.c, orm.BlocksAgents.__table__.c
        self._columns = [table.id, table.organization_id, *(table[name] for name in RECORDED)]
        self._pivot_columns = [pivot.agent_id, pivot.block_id, pivot.block_label]
        self._listeners: list[tuple[Any, str, Callable[..., Any]]] = [
            (Session, "before_flush", self._before_flush),
            (Session, "after_flush", self._after_flush),
            (Session, "after_soft_rollback", self._after_rollback),
            (Session, "do_orm_execute", self._on_statement),
            (Engine, "before_cursor_execute", self._on_cursor),
        ]

    def install(self) -> None:
        """Start listening."""
        for target, name, listener in self._listeners:
            event.listen(target, name, listener)

    def uninstall(self) -> None:
        """Stop listening."""
        for target, name, listener in self._listeners:
            event.remove(target, name, listener)

    # -- the unit of work ----------------------------------------------------------------------------------------

    def _before_flush(self, session: Session, _context: UOWTransaction, _instances: Any) -> None:
        """Read what will be gone or was never loaded: it cannot be read after the flush.

        No lock is needed: the version was loaded before (asking for ``id`` loads an expired object), so that a change by
        another transaction in between fails Letta's own check of the version.
        """
        _flushing.set(True)
        session.info.pop(_BEFORE, None)
        session.info.pop(_DETACHED, None)
        deleted = [item for item in session.deleted if isinstance(item, (self._block, self._agent))]
        unknown = [item.id for item in session.dirty if isinstance(item, self._block) and self._old_is_unknown(item)]
        unknown += [item.id for item in deleted if isinstance(item, self._block) and self._loaded(item) is None]
        if not unknown and not deleted:
            return
        with session.no_autoflush, self._runtime.guarded("reading the state before a write", unknown):
            connection = session.connection()
            if unknown:
                session.info[_BEFORE] = self._read(connection, unknown)
            if deleted:
                session.info[_DETACHED] = self._attachments_of(connection, deleted)

    def _after_flush(self, session: Session, _context: UOWTransaction) -> None:
        """Letta's own statements are done and hold the row locks: only now is the order of our rows the order of writes."""
        _flushing.set(False)
        # the session makes each of the three anew whenever it is asked
        new, dirty, deleted = list(session.new), list(session.dirty), list(session.deleted)
        if self._run_ends is not None:
            self._run_ends.flushed(session, new, dirty)
        created, changed, gone = (
            [item for item in some if isinstance(item, self._block)] for some in (new, dirty, deleted)
        )
        pivots = [(item, "attach") for item in new if isinstance(item, self._pivot)]
        pivots += [(item, "detach") for item in deleted if isinstance(item, self._pivot)]
        agents = [item for item in (*new, *dirty) if isinstance(item, self._agent)]
        detached = session.info.pop(_DETACHED, ())
        before = session.info.pop(_BEFORE, {})
        checkpoints = [item for item in (*new, *dirty, *deleted) if isinstance(item, self._history)]
        prompts = self._guarded and any(isinstance(item, self._message) for item in (*new, *dirty))
        if not (created or changed or gone or pivots or agents or detached or checkpoints or prompts):
            return
        named = [block.id for block in (*created, *changed, *gone)]
        with self._runtime.guarded("describing a write", named):
            found: list[Change | Mutation] = [self._written(session, block, True, before) for block in created]
            found += [self._written(session, block, False, before) for block in changed]
            found += self._attached(agents, pivots)
            found += [self._attachment("detach", *row) for row in detached]
            found += [self._deleted(block, before) for block in gone]
            salted = self._runtime.salting is not None  # digests of checkpoints and prompts are bare
            if checkpoints and not salted:
                found += stored_checkpoints(session.connection(), checkpoints, attribution.current())
            if prompts and not salted:
                added, updated = ([one for one in some if isinstance(one, self._message)] for some in (new, dirty))
                found += compiled_prompts(added, updated, attribution.current())
            self._record(session, found)

    def _after_rollback(self, session: Session, _previous: Any) -> None:
        _flushing.set(False)
        session.info.pop(_BEFORE, None)
        session.info.pop(_DETACHED, None)

    def _old_is_unknown(self, block: Any) -> bool:
        """A recorded column is written and its old value was never loaded (expired by a rollback, deferred)."""
        written = [history for name in RECORDED if (history := _history(block, name)).added]
        return any(not history.deleted for history in written) or bool(written and self._loaded(block) is None)

    @staticmethod
    def _loaded(block: Any) -> BlockColumns | None:
        """The recorded columns as they are in memory; None if one is missing or is not what the database will hold."""
        values = {name: block.__dict__.get(name, _MISSING) for name in RECORDED}
        fits = (
            isinstance(values["value"], str)
            and isinstance(values["label"], str)
            and isinstance(values["description"], str | None)
            and isinstance(values["limit"], int)
            and isinstance(values["read_only"], bool | None)
        )
        return BlockColumns(**values) if fits else None

    def _written(self, session: Session, block: Any, is_new: bool, before: dict[str, Any]) -> Change:
        after = self._loaded(block)
        if after is None:
            after = self._read(session.connection(), [block.id])[block.id][0]
        return Change(block.id, None if is_new else self._old(block, after, before), after, block.organization_id)

    def _old(self, block: Any, after: BlockColumns, before: dict[str, Any]) -> BlockColumns:
        if block.id in before:
            return before[block.id][0]  # type: ignore[no-any-return]
        old = {name: _history(block, name).deleted for name in RECORDED}
        return BlockColumns(**{name: old[name][0] if old[name] else getattr(after, name) for name in RECORDED})

    def _deleted(self, block: Any, before: dict[str, Any]) -> Change:
        if block.id in before:
            columns, organization_id = before[block.id]
        else:
            columns, organization_id = self._loaded(block), block.organization_id
            assert columns is not None  # before_flush reads the ones that are not loaded
            columns = self._old(block, columns, {})
        return Change(block.id, columns, None, organization_id)

    def _attached(self, agents: list[Any], pivots: list[tuple[Any, str]]) -> list[Mutation]:
        found = []
        for agent in agents:
            history = _history(agent, "core_memory")
            found += [
                self._attachment("attach", agent.id, b.id, b.label, b.organization_id) for b in history.added or ()
            ]
            found += [
                self._attachment("detach", agent.id, b.id, b.label, b.organization_id) for b in history.deleted or ()
            ]
        found += [self._attachment(kind, row.agent_id, row.block_id, row.block_label) for row, kind in pivots]
        return found

    # -- statements ----------------------------------------------------------------------------------------------

    def _on_statement(self, state: ORMExecuteState) -> Any:
        statement = state.statement
        if not isinstance(statement, _WRITES):
            return None
        name = getattr(statement.table, "name", None)
        handle: Any
        if name == "blocks_agents":
            handle = self._pivot_statement
        elif name == "block":
            handle = self._block_statement
        elif name == "agents" and isinstance(statement, Delete):
            handle = self._agents_deleted
        else:
            return None
        if self._runtime.settings.on_error == "open":
            return handle(state, statement)
        with state.session.connection().begin_nested():  # a refused statement is undone, even if its caller goes on
            return handle(state, statement)

    def _pivot_statement(self, state: ORMExecuteState, statement: Insert | Update | Delete) -> Any:
        """RETURNING tells exactly which rows came and went; ``ON CONFLICT DO NOTHING`` would look like an attach."""
        connection = state.session.connection()
        old: list[Any] = []
        if isinstance(statement, Update):
            with self._runtime.guarded("reading attachments before a bulk write", []):
                old = matching_rows(connection, statement, state.parameters, self._pivot_columns)
        result, rows = pivot_result(state, statement, self._pivot_columns)
        with self._runtime.guarded("describing an attachment", [row[1] for row in rows]):
            gone = rows if isinstance(statement, Delete) else old
            come = [] if isinstance(statement, Delete) else rows
            moved = {(row[0], row[1]) for row in gone} & {(row[0], row[1]) for row in come}
            self._record(
                state.session,
                [self._attachment("detach", *row) for row in gone if (row[0], row[1]) not in moved]
                + [self._attachment("attach", *row) for row in come if (row[0], row[1]) not in moved],
            )
        return result

    def _block_statement(self, state: ORMExecuteState, statement: Insert | Update | Delete) -> Any:
        """``update(Block)`` and its like: the rows are locked and read before, and read again after."""
        connection = state.session.connection()
        if isinstance(statement, Insert):
            result, keys = pivot_result(state, statement, self._columns[:1])
            ids = [key[0] for key in keys]
            with self._runtime.guarded("describing a bulk insert", ids):
                self._record_changes(state.session, {}, self._read(connection, ids))
            return result
        before: dict[str, Any] = {}
        detached: list[Any] = []
        with self._runtime.guarded("reading the state before a bulk write", []):
            rows = matching_rows(connection, statement, state.parameters, self._columns)
            before = {row[0]: (_columns(row), row[1]) for row in rows}
            detached = self._attachments(connection, block_ids=before) if isinstance(statement, Delete) else []
        result = state.invoke_statement(execution_options={"phionyx_captured": True})
        with self._runtime.guarded("describing a bulk write", list(before)):
            self._record(state.session, [self._attachment("detach", *row) for row in detached])
            after = {} if isinstance(statement, Delete) else self._read(connection, before)
            self._record_changes(state.session, before, after)
        return result

    def _record_changes(self, session: Session, before: dict[str, Any], after: dict[str, Any]) -> None:
        nothing = (None, None)
        changes = [
            Change(i, before.get(i, nothing)[0], after.get(i, nothing)[0], (after.get(i) or before[i])[1])
            for i in {**before, **after}
        ]
        self._record(session, changes)

    def _agents_deleted(self, state: ORMExecuteState, statement: Delete) -> Any:
        connection = state.session.connection()
        detached: list[Any] = []
        with self._runtime.guarded("reading the blocks of agents that are deleted", []):
            agents = matching_rows(connection, statement, state.parameters, [self._agent.__table__.c.id])
            detached = self._attachments(connection, agent_ids=[row[0] for row in agents])
        result = state.invoke_statement()
        with self._runtime.guarded("describing the end of an agent", [row[1] for row in detached]):
            self._record(state.session, [self._attachment("detach", *row) for row in detached])
        return result

    def _on_cursor(
        self, connection: Connection, _cursor: Any, statement: str, _parameters: Any, context: Any, _many: bool
    ) -> None:
        if "block" not in statement or _only_reads(statement) or _flushing.get() or not blind_write(statement):
            return
        if context is not None and context.execution_options.get("phionyx_captured"):
            return
        self._runtime.gap("a statement outside Letta's sessions wrote blocks: no before and after", [], statement[:200])

    # -- reading and recording -----------------------------------------------------------------------------------

    def _read(self, connection: Connection, ids: Iterable[str]) -> dict[str, tuple[BlockColumns, str]]:
        query = select(*self._columns).where(self._block.__table__.c.id.in_(list(ids)))
        with connection.begin_nested():  # a failed read must not abort Letta's transaction
            return {row[0]: (_columns(row), row[1]) for row in connection.execute(query)}

    def _attachments_of(self, connection: Connection, deleted: list[Any]) -> list[Any]:
        return self._attachments(
            connection,
            agent_ids=[item.id for item in deleted if isinstance(item, self._agent)],
            block_ids=[item.id for item in deleted if isinstance(item, self._block)],
        )

    def _attachments(
        self, connection: Connection, *, agent_ids: Iterable[str] = (), block_ids: Iterable[str] = ()
    ) -> list[Any]:
        """Pivot rows that the database will cascade away."""
        agent_id, block_id, _ = self._pivot_columns
        found = select(*self._pivot_columns).where(agent_id.in_(list(agent_ids)) | block_id.in_(list(block_ids)))
        with connection.begin_nested():
            return list(connection.execute(found))

    @staticmethod
    def _attachment(
        kind: str, agent_id: str, block_id: str, label: str, organization_id: str | None = None
    ) -> Mutation:
        return attachment_change(
            kind, block_id, label, agent_id, attribution.current(), organization_id=organization_id
        )

    def _record(self, session: Session, found: Sequence[Change | Mutation]) -> None:
        found = [one for one in found if not isinstance(one, Change) or one.before != one.after]
        if not found:
            return
        named = [one.block_id if isinstance(one, Change) else one["block_id"] for one in found]
        who, changes = attribution.current(), [one for one in found if isinstance(one, Change)]
        if who.claim is not None:
            for change in changes:
                _compare(change, who.claim, who.reviewer)
        if self._propose_only is not None:
            self._propose_only.check(session.connection(), changes)
        if self._runtime.key is None:
            self._runtime.gap(self._runtime.key_error or "no signing key", named)
            return
        if self._store(session, found, named, last=False):
            return
        assert self._runtime.salting is not None  # a salt was destroyed or ended meanwhile
        self._runtime.salting.forget(named)
        self._store(session, found, named, last=True)

    def _store(self, session: Session, found: Sequence[Change | Mutation], named: list[str], *, last: bool) -> bool:
        """Put the rows into the outbox; False if a salt they were made with is not good any more, unless this is the ``last`` try."""
        assert self._runtime.key is not None
        connection = session.connection()
        salts = self._salts_of(connection, found)
        worker, key = self._runtime.worker_id, self._runtime.key.outbox
        mutations = [self._mutation(one, salts) if isinstance(one, Change) else one for one in found]
        nonces = [secrets.token_hex(16) for _ in mutations]
        rows = [key.seal({**one, "worker": worker}, nonce) for one, nonce in zip(mutations, nonces, strict=True)]
        use = salts.use() if salts is not None else None
        try:
            self._insert(connection, rows, use)
        except EvidenceRefused:
            raise
        except Exception as error:
            run_simple(connection, ROLLBACK_SQL)
            if not last and use is not None and getattr(error, "sqlstate", None) == STALE_SALT:
                return False
            self._runtime.gap("the outbox did not take a row", named, error)
        else:
            self._runtime.captured(len(rows))
            if salts is not None:
                salts.done()
            if self._guarded:
                self._note(session, mutations, nonces)
        return True

    @staticmethod
    def _note(session: Session, mutations: list[Mutation], nonces: list[str]) -> None:
        """For guarded reads: what this transaction wrote itself."""
        session.info[DIRTY] = True
        ids = [one["block_id"] for one in mutations]
        session.info.setdefault(OWN, []).extend(zip(ids, nonces, strict=True))
        compiled = [(one["block_id"], one["letta"]["state"]) for one in mutations if one["event"] == COMPILE]
        session.info.setdefault(PROMPTS, []).extend(compiled)

    def _insert(self, connection: Connection, rows: list[tuple[str, str]], use: SaltUse | None) -> None:
        try:
            kept = run_simple(connection, capture_sql(rows, salts=use))
        except Exception as error:
            if getattr(error, "sqlstate", None) != _LOCKED:
                raise
            run_simple(connection, ROLLBACK_SQL)
            kept = run_simple(connection, capture_sql(rows, self._runtime.settings.lock_timeout_ms, use))
        if kept != len(rows):
            raise StoreError(f"the outbox kept {kept} of {len(rows)} rows", "look for a trigger on phionyx_outbox")

    def _salts_of(self, connection: Connection, found: Sequence[Change | Mutation]) -> SaltingCapture | None:
        """The salts of these changes, in a salted ledger; attach and detach need none, the sealer repeats the hash there is."""
        if self._runtime.salting is None or not any(isinstance(one, Change) for one in found):
            return None
        salts = SaltingCapture(self._runtime.salting)
        salts.look_up(connection, [one.block_id for one in found if isinstance(one, Change) and one.before])
        return salts

    def _mutation(self, change: Change, salts: SaltingCapture | None) -> Mutation:
        mutation = block_change(
            change.block_id,
            change.before,
            change.after,
            attribution.current(),
            organization_id=change.organization_id,
            include_diff_text=self._runtime.settings.include_diff_text,
            commitment=BARE if salts is None else salts.commitment(change.block_id, change.before),
        )
        assert mutation is not None  # a recorded column changed
        return mutation


def _compare(change: Change, claim: Mapping[str, Any], reviewer: Reviewer | None) -> None:
    """A compare-and-swap: under a reviewer's claim only the write he decided about passes, in the transaction that makes it.

    Raises:
        DiffConflictError: it is another block, it holds something else by now, or something else would be written.
        UntrustedPatch: the block is not this reviewer's to decide about, or more than its text would change.
    """
    held = content_hash(change.before.value) if change.before is not None else ""
    written = content_hash(change.after.value) if change.after is not None else ""
    if change.block_id != claim["block_id"] or held != claim["expected"] or written != claim["wrote"]:
        raise DiffConflictError(f"block {change.block_id}", claim["expected"], held, "review the patch again")
    if (
        change.before is None
        or change.after is None
        or replace(change.before, value=change.after.value) != change.after
    ):
        raise UntrustedPatch(
            f"more than the text of block {change.block_id} would change, which is all that was reviewed",
            "change label, description, limit and read_only in a request of its own, without a reviewer's claim",
        )
    if reviewer is not None and not reviewer.may_write(change.before.label):
        raise UntrustedPatch(
            f"{reviewer.name} may not decide about blocks called {change.before.label}",
            "have a reviewer apply it whom PHIONYX_LETTA_REVIEWERS of the server allows to",
        )


_MISSING = object()
_LOCKED = "55P03"  # lock_not_available


def _history(item: Any, name: str) -> Any:
    """What a flush changes of an attribute, from memory alone (``inspect(item).attrs`` builds all of them, each time)."""
    return get_history(item, name, PassiveFlag.PASSIVE_NO_INITIALIZE)


def _only_reads(sql: str) -> bool:
    """One SELECT: PostgreSQL allows statements that write only in a WITH before it. Saves a search of Letta's long queries."""
    return sql.startswith("SELECT ") and ";" not in sql


def _columns(row: Any) -> BlockColumns:
    return BlockColumns(*row[2:])
