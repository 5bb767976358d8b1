"""E-mail addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phionyx_letta.memory.pii.findings import Finding
from phionyx_letta.memory.pii.tables import COMMON_TLDS, COUNTRY_TLDS, GENERIC_TLDS
from phionyx_letta.memory.pii.words import Cue

# Letters of any script; the ranges add the vowel signs that \w leaves out (RFC 6531, IDNA 2008).
_MARKS = "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u0670\u0900-\u0963\u0966-\u0dff\u0e31-\u0e4e\u1037-\u103e\u17b4-\u17d3"
_L = rf"\w{_MARKS}"
_LATIN = r"A-Za-z\u00c0-\u024f"
_LABEL = rf"[{_L}](?:[{_L}-]{{0,62}})"
_TLD = rf"(?:xn--[A-Za-z0-9-]{{2,59}}|[{_LATIN}]{{2,24}}(?![{_LATIN}0-9])|[^\W\d_a-zA-Z\u00c0-\u024f][{_L}]{{1,24}})"
_AT = r"(?:@|%40|&#64;|&commat;|&#x40;)"
_LOCAL = rf"(?<![{_L}.+'%-])[{_L}.+'&%!*~^-]{{1,64}}"
_EMAIL = re.compile(
    rf"(?P<local>{_LOCAL}|\"[^\"\n@]{{1,62}}\"){_AT}(?P<domain>(?:{_LABEL}\.){{1,8}}(?P<tld>{_TLD}))", re.IGNORECASE
)
_LITERAL = re.compile(rf"{_LOCAL}@\[(?:IPv6:)?[0-9A-Fa-f:.]{{3,45}}\]")

# What people write to hide an address from machines: ada [at] corp [dot] com, ada at corp dot com.
_SPELT = re.compile(
    rf"(?<![{_L}.+-])[{_L}.+-]{{1,64}}"
    r"(?:\s?[\[({<]\s?(?:at|@|ät|arroba|chez)\s?[\])}>]\s?|\s(?P<bare>at|arroba)\s|(?P<spaced>\s@\s))"
    r"(?P<rest>[\w-]{1,63}(?:(?:\s?[\[({<]\s?(?:dot|punkt|nokta|punto|point|\.)\s?[\])}>]\s?|\s(?:dot|punkt|nokta|punto|point)\s|\s?\.\s?)"
    r"[\w-]{2,63}){1,4})",
    re.IGNORECASE,
)

_MAIL_WORDS = Cue(
    r"e-?mails?|mailto|mail|mails|contact|reach|write to|address|addr|cc|bcc|from|to|posta|correo|courriel|почта|邮箱|メール"
)
_SHELL = re.compile(
    r"(?<![\w-])(?:ssh|scp|sftp|rsync|mosh|ssh-copy-id|sshfs|git clone|git remote add \S{1,40})\s[^\n]{0,60}$"
)
_USERINFO = re.compile(r"://[^\s/@\"'<>]{0,128}:[^\s/\"'<>]{0,256}$")
_SERVICE_USERS = frozenset({"git", "hg", "svn"})


def emails(text: str) -> Iterator[Finding]:
    """Yield e-mail addresses: ASCII and international, percent-encoded, spelt out with "at" and "dot"."""
    lowered = text.lower()
    if "@" in text or "%40" in text or "&#" in text or "&commat" in lowered:
        for found in _EMAIL.finditer(text):
            start = found.start() + _leading(found["local"])
            if _is_address(text, found, start):
                yield Finding("email", start, found.end())
        for found in _LITERAL.finditer(text):
            yield Finding("email", found.start(), found.end())
    for found in _SPELT.finditer(text):
        if _is_spelt_address(text, found):
            yield Finding("email", found.start(), found.end())


def _leading(local: str) -> int:
    """How many characters at the start of `local` are punctuation around the address, or another script's prose."""
    if local.startswith('"'):
        return 0
    skip = len(local) - len(local.lstrip(".+'&%!*~^-"))
    if local[-1] < "\u0250":  # 邮箱ada@corp.com: an address in Latin letters ends where another script begins
        skip = max([skip, *(place + 1 for place, c in enumerate(local) if c >= "\u0370")])
    return skip


def _is_address(text: str, found: re.Match[str], start: int) -> bool:
    local, tld = text[start : found.end("local")], found["tld"].lower()
    if not any(c.isalnum() for c in local):
        return False
    after = text[found.end() : found.end() + 1]
    if local.lower() in _SERVICE_USERS or after == "(":
        return False  # git@github.com:owner/name.git; a method call on a matrix product
    if "://" in (before := text[max(0, start - 400) : start]) and _USERINFO.search(before):
        return False  # the password of a URL and its host
    if _SHELL.search(text[max(0, start - 80) : start]):
        return False
    if tld.isascii() and not tld.startswith("xn--") and tld not in GENERIC_TLDS and tld not in COUNTRY_TLDS:
        return _MAIL_WORDS.says(text, start, found.end()) is True
    return True


def _is_spelt_address(text: str, found: re.Match[str]) -> bool:
    words = re.findall(r"[\w-]+", found["rest"])
    if words[-1].lower() not in COMMON_TLDS:
        return False
    if found["bare"] or found["spaced"]:
        hidden = re.search(r"\s(?:dot|punkt|nokta|punto|point)\s|[\[({<]", found["rest"], re.IGNORECASE)
        return bool(hidden and found["bare"]) or _MAIL_WORDS.says(text, found.start(), found.end()) is True
    return True
