"""`receipt`: one forgetting, for whoever asked for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phionyx_letta.cli.failures import FAILED, CommandError
from phionyx_letta.cli.options import Json, Ledger
from phionyx_letta.cli.output import answer, safe
from phionyx_letta.cli.show import one_entry
from phionyx_letta.cli.sources import Entry, Source, SqlSource, open_source
from phionyx_letta.errors import InvalidMutation

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["receipt"]


def receipt(
    ref: Annotated[
        str,
        typer.Argument(
            metavar="ENVELOPE", help="The first digits (4 or more) of the forgetting's hash; `log` shows it."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write it. Default: standard output.")
    ] = None,
    bare: Annotated[
        bool,
        typer.Option("--guessable", help="Also where the hashes in it are bare, so that short content can be guessed."),
    ] = False,
    ledger: Ledger = None,
    as_json: Json = False,
) -> int:
    """Write a receipt for something forgotten: who asked, why, when, which block and how much it held, but no content.

    Whoever has it checks it offline with `phionyx-letta verify receipt.json --key KEY`. It says whether the salt that the content
    was committed to under is destroyed.
    """
    from phionyx_letta.ledger.receipt import guessable, make_receipt

    with open_source(ledger) as source:
        entry = one_entry(source, ref, None)
        try:
            made = make_receipt(
                entry.envelope, destruction=_destruction(source, entry), inclusion=_inclusion(source, entry)
            )
        except InvalidMutation as error:
            raise CommandError(f"no receipt can be made: {error.message}", error.remedy, FAILED) from None
    if guessable(entry.envelope) and not bare:
        raise CommandError(
            "the hashes in this envelope are bare: short content could be guessed from a receipt",
            "--guessable writes it all the same; PHIONYX_LETTA_COMMITMENTS=salted prevents it for what comes",
            FAILED,
        )
    text = json.dumps(made, indent=2) + "\n"
    if output is None:
        print(text, end="")
        return 0
    try:
        with output.open("x", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        raise CommandError(f"{output} cannot be written: {error.strerror}", "choose another path") from None
    result = {"output": str(output), "salt": made["salt"], "checkpoint": made["inclusion"] is not None}
    answer(result, as_json=as_json, show=lambda console: _show(console, output, made))
    return 0


def _destruction(source: Source, entry: Entry) -> dict[str, Any] | None:
    """The later envelope that says that the salt was destroyed."""
    name = entry.letta.get("salt_before", entry.letta.get("salt"))
    if not isinstance(source, SqlSource) or not isinstance(name, str) or entry.letta.get("salt_destroyed") == name:
        return None
    for row in source.ledger.select(after=entry.seq or 0, block_id=str(entry.part("mutation").get("block_id"))):
        envelope = json.loads(row.body)
        if envelope["subject"]["metadata"].get("letta", {}).get("salt_destroyed") == name:
            return dict(envelope)
    return None


def _inclusion(source: Source, entry: Entry) -> dict[str, Any] | None:
    """The proof of its place in the log of the ledger's newest checkpoint; None where none covers it yet."""
    if not isinstance(source, SqlSource) or entry.seq is None:
        return None
    from sqlalchemy import select

    from phionyx_letta.checkpoint import Checkpoint
    from phionyx_letta.errors import NoteError, ProofError
    from phionyx_letta.ledger import tables
    from phionyx_letta.ledger.tree import sql_nodes
    from phionyx_letta.merkle import inclusion_proof
    from phionyx_letta.notes import parse_note

    column = tables.checkpoint.c
    newest = select(column.note).where(column.size > entry.seq).order_by(column.size.desc()).limit(1)
    with source.ledger.engine.connect() as connection:
        note = connection.execute(newest).scalar()
        if note is None:
            return None
        try:
            size = Checkpoint.parse(parse_note(note).text).size
            proof = inclusion_proof(sql_nodes(connection), entry.seq, size)
        except (NoteError, ProofError):
            raise CommandError(
                "the ledger's log and its checkpoint do not fit together", "`phionyx-letta verify` says more", FAILED
            ) from None
    return {"index": entry.seq, "proof": [one.hex() for one in proof], "checkpoint": note}


def _show(console: Console, output: Path, made: dict[str, Any]) -> None:
    said = made["statement"]
    console.print(
        safe(f"{said['block_id']} ({said['block_label']}): {said['forgotten']} at {said['at']}"), soft_wrap=True
    )
    console.print(safe(f"salt {made['salt']['state']}"), soft_wrap=True)
    place = "with its place in the log" if made["inclusion"] else "no checkpoint covers it yet"
    console.print(safe(f"wrote {output}, {place}"), soft_wrap=True)
