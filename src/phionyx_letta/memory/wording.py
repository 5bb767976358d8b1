"""How a text reads: like a fact, or like an order, a disguise or markup. Only its form is judged, not its truth."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

from phionyx_letta.invisible import INVISIBLE
from phionyx_letta.memory.evidence import fold

# Letters of Cyrillic and Greek that look like Latin ones, and what they look like (Unicode TR 39, the common part).
_LOOKALIKES = str.maketrans(
    "аеорсухіјѕԁһԛԝвкмнтΑΒΕΖΗΙΚΜΝΟΡΤΥΧαονρικАВЕКМНОРСТУХІЈЅıɡ",
    "aeopcyxijsdhqwbkmhtABEZHIKMNOPTYXaovpikABEKMHOPCTYXIJSig",
)
_MIXED_WORD = re.compile(r"[A-Za-z][\u0370-\u03ff\u0400-\u052f]|[\u0370-\u03ff\u0400-\u052f][A-Za-z]")
# What no text needs: all that is invisible, but joiners between letters of scripts that have them, and the selector that makes an
# emoji of a symbol.
_HIDDEN = re.compile(
    "(?![\u200c\u200d\ufe0e\ufe0f])[" + INVISIBLE + "]"
    "|(?<=[A-Za-z0-9])[\u200c\u200d]|[\u200c\u200d](?=[A-Za-z0-9])"
    "|(?<![\u00a9\u00ae\u203c\u2049\u2122\u2139\u2190-\u27bf\u2900-\u2bff\u3030\u303d\u3297\u3299\U0001f000-\U0001faff])"
    "[\ufe0e\ufe0f](?!\u20e3)"
)

_INVISIBLE = re.compile(f"[{INVISIBLE}]")

# Talk of hijacking, wherever it stands: in the text, the rationale or the words quoted.
_HIJACK = re.compile(
    "|".join(
        (
            r"\b(?:ignore|disregard|forget|overrid\w+|bypass|circumvent)\b.{0,50}"
            r"\b(?:instructions?|rules?|prompts?|guidelines?|polic(?:y|ies)|restrictions?|safety|safeguards?|approvals?|reviews?|checks?|"
            r"everything|previous|above)\b",
            r"\bsystem ?prompt\b|\bdeveloper mode\b|\bjailbreak|\bnew instructions?\b",
            r"\b(?:system|admin\w*|developer|security) (?:message|override|notice|update|alert)\b",
            r"<\|[\w ]{1,30}\|>|\[/?inst\]|<</?sys>>",
            r"</?(?:system|assistant|user|human|instructions?|tool\w*|function\w*|data|transcript|memory)\b[^>]{0,60}>",
            r"\b(?:begin|end) data\b",
            r"(?:^|\n)\W{0,6}(?:system|assistant|developer|tool)\s?:",
            r"\b(?:remember|note|keep in mind|be aware|understand|know) that (?:you|the (?:agent|assistant|ai|model|bot))\b",
            r"\bwithout (?:asking|telling|informing|confirm\w*|(?:any |user )?(?:approval|permission|consent|review|confirmation))",
            r"\b(?:do not|don't|dont|never) (?:tell|inform|alert|notify|warn|ask) (?:the |any)?"
            r"(?:user|human|operator|one|owner|reviewer)",
            r"\b(?:curl|wget)\b.{0,200}\|\s?(?:ba|z)?sh\b|\brm -[rf]{2}\b|\bbase64 (?:-d|--decode)\b|/dev/tcp/|\bnc -e\b",
            r"\b(?:exfiltrat\w+|keylogger|backdoor)\b",
            r"\b(?:disable|turn off|deactivate)\b.{0,40}"
            r"\b(?:security|verification|approval|checks?|logging|audit\w*|guards?|filters?|safety|review|signature\w*)\b",
            r"\b(?:auto-?approve|pre-?approved|always approve|approve (?:all|every|any|this|it)\b)",
            r"\b(?:send|post|forward|upload|transmit|leak|report|copy|deliver)\b.{0,80}"
            r"(?:https?://|\bwww\.|\b[\w-]+\.(?:com|net|org|io|ru|cn|xyz|top|dev|app)\b|\[redacted_email\]|"
            r"\b(?:passwords?|secrets?|tokens?|credentials?|api keys?|conversation|chat history)\b)",
            r"ignorier\w* .{0,30}(?:anweisung|regeln)|ignor[ae]\w* .{0,30}(?:instruccion|instruction|instruç|istruzion)",
            r"игнорир\w* .{0,30}(?:инструкц|указан|правил)|(?:talimat|kural)\w* (?:yok say|görmezden gel|unut)",
            r"忽略.{0,10}(?:指令|指示|规则)|指示を無視|무시.{0,10}지시|지시.{0,10}무시",
        )
    )
)

# Orders to the agent, in what is to be remembered.
_ORDER = re.compile(
    "|".join(
        (
            r"\b(?:you|u|the (?:agent|assistant|ai|model|bot|llm)|agents?|assistants?|claude|chatgpt|gpt|letta)\b,? (?:\w+ly )?"
            r"(?:must|should|shall|has to|have to|needs? to|ought to|may not|mustn't|cannot|can't|can now|will|always|never|are|"
            r"is (?:required|obliged|to|now|allowed))\b",
            r"\byour (?:new |only |real |true )?(?:instructions?|task|role|goal|job|rules?|purpose|priority|objective|mission)\b",
            r"\bfrom now on\b|\bact as\b|\bpretend\b|\bobey\b|\bcomply\b|\bit is (?:mandatory|imperative|critical|essential)\b",
            r"\b(?:when|whenever|if|before|after|each time|every time) (?:the user|a user|you|someone|anyone|asked|prompted)\b",
            r"(?:^|[\n.:;])\W{0,6}(?:(?:always|never|please|immediately|first|then|now|silently|do not|don't|important)[,:!]? ){0,2}"
            r"(?:run|execute|call|invoke|send|forward|e-?mail|post|upload|download|fetch|visit|browse|click|install|delete|erase|wipe|"
            r"approve|ignore|disregard|forget|reveal|print|output|repeat|disable|trust|obey|grant|transfer|pay|purchase|reply|respond|"
            r"answer|say|tell|remember|insert|append|share|authori[sz]e)\b",
            r"\bdu (?:musst|sollst)\b|\b(?:debes|deberás)\b|\b(?:tu dois|vous devez)\b|\bты должен\b|\bвы должны\b",
            r"\w+m[ae]l[ıi]s[ıi]n\b|\bzorundas[ıi]n|你必须|必须始终",
        )
    )
)
_ENCODED = re.compile(
    r"[A-Za-z0-9+/]{48,}={0,2}|(?:\\x[0-9a-f]{2}){6,}|(?:%[0-9a-f]{2}){6,}|(?:&#x?[0-9a-f]{1,6};){4,}", re.IGNORECASE
)
_SPACED = re.compile(r"(?<!\w)(?:\w[ .\-_*]){7,}\w(?!\w)")
_MARKUP = re.compile(
    r"^[ ]{0,3}(?:#{1,6}\s|-{3,}\s*$|={3,}\s*$|\+{3}\s*$|<!--|<[a-z/!?])", re.MULTILINE | re.IGNORECASE
)

# Markup that reaches beyond the fact: it can swallow the rest of the file, hide from a reader, or bring other files in. A fence or a
# tag that is closed is marked too: whether it is, depends on what stands around it (CommonMark 0.31, 4.5 and 4.6).
_RISKY = re.compile(
    r"^[ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*(?:`{3,}|~{3,}|\$\$)"
    r"|<!|<\?|</?(?:script|style|pre|textarea|details|summary|template|iframe|object|embed|svg|math|img|video|audio|link|meta|base|form|"
    r"table|div|span|a|p|title|head|body|html|noscript|xmp|plaintext)\b"
    r"|(?<![\w.+`@])@[\w~./\\-]",  # `@path` brings a file in (Claude Code's CLAUDE.md)
    re.MULTILINE | re.IGNORECASE,
)
_ADDRESS = re.compile(
    r"\b[a-z][a-z0-9+.-]{1,20}://[^\s<>()\[\]\"'`]+|(?<![\w:/])//[\w-]+\.[\w.-]+[^\s<>()\[\]\"'`]*|\bwww\.[^\s<>()\[\]\"'`]+"
    r"|\b(?:javascript|data|vbscript|file):[^\s<>()\[\]\"'`]+",
    re.IGNORECASE,
)


def addresses(text: str) -> list[str]:
    """Return the addresses that a text links to or takes pictures from, without the punctuation after them."""
    return [found[0].rstrip(".,;:!?") for found in _ADDRESS.finditer(text)]


def in_latin(text: str) -> str:
    """Return a text with the letters that look like Latin ones put into Latin, and without what is invisible."""
    return _INVISIBLE.sub("", text).translate(_LOOKALIKES)


def doubt_about(content: str, names: Sequence[str], around: Sequence[str]) -> str | None:
    """Return why a text does not read like a plain fact, or None.

    Args:
        content: what is to be remembered.
        names: what is stored as a name beside it: section, fact key.
        around: what is only shown beside it: rationale, quotes.
    """
    stored = [content, *names]
    if any(_HIDDEN.search(text) or _control(text) for text in (*stored, *around)):
        return "it contains invisible characters"
    if any(_mixes_alphabets(text) for text in (*stored, *around)):
        return "it mixes letters of different alphabets in one word"
    if any(_HIJACK.search(plain) for text in (*stored, *around) for plain in _plain(text)):
        return "it reads like an instruction to the agent"
    if any(_ORDER.search(plain) for text in stored for plain in _plain(text)):
        return "it reads like an instruction to the agent"
    if any(_ENCODED.search(text) or _SPACED.search(text) for text in stored):
        return "it contains encoded or spaced-out text"
    if _MARKUP.search(content):
        return "it brings headings or markup of its own"
    if any(_RISKY.search(text) for text in stored):
        return "risky markup: it can reach beyond the fact itself (a fence, a comment, a tag, or an @import)"
    return None


def _plain(text: str) -> Iterator[str]:
    """Yield `text` folded line by line, as it is and with look-alike letters put into Latin."""
    for form in dict.fromkeys((text, in_latin(unicodedata.normalize("NFKC", text)))):
        yield "\n".join(fold(line) for line in form.splitlines())


def _mixes_alphabets(text: str) -> bool:
    return any(in_latin(found[0]) != found[0] for found in _MIXED_WORD.finditer(text))


def _control(text: str) -> bool:
    return any(unicodedata.category(c) == "Cc" and c not in "\n\t" for c in text)
