"""The rules of all kinds together, over one view of the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from phionyx_letta.memory.pii.emails import emails
from phionyx_letta.memory.pii.findings import KINDS, Finding
from phionyx_letta.memory.pii.keys import api_keys, jwts, private_keys
from phionyx_letta.memory.pii.numbers import cards, ibans, ip_addresses, social_security_numbers
from phionyx_letta.memory.pii.passwords import named_secrets, passwords
from phionyx_letta.memory.pii.phones import phones
from phionyx_letta.memory.pii.view import view
from phionyx_letta.memory.pii.wrapped import wrapped

_Finder = Callable[[str], Iterator[Finding]]
_FINDERS: tuple[tuple[str, _Finder], ...] = (
    ("private_key", private_keys),
    ("jwt", jwts),
    ("password", passwords),
    ("api_key", lambda text: chain(api_keys(text), named_secrets(text))),
    ("email", emails),
    ("iban", ibans),
    ("credit_card", cards),
    ("ssn", social_security_numbers),
    ("ip_address", ip_addresses),
)


def find(text: str, kinds: frozenset[str], regions: tuple[str, ...]) -> Iterator[Finding]:
    """Yield what the rules find in `text`; findings of different kinds may overlap, surer kinds come first."""
    seen = view(text)
    found = {kind: list(finder(seen.text)) for kind, finder in _FINDERS if kind in kinds}
    if "phone" in kinds:
        found["phone"] = list(phones(seen.text, regions))
    over_breaks = sorted(wrapped(seen.text, kinds, regions, found), key=lambda one: KINDS.index(one.kind))
    for one in [*over_breaks, *(one for of_kind in found.values() for one in of_kind)]:
        yield Finding(one.kind, *seen.span(one.start, one.end))
