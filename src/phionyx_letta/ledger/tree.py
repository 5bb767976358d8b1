"""The log of the SQL ledger: an RFC 6962 tree over the sealed envelopes in sealing order, kept beside them.

Stored are the hash of each leaf in its envelope's row, the complete subtrees of 256 leaves and more, and the frontier the next batch
continues from (docs/log.md has the costs). Who edits these can spoil proofs and checkpoints, but not make ones that agree with
what was published before.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, and_, bindparam, literal, or_, select

from phionyx_letta._canonical import JSON_ERRORS
from phionyx_letta.checkpoint import Checkpoint, issue_checkpoint, open_checkpoint
from phionyx_letta.envelope import GENESIS_HASH, Signs, canonical_json, envelope_hash
from phionyx_letta.errors import NoteError, ProofError, SigningKeyError
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.bulk import insert_rows, upsert_rows
from phionyx_letta.ledger.lineage import OwnKeys
from phionyx_letta.ledger.log.nodes import TiledNodes, grow
from phionyx_letta.merkle import Frontier, Node, leaf_hash
from phionyx_letta.signing import Signer

__all__ = ["KnownLog", "LogWriter", "default_origin", "derived_key", "sql_nodes", "stored_checkpoint"]

_PURPOSE = "phionyx-letta/log/v1"
_ROWS = 100  # who owns the database can make each of them large

_HOLE = "the sealing order has a hole: envelopes were removed, or one was put in by hand"
_FOREIGN = (
    "an envelope is not signed by a key this host believes, or does not continue its chain: it was put in by hand, or by another"
    " host, whose public key is then to be named in PHIONYX_LETTA_TRUSTED_KEYS"
)
_REWRITTEN = "the log is not the one this process knew: sealed envelopes were changed in the database"

_log = logging.getLogger("phionyx_letta")


@dataclass(frozen=True)
class KnownLog:
    """The log as a process left it: all of it was sealed under its key, or checked."""

    frontier: Frontier
    heads: dict[str, str] | None
    """Of every chain at that size; None: not known, since what is stored of the log was always its own."""


class LogWriter:
    """The tree's end, in a transaction that holds the ledger's lock."""

    def __init__(
        self,
        connection: Connection,
        signer: Signs | None,
        size: int,
        known: KnownLog | None = None,
        trusted: Sequence[str] = (),
    ) -> None:
        """Take the tree up where the last batch left it.

        What is stored of it is believed if it has this key's MAC: else who can edit the database could have a checkpoint signed over
        a tree of his own. Otherwise the envelopes are hashed anew, from where this process knows the tree; and since whoever holds a
        checkpoint believes what it covers, each has to be signed by a key this host believes, and to continue its chain. A writer
        without a key signs no checkpoint and believes it as it stands.

        Args:
            connection: in a transaction that holds the ledger's lock.
            signer: authenticates the frontier.
            size: the number the next envelope gets.
            known: the log as this process left it, or an earlier state of it.
            trusted: public keys of other hosts on the same database.
        """
        self._connection = connection
        self._signer, self._trusted = signer, trusted
        self._key = derived_key(signer, _PURPOSE)
        self._key_id = getattr(signer, "key_id", None)
        self.whole = True
        """Whether the tree covers every envelope; False where the sealing order has a hole, or an envelope nobody this host believes
        has signed: then it does not grow any more."""
        self._heads = dict(known.heads) if known is not None and known.heads is not None else None
        stored = self._stored(size)
        if stored is not None:
            self.frontier = stored
            """The tree, or its part before the hole."""
            if known is None or known.frontier.size != size or known.frontier.hashes != stored.hashes:
                self._heads = None
        else:
            self.frontier = self._continued(size, known)

    @property
    def size(self) -> int:
        """How many leaves there are."""
        return self.frontier.size

    @property
    def known(self) -> KnownLog:
        """The log as it stands, for the next writer of this process."""
        return KnownLog(self.frontier, self._heads)

    def append(self, bodies: Sequence[str], heads: Iterable[tuple[str, str]]) -> list[bytes]:
        """Add envelopes, as they are stored; return their leaf hashes. Costs O(log n) beside hashing them.

        Args:
            bodies: of the envelopes.
            heads: the chain and the hash of each.
        """
        leaves = [leaf_hash(body.encode("ascii")) for body in bodies]
        if self.whole:
            start = self.frontier.size
            self._keep(grow(self.frontier, leaves), start)
            if self._heads is not None:
                self._heads.update(heads)
        return leaves

    def flush(self) -> None:
        """Store the frontier."""
        if not self.whole:
            return
        row = {
            "id": 1,
            "size": self.frontier.size,
            "frontier": " ".join(one.hex() for one in self.frontier.hashes),
            "key_id": self._key_id,
        }
        upsert_rows(self._connection, tables.log, "id", [{**row, "mac": self._mac(row)}])

    def root(self) -> bytes:
        """Return the root of the tree as it stands."""
        return self.frontier.root()

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
        checkpoint = Checkpoint(origin, self.frontier.size, self.frontier.root())
        note = issue_checkpoint(checkpoint, signer)
        row = {"origin": origin, "size": checkpoint.size, "note": note, "at": datetime.now(UTC).isoformat()}
        upsert_rows(self._connection, tables.checkpoint, "origin", [row])
        return checkpoint, note

    def _keep(self, nodes: Sequence[tuple[Node, bytes]], start: int) -> None:
        """Store subtrees finished since the tree had ``start`` leaves, in place of whatever may stand there."""
        if not nodes:
            return
        node = tables.log_node.c
        self._connection.execute(tables.log_node.delete().where(node.place >= literal(start).op(">>")(node.level)))
        rows = [{"level": level, "place": place, "hash": value} for (level, place), value in nodes]
        insert_rows(self._connection, tables.log_node, rows)

    def _stored(self, size: int) -> Frontier | None:
        row = self._connection.execute(select(tables.log).where(tables.log.c.id == 1)).first()
        if row is None:
            return Frontier() if size == 0 else None
        try:
            values = {name: value for name, value in row._mapping.items() if name != "mac"}
            if row.size == size and (self._key is None or hmac.compare_digest(self._mac(values) or "", row.mac)):
                return Frontier(size, [bytes.fromhex(part) for part in row.frontier.split()])
        except (*JSON_ERRORS, ProofError, AttributeError):  # a column holds something else than what was put there
            pass
        if row.key_id == self._key_id:  # else another host's key wrote it, which is in order
            _log.error("phionyx-letta: the stored end of the log was changed in the database; it is hashed anew")
        return None

    def _continued(self, size: int, known: KnownLog | None) -> Frontier:
        """From the envelopes themselves: another key wrote what is stored, or it was damaged, or the ledger is older than the log."""
        if known is not None and known.frontier.size > size:
            known = None
        checked = known.frontier if known is not None else Frontier()
        again = (
            known is None or self._heads is None
        )  # the heads have to be found first, by reading what was checked before
        frontier = Frontier() if again else Frontier(checked.size, checked.hashes)
        heads: dict[str, str] = {} if again or self._heads is None else self._heads
        believes = None
        if self._signer is not None and self._key is not None:
            believes = _Checks(OwnKeys(self._connection, self._signer, self._trusted).verifies, heads)
        start, nodes = frontier.size, list[tuple[Node, bytes]]()
        envelope = tables.envelope.c
        after = select(envelope.seq, envelope.body).where(envelope.seq >= bindparam("start")).order_by(envelope.seq)
        fault = None
        while frontier.size < size and fault is None:
            rows = self._connection.execute(after.limit(_ROWS), {"start": frontier.size}).all()
            fault = None if rows else _HOLE
            for row in rows:
                if row.seq != frontier.size or not isinstance(row.body, str):
                    fault = _HOLE
                elif believes is not None and not believes(row.body, row.seq, checked=row.seq < checked.size):
                    fault = _FOREIGN
                if fault is not None:
                    break
                nodes += grow(frontier, [leaf_hash(row.body.encode("utf-8", "surrogatepass"))])
                if frontier.size == checked.size and frontier.hashes != checked.hashes:
                    fault = _REWRITTEN
                    break
        self.whole, self._heads = fault is None, heads if believes is not None else None
        if fault is not None:
            _log.error(
                "phionyx-letta: %s (envelope %s); no checkpoint is signed until that is resolved: `phionyx-letta verify`"
                " says more",
                fault,
                frontier.size,
            )
        self._keep(nodes, start)
        return frontier

    def _mac(self, row: Any) -> str | None:
        if self._key is None:
            return None
        return hmac.digest(self._key, canonical_json(dict(row)).encode("ascii"), "sha256").hex()


class _Checks:
    """Tells whether an envelope is to stand under a checkpoint."""

    def __init__(self, verifies: Callable[[str, str, int], bool], heads: dict[str, str]) -> None:
        self._verifies, self._heads = verifies, heads

    def __call__(self, body: str, place: int, *, checked: bool) -> bool:
        """Take the next envelope; of one that was checked before only the head it leaves is noted."""
        try:
            envelope = json.loads(body)
            integrity, trace = envelope["integrity"], str(envelope["subject"].get("trace_id"))
            previous, current = integrity["previous"], integrity["current"]
            if not checked and (
                previous != self._heads.get(trace, GENESIS_HASH)
                or envelope_hash(envelope, previous) != current
                or not self._verifies(current, integrity["signature"], place)
            ):
                return False
        except (*JSON_ERRORS, LookupError, AttributeError):
            return False
        self._heads[trace] = current
        return True


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


def stored_checkpoint(connection: Connection, origin: str, public_keys: Sequence[str]) -> tuple[Checkpoint, str] | None:
    """The newest checkpoint of a log that the ledger keeps, and its note; None if there is none that one of these keys signed."""
    column = tables.checkpoint.c
    note = connection.execute(select(column.note).where(column.origin == origin)).scalar()
    if note is None:
        return None
    try:
        return open_checkpoint(note, public_keys, origin=origin).checkpoint, note
    except NoteError as error:
        _log.error("phionyx-letta: the stored checkpoint was changed in the database and is not used: %s", error)
        return None


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
