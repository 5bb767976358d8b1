"""What every store of patches does, whatever it stands on, and the form in which one is kept."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any, Protocol

from phionyx_letta._canonical import JSON_ERRORS
from phionyx_letta.errors import InvalidPatch
from phionyx_letta.memory.patches import MemoryPatch

__all__ = ["HEAD", "PatchSummary", "Patches", "patch_json"]

HEAD = ("patch_id", "status", "created_at", "file_path", "category", "session_id", "author", "rationale")
"""The fields a list shows; they stand first in a line."""


@dataclass(frozen=True)
class PatchSummary:
    """What a list shows of a patch, read without its content."""

    patch_id: str
    status: str
    created_at: str
    file_path: str
    category: str
    session_id: str | None
    author: str
    rationale: str


class Patches(Protocol):
    """A store of patches; several threads and processes may use one at once. Patches come oldest first."""

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Hold the store alone, among all processes; may be entered again by the thread that holds it.

        Raises:
            StoreError: somebody else has held it for half a minute.
        """
        ...

    def acting(self, target: str) -> contextlib.AbstractContextManager[None]:
        """Be alone, among all processes, with those who act on a target; the store stays free for everybody else.

        For acts that wait for a server. It is not to be entered again, nor while the store is held.

        Raises:
            StoreError: somebody else has been at it for half a minute; it names how to find out who.
        """
        ...

    def save(self, patch: MemoryPatch) -> MemoryPatch:
        """Add a patch; it is durable on return.

        Raises:
            InvalidPatch: its id is taken, or it is not JSON.
            StoreError: the store cannot be written.
        """
        ...

    def update(self, patch: MemoryPatch) -> None:
        """Record a new state of a patch; it is durable on return.

        Raises:
            PatchNotFound: it was never saved.
        """
        ...

    def get(self, patch_id: str) -> MemoryPatch | None:
        """Return the newest state of a patch, or None."""
        ...

    def find(self, prefix: str) -> list[str]:
        """Return the ids that begin with this text."""
        ...

    def first(self) -> str | None:
        """Return the id of the oldest patch, by which the store is known, or None where it is empty."""
        ...

    @property
    def folder(self) -> str | None:
        """The real path of the folder it is in; None for a server's."""
        ...

    def status(self, patch_id: str) -> str | None:
        """Return a patch's status without reading its content, or None where there is no such patch."""
        ...

    def summaries(self, status: str | None = None, *, limit: int | None = None) -> list[PatchSummary]:
        """Return what lists show, without reading content; the newest `limit` of them, oldest first."""
        ...

    def list_by_status(self, status: str | None = None, *, limit: int | None = None) -> list[MemoryPatch]:
        """Return patches in this status now, or all; the newest `limit` of them, oldest first."""
        ...

    def pending_patches(self) -> list[MemoryPatch]:
        """Return the patches that wait for a decision."""
        ...

    def count(self, status: str | None = None) -> int:
        """Return how many patches are in this status now, or all."""
        ...


def patch_json(patch: MemoryPatch) -> str:
    """Return one line of JSON, what lists need first.

    Raises:
        InvalidPatch: the metadata are not JSON.
    """
    data = patch.to_dict()
    ordered: dict[str, Any] = {name: data.pop(name) for name in HEAD}
    ordered["after_content"] = data.pop("after_content")
    try:
        return json.dumps({**ordered, **dict(sorted(data.items()))}, allow_nan=False)
    except JSON_ERRORS as error:
        message = f"patch {patch.patch_id} is not JSON: {type(error).__name__}"
        raise InvalidPatch(message, "keep text, numbers, lists and dicts in it") from None
