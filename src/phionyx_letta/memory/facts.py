"""Which facts are one: keys without regard to spelling, and texts that say the same in nearly the same words."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["normalised_key", "same_fact"]

_STOPWORDS = frozenset(
    re.findall(
        r"\w+",
        """a an and are as at be been for from has have he her his i in is it its my of on or our she that the their them they
        this to user users was we were will with you your""",
    )
)


def normalised_key(fact_key: str) -> str:
    """Return a key without regard to case, accents' encoding and punctuation: `Deploy-Tool: uv` is `deploy_tool_uv`."""
    folded = unicodedata.normalize("NFKC", fact_key).casefold()
    return re.sub(r"[\W_]+", "_", folded).strip("_") or "fact"


def same_fact(one: str, other: str) -> bool:
    """Return whether two short texts say the same in nearly the same words.

    Every word that carries meaning must have its like in the other text, endings aside, and numbers must be equal: "prefers
    tabs" and "prefers taps" differ, "prefers pytest for tests" and "The user prefers pytest for testing" do not.
    """
    from rapidfuzz import fuzz

    first, second = _meaning(one), _meaning(other)
    if first == second:
        return bool(first)
    if min(len(first), len(second)) < 2 or fuzz.token_sort_ratio(" ".join(first), " ".join(second)) < 80:
        return False
    rest = list(second)
    for word in first:
        like = next((candidate for candidate in rest if _alike(word, candidate)), None)
        if like is None:
            return False
        rest.remove(like)
    return not rest


def _meaning(text: str) -> list[str]:
    words = re.findall(r"[\w.+#]*[\w+#]", unicodedata.normalize("NFKC", text).casefold())
    return sorted(word for word in words if word not in _STOPWORDS)


def _alike(one: str, other: str) -> bool:
    """Whether two words differ at most in their endings (`test`, `tests`, `testing`)."""
    if one == other:
        return True
    shared = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    endings = {one[shared:], other[shared:]}
    return shared >= 4 and endings <= {"", "s", "es", "e", "ed", "d", "ing", "er", "ers", "y", "ies"}
