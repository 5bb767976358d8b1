"""What memory commands show: lists, one patch with all a reviewer needs, and the questions of `review --interactive`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phionyx_letta.cli.failures import OK, CommandError
from phionyx_letta.cli.memory_sources import find_patch
from phionyx_letta.cli.output import answer, complain, safe, stdout
from phionyx_letta.errors import PhionyxError

if TYPE_CHECKING:
    from rich.console import Console

    from phionyx_letta.memory import LivingMemory, MemoryPatch
    from phionyx_letta.memory.stored import PatchSummary

__all__ = ["print_list", "print_log", "print_review"]

_STATUS_STYLES = {
    "pending": "yellow",
    "approved": "cyan",
    "applied": "green",
    "rejected": "red",
    "reverted": "magenta",
    "conflict": "bold red",
}
_TARGETS = {
    "unchanged": "as it was when the patch was made",
    "whitespace": "differs in whitespace only: it can be applied",
    "diverged": "has changed since: the command `rebase` offers a merge, if there is one",
    "missing": "does not exist any more",
}
_QUESTION = "[a]pprove, [r]eject, [e]dit, [s]kip, [q]uit"


def print_review(
    living: LivingMemory,
    named: str | None,
    listing: Callable[[], int],
    *,
    interactive: bool,
    by: str | None,
    as_json: bool,
    lists: str = "memory log --status approved",
    own: Callable[[PatchSummary], bool],
) -> int:
    """What the two commands `review` do: go through the pending patches, show one, or list; return the exit code.

    Args:
        living: whose patches.
        named: id of the one to show, or its first digits.
        listing: prints the list.
        interactive: go through the pending ones.
        by: who decides.
        as_json: one JSON object is wanted.
        lists: the command that lists what was approved.
        own: whether a pending patch is this command's: a database may hold a server's and Letta Code's.

    Raises:
        CommandError: questions cannot be asked in JSON, or there is no such patch.
    """
    if interactive:
        if as_json:
            raise CommandError(
                "--interactive asks questions, so it cannot print one JSON object", "leave out one of the two"
            )
        return step_through(living, by, lists, own)
    if named is None:
        return listing()
    described = living.review(find_patch(living, named, lists.partition(" --")[0]))
    answer(described, as_json=as_json, show=lambda console: print_patch(console, described))
    return OK


def print_list(console: Console, patches: Sequence[Mapping[str, Any]], note: str | None = None) -> None:
    """Print the pending patches; where there are none, the note."""
    if not patches:
        console.print("No pending memory patches to review.")
        if note is not None:
            console.print(note, soft_wrap=True)
        return
    for one in patches:
        console.print(_line(one, "created_at", "category", "file_path"), soft_wrap=True)
        console.print(f"    {safe(one['rationale'])}", soft_wrap=True)
        _print_mark(console, one)
    console.print(
        f"{len(patches)} pending; `phionyx-letta memory review --patch-id ID` shows one", style="dim", soft_wrap=True
    )


def print_log(console: Console, patches: Sequence[Mapping[str, Any]]) -> None:
    """Print patches of any status."""
    from rich.text import Text

    if not patches:
        console.print("No patches found.")
    for one in patches:
        line = Text(f"{safe(one['patch_id'])}  ")
        line.append(safe(one["status"]).ljust(9), _STATUS_STYLES.get(one["status"], ""))
        line.append(f"  {_day(one['created_at'])}  {safe(one['file_path'])}  {safe(one['rationale'])}")
        console.print(line, soft_wrap=True)
        _print_mark(console, one)


def _print_mark(console: Console, one: Mapping[str, Any]) -> None:
    if one["signature_note"]:
        console.print(f"    NOT valid: {safe(one['signature_note'])}", style="bold red", soft_wrap=True)


def print_patch(console: Console, described: Mapping[str, Any]) -> None:
    """Print one patch as `LivingMemory.review` describes it."""
    from rich.text import Text

    from phionyx_letta.cli.show import diff_text

    for name, value in _facts(described):
        style = "bold red" if name in ("Trust:", "Recorded diff:") or "NOT" in value else ""
        console.print(Text(f"{name:<14}").append(safe(value), style), soft_wrap=True)
    for one in _evidence(described):
        console.print(one, soft_wrap=True)
    console.print(diff_text(described["diff"]) if described["diff"] else "nothing changes", soft_wrap=True)
    if described["diff_recorded"]:
        console.print(
            Text("the diff the patch itself carries, which is not that of its content:", "bold red"), soft_wrap=True
        )
        console.print(diff_text(described["diff_recorded"]), soft_wrap=True)


def step_through(living: LivingMemory, by: str | None, lists: str, own: Callable[[PatchSummary], bool]) -> int:
    """Ask about each pending patch in turn; one that fails is named, and the others still come."""
    import typer

    console, decided, failed = stdout(), 0, 0
    pending = [one.patch_id for one in living.store.summaries("pending") if own(one)]
    if not pending:
        console.print("No pending memory patches to review.")
    for number, patch_id in enumerate(pending, start=1):
        console.print(f"\n{number} of {len(pending)}", style="bold")
        shown = living.store.get(patch_id)
        if shown is None:  # its line was damaged meanwhile
            continue
        try:
            print_patch(console, living.review(shown))
            choice = _ask(_QUESTION, "ares" + "q")
            if choice == "q":
                break
            if choice == "a":
                living.approve(shown, by=by)
            elif choice == "r":
                living.reject(shown, typer.prompt("Why", default="", show_default=False), by=by)
            elif choice == "e":
                decided += _edit(living, shown, by)
                continue
        except PhionyxError as error:
            complain(error.message, error.remedy, as_json=False)
            failed += 1
            continue
        decided += choice != "s"
    if pending:
        console.print(f"{decided} decided; `phionyx-letta {lists}` lists what can be applied", soft_wrap=True)
    return 1 if failed else 0


def _edit(living: LivingMemory, patch: MemoryPatch, by: str | None) -> bool:
    """Let the reviewer change the text the file would have; the result is a new patch, approved."""
    import click

    text = click.edit(patch.after_content, extension=".md", require_save=False)
    if text is None or text == patch.after_content:
        stdout().print("nothing was changed; the patch stays pending")
        return False
    new = living.edit(patch, text, by=by)
    living.approve(new, by=by, reason="edited by the reviewer")
    stdout().print(f"Patch {safe(patch.patch_id)} was replaced by {safe(new.patch_id)}, approved", soft_wrap=True)
    return True


def _ask(question: str, letters: str) -> str:
    import typer

    while True:
        given = str(typer.prompt(question)).strip().lower()[:1]
        if given and given in letters:
            return given


def _facts(described: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "Patch ID:", described["patch_id"]
    yield "Content:", described["content"]
    yield "File:", described["file_path"]
    yield "Target:", _TARGETS.get(described["target"], f"NOT usable: {described['target']}")
    if described["file_seen"]:
        yield "Seen:", f"the model was shown the {described['file_seen']} of the file"
    for note in described["target_notes"]:
        yield "", note
    yield "Status:", described["status"]
    yield "Category:", described["category"] + (f", section {described['section']}" if described["section"] else "")
    yield "Created:", f"{described['created_at']} by {described['author']}, session {described['session_id'] or '?'}"
    for step in described["history"][1:]:
        because = f": {step.get('reason')}" if step.get("reason") else ""
        name = "Reverting" if step.get("from") == step.get("to") == "applied" else str(step.get("to", "?")).capitalize()
        yield f"{name}:", f"{step.get('at')} by {step.get('by')}{because}"
    yield from _origin(described)
    yield "Signature:", _signature(described)
    if described["untrusted"]:
        yield "Trust:", f"untrusted: {described['untrusted']}"
    if described["pii"]:
        yield "PII:", "replaced " + ", ".join(f"{count} {kind}" for kind, count in sorted(described["pii"].items()))
    if described["diff_recorded"]:
        yield "Recorded diff:", "NOT that of the content; both are below"
    stats = described["stats"]
    yield "Changes:", f"+{stats['added']} −{stats['removed']} lines"
    yield "Rationale:", described["rationale"]


def _origin(described: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Where a patch comes from, what became of it in the ledger, and whether it fits."""
    given = described["proposed_from"]
    if given:
        parts = (("agent", "agent_id"), ("conversation", "conversation_id"), ("model", "model"))
        yield "From:", ", ".join(f"{name} {given[key]}" for name, key in parts if given.get(key))
    if described["envelope"]:
        yield "Envelope:", described["envelope"]
    over = described["over_limit"]
    if over:
        trim = over.get("trim") or []
        how = f"; to make room, these could go: {' / '.join(map(str, trim))}" if trim else ""
        yield "Limit:", f"NOT within it: {over.get('length')} of {over.get('limit')} characters{how}"


def _signature(described: Mapping[str, Any]) -> str:
    algorithm, note = described["signature"], described["signature_note"]
    if described["signature_valid"]:
        return f"{algorithm}, valid"
    return f"unsigned: {note}" if algorithm == "unsigned" else f"NOT valid: {note}"


def _evidence(described: Mapping[str, Any]) -> Iterator[str]:
    details = described["evidence_details"]
    if isinstance(details, list) and details and all(isinstance(one, dict) for one in details):
        for one in details:
            where = f"{safe(one.get('role', '?'))}, message {safe(one.get('message_index', '?'))}"
            yield f"Evidence:     {where}: “{safe(one.get('quote', ''))}”"
            if one.get("context") not in (None, "", one.get("quote")):
                yield f"  in context: {safe(one['context'])}"
        return
    for quote in described["evidence"]:
        yield f"Evidence:     “{safe(quote)}”"


def _line(one: Mapping[str, Any], *names: str) -> str:
    values = (_day(one[name]) if name == "created_at" else safe(one[name]) for name in names)
    return "  ".join([safe(one["patch_id"]), *values])


def _day(at: object) -> str:
    return safe(str(at)[:16].replace("T", " "))
