"""Characters that nobody sees: a text that a person reviews must not hold any unseen.

Unicode's Default_Ignorable_Code_Point (DerivedCoreProperties.txt 16.0), which is not what ``str.isprintable`` asks, and letters and
marks that are drawn blank.
"""

from __future__ import annotations

__all__ = ["INVISIBLE"]

INVISIBLE = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0"
    "\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
    "\u2800\U00016fe4\U0001d159"
)
"""They, as the inside of a class of a regular expression: first what is ignorable, then the braille, Khitan and musical blanks."""
