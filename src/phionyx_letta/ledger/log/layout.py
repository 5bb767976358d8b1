"""Where the envelopes of a bundle stand in the log: one text file, read and written as a stream.

Two kinds of lines, in the order of the log: ``envelopes 12`` (the next twelve leaves are the next twelve envelopes) and
``subtree 3 <64 hex digits>`` (the next 2**3 leaves are not in the bundle; this is the hash of the complete subtree they are).
So a part of a ledger proves its place under every checkpoint with a few hashes for each gap and no proof per envelope, and
tells of the rest nothing but its size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import IO

from phionyx_letta.errors import TornStoreError
from phionyx_letta.merkle import HASH_BYTES, MAX_SIZE, Node, subtrees

__all__ = ["Envelopes", "Subtree", "read_layout", "write_layout"]

_LINE = re.compile(rb"(?:envelopes ([1-9][0-9]{0,18})|subtree (0|[1-9][0-9]?) ([0-9a-f]{64}))\n")
_LINE_BYTES = 128
#: Nodes that are asked for at once.
_AT_ONCE = 500


@dataclass(frozen=True)
class Envelopes:
    """The next ``count`` leaves are the next envelopes of the bundle."""

    count: int


@dataclass(frozen=True)
class Subtree:
    """The next ``2**level`` leaves are not in the bundle."""

    level: int
    hash: bytes


def read_layout(lines: IO[bytes]) -> Iterator[Envelopes | Subtree]:
    """Yield what the lines say.

    Raises:
        TornStoreError: a line is none of the two kinds.
    """
    number = 0
    while line := lines.readline(_LINE_BYTES):
        number += 1
        found = _LINE.fullmatch(line)
        if found is None or (found[1] and int(found[1]) > MAX_SIZE):
            raise TornStoreError(f"line {number} of the log's layout is not one", "export the bundle again")
        yield Envelopes(int(found[1])) if found[1] else Subtree(int(found[2]), bytes.fromhex(found[3].decode("ascii")))


def write_layout(
    present: Iterable[int], size: int, cuts: Iterable[int], hashes: Callable[[Sequence[Node]], Sequence[bytes]]
) -> Iterator[str]:
    """Yield the lines of a layout.

    Args:
        present: places in the log of the envelopes in the bundle, rising.
        size: of the log.
        cuts: sizes at which the log is to be shown, those of checkpoints; no subtree stretches over one.
        hashes: gives the hashes of complete subtrees of the log.

    Raises:
        ProofError: the log's store has not all of them.
    """
    cut_at = sorted({cut for cut in cuts if 0 < cut < size})
    pieces = _pieces(present, size, cut_at)
    while batch := list(islice(pieces, _AT_ONCE)):
        nodes = [piece for piece in batch if isinstance(piece, tuple)]
        found = iter(hashes(nodes) if nodes else ())
        for piece in batch:
            yield f"envelopes {piece}\n" if isinstance(piece, int) else f"subtree {piece[0]} {_hex(next(found))}\n"


def _hex(value: bytes) -> str:
    assert len(value) == HASH_BYTES
    return value.hex()


def _pieces(present: Iterable[int], size: int, cuts: Sequence[int]) -> Iterator[int | Node]:
    """Yield the number of envelopes of each run, and the complete subtrees of each gap."""
    run, at, cut = 0, 0, 0
    for place in chain(present, [size]):
        if place == at and place < size:
            run, at = run + 1, at + 1
            continue
        if run:
            yield run
        while at < place:
            while cut < len(cuts) and cuts[cut] <= at:
                cut += 1
            end = min(place, cuts[cut]) if cut < len(cuts) else place
            yield from subtrees(at, end)
            at = end
        run, at = 1, place + 1
