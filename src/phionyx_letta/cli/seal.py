"""`seal` and `baseline`: what a running server does by itself, done now."""

from __future__ import annotations

import os
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any

from phionyx_letta.cli.failures import FAILED, NOT_MEASURED, OK, CommandError
from phionyx_letta.cli.ledgers import database_url, ledger_name, open_database, shown_url
from phionyx_letta.cli.options import Json, Ledger
from phionyx_letta.cli.output import answer, safe

if TYPE_CHECKING:
    from rich.console import Console

    from phionyx_letta.ledger.sql import SqlLedger
    from phionyx_letta.plugin.runtime import PluginKey
    from phionyx_letta.plugin.sealer import SealReport
    from phionyx_letta.settings import Settings

__all__ = ["baseline", "check_key_fits", "existing_key", "require_letta", "seal", "sealed", "signing_key"]

PATIENCE = 30.0  # s, while another process seals


def seal(ledger: Ledger = None, as_json: Json = False) -> int:
    """Sign and chain what waits in the outbox, with the key of the settings.

    For a server that was stopped before it had sealed everything. Exit 1 where a row was refused: it was not written by a
    process that holds the key.
    """
    name, key = ledger_name(ledger), signing_key()
    with open_database(name) as database:
        check_key_fits(database, key)
        result = sealed(database, key)
    answer(result, as_json=as_json, show=lambda console: _show_seal(console, result))
    return _code(result)


def baseline(ledger: Ledger = None, as_json: Json = False) -> int:
    """Record what blocks older than the plugin hold now, so that their history has a beginning; then seal.

    A running server does this at its start unless PHIONYX_LETTA_BASELINE=off.
    """
    name, key = ledger_name(ledger), signing_key()
    with open_database(name, empty_is_fine=True) as database:
        require_letta(database)
        _create_tables(name)
        before, result = _record(database, key)
    result = {"blocks": before, **result}
    answer(result, as_json=as_json, show=lambda console: _show_baseline(console, result))
    return _code(result)


def existing_key(settings: Settings) -> PluginKey | None:
    """The key a server would sign with here, but none is generated; None where none exists yet.

    Raises:
        PhionyxError: it is malformed or cannot be read, or no home directory is known.
    """
    from phionyx_letta.plugin.runtime import load_key

    if settings.signing_key or settings.signing_command or os.environ.get("PHIONYX_LETTA_DEMO", "").strip() == "1":
        return load_key(settings)
    return load_key(settings) if (settings.home_path() / "signing.key").exists() else None


def signing_key() -> PluginKey:
    """The key of the settings.

    Raises:
        CommandError: there is none here.
    """
    from phionyx_letta.settings import load_settings

    key = existing_key(load_settings())
    if key is None:
        raise CommandError(
            "no signing key is set here", "set PHIONYX_LETTA_SIGNING_KEY to the key file of the Letta server"
        )
    return key


def check_key_fits(database: SqlLedger, key: PluginKey) -> None:
    """Make sure that what waits is this key's: sealing with a wrong one would mark genuine rows as refused.

    Raises:
        CommandError: it is another key's.
    """
    from sqlalchemy import select

    from phionyx_letta.ledger import tables
    from phionyx_letta.plugin.outbox import open_payload

    outbox = tables.outbox.c
    query = select(outbox.payload).where(outbox.refused.is_(None)).order_by(outbox.id).limit(1000)
    with database.engine.connect() as connection:
        opened = [open_payload(payload) for payload in connection.execute(query).scalars()]
    named = {str(fields["key_id"]) for fields in opened if fields is not None}
    if named and key.outbox.key_id not in named:
        raise CommandError(
            f"what waits was recorded with the key {safe(', '.join(sorted(named))[:200])}, and this is {key.outbox.key_id}",
            "set PHIONYX_LETTA_SIGNING_KEY to the key file of the Letta server",
        )


