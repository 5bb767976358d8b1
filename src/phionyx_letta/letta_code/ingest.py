"""Recording a memory repository: each commit of the memory branch becomes one envelope for each file it changed.

Git is read without the ledger's lock; what was prepared is written in one transaction with the cursor, if nobody else moved the cursor
meanwhile. So several processes may do this at once, and one that is killed has recorded whole commits or nothing.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sqlalchemy import select

from phionyx_letta.envelope import (
    CONTENT_UNKNOWN,
    MemoryConsolidationAudit,
)
from phionyx_letta.errors import PhionyxError, StoreError
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.bulk import among
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.ledger.statements import refuse_retired
from phionyx_letta.ledger.writer import LedgerWriter, read_block_states
from phionyx_letta.letta_code.changes import (
    Mutation,
    Unread,
    block_id,
    claims,
    file_name,
    label_of,
    mutations,
)
from phionyx_letta.letta_code.contents import ABSENT, content_diff
from phionyx_letta.letta_code.cursor import Cursor, create_table, read_cursor, store_cursor
from phionyx_letta.letta_code.errors import MemoryUnreadable, ObjectUnreadable, TooManyFiles
from phionyx_letta.letta_code.history import NAMED, Back, Forward, Move, moves, steps
from phionyx_letta.letta_code.objects import (
    SUBMODULE,
    Commit,
    Objects,
)
from phionyx_letta.letta_code.queue import Notes
from phionyx_letta.letta_code.repository import MemoryRepository
from phionyx_letta.letta_code.trees import Changed, changed_files, compared
from phionyx_letta.letta_code.writing import Item, held, write_items
from phionyx_letta.plugin.runtime import PluginKey

__all__ = ["AgentReport", "Recorder"]

_OVERTAKEN = 50
#: How Letta Code 0.34 names the branches of its reflection subagents, which it merges.
_REFLECTION = re.compile(r"\bletta/([A-Za-z0-9_.-]{1,60})/")


_WINDOW = 100  # steps
_Found = list[Changed] | PhionyxError
"""The files a step changes, or why they cannot be told."""


@dataclass
class AgentReport:
    """What one run did for one agent."""

    agent_id: str
    path: str
    tip: str | None = None
    branch: str = ""
    commits: int = 0
    """Commits recorded for the first time."""
    envelopes: int = 0
    rewrites: int = 0
    gaps: list[dict[str, Any]] = field(default_factory=list)
    """What could not be recorded as it was, and why; each is in an envelope too."""


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
        batch: int = 500,
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

    def record(self, agent: str, path: Path) -> AgentReport:
        """Record what is new in one agent's memory.

        Raises:
            MemoryUnreadable: the repository cannot be read as it stands, or another process is always faster.
            LedgerUnavailable, SigningKeyError: nothing more is recorded.
        """
        for _ in range(_OVERTAKEN):
            try:
                return _Run(self, agent, path).run()
            except _OvertakenError:
                continue
            except (ObjectUnreadable, TooManyFiles) as error:
                raise MemoryUnreadable(
                    f"{path} cannot be read: {error.message}", f"check it: git -C {path} fsck"
                ) from error
        raise MemoryUnreadable(f"other processes keep recording {path}", "it is tried again in the next run")


class _Run:
    """One pass over one repository."""

    def __init__(self, recorder: Recorder, agent: str, path: Path) -> None:
        self.recorder, self.agent, self.path = recorder, agent, path
        self.ledger, self.signer = recorder.ledger, recorder.key.signer
        self.report = AgentReport(agent, str(path))
        self.items: list[Item] = []
        self.new_commits: set[str] = set()
        with self.ledger.engine.connect() as connection:
            self.stored = read_cursor(connection, self.signer, agent)

    def run(self) -> AgentReport:
        try:
            repository = MemoryRepository(self.path)
        except MemoryUnreadable:
            self._note_gone()
            raise
        with Objects(repository.git) as objects:
            snapshot = repository.snapshot(objects, self.stored.places)
            self.report.tip, self.report.branch = snapshot.tip, snapshot.ref
            self._check_tip(objects, snapshot.tip)
            cursor = replace(self.stored, ref=snapshot.ref, path=str(self.path), problem="")
            pending = cursor.at != cursor.tip
            for move in moves(cursor.tip, snapshot, self.stored.ref, self.stored.places):
                cursor = self._move(objects, repository, move, cursor, resumed=pending)
                pending = False
                if len(self.items) >= self.recorder.batch:
                    self._write(cursor)
            if pending:  # a move was cut short, and HEAD is back where it began
                move = Move(cursor.tip, snapshot.tip, None, cursor.places)
                cursor = self._move(objects, repository, move, cursor, resumed=True)
        if cursor != self.stored or self.items:
            self._write(cursor)
        return self.report

    def _check_tip(self, objects: Objects, tip: str | None) -> None:
        try:
            if tip is not None:
                objects.tree(objects.commit(tip).tree)
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
            plan = list(steps(objects, repository.git, move, self._first_recorded))
            if resumed:
                plan = self._rest(objects, repository, plan, replace(move, old=cursor.at))
        except ObjectUnreadable as error:
            self._gap("unreadable", error.message, cursor.at, move, {"to": move.new})
            return done
        move_id = secrets.token_hex(16)
        recorded = self._recorded([step.commit for step in plan if isinstance(step, Forward)])
        at = cursor.at
        for step, found in self._compared(objects, plan):
            if isinstance(step, Back):
                self._back(objects, step, move, move_id, replace(cursor, at=at), found)
            else:
                self._forward(objects, repository, step, found, move, move_id, step.commit in recorded)
            at = _reached(step)
            if len(self.items) >= self.recorder.batch and step is not plan[-1]:
                self._write(replace(cursor, at=at))
        return replace(done, tip=move.new, at=move.new)

    def _rest(
        self, objects: Objects, repository: MemoryRepository, plan: list[Forward | Back], move: Move
    ) -> list[Forward | Back]:
        """What of a plan comes after the step that was written last; another plan from there where it is none of them."""
        for number, step in enumerate(plan):
            if _reached(step) == move.old:
                return plan[number + 1 :]
        return list(steps(objects, repository.git, move, self._first_recorded)) if move.old != move.new else []

    def _compared(self, objects: Objects, plan: Sequence[Forward | Back]) -> Iterator[tuple[Forward | Back, _Found]]:
        """Each step with the files it changes; git is asked for many steps at once."""
        for start in range(0, len(plan), _WINDOW):
            window = plan[start : start + _WINDOW]
            objects.prefetch(step.commit for step in window if isinstance(step, Forward))
            pairs = [self._trees(objects, step) for step in window]
            ready: list[tuple[Forward | Back, _Found]] = []
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

    def _trees(self, objects: Objects, step: Forward | Back) -> tuple[str | None, str | None]:
        if isinstance(step, Forward):
            return self._tree(objects, step.parent), objects.commit(step.commit).tree
        return None if step.vanished else self._tree(objects, step.old), self._tree(objects, step.base)

    def _forward(
        self,
        objects: Objects,
        repository: MemoryRepository,
        step: Forward,
        found: _Found,
        move: Move,
        move_id: str,
        again: bool,
    ) -> None:
        if step.cut:
            why = "shallow" if step.commit in repository.shallow() else "parents_missing"
            self._gap(
                why, "the commits before this one are not in the repository", step.commit, move, {"to": step.commit}
            )
        commit = objects.commit(step.commit)
        letta: dict[str, Any] = {
            "commit": step.commit,
            "head": step.commit,
            "seen_by": "reflog" if move.entry else "tip",
            "claims": claims(commit),
            **self.recorder.notes.about(self.agent, step.commit),
        }
        again = again or step.commit in self.new_commits
        if again:
            letta["again"] = True
        if len(commit.parents) > 1:
            letta["merged"] = list(step.merged)
        run = f"move:{move_id}" if again else f"commit:{step.commit}"
        method = _reflection(move, commit)
        for mutation in self._changes(objects, found, step.commit, move):
            if method is not None and mutation.kind in ("write", "append"):
                mutation.kind = "consolidate"
                mutation.audit = self._audit(mutation, method, step.merged or (step.commit,))
            nonce = secrets.token_hex(16) if again else self._nonce(step.commit, mutation.path or "")
            self.items.append(Item(mutation, run, nonce, letta))
        if not again:
            self.new_commits.add(step.commit)
            self.report.commits += 1

    def _back(self, objects: Objects, step: Back, move: Move, move_id: str, cursor: Cursor, found: _Found) -> None:
        self.report.rewrites += 1
        if step.vanished:  # what the ledger holds then tells what was there: it must hold all that is prepared
            self._write(cursor)
            self.report.gaps.append({"reason": "vanished", "from": step.old, "to": move.new})
        details: dict[str, Any] = {"from": step.old, "base": step.base, "to": move.new}
        if step.dropped_total:
            details["dropped"], details["dropped_total"] = list(step.dropped), step.dropped_total
        if move.log_lost:
            details["reflog"] = "it does not go on where it was read last"
        self._history("history_lost" if step.vanished else "history_rewritten", step.base, move, details)
        letta = {"commit": step.base, "head": step.base, "seen_by": "reflog" if move.entry else "tip", "rewound": True}
        changed: Iterable[Mutation] = self._changes(objects, found, step.base, move)
        if step.vanished:
            changed = self._from_ledger(objects, step.base, move)
        for mutation in changed:
            self.items.append(Item(mutation, f"move:{move_id}", secrets.token_hex(16), letta))

    def _changes(self, objects: Objects, found: _Found, commit: str | None, move: Move) -> Iterator[Mutation]:
        unread = Unread()
        if isinstance(found, PhionyxError):
            reason = "too_many_files" if isinstance(found, TooManyFiles) else "unreadable"
            self._gap(reason, found.message, commit, move, {"to": commit})
            return
        yield from mutations(objects, found, include_text=self.recorder.include_text, unread=unread)
        self._unread(unread, commit, move)

    def _unread(self, unread: Unread, commit: str | None, move: Move) -> None:
        if unread.paths:
            details = {"to": commit, "paths": unread.paths[:NAMED], "paths_total": len(unread.paths)}
            self._gap("unreadable", unread.why, commit, move, details)

    def _from_ledger(self, objects: Objects, commit: str | None, move: Move) -> list[Mutation]:
        """From what the ledger last recorded to a commit, where git cannot tell any more what was there."""
        with self.ledger.engine.connect() as connection:
            columns = tables.block.c
            prefix = block_id(self.agent, "")
            ids = connection.execute(
                select(columns.block_id).where(columns.block_id.startswith(prefix, autoescape=True))
            )
            known = read_block_states(connection, self.signer, ids.scalars().all())
        states = {name.removeprefix(prefix): state for name, state in known.items()}
        found, unread = [], Unread()
        for path, _, entry in changed_files(objects, None, self._tree(objects, commit)):
            name = file_name(path)
            before = held(states.pop(name, None))
            try:
                content = objects.content(entry)
            except ObjectUnreadable as error:
                unread.paths.append(name)
                unread.why = error.message
                continue
            if before.digest != content.digest:
                diff = content_diff(before, content, include_text=False)
                found.append(Mutation(name, label_of(name, content.text), "write", "restored", diff))
        for name, state in sorted(states.items()):
            before = held(state)
            if before.digest != ABSENT.digest:
                diff = content_diff(before, ABSENT, include_text=False)
                found.append(Mutation(name, state.label, "delete", "delete", diff))
        self._unread(unread, commit, move)
        return found

    @staticmethod
    def _tree(objects: Objects, oid: str | None) -> str | None:
        return None if oid is None else objects.commit(oid).tree

    def _audit(self, mutation: Mutation, method: str, merged: Sequence[str]) -> MemoryConsolidationAudit:
        assert mutation.diff is not None
        return MemoryConsolidationAudit(
            from_episodic=[f"commit:{oid}" for oid in merged],
            to_semantic=[f"{block_id(self.agent, mutation.path)}@{mutation.diff.after_hash}"],
            consolidation_method=f"letta-code.{method}",
        )

    def _nonce(self, commit: str, path: str) -> str:
        return hashlib.sha256("\0".join((self.agent, commit, path)).encode()).hexdigest()[:32]

    # -- what happened to the repository itself -------------------------------------------------------------------

    def _history(self, event: str, head: str | None, move: Move | None, details: dict[str, Any]) -> None:
        if move is not None and move.entry is not None:
            details = {**details, "reflog_entry": {"action": move.entry.action, "at": move.entry.at}}
        letta = {"head": head, "content": CONTENT_UNKNOWN, "history": details}
        mutation = Mutation(None, "history", "write", event, None)
        self.items.append(Item(mutation, f"move:{secrets.token_hex(16)}", secrets.token_hex(16), letta))

    def _gap(self, reason: str, why: str, head: str | None, move: Move | None, details: dict[str, Any]) -> None:
        self.report.gaps.append({"reason": reason, "why": why, **details})
        self._history("gap", head, move, {"reason": reason, "why": why, **details})

    def _note_gone(self) -> None:
        """The repository is not there any more: recorded once."""
        if self.stored.tip is not None and self.stored.problem != "gone" and self.stored.path == str(self.path):
            self._gap(
                "repository_gone", "there is no git repository any more", self.stored.at, None, {"from": self.stored.at}
            )
            self._write(replace(self.stored, problem="gone"))

    # -- the ledger -----------------------------------------------------------------------------------------------

    def _recorded(self, commits: Sequence[str]) -> set[str]:
        """Which of these commits the ledger has."""
        found: set[str] = set()
        columns = tables.envelope.c
        with self.ledger.engine.connect() as connection:
            for start in range(0, len(commits), 500):
                runs = [f"commit:{oid}" for oid in commits[start : start + 500]]
                query = select(columns.run_id).where(
                    columns.trace_id == self.agent, among(connection, columns.run_id, runs)
                )
                found.update(run.removeprefix("commit:") for run in connection.execute(query).scalars())
        return found

    def _first_recorded(self, commits: Sequence[str]) -> str | None:
        known = self._recorded(commits) | self.new_commits
        return next((one for one in commits if one in known), None)

    def _write(self, cursor: Cursor) -> None:
        """Write what is prepared, and the cursor, unless somebody else did meanwhile."""
        with self.ledger.writing() as connection:
            assert connection is not None
            refuse_retired(connection, self.signer)
            if read_cursor(connection, self.signer, self.agent) != self.stored:
                raise _OvertakenError
            writer = LedgerWriter(connection, self.signer, known=self.ledger.known_log, trusted=self.recorder.trusted)
            written = write_items(writer, self.signer, self.agent, self.items, self.recorder.batch)
            store_cursor(connection, self.signer, self.agent, cursor)
        if written:
            self.ledger.known_log = writer.log.known
        self.report.envelopes += written
        self.stored = cursor
        self.items.clear()


def _changed(objects: Objects, before: str | None, after: str | None) -> _Found:
    try:
        return changed_files(objects, before, after)
    except (ObjectUnreadable, TooManyFiles) as error:
        return error


def _reached(step: Forward | Back) -> str | None:
    return step.commit if isinstance(step, Forward) else step.base


def _reflection(move: Move, commit: Commit) -> str | None:
    """What kind of subagent's branch was merged; by the reflog, else by the message of a merge. Both are claims."""
    if move.entry is not None and move.entry.action.startswith("merge "):
        found = _REFLECTION.search(move.entry.action)
        return found[1] if found else None
    found = _REFLECTION.search(commit.message[:500]) if len(commit.parents) > 1 else None
    return found[1] if found else None
