"""Evidence: words of the transcript that a proposal rests on, looked up and cleaned of personal data."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from phionyx_letta.memory.pii import MemoryPIIFilter
from phionyx_letta.memory.transcript import UNKNOWN, Message


@dataclass(frozen=True)
class Evidence:
    """Words found in the message with that index; the quote is as the message has it, personal data replaced."""

    quote: str
    message_index: int
    role: str
    message_id: str | None


class Witness:
    """A session that can be asked whether something was said in it."""

    def __init__(self, messages: Sequence[Message], pii: MemoryPIIFilter) -> None:
        """Redact every message once; nothing else is kept of the filter."""
        self.messages = list(messages)
        self.redacted = [replace(m, text=pii.filter_content(m.text).filtered_content) for m in messages]
        self.labelled = any(message.role != UNKNOWN for message in messages)
        self._pii = pii
        self._folded = [fold(message.text) for message in self.messages]

    def find_all(self, quotes: Iterable[str]) -> tuple[Evidence, ...]:
        """Return the evidence of those `quotes` that are found."""
        found = (self.find(quote) for quote in quotes)
        return tuple(dict.fromkeys(one for one in found if one is not None))

    def find(self, quote: str) -> Evidence | None:
        """Return where `quote` was said; white space and case do not matter."""
        wanted = fold(quote)
        for message, text in zip(self.messages, self._folded, strict=True):
            if wanted and wanted in text:
                clean = self._pii.filter_content(quote).filtered_content
                return Evidence(clean, message.index, message.role, message.message_id)
        return None


def fold(text: str) -> str:
    """Return `text` for comparison: NFKC, without differences of case and of white space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
