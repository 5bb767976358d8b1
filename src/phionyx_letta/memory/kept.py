"""Sessions whose proposer gave no answer, kept beside the patch store until one does; personal data is out of them already."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from phionyx_letta._canonical import JSON_ERRORS
from phionyx_letta.memory.files import write_text
from phionyx_letta.memory.pii import MemoryPIIFilter
from phionyx_letta.memory.transcript import Message

__all__ = ["KeptSessions"]

_log = logging.getLogger(__name__)


class KeptSessions:
    """A folder with a JSON file for each session."""

    def __init__(self, folder: Path, pii: MemoryPIIFilter) -> None:
        """Use a folder; it is made with the first session."""
        self._folder = folder
        self._pii = pii

    def keep(self, session_id: str, messages: Sequence[Message]) -> None:
        """Write a session down, in place of what is there of it.

        Raises:
            TargetRefused: the folder cannot be written.
        """
        records = [
            {"role": one.role, "content": self._clean(one.text), "id": self._clean(one.message_id or "")}
            for one in messages
        ]
        text = json.dumps({"session_id": session_id, "session_records": records})
        write_text(self._path(session_id), text + "\n")
        _log.warning("the session %r is kept in %s until the proposer answers", session_id, self._folder)

    def drop(self, session_id: str) -> None:
        """Forget a session; one that is not kept is no error."""
        self._path(session_id).unlink(missing_ok=True)

    def all(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Yield the id and the records of each session."""
        for path in sorted(self._folder.glob("*.json")):
            try:
                data = json.loads(path.read_bytes())
                session_id, records = data["session_id"], data["session_records"]
                sound = isinstance(session_id, str) and isinstance(records, list)
            except (*JSON_ERRORS, OSError, KeyError):
                sound = False
            if sound:
                yield session_id, records
            else:
                _log.warning("%s is not a kept session; it is left as it is", path)

    def _clean(self, text: str) -> str:
        return self._pii.filter_content(text).filtered_content

    def _path(self, session_id: str) -> Path:
        return self._folder / (hashlib.sha256(session_id.encode("utf-8", "surrogatepass")).hexdigest()[:32] + ".json")
