"""What a mutation did to a block's text: hashes, sizes and character counts, and on request a unified diff.

Counts come from a longest common subsequence over code points, so any implementation gets the same numbers:
`added + unchanged == len(after)` and `removed + unchanged == len(before)`. The cost is bounded, because this runs next to
an agent: see `phionyx_letta._align` for the bound and for what is counted beyond it. Content never leaves this module
unless `include_diff_text` asks for it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import Any

from phionyx_letta._align import common_length
from phionyx_letta.errors import InvalidMutation

__all__ = ["COMMITMENTS", "MemoryDiff", "compute_memory_diff", "content_hash", "preload"]

COMMITMENTS = ("sha256", "hmac-sha256")
"""How `before_hash` and `after_hash` commit to the texts: bare, or keyed with a salt."""
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_COUNTS = ("before_size_bytes", "after_size_bytes", "added_chars", "removed_chars", "unchanged_chars")
_MIN_SALT_BYTES = 16  # 128 bits: below that a salt is itself guessable


@dataclass(frozen=True)
class MemoryDiff:
    """The `mutation.diff` part of an envelope (seed: "Top-level structure").

    Hashes are `sha256:<64 hex>` of the UTF-8 text, sizes are bytes of UTF-8, counts are Unicode code points.
    `counts_method` is `"lcs"` where the counts are exact, else the name of the bounded method that gave them.
    `commitment` is `"sha256"` for bare hashes, `"hmac-sha256"` where they are keyed with a salt (see `content_hash`).

    Raises:
        InvalidMutation: a field has the wrong type or form.
    """

    before_hash: str
    after_hash: str
    before_size_bytes: int
    after_size_bytes: int
    added_chars: int
    removed_chars: int
    unchanged_chars: int
    diff_text: str | None = None
    counts_method: str = "lcs"
    commitment: str = "sha256"

    def __post_init__(self) -> None:
        """Refuse what the envelope schema would refuse."""
        for name in ("before_hash", "after_hash"):
            value = getattr(self, name)
            if not isinstance(value, str) or not _HASH.fullmatch(value):
                raise InvalidMutation(
                    f"diff.{name} is not of the form sha256:<64 hex digits>", "use content_hash(text)"
                )
        for name in _COUNTS:
            count = getattr(self, name)
            if type(count) is not int or count < 0:
                raise InvalidMutation(f"diff.{name} is not an integer of at least 0", "use compute_memory_diff()")
        if self.commitment not in COMMITMENTS:
            raise InvalidMutation(
                f"diff.commitment is not one of {', '.join(COMMITMENTS)}", "use compute_memory_diff()"
            )
        for name, kinds in (("diff_text", (str, type(None))), ("counts_method", (str,))):
            if not isinstance(getattr(self, name), kinds):
                raise InvalidMutation(f"diff.{name} is not text", "use compute_memory_diff()")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; the two optional keys appear only where they say something.

        An exact, unsalted diff therefore has the very bytes the peers write.
        """
        out: dict[str, Any] = {
            "before_hash": self.before_hash,
            "after_hash": self.after_hash,
            "before_size_bytes": self.before_size_bytes,
            "after_size_bytes": self.after_size_bytes,
            "added_chars": self.added_chars,
            "removed_chars": self.removed_chars,
            "unchanged_chars": self.unchanged_chars,
            "diff_text": self.diff_text,
        }
        if self.counts_method != "lcs":
            out["counts_method"] = self.counts_method
        if self.commitment != "sha256":
            out["commitment"] = self.commitment
        return out


def content_hash(text: str, *, salt: bytes | None = None) -> str:
    """Return `sha256:<hex>` over the UTF-8 bytes of `text`; lone surrogates are encoded as they stand.

    With `salt` (at least 16 bytes) the digest is HMAC-SHA256 under it: without the salt nobody can tell a short secret
    by trying all of them, and destroying the salt makes the commitment unreadable for good.

    Raises:
        InvalidMutation: `text` is not str, or the salt too short.
    """
    return _digest(_utf8(text), salt)


def compute_memory_diff(
    before: str, after: str, *, include_diff_text: bool = False, salt: bytes | None = None
) -> MemoryDiff:
    """Compare two states of a block.

    `include_diff_text` adds the content itself as a unified diff (readable by `patch`); `salt` keys both hashes, see
    `content_hash`. Both together contradict each other and are refused.

    Raises:
        InvalidMutation: an argument has the wrong type.
    """
    if include_diff_text and salt is not None:
        raise InvalidMutation("a salted diff cannot also carry its text", "choose either salt or include_diff_text")
    old, new = _utf8(before), _utf8(after)
    unchanged, method = common_length(before, after)
    return MemoryDiff(
        before_hash=_digest(old, salt),
        after_hash=_digest(new, salt),
        before_size_bytes=len(old),
        after_size_bytes=len(new),
        added_chars=len(after) - unchanged,
        removed_chars=len(before) - unchanged,
        unchanged_chars=unchanged,
        diff_text=_diff_text(before, after) if include_diff_text else None,
        counts_method=method,
        commitment="sha256" if salt is None else "hmac-sha256",
    )


def preload() -> None:
    """Import what a diff needs (about 0.1 s), so that the first write of an agent does not pay for it."""
    import rapidfuzz.distance  # noqa: F401


def _diff_text(before: str, after: str) -> str:
    from phionyx_letta._unified import unified_diff  # rarely asked for

    return unified_diff(before, after)


def _utf8(text: str) -> bytes:
    if not isinstance(text, str):
        raise InvalidMutation(f"memory content is {type(text).__name__}, not str", "pass the block's text")
    return text.encode("utf-8", "surrogatepass")


def _digest(data: bytes, salt: bytes | None) -> str:
    if salt is None:
        return "sha256:" + hashlib.sha256(data).hexdigest()
    if not isinstance(salt, bytes) or len(salt) < _MIN_SALT_BYTES:
        raise InvalidMutation("the salt is not at least 16 bytes", "draw one per block with secrets.token_bytes(32)")
    return "sha256:" + hmac.new(salt, data, hashlib.sha256).hexdigest()
