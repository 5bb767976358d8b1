"""Salts of blocks: what makes a commitment to short content unguessable, and what is destroyed when it is forgotten.

A salt is 32 random bytes for one block. It is kept in the ledger's database only encrypted under a key that is derived from the
signing key, so that neither the database nor the key alone is enough to try contents against a hash; without its row nothing is
(docs/adr/0005). A destroyed salt leaves its name behind, which is in the envelopes, and nothing of its value.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, exists, select, update

from phionyx_letta.envelope import Signs
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.bulk import among
from phionyx_letta.ledger.tree import derived_key
from phionyx_letta.signing import Signer

__all__ = [
    "KeptSalt",
    "Salt",
    "SaltKey",
    "destroy_salts",
    "end_salts",
    "hand_over_salts",
    "named_salts",
    "read_salts",
    "salt_row",
    "salts_in_use",
]

_PURPOSE = "phionyx-letta/salt/v1"
_SALT_BYTES = 32
_NONCE_BYTES = 12


@dataclass(frozen=True)
class Salt:
    """One salt; its name stands in the envelopes it was used for."""

    name: str
    value: bytes = field(repr=False)


@dataclass(frozen=True)
class KeptSalt:
    """What the ledger keeps of one block's newest salt."""

    salt: Salt | None
    """None: it was destroyed, or this key cannot open it."""
    ended: bool = False
    """The next write takes a new one."""
    destroyed: bool = False


class SaltKey:
    """Encrypts salts for the database (AES-256-GCM, bound to block and name)."""

    def __init__(self, secret: bytes) -> None:
        """Use ``of``."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(secret)

    @classmethod
    def of(cls, signer: Signer) -> SaltKey:
        """The key derived from a signing key; all hosts of a salted ledger need the same one.

        Raises:
            SigningKeyError: the signer has no key (unsigned).
        """
        return cls(signer.derive_key(_PURPOSE))

    @staticmethod
    def new() -> Salt:
        """A new salt."""
        return Salt(secrets.token_hex(16), secrets.token_bytes(_SALT_BYTES))

    def wrapped(self, block_id: str, salt: Salt) -> bytes:
        """The salt as the database keeps it."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, salt.value, _bound(block_id, salt.name))

    def opened(self, block_id: str, name: str, wrapped: bytes) -> Salt | None:
        """The salt again; None where it was not wrapped with this key, for this block and name."""
        from cryptography.exceptions import InvalidTag

        try:
            value = self._cipher.decrypt(wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], _bound(block_id, name))
        except (InvalidTag, ValueError):
            return None
        return Salt(name, value) if len(value) == _SALT_BYTES else None


def salt_row(key: SaltKey, block_id: str, salt: Salt) -> dict[str, Any]:
    """The row of a new salt."""
    return {"name": salt.name, "block_id": block_id, "wrapped": key.wrapped(block_id, salt)}


def salts_in_use(connection: Connection) -> bool:
    """Whether this ledger has salted commitments: then it goes on salting, or the histories of its blocks would break."""
    return bool(connection.execute(select(exists(select(tables.salt.c.id)))).scalar())


def read_salts(connection: Connection, key: SaltKey, block_ids: Collection[str]) -> dict[str, KeptSalt]:
    """The newest salt of each of these blocks that ever had one."""
    salt = tables.salt.c
    rows = connection.execute(
        select(salt.block_id, salt.name, salt.wrapped, salt.ended)
        .where(among(connection, salt.block_id, block_ids))
        .order_by(salt.id)
    )
    kept: dict[str, KeptSalt] = {}
    for block_id, name, wrapped, ended in rows:
        opened = None if wrapped is None else key.opened(block_id, name, bytes(wrapped))
        if opened is None and wrapped is not None and block_id in kept:
            continue  # another key's, or garbage: it must not stand before a good one
        kept[block_id] = KeptSalt(opened, ended, destroyed=wrapped is None)
    return kept


def named_salts(connection: Connection, key: SaltKey, wanted: Iterable[tuple[str, str]]) -> dict[str, Salt]:
    """The salts of these (block, name) pairs that can be opened, by name."""
    names = {name: block_id for block_id, name in wanted}
    if not names:
        return {}
    salt = tables.salt.c
    rows = connection.execute(
        select(salt.name, salt.wrapped).where(among(connection, salt.name, set(names)), salt.wrapped.is_not(None))
    )
    opened = (key.opened(names[name], name, bytes(wrapped)) for name, wrapped in rows)
    return {salt.name: salt for salt in opened if salt is not None}


def destroy_salts(connection: Connection, names: Collection[str]) -> None:
    """Take away the values of these salts: what was committed to under them can be tried by nobody any more."""
    if names:
        salt = tables.salt
        gone = update(salt).where(among(connection, salt.c.name, names)).values(wrapped=None, ended=True)
        connection.execute(gone)


def end_salts(connection: Connection, names: Collection[str]) -> None:
    """The next write of each block takes a new salt, and these are destroyed when it is sealed."""
    if names:
        salt = tables.salt
        connection.execute(update(salt).where(among(connection, salt.c.name, names)).values(ended=True))


def hand_over_salts(connection: Connection, old: Signs | None, new: Signs) -> None:
    """Encrypt the salts for another signing key; those that are not the old one's are left."""
    keys = derived_key(old, _PURPOSE), derived_key(new, _PURPOSE)
    if keys[0] is None or keys[1] is None or not salts_in_use(connection):
        return
    before, after = SaltKey(keys[0]), SaltKey(keys[1])
    salt = tables.salt
    kept = select(salt.c.id, salt.c.block_id, salt.c.name, salt.c.wrapped).where(salt.c.wrapped.is_not(None))
    for row in connection.execute(kept).all():
        opened = before.opened(row.block_id, row.name, bytes(row.wrapped))
        if opened is not None:
            wrapped = after.wrapped(row.block_id, opened)
            connection.execute(update(salt).where(salt.c.id == row.id).values(wrapped=wrapped))


def _bound(block_id: str, name: str) -> bytes:
    return f"{name} {block_id}".encode("utf-8", "surrogatepass")
