"""Passwords that are plain words: told from prose by how they are announced, and by being all that is said.

`password: swordfish` and "the password is swordfish" name one; "the password is required" and `password: str` do not. The word must
end its clause, and be none of those that are said of passwords, or that stand for them in code and forms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["SAID", "pass_phrases", "told"]

_WORD = re.compile(r"[^\W\d_]{4,32}")
_ASSIGNED = frozenset({":", "：", "=", "==", ":=", "=>", "->", "→"})
_TOLD = frozenset({"is", "was", "is now", "is still"})
_SET_TO = re.compile(r"(?:set|chang(?:e|ed|ing)|reset|updated?|made|make)\b[^.;:\n]{0,24}$", re.IGNORECASE)
# What may follow the word: the end of its clause, or the next name and value.
_CLAUSE_END = re.compile(
    r"[\"'`*_]{0,3}(?:\s*$|[ \t]*[\n\r]|[.!?,;)\]}|](?:\s|$|[\"')])|[;|&]"
    r"|[ \t]+(?:#|//|--|and|or|but|for|on|at|in|[\w-]{2,20}[ \t]*[:=]))",
    re.IGNORECASE,
)
_SAID_WORDS = """
wrong right correct incorrect invalid valid required needed optional mandatory compulsory necessary weak strong good bad
secure insecure safe unsafe secret public private hidden visible empty blank null none missing unknown known same different
unique random short long shorter longer stronger weaker better worse best worst easy hard simple complex fine okay here
there below above elsewhere attached enclosed yours mine ours theirs hers dead gone lost found stolen kept sent shown taken
given broken written forgotten chosen back again available unavailable active inactive inside outside still already never
always often also just only very then this that these those what which your their them something nothing everything anything
whatever garbage static dynamic temporary permanent default generic common plain plaintext cleartext reset important
critical essential crucial sensitive insensitive confidential personal numeric alphanumeric true false unset irrelevant
identical similar sufficient insufficient consistent local global shared stale current obsolete tricky fake real late ready
done enough obvious history trash weird terrible great awesome dumb stupid immutable mutable readable ephemeral external
internal manual automatic admin root user username userid login email value values text string strings integer number
numbers boolean bool bytes object array list dict char varchar file field fields form input data body json yaml hash salt
digest token secrets vault keychain keyring lastpass bitwarden keepass environment env config configuration settings prompt
stdin args params parameter variable const credential credentials self plainly test tests sample dummy demo foobar lorem
unchanged type types length size policy rules rule format question hint strength manager protection authentication recovery
expiry expiration rotation must should shall will would could might cannot need needs see ask use contact tbd nope varies
various forgot secretstr secretbytes charfield textfield passwordfield plaintextpassword raw encoded hashed encrypted
undefined falsch richtig vergessen geheim sicher erforderlich abgelaufen requis oublié obligatoire incorrecto requerido
olvidada olvidado gerekli yanlış unuttum zorunlu
"""
#: What is said of passwords, and the names and types that stand in their place.
SAID = frozenset(_SAID_WORDS.split())
_SAID_ENDING = re.compile(r"(?:ed|ing|able|ible|(?<!f)ly|less|ful|ous)$")
_PHRASE = re.compile(
    r"pass[ -]?phrase[\"'`*]{0,2}\s?(?::|=|\s(?:is|was))[ \t]{1,3}"
    r"(?P<value>(?:[a-z]{2,14}[ -]){2,9}[a-z]{2,14})(?=[ \t]*(?:$|[\n\r.,;!?)]))",
    re.IGNORECASE,
)
_PROSE_WORDS = """
a an the and or but of to in on at for from with by as is was are were be been has have had it its this that these those you
your we our they their he she his her not no must should shall may can will would could when if than then so per least most
only all any every each required optional stored kept used set same long short too very characters words letters
"""
_PROSE = frozenset(_PROSE_WORDS.split())


def told(text: str, start: int, end: int, announced: tuple[str, str], begins: int) -> bool:
    """Whether the word ``text[start:end]`` is a password by the way it is announced.

    Args:
        text: the whole.
        start: of the word.
        end: of the word.
        announced: the word for a password, and what stands between it and the value.
        begins: where the announcement begins.
    """
    name, separator = announced[0].lower(), announced[1].strip(" *\t").lower()
    word = text[start:end]
    if not _WORD.fullmatch(word) or "\n" in announced[1] or name in ("pass", "pw") or not _CLAUSE_END.match(text, end):
        return False
    if word.lower() in SAID or _SAID_ENDING.search(word.lower()):
        return False
    line = text[max(0, begins - 120, text.rfind("\n", 0, begins) + 1) : begins]
    if separator in _ASSIGNED:
        return line.count("(") <= line.count(")")  # an argument of a call is a name
    if separator == "to":
        return _SET_TO.search(line) is not None
    return separator in _TOLD


def pass_phrases(text: str) -> Iterator[tuple[int, int]]:
    """Yield where phrases stand that an announcement names as one, and that are no sentence about it."""
    for found in _PHRASE.finditer(text):
        if _PROSE.isdisjoint(re.split(r"[ -]", found["value"].lower())):
            yield found.span("value")
