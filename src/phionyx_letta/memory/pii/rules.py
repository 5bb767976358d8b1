"""The rules of all kinds together, over one view of the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from phionyx_letta.memory.pii.emails import emails
from phionyx_letta.memory.pii.findings import Finding
from phionyx_letta.memory.pii.keys import api_keys, jwts, private_keys
from phionyx_letta.memory.pii.numbers import cards, ibans, ip_addresses, social_security_numbers
from phionyx_letta.memory.pii.passwords import named_secrets, passwords
from phionyx_letta.memory.pii.phones import phones
from phionyx_letta.memory.pii.view import view

_Finder = Callable[[str], Iterator[Finding]]
_FINDERS: tuple[tuple[str, _Finder], ...] = (
    ("private_key", private_keys),
    ("jwt", jwts),
    ("password", passwords),
    ("api_key", api_keys),
    ("api_key", named_secrets),
    ("email", emails),
    ("iban", ibans),
    ("credit_card", cards),
    ("ssn", social_security_numbers),
    ("ip_address", ip_addresses),
)


def find(text: str, kinds: frozenset[str], regions: tuple[str, ...]) -> Iterator[Finding]:
    """Yield what the rules find in `text`; findings of different kinds may overlap, surer kinds come first."""
    seen = view(text)
    for kind, finder in _FINDERS:
        if kind in kinds:
            for one in finder(seen.text):
                yield Finding(one.kind, *seen.span(one.start, one.end))
    if "phone" in kinds:
        for one in phones(seen.text, regions):
            yield Finding(one.kind, *seen.span(one.start, one.end))
