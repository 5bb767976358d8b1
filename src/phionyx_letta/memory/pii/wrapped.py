"""Values that one line break runs through: an address, a number or a key that was wrapped where its line was full.

Each break is looked at by itself: what stands around it is read as if the break were not there, or were a space, and what is found
counts if it reaches over the break. A value that is whole on its own line is drawn out only where the next line begins with the
rest of it. Passwords but those of URLs, and what has no form of its own, cannot be told from the words of the next line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from phionyx_letta.memory.pii.emails import emails
from phionyx_letta.memory.pii.findings import Finding
from phionyx_letta.memory.pii.keys import api_keys, is_scrambled, jwts
from phionyx_letta.memory.pii.numbers import IBAN_START, cards, ibans, ip_addresses, social_security_numbers
from phionyx_letta.memory.pii.passwords import named_secrets, url_passwords
from phionyx_letta.memory.pii.phones import is_american, is_international, phones
from phionyx_letta.memory.pii.tables import COMMON_TLDS

__all__ = ["wrapped"]

_BREAK = re.compile(r"[ \t]{0,8}\\?(?:\r\n|[\n\r\v\f\x85\u2028\u2029])[ \t]{0,40}(?:> ?){0,4}(?=[^\s>])")
_BEFORE, _AFTER = 100, 64  # characters around a break: a value, and the words that announce it
_LONGEST = 4000  # of a token on one side; JSON web tokens are the longest
_LINE_END = re.compile(r"[\r\v\f\x85\u2028\u2029]")
_LINE = re.compile(r"[^\n\r\v\f\x85\u2028\u2029]+")
_DIGIT = re.compile(r"\d")
_AT = re.compile(r"@|%40|&#64;|&#x40;|&commat;", re.IGNORECASE)
_NUMBER_BEFORE = re.compile(r"[\d(+][\d ./()+-]*$")
_NUMBER_AFTER = re.compile(r"[ ./()+-]{0,3}\d[\d ./()-]*")
_DATE = re.compile(
    r"(?:\d{1,2}[./-]){2}(?:19|20)\d\d$|^(?:19|20)\d\d[./-]\d{1,2}[./-]\d{1,2}|^(?:\d{1,2}[./-]){2}(?:19|20)\d\d\b"
)
_SERVICE = re.compile(r"(?:git|hg|svn)@")
_LETTER = re.compile(r"[^\W\d_]")
_SPACED = frozenset({"credit_card", "iban", "phone", "ssn"})  # values whose groups may have a space between them
_Finder = Callable[[str], Iterator[Finding]]


@dataclass(frozen=True)
class _Break:
    """A line break in a text, the two lines beside it (as much of them as a value can take), and the words that touch it."""

    text: str
    start: int
    end: int
    line: str
    below: str
    left: str
    right: str

    def across(self, finder: _Finder, joints: tuple[str, ...]) -> Iterator[Finding]:
        """Yield what `finder` sees reaching over the break, once that is one of `joints`."""
        before = self.line[-max(_BEFORE, len(self.left) + 48) :]
        after = self.below[: max(_AFTER, len(self.right) + 24)]
        for joint in joints:
            inner = len(before) + len(joint)
            for one in finder(before + joint + after):
                if one.start < len(before) and one.end > inner:
                    yield Finding(one.kind, self.start - len(before) + one.start, self.end - inner + one.end)


def wrapped(
    text: str, kinds: frozenset[str], regions: tuple[str, ...], known: Mapping[str, Sequence[Finding]]
) -> Iterator[Finding]:
    """Yield the values in `text` that a single line break runs through.

    Args:
        text: as the rules read it.
        kinds: what to look for.
        regions: of national telephone numbers.
        known: what was found without looking over line breaks, by kind.
    """
    starts = {kind: {one.start for one in found} for kind, found in known.items()}
    ends = {kind: {one.end: one for one in found} for kind, found in known.items()}
    for one in _breaks(text):
        for kind, finder in _finders(one, regions):
            if kind not in kinds:
                continue
            whole = ends.get(kind, {}).get(one.start), one.end in starts.get(kind, ())
            for found in one.across(finder, ("", " ") if kind in _SPACED else ("",)):
                if _BELIEVED.get(kind, _apart)(one, found, *whole):
                    yield found


def _breaks(text: str) -> Iterator[_Break]:
    for found in _BREAK.finditer(text):
        start, end = found.span()
        line = _LINE_END.split(
            text[max(0, start - _LONGEST, text.rfind("\n", max(0, start - _LONGEST), start) + 1) : start]
        )[-1]
        below = _LINE.match(text, end, end + _LONGEST)
        if below and line and not line[-1].isspace():
            yield _Break(text, start, end, line, below[0], line.rsplit(None, 1)[-1], below[0].split(None, 1)[0])


def _finders(one: _Break, regions: tuple[str, ...]) -> Iterator[tuple[str, _Finder]]:
    """Yield the kinds that what touches the break can be of; for most of prose there is none."""
    left, right = one.left, one.right
    if len(left) + len(right) >= 15 and (_DIGIT.search(left + right) or max(len(left), len(right)) >= 12):
        yield "api_key", api_keys
        yield "api_key", named_secrets
    if "eyJ" in left:
        yield "jwt", jwts
    if "://" in left:
        yield "password", url_passwords
    if _AT.search(left[-80:]) or _AT.search(right[:80]):
        yield "email", emails
    if IBAN_START.search(one.line[-44:] + one.below[:6]):
        yield "iban", ibans
    if left.count(":") + right.count(":") > 1 or left.count(".") + right.count(".") > 2:
        yield "ip_address", ip_addresses
    before = _NUMBER_BEFORE.search(one.line[-32:])
    after = _NUMBER_AFTER.match(one.below[:32])
    if before and after:
        digits = sum(map(str.isdigit, before[0] + after[0]))
        if digits > 11:
            yield "credit_card", cards
        if digits > 8:
            yield "ssn", social_security_numbers
        if digits > 6:
            yield "phone", lambda window: phones(window, regions)


def _apart(one: _Break, found: Finding, before: Finding | None, behind: bool) -> bool:
    """Whether neither side is a value by itself."""
    return before is None and not behind


def _one_card(one: _Break, found: Finding, before: Finding | None, behind: bool) -> bool:
    """Whether digits on two lines are one number: they stand in a sentence or in groups, not one below the other in a column."""
    value = one.text[found.start : found.end]
    in_prose = _LETTER.search(one.line) or _LETTER.search(one.text, found.end, found.end + _AFTER)
    return _apart(one, found, before, behind) and bool(in_prose or len(re.findall(r"\d+", value)) > 2)


def _one_phone(one: _Break, found: Finding, before: Finding | None, behind: bool) -> bool:
    """Whether a number goes on over the break, though one side of it could be a number by itself."""
    first, rest = one.text[found.start : one.start], one.text[one.end : found.end]
    if _DATE.search(first) or _DATE.search(rest):
        return False
    if behind:
        return before is None and (first[0] in "+0(" or first[-1] in "-./)") and _dialled(first + rest)
    return before is None or (not _dialled(first) and (_dialled(first + rest) or _dialled(f"{first} {rest}")))


def _dialled(written: str) -> bool:
    """Whether a number is whole beyond doubt: with its country, or its trunk prefix, or in the American form."""
    digits = sum(map(str.isdigit, written))
    return is_international(written) or is_american(written) or (written[0] == "0" and digits >= 10)


def _one_host(one: _Break, found: Finding, before: Finding | None, behind: bool) -> bool:
    """Whether an address of a host goes on over the break: neither side is one, or the break stands inside its groups."""
    if before is None and not behind:
        first, rest = one.text[found.start : one.start], one.text[one.end : found.end]
        return not _address(first) and not _address(rest)
    joined = one.left[-1] == ":" or one.right[0] in ":."
    grouped = re.search(r"[0-9A-Fa-f]{1,4}:[0-9A-Fa-f]{1,4}$", one.left) is not None
    return (joined and not behind) or (grouped and before is None)


def _address(written: str) -> bool:
    try:
        ip_address(written)
    except ValueError:
        return False
    return True


def _one_key(one: _Break, found: Finding, before: Finding | None, behind: bool) -> bool:
    """Whether the next line begins with the rest of a key, and not with a name: `user2: …`, `DB_1=…`."""
    rest = one.text[one.end : found.end]
    if behind or one.text[found.end : found.end + 1] in (":", "=", "(") or re.match(r"[A-Za-z_]\w*=[^=]", rest):
        return False
    first = one.text[found.start : one.start]
    if len(first) >= 12 and first.islower() and not _DIGIT.search(first):
        return False  # words that hyphens join
    return before is None or is_scrambled(rest.rstrip("="))


def _one_address(one: _Break, found: Finding, before: Finding | None, behind: bool) -> bool:
    """Whether two lines hold one address: not a word, and an address below it; not a word, and a decorator."""
    if behind:
        return before is None and one.left[-1] in "+_-" and one.left[:1].isalnum()
    if _SERVICE.match(one.right):
        return False
    if one.right.startswith("@"):
        return one.text[found.start : found.end].rpartition(".")[2].lower() in COMMON_TLDS
    return True


_BELIEVED = {
    "credit_card": _one_card,
    "phone": _one_phone,
    "ip_address": _one_host,
    "api_key": _one_key,
    "jwt": _one_key,
    "email": _one_address,
}
