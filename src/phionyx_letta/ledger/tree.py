"""The log of the SQL ledger: an RFC 6962 tree over the sealed envelopes in sealing order, kept beside them.

Stored are the hash of each leaf in its envelope's row, the complete subtrees of 256 leaves and more, and the frontier the next batch
continues from (docs/log.md has the costs). Who edits these can spoil proofs and checkpoints, but not make ones that agree with
what was published before.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, and_, or_, select

from phionyx_letta.checkpoint import Checkpoint, issue_checkpoint
from phionyx_letta.envelope import Signs, canonical_json
from phionyx_letta.errors import ProofError, SigningKeyError
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.bulk import insert_rows, upsert_rows
from phionyx_letta.ledger.log.nodes import TiledNodes, grow
from phionyx_letta.merkle import Frontier, Node, leaf_hash
from phionyx_letta.signing import Signer

__all__ = ["LogWriter", "default_origin", "derived_key", "sql_nodes", "stored_checkpoint", "stored_size"]

_PURPOSE = "phionyx-letta/log/v1"
_ROWS = 1000

_log = logging.getLogger("phionyx_letta")


class LogWriter:
    """The tree's end, in a transaction that holds the ledger's lock."""

    def __init__(self, connection: Connection, signer: Signs | None, size: int) -> None:
        """Take the tree up where the last batch left it.

        Args:
            connection: in a transaction that holds the ledger's lock.
            signer: authenticates the frontier, so that nobody can have a checkpoint signed over another tree.
            size: how many envelopes the ledger has; a frontier of another size is built anew from them.
        """
        self._connection = connection
        self._key = derived_key(signer, _PURPOSE)
        self._key_id = getattr(signer, "key_id", None)
        self._frontier = self._stored(size) or self._rebuilt(size)

    @property
    def size(self) -> int:
        """How many leaves there are."""
        return self._frontier.size

    def append(self, bodies: Sequence[str]) -> list[bytes]:
        """Add envelopes, as they are stored; return their leaf hashes. Costs O(log n) beside hashing them."""
        leaves = [leaf_hash(body.encode("ascii")) for body in bodies]
        self._keep(grow(self._frontier, leaves))
        return leaves

    def flush(self) -> None:
        """Store the frontier."""
        row = {
            "id": 1,
            "size": self._frontier.size,
            "frontier": " ".join(one.hex() for one in self._frontier.hashes),
            "key_id": self._key_id,
        }
        upsert_rows(self._connection, tables.log, "id", [{**row, "mac": self._mac(row)}])

    def root(self) -> bytes:
        """Return the root of the tree as it stands."""
        return self._frontier.root()

    def hand_over(self, signer: Signs) -> None:
        """Store the frontier, authenticated for another key."""
        self._key, self._key_id = derived_key(signer, _PURPOSE), getattr(signer, "key_id", None)
        self.flush()

    def issue(self, signer: Signer, origin: str) -> tuple[Checkpoint, str]:
        """Sign a checkpoint of the tree as it stands and store it as the newest of ``origin``.

        Raises:
            SigningKeyError: the signer has no Ed25519 key.
            NoteError: the origin cannot be the name of a note's key.
        """
        checkpoint = Checkpoint(origin, self._frontier.size, self._frontier.root())
        note = issue_checkpoint(checkpoint, signer)
        row = {"origin": origin, "size": checkpoint.size, "note": note, "at": datetime.now(UTC).isoformat()}
        upsert_rows(self._connection, tables.checkpoint, "origin", [row])
        return checkpoint, note

    def _keep(self, nodes: Sequence[tuple[Node, bytes]]) -> None:
        rows = [{"level": level, "place": place, "hash": value} for (level, place), value in nodes]
        insert_rows(self._connection, tables.log_node, rows)

    def _stored(self, size: int) -> Frontier | None:
        row = self._connection.execute(select(tables.log)).first()
        if row is None:
            return Frontier() if size == 0 else None
        values = {name: value for name, value in row._mapping.items() if name != "mac"}
        ours = row.key_id == self._key_id
        if row.size != size or (ours and not hmac.compare_digest(str(self._mac(values)), str(row.mac))):
            return None
        try:
            return Frontier(size, [bytes.fromhex(part) for part in row.frontier.split()])
        except (ProofError, ValueError, AttributeError):
            return None

    def _rebuilt(self, size: int) -> Frontier:
        """From the envelopes themselves: the stored frontier was damaged, or the ledger is older than the log."""
        _log.error(
            "phionyx-letta: the stored end of the log is not this key's or was damaged: %s envelopes are hashed anew",
            size,
        )
        self._connection.execute(tables.log_node.delete())
        frontier, envelope = Frontier(), tables.envelope.c
        nodes: list[tuple[Node, bytes]] = []
        for start in range(0, size, _ROWS):
            part = (
                select(envelope.body).where(envelope.seq >= start, envelope.seq < start + _ROWS).order_by(envelope.seq)
            )
            bodies = self._connection.execute(part).scalars()
            nodes += grow(frontier, [leaf_hash(body.encode("utf-8", "surrogatepass")) for body in bodies])
        self._keep(nodes)
        return frontier

    def _mac(self, row: Any) -> str | None:
        if self._key is None:
            return None
        return hmac.digest(self._key, canonical_json(dict(row)).encode("ascii"), "sha256").hex()


def sql_nodes(connection: Connection) -> TiledNodes:
    """Where proofs over a ledger's log get their hashes from."""
    envelope, node = tables.envelope.c, tables.log_node.c

    def leaves(start: int, end: int) -> list[bytes]:
        wanted = select(envelope.leaf).where(envelope.seq >= start, envelope.seq < end).order_by(envelope.seq)
        return [bytes(value) for value in connection.execute(wanted).scalars()]

    def upper(nodes: Sequence[Node]) -> list[bytes]:
        wanted = or_(*(and_(node.level == level, node.place == place) for level, place in nodes))
        rows = connection.execute(select(tables.log_node).where(wanted))
        found = {(row.level, row.place): bytes(row.hash) for row in rows}
        return [found[one] for one in nodes if one in found]

    return TiledNodes(leaves, upper)


def stored_checkpoint(connection: Connection, origin: str) -> str | None:
    """The newest checkpoint of a log that the ledger keeps, as a note; None if there is none."""
    column = tables.checkpoint.c
    return connection.execute(select(column.note).where(column.origin == origin)).scalar()


def stored_size(connection: Connection, origin: str) -> int:
    """Of the log in that checkpoint; -1 if there is none."""
    column = tables.checkpoint.c
    found = connection.execute(select(column.size).where(column.origin == origin)).scalar()
    return -1 if found is None else found


def default_origin(key_id: str) -> str:
    """The name of a key's log where the operator gave none: checkpoints of two keys are told apart by it."""
    return "phionyx-letta/" + (re.sub(r"[^A-Za-z0-9._:-]", "-", key_id) or "log")


def derived_key(signer: Signs | None, purpose: str) -> bytes | None:
    """What authenticates rows of the ledger that are no envelopes; None where the signer has no key to derive it from."""
    derive = getattr(signer, "derive_key", None)
    try:
        return derive(purpose) if derive is not None else None
    except SigningKeyError:  # unsigned
        return None
