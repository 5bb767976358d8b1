"""Recording a memory repository: each commit of the memory branch becomes one envelope for each file it changed.

Git is read without the ledger's lock; what was prepared is written in one transaction with the cursor, if nobody else moved the cursor
meanwhile. So several processes may do this at once, and one that is killed has recorded whole commits or nothing.
"""

from __future__ import annotations

import hashlib
import platform
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sqlalchemy import Connection

from phionyx_letta.errors import PhionyxError, StoreError
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.ledger.statements import refuse_retired
from phionyx_letta.ledger.writer import LedgerWriter
from phionyx_letta.letta_code.cursor import Cursor, create_table, foreign, read_cursor, store_cursor
from phionyx_letta.letta_code.errors import MemoryUnreadable, ObjectMalformed, ObjectUnreadable, TooManyFiles
from phionyx_letta.letta_code.history import NAMED, Back, Forward, Move, moves, steps
from phionyx_letta.letta_code.known import Known
from phionyx_letta.letta_code.objects import SUBMODULE, Objects
from phionyx_letta.letta_code.preparing import AgentReport, Found, Preparation
from phionyx_letta.letta_code.queue import Notes
from phionyx_letta.letta_code.repository import HEAD_LOG, MemoryRepository, Snapshot
from phionyx_letta.letta_code.trees import changed_files, compared
from phionyx_letta.letta_code.turns import Turn, TurnOver
from phionyx_letta.letta_code.writing import write_items
from phionyx_letta.plugin.runtime import PluginKey

__all__ = ["AgentReport", "Recorder"]

_OVERTAKEN = 50
_WINDOW = 100  # steps


class _OvertakenError(Exception):
    """Another process recorded this agent meanwhile."""


class Recorder:
    """Records memory repositories in a ledger."""

    def __init__(
        self,
        ledger: SqlLedger,
        key: PluginKey,
        *,
        trusted: Sequence[str] = (),
        include_text: bool = False,
        batch: int = 1000,
        notes: Notes | None = None,
    ) -> None:
        """Make the cursor's table.

        Args:
            ledger: with its tables.
            key: signs.
            trusted: public keys of other hosts on the same ledger.
            include_text: keep unified diffs, and so content.
            batch: envelopes of a transaction; one commit is never divided.
            notes: what hooks noted of who made which commit.

        Raises:
            StoreError: the ledger is salted, which this does not do.
        """
        if ledger.salted():
            raise StoreError(
                "this ledger is salted, and the memory of Letta Code is recorded with bare hashes",
                "give it a ledger of its own: --ledger sqlite:///FILE",
            )
        self.ledger, self.key = ledger, key
        self.trusted, self.include_text, self.batch = trusted, include_text, batch
        self.notes = notes or Notes()
        with ledger.writing() as connection:
            assert connection is not None
            create_table(connection)

    def record(self, agent: str, path: Path, turn: Turn | None = None) -> AgentReport:
        """Record what is new in one agent's memory, until its turn is over.

        Raises:
            MemoryUnreadable: the repository cannot be read as it stands, or another process is always faster.
            TurnOver: git said nothing in this turn.
            LedgerUnavailable, SigningKeyError: nothing more is recorded.
        """
        for _ in range(_OVERTAKEN):
            try:
                return _Run(self, agent, path, turn or Turn()).run()
            except _OvertakenError:
                continue
            except (ObjectUnreadable, TooManyFiles) as error:
                raise MemoryUnreadable(
                    f"{path} cannot be read: {error.message}", f"check it: git -C {path} fsck"
                ) from error
        raise MemoryUnreadable(f"other processes keep recording {path}", "it is tried again in the next run")


