"""A rollback that a person accepted: the signed record of it, and what it excuses.

After a database was legitimately restored from a backup, the log is shorter than, or other than, checkpoints outside say. An operator
who holds the signing key records that in the ledger itself, as an envelope like any other (block `phionyx-letta.log`): who, why, the
newest checkpoint that is given up, up to where the log still agrees, and the new origin under which it goes on. So the acceptance is
in the log it is about: whoever sets the database back once more sets it back too, and the new origin's checkpoints show that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from phionyx_letta._shape import find_fault
from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.envelope import envelope_hash
from phionyx_letta.signing import Verifier

__all__ = [
    "EVENT",
    "LOG_BLOCK",
    "AcceptedRollback",
    "GivenUp",
    "accepted_in",
    "belongs",
    "current_origin",
    "excuses",
    "read_accepted",
]

LOG_BLOCK = "phionyx-letta.log"
"""Stands for the block in envelopes about the log itself; Letta's own ids begin with `block-`."""
EVENT = "accept_rollback"
_MARK = EVENT.encode("ascii")
_FIELDS = {"origin": str, "size": int, "root": str, "agreed_size": int}


@dataclass(frozen=True)
class GivenUp:
    """The end of one log that is given up."""

    origin: str
    size: int
    root: str
    """Of the largest checkpoint outside that the restored log does not lead on from; hex."""
    agreed_size: int
    """Of the largest one that it does; 0 if there was none."""

    def excuses(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint from outside need not agree with the log any more."""
        if checkpoint.origin != self.origin:
            return False
        if checkpoint.size == self.size:
            return checkpoint.root.hex() == self.root
        return self.agreed_size < checkpoint.size < self.size


@dataclass(frozen=True)
class AcceptedRollback:
    """What one record says."""

    base: str
    """The log's name in the settings."""
    origin: str
    """Under which the log goes on."""
    given_up: tuple[GivenUp, ...]
    """Of the log under its name before, and under earlier ones whose acceptance was set back too."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, as it stands in `metadata.letta.rollback`."""
        return {**asdict(self), "given_up": [asdict(one) for one in self.given_up]}

    def excuses(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint from outside need not agree with the log any more."""
        return any(one.excuses(checkpoint) for one in self.given_up)


def belongs(origin: str, base: str) -> bool:
    """Whether a log's name is the one of the settings, or one under which that log went on."""
    return origin == base or origin.startswith(f"{base}/restored-")


def accepted_in(line: bytes, verifier: Verifier | None, place: int) -> AcceptedRollback | None:
    """The record in a line of the log, if it is one and a trusted key signed it.

    Args:
        line: an envelope as stored, trusted or not.
        verifier: the trusted keys.
        place: of the envelope in the log: of keys that were replaced, the one whose time it was counts.
    """
    if verifier is None or _MARK not in line:
        return None
    try:
        envelope = json.loads(line)
    except (ValueError, RecursionError):
        return None
    at = getattr(verifier, "verify_at", None)
    return read_accepted(envelope, verifier.verify if at is None else lambda signed, by: at(signed, by, place))


def read_accepted(envelope: object, verify: Callable[[str, str], bool]) -> AcceptedRollback | None:
    """The record in an envelope; None where it holds none, or was not signed by a trusted key.

    Args:
        envelope: of any sort, trusted or not.
        verify: `Verifier.verify` of the trusted keys.
    """
    if not isinstance(envelope, dict) or find_fault(envelope) is not None:
        return None
    letta = envelope["subject"]["metadata"].get("letta")
    if not isinstance(letta, dict) or letta.get("event") != EVENT or envelope["mutation"]["block_id"] != LOG_BLOCK:
        return None
    said = _said(letta.get("rollback"))
    if said is None:
        return None
    integrity = envelope["integrity"]
    try:
        good = envelope_hash(envelope, integrity["previous"]) == integrity["current"]
    except (TypeError, ValueError, RecursionError):
        return None
    if not good or not verify(integrity["current"], integrity["signature"]):
        return None
    return said


def _said(record: object) -> AcceptedRollback | None:
    if not isinstance(record, dict) or not isinstance(record.get("given_up"), list):
        return None
    ends = record["given_up"]
    if not all(isinstance(end, dict) and all(type(end.get(n)) is kind for n, kind in _FIELDS.items()) for end in ends):
        return None
    if not isinstance(record.get("base"), str) or not isinstance(record.get("origin"), str):
        return None
    given_up = tuple(GivenUp(**{name: end[name] for name in _FIELDS}) for end in ends)
    return AcceptedRollback(record["base"], record["origin"], given_up)


def current_origin(base: str, accepted: Iterable[AcceptedRollback]) -> str:
    """The name under which the log goes on: that of the newest acceptance, else the one of the settings."""
    return next((one.origin for one in reversed(list(accepted)) if one.base == base), base)


def excuses(accepted: Iterable[AcceptedRollback], checkpoint: Checkpoint) -> bool:
    """Whether any acceptance gave this checkpoint up."""
    return any(one.excuses(checkpoint) for one in accepted)
