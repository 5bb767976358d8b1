"""A witness as a sink (https://c2sp.org/tlog-witness): somebody else who signs that the log only ever grew.

It is given the checkpoint with the proof that it continues the one the witness signed last, and answers with a timestamped
cosignature, which is checked here before it counts. Whoever trusts the witness's key need not trust the log's operator not to
show different histories to different people.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

from phionyx_letta.errors import NoteError, ProofError, SettingsError, SinkConflict, SinkError
from phionyx_letta.ledger.log.post import Answer, Endpoint
from phionyx_letta.ledger.log.sink import Published
from phionyx_letta.merkle import MAX_SIZE
from phionyx_letta.notes import COSIGNATURE, NoteKey, SignedNote, parse_note, parse_signatures

__all__ = ["WitnessSink"]

_SIZE = re.compile(rb"(0|[1-9][0-9]{0,18})\n?")
_TRIES = 3
_MEANING = {
    400: "it could not read the request",
    403: "it does not trust the log's key",
    404: "it does not know the log",
    429: "it is asked too often",
}


class WitnessSink:
    """Offers checkpoints to a witness and checks what it signs."""

    def __init__(self, endpoint: Endpoint, keys: Sequence[NoteKey], *, interval: float = 10.0) -> None:
        """Use the witness at this submission prefix.

        Args:
            endpoint: the prefix; ``/add-checkpoint`` is added.
            keys: of the witness; at least one of them must sign.
            interval: least time between two checkpoints, s.

        Raises:
            SettingsError: a key is missing, or does not make cosignatures.
        """
        self.name = f"witness {endpoint.name}"
        if not keys or any(key.algorithm != COSIGNATURE for key in keys):
            raise SettingsError(
                f"{self.name} needs a verifier key for cosignature/v1", "give the one its operator published"
            )
        self._endpoint = endpoint
        self._keys = tuple(keys)
        self._last: dict[str, int] = {}  # what the witness signed last, by origin
        self.interval = interval

    def deliver(self, offered: Published, /) -> str | None:
        """Have the checkpoint cosigned; None where the witness has signed a newer one of this log.

        Returns:
            The note with the witness's cosignatures beside the log's own signature.

        Raises:
            SinkConflict: the witness has signed what the log does not continue.
            SinkError: there was no answer, or it had no valid cosignature.
        """
        origin, size = offered.checkpoint.origin, offered.checkpoint.size
        for _ in range(_TRIES):
            old = self._last.get(origin, 0)
            if old > size:
                self._check_passed(offered, old)
                return None
            answer = self._endpoint.post(
                self._request(offered, old), "text/plain; charset=utf-8", below="/add-checkpoint"
            )
            if answer.status == 409:
                self._last[origin] = self._told_size(answer)
                continue
            cosigned = self._cosigned(offered, answer)
            self._last[origin] = size
            return cosigned
        raise SinkError(
            f"{self.name} keeps changing the size it signed last", "another sealer may be at work; tried again"
        )

    @staticmethod
    def _request(offered: Published, old: int) -> bytes:
        size = offered.checkpoint.size
        proof = offered.prove(old, size) if 0 < old < size else ()
        lines = [f"old {old}", *(base64.b64encode(one).decode("ascii") for one in proof), "", offered.note]
        return "\n".join(lines).encode()

    def _check_passed(self, offered: Published, signed: int) -> None:
        """The witness is ahead: another sealer was faster, if the log has grown that far; else it has gone back."""
        try:
            offered.prove(offered.checkpoint.size, signed)
        except ProofError:
            self._last.pop(offered.checkpoint.origin)
            raise SinkConflict(
                f"{self.name} has signed a checkpoint of {signed} envelopes, but the log has not so many",
                "the database was set back: verify the ledger against the cosigned checkpoint",
            ) from None

    def _told_size(self, answer: Answer) -> int:
        found = _SIZE.fullmatch(answer.body)
        if not found or int(found[1]) > MAX_SIZE:
            raise SinkError(f"{self.name} answered 409 without the size it signed last", "check what runs there")
        return int(found[1])

    def _cosigned(self, offered: Published, answer: Answer) -> str:
        if answer.status == 422:
            self._last.pop(offered.checkpoint.origin, None)
            raise SinkConflict(
                f"{self.name} says that the checkpoint does not continue the one it signed last",
                "the log was rewritten or set back: verify the ledger against the cosigned checkpoint",
            )
        if answer.status != 200:
            meaning = _MEANING.get(answer.status)
            raise SinkError(
                f"{self.name} answered {answer.status}" + (f": {meaning}" if meaning else ""), "ask its operator"
            )
        note = parse_note(offered.note)
        try:
            lines = parse_signatures(answer.body.decode("utf-8"))
            good = SignedNote(note.text, lines).verified(self._keys)
        except (NoteError, UnicodeDecodeError) as error:
            why = error.message if isinstance(error, NoteError) else "not UTF-8"
            raise SinkError(f"{self.name} answered 200 without a valid cosignature: {why}", "check its key") from None
        return str(SignedNote(note.text, (*note.signatures, *good)))
