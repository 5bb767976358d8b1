"""`memory`: patches of memory files, proposed, reviewed, decided, applied and taken back. `run_memory` is the seed's entry."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phionyx_letta.cli.failures import FAILED, CommandError, exit_code
from phionyx_letta.cli.memory_evidence import evidence_left, print_evidence
from phionyx_letta.cli.memory_pages import print_list, print_log, print_review
from phionyx_letta.cli.memory_sources import STORE, elsewhere, find_patch, open_memory, read_session
from phionyx_letta.cli.options import Json
from phionyx_letta.cli.output import answer, complain, safe
from phionyx_letta.errors import DiffConflictError, PatchChanged, PhionyxError, TargetRefused, UntrustedPatch

if TYPE_CHECKING:
    from phionyx_letta.memory import MemoryPatch
    from phionyx_letta.memory.stored import PatchSummary

__all__ = ["memory", "run_memory"]

memory = typer.Typer(
    help="Memory files and blocks that change by reviewed patches.\n\n"
    "Patches are proposed from sessions, reviewed, applied and reverted; "
    "nothing else here writes to a memory file or a block.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

StorePath = Annotated[
    str | None,
    typer.Option(
        "--store-path",
        metavar="PATH",
        help="Patch store: a JSONL file, or a database URL (for patches of blocks, Letta's own). "
        f"Default: PHIONYX_LETTA_MEMORY_STORE, else {STORE}.",
    ),
]
Paths = Annotated[
    list[str] | None,
    typer.Option(
        "--path",
        metavar="GLOB",
        help="A managed file, folder or glob (** for any depth); nothing else is ever written. May be given several times. "
        "Default: PHIONYX_LETTA_MEMORY_PATHS, else every *.md in the store's folder and below.",
    ),
]
Sent = Annotated[
    list[str] | None,
    typer.Option(
        "--path",
        metavar="GLOB",
        help="A managed file, folder or glob (** for any depth); its text is sent to the model, and patches are made for it. May be "
        "given several times. Default: PHIONYX_LETTA_MEMORY_PATHS; one of the two is needed.",
    ),
]
PatchId = Annotated[str, typer.Argument(metavar="ID", help="A patch's id, or its first digits.")]
By = Annotated[str | None, typer.Option("--by", metavar="NAME", help="Who decides. Default: the user's name.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it is recorded and signed.")]
Seen = Annotated[
    str | None,
    typer.Option(
        "--content",
        metavar="DIGEST",
        help="The digest of what you reviewed, as `memory review` shows it, or its first 40 digits or more: if something else is "
        "stored by now, nothing is done. Without it, what is stored counts.",
    ),
]
Evidence = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        metavar="URL",
        help="Where the envelope of the change goes: a database URL, a SQLite file or a folder. Default: "
        "PHIONYX_LETTA_LEDGER, else PHIONYX_LETTA_AUDIT_ROOT, else ~/.phionyx/letta_audit.",
    ),
]


@memory.command(short_help="Ask a model what to remember of a session.")
def propose(
    transcript: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="The session: text with `user: …` lines, or JSON or JSONL records with role and content.",
        ),
    ] = None,
    kept: Annotated[
        bool, typer.Option("--kept", help="Propose from the sessions that were kept because the model gave no answer.")
    ] = False,
    session: Annotated[
        str | None, typer.Option("--session", metavar="ID", help="The session's id. Default: the file's name.")
    ] = None,
    paths: Sent = None,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="The model to ask.")] = None,
    base_url: Annotated[
        str | None, typer.Option("--base-url", metavar="URL", help="Endpoint that speaks OpenAI's protocol.")
    ] = None,
    threshold: Annotated[
        int,
        typer.Option("--threshold", min=1, metavar="N", help="Sessions a fact must be seen in before it is proposed."),
    ] = 3,
    occurrences: Annotated[
        str | None,
        typer.Option(
            "--occurrence-path",
            metavar="PATH",
            help="Where facts are counted. Default: .synapsekit_memory_occurrences.json, or the store's database.",
        ),
    ] = None,
    store_path: StorePath = None,
    as_json: Json = False,
) -> int:
    """Ask a model which facts of a finished session are worth remembering, and store them as pending patches.

    Nothing is applied. Personal data is replaced before anything is sent or stored; evidence must be found in the session. A
    session that the model gives no answer about is kept, see --kept.
    """
    from phionyx_letta.memory import OpenAIProposer

    if (transcript is None) != kept:
        raise CommandError("no session is named, or two ways", "give a session's FILE, or --kept")
    records = read_session(transcript) if transcript else {}
    living = open_memory(
        store_path,
        paths,
        proposing=True,
        occurrence_path=occurrences,
        occurrence_threshold=threshold,
    )
    living.proposer = OpenAIProposer(model=model, base_url=base_url)
    if transcript is None:
        patches = asyncio.run(living.propose_from_kept_sessions())
    else:
        patches = asyncio.run(living.propose_from_session(session or transcript.name, **records))
    made = [_shown(patch) for patch in patches]

    def show(console: Any) -> None:
        if not made:
            console.print("Nothing to propose: no new fact has been seen often enough.")
        for one in made:
            line = f"Proposed patch {safe(one['patch_id'])} to {safe(one['file_path'])}: {safe(one['rationale'])}"
            console.print(line, soft_wrap=True)

    answer({"patches": made, "count": len(made)}, as_json=as_json, show=show)
    return 0


@memory.command(short_help="List pending patches, show one, or go through them.")
def review(
    patch_id: Annotated[
        str | None, typer.Option("--patch-id", metavar="ID", help="Show this patch in detail, whatever its status.")
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Go through the pending patches: approve, reject, edit or skip.")
    ] = False,
    paths: Paths = None,
    by: By = None,
    store_path: StorePath = None,
    as_json: Json = False,
) -> int:
    """List the pending patches; with --patch-id show one: its diff, why, on what evidence, and whether it can be trusted.

    The diff is computed from what would be written.
    """
    from phionyx_letta.memory.reviewing import listed

    living = open_memory(store_path, paths)

    def listing() -> int:
        pending = [
            listed(one, living.verifier, living.store, living.targets, living.policy)
            for one in living.pending_patches()
            if _own(one)
        ]
        note = elsewhere(store_path)
        page = {"patches": pending, "count": len(pending)}
        answer(page, as_json=as_json, show=lambda console: print_list(console, pending, note))
        return 0

    return print_review(living, patch_id, listing, interactive=interactive, by=by, as_json=as_json, own=_own)


@memory.command(short_help="Approve a pending patch without applying it.")
def approve(
    patch_id: PatchId,
    content: Seen = None,
    reason: Reason = "",
    by: By = None,
    paths: Paths = None,
    store_path: StorePath = None,
    as_json: Json = False,
) -> int:
    """Approve a pending patch; `memory apply` then writes it."""
    living = open_memory(store_path, paths)
    patch = living.approve(find_patch(living, patch_id), by=by, reason=reason, content=content)
    return _done(patch, f"Approved patch {patch.patch_id} to {patch.file_path}", as_json)


@memory.command(short_help="Reject a patch for good.")
def reject(
    patch_id: PatchId,
    reason: Reason = "",
    by: By = None,
    paths: Paths = None,
    store_path: StorePath = None,
    as_json: Json = False,
) -> int:
    """Reject a patch: its fact is not proposed again unless it changes."""
    living = open_memory(store_path, paths)
    patch = living.reject(find_patch(living, patch_id), reason, by=by)
    return _done(patch, f"Rejected patch {patch.patch_id} to {patch.file_path}", as_json)


@memory.command(short_help="Write a patch to its file.")
def apply(
    patch_id: PatchId,
    content: Seen = None,
    reason: Reason = "",
    by: By = None,
    paths: Paths = None,
    ledger: Evidence = None,
    store_path: StorePath = None,
    as_json: Json = False,
) -> int:
    """Write a pending or approved patch to its file, and record it in the ledger.

    A file that has changed since, by more than whitespace, is left alone: the patch is then a conflict (exit 1), see `rebase`.
    """
    living = open_memory(store_path, paths, ledger=ledger, records=True)
    found = find_patch(living, patch_id)
    patch = _or_cannot("apply", lambda: living.apply(found, by=by, reason=reason, content=content))
    left = evidence_left(living, patch, ledger)
    return _done(patch, f"Applied patch {patch.patch_id} to {patch.file_path}", as_json, left)


@memory.command(short_help="Offer a diverged patch for what the file holds now.")
def rebase(
    patch_id: PatchId, by: By = None, paths: Paths = None, store_path: StorePath = None, as_json: Json = False
) -> int:
    """Merge a patch with what its file holds now, and store the result as a new pending patch. Nothing is written to the file."""
    living = open_memory(store_path, paths)
    found = find_patch(living, patch_id)
    patch = _or_cannot("rebase", lambda: living.rebase(found, by=by))
    return _done(patch, f"Rebased patch {found} as {patch.patch_id}: review it", as_json)


@memory.command(short_help="Take an applied patch back.")
def revert(
    patch_id: PatchId,
    reason: Reason = "",
    by: By = None,
    paths: Paths = None,
    ledger: Evidence = None,
    store_path: StorePath = None,
    as_json: Json = False,
) -> int:
    """Take an applied patch out of its file and record it in the ledger. What was changed later stays, or nothing is done."""
    living = open_memory(store_path, paths, ledger=ledger, records=True)
    found = find_patch(living, patch_id)
    patch = _or_cannot("revert", lambda: living.revert(found, by=by, reason=reason))
    left = evidence_left(living, patch, ledger)
    return _done(patch, f"Reverted patch {patch.patch_id} — restored {patch.file_path}", as_json, left)


@memory.command(short_help="Show patches, newest last.")
def log(
    status: Annotated[
        str | None,
        typer.Option(metavar="STATUS", help="Only pending, approved, applied, rejected, reverted or conflict."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many, the newest.")] = 20,
    output_format: Annotated[str, typer.Option("--format", metavar="FORMAT", help="table or json.")] = "table",
    store_path: StorePath = None,
    as_json: Json = False,
) -> int:
    """Show the patches of a store, newest last, each in its present status; one that does not verify is marked.

    `review --patch-id` shows one with its history.
    """
    from typing import get_args

    from phionyx_letta.memory.patches import PatchStatus
    from phionyx_letta.memory.reviewing import listed

    if status is not None and status not in get_args(PatchStatus):
        raise CommandError(f"there is no status {status!r}", f"give one of {', '.join(get_args(PatchStatus))}")
    if output_format not in ("table", "json"):
        raise CommandError(f"there is no format {output_format!r}", "give table or json")
    living = open_memory(store_path, None)
    patches = [
        listed(one, living.verifier, living.store, living.targets, living.policy)
        for one in living.store.list_by_status(status, limit=limit)
    ]
    answer(
        {"patches": patches, "count": len(patches)},
        as_json=as_json or output_format == "json",
        show=lambda console: print_log(console, patches),
    )
    return 0


_COMMANDS: dict[str, Callable[..., int]] = {
    one.__name__: one for one in (review, approve, reject, apply, rebase, revert, log)
}


def run_memory(args: argparse.Namespace) -> None:
    """Run one memory command from parsed arguments, as the seed's command line does; ends with `SystemExit` where it fails.

    Args:
        args: `memory_command` and the options of that command by their names (`patch_id`, `store_path`, `status`, `limit`,
            `output_format`, …); what is missing has its default.
    """
    command: Callable[..., int] | None = _COMMANDS.get(getattr(args, "memory_command", None) or "")
    given = {name: value for name, value in vars(args).items() if name != "memory_command" and value is not None}
    try:
        if command is None:
            raise CommandError("there is no such memory command", f"give one of {', '.join(_COMMANDS)}")
        known = command.__annotations__
        code = command(**{name: value for name, value in given.items() if name in known})
    except PhionyxError as error:
        complain(error.message, error.remedy, as_json=bool(given.get("as_json")))
        code = exit_code(error)
    if code:
        sys.exit(code)


def _own(patch: MemoryPatch | PatchSummary) -> bool:
    """Whether it is no patch of Letta Code's, which `code review` shows."""
    from phionyx_letta.memory.patches import CODE_SESSION

    return not (patch.session_id or "").startswith(CODE_SESSION)


def _or_cannot(act: str, do: Callable[[], MemoryPatch]) -> MemoryPatch:
    """Do it; what the target or the signature forbids is said in the seed's words."""
    try:
        return do()
    except (DiffConflictError, PatchChanged, UntrustedPatch, TargetRefused) as error:
        raise CommandError(f"Cannot {act}: {error.message}", error.remedy, FAILED) from error


def _done(patch: MemoryPatch, message: str, as_json: bool, left: Mapping[str, Any] | None = None) -> int:
    def show(console: Any) -> None:
        console.print(safe(message), soft_wrap=True)
        if left is not None:
            print_evidence(console, left)

    answer(_shown(patch) | ({"evidence": left} if left is not None else {}), as_json=as_json, show=show)
    return 0


def _shown(patch: MemoryPatch) -> dict[str, Any]:
    from phionyx_letta.memory.patches import content_digest

    names = (
        "patch_id",
        "status",
        "file_path",
        "category",
        "rationale",
        "session_id",
        "created_at",
        "applied_at",
        "reverted_at",
    )
    return {**{name: getattr(patch, name) for name in names}, "content": content_digest(patch)}
