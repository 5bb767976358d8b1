"""`explain`: where each line of a block comes from: which change brought it, who made it, when and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phionyx_letta.cli.failures import FAILED, CommandError
from phionyx_letta.cli.keys import known_reviewers
from phionyx_letta.cli.options import Json, Ledger, Policies
from phionyx_letta.cli.output import answer, safe, short
from phionyx_letta.cli.show import DECIDED, parent_of, patch_of, reviewed, why_of
from phionyx_letta.cli.sources import Entry, Source, SqlSource, open_source

if TYPE_CHECKING:
    from rich.console import Console

    from phionyx_letta.ledger.blame import Blame
    from phionyx_letta.ledger.decision_audit import DecisionAudit
    from phionyx_letta.plugin.block_texts import KnownTexts

__all__ = ["explain"]


def explain(
    block: Annotated[str, typer.Argument(metavar="BLOCK", help="A block's id, or AGENT/LABEL.")],
    reviewers: Policies = None,
    ledger: Ledger = None,
    as_json: Json = False,
) -> int:
    """Explain a block's text: for each line which change brought it, who made it, when and why.

    Where the content of changes was not kept, what is known is said: the changes one of which brought the line. Nothing is checked
    but that texts have the recorded hashes and, with the reviewers' keys, who decided: `verify` checks the rest.
    """
    from phionyx_letta.ledger.blame import blame
    from phionyx_letta.ledger.decision_audit import DecisionAudit

    decisions = DecisionAudit(known_reviewers(reviewers))
    with open_source(ledger) as source:
        block_id, entries = _history(source, block)
        known = _known(source, block_id)
    current, notes = known.current, []
    if current is not None and any(_salted(entry) for entry in entries):
        current = None
        notes.append("hashes are salted here, so what the block holds cannot be compared with what was recorded")
    found = blame([entry.diff for entry in entries], current=current, known=known.texts)
    notes += _notes(found, known)
    changes = [_change(entry, known, decisions) for entry in entries]
    result = {
        "block_id": block_id,
        "label": known.label or str(entries[-1].part("mutation").get("block_label")),
        "agents": known.agents,
        "lines": _lines(found, entries),
        "changes": changes,
        "notes": notes,
    }
    answer(result, as_json=as_json, show=lambda console: _page(console, result))
    return FAILED if any(one["reviewer_signature"] == "failed" for one in changes) else 0


def _history(source: Source, named: str) -> tuple[str, list[Entry]]:
    """The block's id and its changes, oldest first.

    Raises:
        CommandError: there is no such block in this ledger, or several.
    """
    block_id = _one_block(source, named) if "/" in named and not named.startswith("file:") else named
    entries = source.of_block(block_id) if block_id else []
    if not entries:
        raise CommandError(
            f"nothing is recorded of a block {named!r}", "give a block's id or AGENT/LABEL; `log` shows both", FAILED
        )
    return block_id, entries


def _one_block(source: Source, named: str) -> str:
    """The block of this agent and label: as Letta has it now, else the newest that was recorded so."""
    from phionyx_letta.cli.sources import Filters
    from phionyx_letta.plugin.block_texts import find_blocks

    agent, _, label = named.partition("/")
    if isinstance(source, SqlSource):
        with source.ledger.engine.connect() as connection:
            found = find_blocks(connection, agent, label)
        if len(found) > 1:
            raise CommandError(f"{named} is more than one block: {', '.join(found)}", "give one of their ids")
        if found:
            return found[0]
    newest = source.newest(Filters(agent=agent, block=label), 1)
    return str(newest[0].part("mutation").get("block_id")) if newest else ""


def _known(source: Source, block_id: str) -> KnownTexts:
    from phionyx_letta.plugin.block_texts import KnownTexts, read_texts

    if not isinstance(source, SqlSource):
        return KnownTexts()
    with source.ledger.engine.connect() as connection:
        return read_texts(connection, block_id)


def _salted(entry: Entry) -> bool:
    return bool(entry.diff.get("commitment", "sha256") != "sha256")


def _notes(found: Blame, known: KnownTexts) -> list[str]:
    notes = []
    if found.unrecorded:
        notes.append("the block holds something else than what was last recorded: `reconcile` says what")
    if found.lines is None:
        notes.append("its text is not known: the content of changes was not kept (PHIONYX_LETTA_INCLUDE_DIFF_TEXT)")
    elif known.current is None:
        notes.append("the block itself was not found here: this is the text after the last recorded change")
    return notes


def _lines(found: Blame, entries: Sequence[Entry]) -> list[dict[str, Any]] | None:
    if found.lines is None:
        return None
    return [
        {
            "number": number,
            "text": line.text,
            "changes": [entries[one].hash for one in line.changes],
            "unrecorded": line.unrecorded,
            "certain": len(line.changes) + line.unrecorded == 1,
        }
        for number, line in enumerate(found.lines, start=1)
    ]


def _change(entry: Entry, known: KnownTexts, decisions: DecisionAudit) -> dict[str, Any]:
    """Who, when and why, of one change."""
    subject, mutation, diff = entry.part("subject"), entry.part("mutation"), entry.diff
    behind = reviewed(subject)
    status, message = decisions.feed(entry.envelope)
    return {
        "hash": entry.hash,
        "trace_id": entry.trace_id,
        "position": entry.position,
        "at": subject.get("timestamp_utc"),
        "kind": mutation.get("mutation_kind"),
        "event": entry.event,
        "who": _who(entry),
        "why": why_of(entry.letta) or None,
        "patch": behind or None,
        "reviewer_signature": status,
        "signature_note": message or (DECIDED[status] if status else ""),
        "rationale": known.rationales.get(str(behind.get("patch_id"))),
        "caused_by": parent_of(subject) or None,
        "forgotten_for": mutation.get("forgetting_reason"),
        "added_chars": diff.get("added_chars"),
        "removed_chars": diff.get("removed_chars"),
    }


def _who(entry: Entry) -> str:
    """The reviewer of a patch, else the agent, else whoever asked the server."""
    letta, behind = entry.letta, reviewed(entry.part("subject"))
    if behind.get("reviewer"):
        return str(behind["reviewer"])
    producer = str(entry.part("subject").get("producer") or "?")
    agent = letta.get("agent_id")
    if producer.startswith("letta.agent-") and agent:
        return str(agent)
    return str(letta.get("operator") or letta.get("actor_id") or producer)


def _page(console: Console, result: dict[str, Any]) -> None:
    from rich.text import Text

    title = Text(safe(result["label"]), "bold cyan")
    title.append(f"  {safe(result['block_id'])}", "dim")
    console.print(title, soft_wrap=True)
    changes = {one["hash"]: one for one in result["changes"]}
    for line in result["lines"] or []:
        mark = Text(_origin(line).ljust(10), "green" if line["certain"] and line["changes"] else "yellow")
        newest = changes[line["changes"][-1]] if line["changes"] and line["certain"] else {}
        mark.append(f"{str(newest.get('at') or '')[:16].replace('T', ' '):<17}", "dim")
        unsure = "?" if newest.get("reviewer_signature") not in (None, "ok") else ""
        mark.append(f"{safe(newest.get('who') or '')[:17] + unsure:<19}", "dim")
        console.print(mark.append(f"{line['number']:>3}  {safe(line['text'])}", "default"), soft_wrap=True)
    for note in result["notes"]:
        console.print(safe(note), style="yellow", soft_wrap=True)
    named = {one for line in result["lines"] or [] for one in line["changes"]}
    for one in result["changes"]:
        if result["lines"] is None or one["hash"] in named:
            console.print(_told(one), soft_wrap=True)


def _origin(line: dict[str, Any]) -> str:
    if line["certain"]:
        return short(line["changes"][0]) if line["changes"] else "unrecorded"
    return f"one of {len(line['changes']) + line['unrecorded']}"


def _told(one: dict[str, Any]) -> Any:
    from rich.text import Text

    text = Text("\n" + short(one["hash"]), "bold")
    unchecked = one["reviewer_signature"] not in (None, "ok")
    by = f"which says {one['who']} decided" if unchecked else f"by {one['who']}"
    text.append(f"  {safe(one['kind'])} {safe(by)}, {safe(str(one['at'])[:19].replace('T', ' '))} UTC")
    counted = f"{one['added_chars']} characters added, {one['removed_chars']} removed"
    patch = patch_of({"metadata": {"living_memory": one["patch"]}}) if one["patch"] else None
    reasons = (one["event"], one["why"], one["forgotten_for"], one["caused_by"] and f"caused by {one['caused_by']}")
    for said in (
        ", ".join(str(part) for part in reasons if part),
        patch,
        one["signature_note"],
        one["rationale"],
        counted,
    ):
        if said:
            text.append(f"\n  {safe(said)}", "dim")
    return text
