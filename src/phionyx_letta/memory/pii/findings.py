"""What a detector reports, and the vocabulary of kinds and placeholders (the seed's, and its continuation)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

#: Kind -> what stands in the text afterwards. The first six are the seed's.
PLACEHOLDERS: dict[str, str] = {
    "email": "[REDACTED_EMAIL]",
    "phone": "[REDACTED_PHONE]",
    "ssn": "[REDACTED_SSN]",
    "credit_card": "[REDACTED_CC]",
    "ip_address": "[REDACTED_IP]",
    "api_key": "[REDACTED_KEY]",
    "iban": "[REDACTED_IBAN]",
    "jwt": "[REDACTED_JWT]",
    "private_key": "[REDACTED_PRIVATE_KEY]",
    "password": "[REDACTED_PASSWORD]",
}
KINDS: tuple[str, ...] = tuple(PLACEHOLDERS)


@dataclass(frozen=True, slots=True)
class Finding:
    """A value of one kind at ``text[start:end]``."""

    kind: str
    start: int
    end: int


class PIIBackend(Protocol):
    """Another source of findings, asked beside the rules."""

    def find(self, text: str, kinds: frozenset[str]) -> Iterable[Finding]:
        """Return what is found in `text` of the wanted `kinds`; offsets count code points of `text`."""
        ...
