"""Trees of git, compared as they stand there: no configuration, no index and no attributes of the repository take part."""

from __future__ import annotations

from collections.abc import Sequence

from phionyx_letta.errors import PhionyxError
from phionyx_letta.letta_code.errors import ObjectUnreadable, TooManyFiles
from phionyx_letta.letta_code.objects import SUBTREE, Entry, Objects, by_name

__all__ = ["MAX_FILES", "Changed", "changed_files", "compared"]

#: Files of one commit that are recorded one by one: trees can be nested to name more than there is memory.
MAX_FILES = 20_000
_MAX_TREES, _MAX_DEPTH = 100_000, 100
#: Of one pair among many that are compared together; one with more is compared by itself.
_FEW = 100
_NOTHING: frozenset[bytes] = frozenset()
Pair = tuple[str | None, str | None]
Changed = tuple[bytes, Entry | None, Entry | None]
"""Path, entry before, entry after."""


def changed_files(objects: Objects, before: str | None, after: str | None) -> list[Changed]:
    """The files two trees differ in, sorted by path.

    Raises:
        ObjectUnreadable: a tree cannot be read.
        TooManyFiles: there are more than `MAX_FILES`, or too many folders.
    """
    found: list[Changed] = []
    todo: list[tuple[bytes, Pair]] = [(b"", (before, after))] if before != after else []
    trees = 0
    for _ in range(_MAX_DEPTH):
        objects.prefetch(oid for _, pair in todo for oid in pair if oid)
        below: list[tuple[bytes, Pair]] = []
        for folder, pair in todo:
            below += _compare(objects, folder, pair, found)
            if len(found) > MAX_FILES:
                raise TooManyFiles(f"more than {MAX_FILES} files change at once")
            if len(below) + trees > _MAX_TREES:
                raise TooManyFiles(f"more than {_MAX_TREES} folders change at once")
        todo, trees = below, trees + len(below)
        if not todo:
            found.sort(key=_path)
            return found
    raise TooManyFiles(f"folders are nested more than {_MAX_DEPTH} deep")


def compared(objects: Objects, pairs: Sequence[Pair]) -> list[list[Changed] | PhionyxError | None]:
    """Of each pair of trees the files they differ in, sorted by path, or why that cannot be told; git is asked for all at once.

    None where there are many: that pair is for `changed_files`.
    """
    results: list[list[Changed] | PhionyxError | None] = [[] for _ in pairs]
    trees = [0] * len(pairs)
    todo = [(number, b"", pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]]
    while todo:
        objects.prefetch(oid for _, _, pair in todo for oid in pair if oid)
        below = []
        for number, folder, pair in todo:
            found = results[number]
            if not isinstance(found, list):
                continue
            try:
                folders = _compare(objects, folder, pair, found)
            except ObjectUnreadable as error:
                results[number] = error
                continue
            trees[number] += len(folders)
            if len(found) + trees[number] > _FEW:
                results[number] = None
                continue
            below += [(number, path, one) for path, one in folders]
        todo = below
    for one in results:
        if isinstance(one, list) and len(one) > 1:
            one.sort(key=_path)
    return results


def _compare(objects: Objects, folder: bytes, pair: Pair, found: list[Changed]) -> list[tuple[bytes, Pair]]:
    """Add the files directly in a folder that differ; return the folders in it that do."""
    before, after = pair
    old = objects.entries(before) if before else _NOTHING
    new = objects.entries(after) if after else _NOTHING
    gone, come = by_name(old - new), by_name(new - old)
    below: list[tuple[bytes, Pair]] = []
    for name in gone.keys() | come.keys() if gone.keys() != come.keys() else gone:
        one, other = gone.get(name), come.get(name)
        path = folder + name
        one_tree = one.oid if one is not None and one.mode == SUBTREE else None
        other_tree = other.oid if other is not None and other.mode == SUBTREE else None
        one, other = (None if one_tree else one), (None if other_tree else other)
        if one or other:
            found.append((path, one, other))
        if one_tree or other_tree:
            below.append((path + b"/", (one_tree, other_tree)))
    return below


def _path(changed: Changed) -> bytes:
    return changed[0]
