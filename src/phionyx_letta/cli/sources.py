"""Reading envelopes out of a database or a store folder, as `log`, `show` and `export` need them."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from phionyx_letta.cli.failures import FAILED, CommandError
from phionyx_letta.cli.ledgers import is_store, ledger_name, open_database

if TYPE_CHECKING:
    from sqlalchemy import Row

    from phionyx_letta.ledger.filesystem import FilesystemEnvelopeStore
    from phionyx_letta.ledger.sql import SqlLedger

__all__ = ["Entry", "Filters", "Source", "SqlSource", "StoreSource", "open_source"]

MOST_CANDIDATES = 10
_MOST_CAUSED = 1000


@dataclass(frozen=True)
class Entry:
    """One envelope and its place."""

    trace_id: str
    position: int
    envelope: dict[str, Any]
    seq: int | None = None

    def part(self, name: str) -> dict[str, Any]:
        """A part of the envelope, empty where it has none (it may have been tampered with)."""
        value = self.envelope.get(name)
        return value if isinstance(value, dict) else {}

    @property
    def letta(self) -> dict[str, Any]:
        """What the plugin noted about the mutation."""
        metadata = self.part("subject").get("metadata")
        letta = metadata.get("letta") if isinstance(metadata, dict) else None
        return letta if isinstance(letta, dict) else {}

    @property
    def diff(self) -> dict[str, Any]:
        """Sizes, counts and hashes of the content."""
        diff = self.part("mutation").get("diff")
        return diff if isinstance(diff, dict) else {}

    @property
    def event(self) -> str | None:
        """What really happened, where the plugin said so."""
        event = self.letta.get("event")
        return event if isinstance(event, str) else None

    @property
    def hash(self) -> str:
        """The envelope's own hash."""
        return str(self.part("integrity").get("current", ""))


@dataclass(frozen=True)
class Filters:
    """What `log` is asked for; None does not filter. Times are ISO 8601 in UTC, with microseconds."""

    agent: str | None = None
    block: str | None = None
    run: str | None = None
    kind: str | None = None
    event: str | None = None
    since: str | None = None
    until: str | None = None

    def accept(self, entry: Entry) -> bool:
        """Whether an entry of a store is wanted."""
        subject, mutation = entry.part("subject"), entry.part("mutation")
        at = str(subject.get("timestamp_utc", ""))
        return (
            self.agent in (None, entry.trace_id, entry.letta.get("agent_id"))
            and self.block in (None, mutation.get("block_id"), mutation.get("block_label"))
            and self.run in (None, entry.letta.get("run_id"))
            and self.kind in (None, mutation.get("mutation_kind"))
            and self.event in (None, entry.event)
            and (self.since is None or at >= self.since)
            and (self.until is None or at < self.until)
        )


class Source(Protocol):
    """Where envelopes are read from."""

    def newest(self, filters: Filters, limit: int) -> list[Entry]:
        """The newest entries, newest last."""
        ...

    def find(self, digest: str) -> list[Entry]:
        """The envelopes whose hash starts with these hex digits, ten at most."""
        ...

    def of_block(self, block_id: str) -> list[Entry]:
        """All of a block's, oldest first."""
        ...

    def caused_by(self, digest: str) -> list[Entry]:
        """The envelopes that name one whose hash starts with these hex digits as their cause; a thousand at most."""
        ...

    def at(self, trace_id: str, position: int) -> Entry | None:
        """The envelope at a place."""
        ...

    def chain(self, trace_id: str) -> Iterator[dict[str, Any]]:
        """One chain."""
        ...

    def everything(self) -> Iterator[dict[str, Any]]:
        """All envelopes, in the order of their sealing where that is known."""
        ...

    def traces(self) -> Iterator[str]:
        """All chains."""
        ...


