"""One captured mutation as a row: its payload, what authenticates it, and the SQL that stores it.

A row is written in the transaction of the memory write it describes. The MAC, keyed from the signing key that lives only
in the process, is why an attacker who owns the database still cannot have a forged row signed; the nonce, unique in the
ledger, is why a copied row cannot be sealed twice (design, decision 2).
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Sequence
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

    def seal(self, mutation: dict[str, Any]) -> tuple[str, str]:
        """Payload and MAC of a captured mutation; adds version, nonce and key id."""
        payload = canonical_json(
            {**mutation, "v": PAYLOAD_VERSION, "nonce": secrets.token_hex(16), "key_id": self.key_id}
        )
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
) -> str:
    """Everything a capture does, as one simple-protocol query: one round trip.

    The savepoint keeps a failure of ours out of Letta's transaction. A trigger that drops rows silently is found by their count:
    the division then fails, and with it the capture. Values are dollar-quoted under a random tag, so that no setting of the
    server changes how they are read.

    Args:
        rows: payloads and MACs.
        lock_timeout_ms: how long to wait for an outbox that somebody has locked. None fails at once, with SQLSTATE 55P03;
            that is tried first, since setting the timeout and putting Letta's own back costs a third more (measured).
        salts: of a salted ledger. Where one is not good any more, the query fails with SQLSTATE ``STALE_SALT``.
    """
    tag = f"$p{secrets.token_hex(8)}$"
    values = ",".join(f"({tag}{payload}{tag},'{mac}')" for payload, mac in rows)
    if lock_timeout_ms is None:
        locked = "phionyx_outbox,phionyx_salt" if salts else "phionyx_outbox"
        before, after = f"lock table {locked} in row exclusive mode nowait;", ""
    else:
        before = (
            "select set_config('phionyx.lock_timeout',current_setting('lock_timeout'),true),"
            f"set_config('lock_timeout','{int(lock_timeout_ms)}',true);"
        )
        after = "set_config('lock_timeout',current_setting('phionyx.lock_timeout'),true),"
    return (
        f"savepoint phionyx_capture;{before}{_fresh_sql(salts)}"
        f"with kept as(insert into phionyx_outbox(payload,mac)values{values} returning 1)"
        f"select {after}{_good_sql(salts)}1/(case when count(*)={len(rows)} then 1 else 0 end)from kept;"
        "release savepoint phionyx_capture"
    )


def _fresh_sql(salts: SaltUse | None) -> str:
    """Inserts new salts, which waits for nobody."""
    if salts is None or not salts.fresh:
        return ""
    tag = f"$p{secrets.token_hex(8)}$"
    values = ",".join(
        f"('{name}',{tag}{block}{tag},decode('{wrapped.hex()}','hex'))" for name, block, wrapped in salts.fresh
    )
    return f"insert into phionyx_salt(name,block_id,wrapped)values{values};"


def _good_sql(salts: SaltUse | None) -> str:
    """An expression that fails if a salt that was relied on is not good any more; it is looked at without a lock."""
    if salts is None or not salts.relied_on:
        return ""
    names = ",".join(f"'{name}'" for name in salts.relied_on)
    found = f"select count(*)from phionyx_salt where name in({names})and not ended"
    return f"sqrt(case when({found})={len(salts.relied_on)} then 1 else -1 end),"


#: Undoes a failed capture; Letta's own work before it stays.
ROLLBACK_SQL = "rollback to savepoint phionyx_capture;release savepoint phionyx_capture"
