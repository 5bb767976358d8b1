"""`log`: the memory changes of a ledger, newest last."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phionyx_letta.cli.failures import CommandError
from phionyx_letta.cli.options import Json, Ledger
from phionyx_letta.cli.output import answer, safe, short, stdout
from phionyx_letta.cli.sources import Entry, Filters, SqlSource, open_source

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["log"]

POLL = 0.5  # s
_AGO = re.compile(r"(\d+)\s*([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
KIND_STYLES = {
    "append": "green",
    "write": "cyan",
    "consolidate": "magenta",
    "clear": "red",
    "delete": "red",
    "forget": "red",
}


def log(
    agent: Annotated[
        str | None, typer.Option("--agent", "--trace", metavar="ID", help="Only this agent's chain.")
    ] = None,
    block: Annotated[str | None, typer.Option(metavar="ID|LABEL", help="Only this block.")] = None,
    run: Annotated[str | None, typer.Option(metavar="ID", help="Only this run.")] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", help="Only write, append, clear, delete, forget or consolidate.")
    ] = None,
    event: Annotated[str | None, typer.Option(metavar="EVENT", help="Only this event, for example attach.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="From this time on: ISO 8601, or 90s, 10m, 2h, 3d ago.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Before this time, in the same forms.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many, the newest.")] = 30,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on showing what is sealed, until Ctrl-C.")] = False,
    ledger: Ledger = None,
    as_json: Json = False,
) -> int:
    """Show what was recorded, newest last.

    Nothing is checked here: `verify` does that. `show` with the first digits of a hash shows all about one change.
    """
    if follow and as_json:
        raise CommandError("--follow does not end, so it cannot print one JSON object", "leave out --follow or --json")
    filters = Filters(agent, block, run, _known_kind(kind), event, moment(since, "--since"), moment(until, "--until"))
    with open_source(ledger) as source:
        if follow and not isinstance(source, SqlSource):
            raise CommandError("a folder cannot be followed", "follow the database")
        last = source.last_seq() if isinstance(source, SqlSource) else -1
        entries = source.newest(filters, limit)
        found = source.findings(filters, limit) if isinstance(source, SqlSource) else []
        queue = source.sessions() if isinstance(source, SqlSource) else None
        result = {"entries": [summary(entry) for entry in entries], "count": len(entries), "findings": found}
        if queue is not None:
            result["sessions"] = queue
        lines = _Lines()

        def show(console: Console) -> None:
            lines.show(console, entries, empty=not follow)
            _show_findings(console, found)
            _show_queue(console, queue)

        answer(result, as_json=as_json, show=show)
        if follow and isinstance(source, SqlSource):
            _follow(source, filters, max([last, *(entry.seq or 0 for entry in entries)]), lines)
    return 0


def _show_findings(console: Console, found: Sequence[dict[str, Any]]) -> None:
    """Reads that were not what was recorded, as the workers told them."""
    if found:
        console.print("\nreads that were not what was recorded", style="bold")
    for one in found:
        done = "refused" if one.get("refused") else "served"
        console.print(safe(f"{str(one.get('at'))[:19]} {done}: {one.get('what')}"), soft_wrap=True)


def _show_queue(console: Console, queue: dict[str, Any] | None) -> None:
    """How the queue of sessions stands, where there is one with anything in it."""
    if queue is None or not queue["states"]:
        return
    counted = ", ".join(f"{number} {state}" for state, number in sorted(queue["states"].items()))
    console.print(f"\nsessions: {counted}; {queue['tokens_today']} tokens today", style="dim", soft_wrap=True)
    for one in queue["parked"]:
        console.print(safe(f"parked {one['session_id']}: {one['detail']}"), style="bold red", soft_wrap=True)


def summary(entry: Entry) -> dict[str, Any]:
    """One entry as `--json` gives it."""
    subject, mutation, letta, diff = entry.part("subject"), entry.part("mutation"), entry.letta, entry.diff
    return {
        "seq": entry.seq,
        "trace_id": entry.trace_id,
        "position": entry.position,
        "at": subject.get("timestamp_utc"),
        "kind": mutation.get("mutation_kind"),
        "event": entry.event,
        "block_id": mutation.get("block_id"),
        "block_label": mutation.get("block_label"),
        "producer": subject.get("producer"),
        "agent_id": letta.get("agent_id"),
        "run_id": letta.get("run_id"),
        "tool": letta.get("tool"),
        "added_chars": diff.get("added_chars"),
        "removed_chars": diff.get("removed_chars"),
        "after_size_bytes": diff.get("after_size_bytes"),
        "forgetting_reason": mutation.get("forgetting_reason"),
        "hash": entry.hash,
    }


def moment(text: str | None, option: str) -> str | None:
    """A time given to an option, as the ledger writes times.

    Raises:
        CommandError: it is neither ISO 8601 nor an age.
    """
    if text is None:
        return None
    ago = _AGO.fullmatch(text.strip().removesuffix("ago").strip())
    try:
        if ago is not None:
            when = datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        else:
            when = datetime.fromisoformat(text.strip())
        when = when.astimezone(UTC) if when.tzinfo else when.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise CommandError(
            f"{option} {text!r} is not a time",
            "give ISO 8601 (2026-01-31T12:00, UTC where no zone is named), or 90s, 10m, 2h, 3d",
        ) from None
    return when.isoformat(timespec="microseconds")


def _known_kind(kind: str | None) -> str | None:
    from phionyx_letta.envelope import MUTATION_KINDS

    if kind is not None and kind not in MUTATION_KINDS:
        raise CommandError(f"there is no kind {kind!r}", f"give one of {', '.join(MUTATION_KINDS)}")
    return kind


def _follow(source: SqlSource, filters: Filters, seq: int, lines: _Lines) -> None:
    console = stdout()
    while True:
        entries = source.after(filters, seq)
        if entries:
            lines.show(console, entries)
            seq = max(entry.seq or 0 for entry in entries)
        else:
            time.sleep(POLL)


class _Lines:
    """Lines of fixed width, so that what `--follow` adds stays under what is there; a heading names each new day."""

    def __init__(self) -> None:
        self._day = ""

    def show(self, console: Console, entries: Sequence[Entry], *, empty: bool = False) -> None:
        """Print the entries."""
        if not entries and empty:
            console.print("nothing was recorded that fits")
        for entry in entries:
            at = _local(entry.part("subject").get("timestamp_utc"))
            if at[:10] != self._day:
                self._day = at[:10]
                console.print(_heading(self._day, console.width), style="bold", no_wrap=True, overflow="crop")
            console.print(_line(entry, at[11:19], console.width), no_wrap=True, overflow="ellipsis")


def _columns(width: int) -> Iterator[tuple[str, int]]:
    spare = max(0, width - 80)
    yield "time", 8
    yield "chain", 8 + (6 if spare >= 20 else 0)
    yield "#", 4
    yield "kind", 11
    yield "block", 12 + min(8, spare // 3)
    yield "by", 13 + min(20, spare // 2)
    yield "chars", 9
    yield "hash", 8


def _heading(day: str, width: int) -> str:
    names = (name.rjust(size) if name in ("#", "chars") else name.ljust(size) for name, size in _columns(width))
    return f"{day} UTC\n" + " ".join(names)


def _line(entry: Entry, at: str, width: int) -> Text:
    from rich.text import Text

    sizes = dict(_columns(width))
    mutation = entry.part("mutation")
    kind = str(mutation.get("mutation_kind", "?"))
    line = Text()
    for name, value, style in (
        ("time", at, "dim"),
        ("chain", chain_name(entry.trace_id, sizes["chain"]), "dim"),
        ("#", str(entry.position), ""),
        ("kind", kind, KIND_STYLES.get(kind, "")),
        ("block", str(mutation.get("block_label", "?")), "bold"),
        ("by", author(entry), ""),
        ("chars", counts(entry), ""),
        ("hash", short(entry.hash), "dim"),
    ):
        text = safe(value).replace("\n", " ").replace("\t", " ")
        text = text if len(text) <= sizes[name] else text[: sizes[name] - 1] + "…"
        line.append(text.rjust(sizes[name]) if name in ("#", "chars") else text.ljust(sizes[name]), style)
        line.append(" ")
    line.rstrip()
    return line


def author(entry: Entry) -> str:
    """In a few words who or what made the change: the tool, the event where it is no plain update, the producer."""
    tool, event = entry.letta.get("tool"), entry.event
    if isinstance(tool, str):
        return tool
    producer = str(entry.part("subject").get("producer", "?")).removeprefix("phionyx-letta.").removeprefix("letta.")
    producer = "agent" if producer == entry.trace_id else producer
    return producer if event in (None, "update", producer) else f"{event} {producer}"


def counts(entry: Entry) -> str:
    """Characters added and removed."""
    added, removed = entry.diff.get("added_chars"), entry.diff.get("removed_chars")
    parts = [f"+{added}" if added else "", f"−{removed}" if removed else ""]
    return " ".join(part for part in parts if part) or "="


def chain_name(trace_id: str, size: int) -> str:
    """A chain's id, cut where it is longer than the column: of an agent's the beginning of its UUID says most."""
    return trace_id if len(trace_id) <= size else trace_id.removeprefix("agent-")[:size]


def _local(at: object) -> str:
    return str(at or "?").replace("T", " ").ljust(19)
