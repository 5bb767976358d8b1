"""`code review`, `approve`, `reject`, `rebase`, `apply`, `revert`: patches of the memories of Letta Code, in the ledger's database.

They know these memories and sign with the ledger's key; `memory` with the same store would know neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phionyx_letta.cli.code import CodeLedger, LettaDir, chosen_memories, ledger_url
from phionyx_letta.cli.code_hooks import code
from phionyx_letta.cli.failures import FAILED, OK, CommandError
from phionyx_letta.cli.memory import By, PatchId, Reason, Seen
from phionyx_letta.cli.memory_pages import print_log, print_review
from phionyx_letta.cli.memory_sources import find_patch
from phionyx_letta.cli.options import Json
from phionyx_letta.cli.output import answer, safe
from phionyx_letta.errors import TargetRefused

if TYPE_CHECKING:
    from rich.console import Console

    from phionyx_letta.letta_code.places import AgentMemory
    from phionyx_letta.letta_code.proposals import Proposals
    from phionyx_letta.memory import LivingMemory, MemoryPatch
    from phionyx_letta.memory.stored import PatchSummary

__all__ = ["apply", "approve", "code", "rebase", "reject", "revert", "review"]


@code.command(short_help="List the patches that wait, show one, or go through them.")
def review(
    patch_id: Annotated[
        str | None, typer.Option("--patch-id", metavar="ID", help="Show this patch in detail, whatever its status.")
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Go through the pending patches: approve, reject, edit or skip.")
    ] = False,
    by: By = None,
    letta_dir: LettaDir = None,
    ledger: CodeLedger = None,
    as_json: Json = False,
) -> int:
    """List the patches that are pending or approved; with --patch-id show one: its diff, why, on what evidence, and its trust."""
    from phionyx_letta.memory.reviewing import listed

    living = _living(letta_dir, ledger, decides=interactive)

    def listing() -> int:
        waiting = [one for status in ("pending", "approved") for one in living.store.list_by_status(status)]
        patches = [
            listed(one, living.verifier, living.store, living.targets, living.policy)
            for one in waiting
            if _is_here(living, one)
        ]
        page = {"patches": patches, "count": len(patches)}
        answer(page, as_json=as_json, show=lambda console: print_log(console, patches))
        return OK

    return print_review(
        living,
        patch_id,
        listing,
        interactive=interactive,
        by=by,
        as_json=as_json,
        lists="code review",
        own=partial(_is_here, living),
    )


@code.command(short_help="Approve a pending patch without applying it.")
def approve(
    patch_id: PatchId,
    content: Seen = None,
    reason: Reason = "",
    by: By = None,
    letta_dir: LettaDir = None,
    ledger: CodeLedger = None,
    as_json: Json = False,
) -> int:
    """Approve a pending patch; `code apply` then commits it."""
    living = _living(letta_dir, ledger)
    return _told(
        living.approve(find_patch(living, patch_id, "code review"), by=by, reason=reason, content=content), as_json
    )


@code.command(short_help="Reject a patch for good.")
def reject(
    patch_id: PatchId,
    reason: Reason = "",
    by: By = None,
    letta_dir: LettaDir = None,
    ledger: CodeLedger = None,
    as_json: Json = False,
) -> int:
    """Reject a patch: its fact is not proposed again unless it changes."""
    living = _living(letta_dir, ledger)
    return _told(living.reject(find_patch(living, patch_id, "code review"), reason, by=by), as_json)


@code.command(short_help="Offer a diverged patch for what the file holds now.")
def rebase(
    patch_id: PatchId, by: By = None, letta_dir: LettaDir = None, ledger: CodeLedger = None, as_json: Json = False
) -> int:
    """Merge a patch with what HEAD holds now, and store the result as a new pending patch. Nothing is committed."""
    living = _living(letta_dir, ledger)
    return _told(living.rebase(find_patch(living, patch_id, "code review"), by=by), as_json)


@code.command(short_help="Commit an approved patch to a memory.")
def apply(
    patch_id: PatchId,
    content: Seen = None,
    by: By = None,
    letta_dir: LettaDir = None,
    ledger: CodeLedger = None,
    as_json: Json = False,
) -> int:
    """Commit a pending or approved patch to its agent's memory, through Letta's own validator, and record the commit.

    HEAD has to be the commit that was read, and everything has to be committed; a file that changed since is a conflict (exit 1).
    Patches are listed, shown, approved and rejected with `code review`, `code approve` and `code reject`.
    """
    return _decided("apply", patch_id, by, letta_dir, ledger, as_json, content)


@code.command(short_help="Take an applied patch back by a new commit.")
def revert(
    patch_id: PatchId, by: By = None, letta_dir: LettaDir = None, ledger: CodeLedger = None, as_json: Json = False
) -> int:
    """Take an applied patch out of its agent's memory by a new commit, and record that. What was changed later stays."""
    return _decided("revert", patch_id, by, letta_dir, ledger, as_json)


