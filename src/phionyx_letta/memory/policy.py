"""Who may have patches applied: reviewers, their public keys and their blocks, in a short TOML file on the server.

With it the server's own key is not enough any more, and neither is any other key it trusts: a program that runs as the server's
user and reads its key (a tool in Letta's local sandbox) still cannot decide in a person's place. ::

    [[reviewer]]
    name = "ada"
    key = "ada.pub"            # or 64 hex digits; a path is relative to this file
    blocks = ["human", "project*"]   # labels; all where it is left out
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from phionyx_letta.errors import PhionyxError, SettingsError
from phionyx_letta.signing import Ed25519Verifier, TrustedKeys, Verifier, load_verifier

__all__ = ["Policy", "PolicyFile", "Reviewer"]

_log = logging.getLogger(__name__)
_HEX = re.compile("[0-9a-fA-F]{64}")
_KNOWN = {"name", "key", "blocks"}
_HOW = "docs/sessions.md shows one"


@dataclass(frozen=True)
class Reviewer:
    """One person, the key that speaks for him, and the labels of the blocks he decides about."""

    name: str
    verifier: Ed25519Verifier
    blocks: tuple[str, ...]
    source: Path | None = None
    """The file of the key, where it is in one."""

    def may_write(self, label: str) -> bool:
        """Whether a block of this label is his to decide about."""
        return any(fnmatchcase(label, pattern) for pattern in self.blocks)


@dataclass(frozen=True)
class Policy:
    """All reviewers."""

    reviewers: tuple[Reviewer, ...]

    @classmethod
    def load(cls, path: str) -> Policy:
        """Read the file.

        Raises:
            SettingsError: it cannot be read, is no TOML, or says something else than reviewers.
        """
        try:
            found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingsError(f"the approval policy {path} cannot be read: {error.strerror}", _HOW) from None
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SettingsError(f"the approval policy {path} is not TOML: {error}", _HOW) from None
        listed = found.get("reviewer")
        if set(found) != {"reviewer"} or not isinstance(listed, list) or not listed:
            raise SettingsError(f"the approval policy {path} has to hold [[reviewer]] tables and nothing else", _HOW)
        reviewers = tuple(_reviewer(one, Path(path)) for one in listed)
        if len({_folded(one.name) for one in reviewers}) != len(reviewers):
            raise SettingsError(
                f"the approval policy {path} names a reviewer twice, in whatever spelling",
                "give each a name of his own",
            )
        owners: dict[str, str] = {}
        for one in reviewers:
            if owners.setdefault(one.verifier.public_key_hex, one.name) != one.name:
                shared = f"{owners[one.verifier.public_key_hex]} and {one.name} have one key"
                raise SettingsError(f"in the approval policy {path} {shared}", "give each a key of his own")
        return cls(reviewers)

    @classmethod
    def load_all(cls, paths: Iterable[str]) -> Policy:
        """Read several, as they were at different times: what was decided under any of them is checked with all their keys.

        Raises:
            SettingsError: as `load`.
        """
        return cls(tuple(one for path in paths for one in cls.load(path).reviewers))

    def signed_by(self, signed: str, signature: str) -> Reviewer | None:
        """Return whose key made this signature, or None."""
        return next((one for one in self.reviewers if one.verifier.verify(signed, signature)), None)

    def signed_as(self, name: str, signed: str, signature: str, *, label: str | None = None) -> bool:
        """Return whether a key of the reviewer of this name made the signature; with `label`, of one whose block that is."""
        his = (one for one in self.reviewers if one.name == name and (label is None or one.may_write(label)))
        return any(one.verifier.verify(signed, signature) for one in his)

    def holder(self, public_key_hex: str | None) -> Reviewer | None:
        """Return whose key this is, or None."""
        return next((one for one in self.reviewers if one.verifier.public_key_hex == public_key_hex), None)

    def trusting(self, verifier: Verifier | None) -> Verifier:
        """Return what checks signatures of a key that is trusted anyhow, or of a reviewer's."""
        return TrustedKeys([*([verifier] if verifier is not None else []), *(one.verifier for one in self.reviewers)])


class PolicyFile:
    """The policy of a running server, read again when its file or a key's file changes; nobody may decide while it is broken."""

    def __init__(self, path: str) -> None:
        """Nothing is read yet."""
        self.path = path
        self.fault: str | None = None
        self._policy = Policy(())
        self._marks: list[tuple[int, ...] | None] | None = None

    def current(self) -> Policy:
        """Return the policy that counts now; one without reviewers where the file cannot be used, which is logged."""
        if self._marks is None or self._marks != self._look():
            self._load()
        return self._policy

    def _load(self) -> None:
        before, self._marks = self.fault, None  # a broken one is read again each time
        try:
            self._policy, self.fault = Policy.load(self.path), None
        except SettingsError as error:
            self._policy, self.fault = Policy(()), error.message
            if self.fault != before:
                _log.error("phionyx-letta: nobody may decide about patches: %s", error)
            return
        self._marks = self._look()
        _log.info("phionyx-letta: %s reviewers may decide about patches", len(self._policy.reviewers))

    def _look(self) -> list[tuple[int, ...] | None]:
        sources = [one.source for one in self._policy.reviewers if one.source is not None]
        return [_mark(path) for path in (Path(self.path), *sources)]


def _mark(path: Path) -> tuple[int, ...] | None:
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return None
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _folded(name: str) -> str:
    """A name without what a reader overlooks: case, spaces, compatible forms of letters."""
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def _reviewer(given: Any, path: Path) -> Reviewer:
    from phionyx_letta.memory.pii import MemoryPIIFilter  # not before a server has a policy: it takes a moment

    if not isinstance(given, Mapping) or not set(given) <= _KNOWN or not {"name", "key"} <= set(given):
        raise SettingsError(f"a reviewer in {path} has to have name and key, and may have blocks; nothing else", _HOW)
    name, key, blocks = given["name"], given["key"], given.get("blocks", ["*"])
    if not isinstance(name, str) or not name.strip() or not isinstance(key, str):
        raise SettingsError(f"name and key of a reviewer in {path} have to be text", _HOW)
    # what is recorded is the name without them: it would not be his any more
    if MemoryPIIFilter().filter_content(name).filtered_content != name:
        raise SettingsError(
            f"a reviewer in {path} is named by personal data (an address, a number)", "use a short name"
        )
    if not isinstance(blocks, list) or not all(isinstance(one, str) for one in blocks):
        raise SettingsError(f"blocks of {name} in {path} have to be a list of labels", _HOW)
    source = None if _HEX.fullmatch(key.strip()) else path.parent / key  # no file takes the place of a key
    try:
        verifier = load_verifier(source or key)
    except PhionyxError as error:
        raise SettingsError(f"the key of {name} in {path} cannot be used: {error.message}", error.remedy) from None
    return Reviewer(name, verifier, tuple(blocks), source)
