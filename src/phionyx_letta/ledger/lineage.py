"""Which keys a host believes: its own, those it took over from, each for its time, and others it was told to trust."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, inspect, select

from phionyx_letta.envelope import Signs
from phionyx_letta.keys import ROTATION, Statement, statements_in
from phionyx_letta.ledger import tables
from phionyx_letta.merkle import MAX_SIZE
from phionyx_letta.signing import Ed25519Verifier, load_verifier
from phionyx_letta.signing_command import CommandSigner

__all__ = ["OwnKeys", "lineage", "own_keys", "stored_statements"]


def stored_statements(connection: Connection) -> list[str]:
    """Return the statements about keys that a ledger keeps, as notes, oldest first; a ledger older than them has none."""
    if not inspect(connection).has_table(tables.key_statement.name):
        return []
    column = tables.key_statement.c
    return list(connection.execute(select(column.note).order_by(column.id)).scalars())


def lineage(connection: Connection, public_key: str) -> list[Statement]:
    """Return the rotations that led to this key, the newest first.

    Each is signed by the key it led to, so whoever has that key has agreed to it: nobody else can put one in.
    """
    said = [one for one in statements_in(stored_statements(connection)) if one.kind == ROTATION]
    found: list[Statement] = []
    while True:
        key = found[-1].signer if found else public_key
        before = next((one for one in said if one.subject == key and one not in found and one.signed()), None)
        if before is None:
            return found
        found.append(before)


def own_keys(connection: Connection, public_key: str) -> list[str]:
    """Return this key and those it took over from, the newest first."""
    return [public_key, *(said.signer for said in lineage(connection, public_key))]


class OwnKeys:
    """Says whether one of them made a signature."""

    def __init__(self, connection: Connection, signer: Signs, trusted: Sequence[str] = ()) -> None:
        """Look up what the signer's key took over from.

        Args:
            connection: to the ledger.
            signer: of this host.
            trusted: other public keys, of hosts on the same database: 64 hex digits or files.

        Raises:
            SigningKeyError: one of them is no public key.
        """
        public: str | None = getattr(signer, "public_key_hex", None)
        self._others = [load_verifier(one) for one in trusted]
        self._quick = None if isinstance(signer, CommandSigner) else signer  # that one is somebody else's program
        self._epochs: list[tuple[Ed25519Verifier, int, int]] = []
        self.rotations = lineage(connection, public) if public is not None else []
        """That led to the signer's key, the newest first."""
        end, key = MAX_SIZE, public
        for said in self.rotations:
            self._epochs.append((load_verifier(said.subject), said.checkpoint.size, end))
            end, key = said.checkpoint.size, said.signer
        if key is not None:
            self._epochs.append((load_verifier(key), 0, end))
        self._start = self._epochs[0][1] if self._epochs else 0

    @property
    def public_keys(self) -> list[str]:
        """Every one, the signer's first."""
        return [one.public_key_hex for one in (*(verifier for verifier, _, _ in self._epochs), *self._others)]

    def verifies(self, current: str, signature: str, place: int | None = None) -> bool:
        """Return whether a key that is believed at this place of the log signed this hash; at any, where none is given.

        Signing again is the quicker way to recognise one's own (measured: half the time).
        """
        if (
            self._quick is not None
            and (place is None or place >= self._start)
            and self._quick.sign(current) == signature
        ):
            return True
        for verifier, start, end in self._epochs:
            if (place is None or start <= place < end) and verifier.verify(current, signature):
                return True
        return any(one.verify(current, signature) for one in self._others)
