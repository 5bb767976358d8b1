"""Reading an envelope from the text somebody hands over: one line of a file, one body of a ledger."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

__all__ = ["parse_unique", "read_envelope"]

_LINE = re.compile(
    rb'\{"integrity":\{"canonical_json":true,"current":"(sha256:[0-9a-f]{64})","previous":"(sha256:[0-9a-f]{64})",'
    rb'"signature":"[a-z0-9-]+:[0-9a-f]+"\},(.*)',
    re.DOTALL,
)


def read_envelope(text: str | bytes, *, signature_checked: bool) -> tuple[Any, bool]:
    """Return what the text holds, and whether its hash was found right on the text itself.

    Where the caller goes on to check the signature, a canonical text is hashed as it stands instead of being encoded anew (a
    tenth of the cost of verifying an envelope): no other text has that hash, and who signs writes canonical text.

    Raises:
        ValueError, RecursionError: it is not JSON, or a key is repeated.
    """
    data = text.encode() if isinstance(text, str) else text
    line = _LINE.match(data) if signature_checked else None
    if line is not None:
        current, previous, rest = line.groups()
        payload = b'{"previous":"%b","record":{%b}' % (previous, rest.rstrip())
        if hashlib.sha256(payload).hexdigest().encode() == current[7:]:
            return json.loads(data), True
    return parse_unique(data), False


def parse_unique(text: str | bytes) -> Any:
    """Parse JSON that somebody hands over; a repeated key would let its readers see different things.

    Raises:
        ValueError, RecursionError: it is not JSON, or a key is repeated.
    """
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")
    return found
