"""What the envelopes of an agent say its memory holds, for whoever compares: read without a secret, checked with public keys."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, func, select

from phionyx_letta.ledger import tables
from phionyx_letta.ledger.audit import verify_envelope
from phionyx_letta.letta_code.changes import block_id
from phionyx_letta.letta_code.cursor import SOURCE, read_cursor
from phionyx_letta.signing import PlacedVerifier, Verifier
from phionyx_letta.verification import OK

__all__ = ["Recorded", "read_recorded"]

_OID = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_MOST_NEWEST = 1000
_TOLD = 5


@dataclass
class Recorded:
    """What is recorded of one agent's memory."""

    envelope_at: str | None = None
    """The commit the newest envelope leads to."""
    at: str | None = None
    """The commit recording has come to: later than the one before, where commits changed no file. Not signed."""
    path: str = ""
    """Where the memory was. Not signed."""
    files: dict[str, str] = field(default_factory=dict)
    """Content hash by block id, of the newest envelope of each file."""
    doubts: list[str] = field(default_factory=list)
    """Why envelopes among them are not those of a known key, each reason once."""


def read_recorded(connection: Connection, verifier: Verifier | None, agent: str) -> Recorded:
    """Read it; without a verifier no signature is checked."""
    row = read_cursor(connection, None, agent)
    found = Recorded(at=_oid(row.at), path=row.path)
    prefix, doubts = block_id(agent, ""), dict[str, None]()
    for row in _newest_of_each_block(connection, agent):
        envelope, doubt = _checked(row, verifier)
        if doubt:
            doubts[doubt] = None
        block = _at(envelope, "mutation", "block_id")
        digest = _at(envelope, "mutation", "diff", "after_hash")
        if isinstance(block, str) and block.startswith(prefix) and isinstance(digest, str):
            found.files[block] = digest
    for row in _newest(connection, agent):
        envelope, doubt = _checked(row, verifier)
        letta = _at(envelope, "subject", "metadata", "letta")
        if isinstance(letta, dict) and letta.get("source") == SOURCE and "head" in letta:
            found.envelope_at = _oid(letta["head"])
            if doubt:
                doubts[doubt] = None
            break
    found.doubts = list(doubts)[:_TOLD]
    return found


def _newest_of_each_block(connection: Connection, agent: str) -> Sequence[Any]:
    columns = tables.envelope.c
    newest = select(func.max(columns.seq)).where(columns.trace_id == agent).group_by(columns.block_id)
    return connection.execute(select(columns.seq, columns.body).where(columns.seq.in_(newest))).all()


def _newest(connection: Connection, agent: str) -> Sequence[Any]:
    columns = tables.envelope.c
    query = select(columns.seq, columns.body).where(columns.trace_id == agent).order_by(columns.position.desc())
    return connection.execute(query.limit(_MOST_NEWEST)).all()


def _checked(row: Any, verifier: Verifier | None) -> tuple[Any, str | None]:
    """An envelope, and why it is not one that a key signed which was to be used there."""
    try:
        envelope = json.loads(row.body)
    except (ValueError, TypeError, RecursionError):
        return None, "an envelope is no JSON"
    doubt = _doubt(envelope, row.seq, verifier) if verifier is not None else None
    return envelope, doubt


def _doubt(envelope: Any, place: int, verifier: Verifier) -> str | None:
    report = verify_envelope(envelope, verifier=verifier)
    if report.findings:
        made = str(_at(envelope, "subject", "key_id"))[:100]
        return f"{report.findings[0].message} (made with {made}, known here {verifier.key_id})"
    if (
        report.dimensions["signatures"] != OK
    ):  # that alone is no fault of one envelope: its chain may be an unsigned one
        return "an envelope is not signed: anyone could have written it"
    if not isinstance(verifier, PlacedVerifier) or not verifier.needs_places:
        return None
    current, signature = envelope["integrity"]["current"], envelope["integrity"]["signature"]
    if verifier.verify_at(current, signature, place):
        return None
    return verifier.why_not(current, signature, place) or "its key was not to be used there"


def _at(found: Any, *names: str) -> Any:
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _oid(value: object) -> str | None:
    return value if isinstance(value, str) and _OID.fullmatch(value) else None
