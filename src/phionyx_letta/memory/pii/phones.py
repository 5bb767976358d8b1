"""Telephone numbers: which strings can be one is decided by ``phonenumbers``, whether they are by form and words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache

import phonenumbers

from phionyx_letta.memory.pii.findings import Finding
from phionyx_letta.memory.pii.words import OTHER_NUMBERS, Cue

# A run of 7 to 17 digits with single separators (or a bracket and a space) between them.
_NUMBER = re.compile(r"(?<![\w.+\-/#$€£])(?:\(?\+ ?|\()?\d(?:[ ./()\-]{0,3}\d){5,17}(?![\w]|[-.,:/]\d|[./]\w|%)")
_EXTENSION = re.compile(r" ?(?:x|ext\.?|extension|#|dahili|durchwahl)[ .:]?\d{1,6}(?!\w)", re.IGNORECASE)
_UNIT = re.compile(
    r" ?(?:[kMGT]i?[Bb]|ms|us|ns|px|km|kg|m|cm|mm|users?|rows?|times|bytes|tokens|items|steps|lines|people|usd|eur|tl|dollars|euros)"
    r"(?!\w)"
)
_PHONE_WORDS = Cue(
    r"phones?|telephones?|tels?|tél|téléphone|telefon\w{0,4}|telefono|teléfono|tlf|telefax|fax|call|calls|called|calling|"
    r"cell|cellphone|cellular|mobiles?|mob|handy|cep|gsm|whatsapp|signal|viber|telegram|sms|texts?|texted|texting|ring|"
    r"dial|hot ?line|land ?line|(?:support|help|direct|toll[- ]free) (?:line|number)|"
    r"voicemail|reach (?:me|him|her|us|them)|ping me|contact|my (?:new |work |old )?(?:number|no)|"
    r"(?:her|his|their|our|office|home|work|emergency) (?:number|no)|numaram|nummer|numéro|número|celular|móvil|portable|"
    r"mobil|telefoon|puhelin|телефон|тел|моб|電話|电话|手机|携帯|전화",
    OTHER_NUMBERS,
    r"cell|mobile|home|work|office|tel|phone|fax|whatsapp",
)
_NANP = re.compile(r"(?:\+?1[ .-]?)?(?:\([2-9]\d\d\) ?|[2-9]\d\d([-. ]))\d{3}[-. ]\d{4}$")
_BRAZIL = re.compile(r"\(\d\d\) ?9?\d{4}-\d{4}$")


def phones(text: str, regions: tuple[str, ...]) -> Iterator[Finding]:
    """Yield telephone numbers: international ones anywhere, national ones of `regions` by form or by the words around."""
    for found in _NUMBER.finditer(text):
        start, written = found.start(), found[0]
        if written.startswith("(") and ")" not in written:
            start, written = start + 1, written[1:]
        if written.count("(") != written.count(")"):
            continue
        if _is_phone(text, start, found.end(), written, regions):
            extension = _EXTENSION.match(text, found.end())
            yield Finding("phone", start, extension.end() if extension else found.end())


def is_international(written: str) -> bool:
    """Whether a number with a + is, as a whole, one that its country's plan allows."""
    return "+" in written and _valid("+" + "".join(c for c in written if c.isdigit()), None)


def is_american(written: str) -> bool:
    """Whether a number is in the usual form of North America: 3-3-4 digits with separators."""
    return _NANP.match(written) is not None


def _is_phone(text: str, start: int, end: int, written: str, regions: tuple[str, ...]) -> bool:
    digits = "".join(c for c in written if c.isdigit())
    groups = re.findall(r"\d+", written)
    if _dotted_quad(written) or len(digits) < 7:
        return False
    if _UNIT.match(text, end):
        return False
    cue = _PHONE_WORDS.says(text, start, end)
    if "+" in written:
        if _valid("+" + digits, None):
            return True
        # not every country's numbering plan is known as it stands; a form nothing else has is enough
        return _has_country("+" + digits) and (
            cue is True or len(groups) > 2 or (_possible("+" + digits, None) and len(groups) > 1)
        )
    if cue is False:
        return False
    if _date(groups, written):
        return False
    if cue is True:
        return _announced(digits, groups, regions)
    if len(groups) == 1 or digits.startswith("000"):
        return False
    if "US" in regions and (found := _NANP.match(written)):
        return found[1] != " " or _valid(digits, "US")
    if digits.startswith("00"):
        return _valid("+" + digits[2:], None)
    if digits.startswith("011") and "US" in regions and len(groups) > 2:
        return _valid("+" + digits[3:], None)
    if _BRAZIL.match(written):
        return "BR" in regions and _valid(digits, "BR")
    tidy = len(groups) >= 3 and min(map(len, groups)) >= 2 and "." not in written
    return (
        tidy and digits.startswith("0") and len(digits) >= 10 and any(_valid(digits, r) for r in regions if r != "US")
    )


def _announced(digits: str, groups: list[str], regions: tuple[str, ...]) -> bool:
    """Whether a number that the words announce can be one: valid somewhere, or in the form of a local one."""
    if digits.startswith("00") and _possible("+" + digits[2:], None):
        return True
    if any(_valid(digits, region) for region in regions):
        return True
    if "US" not in regions:
        return False
    return [len(group) for group in groups] in ([3, 4], [3, 3, 4], [1, 3, 3, 4]) or (
        len(digits) == 10 and digits[0] > "1"
    )


def _dotted_quad(written: str) -> bool:
    return re.fullmatch(r"\d{1,3}(?:\.\d{1,3}){3}", written) is not None


def _date(groups: list[str], written: str) -> bool:
    """Whether the digits are a date or a date and a time, or years."""
    if (
        len(groups) >= 3
        and len(groups[0]) == 4
        and groups[0][:2] in ("19", "20")
        and all(len(g) <= 2 for g in groups[1:3])
    ):
        return True
    if len(groups) >= 3 and len(groups[2]) == 4 and all(len(g) <= 2 for g in groups[:2]):
        return groups[2][:2] in ("19", "20") and int(groups[0]) <= 31 and int(groups[1]) <= 31
    return len(groups) == 2 and all(len(g) == 4 and g[:2] in ("19", "20") for g in groups)


@lru_cache(maxsize=4096)
def _valid(number: str, region: str | None) -> bool:
    return _holds(phonenumbers.is_valid_number, number, region)


@lru_cache(maxsize=4096)
def _possible(number: str, region: str | None) -> bool:
    return _holds(phonenumbers.is_possible_number, number, region)


def _has_country(number: str) -> bool:
    return 8 <= len(number) - 1 <= 15 and _holds(lambda parsed: True, number, None)


def _holds(predicate: Callable[[phonenumbers.PhoneNumber], bool], number: str, region: str | None) -> bool:
    try:
        return predicate(phonenumbers.parse(number, region))
    except phonenumbers.NumberParseException:
        return False
