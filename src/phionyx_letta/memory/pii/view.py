"""A text as the rules read it: one form for the many ways to write a digit, a dash or a space.

Full-width and other digits become ASCII digits, typographic hyphens become ``-``, every space becomes a space, and
invisible characters are left out. Offsets lead back to the original text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

#: Characters that take no place on the page: zero-width, soft hyphen, bidirectional controls, variation selectors, tags.
INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\U000e0000-\U000e0fff]"
)

_HYPHENS = "\u2010\u2011\u2012\u2013\u2212\ufe58\ufe63\uff0d\u2043"


class _OneForOne(dict[int, str | int]):
    """A table for ``str.translate`` that keeps the length of the text, filled as characters are met."""

    def __missing__(self, code: int) -> str | int:
        character = chr(code)
        if code < 128:
            form = character
        elif character in _HYPHENS:
            form = "-"
        elif (digit := unicodedata.decimal(character, None)) is not None:
            form = str(digit)
        elif unicodedata.category(character) == "Zs":
            form = " "
        else:
            form = unicodedata.normalize("NFKC", character)
        if len(self) > 20_000:  # texts of every character there is must not fill the memory
            self.clear()
        self[code] = form if len(form) == 1 else character
        return self[code]


_FORMS = _OneForOne()


@dataclass(frozen=True)
class View:
    """``text`` to be searched; ``origin[i]`` is where its i-th character stood (None: at i)."""

    text: str
    origin: Sequence[int] | None = None

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Return the stretch of the original that ``text[start:end]`` stands for."""
        if self.origin is None:
            return start, end
        return self.origin[start], self.origin[end - 1] + 1


def view(text: str) -> View:
    """Return `text` as the rules read it."""
    if text.isascii():
        return View(text)
    plain = text.translate(_FORMS)
    if not INVISIBLE.search(text):
        return View(plain)
    hidden = {place for found in INVISIBLE.finditer(text) for place in range(*found.span())}
    origin = [place for place in range(len(text)) if place not in hidden]
    return View("".join(plain[place] for place in origin), origin)
