"""`keys`: replace the signing key, revoke one, and show or hand on what is stated about keys."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phionyx_letta.cli.failures import FAILED, CommandError
from phionyx_letta.cli.ledgers import database_url, ledger_name, open_database
from phionyx_letta.cli.options import Json, Ledger
from phionyx_letta.cli.output import answer, safe

if TYPE_CHECKING:
    from rich.console import Console

    from phionyx_letta.checkpoint import Checkpoint
    from phionyx_letta.ledger.sql import SqlLedger
    from phionyx_letta.plugin.runtime import PluginKey
    from phionyx_letta.settings import Settings
    from phionyx_letta.signing import Signer

__all__ = ["keys"]

keys = typer.Typer(
    help="Replace the signing key, revoke one, show what is stated about keys: docs/keys.md.", no_args_is_help=True
)


@keys.command(short_help="Let a new key take over, and destroy the old one.")
def rotate(
    new: Annotated[
        Path | None,
        typer.Option(
            "--new", metavar="FILE", help="The new key's file, made if missing. Default: it takes the old one's name."
        ),
    ] = None,
    new_command: Annotated[
        str | None, typer.Option("--new-command", metavar="COMMAND", help="The new key is signed with by this program.")
    ] = None,
    new_public: Annotated[
        str | None, typer.Option("--new-public-key", metavar="KEY", help="And this is its public key.")
    ] = None,
    keep_old: Annotated[bool, typer.Option("--keep-old", help="Do not destroy the old private key.")] = False,
    ledger: Ledger = None,
    as_json: Json = False,
) -> int:
    """Let a new key take over from where the log stands, endorsed by the old one, and destroy the old one's file.

    Stop the servers first: what waits is sealed with the old key, and servers that go on with it seal nothing more. Verifiers keep
    the public key they have: the statement leads them from it to the new one.
    """
    from phionyx_letta.cli.keyfiles import KeyFiles, new_signer
    from phionyx_letta.settings import load_settings

    settings, name = load_settings(), ledger_name(ledger)
    files = KeyFiles.of(settings, new)
    _create_tables(name)
    with open_database(name) as database:
        note = _interrupted(database, files)
        if note is None:
            old = _current(settings)
            _refuse_living(database, old)
            _seal_all(database, old)
            note = _rotated(database, old.signer, new_signer(files, new_command, new_public), settings)
        result = _told(database, note, settings)
    result["old_key_destroyed"] = files.finish(keep_old=keep_old, command=bool(new_command))
    result["use"] = files.use(new_command, new_public)
    answer(result, as_json=as_json, show=lambda console: _show(console, result))
    return 0


@keys.command(short_help="Believe a key only up to a place in the log.")
def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The public key: 64 hex digits or a .pub file.")],
    since: Annotated[
        str,
        typer.Option("--from", metavar="DATE", help="From when on it may have been somebody else's: ISO 8601, UTC."),
    ],
    checkpoint: Annotated[
        list[str] | None,
        typer.Option("--checkpoint", metavar="PATH", help="Checkpoints from outside that may show what is older."),
    ] = None,
    witness: Annotated[
        list[str] | None,
        typer.Option("--witness", metavar="VKEY", help="Verifier key of a witness, whose times are believed."),
    ] = None,
    up_to: Annotated[
        int | None,
        typer.Option("--up-to", metavar="SIZE", help="You know that the checkpoint of this size is older than DATE."),
    ] = None,
    nothing: Annotated[bool, typer.Option("--nothing", help="Believe nothing that the key signed.")] = False,
    ledger: Ledger = None,
    as_json: Json = False,
) -> int:
    """Say, signed with the current key, from when on another one is not believed.

    Times inside envelopes are the thief's word. What counts is the largest checkpoint from outside that is shown to be older than
    DATE: by a witness's cosignature, or by you (--up-to). Give the statement to whoever verifies: `keys history --output`.
    """
    from phionyx_letta.cli.revoking import older_checkpoint
    from phionyx_letta.keys import issue_revocation
    from phionyx_letta.ledger.statements import store_statement
    from phionyx_letta.settings import load_settings
    from phionyx_letta.signing import load_verifier

    settings, name, public = load_settings(), ledger_name(ledger), load_verifier(key).public_key_hex
    at, current = _date(since), _current(settings)
    if public == getattr(current.signer, "public_key_hex", None):
        raise CommandError(
            "this is the key that would have to sign the revocation",
            "`phionyx-letta keys rotate` first, then revoke it",
        )
    _create_tables(name)
    with open_database(name) as database:
        origin = _origin(settings, current.signer)
        point = older_checkpoint(database, public, at, checkpoint or [], witness or [], up_to, origin, nothing=nothing)
        note = issue_revocation(point, current.signer, public, at)
        with database.writing() as connection:
            assert connection is not None
            store_statement(connection, note)
        result = _told(database, note, settings)
    answer(result, as_json=as_json, show=lambda console: _show(console, result))
    return 0


@keys.command(short_help="Show what is stated about keys, or write it to a file.")
def history(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the signed statements: `verify --keys` reads them."),
    ] = None,
    publish: Annotated[bool, typer.Option("--publish", help="Bring them to the sinks again.")] = False,
    ledger: Ledger = None,
    as_json: Json = False,
) -> int:
    """Show the rotations and revocations this ledger keeps; their signatures are checked by `verify`."""
    from phionyx_letta.keys import statements_in
    from phionyx_letta.ledger.lineage import stored_statements
    from phionyx_letta.settings import load_settings

    undelivered: list[str] = []
    with open_database(ledger_name(ledger)) as database:
        with database.engine.connect() as connection:
            notes = stored_statements(connection)
        for note in notes if publish else ():
            undelivered += [one for one in _deliver(database, note, load_settings()) if one not in undelivered]
    if output is not None:
        if output.exists():
            raise CommandError(f"{output} exists", "choose another path")
        output.write_text("\n".join(notes), encoding="utf-8")
    found = [
        {"kind": one.kind, "signer": one.signer, "subject": one.subject, "at": one.at, "log_size": one.checkpoint.size}
        for one in statements_in(notes)
    ]
    result = {"statements": found, "output": None if output is None else str(output), "undelivered": undelivered}
    answer(result, as_json=as_json, show=lambda console: _show_history(console, result))
    return FAILED if undelivered else 0


def _current(settings: Settings) -> PluginKey:
    from phionyx_letta.cli.seal import existing_key

    key = existing_key(settings)
    if key is None or key.signer.algorithm != "ed25519":
        raise CommandError("no Ed25519 signing key is set here", "run this where the server's settings are")
    return key


def _origin(settings: Settings, signer: Signer) -> str:
    from phionyx_letta.ledger.tree import default_origin

    return settings.log_origin or default_origin(str(signer.key_id))


def _create_tables(name: str) -> None:
    from phionyx_letta.ledger.sql import SqlLedger

    with open_database(name):
        pass  # an error of its own where nothing was ever recorded
    SqlLedger(database_url(name)).close()


def _refuse_living(database: SqlLedger, key: PluginKey) -> None:
    """A worker with the old key would go on recording what nobody can seal then."""
    from sqlalchemy import func, select

    from phionyx_letta.ledger import tables
    from phionyx_letta.plugin.sealer import FOREIGN_KEY_PATIENCE

    column = tables.worker.c
    with database.engine.connect() as connection:
        now = connection.execute(select(func.now())).scalar_one()
        recent = column.seen_at > now - FOREIGN_KEY_PATIENCE
        living = connection.execute(
            select(column.worker_id).where(column.armed, column.key_id == key.outbox.key_id, recent)
        )
        found = living.scalars().first()
    if found is not None:
        raise CommandError(
            f"the worker {safe(found)} runs with this key",
            "stop all servers of this database, wait half a minute, try again",
        )


def _seal_all(database: SqlLedger, key: PluginKey) -> None:
    from phionyx_letta.cli.seal import check_key_fits, sealed

    check_key_fits(database, key)
    result = sealed(database, key)
    if result["busy"] or result["waiting"]:
        raise CommandError("not everything that waits could be sealed", "stop all servers of this database, try again")


def _rotated(database: SqlLedger, old: Signer, new: Signer, settings: Settings) -> str:
    from phionyx_letta.ledger.statements import rotate as rotate_in

    return rotate_in(database, old, new, _origin(settings, old))


def _interrupted(database: SqlLedger, files: Any) -> str | None:
    """The statement of a rotation that was recorded but not brought to its end."""
    from phionyx_letta.keys import statements_in
    from phionyx_letta.ledger.lineage import stored_statements

    public = files.waiting()
    if public is None:
        return None
    with database.engine.connect() as connection:
        said = [one for one in statements_in(stored_statements(connection)) if one.subject == public]
    if not said or files.holds() not in (None, said[-1].signer):
        return None
    return str(said[-1].note)


def _told(database: SqlLedger, note: str, settings: Settings) -> dict[str, Any]:
    from phionyx_letta.keys import Statement

    said = Statement.parse(note)
    return {
        "kind": said.kind,
        "signer": said.signer,
        "subject": said.subject,
        "at": said.at,
        "log_size": said.checkpoint.size,
        "undelivered": _deliver(database, note, settings),
    }


def _deliver(database: SqlLedger, note: str, settings: Settings) -> list[str]:
    """Bring a statement to the sinks; return what did not take it, and why."""
    from phionyx_letta.errors import PhionyxError
    from phionyx_letta.keys import Statement
    from phionyx_letta.ledger.log.opening import open_sinks
    from phionyx_letta.ledger.log.sink import Published

    said = Statement.parse(note)
    failed = []
    for sink in open_sinks(settings.sinks, [said.signer, said.subject], header=settings.sink_header):
        point: Checkpoint = said.checkpoint
        try:
            sink.deliver(Published(point, note, database.consistency_proof))
        except PhionyxError as error:
            failed.append(f"{sink.name}: {error}")
    return failed


def _date(text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise CommandError(
            f"{safe(text)!r} is no date", "give for example 2026-01-31 or 2026-01-31T12:00:00Z"
        ) from None
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at


def _show(console: Console, result: dict[str, Any]) -> None:
    from phionyx_letta.keys import ROTATION

    if result["kind"] == ROTATION:
        console.print(
            f"the key {result['subject']} seals from envelope {result['log_size']} of the log on", soft_wrap=True
        )
        console.print(
            "the old private key was overwritten and removed (copies, backups and snapshots are yours to destroy)"
            if result["old_key_destroyed"]
            else "the old private key is still there: destroy it, or a later theft can rewrite the past",
            soft_wrap=True,
        )
        console.print(f"start the servers with: {safe(result['use'])}", soft_wrap=True)
    else:
        console.print(
            f"the key {result['subject']} is believed for the first {result['log_size']} envelopes of the log and no further",
            soft_wrap=True,
        )
        console.print(
            "give the statement to whoever verifies: phionyx-letta keys history --output FILE", soft_wrap=True
        )
    for one in result["undelivered"]:
        console.print(
            f"not delivered to {safe(one)}; `keys history --publish` tries again", style="yellow", soft_wrap=True
        )


def _show_history(console: Console, result: dict[str, Any]) -> None:
    for one in result["statements"]:
        console.print(
            f"{one['at']}  {one['kind']}  {one['subject']}  at {one['log_size']} envelopes, by {one['signer']}",
            soft_wrap=True,
        )
    if not result["statements"]:
        console.print("nothing is stated about keys")
    for one in result["undelivered"]:
        console.print(f"not delivered to {safe(one)}", style="yellow", soft_wrap=True)
