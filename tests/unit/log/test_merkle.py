"""The Merkle tree: published vectors, an independent implementation, and proofs bent in every way."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any

import pymerkle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phionyx_letta.errors import ProofError
from phionyx_letta.merkle import (
    EMPTY_ROOT,
    MAX_SIZE,
    Frontier,
    MemoryTree,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    node_hash,
    root_at,
    verify_consistency,
    verify_inclusion,
)

# The reference log of the Certificate Transparency implementations: its leaves, the roots of its eight sizes, its proofs.
CT_LEAVES = [
    bytes.fromhex(text)
    for text in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")
]
CT_ROOTS = [
    bytes.fromhex(text)
    for text in (
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
        "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
        "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
        "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
        "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
        "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
        "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
    )
]
A = "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7"
B = "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e"
C = "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4"
D = "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b"
E = "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0"
F = "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7"
G = "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"
H = "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"
J = "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a"
K = "b08693ec2e721597130641e8211e7eedccb4c26413963eee6c1e2ed16ffb1a5f"
CT_INCLUSION = [(0, 1, []), (0, 8, [A, B, C]), (5, 8, [D, E, F]), (2, 3, [G]), (1, 5, [H, B, D])]
CT_CONSISTENCY = [(1, 1, []), (1, 8, [A, B, C]), (6, 8, [J, E, F]), (2, 5, [B, D]), (6, 7, [J, K, F])]

SIZES = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65]


def tree_of(size: int) -> MemoryTree:
    return MemoryTree(leaf_hash(str(number).encode()) for number in range(size))


TREE = tree_of(max(SIZES) + 8)


def plain_root(leaves: list[bytes]) -> bytes:
    """RFC 6962, 2.1, as it is written there."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\0" + leaves[0]).digest()
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    return hashlib.sha256(b"\1" + plain_root(leaves[:k]) + plain_root(leaves[k:])).digest()


class TestPublishedVectors:
    def test_the_roots_of_the_reference_log(self):
        tree = MemoryTree(map(leaf_hash, CT_LEAVES))
        assert [tree.root(size) for size in range(9)] == CT_ROOTS

    @pytest.mark.parametrize(("index", "size", "proof"), CT_INCLUSION)
    def test_its_inclusion_proofs(self, index: int, size: int, proof: list[str]):
        tree = MemoryTree(map(leaf_hash, CT_LEAVES))
        expected = [bytes.fromhex(text) for text in proof]
        assert inclusion_proof(tree, index, size) == expected
        assert verify_inclusion(leaf_hash(CT_LEAVES[index]), index, size, expected, CT_ROOTS[size])

    @pytest.mark.parametrize(("old", "new", "proof"), CT_CONSISTENCY)
    def test_its_consistency_proofs(self, old: int, new: int, proof: list[str]):
        tree = MemoryTree(map(leaf_hash, CT_LEAVES))
        expected = [bytes.fromhex(text) for text in proof]
        assert consistency_proof(tree, old, new) == expected
        assert verify_consistency(old, CT_ROOTS[old], new, CT_ROOTS[new], expected)

    def test_the_example_tree_of_the_rfc(self):
        """RFC 6962, 2.1.3: the nodes of the proofs drawn there for seven leaves."""
        a, b, c, d, e, f, j = (leaf_hash(CT_LEAVES[i]) for i in range(7))
        g, h, i = node_hash(a, b), node_hash(c, d), node_hash(e, f)
        k, left = i, node_hash(g, h)
        tree = MemoryTree([a, b, c, d, e, f, j])
        assert inclusion_proof(tree, 0, 7) == [b, h, node_hash(k, j)]
        assert inclusion_proof(tree, 3, 7) == [c, g, node_hash(k, j)]
        assert inclusion_proof(tree, 4, 7) == [f, j, left]
        assert inclusion_proof(tree, 6, 7) == [i, left]
        assert consistency_proof(tree, 3, 7) == [c, d, g, node_hash(k, j)]
        assert consistency_proof(tree, 4, 7) == [node_hash(k, j)]
        assert consistency_proof(tree, 6, 7) == [i, j, left]


