"""The ledger of Letta Code: opening it, recording every agent's memory in it, and signing its checkpoint.

Without a database of Letta's, the ledger is one SQLite file beside the signing key, shared by all agents and processes of the user.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from phionyx_letta.errors import PhionyxError
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.letta_code.delivering import deliver
from phionyx_letta.letta_code.errors import MemoryUnreadable
from phionyx_letta.letta_code.ingest import AgentReport, Recorder
from phionyx_letta.letta_code.objects import Objects
from phionyx_letta.letta_code.places import AgentMemory, layout_of
from phionyx_letta.letta_code.queue import queue_path, read_notes
from phionyx_letta.letta_code.repository import MemoryRepository
from phionyx_letta.letta_code.working_tree import uncommitted
from phionyx_letta.plugin.runtime import PluginKey
from phionyx_letta.plugin.sealer import Sealer, checkpoint_policy, trusted_hosts
from phionyx_letta.settings import Settings

__all__ = ["Ingested", "default_ledger", "ingest", "opened_ledger"]


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

    @property
    def envelopes(self) -> int:
        """How many were written."""
        return sum(agent["envelopes"] for agent in self.agents)


def default_ledger(settings: Settings) -> str:
    """The setting, else a SQLite file beside the generated key."""
    return settings.ledger or f"sqlite:///{settings.home_path() / 'ledger.db'}"


@contextmanager
def opened_ledger(url: str) -> Iterator[SqlLedger]:
    """The ledger, made if it is missing; its file is for its owner alone.

    Raises:
        StoreError: no ledger can live there.
    """
    parsed = tables.ledger_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        path = Path(parsed.database)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise MemoryUnreadable(f"the ledger {path} cannot be made: {error.strerror}", "check the folder") from error
    ledger = SqlLedger(url)
    try:
        yield ledger
    finally:
        ledger.close()


def ingest(ledger: SqlLedger, key: PluginKey, settings: Settings, memories: Sequence[AgentMemory]) -> Ingested:
    """Record what is new in these memories and sign a checkpoint; what goes wrong with one does not hold up the others.

    Raises:
        LedgerUnavailable, SigningKeyError, StoreError: nothing more can be recorded in this ledger.
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
    result = Ingested()
    for memory in memories:
        try:
            report = recorder.record(memory.agent_id, memory.path)
        except MemoryUnreadable as error:
            problem = {
                "agent_id": memory.agent_id,
                "path": str(memory.path),
                "what": error.message,
                "remedy": error.remedy,
            }
            result.problems.append(problem)
            continue
        result.agents.append({**vars(report), **_present(report)})
    notes.forget_old()
    _sign(ledger, key, settings, result)
    return result


def _present(report: AgentReport) -> dict[str, Any]:
    """The layout, and what is not committed; read after the recording, so that nothing of it delays that."""
    path = Path(report.path)
    try:
        with Objects(MemoryRepository(path).git) as objects:
            tree = objects.tree(objects.commit(report.tip).tree) if report.tip else {}
            return {"layout": layout_of(tree), "uncommitted": uncommitted(objects, path, report.tip)}
    except PhionyxError as error:
        return {"layout": "unknown", "uncommitted": [{"path": "", "state": "not_compared", "why": error.message}]}


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
