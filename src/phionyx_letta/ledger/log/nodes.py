"""What a store keeps of the log's tree, and how proofs are made from it.

Kept are the hash of each leaf, beside its envelope, and the complete subtrees of 256 leaves and more: one row in 128 envelopes.
The smaller ones are hashed anew from at most 256 leaves at each end of a proof (C2SP tlog-tiles cuts its tiles at the same
height). Measured on PostgreSQL, batches of 500: see docs/log.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from phionyx_letta.errors import ProofError
from phionyx_letta.merkle import HASH_BYTES, Frontier, Node, node_hash

__all__ = ["TILE_LEVEL", "TiledNodes", "grow"]

#: Complete subtrees of 2**8 leaves and more are kept.
TILE_LEVEL = 8

KeptNode = tuple[Node, bytes]


def grow(frontier: Frontier, leaves: Iterable[bytes]) -> list[KeptNode]:
    """Append leaves, given by their hashes, and return the complete subtrees that are to be kept."""
    return [kept for leaf in leaves for kept in frontier.append(leaf) if kept[0][0] >= TILE_LEVEL]


class TiledNodes:
    """A ``NodeSource`` over such a store."""

    def __init__(
        self,
        leaves: Callable[[int, int], Sequence[bytes]],
        upper: Callable[[Sequence[Node]], Sequence[bytes]],
    ) -> None:
        """Read from a store.

        Args:
            leaves: gives the hashes of the leaves from the first up to the second number.
            upper: gives the hashes of kept subtrees, in their order.
        """
        self._leaves = leaves
        self._upper = upper

    def hashes(self, nodes: Sequence[Node], /) -> Sequence[bytes]:
        """Return the hashes of complete subtrees; see ``NodeSource``.

        Raises:
            ProofError: the store does not have them.
        """
        kept = [node for node in nodes if node[0] >= TILE_LEVEL]
        found = dict(zip(kept, self._asked(self._upper(kept), len(kept)), strict=True)) if kept else {}
        tiles: dict[int, list[Node]] = {}
        for level, index in nodes:
            if level < TILE_LEVEL:
                tiles.setdefault(index >> (TILE_LEVEL - level), []).append((level, index))
        for wanted in tiles.values():
            found.update(self._lower(wanted))
        return [found[node] for node in nodes]

    def _lower(self, wanted: Sequence[Node]) -> dict[Node, bytes]:
        """Hash subtrees of one tile from its leaves."""
        start = min(index << level for level, index in wanted)
        end = max((index + 1) << level for level, index in wanted)
        leaves = self._asked(self._leaves(start, end), end - start)
        return {
            (level, index): _subtree(leaves[(index << level) - start : ((index + 1) << level) - start])
            for level, index in wanted
        }

    @staticmethod
    def _asked(hashes: Sequence[bytes], count: int) -> Sequence[bytes]:
        if len(hashes) != count or any(type(one) is not bytes or len(one) != HASH_BYTES for one in hashes):
            raise ProofError(
                "the stored tree has not that many leaves, or was damaged",
                "ask within the log's size; verify the ledger",
            )
        return hashes


def _subtree(hashes: Sequence[bytes]) -> bytes:
    """Return the root over a power of two of leaves."""
    while len(hashes) > 1:
        hashes = [node_hash(hashes[place], hashes[place + 1]) for place in range(0, len(hashes), 2)]
    return hashes[0]
