"""What a memory command works on: the store, the managed files, where evidence goes, a session's file, a patch by its id."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phionyx_letta.cli.failures import CommandError
from phionyx_letta.errors import PatchNotFound

if TYPE_CHECKING:
    from phionyx_letta.ledger.store import EnvelopeStore
    from phionyx_letta.memory import LivingMemory
    from phionyx_letta.memory.block_rest import RestBlocks
    from phionyx_letta.memory.policy import Policy
    from phionyx_letta.memory.stored import Patches
    from phionyx_letta.settings import Settings
    from phionyx_letta.signing import Signer, Verifier

__all__ = ["STORE", "find_patch", "missing_file", "open_memory", "read_session", "store_path_of"]

STORE = ".synapsekit_memory_patches.jsonl"
"""The seed's default."""


def store_path_of(given: str | None) -> str:
    """Where patches are: the option, else PHIONYX_LETTA_MEMORY_STORE, else the seed's default.

    Raises:
        SettingsError: a setting cannot be used.
    """
    from phionyx_letta.settings import load_settings

    return given or load_settings().memory_store or STORE


def missing_file(url: str) -> str | None:
    """The file of a SQLite database that does not exist: opening it would make it."""
    if "://" not in url:
        return None
    from phionyx_letta.ledger.tables import ledger_url

    parsed = ledger_url(url)
    file = parsed.database if parsed.get_backend_name() == "sqlite" else None
    return file if file and not Path(file).is_file() else None


def elsewhere(given: str | None) -> str | None:
    """What to say of an empty store that nobody named, where a Letta server's database is: its sessions propose into that."""
    from phionyx_letta.settings import load_settings

    if given or load_settings().memory_store or not os.environ.get("LETTA_PG_URI"):
        return None
    return (
        f"This is {STORE}; the sessions of a server propose into its database: "
        'export PHIONYX_LETTA_MEMORY_STORE="$LETTA_PG_URI"'
    )


_MOST_BYTES = 64 * 2**20


def open_memory(
    store_path: str | None,
    paths: Sequence[str] | None,
    *,
    ledger: str | None = None,
    records: bool = False,
    proposing: bool = False,
    occurrence_path: str | None = None,
    **options: Any,
) -> LivingMemory:
    """Open a `LivingMemory` as the options and settings say.

    Args:
        store_path: the patch store; None for the setting's.
        paths: of `--path`.
        ledger: of `--ledger`.
        records: whether the command writes, and so leaves envelopes.
        proposing: files are sent to a model, so their paths must be named.
        occurrence_path: of `--occurrence-path`.
        options: for `LivingMemory`.

    Raises:
        CommandError: no paths are named where they must be.
        SettingsError, SigningKeyError: a setting cannot be used.
    """
    from phionyx_letta.memory import LivingMemory
    from phionyx_letta.memory.block_rest import FilesAndBlocks
    from phionyx_letta.memory.managed import ManagedFiles
    from phionyx_letta.memory.opening import OCCURRENCE_PATH, open_store
    from phionyx_letta.settings import load_settings

    settings = load_settings()
    store_path = store_path_of(store_path)
    managed = list(paths or ()) or [one for one in (settings.memory_paths or "").split(os.pathsep) if one.strip()]
    if proposing and not managed:
        raise CommandError(
            "no managed files are named, and their text is sent to the model",
            "give --path, or set PHIONYX_LETTA_MEMORY_PATHS",
        )
    signer, verifier = _keys(settings.memory_secret)
    if not proposing and (missing := missing_file(store_path)):
        raise CommandError(
            f"there is no database {missing}, so no patch is stored there", "give the one patches are proposed into"
        )
    store = open_store(store_path)
    files = ManagedFiles(managed or [_beside(store_path)])
    return LivingMemory(
        [],
        store=store,
        targets=FilesAndBlocks(files, _blocks(settings, signer, store)),
        occurrence_path=occurrence_path or OCCURRENCE_PATH,
        signer=signer,
        verifier=verifier,
        policy=_policy(settings.reviewers),
        envelopes=_envelopes(ledger or settings.ledger) if records else None,
        **options,
    )


def _blocks(settings: Settings, signer: Signer, store: Patches) -> RestBlocks:
    """The blocks of the Letta server that is configured."""
    from phionyx_letta.memory.block_rest import RestBlocks

    return RestBlocks(
        settings.server_url,
        signer,
        token=settings.server_token.get_secret_value() if settings.server_token else None,
        ledger=getattr(store, "ledger", None),
        read_only=settings.session_read_only,
    )


def find_patch(living: LivingMemory, prefix: str, shows: str = "memory log") -> str:
    """Return the one id that is, or begins with, `prefix`; `shows` is the command that lists the patches.

    Raises:
        PatchNotFound: there is none, or more than one.
    """
    found = living.store.find(prefix) if prefix else []
    if prefix in found or len(found) == 1:
        return prefix if prefix in found else found[0]
    if not found:
        raise PatchNotFound(f"Patch '{prefix}' not found.", f"`phionyx-letta {shows}` shows what there is")
    shown = ", ".join(found[:10])
    raise PatchNotFound(f"{len(found)} patches begin with '{prefix}': {shown}", "give more digits")


def read_session(path: Path) -> dict[str, Any]:
    """Read a session's file: the arguments of `propose_from_session` for it.

    Raises:
        CommandError: it cannot be read, is too large, or holds no text.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}", "give a session's file") from None
    except UnicodeDecodeError:
        raise CommandError(f"{path} is not UTF-8 text", "convert it to UTF-8") from None
    if len(data) > _MOST_BYTES:
        raise CommandError(f"{path} has more than 64 MB", "split it into sessions")
    if path.suffix in (".json", ".jsonl", ".ndjson"):
        return {"session_records": _records(path, text)}
    return {"transcript": text}


def _records(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        if path.suffix == ".json":
            found = json.loads(text)
            found = found.get("messages") if isinstance(found, dict) else found
        else:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise CommandError(
            f"{path} does not hold a list of messages", "give records with role and content, or a .txt file"
        )
    return found


def _beside(store_path: str) -> str:
    """The Markdown files in and below the store's folder."""
    folder = "." if "://" in store_path else os.path.dirname(store_path) or "."
    return os.path.join(glob.escape(folder), "**", "*.md")


def _keys(secret: str | None) -> tuple[Signer, Verifier | None]:
    """What signs, and what is trusted beside it; the secret signs only where no key is configured."""
    from phionyx_letta.memory.opening import keys
    from phionyx_letta.signing import HmacSigner, UnsignedSigner, get_signer

    signer = get_signer()
    if secret and isinstance(signer, UnsignedSigner):
        signer = HmacSigner(secret)
    return keys(True, "", signer, None)


def _policy(named: str | None) -> Policy | None:
    """Who may decide, where PHIONYX_LETTA_REVIEWERS names them for this host too."""
    from phionyx_letta.memory.policy import Policy

    return Policy.load(named) if named else None


def _envelopes(where: str | None) -> EnvelopeStore:
    from phionyx_letta.cli.ledgers import is_sqlite
    from phionyx_letta.ledger.filesystem import FilesystemEnvelopeStore

    if where is None or not where.strip():
        return FilesystemEnvelopeStore()
    path = Path(where)
    if "://" not in where and not (path.is_file() and is_sqlite(path)):
        return FilesystemEnvelopeStore(where)
    from phionyx_letta.ledger.sql import SqlLedger

    return SqlLedger(where if "://" in where else f"sqlite:///{path.absolute()}")
