"""Numbers with a structure: social security numbers, payment cards, IBANs, IP addresses."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from stdnum import luhn
from stdnum.iso7064 import mod_97_10

from phionyx_letta.memory.pii.findings import Finding
from phionyx_letta.memory.pii.tables import IBAN_LENGTHS, ISSUERS
from phionyx_letta.memory.pii.words import OTHER_NUMBERS, Cue

_SSN = re.compile(r"(?<![\w.-])(\d{3})( ?[-. ] ?|)(\d{2})\2(\d{4})(?![\w-]|\.\d)")
_SSN_WORDS = Cue(
    r"ssns?|social|social security|soc sec|ss#|ss no|itin|tin|taxpayer|tax id", OTHER_NUMBERS + "|zip|phone|tel"
)


def social_security_numbers(text: str) -> Iterator[Finding]:
    """Yield US social security numbers: 3-2-4 with hyphens anywhere, other forms where the words announce one."""
    for found in _SSN.finditer(text):
        area, separator, group, serial = found.groups()
        # never issued: SSA, "Social Security Number Randomization"; 9xx are taxpayer numbers of the same form
        if area in ("000", "666") or group == "00" or serial == "0000":
            continue
        cue = _SSN_WORDS.says(text, found.start(), found.end())
        if cue or (cue is None and separator.strip() == "-" and area < "900"):
            yield Finding("ssn", found.start(), found.end())


_CARD_RUN = re.compile(r"(?<![\w.+-])\d(?:[ -]?\d){11,}+(?![\w]|\.\d)")
_CARD_DOTTED = re.compile(r"(?<![\w.+-])(?:\d{4}\.\d{4}\.\d{4}\.\d{4}|\d{4}\.\d{6}\.\d{5})(?![\w]|\.\d)")
_CARD_WORDS = Cue(
    r"cards?|credit|debit|visa\w?\w?|mastercard|master|amex|american express|discover|jcb|diners|maestro|unionpay|mir|troy|rupay|"
    r"cc|ccn|pan|kart\w{0,3}|kredi kart\w{0,3}|karte|kreditkarte|carte|carta|tarjeta|cartão|карта",
    OTHER_NUMBERS,
)
_GROUPINGS = {(4, 4, 4, 4), (4, 6, 5), (4, 6, 4), (4, 4, 4, 4, 3), (4, 4, 4, 1), (6, 13), (8, 8), (4, 4, 5), (6, 10)}


def cards(text: str) -> Iterator[Finding]:
    """Yield payment card numbers: an issuer's range, its length and the Luhn digit; grouped ones by announcement alone."""
    for run in _CARD_RUN.finditer(text):
        groups = [(m.start() + run.start(), m.end() + run.start()) for m in re.finditer(r"\d+", run[0])]
        first = 0
        while first < len(groups):
            last = _card_from(text, groups, first)
            if last is None:
                first += 1
                continue
            yield Finding("credit_card", groups[first][0], groups[last][1])
            first = last + 1
    for found in _CARD_DOTTED.finditer(text):
        digits = found[0].replace(".", "")
        if _issued(digits) and luhn.is_valid(digits):
            yield Finding("credit_card", found.start(), found.end())


def _card_from(text: str, groups: list[tuple[int, int]], first: int) -> int | None:
    """The last group of the card that begins with group `first`, if one does."""
    digits, sizes = "", []
    best = None
    for last in range(first, min(first + 6, len(groups))):
        start, end = groups[last]
        digits += text[start:end]
        sizes.append(end - start)
        if len(digits) > 19:
            break
        if len(digits) < 12:
            continue
        grouped = tuple(sizes) in _GROUPINGS
        announced = None
        if _issued(digits) and luhn.is_valid(digits):
            announced = _CARD_WORDS.says(text, groups[first][0], end)
            if len(sizes) == 1 or grouped or announced:
                best = last
        elif grouped and len(digits) in (15, 16) and _CARD_WORDS.says(text, groups[first][0], end):
            best = best if best is not None else last
    return best


def _issued(digits: str) -> bool:
    return any(low <= digits[: len(low)] <= high and len(digits) in lengths for low, high, lengths in ISSUERS)


IBAN_START = re.compile(r"(?<![^\W_])[A-Za-z]{2}[ -]?\d{2}(?=[ -]?[A-Za-z0-9])")
_ALNUM = re.compile(r"[ -]?([A-Za-z0-9])")


