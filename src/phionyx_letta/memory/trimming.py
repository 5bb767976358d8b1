"""What does not fit a target's limit, and what could go to make room. Nothing is removed here: a person decides."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["over_limit"]

_HEADING = re.compile(r"\s{0,3}#{1,6}\s")


def over_limit(before: str, after: str, limit: int | None) -> dict[str, Any] | None:
    """Return None where `after` fits, else the limit, the length, and the oldest lines of `before` that would have to go.

    Lines are in the order they were written as a rule, so the first ones are the oldest; headings and empty lines stay.

    Args:
        before: the text there is.
        after: the text there would be.
        limit: the most characters, or None.
    """
    if limit is None or len(after) <= limit:
        return None
    excess, trim = len(after) - limit, []
    for line in before.split("\n"):
        if excess <= 0:
            break
        if line.strip() and not _HEADING.match(line):
            trim.append(line)
            excess -= len(line) + 1
    return {"limit": limit, "length": len(after), "trim": trim if excess <= 0 else [], "enough": excess <= 0}
