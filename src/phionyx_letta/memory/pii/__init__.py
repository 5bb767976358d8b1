"""Personal data and secrets: found by rules, redacted before anything is stored or sent.

Formats, check digits and the words around a value decide; no model is loaded. What the rules catch and miss is measured
in ``docs/pii.md``.
"""

from phionyx_letta.memory.pii.filter import MemoryPIIFilter, PIIFilterResult
from phionyx_letta.memory.pii.findings import KINDS, PLACEHOLDERS, Finding, PIIBackend

__all__ = [
    "KINDS",
    "PLACEHOLDERS",
    "Finding",
    "MemoryPIIFilter",
    "PIIBackend",
    "PIIFilterResult",
]
