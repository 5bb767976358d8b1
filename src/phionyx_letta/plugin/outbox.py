"""One captured mutation as a row: its payload, what authenticates it, and the SQL that stores it.

A row is written in the transaction of the memory write it describes. The MAC, keyed from the signing key that lives only
in the process, is why an attacker who owns the database still cannot have a forged row signed; the nonce, unique in the
ledger, is why a copied row cannot be sealed twice (design, decision 2).
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from phionyx_letta.envelope import canonical_json
from phionyx_letta.signing import Signer

#: Version of the payload; the sealer refuses one it does not know.
PAYLOAD_VERSION = 1
_PURPOSE = "phionyx-letta/outbox/v1"
_TEXTS = ("nonce", "key_id", "at", "kind", "event", "block_id", "block_label", "producer")
_REQUIRED = {*_TEXTS, "v", "diff", "letta"}


@dataclass(frozen=True)
class OutboxKey:
    """Authenticates rows. Derived from the signing key, never stored."""

    key_id: str
    secret: bytes

    @classmethod
    def of(cls, signer: Signer) -> OutboxKey:
        """The outbox key of a signing key.

        Raises:
            SigningKeyError: the signer has no key (unsigned).
        """
        secret = signer.derive_key(_PURPOSE)
        return cls(str(signer.key_id), secret)

    def mac(self, payload: str) -> str:
        """HMAC-SHA256 of a payload, 64 hex digits."""
        return hmac.digest(self.secret, payload.encode("ascii"), "sha256").hex()

    def seal(self, mutation: dict[str, Any], nonce: str | None = None) -> tuple[str, str]:
        """Payload and MAC of a captured mutation; adds version, key id and a nonce where none is given."""
        nonce = nonce or secrets.token_hex(16)
        payload = canonical_json({**mutation, "v": PAYLOAD_VERSION, "nonce": nonce, "key_id": self.key_id})
        return payload, self.mac(payload)


def open_payload(payload: str) -> dict[str, Any] | None:
    """The fields of a payload, not yet authenticated; None if it is not one of ours."""
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not fields.keys() >= _REQUIRED or fields["v"] != PAYLOAD_VERSION:
        return None
    typed = (
        all(isinstance(fields[name], str) for name in _TEXTS)
        and isinstance(fields["diff"], dict | None)
        and isinstance(fields["letta"], dict)
    )
    return fields if typed else None


def authentic(key: OutboxKey, payload: str, mac: str) -> bool:
    """Whether this key made this MAC over this payload."""
    if not payload.isascii() or not mac.isascii():
        return False
    return hmac.compare_digest(key.mac(payload), mac)


@dataclass(frozen=True)
class SaltUse:
    """What a capture says of the salts its rows were made with."""

    fresh: Sequence[tuple[str, str, bytes]] = ()
    """Name, block and wrapped value of each that is new."""
    relied_on: Sequence[str] = ()
    """Names of those that were known before: they must still be good."""


#: SQLSTATE of a capture under a salt that was destroyed or ended meanwhile (invalid argument for a power function).
STALE_SALT = "2201F"


def capture_sql(
    rows: Sequence[tuple[str, str]], lock_timeout_ms: int | None = None, salts: SaltUse | None = None
) -> tuple[str, ...]:
    """The statements of a capture, which go as one simple-protocol query: one round trip. The last one is the INSERT.

    The savepoint keeps a failure of ours out of Letta's transaction. It stays open, until the transaction ends or a savepoint of
    Letta's around it does, so that the answer to the query is that of the INSERT: a trigger that drops rows silently shows in its
    count (asking for the count in SQL cost a third more, measured). Values are dollar-quoted under a random tag, so that no
    setting of the server changes how they are read.

    Args:
        rows: payloads and MACs.
        lock_timeout_ms: how long to wait for an outbox that somebody has locked. None fails at once, with SQLSTATE 55P03;
            that is tried first, since setting the timeout and putting Letta's own back costs a third more (measured).
        salts: of a salted ledger. Where one is not good any more, the query fails with SQLSTATE ``STALE_SALT``.
    """
    tag = f"$p{secrets.token_hex(8)}$"
    values = ",".join(f"({tag}{payload}{tag},'{mac}')" for payload, mac in rows)
    lock = "lock table phionyx_outbox in row exclusive mode"
    insert = f"insert into phionyx_outbox(payload,mac)values{values}"
    if lock_timeout_ms is None:
        locked = "phionyx_outbox,phionyx_salt" if salts else "phionyx_outbox"
        lock = f"lock table {locked} in row exclusive mode nowait"
        return "savepoint phionyx_capture", lock, *_salt_sql(salts), insert
    return (
        "savepoint phionyx_capture",
        "select set_config('phionyx.lock_timeout',current_setting('lock_timeout'),true),"
        f"set_config('lock_timeout','{int(lock_timeout_ms)}',true)",
        lock,
        *_salt_sql(salts),
        "select set_config('lock_timeout',current_setting('phionyx.lock_timeout'),true)",
        insert,
    )


def _salt_sql(salts: SaltUse | None) -> Iterator[str]:
    """New salts are inserted, which waits for nobody; the others are looked at, without a lock."""
    if salts is not None and salts.fresh:
        tag = f"$p{secrets.token_hex(8)}$"
        values = ",".join(
            f"('{name}',{tag}{block}{tag},decode('{wrapped.hex()}','hex'))" for name, block, wrapped in salts.fresh
        )
        yield f"insert into phionyx_salt(name,block_id,wrapped)values{values}"
    if salts is not None and salts.relied_on:
        names = ",".join(f"'{name}'" for name in salts.relied_on)
        good = f"(select count(*)from phionyx_salt where name in({names})and not ended)={len(salts.relied_on)}"
        yield f"select sqrt(case when {good} then 1 else -1 end)"


#: Undoes a failed capture; Letta's own work before it stays.
ROLLBACK_SQL = ("rollback to savepoint phionyx_capture", "release savepoint phionyx_capture")