@dataclass(frozen=True)
class SqlSource:
    """A ledger in a database."""

    ledger: SqlLedger

    def newest(self, filters: Filters, limit: int) -> list[Entry]:
        """The newest entries, newest last."""
        return self._select(filters, limit=limit, newest=True)

    def after(self, filters: Filters, seq: int) -> list[Entry]:
        """Entries sealed later, a few hundred at a time."""
        return self._select(filters, after=seq, limit=500)

    def findings(self, filters: Filters, limit: int) -> list[dict[str, Any]]:
        """What guarded reads found in the filters' time, about their block: at most so many, newest last."""
        from sqlalchemy import inspect, select

        from phionyx_letta.ledger import tables

        if not inspect(self.ledger.engine).has_table(tables.finding.name):
            return []  # a ledger that an older version made
        column = tables.finding.c
        query = select(column.info).order_by(column.id.desc()).limit(limit)
        if filters.since is not None:
            query = query.where(column.at >= filters.since)
        if filters.until is not None:
            query = query.where(column.at < filters.until)
        if filters.block is not None:
            query = query.where(column.info.contains(filters.block, autoescape=True))
        with self.ledger.engine.connect() as connection:
            return [_told(info) for info in connection.execute(query).scalars()][::-1]

    def sessions(self) -> dict[str, Any] | None:
        """How the queue of sessions stands; None where there is none."""
        from sqlalchemy import inspect

        from phionyx_letta.ledger import tables
        from phionyx_letta.plugin.session_views import counts

        engine = self.ledger.engine
        if engine.dialect.name != "postgresql" or not inspect(engine).has_table(tables.session.name):
            return None
        with engine.connect() as connection:
            return counts(connection)

    def last_seq(self) -> int:
        """Where the ledger ends; -1 for an empty one."""
        rows = self.ledger.select(limit=1, newest=True)
        return rows[0].seq if rows else -1

    def _select(self, filters: Filters, **window: Any) -> list[Entry]:
        equals: dict[str, Any] = {
            "trace_id": filters.agent,
            "run_id": filters.run,
            "kind": filters.kind,
            "event": filters.event,
            "since": filters.since,
            "until": filters.until,
        }
        rows = self.ledger.select(**window, **equals, block_id=filters.block)
        if not rows and filters.block is not None:  # ids and labels never look alike
            rows = self.ledger.select(**window, **equals, block_label=filters.block)
        return [_entry(row) for row in rows]

    def of_block(self, block_id: str) -> list[Entry]:
        """All of a block's, in sealing order."""
        return [_entry(row) for row in self.ledger.select(block_id=block_id)]

    def find(self, digest: str) -> list[Entry]:
        """The envelopes whose hash starts with these hex digits, ten at most."""
        return [_entry(row) for row in self.ledger.find(digest)]

    def caused_by(self, digest: str) -> list[Entry]:
        """The envelopes that name one whose hash starts with these hex digits as their cause, in sealing order; reads all."""
        from phionyx_letta.ledger import tables

        body = tables.envelope.c.body
        named = body.contains(f'"parent_envelope_ref":"envelope://sha256:{digest}', autoescape=True)
        query = tables.envelope.select().where(named).order_by(tables.envelope.c.seq).limit(_MOST_CAUSED)
        with self.ledger.engine.connect() as connection:
            found = [_entry(row) for row in connection.execute(query)]
        return [entry for entry in found if _names_cause(entry, digest)]

    def at(self, trace_id: str, position: int) -> Entry | None:
        """The envelope at a place."""
        from phionyx_letta.ledger import tables

        columns = tables.envelope.c
        query = tables.envelope.select().where(columns.trace_id == trace_id, columns.position == position)
        with self.ledger.engine.connect() as connection:
            row = connection.execute(query).first()
        return None if row is None else _entry(row)

    def chain(self, trace_id: str) -> Iterator[dict[str, Any]]:
        """One chain."""
        return self.ledger.iter_chain(trace_id)

    def everything(self) -> Iterator[dict[str, Any]]:
        """All envelopes in sealing order."""
        return self.ledger.iter_all()

    def traces(self) -> Iterator[str]:
        """All chains."""
        return self.ledger.traces()


