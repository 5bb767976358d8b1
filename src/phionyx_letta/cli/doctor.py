"""`doctor`: does everything do what it should, and what to do where it does not. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phionyx_letta.cli.examine import FAIL, OK, WARN, Finding, examine_database, examine_here
from phionyx_letta.cli.failures import FAILED, NOT_MEASURED, CommandError
from phionyx_letta.cli.ledgers import is_store, ledger_name, open_database
from phionyx_letta.cli.options import Json, Ledger
from phionyx_letta.cli.output import answer, safe, styled
from phionyx_letta.errors import LedgerUnavailable, PhionyxError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["doctor"]

_INDENT = 6


def doctor(ledger: Ledger = None, as_json: Json = False) -> int:
    """Check this environment, the ledger, the armed workers, the outbox and the blocks, and say what to do.

    Exit 0 nothing failed (there may be warnings), 1 something failed, 2 nothing could be measured: no ledger, or it does not answer.
    """
    findings, key_id = examine_here()
    details: dict[str, Any] = {}
    measured = True
    try:
        name = ledger_name(ledger)
        if is_store(name):
            raise CommandError(
                f"{name} is a folder: it has no workers and no outbox", "`phionyx-letta verify` checks it"
            )
        with open_database(name, empty_is_fine=True) as database:
            more, details = examine_database(database, key_id)
            findings += more
    except (CommandError, LedgerUnavailable) as error:
        measured = False
        findings.append(Finding("ledger", FAIL, error.message, error.remedy))
    except PhionyxError as error:
        findings.append(Finding("ledger", FAIL, error.message, error.remedy))
    worst = next((status for status in (FAIL, WARN) if any(one.status == status for one in findings)), OK)
    status = worst if measured else "not_measured"
    result = {"status": status, "findings": [one.to_dict() for one in findings], **details}
    answer(result, as_json=as_json, show=lambda console: _show(console, findings, status))
    if not measured:
        return NOT_MEASURED
    return FAILED if worst == FAIL else 0


def _show(console: Console, findings: list[Finding], status: str) -> None:
    width = max(len(one.check) for one in findings)
    for one in findings:
        line = styled(one.status, _INDENT)
        line.append(f"{safe(one.check).ljust(width)}  ", "bold default")
        line.append(safe(one.message), "default")
        console.print(_hanging(line, _INDENT + width + 2, console))
        if one.remedy and one.status != OK:
            console.print(_hanging(_remedy(one, width), _INDENT + width + 4, console))
    console.print()
    line = styled(status)
    counted = ", ".join(f"{sum(one.status == name for one in findings)} {name}" for name in (FAIL, WARN, OK))
    line.append(f"  {counted}", "default")
    console.print(line)


def _remedy(one: Finding, width: int) -> Any:
    from rich.text import Text

    return Text(" " * (_INDENT + width + 2) + f"→ {safe(one.remedy)}", "italic")


def _hanging(text: Any, indent: int, console: Console) -> Any:
    """The text wrapped with its later lines under the beginning of its message."""
    from rich.text import Text

    head, body = text[:indent], text[indent:]
    lines = body.wrap(console, max(30, console.width - indent))
    out = Text()
    for number, line in enumerate(lines):
        out.append_text(head if number == 0 else Text(" " * indent))
        line.rstrip()
        out.append_text(line)
        if number < len(lines) - 1:
            out.append("\n")
    return out
