"""Writing a bundle: everything a reviewer needs in one zip, from a ledger or a store of envelopes.

Nothing is checked while writing: a ledger that was tampered with makes a bundle that fails, which is what evidence is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from phionyx_letta import __version__
from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.envelope import SCHEMA_ID, envelope_line
from phionyx_letta.errors import NoteError
from phionyx_letta.evidence.container import (
    CHECKPOINTS,
    ENVELOPES,
    HISTORY,
    KEYS,
    LAYOUT,
    README,
    SCHEMA,
    SCRIPT,
    BundleWriter,
)
from phionyx_letta.keys import Keyring, Statement, statements_in
from phionyx_letta.notes import parse_note
from phionyx_letta.signing import key_id_of

__all__ = ["Exported", "FromStore", "Material", "write_bundle"]

#: Most checkpoints in a bundle: each is a place where the log is shown, and the newest covers all before it.
_MOST_CHECKPOINTS = 1000


class Material(Protocol):
    """What a bundle is made of: `ledger.gathering.Gathered`, or `FromStore`."""

    @property
    def size(self) -> int | None:
        """Of the log; None where there is none."""
        ...

    @property
    def whole(self) -> bool:
        """Whether it is all of the log."""
        ...

    @property
    def checkpoints(self) -> list[str]:
        """Signed checkpoints, as notes."""
        ...

    @property
    def statements(self) -> list[str]:
        """Statements about keys, as notes."""
        ...

    def lines(self) -> Iterator[bytes]:
        """Yield the envelopes, each with a newline."""
        ...

    def layout(self, cuts: Iterable[int]) -> Iterator[bytes]:
        """Yield the lines of the log's layout."""
        ...


@dataclass
class FromStore:
    """Chains of a store, which has no log: one after the other."""

    chains: Sequence[Iterable[dict[str, Any]]]
    size: int | None = None
    whole: bool = False
    checkpoints: list[str] = field(default_factory=list)
    statements: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[bytes]:
        """Yield the envelopes of chain after chain."""
        for chain in self.chains:
            for envelope in chain:
                yield envelope_line(envelope).encode("ascii") + b"\n"

    def layout(self, cuts: Iterable[int]) -> Iterator[bytes]:
        """Yield nothing: there is no log."""
        return iter(())


@dataclass(frozen=True)
class Exported:
    """What was written."""

    envelopes: int
    checkpoints: int
    inflates: bool
    """It packs so well that readers would take it for a bomb: write it again uncompressed."""


def write_bundle(
    path: Path,
    material: Material,
    *,
    public_keys: Sequence[str] = (),
    checkpoints: Sequence[str] = (),
    created_utc: str,
    compressed: bool = True,
) -> Exported:
    """Write a bundle to a new file.

    Args:
        path: of the file, which must not exist.
        material: what goes in.
        public_keys: that are put in for orientation; with them, checkpoints that none of them signed are left out.
        checkpoints: more of them, as notes: from sinks.
        created_utc: when, for the manifest.
        compressed: False where a bundle would inflate so much that readers refuse it.

    Raises:
        ProofError: leaves of the log are missing, so a part of it cannot be shown.
    """
    ring = _ring(public_keys, material.statements)
    notes = _chosen([*material.checkpoints, *checkpoints], ring) if material.size is not None else []
    statements = list(_statements(material.statements))
    count = _Count()
    writer = BundleWriter(path, compressed=compressed)
    try:
        writer.add(README, [_shipped("evidence", "bundle_readme.md")])
        writer.add(SCRIPT, [_shipped("evidence", SCRIPT)])
        writer.add(SCHEMA, [_shipped("schemas", f"{SCHEMA_ID}.json")])
        writer.add(KEYS, [f"{key} {key_id_of(key)}\n".encode() for key in (ring.public_keys if ring else ())])
        writer.add(HISTORY, [f"{one.note}\n".encode() for one in statements])
        writer.add(CHECKPOINTS, [f"{note}\n".encode() for _, note in notes])
        if material.size is not None:
            cuts = [size for size, _ in notes] + [one.checkpoint.size for one in statements]
            writer.add(LAYOUT, material.layout(cuts))
        writer.add(ENVELOPES, count.each(material.lines()))
        whole = material.whole and material.size is not None
        facts = {"package_version": __version__, "created_utc": created_utc, "envelopes": count.value}
        writer.close({**facts, "log_size": material.size, "whole": whole})
    except BaseException:
        writer.abandon()
        raise
    return Exported(count.value, len(notes), writer.inflates)


class _Count:
    value = 0

    def each(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in lines:
            self.value += 1
            yield line


def _ring(public_keys: Sequence[str], statements: Iterable[str]) -> Keyring | None:
    if not public_keys:
        return None
    ring = Keyring(list(dict.fromkeys(public_keys)))
    ring.learn(_statements(statements))
    return ring


def _statements(notes: Iterable[str]) -> Iterator[Statement]:
    return statements_in(dict.fromkeys(notes))


def _chosen(notes: Iterable[str], ring: Keyring | None) -> list[tuple[int, str]]:
    """Return (size, note) of those that a known key signed, by size, at most ``_MOST_CHECKPOINTS``: the newest is among them."""
    found: dict[str, int] = {}
    for note in notes:
        with suppress(NoteError):
            parsed = parse_note(note)
            point = Checkpoint.parse(parsed.text)
            if ring is not None:
                ring.check_checkpoint(point, parsed)
            found[str(parsed)] = point.size
    by_size = sorted((size, note) for note, size in found.items())
    step = -(-len(by_size) // _MOST_CHECKPOINTS) or 1
    return by_size[::-1][::step][::-1]


def _shipped(*parts: str) -> bytes:
    return files("phionyx_letta").joinpath(*parts).read_bytes()
