"""What `LivingMemory` works with where its caller gives only paths: keys, stores, and the name of whoever decides."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from phionyx_letta.memory.kept import KeptSessions
from phionyx_letta.memory.occurrences import Occurrences, OccurrenceTracker
from phionyx_letta.memory.pii import MemoryPIIFilter
from phionyx_letta.memory.store import PatchStore
from phionyx_letta.memory.stored import Patches
from phionyx_letta.signing import (
    Ed25519Signer,
    HmacSigner,
    Signer,
    TrustedKeys,
    UnsignedSigner,
    Verifier,
    get_signer,
    load_verifier,
)

__all__ = ["OCCURRENCE_PATH", "STORE_PATH", "keys", "open_kept", "open_occurrences", "open_store", "reviewer"]

STORE_PATH = ".synapsekit_memory_patches.jsonl"
OCCURRENCE_PATH = ".synapsekit_memory_occurrences.json"
"""The seed's defaults, so that a store begun with the peer is taken up."""


def reviewer() -> str:
    """The name of whoever runs this program."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"


def keys(sign: bool, secret: str, signer: Signer | None, verifier: Verifier | None) -> tuple[Signer, Verifier | None]:
    """Return what signs and what verifies: what is given, else the secret, else the environment's key, else nothing.

    The keys of PHIONYX_LETTA_VERIFY_KEY (other reviewers') are trusted beside the own one, unless a verifier is given or nothing is
    to be signed.

    Raises:
        SigningKeyError: a key of the environment is missing or malformed.
    """
    if signer is None and sign:
        signer = HmacSigner(secret) if secret else get_signer()
    signer = signer or UnsignedSigner()
    if verifier is not None:
        return signer, verifier
    own = [signer.verifier()] if isinstance(signer, Ed25519Signer | HmacSigner) else []
    trusted = [*own, *(_others() if sign else [])]
    return signer, TrustedKeys(trusted) if len(trusted) > 1 else trusted[0] if trusted else None


def _others() -> list[Verifier]:
    """The keys of PHIONYX_LETTA_VERIFY_KEY: 64 hex digits or .pub files, separated like PATH."""
    named = os.environ.get("PHIONYX_LETTA_VERIFY_KEY", "").split(os.pathsep)
    return [load_verifier(name.strip()) for name in named if name.strip()]


def open_store(where: str) -> Patches:
    """Return the store at a path or, with `://`, in a database."""
    if "://" not in where:
        return PatchStore(where)
    from phionyx_letta.memory.store_sql import SqlPatchStore

    return SqlPatchStore(where)


def open_occurrences(store: Patches, path: str | None) -> Occurrences:
    """Return the tracker in the store's database, else the one at `path`; None keeps counts in memory."""
    if isinstance(store, PatchStore):
        return OccurrenceTracker(path)
    from phionyx_letta.memory.store_sql import SqlOccurrenceTracker, SqlPatchStore

    return SqlOccurrenceTracker(store.ledger) if isinstance(store, SqlPatchStore) else OccurrenceTracker(path)


def open_kept(store: Patches, pii: MemoryPIIFilter) -> KeptSessions | None:
    """Return where unanswered sessions are kept: beside a store in a file, nowhere with a database."""
    return KeptSessions(Path(f"{store.path}.sessions"), pii) if isinstance(store, PatchStore) else None
