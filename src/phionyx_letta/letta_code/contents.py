"""What a memory file holds, as the ledger compares it: hash, sizes, and the text where it is one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from phionyx_letta._align import common_length
from phionyx_letta.diff import MemoryDiff, compute_memory_diff

__all__ = ["ABSENT", "Content", "content_diff", "content_of"]


@dataclass(frozen=True, slots=True)
class Content:
    """What is recorded of a file's bytes as git has them."""

    digest: str
    size: int
    length: int
    """Code points of text; bytes of anything else."""
    text: str | None
    """None for what is not UTF-8, or too large."""


ABSENT = Content("sha256:" + hashlib.sha256().hexdigest(), 0, 0, "")


def content_of(data: bytes) -> Content:
    """Hash the bytes, and decode them if they are text."""
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return Content(digest, len(data), len(data), None)
    return Content(digest, len(data), len(text), text)


def content_diff(before: Content, after: Content, *, include_text: bool) -> MemoryDiff:
    """Compare two contents; where one is not text, all of it counts as replaced."""
    if before.text is None or after.text is None:
        unchanged, method = after.length if before.digest == after.digest else 0, "replaced"
    elif include_text:
        return compute_memory_diff(before.text, after.text, include_diff_text=True)
    else:
        unchanged, method = common_length(before.text, after.text)
    return MemoryDiff(
        before_hash=before.digest,
        after_hash=after.digest,
        before_size_bytes=before.size,
        after_size_bytes=after.size,
        added_chars=after.length - unchanged,
        removed_chars=before.length - unchanged,
        unchanged_chars=unchanged,
        counts_method=method,
    )
