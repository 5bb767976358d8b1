"""Which memory file a new fact belongs in: a category by the seed's signals, then a path.

Signals are whole words, with their usual endings, so that "haystack" says nothing about a stack.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Literal

__all__ = ["MemoryFileCategory", "MemoryFileRouter"]

MemoryFileCategory = Literal["user", "feedback", "project", "general"]

#: The seed's table ("File routing"), each signal with the forms it takes; one point each.
_SIGNALS: dict[MemoryFileCategory, tuple[str, ...]] = {
    "user": (
        r"prefer(?:s|red|ence|ences)?",
        r"(?:always|usually|never)\s+(?:use|uses|using)",
        r"(?:i|we|user)(?:'m|\s+am)?\s+(?:always|usually|never)",
        r"(?:my|our|their|user'?s?)\s+(?:workflow|habit|style|setup|editor|name|timezone|time\s+zone)",
        r"i(?:'d|\s+would)?\s+(?:like|want|love|hate|dislike)",
        r"user\s+(?:likes|wants|loves|hates|dislikes)",
    ),
    "feedback": (
        r"correct(?:ion|ions|ed)",
        r"fix(?:es|ed)?",
        r"wrong(?:ly)?",
        r"mistakes?",
        r"better\s+to",
        r"(?:do\s+not|don't)\s+\w+\s+again",
        r"instead\s+of",
    ),
    "project": (
        r"architectur(?:e|es|al)",
        r"(?:tech(?:nology)?\s+)?stacks?",
        r"dependenc(?:y|ies)",
        r"conventions?",
        r"code\s?bases?",
        r"repositor(?:y|ies)",
        r"(?:database|schema|framework|module|deployment)\s+(?:is|are|uses?)",
    ),
}
_PATTERNS = {
    category: [re.compile(rf"(?<!\w){signal}(?!\w)", re.IGNORECASE) for signal in signals]
    for category, signals in _SIGNALS.items()
}


class MemoryFileRouter:
    """Scores a fact against the signals of each category and resolves the category to a file."""

    def __init__(
        self,
        path_map: Mapping[str, str] | None = None,
        *,
        primary_path: str = "./CLAUDE.md",
        allow_new_files: bool = False,
    ) -> None:
        """Take the file of each category, the file for all else, and whether a patch may create a file of `path_map`."""
        self.path_map = dict(path_map or {})
        self.primary_path = primary_path
        self.allow_new_files = allow_new_files

    def categorize(self, content: str) -> MemoryFileCategory:
        """Return the category with the most signals in the text: of equals the first of the table; `general` without any."""
        text = content.replace("’", "'")
        scores = {
            category: sum(bool(pattern.search(text)) for pattern in patterns)
            for category, patterns in _PATTERNS.items()
        }
        best = max(scores, key=lambda category: scores[category])  # of equals, max takes the first
        return best if scores[best] else "general"

    def resolve_target_path(self, category: str, managed_paths: Iterable[str]) -> str:
        """Return the file of a category, as `managed_paths` spells it where it is one of them.

        In this order (seed): the entry of `path_map`; a managed file whose name begins with the category; the primary path; what
        of these is not there is passed over, unless `allow_new_files`.
        """
        managed = list(managed_paths)
        mapped = self.path_map.get(category)
        if mapped is not None:
            known = _spelled(mapped, managed)
            if known is not None or self.allow_new_files:
                return known or mapped
        for path in managed:
            if _names(os.path.basename(path), category):
                return path
        primary = _spelled(self.primary_path, managed)
        if primary is not None or not managed:
            return primary or self.primary_path
        name = os.path.basename(self.primary_path)
        return next((path for path in managed if os.path.basename(path) == name), managed[0])


def _spelled(path: str, managed: list[str]) -> str | None:
    """How `managed` spells this file, if it is one of them; paths are compared, not texts."""
    real = os.path.realpath(path)
    return next((one for one in managed if one == path or os.path.realpath(one) == real), None)


def _names(name: str, category: str) -> bool:
    rest = name.casefold().removeprefix(category)
    return rest != name.casefold() and not rest[:1].isalpha()
