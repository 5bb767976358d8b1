"""Tables and models shaped like Letta's, with the real capture armed on them: what salts and `reconcile` are tested on.

Sessions here are plain and synchronous; what capture sees of them is what it sees of Letta's. Letta itself is in tests/letta.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import psycopg
from outbox_rig import Rig
from sqlalchemy import JSON, DateTime, ForeignKey, create_engine, func
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from phionyx_letta.ledger import tables
from phionyx_letta.ledger.salts import SaltKey
from phionyx_letta.plugin.attribution import attributed
from phionyx_letta.plugin.baseline import record_baseline
from phionyx_letta.plugin.capture import Capture
from phionyx_letta.plugin.runtime import PluginKey, Runtime
from phionyx_letta.settings import Settings


class Base(DeclarativeBase):
    pass


class BlocksAgents(Base):
    __tablename__ = "blocks_agents"
    agent_id: Mapped[str] = mapped_column(ForeignKey("agents.id", ondelete="CASCADE"), primary_key=True)
    block_id: Mapped[str] = mapped_column(ForeignKey("block.id", ondelete="CASCADE"), primary_key=True)
    block_label: Mapped[str]


class Block(Base):
    __tablename__ = "block"
    id: Mapped[str] = mapped_column(primary_key=True)
    organization_id: Mapped[str | None]
    value: Mapped[str]
    label: Mapped[str]
    description: Mapped[str | None]
    limit: Mapped[int] = mapped_column(default=5000)
    read_only: Mapped[bool] = mapped_column(default=False)
    version: Mapped[int] = mapped_column(default=1)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - SQLAlchemy's own form


class Agent(Base):
    __tablename__ = "agents"
    id: Mapped[str] = mapped_column(primary_key=True)
    core_memory: Mapped[list[Block]] = relationship(secondary="blocks_agents", viewonly=True)


class BlockHistory(Base):
    __tablename__ = "block_history"
    id: Mapped[str] = mapped_column(primary_key=True)
    block_id: Mapped[str] = mapped_column(ForeignKey("block.id", ondelete="CASCADE"))
    organization_id: Mapped[str | None]
    sequence_number: Mapped[int]
    value: Mapped[str]
    label: Mapped[str]
    description: Mapped[str | None]
    limit: Mapped[int] = mapped_column(default=5000)
    metadata_: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    actor_type: Mapped[str | None]
    actor_id: Mapped[str | None]
    is_deleted: Mapped[bool] = mapped_column(default=False)
    created_by: Mapped[str | None] = mapped_column("_created_by_id")
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())


class Message(Base):
    __tablename__ = "messages"
    id: Mapped[str] = mapped_column(primary_key=True)
    role: Mapped[str]


ORM = SimpleNamespace(Block=Block, BlocksAgents=BlocksAgents, Agent=Agent, BlockHistory=BlockHistory, Message=Message)


class BlockRig(Rig):
    """A ledger beside Letta-like tables, and workers that write to them."""

    def __init__(self, url: str, key: PluginKey | None = None) -> None:
        super().__init__(url, key)
        self.engine = create_engine(tables.ledger_url(url))
        Base.metadata.create_all(self.engine)

    def close(self) -> None:
        self.engine.dispose()
        super().close()

    def runtime(self, commitments: str = "salted", **settings: Any) -> Runtime:
        """What one armed process knows."""
        runtime = Runtime(Settings(signing_key=self.key.source, commitments=commitments, **settings))
        runtime.key = self.key
        runtime.salting = None
        if commitments == "salted" or self.ledger.salted():
            runtime.salt()
        return runtime

    @contextmanager
    def armed(self, runtime: Runtime | None = None) -> Iterator[Runtime]:
        """Capture is on for the body, as this process."""
        runtime = runtime or self.runtime()
        capture = Capture(runtime, ORM)
        capture.install()
        try:
            yield runtime
        finally:
            capture.uninstall()

    @contextmanager
    def session(self) -> Iterator[Session]:
        """One transaction, committed at the end."""
        with Session(self.engine) as session, session.begin():
            yield session

    # -- what Letta does -----------------------------------------------------------------------------------------

    def create(self, block_id: str, value: str, *agents: str, **columns: Any) -> None:
        with self.session() as session:
            session.add(Block(id=block_id, value=value, label=columns.pop("label", "human"), **columns))
            session.flush()
            for agent in agents:
                if session.get(Agent, agent) is None:
                    session.add(Agent(id=agent))
                    session.flush()
                session.add(BlocksAgents(agent_id=agent, block_id=block_id, block_label="human"))

    def set(self, block_id: str, agent: str | None = None, **columns: Any) -> None:
        who = {"agent_id": agent} if agent else {}
        with attributed(**who), self.session() as session:
            block = session.get(Block, block_id)
            assert block is not None
            for name, value in columns.items():
                setattr(block, name, value)

    def set_locked(self, block_id: str, value: str) -> None:
        """A write that others wait for, as Letta's retries come to."""
        with self.session() as session:
            session.get_one(Block, block_id, with_for_update=True).value = value

    def checkpoint(self, block_id: str, number: int, value: str) -> None:
        """Letta keeps a state for undo."""
        with self.session() as session:
            session.add(
                BlockHistory(
                    id=f"{block_id}-{number}", block_id=block_id, sequence_number=number, value=value, label="human"
                )
            )

    def attach(self, block_id: str, agent: str) -> None:
        with self.session() as session:
            if session.get(Agent, agent) is None:
                session.add(Agent(id=agent))
                session.flush()
            session.add(BlocksAgents(agent_id=agent, block_id=block_id, block_label="human"))

    def detach(self, block_id: str, agent: str, reason: str | None = None) -> None:
        with attributed(reason=reason), self.session() as session:
            session.delete(session.get_one(BlocksAgents, (agent, block_id)))

    def delete(self, block_id: str, reason: str | None = None) -> None:
        with attributed(reason=reason), self.session() as session:
            session.delete(session.get_one(Block, block_id))

    def baseline(self, *, salted: bool = False) -> None:
        while record_baseline(self.ledger, self.key.outbox, "test", salts=SaltKey.of(self.key.signer), salted=salted):
            self.seal()

    # -- what is stored ------------------------------------------------------------------------------------------

    def salts(self) -> list[tuple[str, bool, bool]]:
        """(block, ended, destroyed) of every salt, oldest first."""
        return [tuple(row) for row in self.sql("select block_id, ended, wrapped is null from phionyx_salt order by id")]

    def stored_text(self) -> str:
        """Everything in every table of the ledger, as one text."""
        out = []
        for table in tables.metadata.tables:
            with psycopg.connect(self.url) as connection:
                rows = connection.execute(f"select to_jsonb(t)::text from {table} t").fetchall()
            out += [row[0] for row in rows]
        return "\n".join(out)

    def last(self, block_id: str) -> dict[str, Any]:
        found: dict[str, Any] = [e for e in self.envelopes() if e["mutation"]["block_id"] == block_id][-1]
        return found

    def payloads(self) -> list[dict[str, Any]]:
        return [json.loads(row[0]) for row in self.sql("select payload from phionyx_outbox order by id")]
