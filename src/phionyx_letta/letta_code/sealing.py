"""The ledger of Letta Code: opening it, recording every agent's memory in it, and signing its checkpoint.

Without a database of Letta's, the ledger is one SQLite file beside the signing key, shared by all agents and processes of the user.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from phionyx_letta.errors import PhionyxError
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.letta_code.cursor import read_cursors
from phionyx_letta.letta_code.delivering import check_sinks, deliver
from phionyx_letta.letta_code.errors import MemoryUnreadable
from phionyx_letta.letta_code.identity import owners
from phionyx_letta.letta_code.ingest import AgentReport, Recorder
from phionyx_letta.letta_code.objects import Objects
from phionyx_letta.letta_code.places import AgentMemory, Home, layout_of
from phionyx_letta.letta_code.queue import queue_path, read_notes
from phionyx_letta.letta_code.repository import MemoryRepository
from phionyx_letta.letta_code.rounds import Slow, Waiting, record_in_turn
from phionyx_letta.letta_code.turns import Turn, TurnOver
from phionyx_letta.letta_code.working_tree import uncommitted
from phionyx_letta.plugin.checkpointing import checkpoint_policy, trusted_hosts
from phionyx_letta.plugin.runtime import PluginKey
from phionyx_letta.plugin.sealer import Sealer
from phionyx_letta.settings import Settings

__all__ = ["Ingested", "default_ledger", "ingest", "missing_memories", "opened_ledger"]

_PRESENT, _SILENCE = 10.0, 2.0  # s, to see what of one memory is not committed, and of them without a byte from git


@dataclass
class Ingested:
    """What one run did for all agents."""

    agents: list[dict[str, Any]] = field(default_factory=list)
    problems: list[dict[str, str]] = field(default_factory=list)
    """Memories that could not be read; each is tried again in the next run."""
    checkpoint: int | None = None
    """Size of the log in the checkpoint that was signed."""
    delivered: bool | None = None
    """Whether every sink took it; None without sinks."""

    unfinished: list[str] = field(default_factory=list)
    """Agents of whom more is to be recorded, where each had one turn only."""

    def note(self, agent: str, path: Path, what: str, remedy: str) -> None:
        """Add a problem."""
        self.problems.append({"agent_id": agent, "path": str(path), "what": what, "remedy": remedy})

    @property
    def envelopes(self) -> int:
        """How many were written."""
        return sum(agent["envelopes"] for agent in self.agents)


def default_ledger(settings: Settings) -> str:
    """The setting, else a SQLite file beside the generated key."""
    return settings.ledger or f"sqlite:///{settings.home_path() / 'ledger.db'}"


@contextmanager
def opened_ledger(url: str, *, create: bool = True) -> Iterator[SqlLedger]:
    """The ledger, made if it is missing unless it is only to be read; its file is for its owner alone.

    Raises:
        StoreError: no ledger can live there, or there is none.
    """
    parsed = tables.ledger_url(url)
    file = parsed.database if parsed.get_backend_name() == "sqlite" else None
    if file and not create and not Path(file).exists():
        raise MemoryUnreadable(
            f"there is no ledger at {file}", "record first: phionyx-letta code ingest, or give --ledger"
        )
    if file and create:
        path = Path(file)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise MemoryUnreadable(f"the ledger {path} cannot be made: {error.strerror}", "check the folder") from error
    ledger = SqlLedger(url, create=create)
    try:
        yield ledger
    finally:
        ledger.close()


def ingest(
    ledger: SqlLedger, key: PluginKey, settings: Settings, memories: Sequence[AgentMemory], *, slow: Slow | None = None
) -> Ingested:
    """Record what is new in these memories and sign a checkpoint; what goes wrong with one does not hold up the others.

    Args:
        ledger: with its tables.
        key: signs.
        settings: of PHIONYX_LETTA_*.
        memories: each has a turn after the other, until all is recorded.
        slow: of who comes again soon: then each has one turn, and `unfinished` names who needs another.

    Raises:
        LedgerUnavailable, SigningKeyError, StoreError: nothing can be recorded in this ledger.
        SettingsError: a sink that is set cannot be one; nothing is recorded.
    """
    check_sinks(key, settings)
    recorder = Recorder(
        ledger,
        key,
        trusted=trusted_hosts(settings),
        include_text=settings.include_diff_text,
        batch=settings.batch,
    )
    run = _Ingest(recorder, slow or Slow(longest=math.inf), once=slow is not None)
    waiting = run.chosen(memories)
    while True:
        notes = recorder.notes = read_notes(queue_path(settings.home_path()))
        waiting = run.round(waiting)
        if run.unusable is not None and not run.reports:
            raise run.unusable
        _sign(ledger, key, settings, run)
        if slow is not None or not waiting:
            break
    run.result.unfinished = [agent for agent, _ in waiting]
    run.result.agents += [{**vars(report), **_present(report)} for report in run.reports.values()]
    if not waiting:  # what is still to be recorded may have been noted long ago
        notes.forget_old()
    return run.result


class _Ingest:
    """One run over the memories."""

    def __init__(self, recorder: Recorder, slow: Slow, *, once: bool) -> None:
        self.recorder, self.slow, self.once = recorder, slow, once
        self.result, self.reports = Ingested(), dict[str, AgentReport]()
        self.unusable: PhionyxError | None = None
        """The ledger, unless something else can be recorded in it."""
        self.written = 0
        """Envelopes of this round."""

    def chosen(self, memories: Sequence[AgentMemory]) -> list[Waiting]:
        """The folder of each agent; two of one agent, and one of two agents, are told."""
        with self.recorder.ledger.engine.connect() as connection:
            cursors = read_cursors(connection, self.recorder.key.signer)
        found = []
        for memory in memories:
            known = cursors.get(memory.agent_id)
            path = memory.path if known is None else memory.recorded_at(known.path)
            found.append((memory.agent_id, path))
            if memory.others:
                others = ", ".join(str(one) for one in (memory.path, *memory.others) if one != path)
                what = f"this agent has more than one memory: {others} is not recorded"
                remedy = "remove what is not its memory, or name what is with --agent and --memory"
                self.result.note(memory.agent_id, path, what, remedy)
        shared = owners(found, cursors)
        for agent, path in found:
            if agent in shared:
                other, its_path = shared[agent]
                what = f"the memory {path} of {agent} is the git repository of {other} at {its_path}: it is not recorded as both"
                self.result.note(agent, path, what, "remove the link or the folder that is not its memory")
        return [(agent, path) for agent, path in found if agent not in shared]

    def round(self, waiting: Sequence[Waiting]) -> list[Waiting]:
        """A turn for each; return who needs another."""
        again, self.written = [], 0
        for agent, path in self.slow.ordered(waiting):
            silent_before, longest = agent in self.slow.silent, self.slow.at_longest(agent)
            try:
                report = record_in_turn(
                    self.recorder, agent, path, self.slow, alone=len(waiting) == 1 and not self.once
                )
            except TurnOver as over:
                if not (silent_before or self.once):
                    again.append((agent, path))
                    continue
                what = f"the memory {path} of {agent} was not read: {over.message}"
                self.result.note(agent, path, what, over.remedy)
            except PhionyxError as error:
                if not isinstance(error, MemoryUnreadable):
                    self.unusable = error
                self.result.note(agent, path, error.message, error.remedy)
            except Exception as error:  # whatever a hostile repository brings about is its own agent's problem
                what = f"the memory {path} of {agent} cannot be read: {type(error).__name__}: {error}"
                self.result.note(agent, path, what, "check its files; the other memories were recorded")
            else:
                self.written += report.envelopes
                before = self.reports.get(agent)
                self.reports[agent] = report if before is None else before.and_then(report)
                if report.unfinished:
                    again.append((agent, path))
                if report.unfinished and longest and not report.advanced:
                    what = f"the memory {path} of {agent} is not read on: {report.unfinished}"
                    self.result.note(
                        agent, path, what, f"record it by itself: phionyx-letta code ingest --agent {agent}"
                    )
        return again


def missing_memories(ledger: SqlLedger, key: PluginKey | None, home: Home) -> list[AgentMemory]:
    """Memories of this Letta Code that were recorded on this machine and are gone, until that is recorded too; without a key by
    rows that anybody may have written.
    """
    with ledger.engine.connect() as connection:
        cursors = read_cursors(connection, key.signer if key else None)
    return [
        AgentMemory(agent, Path(cursor.path))
        for agent, cursor in sorted(cursors.items())
        if cursor.host == platform.node()
        and cursor.problem != "gone"
        and home.holds(Path(cursor.path))
        and not os.path.lexists(cursor.path)
    ]


def _present(report: AgentReport) -> dict[str, Any]:
    """The layout, and what is not committed; read after the recording, so that nothing of it delays that."""
    path = Path(report.path)
    try:
        with Objects(MemoryRepository(path).git, Turn(_PRESENT, silence=_SILENCE, final=False)) as objects:
            tree = objects.tree(objects.commit(report.tip).tree) if report.tip else {}
            return {"layout": layout_of(tree), "uncommitted": uncommitted(objects, path, report.tip)}
    except Exception as error:
        return {"layout": "unknown", "uncommitted": [{"path": "", "state": "not_compared", "why": str(error)}]}


def _sign(ledger: SqlLedger, key: PluginKey, settings: Settings, run: _Ingest) -> None:
    """After each round, so that who has much to record does not hold up the checkpoint of the others."""
    policy = checkpoint_policy(key, settings)
    if policy is None or (not run.written and not _unsigned(ledger)):
        return
    signed = Sealer(ledger, key, checkpoints=policy, trusted=trusted_hosts(settings)).sign_last()
    if signed is None:
        return
    run.result.checkpoint = signed[0].size
    if run.result.delivered is not False:  # one that is out of reach is not waited for in each round
        run.result.delivered = deliver(ledger, policy, settings, signed)


def _unsigned(ledger: SqlLedger) -> bool:
    """A run was killed between its last envelope and its checkpoint."""
    with ledger.engine.connect() as connection:
        size = connection.execute(select(tables.log.c.size).where(tables.log.c.id == 1)).scalar() or 0
        signed = connection.execute(select(func.max(tables.checkpoint.c.size))).scalar() or 0
    return bool(size > signed)
