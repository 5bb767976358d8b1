"""What stands behind a patch: something whose text can be read, identified, and written only if it still is what was read.

A file is one kind (`files`); a Letta block or a file of Letta Code can be others. `LivingMemory` knows no more than this.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Target", "Targets"]


class Target(Protocol):
    """One text that patches change."""

    @property
    def identity(self) -> str:
        """What it is, once for all who name it differently; the trace id of its chain of envelopes."""
        ...

    @property
    def label(self) -> str:
        """Its short name for people."""
        ...

    def read(self) -> str | None:
        """Return the text, or None where the target does not exist.

        Raises:
            TargetRefused: it may not be read, or holds no text.
        """
        ...

    def write(self, expected: str | None, text: str) -> None:
        """Replace `expected`, exactly what was read, by `text`; all or nothing, durable on return.

        Raises:
            DiffConflictError: it holds something else by now; nothing was written.
            TargetRefused: it may not be written.
        """
        ...


class Targets(Protocol):
    """All the targets a `LivingMemory` manages."""

    def names(self) -> list[str]:
        """Return the names of those that exist, sorted."""
        ...

    def resolve(self, name: str) -> Target:
        """Return the target of this name, whether it exists yet or not.

        Raises:
            TargetRefused: it is none of those that are managed.
        """
        ...
