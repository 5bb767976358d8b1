"""Passwords and other secrets that only the words around them, or their place in a URL or command, give away."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from phionyx_letta.memory.pii.findings import Finding
from phionyx_letta.memory.pii.plain import SAID, pass_phrases, told

_URL = re.compile(
    r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{1,30}://(?P<user>[^\s/:\"'<>]{0,128}):"
    r"(?P<password>[^\s@/\"'<>]{1,256}|[^\s@\"'<>]{1,256})(?P<more>(?:@[^\s@/\"'<>]{1,128}){0,3})@(?=[\w\[.-])"
)
_COMMAND = re.compile(
    r"(?:(?<![\w-])(?:-u|--user|--proxy-user)[ =]?[\"']?[\w.@-]{1,64}:(?P<curl>[^\s\"']{3,128})"
    r"|sshpass -p ?[\"']?(?P<sshpass>[^\s\"']{3,128})"
    r"|(?<![\w-])mysql(?:dump)?\s(?:[^\n]{0,80}?\s)?-p(?P<mysql>[^\s\"']{4,128}))"
)

_NAMES = (
    r"pass ?words?|passwd|passwort|pwd|pass ?phrases?|pass ?codes?|kennwort|mot de passe|contraseñas?|parola|şifre(?:si|m|miz)?|"
    r"senhas?|wachtwoord|lösenord|hasło|пароль|密码|パスワード|비밀번호|pass|pw|psk|wpa key|wifi key"
)
_PASSWORD = re.compile(
    rf"(?:(?<![^\W_])|(?=pass[wp]))(?P<name>{_NAMES})"
    rf"(?P<tail>[\"'`*_]{{0,3}}(?:[ ](?:for|of|to|on|is now|für|de)[ ][\w .@'-]{{1,40}}?|[ ]?\([^()\n]{{1,30}}\))?)"
    r"(?P<sep>\s{0,4}(?::=|=>|->|→|==?|[:：](?:\*\*)?)\s{0,4}|\s-\s|['’]s\s|"
    r"\s(?:is now|is still|was|is|ist|lautet|es|est|é|è|olarak|to|är|jest|это)[:\s]\s{0,3}|は|是|\s(?=[\"'`]))"
    r"(?P<value>\"[^\"\n]{3,128}\"|'[^'\n]{3,128}'|`[^`\n]{3,128}`|[^\s\"'`][^\s]{2,127})",
    re.IGNORECASE,
)
# A password that follows the word for it and nothing else must look like one: small words of prose follow it too.
_BARE = re.compile(
    rf"(?<![^\W_])(?:{_NAMES}) {{1,2}}(?P<value>(?=[^\s\d]{{0,30}}\d)(?=[^\sA-Za-z]{{0,30}}[A-Za-z])"
    r"(?!(?:sha|md|base|argon|bcrypt|pbkdf|utf|oauth|rfc|aes|v)-?\d)[^\s\"'`()\[\]{}<>/\\._=:;,]{6,64})(?=[\s.,;!?)]|$)",
    re.IGNORECASE,
)
_LOGIN = re.compile(
    r"(?<![\w-])(?:login|credentials?|creds|log in(?: with)?)\s?(?::|is|are|with|as)\s"
    r"[\w.@+-]{2,64}\s?[/:]\s?(?P<value>[^\s\"',;]{4,64})",
    re.IGNORECASE,
)

_SECRET = re.compile(
    r"(?<![A-Za-z0-9])(?:[A-Za-z0-9]{1,24}[_.-]){0,4}"
    r"(?:api ?[_-]?key|apikey|secret[_-]?access[_-]?key|access ?[_-]?key|account[_-]?key|auth[_-]?key|secret[ _-]?key|"
    r"client[_-]?secret|signing[_-]?(?:key|secret)|encryption[_-]?key|master[_-]?key|private[_-]?key|session[_-]?key|"
    r"licen[cs]e[_-]?key|subscription[ _-]?key|(?<=[?&])key|"
    r"(?:openai|anthropic|azure|mistral|cohere|gemini|google|maps|aws|stripe|twilio|sendgrid|slack|github|gitlab|cloudflare|"
    r"datadog|algolia|deepl|letta|huggingface)(?:[ _-]?openai)?[ _-]?key|"
    r"(?:access|auth|refresh|bearer|bot|api|id|session|personal|deploy|csrf|private|x-auth)?[_ -]?token|secret|credential)"
    r"[\"'`\]]{0,2}(?:\s{0,3}(?::=|=>|=|:|：)\s{0,3}|\s(?:is|was)[:\s]\s{0,2}|\s)(?:Bearer |Token |Basic )?"
    r"(?:[\"'`](?P<quoted>[^\s\"'`]{16,512})[\"'`]|[\"'`]?(?P<value>[A-Za-z0-9_\-./+~=]{16,512})(?![\w(\[]))",
    re.IGNORECASE,
)
_BEARER = re.compile(
    r"(?<![\w-])(?:Bearer|Basic|ApiKey)\s(?P<value>[A-Za-z0-9_\-./+~=]{16,512})(?![\w(\[])", re.IGNORECASE
)
_AWS_SECRET = re.compile(r"(?<![A-Za-z0-9/+=])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])")
_AWS_WORDS = re.compile(r"aws|amazon|secret|akia|asia", re.IGNORECASE)

_PLACEHOLDER = re.compile(
    r"[<{\[(%$]|\*{3}|x{4,}|\.{3}|…|•|●|_{4,}|#{3,}|"
    r"(?:your|my|the|a|new|old|some|user|db|database|admin|root|default|change|enter|insert)?[_ -]?"
    r"(?:pass ?word|passwd|pwd|pass|passphrase|passcode|secret|token|key|changeme|change[_-]?me|placeholder|"
    r"example|here|redacted|hidden|none|null|nil|undefined|true|false|str|string|required|optional|empty|unset|todo|tbd|n/a)s?"
    r"(?:[_ -]?(?:here|value|goes[_ -]here))?$",
    re.IGNORECASE,
)
_CODE = re.compile(
    r"[A-Za-z_][\w.]*[(\[]|(?:self|os|env|process|settings|config|cfg|args|request|req|data|this|ctx|app|var|local|secrets|module)\.\w|\w+\.get\b|!?ENV\b|\\"
)


def passwords(text: str) -> Iterator[Finding]:
    """Yield passwords in URLs, in commands and after words that announce one, in several languages."""
    yield from url_passwords(text)
    for found in _COMMAND.finditer(text):
        group = found.lastgroup or ""
        if not _is_placeholder(found[group]):
            yield Finding("password", *found.span(group))
    for pattern in (_PASSWORD, _LOGIN):
        for found in pattern.finditer(text):
            span = _password_in(text, found)
            if span:
                yield Finding("password", *span)
    for found in _BARE.finditer(text):
        yield Finding("password", *found.span("value"))
    if "phrase" in text.lower():
        for start, end in pass_phrases(text):
            yield Finding("password", start, end)


def url_passwords(text: str) -> Iterator[Finding]:
    """Yield the passwords in URLs (RFC 3986, userinfo)."""
    if "://" not in text:
        return
    for found in _URL.finditer(text):
        start, end = found.start("password"), found.end("more")
        value = text[start:end]
        if not re.match(r"\d{1,5}(?:/|$)", value) and not _is_placeholder(value):
            yield Finding("password", start, end)


_TRAILING = re.compile(r"(?:[\"'`]|[,;)\]}>]|\.(?=$))+s?$")
_NO_PASSWORD = re.compile(
    r"(?:sha|md|base|bcrypt|argon|pbkdf|utf|oauth|aes)-?\d{1,4}$|/(?:home|usr|var|tmp|etc|root|Users)/", re.IGNORECASE
)
_SYMBOLS = frozenset("!@#$%^&*+~?§")
_COUNTED = re.compile(r"\d{1,3}(?:[-–]?[A-Za-z]+)?")  # "is 12 characters", "was 90days old"


def _password_in(text: str, found: re.Match[str]) -> tuple[int, int] | None:
    """Where the password is in what follows an announcing word, or None if it is code, a rule or a placeholder."""
    start, value = found.start("value"), found["value"]
    quoted = len(value) > 2 and value[0] in "\"'`" and value[-1] == value[0]
    if quoted:
        start, value = start + 1, value[1:-1]
    else:
        value = _TRAILING.sub("", value)
    if len(value) < 4 or _is_placeholder(value) or _CODE.match(value):
        return None
    if not quoted and (value.rstrip("?!").lower() in SAID or _NO_PASSWORD.match(value)):
        return None
    named = found.groupdict()
    if quoted:
        words = " " in value and "phrase" not in found[0].lower()
        credible = not words or any(c.isdigit() for c in value)
    else:
        credible = _is_credible(value, (named.get("sep") or ":").strip())
    # an environment file: DB_PASSWORD=letmein
    name = named.get("name") or ""
    credible = credible or (name.isupper() and text[found.end("name") : found.end("name") + 1] == "=")
    if not credible and not quoted and name:
        value = re.split(r"[;&|,]", value, maxsplit=1)[0]
        credible = told(text, start, start + len(value.rstrip("!?")), (name, found["sep"]), found.start())
    return (start, start + len(value)) if credible else None


def _is_credible(value: str, separator: str) -> bool:
    """Whether `value`, written without quotes, is unlike a word: after "is" more so than after a colon."""
    assigned = separator in (":", "=")
    if any(c.isdigit() for c in value):
        return assigned or not _COUNTED.fullmatch(value)
    return _mixed(value) or any(c in _SYMBOLS for c in (value if assigned else value[:-1]))


def _mixed(value: str) -> bool:
    """Whether capitals stand inside, which words of prose do not have."""
    return any(a.islower() and b.isupper() for a, b in pairwise(value)) and value.isalnum() and len(value) >= 8


def _is_placeholder(value: str) -> bool:
    return _PLACEHOLDER.match(value) is not None or len(set(value)) < 3


def named_secrets(text: str) -> Iterator[Finding]:
    """Yield random-looking values that a name like ``api_key`` or ``Bearer`` announces."""
    for pattern in (_SECRET, _BEARER):
        for found in pattern.finditer(text):
            group = found.lastgroup or "value"
            value = found[group].rstrip(".")
            if _is_random(value) and not _is_placeholder(value):
                yield Finding("api_key", found.start(group), found.start(group) + len(value))
    if "/" in text or "+" in text:
        for found in _AWS_SECRET.finditer(text):
            if _is_random(found[0]) and _AWS_WORDS.search(text, max(0, found.start() - 60), found.start()):
                yield Finding("api_key", found.start(), found.end())


def _is_random(value: str) -> bool:
    """Whether `value` is unlike words, paths and names: digits and letters mixed, no word-like order, much variety."""
    if not any(c.isdigit() for c in value) or not any(c.isalpha() for c in value):
        return False
    longest = max(re.split(r"[_./~-]", value), key=len)
    if len(longest) < 12 and not (re.fullmatch(r"[0-9a-fA-F-]{32,40}", value)):
        return False
    counts = Counter(value)
    entropy = -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values())
    return entropy >= 3.0 and (any(c.isdigit() for c in longest) or _scrambled(longest))


def _scrambled(word: str) -> bool:
    """Whether capitals and small letters change places as they do not in names."""
    return sum(a.islower() != b.islower() for a, b in pairwise(word)) >= 4
