"""What `doctor` finds: about this environment, and about a ledger's database. Reads only; generates no key, imports no Letta."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phionyx_letta.cli.seal import existing_key
from phionyx_letta.errors import PhionyxError
from phionyx_letta.plugin.environment import pth_installed

if TYPE_CHECKING:
    from phionyx_letta.ledger.sql import SqlLedger

__all__ = ["FAIL", "OK", "WARN", "Finding", "examine_database", "examine_here"]

OK, WARN, FAIL = "ok", "warn", "fail"
SLOW_OUTBOX = 10.0  # s a row may wait before something is wrong
_LISTED = 5


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    status: str
    message: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return the JSON form."""
        return asdict(self)


def examine_here() -> tuple[list[Finding], str | None]:
    """Look at this environment; also gives the id of the signing key it has."""
    key, key_id = _key()
    return [_letta(), _activation(), key], key_id


def _letta() -> Finding:
    from phionyx_letta.plugin.activation import SUPPORTED

    wanted = " or ".join(SUPPORTED)
    try:
        found = version("letta")
    except PackageNotFoundError:
        return Finding("letta", OK, "none is installed here, and none is needed to verify or seal")
    if not _has_server():
        return Finding(
            "letta",
            WARN,
            f"letta {found} here is Letta Code or another program without the Python server; the plugin cannot arm it",
            f"to run an armed server: pip install 'phionyx-letta[letta]' (letta {wanted}) in an environment of its own",
        )
    if found in SUPPORTED:
        return Finding("letta", OK, f"letta {found} is installed here and supported")
    message = f"letta {found} is installed here; this release was tested with letta {wanted}"
    return Finding("letta", WARN, message, f"install letta=={SUPPORTED[-1]}")


def _has_server() -> bool:
    try:
        spec = find_spec("letta")
    except (ImportError, ValueError):
        return False
    places = (spec and spec.submodule_search_locations) or ()
    return any((Path(place) / "orm").is_dir() or (Path(place) / "orm.py").is_file() for place in places)


def _activation() -> Finding:
    if pth_installed():
        return Finding("activation", OK, "PHIONYX_LETTA_ENABLE=1 arms every Python process of this environment (.pth)")
    return Finding(
        "activation",
        WARN,
        "the .pth file is not installed here: PHIONYX_LETTA_ENABLE=1 alone arms nothing",
        "start the server with `phionyx-letta run -- letta server`, or reinstall phionyx-letta",
    )


def _key() -> tuple[Finding, str | None]:
    from phionyx_letta.settings import load_settings

    try:
        key = existing_key(load_settings())
    except PhionyxError as error:
        return Finding("key here", FAIL, error.message, error.remedy), None
    remedy = "`phionyx-letta keygen FILE`, then PHIONYX_LETTA_SIGNING_KEY=FILE"
    if key is None:
        return Finding(
            "key here", WARN, "no signing key is set here; a server started here generates one", remedy
        ), None
    if key.signer.algorithm != "ed25519":
        message = "signs with a published secret (PHIONYX_LETTA_DEMO): it proves nothing"
        return Finding("key here", WARN, message, remedy), str(key.signer.key_id)
    key_id = str(key.signer.key_id)
    return Finding("key here", OK, f"{key_id} from {key.source}"), key_id


def examine_database(ledger: SqlLedger, key_id: str | None) -> tuple[list[Finding], dict[str, Any]]:
    """Look at a ledger's database in one snapshot.

    Args:
        ledger: open for reading; its tables may be missing.
        key_id: of the key of this environment, if it has one.
    """
    from sqlalchemy import inspect

    from phionyx_letta.cli.examine_blocks import examine_blocks
    from phionyx_letta.cli.examine_log import examine_log
    from phionyx_letta.cli.examine_reviewers import examine_reviewers
    from phionyx_letta.cli.examine_sessions import examine_sessions
    from phionyx_letta.cli.examine_workers import examine_workers
    from phionyx_letta.cli.ledgers import shown_url
    from phionyx_letta.ledger import tables

    names = set(inspect(ledger.engine).get_table_names())
    missing = sorted(set(tables.metadata.tables) - names)
    details: dict[str, Any] = {"ledger": shown_url(ledger)}
    if missing:
        message = f"{shown_url(ledger)} answers, but nothing was ever recorded in it (no table {missing[0]})"
        return [Finding("ledger", FAIL, message, "start Letta with PHIONYX_LETTA_ENABLE=1 on this database")], details
    findings = [Finding("ledger", OK, f"{shown_url(ledger)} answers")]
    options = {"isolation_level": "REPEATABLE READ"} if ledger.engine.dialect.name == "postgresql" else {}
    with ledger.engine.connect().execution_options(**options) as connection:
        if ledger.engine.dialect.name == "postgresql" and "block" in names:
            more, details["workers"] = examine_workers(connection, key_id)
            findings += [*more, *examine_reviewers(details["workers"])]
        else:
            findings.append(
                Finding("workers", OK, "this is not a Letta server's database: no worker is expected to record here")
            )
        more, details["outbox"] = _outbox(connection)
        findings += more
        more, details["log"] = examine_log(connection)
        findings += more
        if ledger.engine.dialect.name == "postgresql" and "block" in names:
            more, details["blocks"] = examine_blocks(connection)
            findings += more
            more, details["sessions"] = examine_sessions(connection, details["workers"])
            findings += more
    return findings, details


def _outbox(connection: Any) -> tuple[list[Finding], dict[str, Any]]:
    from phionyx_letta.plugin.sealer import pending

    outbox = pending(connection)
    waiting, oldest = outbox["waiting"], outbox["oldest_s"]
    if not waiting:
        findings = [Finding("outbox", OK, "nothing waits to be sealed")]
    elif oldest < SLOW_OUTBOX:
        findings = [Finding("outbox", OK, f"{waiting} rows wait to be sealed, the oldest for {oldest:.1f} s")]
    else:
        message = f"{waiting} rows wait to be sealed, the oldest for {oldest:.0f} s: nobody seals"
        findings = [
            Finding("outbox", FAIL, message, "start an armed worker, or run `phionyx-letta seal` with the server's key")
        ]
    for row in outbox["refused"][:_LISTED]:
        remedy = "find out who wrote to phionyx_outbox; if a host has another key, give every host the same one"
        findings.append(Finding("outbox", FAIL, f"row {row['id']} was refused: {row['why']}", remedy))
    if len(outbox["refused"]) > _LISTED:
        findings.append(
            Finding("outbox", FAIL, f"and {len(outbox['refused']) - _LISTED} more refused rows", "--json lists them")
        )
    return findings, outbox
