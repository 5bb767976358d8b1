"""Which store, and which file beside it, a patch was made for: signed with it, so that it cannot be used elsewhere.

Names of files may be relative, and two projects have a `CLAUDE.md` each. So a patch names its store by the store's oldest patch, and
its file by the way from the store's folder. A project that is moved or cloned whole keeps both. Patches of a time before this carry
no such note and are used as they were.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from phionyx_letta.errors import TargetRefused, UntrustedPatch
from phionyx_letta.memory.patches import MemoryPatch
from phionyx_letta.memory.stored import Patches
from phionyx_letta.memory.targets import Target, Targets

__all__ = ["BOUND", "bound_to", "check_bound"]

BOUND = "bound_to"
_FILE = "file:"


def bound_to(patch: MemoryPatch, store: Patches, target: Target) -> dict[str, Any]:
    """Return what a new patch notes of its place: `store`, the id of the store's oldest patch, and `target`.

    The target is the way to the file from the store's folder; its identity where it is no file, and the name as it is where the
    store has no folder (a database on a server).
    """
    return {"store": store.first() or patch.patch_id, "target": _place(patch, store, target)}


def check_bound(patch: MemoryPatch, store: Patches, targets: Targets) -> None:
    """Return if the patch was made for this store and this target, or notes no place.

    Raises:
        UntrustedPatch: it was made for another; naming both.
    """
    noted = patch.metadata.get(BOUND)
    if noted is None:
        return
    remedy = "it was moved or copied here: reject it, and propose it here; work in the folder it was proposed in"
    if not isinstance(noted, Mapping) or noted.get("store") != store.first():
        raise UntrustedPatch(f"patch {patch.patch_id} was made for another patch store", remedy)
    try:
        place = _place(patch, store, targets.resolve(patch.file_path))
    except TargetRefused:
        return  # it is refused where it is used
    if noted.get("target") != place:
        raise UntrustedPatch(
            f"patch {patch.patch_id} was made for {noted.get('target')} beside its store, here it would change {place}",
            remedy,
        )


def _place(patch: MemoryPatch, store: Patches, target: Target) -> str:
    if not target.identity.startswith(_FILE):
        return target.identity
    return patch.file_path if store.folder is None else os.path.relpath(target.identity[len(_FILE) :], store.folder)
