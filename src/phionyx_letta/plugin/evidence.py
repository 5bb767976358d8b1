"""Reading what is recorded of blocks, their checkpoints and system messages, and comparing it with what Letta loaded.

All of it comes from one statement, so from one snapshot: the rows, what waits in the outbox about them, what was sealed since
this process last looked, and how long the log is. (Three statements refused 291 of 906 legitimate reads, one refused none.)
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.types import BigInteger, String
from sqlalchemy.util import await_only

from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.envelope import canonical_json
from phionyx_letta.ledger.tables import OUTBOX_BLOCK
from phionyx_letta.plugin.logview import LogView, Recorded
from phionyx_letta.plugin.mutation import BlockColumns, prompt_digest
from phionyx_letta.plugin.outbox import OutboxKey, authentic, open_payload

__all__ = ["HISTORY_SQL", "Mismatch", "Reader", "history_digest"]

#: Envelopes taken up in one statement; the rest of a longer backlog follows in further ones.
_AT_ONCE = 200
#: A snapshot that is older than what this process learned meanwhile is taken again, so often.
_TRIES = 20

#: Whole rows of Letta's checkpoints, but for the columns of an update that never happens; the value as its hash.
HISTORY_SQL = """select json_build_array(h.id, h.sequence_number, encode(sha256(convert_to(h.value, 'UTF8')), 'hex'), h.label,
    h.description, h."limit", h.metadata_::text, h.actor_type, h.actor_id, h.organization_id, h.is_deleted, h._created_by_id,
    to_char(h.created_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US'))::text
    from block_history h where h.block_id = {block} order by h.sequence_number, h.id"""

_PARTS = {
    "block": """select 'block' as what, b.id as name, encode(sha256(convert_to(b.value, 'UTF8')), 'hex') as a,
        json_build_array(b.label, b.description, b."limit", b.read_only)::text as b, null::bigint as n
        from block b where b.id = any(:ids)""",
    "message": "select 'message', m.id, m.content::text, m.text, null::bigint from messages m where m.id = any(:ids)",
    "history": f"""select 'history', g.id, array_to_string(array({HISTORY_SQL.format(block="g.id")}), e'\\n'), null, null
        from unnest(:histories) as g(id)""",
    "waiting": f"""(select 'waiting' as what, null as name, payload as a, mac as b, id as n
        from phionyx_outbox where {OUTBOX_BLOCK} = any(:ids) order by id)""",
    # from the last one that is known on: is it still the one it was, and what follows it
    "sealed": f"""(select 'sealed', encode(leaf, 'hex'), case when seq >= :size then body end, null, seq
        from phionyx_envelope where seq >= :size - 1 order by seq limit {_AT_ONCE})""",
}


_NUMBERED = {"ids": "$1::varchar[]", "size": "$2::bigint", "histories": "$3::varchar[]"}


@lru_cache(maxsize=8)
def _evidence(more: tuple[str, ...], numbered: bool) -> str:
    """The one statement, with what is needed only sometimes: Letta's connections keep no plan, so each part costs anew."""
    sql = "\nunion all\n".join(_PARTS[name] for name in ("waiting", *more, "sealed"))
    for name, number in _NUMBERED.items() if numbered else ():
        sql = sql.replace(f":{name}", number)
    return sql


class _Row(NamedTuple):
    what: str
    name: str | None
    a: Any
    b: Any
    n: int | None


def _run(connection: Connection, more: tuple[str, ...], asked: Mapping[str, Any]) -> list[Any]:
    """Run the statement; on Letta's asyncpg past SQLAlchemy, which names, describes and closes it: one round trip more."""
    driver: Any = connection.connection.driver_connection
    if type(driver).__module__.startswith("asyncpg"):
        values = [asked[name] for name in _NUMBERED if name in asked]
        return [_Row(*row) for row in await_only(driver.fetch(_evidence(more, True), *values))]
    typed: dict[str, Any] = {"ids": ARRAY(String), "histories": ARRAY(String), "size": BigInteger}
    clause = text(_evidence(more, False)).bindparams(*(bindparam(name, type_=typed[name]) for name in asked))
    return list(connection.execute(clause, asked))


def history_digest(rows: Iterable[str]) -> str:
    """Hash of a block's checkpoints in their order.

    Args:
        rows: each as ``HISTORY_SQL`` gives it.
    """
    listed = [json.loads(row) for row in rows]
    return "sha256:" + hashlib.sha256(canonical_json({"v": "1", "rows": listed}).encode("ascii")).hexdigest()


#: Of a block that has no checkpoints, and none recorded.
NO_HISTORY = history_digest([])


@dataclass(frozen=True)
class Mismatch:
    """A read that is not what was recorded."""

    block_id: str | None
    """Of the block or system message; None: the log itself cannot be believed."""
    what: str
    recorded: str | None
    found: str | None


@dataclass
class _Snapshot:
    """What one statement gave."""

    started: float
    size: int = 0
    rows: dict[str, str] = field(default_factory=dict)
    """State digest of each block and system message as it stands."""
    value_hashes: dict[str, str] = field(default_factory=dict)
    histories: dict[str, str] = field(default_factory=dict)
    waiting: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    forged: set[str] = field(default_factory=set)


class Reader:
    """Compares what was loaded with what is recorded; one per process."""

    def __init__(self, view: LogView, key: OutboxKey, outside: Callable[[], Checkpoint | None]) -> None:
        """Use this view of the log.

        Args:
            view: of the log; it is grown here.
            key: authenticates what waits in the outbox.
            outside: gives the newest checkpoint from outside, or None.
        """
        self._view, self._key, self._outside = view, key, outside

    def check(
        self,
        connection: Connection,
        loaded: Mapping[str, str | None],
        histories: Sequence[str] = (),
        *,
        since: float,
        remember: bool = True,
    ) -> list[Mismatch]:
        """Compare.

        Args:
            connection: of the session that loaded them.
            loaded: block or message id, and the state digest of what was loaded; None if it was not loaded whole.
            histories: blocks whose checkpoints are about to be used.
            since: before the load began (monotonic, s).
            remember: note rows of the outbox as committed; False where the transaction may have written them itself.

        Returns:
            What does not agree; empty if everything does.
        """
        ids = sorted({*loaded, *histories})
        whole = False
        for _ in range(_TRIES):
            snapshot = self._read(connection, ids, histories, whole=whole)
            if self._view.fault is not None:
                break
            if snapshot is None or self._is_overtaken(snapshot, ids):
                continue
            found = self._compare(snapshot, loaded, histories, since=since, remember=remember)
            if whole or not any(str(one.block_id).startswith("message-") for one in found):
                return found
            whole = True  # one that is not the newest may have been just before it was loaded: then the row tells
        reason = self._view.fault or "the log grows faster than it can be read"
        return [Mismatch(None, reason, None, None)]

    def committed(self, block_id: str, nonce: str) -> None:
        """A row of the outbox was committed by this process."""
        self._view.await_sealing(block_id, nonce)

    # -- reading -------------------------------------------------------------------------------------------------

    def _read(
        self, connection: Connection, ids: list[str], histories: Sequence[str], *, whole: bool
    ) -> _Snapshot | None:
        """One statement, and the log taken up to where it saw it; None if there was more than one takes."""
        view = self._view
        checkpoint = self._outside()  # before the statement: what was published then is in its snapshot
        if checkpoint is not None:
            view.expect(checkpoint)
        before, last = view.size, view.last_leaf
        parts = {
            "block": any(not one.startswith("message-") for one in ids),
            "message": whole and any(one.startswith("message-") for one in ids),
            "history": bool(histories),
        }
        asked = {"ids": ids, "size": before, **({"histories": list(histories)} if histories else {})}
        snapshot = _Snapshot(time.monotonic())
        sealed: list[Any] = []
        for row in _run(connection, tuple(name for name, needed in parts.items() if needed), asked):
            if row.what == "sealed":
                sealed.append(row)
            else:
                self._sort(snapshot, row)
        if before and sealed and sealed[0].n == before - 1:
            if sealed.pop(0).name != last.hex():
                view.changed(before - 1)
        elif before:
            size = connection.execute(_SIZE).scalar_one()
            view.shorter(size, before) if size < before else view.changed(before - 1)
        snapshot.size = before + len(sealed)
        view.extend((row.n, row.a) for row in sealed)
        if len(sealed) >= _AT_ONCE - 1:
            self._take_backlog(connection)
            return None
        if checkpoint is not None and snapshot.size < checkpoint.size:
            view.shorter(snapshot.size, checkpoint.size)
        return snapshot

    def _take_backlog(self, connection: Connection) -> None:
        while self._view.fault is None:
            more = connection.execute(_MORE, {"size": self._view.size}).all()
            self._view.extend((row.seq, row.body) for row in more)
            if len(more) < _BACKLOG:
                return

    def _sort(self, snapshot: _Snapshot, row: Any) -> None:
        if row.what == "block":
            label, description, limit, read_only = json.loads(row.b)
            columns = BlockColumns("", label, description, limit, read_only)
            snapshot.value_hashes[row.name] = "sha256:" + row.a
            snapshot.rows[row.name] = columns.digest("sha256:" + row.a)
        elif row.what == "message":
            snapshot.rows[row.name] = prompt_digest(json.loads(row.a) if row.a else None, row.b)
        elif row.what == "history":
            snapshot.histories[row.name] = history_digest(row.a.split("\n") if row.a else [])
        elif row.what == "waiting":
            fields = open_payload(row.a)
            if fields is not None and authentic(self._key, row.a, row.b):
                snapshot.waiting.setdefault(fields["block_id"], []).append(fields)
            elif fields is not None:
                snapshot.forged.add(fields["block_id"])

    def _is_overtaken(self, snapshot: _Snapshot, ids: Iterable[str]) -> bool:
        """Another reader learned meanwhile of an envelope that this snapshot does not have."""
        return any((known := self._view.recorded(one)) is not None and known.seq >= snapshot.size for one in ids)

    # -- comparing -----------------------------------------------------------------------------------------------

    def _compare(
        self,
        snapshot: _Snapshot,
        loaded: Mapping[str, str | None],
        histories: Sequence[str],
        *,
        since: float,
        remember: bool,
    ) -> list[Mismatch]:
        found = []
        awaited = self._view.awaited({*loaded, *histories}, snapshot.started)
        for block_id in {*loaded, *histories}:
            waiting = self._genuine(snapshot.waiting.get(block_id, []))
            if remember:
                for fields in waiting:
                    self._view.await_sealing(block_id, fields["nonce"])
            known = self._view.recorded(block_id)
            states = [known or Recorded()]
            unlinked = None
            for fields in waiting:
                last, diff = states[-1].after_hash, fields["diff"]
                if diff is not None and last not in (None, diff["before_hash"]) and fields["event"] != "baseline":
                    unlinked = Mismatch(
                        block_id, "writes that wait to be sealed do not follow each other", last, diff["before_hash"]
                    )
                states.append(states[-1].after(fields["letta"], diff))
            newest = states[-1]
            missing = set(awaited.get(block_id, ())) - {fields["nonce"] for fields in waiting}
            if missing:
                what = "a write that was committed is neither in the outbox nor in the log any more"
                found.append(Mismatch(block_id, what, f"outbox nonce {min(missing)}", "nothing"))
            elif unlinked is not None:
                found.append(unlinked)
            elif block_id in loaded:
                recent = [*states, *self._view.recently(block_id, since)]
                found += self._differs(snapshot, block_id, loaded[block_id], newest, recent)
            if block_id in histories and (newest.history or NO_HISTORY) != snapshot.histories.get(block_id):
                what = "its checkpoints are not those that were recorded"
                found.append(Mismatch(block_id, what, newest.history or NO_HISTORY, snapshot.histories.get(block_id)))
        return found

    def _genuine(self, waiting: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Without copies: of rows that were sealed, and of each other. Each is authenticated, so only its nonce tells."""
        by_nonce: dict[str, dict[str, Any]] = {}
        for fields in waiting:
            if not self._view.is_sealed(fields["nonce"]):
                by_nonce.setdefault(fields["nonce"], fields)
        return list(by_nonce.values())

    def _differs(
        self,
        snapshot: _Snapshot,
        block_id: str,
        loaded: str | None,
        newest: Recorded,
        recent: Sequence[Recorded],
    ) -> list[Mismatch]:
        row = snapshot.rows.get(block_id)
        if block_id.startswith("message-") and loaded is not None:
            recent = recent if row is not None else [newest]  # without the row, only the newest will do
        if newest.state is None and newest.after_hash is not None:  # written by a library: only the value is recorded
            value = snapshot.value_hashes.get(block_id)
            if value in (None, newest.after_hash):
                return []
            return [Mismatch(block_id, "its value is not what was recorded", newest.after_hash, value)]
        if newest.state is None:
            what = "nothing is recorded of it"
            if block_id in snapshot.forged:
                what += ", and what waits in the outbox about it was forged or has another host's key"
            return [Mismatch(block_id, what, None, row or loaded)]
        if row is not None and row != newest.state:
            return [self._mismatch(block_id, newest, row, snapshot.value_hashes.get(block_id))]
        if loaded is not None and not any(one.state == loaded for one in recent):
            return [self._mismatch(block_id, newest, loaded, None)]
        return []

    @staticmethod
    def _mismatch(block_id: str, newest: Recorded, found: str, value: str | None) -> Mismatch:
        if value is not None and value != newest.after_hash:
            return Mismatch(block_id, "its value is not what was recorded", newest.after_hash or newest.state, value)
        what = "its columns are not what was recorded"
        if block_id.startswith("message-"):
            what = "this system message is not the one that was compiled"
        return Mismatch(block_id, what, newest.state, found)


_BACKLOG = 1000
_MORE = text(f"select seq, body from phionyx_envelope where seq >= :size order by seq limit {_BACKLOG}").bindparams(
    bindparam("size", type_=BigInteger)
)
_SIZE = text("select coalesce(max(seq) + 1, 0) from phionyx_envelope")
