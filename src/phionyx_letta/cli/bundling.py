"""`export --bundle`: from a ledger or a store to one zip."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phionyx_letta.cli.failures import FAILED, CommandError
from phionyx_letta.cli.keys import trusted_keys
from phionyx_letta.cli.ledgers import is_store, ledger_name, open_database
from phionyx_letta.errors import PhionyxError, ProofError

if TYPE_CHECKING:
    from phionyx_letta.evidence.exporting import Exported, Material

__all__ = ["bundle"]


def bundle(
    output: Path,
    partial: Path,
    traces: Sequence[str],
    ledger: str | None,
    keys: list[str] | None,
    sources: Sequence[str],
) -> dict[str, Any]:
    """Write the bundle to ``partial``, which takes the place of ``output``; return what is in it.

    Raises:
        CommandError: a chain is not there, or checkpoints are given without a key to tell them by.
    """
    public = _public_keys(keys)
    with _material(ledger_name(ledger), traces) as material:
        checkpoints = _from_sources(sources, public, material.statements)
        try:
            done = _written(partial, material, public, checkpoints)
        except ProofError as error:
            raise CommandError(
                f"a part of this log cannot be shown: {error.message}",
                "export the whole ledger; `phionyx-letta verify` says what is wrong with it",
                FAILED,
            ) from error
    return {
        "output": str(output),
        "format": "bundle",
        "envelopes": done.envelopes,
        "log_size": material.size,
        "checkpoints": done.checkpoints,
        "public_keys": len(public),
    }


def _written(partial: Path, material: Material, public: list[str], checkpoints: list[str]) -> Exported:
    from phionyx_letta.evidence.exporting import write_bundle

    now = datetime.now(UTC).isoformat(timespec="seconds")
    options: dict[str, Any] = {"public_keys": public, "checkpoints": checkpoints, "created_utc": now}
    done = write_bundle(partial, material, **options)
    if done.inflates:
        partial.unlink()
        done = write_bundle(partial, material, **options, compressed=False)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    return done


@contextlib.contextmanager
def _material(name: str, traces: Sequence[str]) -> Iterator[Material]:
    if is_store(name):
        from phionyx_letta.evidence.exporting import FromStore
        from phionyx_letta.ledger.filesystem import FilesystemEnvelopeStore

        store = FilesystemEnvelopeStore(name)
        known = list(store.traces())
        _refuse_missing([trace for trace in traces if trace not in known])
        yield FromStore([_Again(store, trace) for trace in traces or known])
        return
    from phionyx_letta.ledger.gathering import gather

    with open_database(name) as database, gather(database, traces) as gathered:
        _refuse_missing(gathered.missing())
        yield gathered


class _Again:
    """A chain that can be read more than once."""

    def __init__(self, store: Any, trace: str) -> None:
        self._store, self._trace = store, trace

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._store.iter_chain(self._trace))


def _refuse_missing(traces: list[str]) -> None:
    if traces:
        raise CommandError(
            f"there is no chain {traces[0]!r} in this ledger", "`phionyx-letta log` shows what there is", FAILED
        )


def _from_sources(sources: Sequence[str], public: list[str], statements: list[str]) -> list[str]:
    """Return the notes of the checkpoints that a known key signed."""
    from phionyx_letta.cli.keys import keyring_of
    from phionyx_letta.ledger.log.reading import read_checkpoints

    if not sources:
        return []
    if not public:
        raise CommandError("checkpoints are told by the log's public key, and none is known here", "give it with --key")
    ring = keyring_of(public, statements)
    return [
        str(record.signed.note)
        for source in sources
        for record in read_checkpoints(source, ring.public_keys)
        if record.signed is not None
    ]


def _public_keys(given: list[str] | None) -> list[str]:
    """Those of --key and the settings, and that of the signing key of this host, of which only the public half is read.

    The key in this host's home is taken only where nothing else names one: it need not be the ledger's.
    """
    from phionyx_letta.settings import load_settings
    from phionyx_letta.signing import load_verifier

    keys = trusted_keys(given)
    found = keys.public_keys if keys is not None else []
    settings = load_settings()
    if settings.signing_key or not found:
        path = settings.signing_key or settings.home_path() / "signing.key"
        beside = Path(f"{path}.pub")
        if beside.is_file():
            with contextlib.suppress(PhionyxError):
                found.append(load_verifier(beside).public_key_hex)
    return list(dict.fromkeys(found))
