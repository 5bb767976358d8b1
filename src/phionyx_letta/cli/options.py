"""Options that several commands share, so that one name means one thing."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Json", "Keys", "Ledger", "Policies"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, errors too.")]
Ledger = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        metavar="URL",
        help="Database URL, SQLite file or folder of the ledger. Default: PHIONYX_LETTA_LEDGER, else LETTA_PG_URI.",
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Option(
        "--key",
        metavar="KEY",
        help="Public key to trust: 64 hex digits or a .pub file. May be given several times; "
        "PHIONYX_LETTA_VERIFY_KEY adds more, separated like PATH.",
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--reviewers",
        metavar="FILE",
        help="An approval policy: whose signatures on changes by patches count. May be given several times, for policies of other "
        "times. Default: PHIONYX_LETTA_REVIEWERS.",
    ),
]