class _Run:
    """One pass over one repository."""

    def __init__(self, recorder: Recorder, agent: str, path: Path, turn: Turn) -> None:
        self.recorder, self.agent, self.path, self.turn = recorder, agent, path, turn
        self.ledger, self.signer = recorder.ledger, recorder.key.signer
        self.report = AgentReport(agent, str(path))
        self.known = Known(self.ledger, self.signer, agent)
        self.prepared = Preparation(self.report, self.known, recorder.notes, include_text=recorder.include_text)
        with self.ledger.engine.connect() as connection:
            self.stored = read_cursor(connection, self.signer, agent)
        self.reached = self.stored  # what may be written: after whole commits only

    def run(self) -> AgentReport:
        before = self.stored
        try:
            repository = MemoryRepository(self.path)
        except MemoryUnreadable:
            self._note_gone()
            raise
        with Objects(repository.git, self.turn) as objects:
            try:
                self._record(objects, repository)
            except TurnOver as over:
                self.prepared.drop_unsettled()
                if over.silent and not self.prepared.items and self.reached == self.stored:
                    raise
                self.report.unfinished = over.message
        if self.reached != self.stored or self.prepared.items:
            self._write(self.reached)
        self.report.advanced = self.stored != before
        return self.report

    def _record(self, objects: Objects, repository: MemoryRepository) -> None:
        """Prepare what is new. The branch, and what the logs lack, are told at the end: until then the logs are read on."""
        snapshot = repository.snapshot(objects, self.stored.places, self.stored.ref)
        self.report.tip, self.report.branch = snapshot.tip, snapshot.ref
        self._check_tip(objects, snapshot.tip)
        problem = self._standing(objects, repository, snapshot)
        # the branch whose log is read on if HEAD leaves it meanwhile
        ref = snapshot.ref if self.stored.ref is None else self.stored.ref
        cursor = replace(self.stored, ref=ref, path=str(self.path), host=platform.node(), problem=problem)
        self._settle(cursor)
        pending = cursor.at != cursor.tip
        for move in moves(cursor.tip, snapshot, self.stored.ref, self.stored.places):
            self._next()
            cursor = self._move(objects, repository, move, cursor, resumed=pending)
            self._settle(cursor)
            pending = cursor.at != cursor.tip  # still, where no way leads to where it went
        if pending:  # a move was cut short, and HEAD is back where it began
            move = Move(cursor.tip, snapshot.tip, None, cursor.places)
            cursor = self._move(objects, repository, move, cursor, resumed=True)
        self.prepared.log_gaps(cursor.places, cursor.at)
        told = {name: place.told() for name, place in cursor.places.items()}
        self._settle(replace(cursor, ref=snapshot.ref, places=told))

    def _settle(self, cursor: Cursor) -> None:
        """All that is prepared leads to this cursor."""
        self.prepared.settle()
        self.reached = cursor

    def _next(self) -> None:
        """Before another step: write where that is enough, and see whether the turn is over."""
        self.turn.check(self.report.envelopes + len(self.prepared.items))
        if len(self.prepared.items) >= self.recorder.batch:
            self._write(self.reached)

    def _standing(self, objects: Objects, repository: MemoryRepository, snapshot: Snapshot) -> str:
        """Prepare what is wrong as long as it stays as it is, each once; return it as the cursor keeps it."""
        told, found = self.stored.problem.split(" "), list[str]()
        for name in dict.fromkeys(name for name in (HEAD_LOG, snapshot.ref) if name):
            log = snapshot.logs[name]
            if log.exists or not (log.unreadable or not log.found):
                continue
            found.append(f"reflog:{name}")
            if found[-1] not in told:
                why = (
                    f"the reflog {name} is {'no regular file' if log.unreadable else 'gone'}: what it told is not known"
                )
                self.prepared.gap("reflog_unreadable", why, self.stored.at, None, {"log": name})
        if replaced := repository.replaced(objects):
            found.append(f"replaced:{hashlib.sha256(' '.join(replaced).encode()).hexdigest()}")
            if found[-1] not in told:
                why = "git puts other objects in the place of some (refs/replace): the prompt may not hold what is recorded"
                details = {"refs": replaced[:NAMED], "refs_total": len(replaced)}
                self.prepared.gap("replaced", why, self.stored.at, None, details)
        return " ".join(found)

    def _check_tip(self, objects: Objects, tip: str | None) -> None:
        """What cannot be read may be there in the next run; a tree that is malformed stays so, and is recorded as such."""
        try:
            tree = objects.commit(tip).tree if tip is not None else None
            try:
                if tree is not None:
                    objects.entries(tree)
            except ObjectMalformed:
                return
        except ObjectUnreadable as error:
            raise MemoryUnreadable(
                f"HEAD of {self.path} cannot be read: {error.message}", f"check it: git -C {self.path} fsck"
            ) from None

    # -- one move of the branch -----------------------------------------------------------------------------------

    def _move(
        self, objects: Objects, repository: MemoryRepository, move: Move, cursor: Cursor, *, resumed: bool
    ) -> Cursor:
        """Prepare a move; what is written on the way is remembered in `at`, from where a move that was cut short is resumed."""
        done = replace(cursor, places=move.places)
        if move.new == cursor.tip and not resumed:
            return done
        move = replace(move, old=cursor.tip)
        try:
            plan = list(steps(objects, move, self._first_recorded))
            if resumed:
                plan = self._rest(objects, plan, replace(move, old=cursor.at))
        except ObjectUnreadable as error:
            self.prepared.gap("unreadable", error.message, cursor.at, move, {"to": move.new})
            return done
        move_id = secrets.token_hex(16)
        recorded = self.known.commits([step.commit for step in plan if isinstance(step, Forward)])
        for step, found in self._compared(objects, plan):
            self._next()
            if self.prepared.needs_ledger(step, found):
                self._write(self.reached)
            if isinstance(step, Back):
                self.prepared.back(objects, step, found, move, move_id)
            else:
                again = step.commit in recorded or step.commit in self.prepared.new_commits
                self.prepared.forward(objects, repository, step, found, move, move_id if again else None)
            self._settle(replace(cursor, at=_reached(step)))
        return replace(done, tip=move.new, at=move.new)

    def _rest(self, objects: Objects, plan: list[Forward | Back], move: Move) -> list[Forward | Back]:
        """What of a plan comes after the step that was written last; another plan from there where it is none of them."""
        for number, step in enumerate(plan):
            if _reached(step) == move.old:
                return plan[number + 1 :]
        return list(steps(objects, move, self._first_recorded)) if move.old != move.new else []

    def _compared(self, objects: Objects, plan: Sequence[Forward | Back]) -> Iterator[tuple[Forward | Back, Found]]:
        """Each step with the files it changes; git is asked for many steps at once."""
        for start in range(0, len(plan), _WINDOW):
            window = plan[start : start + _WINDOW]
            objects.prefetch(step.commit for step in window if isinstance(step, Forward))
            pairs = [_trees(objects, step) for step in window]
            ready: list[tuple[Forward | Back, Found]] = []
            files = 0
            for step, pair, some in zip(window, pairs, compared(objects, pairs), strict=True):
                found = _changed(objects, *pair) if some is None else some
                ready.append((step, found))
                files += 0 if isinstance(found, PhionyxError) else len(found)
                if files > _WINDOW * 10:
                    yield from ready
                    ready, files = [], 0
            blobs = [
                entry for _, one in ready if not isinstance(one, PhionyxError) for _, *both in one for entry in both
            ]
            objects.prefetch(entry.oid for entry in blobs if entry and entry.mode != SUBMODULE)
            yield from ready

    # -- the ledger -----------------------------------------------------------------------------------------------

    def _first_recorded(self, commits: Sequence[str]) -> str | None:
        known = self.known.commits(commits) | self.prepared.new_commits
        return next((one for one in commits if one in known), None)

    def _note_gone(self) -> None:
        """The repository is not there any more: recorded once."""
        if self.stored.tip is not None and self.stored.problem != "gone" and self.stored.path == str(self.path):
            self.prepared.gap(
                "repository_gone", "there is no git repository any more", self.stored.at, None, {"from": self.stored.at}
            )
            self._write(replace(self.stored, problem="gone"))

    def _write(self, cursor: Cursor) -> None:
        """Write what is prepared, and the cursor, unless somebody else did meanwhile."""
        with self.ledger.writing() as connection:
            assert connection is not None
            refuse_retired(connection, self.signer)
            if read_cursor(connection, self.signer, self.agent) != self.stored:
                raise _OvertakenError
            writer = LedgerWriter(connection, self.signer, known=self.ledger.known_log, trusted=self.recorder.trusted)
            self._refuse_foreign(connection, writer)
            written = write_items(writer, self.signer, self.agent, self.prepared.items, self.recorder.batch)
            cursor = replace(cursor, chain=writer.chain(self.agent).length)
            store_cursor(connection, self.signer, self.agent, cursor)
        if written:
            self.ledger.known_log = writer.log.known
        self.report.envelopes += written
        self.stored = self.reached = cursor
        self.prepared.written()

    def _refuse_foreign(self, connection: Connection, writer: LedgerWriter) -> None:
        """Never two sources in one chain: a folder can have the id of a server's agent."""
        if writer.chain(self.agent).length == self.stored.chain:
            return
        producer = foreign(connection, self.agent, self.stored.chain)
        if producer is not None:
            raise MemoryUnreadable(
                f"{self.path} is not recorded: the chain of {self.agent} in this ledger has envelopes of another source"
                f" ({producer})",
                "rename the folder if it is another agent's, or give Letta Code a ledger of its own: --ledger FILE",
            )


def _trees(objects: Objects, step: Forward | Back) -> tuple[str | None, str | None]:
    if isinstance(step, Forward):
        return _tree(objects, step.parent), objects.commit(step.commit).tree
    return None if step.vanished else _tree(objects, step.old), _tree(objects, step.base)


def _tree(objects: Objects, oid: str | None) -> str | None:
    return None if oid is None else objects.commit(oid).tree


def _changed(objects: Objects, before: str | None, after: str | None) -> Found:
    try:
        return changed_files(objects, before, after)
    except (ObjectUnreadable, TooManyFiles) as error:
        return error


def _reached(step: Forward | Back) -> str | None:
    return step.commit if isinstance(step, Forward) else step.base
