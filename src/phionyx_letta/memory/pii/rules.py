"""The rules, one finder per kind."""

from __future__ import annotations

import re
from collections.abc import Iterable

from phionyx_letta.memory.pii.findings import Finding

_SIMPLE = {
    "email": re.compile(r"(?<![\w.+-])[\w.+'-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,5}"),
    "phone": re.compile(r"(?<![\w.-])(?:\+?\d{1,3}[ -])?\(?\d{3}\)?[ .-]\d{3}[ .-]\d{4}(?![\w-])"),
    "ssn": re.compile(r"(?<![\w-])\d{3}-\d{2}-\d{4}(?![\w-])"),
    "credit_card": re.compile(r"(?<![\w-])\d{4}(?:[ -]?\d{4}){3}(?![\w-])"),
    "ip_address": re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])"),
    "api_key": re.compile(r"(?<![\w-])sk-[\w-]{20,200}"),
}


def find(text: str, kinds: frozenset[str], regions: tuple[str, ...]) -> Iterable[Finding]:
    """Yield what the rules find in `text`."""
    for kind in kinds & _SIMPLE.keys():
        for match in _SIMPLE[kind].finditer(text):
            yield Finding(kind, *match.span())
