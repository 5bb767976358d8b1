"""What stands behind a patch: something whose text can be read, identified, and written only if it still is what was read.

A file is one kind (`files`); a Letta block or a file of Letta Code can be others. `LivingMemory` knows no more than this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["Target", "Targets"]


class Target(Protocol):
    """One text that patches change."""

    @property
    def name(self) -> str:
        """What `Targets.resolve` finds it by; a patch keeps it."""
        ...

    @property
    def identity(self) -> str:
        """What it is, once for all who name it differently; the trace id of its chain of envelopes."""
        ...

    @property
    def label(self) -> str:
        """Its short name for people."""
        ...

    @property
    def limit(self) -> int | None:
        """The most characters it may hold, or None."""
        ...

    @property
    def records_itself(self) -> bool:
        """Whether whatever writes it leaves the evidence too (a server armed with the plugin)."""
        ...

    def notes(self) -> list[str]:
        """Return what a reviewer should know of it: who else reads it, what became of it."""
        ...

    def read(self) -> str | None:
        """Return the text, or None where the target does not exist.

        Raises:
            TargetRefused: it may not be read, or holds no text.
        """
        ...

    def write(self, expected: str | None, text: str, cause: Mapping[str, Any] | None = None) -> str | None:
        """Replace `expected`, exactly what was read, by `text`; all or nothing, durable on return.

        Args:
            expected: what it holds, or None where it does not exist.
            text: what it is to hold.
            cause: which patch writes, who decided and on what evidence, for targets that record themselves.

        Returns:
            The reference of the envelope, where the target records itself and it is known.

        Raises:
            DiffConflictError: it holds something else by now; nothing was written.
            TargetRefused: it may not be written.
        """
        ...


class Targets(Protocol):
    """All the targets a `LivingMemory` manages."""

    def names(self) -> list[str]:
        """Return the names of those that exist, sorted; a proposer chooses among them."""
        ...

    def about(self, name: str) -> str:
        """Return what the target of this name is for, in its owner's words; empty where nobody said."""
        ...

    def resolve(self, name: str) -> Target:
        """Return the target of this name, whether it exists yet or not.

        Raises:
            TargetRefused: it is none of those that are managed.
        """
        ...
