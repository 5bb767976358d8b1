"""How often a fact was seen, in distinct sessions, and what has been proposed for it.

One fact comes under many keys and in many words: keys are normalised, and a new key whose text says the same as a known fact's
counts for that fact. The file is JSON as the seed has it, replaced atomically under the folder's lock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from phionyx_letta.errors import StoreError
from phionyx_letta.memory.facts import normalised_key, same_fact
from phionyx_letta.memory.files import locked_folder, write_text
from phionyx_letta.memory.once import warn_once
from phionyx_letta.memory.patches import now

__all__ = [
    "OccurrenceRecord",
    "OccurrenceTracker",
    "Occurrences",
    "TrackerBase",
    "normalised_key",
    "read_record",
    "same_fact",
]

MOST_SAMPLES = 5
_log = logging.getLogger(__name__)


@dataclass
class OccurrenceRecord:
    """One fact: the sessions it was seen in, some evidence, what it says, and the newest patch made for it."""

    fact_key: str
    count: int = 0
    first_seen: str = field(default_factory=now)
    last_seen: str = field(default_factory=now)
    session_ids: list[str] = field(default_factory=list)
    sample_evidence: list[str] = field(default_factory=list)
    content: str = ""
    patch_id: str | None = None

    def add(self, session_id: str, evidence: str, content: str) -> None:
        """Count a session once, keep a few different pieces of evidence, and what the fact says now."""
        if session_id not in self.session_ids:
            self.session_ids.append(session_id)
        self.count = len(self.session_ids)
        self.last_seen = now()
        if evidence and evidence not in self.sample_evidence and len(self.sample_evidence) < MOST_SAMPLES:
            self.sample_evidence.append(evidence)
        if content and not self.content:
            self.content = content


class Occurrences(Protocol):
    """Counts of facts, wherever they are kept; several processes may use one at once."""

    def record_occurrence(
        self, fact_key: str, session_id: str, evidence: str = "", *, content: str = ""
    ) -> OccurrenceRecord:
        """Count a fact for a session; see `OccurrenceTracker.record_occurrence`."""
        ...

    def has_reached_threshold(self, fact_key: str, threshold: int = 3) -> bool:
        """Return whether the fact was seen in so many sessions."""
        ...

    def get_count(self, fact_key: str) -> int:
        """Return in how many sessions the fact was seen."""
        ...

    def get_mature_facts(self, min_occurrences: int = 3) -> list[OccurrenceRecord]:
        """Return the facts seen in so many sessions."""
        ...

    def note_patch(self, fact_key: str, patch_id: str, content: str) -> None:
        """Remember the newest patch made for a fact, and what it said."""
        ...

    def remove(self, fact_key: str) -> None:
        """Forget a fact."""
        ...


class TrackerBase(ABC):
    """What all trackers do with a record; where records are kept is theirs."""

    @abstractmethod
    def _changing(self) -> contextlib.AbstractContextManager[dict[str, OccurrenceRecord]]:
        """Yield the records under the lock and write them back."""

    @abstractmethod
    def _records(self) -> Mapping[str, OccurrenceRecord]:
        """Return the records as they stand."""

    def record_occurrence(
        self, fact_key: str, session_id: str, evidence: str = "", *, content: str = ""
    ) -> OccurrenceRecord:
        """Count a fact for a session, once however often it comes up in it, and return its record.

        Args:
            fact_key: its key; spelling, case and punctuation do not matter.
            session_id: the session.
            evidence: a quote; a few different ones are kept.
            content: what the fact says; a new key whose content says the same as a known fact's counts for that one.
        """
        with self._changing() as records:
            key = _known_key(records, fact_key, content)
            record = records.setdefault(key, OccurrenceRecord(key))
            record.add(session_id, evidence, content)
            return record

    def has_reached_threshold(self, fact_key: str, threshold: int = 3) -> bool:
        """Return whether the fact was seen in at least `threshold` distinct sessions."""
        return self.get_count(fact_key) >= threshold

    def get_count(self, fact_key: str) -> int:
        """Return in how many distinct sessions the fact was seen."""
        record = self._records().get(normalised_key(fact_key))
        return record.count if record else 0

    def get_mature_facts(self, min_occurrences: int = 3) -> list[OccurrenceRecord]:
        """Return the facts seen in at least so many sessions, the oldest first."""
        found = [record for record in self._records().values() if record.count >= min_occurrences]
        return sorted(found, key=lambda record: record.first_seen)

    def note_patch(self, fact_key: str, patch_id: str, content: str) -> None:
        """Remember the newest patch made for a fact, and what it said."""
        with self._changing() as records:
            key = normalised_key(fact_key)
            record = records.setdefault(key, OccurrenceRecord(key))
            record.patch_id, record.content = patch_id, content

    def remove(self, fact_key: str) -> None:
        """Forget a fact; one that is not known is no error."""
        with self._changing() as records:
            records.pop(normalised_key(fact_key), None)


class OccurrenceTracker(TrackerBase):
    """The seed's tracker: a JSON file, or nothing but memory where no path is given."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """Use the file at `path`; it is made at the first occurrence."""
        self.path = Path(path) if path is not None else None
        self._kept: dict[str, OccurrenceRecord] = {}
        self._mutex = threading.RLock()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, OccurrenceRecord]]:
        with self._mutex:
            if self.path is None:
                yield self._kept
                return
            with locked_folder(self.path.parent):
                records = self._read(set_aside=True)
                yield records
                data = {key: asdict(record) for key, record in sorted(records.items())}
                write_text(self.path, json.dumps(data, indent=2, sort_keys=True) + "\n", locked=True)

    def _records(self) -> dict[str, OccurrenceRecord]:
        return self._kept if self.path is None else self._read()

    def _read(self, *, set_aside: bool = False) -> dict[str, OccurrenceRecord]:
        assert self.path is not None
        try:
            raw = self.path.read_bytes()
            data = json.loads(raw)
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            data = None
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read: {error.strerror}", "check its permissions") from None
        if not isinstance(data, dict):
            warn_once(_log, "%s is not a file of occurrences; it is left aside", self.path.absolute(), about=hash(raw))
            if set_aside:
                os.replace(self.path, f"{self.path}.damaged-{now()}")
            return {}
        return _united(data)


