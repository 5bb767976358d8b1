"""What `doctor` says of the log and its sinks: what the sealers wrote about them. That is not authenticated."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, func, select

from phionyx_letta.cli.examine import FAIL, OK, WARN, Finding
from phionyx_letta.ledger import tables

__all__ = ["examine_log"]

_SILENCE = 60.0


def examine_log(connection: Connection) -> tuple[list[Finding], dict[str, Any]]:
    """Look at the newest checkpoints and at how every sink of a sealer stands."""
    envelopes = connection.execute(select(func.count()).select_from(tables.envelope)).scalar_one()
    signed = connection.execute(select(func.max(tables.checkpoint.c.size))).scalar()
    sinks = [_sink(row) for row in connection.execute(select(tables.sink).order_by(tables.sink.c.name))]
    findings = [_checkpoint(envelopes, signed)]
    if not sinks:
        message = "checkpoints are kept in the database alone, so a cut end or a rollback cannot be shown"
        message += "; PHIONYX_LETTA_SINKS takes them out"
        findings.append(Finding("sinks", OK, message))
    findings += [_standing(one, envelopes) for one in sinks]
    return findings, {"envelopes": envelopes, "checkpoint": signed, "sinks": sinks}


def _checkpoint(envelopes: int, signed: int | None) -> Finding:
    if signed is None:
        if not envelopes:
            return Finding("log", OK, "nothing is sealed yet")
        return Finding(
            "log",
            WARN,
            "no checkpoint of the log was ever signed",
            "run a sealer with an Ed25519 key (`phionyx-letta keygen`)",
        )
    if signed > envelopes:
        message = f"a checkpoint was signed at {signed} envelopes, and {envelopes} are here: the end is missing"
        return Finding("log", FAIL, message, "run `phionyx-letta verify --checkpoint …`")
    return Finding("log", OK, f"the newest checkpoint covers {signed} of {envelopes} envelopes")


def _sink(row: Any) -> dict[str, Any]:
    try:
        info = json.loads(row.info)
        seen = datetime.fromisoformat(row.seen_at)
        silent = (datetime.now(UTC) - seen).total_seconds()
    except (ValueError, TypeError, RecursionError):
        info, silent = {}, float("inf")
    info = info if isinstance(info, dict) else {}
    return {**info, "name": str(row.name), "silent_s": None if silent == float("inf") else round(max(0.0, silent), 1)}


def _standing(sink: dict[str, Any], envelopes: int) -> Finding:
    delivered, failing = sink.get("delivered_size"), sink.get("failing_since")
    check = f"sink {sink['name'].partition(' ')[2] or sink['name']}"
    has = f"has the checkpoint at {delivered}" if isinstance(delivered, int) else "has no checkpoint yet"
    if failing:
        message = f"{has} of {envelopes} envelopes; failing since {failing}, {sink.get('failures')} times: {sink.get('last_error')}"
        return Finding(check, FAIL, message, "mend the cause: it is tried again by itself, and nothing is lost")
    if sink["silent_s"] is None or sink["silent_s"] > _SILENCE:
        return Finding(check, WARN, f"{has}; its sealer has not told of it for a while", "start an armed worker")
    return Finding(check, OK, f"{has} of {envelopes} envelopes")
