"""Where the envelope of an applied or reverted patch went, and the command that checks it, as it can be typed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phionyx_letta.cli.output import safe

if TYPE_CHECKING:
    from rich.console import Console

    from phionyx_letta.memory import LivingMemory, MemoryPatch

__all__ = ["evidence_left", "print_evidence"]


def evidence_left(living: LivingMemory, patch: MemoryPatch, given: str | None) -> dict[str, Any] | None:
    """Return `ledger`, `trace_id` and `verify`, a command line, of what the patch's change left; None where nothing was to be left.

    Of a block, which Letta wrote, `verify` shows the envelope, once that is sealed.

    Args:
        living: what applied the patch.
        patch: the patch.
        given: of `--ledger`; a URL with a password in it is not repeated, so there is no command then.
    """
    from phionyx_letta.cli.ledgers import shown_url
    from phionyx_letta.ledger.filesystem import FilesystemEnvelopeStore
    from phionyx_letta.ledger.sql import SqlLedger
    from phionyx_letta.memory.reviewing import last_envelope
    from phionyx_letta.signing import Ed25519Signer

    store, target = living.envelopes, living.targets.resolve(patch.file_path)
    if (
        target.records_itself
    ):  # the server it was written through has the envelope, in its agent's chain and under its key
        reference = last_envelope(patch)
        return {
            "ledger": "the server's ledger",
            "trace_id": None,
            "verify": shlex.join(["phionyx-letta", "show", reference]) if reference else None,
        }
    trace = target.identity
    words, printable = ["phionyx-letta", "verify"], True
    if isinstance(store, FilesystemEnvelopeStore):
        where = str(store.root.absolute())
        words = [*words, where]
    elif isinstance(store, SqlLedger):
        where = shown_url(store)
        if store.url.get_backend_name() == "sqlite":
            words = [*words, str(store.url.database)]
        elif store.url.password is None:
            words = [*words, store.url.render_as_string(hide_password=False)]
        elif given:
            printable = False
    else:
        return None
    key = ["--key", living.signer.public_key_hex] if isinstance(living.signer, Ed25519Signer) else []
    command = shlex.join([*words, "--trace", trace, *key]) if printable else None
    return {"ledger": where, "trace_id": trace, "verify": command}


def print_evidence(console: Console, left: Mapping[str, Any]) -> None:
    """Print where it went, and the command on a line of its own."""
    console.print(f"Recorded in {safe(left['ledger'])}; to check it:", soft_wrap=True)
    unsaid = (
        "phionyx-letta verify, with the URL you gave" if left["trace_id"] else "phionyx-letta log, once it is sealed"
    )
    command = left["verify"] or unsaid
    console.print(f"  {safe(command)}", soft_wrap=True)
