"""Which salt a write is recorded under: in this process's memory in the common case, looked up once per block else.

What is remembered may be out of date: another process may have destroyed or ended a salt. The capture's own query checks that, so
it costs no round trip, and a stale one is looked up anew (docs/adr/0005).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from sqlalchemy import Connection, select

from phionyx_letta.diff import content_hash
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.bulk import among
from phionyx_letta.ledger.salts import KeptSalt, Salt, SaltKey, read_salts
from phionyx_letta.plugin.mutation import BlockColumns, Commitment
from phionyx_letta.plugin.outbox import SaltUse, open_payload

__all__ = ["Salting", "SaltingCapture"]

#: Blocks whose salts a process remembers.
_REMEMBERED = 20_000


class Salting:
    """The salts one process remembers."""

    def __init__(self, key: SaltKey) -> None:
        """Remember none yet; ``key`` opens them."""
        self.key = key
        self._known: dict[str, Salt] = {}

    def get(self, block_id: str) -> Salt | None:
        """The salt remembered of a block."""
        return self._known.get(block_id)

    def remember(self, block_id: str, salt: Salt) -> None:
        """Keep a salt, in the place of the oldest where there are too many."""
        if len(self._known) >= _REMEMBERED:
            self._known.pop(next(iter(self._known)), None)
        self._known[block_id] = salt

    def forget(self, block_ids: Iterable[str]) -> None:
        """Look these blocks up anew when they are next written."""
        for block_id in block_ids:
            self._known.pop(block_id, None)

    def forget_destroyed(self, connection: Connection) -> None:
        """Let go of what was destroyed or ended meanwhile, so that its value is not in this process's memory either."""
        known = dict(self._known)
        if not known:
            return
        salt = tables.salt.c
        names = [one.name for one in known.values()]
        good = select(salt.name).where(among(connection, salt.name, names), salt.ended.is_(False))
        alive = set(connection.execute(good).scalars())
        for block_id, one in known.items():
            if one.name not in alive and self._known.get(block_id) is one:
                del self._known[block_id]


class SaltingCapture:
    """The salts of the mutations of one capture."""

    def __init__(self, salting: Salting) -> None:
        """Nothing is used yet."""
        self._salting = salting
        self._kept: dict[str, KeptSalt] = {}
        self._recorded: dict[str, set[str]] = {}
        self._fresh: dict[str, Salt] = {}
        self._relied_on: dict[str, Salt] = {}

    def look_up(self, connection: Connection, block_ids: Collection[str]) -> None:
        """Read what is not remembered of blocks that are not new: one query, and one more for blocks never salted."""
        wanted = [one for one in block_ids if self._salting.get(one) is None]
        if not wanted:
            return
        with connection.begin_nested():  # a failed read must not abort Letta's transaction
            self._kept = read_salts(connection, self._salting.key, wanted)
            self._recorded = _bare_hashes(connection, [one for one in wanted if one not in self._kept])

    def commitment(self, block_id: str, before: BlockColumns | None) -> Commitment:
        """How to commit to what this block holds, before and after."""
        salt = self._fresh.get(block_id) or self._relied_on.get(block_id)
        if salt is not None:  # written twice in one flush
            return Commitment(salt)
        known = None if before is None else self._known(block_id)
        if known is not None:
            self._relied_on[block_id] = known
            return Commitment(known)
        self._fresh[block_id] = salt = self._salting.key.new()
        return Commitment(salt) if before is None else self._taken_over(block_id, before, salt)

    def use(self) -> SaltUse:
        """What the capture's query has to do."""
        key = self._salting.key
        fresh = [(salt.name, block_id, key.wrapped(block_id, salt)) for block_id, salt in self._fresh.items()]
        return SaltUse(fresh, [salt.name for salt in self._relied_on.values()])

    def done(self) -> None:
        """The query went through: remember what it used (a rollback of Letta's shows at the next use)."""
        for block_id, salt in {**self._relied_on, **self._fresh}.items():
            self._salting.remember(block_id, salt)

    def _known(self, block_id: str) -> Salt | None:
        remembered = self._salting.get(block_id)
        kept = self._kept.get(block_id)
        if remembered is None and kept is not None and not kept.ended:
            return kept.salt
        return remembered

    def _taken_over(self, block_id: str, before: BlockColumns, salt: Salt) -> Commitment:
        """The state before as the ledger has it; where it has none, or its salt was destroyed, under a salt that is not kept.

        A bare hash only where the ledger has that very one: any other could be guessed.
        """
        kept, unkept = self._kept.get(block_id), self._salting.key.new()
        if kept is not None:
            return Commitment(salt, kept.salt or unkept)
        bare = content_hash(before.value)
        return Commitment(salt, unkept, bare if bare in self._recorded.get(block_id, ()) else None)


def _bare_hashes(connection: Connection, block_ids: Collection[str]) -> dict[str, set[str]]:
    """What bare hashes the ledger and the outbox have as the last of blocks that never had a salt."""
    if not block_ids:
        return {}
    state, outbox = tables.block.c, tables.outbox.c
    rows = connection.execute(
        select(state.block_id, state.after_hash).where(
            among(connection, state.block_id, block_ids), state.after_hash.is_not(None), state.salt.is_(None)
        )
    )
    found: dict[str, set[str]] = {block_id: {after_hash} for block_id, after_hash in rows}
    for block_id in block_ids:
        waiting = select(outbox.payload).where(outbox.payload.contains(f'"block_id":"{block_id}"', autoescape=True))
        for payload in connection.execute(waiting).scalars():
            fields: dict[str, Any] = open_payload(payload) or {}
            if fields.get("diff") and "salt" not in fields["letta"]:
                found.setdefault(block_id, set()).add(str(fields["diff"].get("after_hash")))
    return found
