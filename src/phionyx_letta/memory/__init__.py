"""Living Memory: memory files and blocks that change by reviewed, signed, revertible patches (the second seed's API).

Importing the package imports nothing else; each name loads its module when it is first used.
"""

TYPE_CHECKING = False  # type checkers take it for true
if TYPE_CHECKING:
    from phionyx_letta.errors import DiffConflictError
    from phionyx_letta.memory.living import LivingMemory
    from phionyx_letta.memory.merging import FileDiffEngine
    from phionyx_letta.memory.occurrences import OccurrenceRecord, OccurrenceTracker
    from phionyx_letta.memory.openai_proposer import OpenAIProposer
    from phionyx_letta.memory.patches import MemoryPatch, PatchStatus
    from phionyx_letta.memory.pii import MemoryPIIFilter, PIIFilterResult
    from phionyx_letta.memory.routing import MemoryFileCategory, MemoryFileRouter
    from phionyx_letta.memory.store import PatchStore
    from phionyx_letta.memory.store_sql import SqlOccurrenceTracker, SqlPatchStore

__all__ = [
    "DiffConflictError",
    "FileDiffEngine",
    "LivingMemory",
    "MemoryFileCategory",
    "MemoryFileRouter",
    "MemoryPIIFilter",
    "MemoryPatch",
    "OccurrenceRecord",
    "OccurrenceTracker",
    "OpenAIProposer",
    "PIIFilterResult",
    "PatchStatus",
    "PatchStore",
    "SqlOccurrenceTracker",
    "SqlPatchStore",
]

_NAMES = {
    "errors": ("DiffConflictError",),
    "memory.living": ("LivingMemory",),
    "memory.merging": ("FileDiffEngine",),
    "memory.occurrences": ("OccurrenceRecord", "OccurrenceTracker"),
    "memory.openai_proposer": ("OpenAIProposer",),
    "memory.patches": ("MemoryPatch", "PatchStatus"),
    "memory.pii": ("MemoryPIIFilter", "PIIFilterResult"),
    "memory.routing": ("MemoryFileCategory", "MemoryFileRouter"),
    "memory.store": ("PatchStore",),
    "memory.store_sql": ("SqlOccurrenceTracker", "SqlPatchStore"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # so that a type checker still reports names that do not exist

    def __getattr__(name: str) -> object:
        """Load the module of a public name (PEP 562)."""
        module = _MODULES.get(name)
        if module is None:
            raise AttributeError(f"module 'phionyx_letta.memory' has no attribute {name!r}")
        from importlib import import_module

        value: object = getattr(import_module(f"phionyx_letta.{module}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
