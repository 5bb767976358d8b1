"""What can be wrong with an agent's memory repository."""

from __future__ import annotations

from phionyx_letta.errors import PhionyxError, StoreError

__all__ = ["MemoryUnreadable", "ObjectMalformed", "ObjectUnreadable", "TooManyFiles"]


class MemoryUnreadable(StoreError):
    """A memory repository cannot be read as it stands; nothing of it was recorded in this run, and it is read again in the next."""


class ObjectUnreadable(PhionyxError):
    """A git object is missing, damaged, or not of the kind that is needed."""


class ObjectMalformed(ObjectUnreadable):
    """A git object has its id's bytes, and they say what no such object can: it will never be read otherwise."""


class TooManyFiles(PhionyxError):
    """One commit changes more files than are recorded one by one."""
