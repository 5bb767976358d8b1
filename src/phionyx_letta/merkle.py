"""The Merkle tree of RFC 6962 (and RFC 9162): roots, inclusion and consistency proofs, made and checked.

A leaf is the hash of what is logged, an inner node the hash of its two children; SHA-256, with a byte in front that tells
the two apart. Only *complete* subtrees (2**level leaves from a multiple of 2**level on) never change, so they are what a
store keeps; everything else is folded from at most 63 of them. Knows nothing of envelopes, keys or databases, and needs
the standard library alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol

from phionyx_letta.errors import ProofError

__all__ = [
    "EMPTY_ROOT",
    "HASH_BYTES",
    "MAX_SIZE",
    "Frontier",
    "MemoryTree",
    "Node",
    "NodeSource",
    "consistency_proof",
    "inclusion_proof",
    "leaf_hash",
    "node_hash",
    "root_at",
    "subtrees",
    "verify_consistency",
    "verify_inclusion",
]

HASH_BYTES = 32
#: The largest tree (C2SP tlog-witness: at most 63 lines of proof; Go and SQL count in signed 64 bits).
MAX_SIZE = 2**63 - 1
#: RFC 6962, 2.1: the hash of the empty string.
EMPTY_ROOT = hashlib.sha256(b"").digest()

Node = tuple[int, int]
"""A complete subtree: (level, index), over the leaves from ``index * 2**level`` up to ``(index + 1) * 2**level``."""
_Range = tuple[int, int]


class NodeSource(Protocol):
    """Where proofs get the hashes of complete subtrees from."""

    def hashes(self, nodes: Sequence[Node], /) -> Sequence[bytes]:
        """Return the hash of each of these subtrees, in their order; asked once for a whole proof.

        Raises:
            ProofError: a node is not there.
        """
        ...


def leaf_hash(data: bytes) -> bytes:
    """Return the hash of a leaf, ``SHA-256(0x00 || data)``."""
    return hashlib.sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of an inner node, ``SHA-256(0x01 || left || right)``."""
    return hashlib.sha256(b"\x01" + left + right).digest()


class Frontier:
    """All a writer must know of a tree to append to it: the hashes of the complete subtrees its leaves divide into.

    There is one for each 1 in the binary form of the size, the largest first: 17 at most for 100 000 leaves, which can be
    kept beside a checkpoint and loaded for the next batch. Appending costs two hashes on average.
    """

    def __init__(self, size: int = 0, hashes: Sequence[bytes] = ()) -> None:
        """Continue the tree of ``size`` leaves with what ``hashes`` gave then; empty by default.

        Raises:
            ProofError: not that many hashes of 32 bytes belong to a tree of that size.
        """
        if not _is_size(size) or not _are_hashes(hashes, size.bit_count()):
            raise ProofError(f"this is not the frontier of a tree of size {size!r}", "rebuild it from the leaves")
        self._hashes = list(hashes)
        self.size = size

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """Of the complete subtrees, from the left."""
        return tuple(self._hashes)

    def append(self, leaf: bytes) -> list[tuple[Node, bytes]]:
        """Add a leaf, given by its hash; return the complete subtrees it finishes, itself first."""
        if not _is_hash(leaf):
            raise ProofError("a leaf is given by its hash of 32 bytes", "hash the data with leaf_hash()")
        finished = [((0, self.size), leaf)]
        level, index = 0, self.size
        while index & 1:
            leaf = node_hash(self._hashes.pop(), leaf)
            level, index = level + 1, index >> 1
            finished.append(((level, index), leaf))
        self._hashes.append(leaf)
        self.size += 1
        return finished

    def append_subtree(self, level: int, value: bytes) -> None:
        """Add 2**level leaves at once, given by the hash of the complete subtree they are.

        Raises:
            ProofError: no complete subtree of that level begins where the tree ends, or it is not a hash.
        """
        fits = type(level) is int and 0 <= level < 63 and not self.size & ((1 << level) - 1)
        if not fits or not _is_hash(value) or self.size + (1 << level) > MAX_SIZE:
            raise ProofError(f"no subtree of level {level!r} begins at leaf {self.size}", "compare it with the log")
        index = self.size >> level
        while index & 1:
            value = node_hash(self._hashes.pop(), value)
            index >>= 1
        self._hashes.append(value)
        self.size += 1 << level

    def root(self) -> bytes:
        """Return the root of the tree as it stands."""
        return _fold(self._hashes) if self._hashes else EMPTY_ROOT


