"""Presidio as a further source of findings; its package is an optional extra and is imported only here, when chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phionyx_letta.errors import MissingExtra
from phionyx_letta.memory.pii.findings import Finding

#: Presidio's entity -> our kind; its other entities are not asked for.
ENTITIES = {
    "EMAIL_ADDRESS": "email",
    "PHONE_NUMBER": "phone",
    "US_SSN": "ssn",
    "CREDIT_CARD": "credit_card",
    "IBAN_CODE": "iban",
    "IP_ADDRESS": "ip_address",
}


class PresidioBackend:
    """Findings of a ``presidio_analyzer.AnalyzerEngine``.

    Args:
        analyzer: an engine of your own, with the language model of your choice; by default a new one of Presidio's.
        language: the language code passed to it.
        threshold: lowest score, 0 to 1, of a result that counts.

    Raises:
        MissingExtra: no `analyzer` is given and Presidio is not installed.
    """

    def __init__(self, analyzer: Any = None, *, language: str = "en", threshold: float = 0.5) -> None:
        """Take or make the engine."""
        self._analyzer = _default_engine() if analyzer is None else analyzer
        self._language = language
        self._threshold = threshold

    def find(self, text: str, kinds: frozenset[str]) -> Iterator[Finding]:
        """Yield what the engine finds in `text` of the wanted `kinds`."""
        entities = [entity for entity, kind in ENTITIES.items() if kind in kinds]
        if not entities:
            return
        for result in self._analyzer.analyze(text=text, language=self._language, entities=entities):
            if result.score >= self._threshold and result.entity_type in ENTITIES:
                yield Finding(ENTITIES[result.entity_type], result.start, result.end)


def _default_engine() -> Any:
    try:
        from presidio_analyzer import AnalyzerEngine
    except ImportError as error:
        raise MissingExtra(
            "the Presidio backend is chosen but presidio-analyzer is not installed",
            remedy='install it with pip install "phionyx-letta[presidio]", or leave `backend` out: the rules need nothing',
        ) from error
    return AnalyzerEngine()
