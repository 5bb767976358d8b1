"""`show`: one envelope as a page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phionyx_letta.cli.failures import FAILED, CommandError
from phionyx_letta.cli.keys import known_reviewers
from phionyx_letta.cli.options import Json, Ledger, Policies
from phionyx_letta.cli.output import answer, safe, short
from phionyx_letta.cli.sources import MOST_CANDIDATES, Entry, Source, open_source

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["DECIDED", "diff_text", "one_entry", "parent_of", "patch_of", "reviewed", "show", "why_of"]

_DIGEST = re.compile(r"(?:envelope://)?(?:sha256:)?([0-9a-f]{4,64})")
DECIDED = {
    "ok": "signed by the reviewer's key",
    "failed": "",
    "not_measured": "the reviewer's signature was not checked: give --reviewers",
}
_DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan", "\\": "dim"}


def show(
    ref: Annotated[str, typer.Argument(metavar="REF", help="The first digits (4 or more) of a hash; or a chain's id.")],
    position: Annotated[
        int | None, typer.Argument(metavar="POSITION", help="With a chain's id: the place in it, from 0.", min=0)
    ] = None,
    reviewers: Policies = None,
    ledger: Ledger = None,
    as_json: Json = False,
) -> int:
    """Show one envelope: who changed what, when and why, with its diff where it was kept, and the changes it caused.

    The hash of an upstream envelope, which is in no ledger of ours, shows the changes that name it as their cause. The envelope's
    signature is shown, not checked: `verify` does that. With the reviewers' keys, the signature of whoever decided is checked.
    """
    from phionyx_letta.ledger.decision_audit import DecisionAudit

    policy = known_reviewers(reviewers)
    with open_source(ledger) as source:
        digest = _DIGEST.fullmatch(ref.strip().lower()) if position is None else None
        caused = source.caused_by(digest[1]) if digest is not None else []
        known = not caused or bool(digest and source.find(digest[1]))
        entry = one_entry(source, ref, position) if known else None
        if entry is not None and not caused:
            caused = source.caused_by(entry.hash.removeprefix("sha256:"))
    if entry is None:
        shown: dict[str, Any] = {"trace_id": None, "position": None, "seq": None, "envelope": None}
    else:
        shown = {
            "trace_id": entry.trace_id,
            "position": entry.position,
            "seq": entry.seq,
            "envelope": entry.envelope,
        }
    status, message = DecisionAudit(policy).feed(shown["envelope"])
    shown["reviewer_signature"] = status
    shown["caused"] = [_in_short(one) for one in caused]
    signed = [] if status is None else [("decided", message or DECIDED[status])]
    answer(shown, as_json=as_json, show=lambda console: _pages(console, entry, ref, shown["caused"], signed))
    return 0 if status != "failed" else FAILED


def one_entry(source: Source, ref: str, position: int | None) -> Entry:
    """The one envelope that is meant.

    Args:
        source: where it is looked for.
        ref: the first digits of its hash; a chain's id where ``position`` is given.
        position: its place in that chain.

    Raises:
        CommandError: there is none, or there are several.
    """
    if position is not None:
        entry = source.at(ref, position)
        if entry is None:
            raise CommandError(
                f"there is no envelope at position {position} of the chain {ref!r}",
                "`phionyx-letta log` shows what there is",
                FAILED,
            )
        return entry
    digest = _DIGEST.fullmatch(ref.strip().lower())
    if digest is None:
        raise CommandError(
            f"{ref!r} is not the beginning of a hash", "give 4 or more hex digits of one, or: show CHAIN POSITION"
        )
    found = source.find(digest[1])
    if not found:
        raise CommandError(
            f"no envelope has a hash that begins with {digest[1]}", "`phionyx-letta log` shows what there is", FAILED
        )
    if len(found) > 1:
        listed = ", ".join(f"{short(one.hash, len(digest[1]) + 4)} ({one.trace_id} {one.position})" for one in found)
        more = " and perhaps more" if len(found) == MOST_CANDIDATES else ""
        raise CommandError(f"{len(found)} envelopes{more} begin with {digest[1]}: {listed}", "give more digits")
    return found[0]


def _in_short(entry: Entry) -> dict[str, Any]:
    mutation, subject = entry.part("mutation"), entry.part("subject")
    return {
        "hash": entry.hash,
        "trace_id": entry.trace_id,
        "position": entry.position,
        "at": subject.get("timestamp_utc"),
        "kind": mutation.get("mutation_kind"),
        "block_id": mutation.get("block_id"),
        "block_label": mutation.get("block_label"),
        "parent": parent_of(subject),
    }


def _pages(
    console: Console, entry: Entry | None, ref: str, caused: list[dict[str, Any]], signed: list[tuple[str, str]]
) -> None:
    if entry is not None:
        _page(console, entry, signed)
    else:
        console.print(safe(f"{ref} is not in this ledger"), soft_wrap=True)
    if caused:
        console.print(f"\nit caused {len(caused)} change{'s' if len(caused) > 1 else ''}:", style="bold")
    for one in caused:
        at = str(one["at"])[:19].replace("T", " ")
        said = f"{short(one['hash'])}  {at}  {one['kind']}  {one['block_label']}  {one['trace_id']} {one['position']}"
        console.print(safe(said), soft_wrap=True)


def _page(console: Console, entry: Entry, signed: list[tuple[str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    mutation = entry.part("mutation")
    title = Text(safe(mutation.get("mutation_kind", "?")), "bold")
    title.append(f"  {safe(mutation.get('block_label', '?'))}", "bold cyan")
    title.append(f"  position {entry.position} of {safe(entry.trace_id)}", "dim")
    console.print(title)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in [*_facts(entry), *signed]:
        grid.add_row(name, Text(safe(value)))
    console.print(grid)
    kept = entry.diff.get("diff_text")
    if isinstance(kept, str):
        console.print(diff_text(kept))
    elif entry.diff:
        console.print("the text was not kept (PHIONYX_LETTA_INCLUDE_DIFF_TEXT keeps it)", style="dim")


def diff_text(diff: str) -> Text:
    """A unified diff in colour."""
    from rich.text import Text

    text = Text()
    for line in safe(diff, lines=True).splitlines():
        style = "bold" if line.startswith(("+++", "---")) else _DIFF_STYLES.get(line[:1], "")
        text.append(line + "\n", style)
    text.rstrip()
    return text


def _facts(entry: Entry) -> list[tuple[str, str]]:
    subject, mutation, letta, integrity = (
        entry.part("subject"),
        entry.part("mutation"),
        entry.letta,
        entry.part("integrity"),
    )
    diff = entry.diff
    facts = [
        ("when", f"{subject.get('timestamp_utc', '?')} UTC".replace("+00:00 UTC", " UTC")),
        ("who", _joined(subject.get("producer"), letta.get("agent_type"), _named("actor", letta.get("actor_id")))),
        ("why", why_of(letta)),
        ("what", _joined(letta.get("event"), mutation.get("block_id"), _changes(letta))),
        ("content", _counts(diff)),
        ("before", str(diff.get("before_hash", "?"))),
        ("after", str(diff.get("after_hash", "?"))),
        ("turn", str(subject.get("turn_index", "?"))),
        ("forgotten for", str(mutation.get("forgetting_reason") or "")),
        ("caused by", parent_of(subject)),
        ("patch", patch_of(subject)),
        ("evidence", _messages(subject)),
        ("consolidates", _consolidation(entry.envelope.get("memory_consolidation_audit"))),
        ("previous", str(integrity.get("previous", "?"))),
        ("hash", str(integrity.get("current", "?"))),
        ("signature", _signature(subject, integrity)),
    ]
    return [(name, value) for name, value in facts if value]


def why_of(letta: dict[str, Any]) -> str:
    """Through what the change came: the tool and its call, run, step and conversation, or the request."""
    request = letta.get("request")
    asked = f"{request.get('method', '')} {request.get('path', '')}" if isinstance(request, dict) else None
    return _joined(
        _named("tool", letta.get("tool")),
        _named("call", letta.get("tool_call_id")),
        _named("run", letta.get("run_id")),
        _named("step", letta.get("step_id")),
        _named("conversation", letta.get("conversation_id")),
        _named("operation", letta.get("operation")) if not letta.get("tool") else None,
        asked,
    )


def _changes(letta: dict[str, Any]) -> str | None:
    changes = [
        f"{name}: {value['before']!r} → {value['after']!r}"
        for name in ("label", "limit", "read_only")
        if isinstance(value := letta.get(name), dict) and {"before", "after"} <= value.keys()
    ]
    return ", ".join(changes) or None


def _counts(diff: dict[str, Any]) -> str:
    def number(name: str) -> object:
        return diff.get(name, "?")

    method = diff.get("counts_method")
    return (
        f"{number('before_size_bytes')} → {number('after_size_bytes')} bytes; characters: {number('added_chars')} added, "
        f"{number('removed_chars')} removed, {number('unchanged_chars')} unchanged"
        + (f" (counted by {method})" if method else "")
    )


def parent_of(subject: dict[str, Any]) -> str:
    """The upstream envelope that is named as the cause, or nothing."""
    metadata = subject.get("metadata")
    audit = metadata.get("memory_audit") if isinstance(metadata, dict) else None
    return str(audit.get("parent_envelope_ref") or "") if isinstance(audit, dict) else ""


def reviewed(subject: dict[str, Any]) -> dict[str, Any]:
    """What the envelope says of the patch behind the change; nothing where there is none."""
    metadata = subject.get("metadata")
    said = metadata.get("living_memory") if isinstance(metadata, dict) else None
    return said if isinstance(said, dict) else {}


def patch_of(subject: dict[str, Any]) -> str:
    """The patch behind the change: who decided, which session it comes from, whose proposal it was."""
    said = reviewed(subject)
    return _joined(
        f"{said.get('event', '?')} {said['patch_id']}" if said.get("patch_id") else None,
        _named("reviewer", said.get("reviewer")),
        _named("session", said.get("session")),
        _named("proposed by", said.get("proposer_model")),
        "marked untrusted" if said.get("untrusted") else None,
    )


def _messages(subject: dict[str, Any]) -> str:
    said = reviewed(subject)
    lists = (said.get(name) for name in ("evidence_messages", "runs"))
    return _joined(*(one for found in lists if isinstance(found, list) for one in found))


def _consolidation(audit: object) -> str:
    if not isinstance(audit, dict):
        return ""
    given = (audit.get(name) for name in ("from_episodic", "to_semantic"))
    sources, results = (one if isinstance(one, list) else [] for one in given)
    return f"{len(sources)} memories into {', '.join(map(str, results)) or '?'} by {audit.get('consolidation_method') or '?'}"


def _signature(subject: dict[str, Any], integrity: dict[str, Any]) -> str:
    signature = str(integrity.get("signature", "?"))
    if signature in ("", "unsigned"):
        return "unsigned: nobody vouches for it"
    return _joined(f"{signature[:40]}…" if len(signature) > 41 else signature, _named("key", subject.get("key_id")))


def _named(name: str, value: object) -> str | None:
    return f"{name} {value}" if value else None


def _joined(*parts: object) -> str:
    return " · ".join(str(part) for part in parts if part)