class MemoryTree:
    """A whole tree in memory, a ``NodeSource``: for verifiers of small logs, for tests, and as the reference."""

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        """Hold these leaves, given by their hashes."""
        self._frontier = Frontier()
        self._nodes: dict[Node, bytes] = {}
        for leaf in leaves:
            self.append(leaf)

    @property
    def size(self) -> int:
        """How many leaves there are."""
        return self._frontier.size

    def append(self, leaf: bytes) -> None:
        """Add a leaf, given by its hash."""
        self._nodes.update(self._frontier.append(leaf))

    def hashes(self, nodes: Sequence[Node], /) -> Sequence[bytes]:
        """Return the hashes of complete subtrees; see ``NodeSource``."""
        try:
            return [self._nodes[node] for node in nodes]
        except KeyError:
            raise ProofError(
                f"the tree has only {self.size} leaves", "ask for a proof within the size it has"
            ) from None

    def root(self, size: int | None = None) -> bytes:
        """Return the root of the first ``size`` leaves, of all by default."""
        return self._frontier.root() if size is None else root_at(self, size)


def root_at(source: NodeSource, size: int) -> bytes:
    """Return the root of the tree's first ``size`` leaves.

    Raises:
        ProofError: the source has no tree of that size.
    """
    _check(_is_size(size), f"{size!r} is not the size of a tree")
    return _gather(source, [(0, size)])[0] if size else EMPTY_ROOT


def inclusion_proof(source: NodeSource, index: int, size: int) -> list[bytes]:
    """Return the proof that leaf ``index`` (from 0) is in the tree of ``size`` leaves (RFC 6962, 2.1.1), at most 63 hashes.

    Raises:
        ProofError: there is no such leaf or tree.
    """
    _check(_is_size(size) and _is_size(index) and index < size, f"a tree of size {size!r} has no leaf {index!r}")
    start, end = 0, size
    ranges: list[_Range] = []
    while end - start > 1:
        middle = _split(start, end)
        if index < middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((start, middle))
            start = middle
    return _gather(source, ranges[::-1])


def consistency_proof(source: NodeSource, old: int, new: int) -> list[bytes]:
    """Return the proof that the tree of ``old`` leaves begins that of ``new`` leaves (RFC 6962, 2.1.2), at most 64 hashes.

    From the empty tree, and between equal sizes, the proof is empty.

    Raises:
        ProofError: there are no such trees.
    """
    _check(_is_size(old) and _is_size(new) and old <= new, f"no tree of size {old!r} begins one of size {new!r}")
    start, end = 0, new
    ranges: list[_Range] = []
    while old and old != end:
        middle = _split(start, end)
        if old <= middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((start, middle))
            start = middle
    if start:
        ranges.append((start, end))
    return _gather(source, ranges[::-1])


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """Return whether the proof shows the leaf (its hash) at ``index`` in the tree of that size and root (RFC 9162, 2.1.3.2).

    Strict: one hash too many or too few, a value of the wrong type or length, is simply not a proof. Never raises.
    """
    if not (_is_size(size) and _is_size(index) and index < size and _is_hash(leaf) and _is_hash(root)):
        return False
    inner, border = _inclusion_path(index, size)
    if not _are_hashes(proof, inner + border):
        return False
    computed, place = leaf, index
    for step, sibling in enumerate(proof):
        on_the_left = step >= inner or place & 1  # beyond the inner part the path runs along the tree's right edge
        computed = node_hash(sibling, computed) if on_the_left else node_hash(computed, sibling)
        place >>= 1
    return computed == root


