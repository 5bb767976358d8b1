"""What a step of the memory branch did to its files: mutations, ready to become envelopes.

Pure functions over git's objects; no ledger. Content stays out unless it is asked for: of a commit's message only known trailers are
kept, as claims.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from phionyx_letta.diff import MemoryDiff
from phionyx_letta.envelope import MemoryConsolidationAudit
from phionyx_letta.letta_code.contents import ABSENT, Content, content_diff
from phionyx_letta.letta_code.errors import ObjectUnreadable
from phionyx_letta.letta_code.objects import (
    SUBMODULE,
    SYMLINK,
    Commit,
    Entry,
    Objects,
)
from phionyx_letta.letta_code.trees import Changed

__all__ = ["Mutation", "Unread", "block_id", "claims", "file_name", "label_of", "mutations"]

_FRONT = re.compile(r"\A---[ \t]*\r?\n(.*?)(?:\r?\n)?^---[ \t]*\r?$\n?", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r"^(name|label):(.*)$", re.MULTILINE)
_TRAILER = re.compile(
    r"^(Generated-By|Agent-ID|Parent-Agent-ID|Co-authored-by|Phionyx-[A-Za-z-]+):[ \t]*(.{1,200})$", re.IGNORECASE
)
_WHEN = re.compile(r"(\d{1,15}) [+-]\d{4}")
#: Characters of a file's name in its block's.
_MAX_NAME = 300
_KINDS = {SYMLINK: "symlink", SUBMODULE: "submodule"}


@dataclass(slots=True)
class Mutation:
    """One change of one memory file, or of the repository itself."""

    path: str | None
    """As `file_name` writes it; None where it is about the repository itself."""
    label: str
    kind: str
    event: str
    diff: MemoryDiff | None
    """None where only the repository is concerned: an envelope that says nothing of any content."""
    details: dict[str, Any] = field(default_factory=dict)
    audit: MemoryConsolidationAudit | None = None


@dataclass(slots=True)
class Unread:
    """Files whose content could not be read."""

    paths: list[str] = field(default_factory=list)
    why: str = ""


def file_name(path: bytes) -> str:
    """A path as text: what is not printable UTF-8, and `%`, is written as `%XX`, so that no two paths share a name."""
    if path.isascii() and b"%" not in path and (plain := path.decode("ascii")).isprintable():
        return plain
    out = []
    for char in path.decode("utf-8", "surrogateescape"):
        if char == "%" or not char.isprintable():
            out += [f"%{byte:02X}" for byte in char.encode("utf-8", "surrogateescape")]
        else:
            out.append(char)
    return "".join(out)


def block_id(agent: str, name: str | None) -> str:
    """The block a memory file is in the ledger; without a name that of the repository's own history, which no file can be.

    A name no index can hold (PostgreSQL's take 2704 bytes) is cut and told apart by its hash: no other has `%~`.
    """
    if name is None:
        return f"{agent}#history"
    if len(name) > _MAX_NAME:
        name = f"{name[:100]}%~{hashlib.sha256(name.encode()).hexdigest()}"
    return f"{agent}:{name}"


def label_of(name: str, text: str | None) -> str:
    """The frontmatter's `name` or `label`, else the path without `.md`."""
    front = _FRONT.match(text or "")
    found = {match[1]: match[2].strip().strip("\"'") for match in _FIELD.finditer(front[1])} if front else {}
    for key in ("name", "label"):
        value = found.get(key, "")
        if value and value.isprintable() and len(value) <= 200:
            return value
    return name.removesuffix(".md")


def claims(commit: Commit) -> dict[str, Any]:
    """What a commit says of its origin; anyone can have written it."""
    found: dict[str, Any] = {}
    for role in ("author", "committer"):
        person, _, when = getattr(commit, role).rpartition("> ")
        name, bracket, email = person.partition("<")
        match = _WHEN.fullmatch(when) if bracket else None
        if match:
            found[role] = {"name": name.removesuffix(" ")[:200], "email": email[:200], "unix_time": int(match[1])}
    last = commit.message.rstrip().rpartition("\n\n")[2]
    trailers = [match.groups() for line in last.splitlines()[-20:] if (match := _TRAILER.fullmatch(line))]
    if trailers:
        found["trailers"] = [[name, value.strip()] for name, value in trailers]
    return found


def mutations(objects: Objects, found: Sequence[Changed], *, include_text: bool, unread: Unread) -> Iterator[Mutation]:
    """Yield what changed between two trees, file by file.

    Args:
        objects: of the repository.
        found: as `changed_files` gives it.
        include_text: keep the unified diff.
        unread: gets what could not be read; it is not yielded.
    """
    renamed = _renames(found)
    for path, old, new in found:
        name = file_name(path)
        try:
            after_content = objects.content(new)
        except ObjectUnreadable as error:
            unread.paths.append(name)
            unread.why = unread.why or error.message
            continue
        try:
            mutation = _mutation(name, old, new, objects.content(old), after_content, renamed.get(path), include_text)
        except ObjectUnreadable:  # then it goes on from what the ledger knows
            mutation = _mutation(name, old, new, ABSENT, after_content, renamed.get(path), False)
            mutation.details["before_unreadable"] = True
        yield mutation


def _mutation(
    name: str,
    old: Entry | None,
    new: Entry | None,
    before: Content,
    after: Content,
    other_path: bytes | None,
    include_text: bool,
) -> Mutation:
    details: dict[str, Any] = {}
    kept: Entry = new or old  # type: ignore[assignment]
    if kept.mode in _KINDS:
        details["file_type"] = _KINDS[kept.mode]
    if old and new and old.mode != new.mode:
        details["mode"] = {"before": old.mode, "after": new.mode}
    event = "create" if old is None else "delete" if new is None else "update" if old.oid != new.oid else "mode"
    if other_path is not None:
        event = "rename"
        details["renamed_from" if old is None else "renamed_to"] = file_name(other_path)
    if (before if new is None else after).text is None:
        details["binary"] = True
    diff = content_diff(before, after, include_text=include_text)
    if diff.counts_method != "lcs":
        details["counts_method"] = diff.counts_method
    label = label_of(name, (before if new is None else after).text)
    return Mutation(name, label, _kind(old, new, before, after), event, diff, details)


def _kind(old: Entry | None, new: Entry | None, before: Content, after: Content) -> str:
    """By content (design, decision 4). A file whose text is emptied but for its frontmatter is cleared."""
    if new is None:
        return "delete"
    if old is None or before.text is None or after.text is None:
        return "write"
    if before.digest == after.digest:
        return "write"
    if _body(before.text).strip() and not _body(after.text).strip():
        return "clear"
    return "append" if before.text and after.text.startswith(before.text) else "write"


def _body(text: str) -> str:
    front = _FRONT.match(text)
    return text[front.end() :] if front else text


def _renames(found: Sequence[Changed]) -> dict[bytes, bytes]:
    """Paths of files that only moved, each with the other: the same object, gone once and new once."""
    if len(found) < 2:
        return {}
    gone: dict[str, list[bytes]] = {}
    come: dict[str, list[bytes]] = {}
    for path, old, new in found:
        if old is not None and new is None:
            gone.setdefault(old.oid, []).append(path)
        elif new is not None and old is None:
            come.setdefault(new.oid, []).append(path)
    pairs = [(gone[oid][0], come[oid][0]) for oid in gone if len(gone[oid]) == 1 == len(come.get(oid, ()))]
    return {**dict(pairs), **{new: old for old, new in pairs}}