def sealed(database: SqlLedger, key: PluginKey) -> dict[str, Any]:
    """Seal everything that can be sealed; wait a while where another process is at it."""
    from phionyx_letta.plugin.checkpointing import checkpoint_policy, trusted_hosts
    from phionyx_letta.plugin.sealer import Sealer, SealReport, pending
    from phionyx_letta.settings import load_settings

    settings = load_settings()
    sealer = Sealer(database, key, checkpoints=checkpoint_policy(key, settings), trusted=trusted_hosts(settings))
    total, deadline = SealReport(), time.monotonic() + PATIENCE
    while True:
        report = sealer.seal_pending()
        _add(total, report)
        if not report.busy or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    with database.engine.connect() as connection:
        outbox = pending(connection)
    return {
        "ledger": shown_url(database),
        "key_id": key.outbox.key_id,
        "sealed": total.sealed,
        "refused": total.refused,
        "refusals": total.refusals,
        "waiting": outbox["waiting"],
        "busy": total.busy,
    }


def _add(total: SealReport, report: SealReport) -> None:
    total.sealed += report.sealed
    total.refused += report.refused
    total.refusals += report.refusals
    total.busy = report.busy


def _record(database: SqlLedger, key: PluginKey) -> tuple[int, dict[str, Any]]:
    """Record and seal in turn: a block whose write waits in the outbox counts as recorded once that write is sealed."""
    from phionyx_letta.ledger.salts import SaltKey
    from phionyx_letta.plugin.baseline import record_baseline, unrecorded_blocks
    from phionyx_letta.settings import load_settings

    salts, salted = SaltKey.of(key.signer), load_settings().commitments == "salted"
    with database.engine.connect() as connection:
        before = unrecorded_blocks(connection)
    worker_id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    deadline = time.monotonic() + PATIENCE
    totals: dict[str, Any] = {"sealed": 0, "refused": 0, "refusals": []}
    while True:
        left = record_baseline(database, key.outbox, worker_id, salts=salts, salted=salted)
        result = sealed(database, key)
        for name, value in totals.items():
            totals[name] = value + result[name]
        if not left or time.monotonic() > deadline:
            break
        if result["sealed"]:
            deadline = time.monotonic() + PATIENCE
        else:
            time.sleep(0.1)
    with database.engine.connect() as connection:
        return before, {**result, **totals, "unrecorded": unrecorded_blocks(connection)}


def require_letta(database: SqlLedger) -> None:
    """Make sure that this is the database of a Letta server.

    Raises:
        CommandError: it is not.
    """
    from sqlalchemy import inspect

    if database.engine.dialect.name != "postgresql" or not inspect(database.engine).has_table("block"):
        raise CommandError(
            f"{shown_url(database)} is not the database of a Letta server", "give the URL of LETTA_PG_URI"
        )


def _create_tables(name: str) -> None:
    from phionyx_letta.ledger.sql import SqlLedger

    SqlLedger(database_url(name)).close()


def _code(result: dict[str, Any]) -> int:
    if result["refused"]:
        return FAILED
    return NOT_MEASURED if result["busy"] or result["waiting"] or result.get("unrecorded") else OK


def _show_seal(console: Console, result: dict[str, Any]) -> None:
    line = (
        f"sealed {result['sealed']}, refused {result['refused']}, waiting {result['waiting']}  (key {result['key_id']})"
    )
    console.print(line, soft_wrap=True)
    for refusal in result["refusals"]:
        console.print(f"  {safe(refusal)}", style="red", soft_wrap=True)
    if result["busy"]:
        console.print("  another process is sealing; run this again if rows go on waiting")
    elif result["waiting"]:
        console.print("  what waits was recorded by a running worker with another key, which will seal it")


def _show_baseline(console: Console, result: dict[str, Any]) -> None:
    console.print(f"{result['blocks']} blocks had no record, {result['unrecorded']} have none now")
    _show_seal(console, result)