class TestAgainstOthers:
    def test_roots_by_the_definition(self):
        leaves = [str(number).encode() for number in range(70)]
        assert [TREE.root(size) for size in range(70)] == [plain_root(leaves[:size]) for size in range(70)]

    @given(st.lists(st.binary(max_size=40), max_size=80), st.data())
    def test_pymerkle_gives_the_same_roots_and_paths(self, entries: list[bytes], data: st.DataObject):
        theirs = pymerkle.InmemoryTree(algorithm="sha256")
        theirs.append_entries(entries)
        ours = MemoryTree(map(leaf_hash, entries))
        size = data.draw(st.integers(0, len(entries)))
        assert theirs.get_root(size) == root_at(ours, size)
        if size:
            index = data.draw(st.integers(0, size - 1))
            assert theirs.prove_inclusion(index + 1, size).path[1:] == inclusion_proof(ours, index, size)

    @given(st.integers(1, 80), st.data())
    def test_pymerkle_and_we_accept_each_others_pasts(self, new: int, data: st.DataObject):
        old = data.draw(st.integers(1, new))
        theirs = pymerkle.InmemoryTree(algorithm="sha256")
        theirs.append_entries([str(number).encode() for number in range(new)])
        proof = theirs.prove_consistency(old, new)
        tree = tree_of(new)
        ours = consistency_proof(tree, old, new)
        pymerkle.verify_consistency(tree.root(old), tree.root(new), proof, prior_size=old, later_size=new)
        assert verify_consistency(old, theirs.get_root(old), new, theirs.get_root(new), ours)


class TestFrontier:
    @pytest.mark.parametrize("size", SIZES)
    def test_it_continues_from_what_was_kept(self, size: int):
        kept = Frontier()
        for number in range(size):
            kept.append(leaf_hash(str(number).encode()))
        assert len(kept.hashes) == size.bit_count()
        resumed = Frontier(kept.size, kept.hashes)
        for number in range(size, size + 9):
            assert resumed.root() == TREE.root(number)
            resumed.append(leaf_hash(str(number).encode()))
        assert (resumed.size, resumed.root()) == (size + 9, tree_of(size + 9).root())

    def test_each_complete_subtree_is_told_once(self):
        frontier = Frontier()
        told = [node for number in range(100) for node, _ in frontier.append(leaf_hash(bytes([number])))]
        assert len(told) == len(set(told))
        assert set(told) == {(level, index) for level in range(7) for index in range(100 >> level)}

    @pytest.mark.parametrize(
        ("size", "hashes"),
        [
            (1, []),
            (0, [EMPTY_ROOT]),
            (3, [EMPTY_ROOT]),
            (1, [b"short"]),
            (1, ["x" * 32]),
            (-1, []),
            (True, [EMPTY_ROOT]),
            (MAX_SIZE + 1, [EMPTY_ROOT]),
            ("1", [EMPTY_ROOT]),
            (1, None),
            (None, []),
        ],
    )
    def test_what_is_no_frontier_is_refused(self, size: Any, hashes: Any):
        with pytest.raises(ProofError):
            Frontier(size, hashes)

    @pytest.mark.parametrize("leaf", [b"", b"x" * 31, "x" * 32, None])
    def test_what_is_no_hash_is_no_leaf(self, leaf: Any):
        with pytest.raises(ProofError, match="32 bytes"):
            Frontier().append(leaf)