def verify_consistency(old: int, old_root: bytes, new: int, new_root: bytes, proof: Sequence[bytes]) -> bool:
    """Return whether the proof shows that the tree (old, old_root) begins the tree (new, new_root) (RFC 9162, 2.1.4.2).

    Strict as ``verify_inclusion``; the root claimed for no leaves must be that of the empty tree. Never raises.
    """
    if not (_is_size(old) and _is_size(new) and old <= new and _is_hash(old_root) and _is_hash(new_root)):
        return False
    if old == 0 or old == new:
        same = old_root == (EMPTY_ROOT if old == 0 else new_root) and (new > 0 or new_root == EMPTY_ROOT)
        return same and _are_hashes(proof, 0)
    return _verify_growth(old, old_root, new, new_root, proof)


def _verify_growth(old: int, old_root: bytes, new: int, new_root: bytes, proof: Sequence[bytes]) -> bool:
    """``verify_consistency`` for ``0 < old < new``."""
    whole = (old & -old).bit_length() - 1  # level of the last complete subtree of the old tree
    inner, border = _inclusion_path(old - 1, new)
    expected = inner - whole + border + (0 if old == 1 << whole else 1)
    if not _are_hashes(proof, expected):
        return False
    path = list(proof)
    seed = old_root if old == 1 << whole else path.pop(0)
    computed_old = computed_new = seed
    place = (old - 1) >> whole
    for step, sibling in enumerate(path):
        if step >= inner - whole or place & 1:
            computed_old = node_hash(sibling, computed_old)
            computed_new = node_hash(sibling, computed_new)
        else:
            computed_new = node_hash(computed_new, sibling)
        place >>= 1
    return computed_old == old_root and computed_new == new_root


def _inclusion_path(index: int, size: int) -> tuple[int, int]:
    """Return how many siblings a leaf has inside the smallest complete shape it shares with the last leaf, and beyond it."""
    inner = (index ^ (size - 1)).bit_length()
    return inner, (index >> inner).bit_count()


def _split(start: int, end: int) -> int:
    """Return where RFC 6962 divides these leaves: after the largest power of two smaller than their number."""
    return start + (1 << ((end - start - 1).bit_length() - 1))


def _gather(source: NodeSource, ranges: Sequence[_Range]) -> list[bytes]:
    """Return the hash of each range, from one request to the source."""
    parts = [_complete(start, end) for start, end in ranges]
    wanted = [node for part in parts for node in part]
    found = list(source.hashes(wanted)) if wanted else []
    _check(_are_hashes(found, len(wanted)), "the store of the tree's nodes gave something else than their hashes")
    hashes = iter(found)
    return [_fold([next(hashes) for _ in part]) for part in parts]


def subtrees(start: int, end: int) -> list[Node]:
    """Return the complete subtrees that any run of leaves divides into, from the left; at most 126."""
    nodes = []
    while start < end:
        level = min((start & -start).bit_length() - 1 if start else 63, (end - start).bit_length() - 1)
        nodes.append((level, start >> level))
        start += 1 << level
    return nodes


def _complete(start: int, end: int) -> list[Node]:
    """Return the complete subtrees these leaves divide into; ``start`` is a multiple of a power of two that reaches ``end``."""
    nodes = []
    while start < end:
        level = (end - start).bit_length() - 1
        nodes.append((level, start >> level))
        start += 1 << level
    return nodes


def _fold(hashes: Sequence[bytes]) -> bytes:
    """Return the hash of a range from its complete subtrees, which get smaller to the right."""
    folded = hashes[-1]
    for left in reversed(hashes[:-1]):
        folded = node_hash(left, folded)
    return folded


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_SIZE


def _is_hash(value: object) -> bool:
    return type(value) is bytes and len(value) == HASH_BYTES


def _are_hashes(values: object, count: int) -> bool:
    return isinstance(values, list | tuple) and len(values) == count and all(map(_is_hash, values))


def _check(good: bool, message: str) -> None:
    if not good:
        raise ProofError(message, "compare the sizes with that of the log")