def ibans(text: str) -> Iterator[Finding]:
    """Yield IBANs: a country of the registry, its length, the check digits (ISO 7064 mod 97-10); in groups or not."""
    for found in IBAN_START.finditer(text):
        country = found[0][:2].upper()
        length = IBAN_LENGTHS.get(country)
        if length is None:
            continue
        number, end = country + found[0][-2:], found.end()
        for taken in _ALNUM.finditer(text, end, end + 2 * length):
            if taken.start() != end or len(number) == length:
                break
            number, end = number + taken[1].upper(), taken.end()
        if len(number) < length or text[end : end + 1].isalnum():
            continue
        if mod_97_10.is_valid(number[4:] + number[:4]):
            yield Finding("iban", found.start(), end)


_IPV4 = re.compile(r"(?<![\w.\-~^])(?<![=<>~!]=)(?<![^/]/)\d{1,3}(?:\.\d{1,3}){3}(?!\w|\.\d|-\w)")
_IPV6 = re.compile(
    r"(?<![\w:.])(?:[0-9A-Fa-f]{1,4}:|:(?=:))(?:[0-9A-Fa-f]{0,4}:){1,7}(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f]{0,4})(?:%[\w.-]{1,16})?(?![\w:]|\.\d)"
)
_PORT = re.compile(r":\d{2,5}(?![\w.:])")
_PREFIX = re.compile(r"/(\d{1,3})(?![\w.])")
_IP_WORDS = Cue(
    r"ips?|ipv4|ipv6|address|addr|server|host|login|logged in|client|router|gateway|src|dst|source|remote|peer|node|ping|ssh|"
    r"connect|connected|vpn|dns|nameserver|proxy|firewall|listen|endpoint|adresi|adresse",
    r"versions?|ver|v|releases?|released|builds?|schema|rev|revision|upgrade[ds]?|upgrading|downgraded?|bump(?:ed|s)?|firmware|"
    r"driver|installs?|installed|requires?|pip|npm|apt|package|section|chapter|clause|oid|figure|table|rule|patch|sürüm|"
    r"python|java|node|ruby|php|openssl|lib\w+|django|postgres|mysql|nginx|ubuntu|debian|macos|ios|android|safari|edge|"
    r"chrome|firefox|windows|kernel|tag|tagged|changelog|sdk|jdk|dll|assembly",
    r"(?:is |was |has )?(?:connected|connects|logged in|down|up|unreachable|timed out|refused|banned|blocked)",
)

_VERSION_AFTER = re.compile(r" ?(?:to \d[\d.]{1,20} )?(?:releases?|versions?|builds?|upgrade|update)\b", re.IGNORECASE)


def ip_addresses(text: str) -> Iterator[Finding]:
    """Yield addresses of hosts; networks, masks, loopback, unspecified and multicast addresses are nobody's."""
    for pattern in (_IPV4, _IPV6):
        for found in pattern.finditer(text):
            if _is_host(text, found):
                yield Finding("ip_address", found.start(), found.end())


def _is_host(text: str, found: re.Match[str]) -> bool:
    written = found[0].split("%")[0]
    try:
        address = ipaddress.ip_address(written)
    except ValueError:
        return False
    if address.is_unspecified or address.is_loopback or address.is_multicast or written.startswith("255."):
        return False
    if prefix := _PREFIX.match(text, found.end()):
        bits = int(prefix[1])
        if bits < address.max_prefixlen and int(address) % (1 << (address.max_prefixlen - bits)) == 0:
            return False
    if isinstance(address, ipaddress.IPv6Address):
        return _looks_like_ipv6(text, found, written)
    if text[max(0, found.start() - 3) : found.start()] == "://" or _PORT.match(text, found.end()):
        return True
    cue = _IP_WORDS.says(text, found.start(), found.end())
    if cue is False or (cue is None and _could_be_a_version(address)):
        return False
    return not _VERSION_AFTER.match(text, found.end())


def _could_be_a_version(address: ipaddress.IPv4Address) -> bool:
    """Whether the four numbers are small, as few public addresses are (one in 600) and most versions."""
    first, *rest = address.packed
    return first < 32 and max(rest) < 64 and not address.is_private


def _looks_like_ipv6(text: str, found: re.Match[str], written: str) -> bool:
    """Tell an address from a slice, a path of names and eight pairs of hexadecimal digits, which have its form."""
    groups = [group for group in written.split(":") if group]
    if "::" not in written and all(len(group) == 2 for group in groups):
        return False
    if not any(c.isdigit() for c in written):
        return False
    return len(groups) >= 3 or len(groups[0]) == 4 or _IP_WORDS.says(text, found.start(), found.end()) is True