class TestMakingProofs:
    @pytest.mark.parametrize("size", SIZES)
    def test_every_leaf_of_every_size_is_proven(self, size: int):
        root = TREE.root(size)
        for index in range(size):
            leaf = leaf_hash(str(index).encode())
            assert verify_inclusion(leaf, index, size, inclusion_proof(TREE, index, size), root)

    @pytest.mark.parametrize("new", SIZES)
    def test_every_pair_of_sizes_is_proven(self, new: int):
        for old in range(new + 1):
            proof = consistency_proof(TREE, old, new)
            assert verify_consistency(old, TREE.root(old), new, TREE.root(new), proof)

    @pytest.mark.parametrize(
        ("index", "size"), [(0, 0), (1, 1), (-1, 4), (4, 3), (0, 1000), (True, 4), ("0", 4), (0, MAX_SIZE + 1)]
    )
    def test_a_leaf_that_is_not_there(self, index: Any, size: Any):
        with pytest.raises(ProofError):
            inclusion_proof(TREE, index, size)

    @pytest.mark.parametrize(
        ("old", "new"), [(2, 1), (-1, 4), (1, 1000), (0.0, 4), (None, 4), (1, MAX_SIZE), (1, MAX_SIZE + 1)]
    )
    def test_a_tree_that_is_not_there(self, old: Any, new: Any):
        with pytest.raises(ProofError):
            consistency_proof(TREE, old, new)

    @pytest.mark.parametrize("size", [-1, 1000, True, None, MAX_SIZE + 1])
    def test_a_root_that_is_not_there(self, size: Any):
        with pytest.raises(ProofError):
            root_at(TREE, size)

    @pytest.mark.parametrize("given", [[], [b"x"], [None], [EMPTY_ROOT] * 40])
    def test_a_store_that_answers_garbage(self, given: list[Any]):
        class Garbage:
            def hashes(self, nodes: Any) -> Any:
                return given

        with pytest.raises(ProofError, match="something else"):
            consistency_proof(Garbage(), 3, 11)

    @given(st.integers(1, MAX_SIZE), st.data())
    def test_proofs_of_huge_trees_are_short_and_asked_for_at_once(self, new: int, data: st.DataObject):
        asked: list[Any] = []

        class Any32:
            def hashes(self, nodes: Any) -> Any:
                asked.append(nodes)
                return [hashlib.sha256(repr(node).encode()).digest() for node in nodes]

        old = data.draw(st.integers(1, new))
        assert len(consistency_proof(Any32(), old, new)) <= 64
        assert len(inclusion_proof(Any32(), old - 1, new)) <= 63
        assert len(asked) <= 2
        assert all(len(nodes) <= 126 and len(set(nodes)) == len(nodes) for nodes in asked)
        assert all((index + 1) << level <= new for nodes in asked for level, index in nodes)


GARBAGE: list[Any] = [None, b"", b"x" * 31, b"x" * 33, "x" * 32, bytearray(32), 0, [], memoryview(bytes(32))]


