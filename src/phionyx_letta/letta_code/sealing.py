"""The ledger of Letta Code: opening it, recording every agent's memory in it, and signing its checkpoint.

Without a database of Letta's, the ledger is one SQLite file beside the signing key, shared by all agents and processes of the user.
"""

from __future__ import annotations

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
from phionyx_letta.letta_code.cursor import read_cursor, read_cursors
from phionyx_letta.letta_code.delivering import deliver
from phionyx_letta.letta_code.errors import MemoryUnreadable
from phionyx_letta.letta_code.ingest import AgentReport, Recorder
from phionyx_letta.letta_code.objects import Objects
from phionyx_letta.letta_code.places import AgentMemory, Home, layout_of
from phionyx_letta.letta_code.queue import queue_path, read_notes
from phionyx_letta.letta_code.repository import MemoryRepository
from phionyx_letta.letta_code.working_tree import uncommitted
from phionyx_letta.plugin.runtime import PluginKey
from phionyx_letta.plugin.sealer import Sealer, checkpoint_policy, trusted_hosts
from phionyx_letta.settings import Settings

__all__ = ["Ingested", "default_ledger", "ingest", "missing_memories", "opened_ledger"]


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

    def note(self, memory: AgentMemory, path: Path, what: str, remedy: str) -> None:
        """Add a problem."""
        self.problems.append({"agent_id": memory.agent_id, "path": str(path), "what": what, "remedy": remedy})

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


def ingest(ledger: SqlLedger, key: PluginKey, settings: Settings, memories: Sequence[AgentMemory]) -> Ingested:
    """Record what is new in these memories and sign a checkpoint; what goes wrong with one does not hold up the others.

    Raises:
        LedgerUnavailable, SigningKeyError, StoreError: nothing can be recorded in this ledger.
    """
    notes = read_notes(queue_path(settings.home_path()))
    recorder = Recorder(
        ledger,
        key,
        trusted=trusted_hosts(settings),
        include_text=settings.include_diff_text,
        batch=settings.batch,
        notes=notes,
    )
    result, unusable = Ingested(), None
    for memory in memories:
        path = _where(ledger, key, memory)
        if memory.others:
            others = ", ".join(str(one) for one in (memory.path, *memory.others) if one != path)
            what = f"this agent has more than one memory: {others} is not recorded"
            result.note(memory, path, what, "remove what is not its memory, or name what is with --agent and --memory")
        try:
            report = recorder.record(memory.agent_id, path)
        except PhionyxError as error:
            if not isinstance(error, MemoryUnreadable):
                unusable = error  # the ledger, unless something else can be recorded in it
            result.note(memory, path, error.message, error.remedy)
            continue
        except Exception as error:  # whatever a hostile repository brings about is its own agent's problem
            what = f"the memory {path} of {memory.agent_id} cannot be read: {type(error).__name__}: {error}"
            result.note(memory, path, what, "check its files; the other memories were recorded")
            continue
        result.agents.append({**vars(report), **_present(report)})
    if unusable is not None and not result.agents:
        raise unusable
    notes.forget_old()
    _sign(ledger, key, settings, result)
    return result


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


def _where(ledger: SqlLedger, key: PluginKey, memory: AgentMemory) -> Path:
    if not memory.others:
        return memory.path
    with ledger.engine.connect() as connection:
        return memory.recorded_at(read_cursor(connection, key.signer, memory.agent_id).path)


def _present(report: AgentReport) -> dict[str, Any]:
    """The layout, and what is not committed; read after the recording, so that nothing of it delays that."""
    path = Path(report.path)
    try:
        with Objects(MemoryRepository(path).git) as objects:
            tree = objects.tree(objects.commit(report.tip).tree) if report.tip else {}
            return {"layout": layout_of(tree), "uncommitted": uncommitted(objects, path, report.tip)}
    except Exception as error:
        return {"layout": "unknown", "uncommitted": [{"path": "", "state": "not_compared", "why": str(error)}]}


def _sign(ledger: SqlLedger, key: PluginKey, settings: Settings, result: Ingested) -> None:
    policy = checkpoint_policy(key, settings)
    if policy is None or (not result.envelopes and not _unsigned(ledger)):
        return
    signed = Sealer(ledger, key, checkpoints=policy, trusted=trusted_hosts(settings)).sign_last()
    if signed is None:
        return
    result.checkpoint = signed[0].size
    result.delivered = deliver(ledger, policy, settings, signed)


def _unsigned(ledger: SqlLedger) -> bool:
    """A run was killed between its last envelope and its checkpoint."""
    with ledger.engine.connect() as connection:
        size = connection.execute(select(tables.log.c.size).where(tables.log.c.id == 1)).scalar() or 0
        signed = connection.execute(select(func.max(tables.checkpoint.c.size))).scalar() or 0
    return bool(size > signed)