def _decided(
    act: str,
    prefix: str,
    by: str | None,
    letta_dir: Path | None,
    ledger: str | None,
    as_json: bool,
    content: str | None = None,
) -> int:
    from phionyx_letta.errors import TargetRefused
    from phionyx_letta.letta_code.cursor import foreign_to
    from phionyx_letta.letta_code.sealing import ingest as record
    from phionyx_letta.letta_code.sealing import opened_ledger
    from phionyx_letta.plugin.runtime import load_key
    from phionyx_letta.settings import load_settings

    settings, url = load_settings(), ledger_url(ledger)
    memories = chosen_memories(None, None, letta_dir)
    proposals = _proposals(url, memories)
    patch_id = find_patch(proposals.living, prefix, "code review")
    known = proposals.living.store.get(patch_id)
    if known is not None:
        with opened_ledger(url) as opened:  # the commit will name the newest envelope
            before = record(opened, load_key(settings), settings, _of_patch(memories, known.file_path))
            with opened.engine.connect() as connection:
                other = foreign_to(connection, load_key(settings).signer, known.file_path.partition("/")[0])
        for problem in before.problems:  # what cannot be recorded is not committed either
            raise TargetRefused(f"nothing was committed: {problem['what']}", problem["remedy"])
        if other is not None:
            raise TargetRefused(
                f"nothing was committed: it could not be recorded, for the agent's chain has envelopes of another source ({other})",
                "give Letta Code a ledger of its own: --ledger FILE",
            )
    patch = proposals.apply(patch_id, by=by, content=content) if act == "apply" else proposals.revert(patch_id, by=by)
    with opened_ledger(url) as opened:
        result = record(opened, load_key(settings), settings, _of_patch(memories, patch.file_path))
    page = {
        "patch_id": patch.patch_id,
        "status": patch.status,
        "file_path": patch.file_path,
        "envelopes": result.envelopes,
        "told": proposals.targets.told,
        "problems": result.problems,
    }

    def show(console: Console) -> None:
        line = f"{patch.status} patch {patch.patch_id} to {patch.file_path}; {result.envelopes} envelopes"
        console.print(safe(line), soft_wrap=True)
        for one in (*proposals.targets.told, *(problem["what"] for problem in result.problems)):
            console.print(safe(one), style="yellow", soft_wrap=True)

    answer(page, as_json=as_json, show=show)
    return FAILED if result.problems else OK


def _of_patch(memories: list[AgentMemory], name: str) -> list[AgentMemory]:
    found = [one for one in memories if one.agent_id == name.partition("/")[0]]
    for one in found:
        if one.others:
            folders = ", ".join(str(path) for path in (one.path, *one.others))
            raise CommandError(
                f"the agent {one.agent_id} has more than one memory: {folders}", "move away what is not its memory"
            )
    return found


def _proposals(url: str, memories: Sequence[AgentMemory], *, decides: bool = True) -> Proposals:
    """The patches in a ledger that is there; only who decides needs a key, and none is made."""
    from phionyx_letta.cli.memory_sources import missing_file
    from phionyx_letta.cli.seal import existing_key, signing_key
    from phionyx_letta.letta_code.proposals import Proposals
    from phionyx_letta.memory.policy import Policy
    from phionyx_letta.settings import load_settings
    from phionyx_letta.signing import UnsignedSigner

    if missing := missing_file(url):
        raise CommandError(
            f"there is no ledger at {missing}: nothing was recorded or proposed yet",
            "record first: phionyx-letta code ingest, or give --ledger",
        )
    settings = load_settings()
    key = signing_key() if decides else existing_key(settings)
    policy = Policy.load(settings.reviewers) if settings.reviewers else None
    return Proposals(url, memories, key.signer if key else UnsignedSigner(), policy=policy)


def _living(letta_dir: Path | None, ledger: str | None, *, decides: bool = True) -> LivingMemory:
    return _proposals(ledger_url(ledger), chosen_memories(None, None, letta_dir), decides=decides).living


def _is_here(living: LivingMemory, patch: MemoryPatch | PatchSummary) -> bool:
    """Whether it is of a memory here: the ledger's database may hold patches of a server's blocks too."""
    try:
        living.targets.resolve(patch.file_path)
    except TargetRefused:
        return False
    return True


def _told(patch: MemoryPatch, as_json: bool) -> int:
    page: dict[str, Any] = {"patch_id": patch.patch_id, "status": patch.status, "file_path": patch.file_path}
    line = f"{patch.status} patch {patch.patch_id} to {patch.file_path}"
    answer(page, as_json=as_json, show=lambda console: console.print(safe(line), soft_wrap=True))
    return OK