def _told(info: str) -> dict[str, Any]:
    """A finding as a worker wrote it; nothing of it is authenticated."""
    try:
        told = json.loads(info)
    except (ValueError, RecursionError):
        told = None
    return told if isinstance(told, dict) else {"what": info}


@dataclass(frozen=True)
class StoreSource:
    """A store in a folder."""

    store: FilesystemEnvelopeStore = field()

    def newest(self, filters: Filters, limit: int) -> list[Entry]:
        """The newest entries by their own time, newest last; reads the whole store."""
        wanted = (entry for entry in self._entries() if filters.accept(entry))
        return heapq.nlargest(limit, wanted, key=_when)[::-1]

    def of_block(self, block_id: str) -> list[Entry]:
        """All of a block's, in the order of their own time; reads the whole store."""
        ours = (entry for entry in self._entries() if entry.part("mutation").get("block_id") == block_id)
        return sorted(ours, key=_when)

    def find(self, digest: str) -> list[Entry]:
        """The envelopes whose hash starts with these hex digits, ten at most; reads the whole store."""
        found = (entry for entry in self._entries() if entry.hash.removeprefix("sha256:").startswith(digest))
        return [entry for entry, _ in zip(found, range(MOST_CANDIDATES), strict=False)]

    def caused_by(self, digest: str) -> list[Entry]:
        """The envelopes that name one whose hash starts with these hex digits as their cause; reads the whole store."""
        found = (entry for entry in self._entries() if _names_cause(entry, digest))
        return [entry for entry, _ in zip(found, range(_MOST_CAUSED), strict=False)]

    def at(self, trace_id: str, position: int) -> Entry | None:
        """The envelope at a place."""
        for place, envelope in enumerate(self.store.iter_chain(trace_id)):
            if place == position:
                return Entry(trace_id, place, envelope)
        return None

    def chain(self, trace_id: str) -> Iterator[dict[str, Any]]:
        """One chain."""
        return self.store.iter_chain(trace_id)

    def everything(self) -> Iterator[dict[str, Any]]:
        """Chain after chain: a folder does not know the order across chains."""
        for trace_id in self.store.traces():
            yield from self.store.iter_chain(trace_id)

    def traces(self) -> Iterator[str]:
        """All chains."""
        return self.store.traces()

    def _entries(self) -> Iterator[Entry]:
        for trace_id in self.store.traces():
            for position, envelope in enumerate(self.store.iter_chain(trace_id)):
                yield Entry(trace_id, position, envelope)


@contextmanager
def open_source(given: str | None) -> Iterator[Source]:
    """The ledger of ``--ledger`` or of the settings.

    Raises:
        CommandError, StoreError: there is none, or it cannot be read.
    """
    name = ledger_name(given)
    if is_store(name):
        from phionyx_letta.ledger.filesystem import FilesystemEnvelopeStore

        yield StoreSource(FilesystemEnvelopeStore(name))
        return
    with open_database(name) as ledger:
        yield SqlSource(ledger)


def existing_chain(source: Source, trace_id: str) -> None:
    """Make sure there is such a chain.

    Raises:
        CommandError: there is not.
    """
    if next(iter(source.chain(trace_id)), None) is None:
        raise CommandError(
            f"there is no chain {trace_id!r} in this ledger", "`phionyx-letta log` shows what there is", FAILED
        )


def _names_cause(entry: Entry, digest: str) -> bool:
    """Whether the envelope itself says so, not a text in it."""
    metadata = entry.part("subject").get("metadata")
    audit = metadata.get("memory_audit") if isinstance(metadata, dict) else None
    named = audit.get("parent_envelope_ref") if isinstance(audit, dict) else None
    return isinstance(named, str) and named.startswith(f"envelope://sha256:{digest}")


def _when(entry: Entry) -> tuple[str, int]:
    return str(entry.part("subject").get("timestamp_utc", "")), entry.position


def _entry(row: Row[Any]) -> Entry:
    try:
        body = json.loads(row.body)
    except (ValueError, TypeError, RecursionError):
        body = None
    return Entry(row.trace_id, row.position, body if isinstance(body, dict) else {}, row.seq)