def _known_key(records: Mapping[str, OccurrenceRecord], fact_key: str, content: str) -> str:
    key = normalised_key(fact_key)
    if key in records:
        return key
    said = content or key.replace("_", " ")
    for known, record in records.items():
        if same_fact(said, record.content or known.replace("_", " ")) or same_fact(
            key.replace("_", " "), known.replace("_", " ")
        ):
            return known
    return key


def _united(data: Mapping[str, Any]) -> dict[str, OccurrenceRecord]:
    """Read records, and unite those an older file kept under two spellings of one key."""
    records: dict[str, OccurrenceRecord] = {}
    for raw, value in data.items():
        record = read_record(raw, value)
        if record is None:
            warn_once(_log, "the occurrences of %r cannot be read and are left aside", raw, about=repr(value))
            continue
        known = records.get(record.fact_key)
        if known is None:
            records[record.fact_key] = record
            continue
        for session in record.session_ids:
            known.add(session, "", record.content)
        known.patch_id = known.patch_id or record.patch_id
    return records


def read_record(key: str, value: object) -> OccurrenceRecord | None:
    """Read the JSON form of a record; None where it is none."""
    if not isinstance(value, dict):
        return None
    sessions = value.get("session_ids")
    samples = value.get("sample_evidence", [])
    if not isinstance(sessions, list) or not isinstance(samples, list):
        return None
    distinct = list(dict.fromkeys(str(one) for one in sessions))
    patch_id = value.get("patch_id")
    return OccurrenceRecord(
        normalised_key(key),
        len(distinct),
        str(value.get("first_seen", "")),
        str(value.get("last_seen", "")),
        distinct,
        [str(one) for one in samples],
        str(value.get("content", "")),
        patch_id if isinstance(patch_id, str) else None,
    )
