"""Proofs from what a store keeps: leaves, and complete subtrees of 256 leaves and more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phionyx_letta.errors import ProofError
from phionyx_letta.ledger.log.nodes import TILE_LEVEL, TiledNodes, grow
from phionyx_letta.merkle import (
    Frontier,
    MemoryTree,
    Node,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    root_at,
    verify_consistency,
)

SIZE = 3_000
LEAVES = [leaf_hash(str(number).encode()) for number in range(SIZE)]
KEPT: dict[Node, bytes] = {}
FRONTIER = Frontier()
for start in range(0, SIZE, 37):
    KEPT.update(grow(FRONTIER, LEAVES[start : start + 37]))
TREE = MemoryTree(LEAVES)


class Store:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.read = 0
        self.asked = 0

    def leaves(self, start: int, end: int) -> Sequence[bytes]:
        self.asked += 1
        self.read += end - start
        return LEAVES[start:end]

    def upper(self, nodes: Sequence[Node]) -> Sequence[bytes]:
        self.asked += 1
        self.read += len(nodes)
        return [KEPT.get(node, b"") for node in nodes]


def test_one_row_in_128_envelopes_is_kept() -> None:
    assert len(KEPT) == sum(SIZE >> level for level in range(TILE_LEVEL, 12))
    assert len(KEPT) < SIZE / 126
    assert FRONTIER.root() == TREE.root()


@given(st.data())
@settings(max_examples=200)
def test_the_proofs_are_those_of_the_whole_tree(data: st.DataObject) -> None:
    new = data.draw(st.integers(1, SIZE))
    old = data.draw(st.integers(1, new))
    store = Store()
    source = TiledNodes(store.leaves, store.upper)
    proof = consistency_proof(source, old, new)
    assert proof == consistency_proof(TREE, old, new)
    assert verify_consistency(old, TREE.root(old), new, TREE.root(new), proof)
    assert store.asked <= 3
    assert store.read <= 2 * 256 + 64
    assert inclusion_proof(source, old - 1, new) == inclusion_proof(TREE, old - 1, new)
    assert root_at(source, new) == TREE.root(new)


@pytest.mark.parametrize("answer", [[], [b"short"], [None], ["x" * 32] * 300, [b"x" * 32] * 1000])
def test_a_store_that_lacks_rows_or_was_damaged_is_an_error(answer: list[Any]) -> None:
    whole = Store()
    with pytest.raises(ProofError, match="damaged"):
        consistency_proof(TiledNodes(lambda start, end: answer, whole.upper), 700, SIZE)
    with pytest.raises(ProofError, match="damaged"):
        consistency_proof(TiledNodes(whole.leaves, lambda nodes: answer), 700, SIZE)


def test_sizes_beyond_the_log_are_an_error() -> None:
    store = Store()
    source = TiledNodes(store.leaves, store.upper)
    for old, new in [(1, SIZE + 1), (SIZE, 2 * SIZE), (SIZE + 1, SIZE + 2), (1, 2**63 - 1)]:
        with pytest.raises(ProofError):
            consistency_proof(source, old, new)
