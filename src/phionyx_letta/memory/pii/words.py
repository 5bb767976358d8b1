"""The words around a value: which sort of thing the writer says it is."""

from __future__ import annotations

import re

_REACH = 48  # characters looked at before a value
_AFTER = 24


class Cue:
    """Decides by the nearest cue word before a value (or right after it) whether it is of a kind.

    Args:
        for_it: alternatives of a regular expression, words that announce the kind.
        against: words that announce something else.
        behind: words that, right after the value, say that it is of the kind.
    """

    def __init__(self, for_it: str, against: str = "", behind: str = "") -> None:
        """Compile the words; a word must stand alone, underscores and digits beside it allowed."""
        pattern = rf"(?<![^\W\d_])(?:(?P<pro>{for_it})|(?P<con>{against or '(?!)'}))(?![^\W\d_])"
        self._before = re.compile(pattern, re.IGNORECASE)
        self._behind = re.compile(rf"[\s,;]?\s?[(\[]?(?:{behind or '(?!)'})(?![^\W\d_])", re.IGNORECASE)

    def says(self, text: str, start: int, end: int) -> bool | None:
        """Return True or False by the nearest cue, None without one. A line or sentence before does not count."""
        window = text[max(0, start - _REACH) : start]
        if _LETTER.search(window) and (cues := [*self._before.finditer(_this_sentence(window))]):
            return cues[-1]["pro"] is not None
        return True if self._behind.match(text[end : end + _AFTER]) else None


_LETTER = re.compile(r"[^\W\d_]")
_BREAK = re.compile(r"\n\s*\n|(?<=[a-zA-Z\)]{3})[.!?] +(?=[A-Z])")


def _this_sentence(window: str) -> str:
    last = 0
    for found in _BREAK.finditer(window):
        last = found.end()
    return window[last:]


#: Words that announce a number of something else than a person's.
OTHER_NUMBERS = (
    r"order|orders|invoice|inv|ticket|issue|po|p\.o|sku|case|ref|reference|tracking|track|row|rows|line|lines|id|ids|"
    r"build|serial|s/n|isbn|issn|ean|upc|gtin|doi|part|chapter|section|version|release|commit|rev|revision|item|"
    r"product|model|article|batch|lot|parcel|shipment|booking|transaction|txn|job|run|pid|port|error|code|bug|pr|"
    r"epoch|timestamp|unix|time|date|size|bytes|count|total|price|amount|score|lat|lon|latitude|longitude|seed|"
    r"range|steps|page|pages|imei|vin|sequence|seq|offset|bestellung|rechnung|sipariş|fatura|commande|facture|pedido"
)
