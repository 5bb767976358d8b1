"""`session`: the queue of finished sessions: what waits, what it cost, what went wrong; ending one by hand, trying one again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phionyx_letta.cli.failures import FAILED, CommandError
from phionyx_letta.cli.ledgers import ledger_name, open_database
from phionyx_letta.cli.options import Json, Ledger
from phionyx_letta.cli.output import answer, safe

if TYPE_CHECKING:
    from rich.console import Console

    from phionyx_letta.ledger.sql import SqlLedger

__all__ = ["session"]

session = typer.Typer(
    help="Sessions of agents, and what was proposed from them (PHIONYX_LETTA_SESSIONS=on).",
    no_args_is_help=True,
    rich_markup_mode=None,
)

STATES = ("open", "waiting", "done", "skipped", "parked")
_STYLES = {"open": "cyan", "waiting": "yellow", "done": "green", "skipped": "dim", "parked": "bold red"}
Agent = Annotated[str | None, typer.Option("--agent", metavar="ID", help="Only this agent's.")]
SessionId = Annotated[str, typer.Argument(metavar="ID", help="A session's id, or its first characters.")]


@session.command("list", short_help="List sessions, newest last.")
def list_(
    state: Annotated[
        str | None, typer.Option(metavar="STATE", help="Only open, waiting, done, skipped or parked.")
    ] = None,
    agent: Agent = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many, the newest.")] = 30,
    ledger: Ledger = None,
    as_json: Json = False,
) -> int:
    """List sessions with their state, age, cost and errors, newest last. Open ones have not ended yet."""
    if state is not None and state not in STATES:
        raise CommandError(f"there is no state {state!r}", f"give one of {', '.join(STATES)}")
    from phionyx_letta.plugin.session_views import list_sessions

    with _opened(ledger) as database:
        found = [_priced(one) for one in list_sessions(database, state=state, agent_id=agent, limit=limit)]
    answer({"sessions": found, "count": len(found)}, as_json=as_json, show=lambda console: _list(console, found))
    return 0


@session.command(short_help="Show a session: its runs, state, cost and patches.")
def show(session_id: SessionId, ledger: Ledger = None, as_json: Json = False) -> int:
    """Show one session: when and how it ended, its runs, what became of it, and the patches that were proposed."""
    from phionyx_letta.plugin.session_views import show_session

    with _opened(ledger) as database:
        found = _priced(show_session(database, _one(database, session_id)))
    answer(found, as_json=as_json, show=lambda console: _page(console, found))
    return 0


@session.command(short_help="End an agent's session now.")
def end(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="The agent's id.")],
    conversation: Annotated[
        str | None, typer.Option("--conversation", metavar="ID", help="Only the session in this conversation.")
    ] = None,
    ledger: Ledger = None,
    as_json: Json = False,
) -> int:
    """End the open sessions of an agent: the runs that have ended so far; one under way begins the next session."""
    from phionyx_letta.plugin.session_queue import end_by_hand

    with _opened(ledger) as database:
        ended = end_by_hand(database, agent, conversation)
    if not ended:
        raise CommandError(
            f"the agent {agent} has no open session here",
            "`phionyx-letta session list` shows what there is; PHIONYX_LETTA_SESSIONS=on notes runs",
            FAILED,
        )
    answer({"ended": ended}, as_json=as_json, show=lambda console: console.print(f"Ended {', '.join(ended)}"))
    return 0


@session.command(short_help="Try a parked session again.")
def retry(session_id: SessionId, ledger: Ledger = None, as_json: Json = False) -> int:
    """Put a parked session back into the queue, with all its attempts before it."""
    from phionyx_letta.plugin.session_queue import try_again

    with _opened(ledger) as database:
        found = _one(database, session_id)
        if not try_again(database, found):
            raise CommandError(f"{found} is not parked", "`phionyx-letta session show` says how it stands", FAILED)
    answer({"session_id": found}, as_json=as_json, show=lambda console: console.print(f"{found} waits again"))
    return 0


@contextmanager
def _opened(ledger: str | None) -> Iterator[SqlLedger]:
    from sqlalchemy import inspect

    with open_database(ledger_name(ledger)) as database:
        if database.engine.dialect.name != "postgresql" or not inspect(database.engine).has_table("runs"):
            raise CommandError("this is not a Letta server's database, so it has no sessions", "give --ledger")
        if not inspect(database.engine).has_table("phionyx_session"):
            raise CommandError(
                "no session was ever noted in this database", "start Letta with PHIONYX_LETTA_SESSIONS=on"
            )
        yield database


def _one(database: SqlLedger, prefix: str) -> str:
    from phionyx_letta.plugin.session_views import find_sessions

    found = find_sessions(database, prefix)
    if prefix in found or len(found) == 1:
        return prefix if prefix in found else found[0]
    if not found:
        raise CommandError(
            f"there is no session {prefix!r}", "`phionyx-letta session list` shows what there is", FAILED
        )
    raise CommandError(f"several sessions begin with {prefix!r}: {', '.join(found[:5])}", "give more of it")


def _priced(found: dict[str, Any]) -> dict[str, Any]:
    """With what it cost, where a price is set."""
    from phionyx_letta.settings import load_settings

    cost = load_settings().cost(int(found["tokens"] or 0))
    return found if cost is None else {**found, "cost": cost}


def _list(console: Console, found: list[dict[str, Any]]) -> None:
    from rich.text import Text

    if not found:
        console.print("No sessions.")
    for one in found:
        line = Text(f"{str(one['ended_at'])[:16].replace('T', ' ')}  ")
        line.append(str(one["state"]).ljust(8), _STYLES.get(one["state"], ""))
        line.append(safe(f"{one['session_id'] or '(open)'}  {one['agent_id']}"))
        console.print(line, soft_wrap=True)
        console.print(f"    {safe(_said(one))}", style="dim", soft_wrap=True)


def _said(one: Mapping[str, Any]) -> str:
    parts = [f"{one['runs']} runs, ended {_age(one['age_s'])} ago"]
    if one["ended_by"]:
        parts[0] += f" ({one['ended_by']})"
    if one["state"] in ("done", "parked", "waiting") and one["attempts"]:
        cost = f" ({one['cost']:g})" if "cost" in one else ""
        parts.append(f"{one['attempts']} attempts, {one['tokens']} tokens{cost}, {one['patches']} patches")
    if one["detail"]:
        parts.append(one["detail"])
    return "; ".join(parts)


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _page(console: Console, found: Mapping[str, Any]) -> None:
    names = (
        *("session_id", "state", "agent_id", "conversation_id", "ended_at", "ended_by", "attempts", "due_at"),
        *("finished_at", "model", "tokens", "cost", "detail"),
    )
    for name in names:
        if found.get(name) not in (None, ""):
            console.print(f"{name.replace('_', ' '):<16}{safe(found[name])}", soft_wrap=True)
    for run in found["run_ids"]:
        console.print(f"{'run':<16}{safe(run)}", soft_wrap=True)
    for patch in found["proposed"]:
        said = f"{patch['patch_id']}  {patch['status']}  {patch['file_path']}  {patch['rationale']}"
        console.print(f"{'patch':<16}{safe(said)}", soft_wrap=True)
