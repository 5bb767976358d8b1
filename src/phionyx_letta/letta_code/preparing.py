"""From the steps of a memory branch to what its envelopes will say; the ledger is only read, and only where git cannot tell.

Whatever cannot be recorded as it was becomes a gap: an envelope of its own, and a line of the report.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phionyx_letta.envelope import CONTENT_UNKNOWN, MemoryConsolidationAudit
from phionyx_letta.errors import PhionyxError
from phionyx_letta.letta_code.changes import Mutation, Unread, block_id, claims, file_name, label_of, mutations
from phionyx_letta.letta_code.contents import ABSENT, content_diff
from phionyx_letta.letta_code.errors import ObjectMalformed, ObjectUnreadable, TooManyFiles
from phionyx_letta.letta_code.history import NAMED, Back, Forward, Move, merged
from phionyx_letta.letta_code.known import Known
from phionyx_letta.letta_code.objects import Commit, Objects
from phionyx_letta.letta_code.queue import Notes
from phionyx_letta.letta_code.repository import LogPlace, MemoryRepository
from phionyx_letta.letta_code.trees import Changed, changed_files
from phionyx_letta.letta_code.writing import Item, held

__all__ = ["AgentReport", "Found", "Preparation"]

#: How Letta Code 0.34 names the branches of its reflection subagents, which it merges.
_REFLECTION = re.compile(r"\bletta/([A-Za-z0-9_.-]{1,60})/")
Found = list[Changed] | PhionyxError
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
    unfinished: str = ""
    """Why there is more to record; empty where there is none."""
    advanced: bool = False
    """Whether the ledger knows of more than before: commits without a change have no envelope."""

    def and_then(self, later: AgentReport) -> AgentReport:
        """What this turn and a later one did."""
        return replace(
            later,
            commits=self.commits + later.commits,
            envelopes=self.envelopes + later.envelopes,
            rewrites=self.rewrites + later.rewrites,
            gaps=self.gaps + later.gaps,
        )


class Preparation:
    """What is about to be recorded of one agent."""

    def __init__(self, report: AgentReport, known: Known, notes: Notes, *, include_text: bool) -> None:
        """Nothing is prepared yet.

        Args:
            report: gets what is counted and what is a gap.
            known: what the ledger has of the agent.
            notes: what hooks noted of who made which commit.
            include_text: keep unified diffs, and so content.
        """
        self.items: list[Item] = []
        self.new_commits: set[str] = set()
        self._report, self._known, self._notes, self._include_text = report, known, notes, include_text
        self.settle()

    def settle(self) -> None:
        """What is prepared now is whole steps."""
        self._whole = len(self.items), len(self._report.gaps), self._report.rewrites

    def drop_unsettled(self) -> None:
        """Forget the step that was begun."""
        items, gaps, self._report.rewrites = self._whole
        del self.items[items:]
        del self._report.gaps[gaps:]

    def written(self) -> None:
        """All that is prepared is in the ledger."""
        self.items.clear()
        self.settle()

    @staticmethod
    def needs_ledger(step: Forward | Back, found: Found) -> bool:
        """Whether a step goes on from what the ledger knows, which must then have all that is prepared."""
        if isinstance(step, Back):
            return step.vanished
        return isinstance(found, ObjectUnreadable)

    def forward(
        self, objects: Objects, repository: MemoryRepository, step: Forward, found: Found, move: Move, again: str | None
    ) -> None:
        """Prepare one commit.

        Args:
            objects: of the repository.
            repository: the same.
            step: the commit.
            found: what it changed.
            move: of which it is a part.
            again: the name of the move if the commit was recorded before, else None.
        """
        if step.cut:
            why = "shallow" if step.commit in repository.shallow() else "parents_missing"
            self.gap(
                why, "the commits before this one are not in the repository", step.commit, move, {"to": step.commit}
            )
        commit = objects.commit(step.commit)
        letta: dict[str, Any] = {
            "commit": step.commit,
            "head": step.commit,
            "seen_by": move.seen_by,
            "claims": claims(commit),
            **self._notes.about(self._report.agent_id, step.commit),
        }
        if again:
            letta["again"] = True
        brought = merged(objects, commit, step.parent) if len(commit.parents) > 1 else []
        if len(commit.parents) > 1:
            letta["merged"] = brought
        run = f"move:{again}" if again else f"commit:{step.commit}"
        method = _reflection(move, commit)
        for mutation in self._changes(objects, found, step.commit, move):
            if method is not None and mutation.kind in ("write", "append"):
                mutation.kind = "consolidate"
                mutation.audit = self._audit(mutation, method, brought or (step.commit,))
            nonce = secrets.token_hex(16) if again else self._nonce(step.commit, mutation.path or "")
            self.items.append(Item(mutation, run, nonce, letta))
        if not again:
            self.new_commits.add(step.commit)
            self._report.commits += 1

    def back(self, objects: Objects, step: Back, found: Found, move: Move, move_id: str) -> None:
        """Prepare a step back to where two histories meet."""
        self._report.rewrites += 1
        details: dict[str, Any] = {"from": step.old, "base": step.base, "to": move.new}
        if step.dropped_total:
            details["dropped"], details["dropped_total"] = list(step.dropped), step.dropped_total
        if move.log_lost:
            details["reflog"] = "it does not go on where it was read last"
        self._history("history_lost" if step.vanished else "history_rewritten", step.base, move, details)
        letta = {"commit": step.base, "head": step.base, "seen_by": move.seen_by, "rewound": True}
        if step.vanished:
            self._report.gaps.append({"reason": "vanished", "from": step.old, "to": move.new})
            changed: Iterable[Mutation] = self._from_ledger(objects, step.base, move)
        else:
            changed = self._changes(objects, found, step.base, move)
        for mutation in changed:
            self.items.append(Item(mutation, f"move:{move_id}", secrets.token_hex(16), letta))

    def gap(self, reason: str, why: str, head: str | None, move: Move | None, details: dict[str, Any]) -> None:
        """Prepare an envelope that says what could not be recorded; `head` is the commit the branch then stands at."""
        self._report.gaps.append({"reason": reason, "why": why, **details})
        self._history("gap", head, move, {"reason": reason, "why": why, **details})

    def log_gaps(self, places: Mapping[str, LogPlace], head: str | None) -> None:
        """Prepare what could not be read of the reflogs up to these places."""
        for name, place in sorted(places.items()):
            if place.unparsed:
                why = f"{place.unparsed} lines of the reflog {name} name no commits"
                self.gap("reflog_unparsed", why, head, None, {"log": name, "lines": place.unparsed})
            if place.skipped:
                why = f"{place.skipped} bytes of the reflog {name} are more than is read at once"
                self.gap("reflog_skipped", why, head, None, {"log": name, "bytes": place.skipped})

    def _history(self, event: str, head: str | None, move: Move | None, details: dict[str, Any]) -> None:
        if move is not None and move.entry is not None:
            details = {**details, "reflog_entry": {"action": move.entry.action, "at": move.entry.at}}
        letta = {"head": head, "content": CONTENT_UNKNOWN, "history": details}
        mutation = Mutation(None, "history", "write", event, None)
        self.items.append(Item(mutation, f"move:{secrets.token_hex(16)}", secrets.token_hex(16), letta))

    def _changes(self, objects: Objects, found: Found, commit: str | None, move: Move) -> Iterator[Mutation]:
        if isinstance(found, PhionyxError):
            self.gap(_reason(found), found.message, commit, move, {"to": commit})
            if isinstance(found, ObjectUnreadable):  # what was there before may be all that cannot be read
                yield from self._from_ledger(objects, commit, None)
            return
        unread = Unread()
        yield from mutations(objects, found, include_text=self._include_text, unread=unread)
        self._unread(unread, commit, move)

    def _unread(self, unread: Unread, commit: str | None, move: Move | None) -> None:
        if unread.paths:
            details = {"to": commit, "paths": unread.paths[:NAMED], "paths_total": len(unread.paths)}
            self.gap("unreadable", unread.why, commit, move, details)

    def _from_ledger(self, objects: Objects, commit: str | None, move: Move | None) -> list[Mutation]:
        """From what the ledger last recorded to a commit, where git cannot tell any more what was there.

        Nothing where the commit cannot be told either; without a move the caller said so already.
        """
        try:
            tree = objects.commit(commit).tree if commit else None
            files = changed_files(objects, None, tree)
        except (ObjectUnreadable, TooManyFiles) as error:
            if move is not None:
                self.gap(_reason(error), error.message, commit, move, {"to": commit})
            return []
        states = self._known.files()
        found, unread = [], Unread()
        for path, _, entry in files:
            name = file_name(path)
            before = held(states.pop(block_id(self._report.agent_id, name), None))
            try:
                content = objects.content(entry)
            except ObjectUnreadable as error:
                unread.paths.append(name)
                unread.why = error.message
                continue
            if before.digest != content.digest:
                diff = content_diff(before, content, include_text=False)
                found.append(Mutation(name, label_of(name, content.text), "write", "restored", diff))
        prefix = block_id(self._report.agent_id, "")
        for block, state in sorted(states.items()):
            before = held(state)
            if before.digest != ABSENT.digest:
                diff = content_diff(before, ABSENT, include_text=False)
                found.append(Mutation(block.removeprefix(prefix), state.label, "delete", "delete", diff))
        self._unread(unread, commit, move)
        return found

    def _audit(self, mutation: Mutation, method: str, merged: Sequence[str]) -> MemoryConsolidationAudit:
        assert mutation.diff is not None
        return MemoryConsolidationAudit(
            from_episodic=[f"commit:{oid}" for oid in merged],
            to_semantic=[f"{block_id(self._report.agent_id, mutation.path)}@{mutation.diff.after_hash}"],
            consolidation_method=f"letta-code.{method}",
        )

    def _nonce(self, commit: str, path: str) -> str:
        return hashlib.sha256("\0".join((self._report.agent_id, commit, path)).encode()).hexdigest()[:32]


def _reason(error: PhionyxError) -> str:
    if isinstance(error, TooManyFiles):
        return "too_many_files"
    return "malformed" if isinstance(error, ObjectMalformed) else "unreadable"


def _reflection(move: Move, commit: Commit) -> str | None:
    """What kind of subagent's branch was merged; by the reflog, else by the message of a merge. Both are claims."""
    if move.entry is not None and move.entry.action.startswith("merge "):
        found = _REFLECTION.search(move.entry.action)
        return found[1] if found else None
    found = _REFLECTION.search(commit.message[:500]) if len(commit.parents) > 1 else None
    return found[1] if found else None