def bent(proof: list[bytes]) -> list[Any]:
    """Every truncation, every single bit, every swap of neighbours, and hashes too many, in every place."""
    out: list[Any] = [proof[:cut] for cut in range(len(proof))] + [proof[cut:] for cut in range(1, len(proof) + 1)]
    for place, one in enumerate(proof):
        for bit in range(256):
            flipped = bytearray(one)
            flipped[bit // 8] ^= 1 << bit % 8
            out.append([*proof[:place], bytes(flipped), *proof[place + 1 :]])
        out += [[*proof[:place], garbage, *proof[place + 1 :]] for garbage in GARBAGE]
    for place, (one, other) in enumerate(pairwise(proof)):
        if one != other:
            out.append([*proof[:place], other, one, *proof[place + 2 :]])
    for place in range(len(proof) + 1):
        out += [[*proof[:place], extra, *proof[place:]] for extra in (EMPTY_ROOT, bytes(32), *GARBAGE)]
    out += [proof * 2 if proof else [EMPTY_ROOT], None, 5, "x" * len(proof), b"x" * len(proof), iter(proof)]
    out += [[EMPTY_ROOT] * 65, [EMPTY_ROOT] * 10_000, dict(enumerate(proof))]
    return out


class TestAttacksOnTheVerifier:
    @pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 13, 33])
    def test_no_bent_inclusion_proof_passes(self, size: int):
        root = TREE.root(size)
        for index in {0, size // 2, size - 1}:
            leaf = leaf_hash(str(index).encode())
            for proof in bent(inclusion_proof(TREE, index, size)):
                assert verify_inclusion(leaf, index, size, proof, root) is False, proof

    @pytest.mark.parametrize("new", [1, 2, 3, 7, 8, 13, 33])
    def test_no_bent_consistency_proof_passes(self, new: int):
        for old in {1, max(1, new // 2), new - 1, new} - {0}:
            for proof in bent(consistency_proof(TREE, old, new)):
                assert verify_consistency(old, TREE.root(old), new, TREE.root(new), proof) is False, proof

    @pytest.mark.parametrize("new", [1, 2, 5, 8, 13, 33])
    def test_a_proof_holds_for_its_sizes_alone(self, new: int):
        for old in range(1, new + 1):
            proof, old_root, new_root = consistency_proof(TREE, old, new), TREE.root(old), TREE.root(new)
            for one in [*range(-2, new + 3), 2**63, 2**64, -(2**63), MAX_SIZE]:
                if one != old:
                    assert not verify_consistency(one, old_root, new, new_root, proof)
            if old != new:
                assert not verify_consistency(new, new_root, old, old_root, proof)
                assert not verify_consistency(old, new_root, new, old_root, proof)
                assert not verify_consistency(old, old_root, new, old_root, proof)
                assert not verify_consistency(old, new_root, new, new_root, proof)

    @pytest.mark.parametrize("size", [1, 2, 5, 8, 13, 33])
    def test_a_leaf_holds_in_its_place_alone(self, size: int):
        for index in range(size):
            leaf, proof, root = leaf_hash(str(index).encode()), inclusion_proof(TREE, index, size), TREE.root(size)
            for one in [*range(-2, size + 3), 2**63, 2**64, MAX_SIZE]:
                if one != index:
                    assert not verify_inclusion(leaf, one, size, proof, root)

    def test_an_inner_node_is_no_leaf(self):
        """Second preimage: the two halves of a tree of four leaves given out as the tree of two."""
        tree = MemoryTree(leaf_hash(bytes([number])) for number in range(4))
        inner = inclusion_proof(tree, 0, 4)[1]
        assert not verify_inclusion(inner, 1, 4, inclusion_proof(tree, 1, 4), tree.root())
        joined = tree.hashes([(0, 0), (0, 1)])
        assert leaf_hash(b"".join(joined)) != tree.hashes([(1, 0)])[0]

    def test_the_empty_tree_begins_everything_but_has_one_root(self):
        assert verify_consistency(0, EMPTY_ROOT, 5, TREE.root(5), [])
        assert verify_consistency(0, EMPTY_ROOT, 0, EMPTY_ROOT, [])
        assert not verify_consistency(0, TREE.root(5), 5, TREE.root(5), [])
        assert not verify_consistency(0, EMPTY_ROOT, 0, TREE.root(1), [])
        assert not verify_consistency(0, EMPTY_ROOT, 5, TREE.root(5), [EMPTY_ROOT])
        assert not verify_inclusion(EMPTY_ROOT, 0, 0, [], EMPTY_ROOT)

    def test_equal_sizes_need_equal_roots_and_no_proof(self):
        assert verify_consistency(5, TREE.root(5), 5, TREE.root(5), [])
        assert not verify_consistency(5, TREE.root(5), 5, TREE.root(6), [])
        assert not verify_consistency(5, TREE.root(5), 5, TREE.root(5), [EMPTY_ROOT])

    _anything = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.binary(min_size=32, max_size=32)
    )
    _sizes = st.one_of(_anything, st.integers(-3, 70), st.sampled_from([2**62, MAX_SIZE, 2**63, 2**64, 2**200]))
    _proofs = st.one_of(_anything, st.lists(_anything, max_size=8), st.lists(st.binary(min_size=32, max_size=32)))

    @given(_anything, _sizes, _sizes, _proofs, _anything)
    def test_nothing_crashes_it_and_nothing_random_passes(self, one, first, second, proof, other):
        assert verify_inclusion(one, first, second, proof, other) in (False, one == other and second == 1)
        passed = verify_consistency(first, one, second, other, proof)
        assert passed is False or one == other or first == 0

    def test_a_dropped_or_changed_leaf_is_never_consistent(self):
        for old in range(1, 20):
            changed = MemoryTree(
                leaf_hash(b"changed" if number == old // 2 else str(number).encode()) for number in range(25)
            )
            for new in range(old, 25):
                proof = consistency_proof(changed, old, new)
                assert not verify_consistency(old, TREE.root(old), new, changed.root(new), proof)
