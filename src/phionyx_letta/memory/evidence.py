"""Evidence: words of the transcript that a proposal rests on, looked up and cleaned of personal data."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from phionyx_letta.memory.pii import PLACEHOLDERS, MemoryPIIFilter
from phionyx_letta.memory.transcript import UNKNOWN, Message, is_machine_id

#: Fewest letters and digits of a quote; shorter ones ("ok") are found everywhere and show nothing.
FEWEST_CHARS = 4

#: Most places inside longer words that a search passes over, so that no text makes it slow.
_MOST_PLACES = 1000
#: Values of the session that are looked for in an answer: not those that may be words, and not without end.
_SHORTEST_SECRET = 5
_MOST_SECRETS = 10_000


@dataclass(frozen=True)
class Evidence:
    """Words found in the message of that index; the quote is as the message has it, personal data replaced.

    A quote that was not looked up (see ``require_evidence``) has index -1 and the role "unknown".
    """

    quote: str
    message_index: int
    role: str
    message_id: str | None


class Witness:
    """A session that can be asked whether something was said in it, and by whom."""

    def __init__(self, messages: Sequence[Message], pii: MemoryPIIFilter) -> None:
        """Redact every message once, for what is sent and for what is quoted."""
        self.labelled = any(message.role != UNKNOWN for message in messages)
        self._first_tool = next((message.index for message in messages if message.role == "tool"), len(messages))
        self._pii = pii
        self._said = [_Said(message, pii) for message in messages]
        self.redacted = [replace(said.message, text=said.redacted) for said in self._said]
        self.secrets = self._secrets()
        self._said.sort(key=lambda said: (not self.trusts(said.message), said.message.index))
        self._trusted = {said.message.index for said in self._said if self.trusts(said.message)}

    def _secrets(self) -> dict[str, str]:
        """Each value of some length that the filter found in the session, line by line, and its kind; the longest first."""
        found = ((said.message.text[one.start : one.end], one.kind) for said in self._said for one in said.found)
        values = {line: kind for value, kind in found for line in value.splitlines() if not line.startswith("-----")}
        ranked = sorted(
            (value for value in values if len(value) >= _SHORTEST_SECRET and not value.isalpha()), key=len, reverse=True
        )
        return {value: values[value] for value in ranked[:_MOST_SECRETS]}

    def trusts(self, message: Message) -> bool:
        """Whether `message` is the conversation's own.

        The user's words are; the assistant's are until a tool has answered, for afterwards they may repeat it. Text of no
        speaker counts where the transcript names none.
        """
        if message.role == "assistant":
            return not message.forgeable and message.index < self._first_tool
        return not message.forgeable and (message.role == "user" or not self.labelled)

    def find(self, quote: str) -> Evidence | None:
        """Return where `quote` was said, in a trusted message if there is one; white space and case do not matter."""
        wanted = fold(quote)
        if not _says_something(wanted):
            return None
        for said in self._said:
            words = said.quote(wanted)
            if words is not None:
                identity = said.message.message_id
                clean = identity
                if identity is not None and not is_machine_id(identity):
                    clean = self._pii.filter_content(identity).filtered_content
                return Evidence(words, said.message.index, said.message.role, clean)
        return None

    def find_all(self, quotes: Iterable[str]) -> tuple[Evidence, ...]:
        """Return the evidence of those `quotes` that are found, each once."""
        found = (self.find(quote) for quote in quotes)
        return tuple(dict.fromkeys(one for one in found if one is not None))

    def trusted(self, evidence: Evidence) -> bool:
        """Whether `evidence` is from a trusted message; a quote that was not looked up is its caller's own affair."""
        return evidence.message_index < 0 or evidence.message_index in self._trusted

    def forgeable(self, evidence: Evidence) -> bool:
        """Whether the role of the message of `evidence` rests on text that a tool may have written."""
        return any(one.index == evidence.message_index and one.forgeable for one in self.redacted)

    def texts(self, *, trusted: bool) -> list[str]:
        """Return the folded texts of the messages that are trusted, or of those that are not."""
        return [said.folded for said in self._said if (said.message.index in self._trusted) is trusted]


class _Said:
    """One message, folded for comparison in both forms: as it was said, and as it may be stored."""

    def __init__(self, message: Message, pii: MemoryPIIFilter) -> None:
        self.message = message
        self.found = pii.find(message.text)
        self.redacted = pii.replace(message.text, self.found)
        self.folded = fold(message.text)
        self._folded_redacted = self.folded if self.redacted == message.text else fold(self.redacted)

    def quote(self, wanted: str) -> str | None:
        """The words of the message that `wanted` folds from, fit to be stored; None if it does not say them."""
        if (at := _find_words(self._folded_redacted, wanted)) >= 0:
            origin = self._origin_redacted
            if origin is None:
                return wanted
            return " ".join(self.redacted[origin[at][0] : origin[at + len(wanted) - 1][1]].split())
        # Below, the quote holds personal data or cuts through it: it is redacted as part of the whole message.
        if (at := _find_words(self.folded, wanted)) >= 0 and (origin := self._origin) is not None:
            return " ".join(self._stretch(origin[at][0], origin[at + len(wanted) - 1][1]).split())
        return None

    @cached_property
    def _origin(self) -> list[tuple[int, int]] | None:
        return _origins(self.message.text, self.folded)

    @cached_property
    def _origin_redacted(self) -> list[tuple[int, int]] | None:
        return _origins(self.redacted, self._folded_redacted)

    def _stretch(self, start: int, end: int) -> str:
        text = self.message.text
        pieces, at = [], start
        for found in self.found:
            if found.end > start and found.start < end:
                pieces += [text[at : max(at, found.start)], PLACEHOLDERS[found.kind]]
                at = min(found.end, end)
        return "".join([*pieces, text[at:end]])


def fold(text: str) -> str:
    """Return `text` for comparison: NFKC, without differences of case and of white space.

    Letters of different scripts stay different however alike they look, and invisible characters stay characters.
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _says_something(folded: str) -> bool:
    letters = [c for c in folded if c.isalnum()]
    dense = sum(unicodedata.category(c) == "Lo" for c in letters)  # one sign of Chinese is worth a word
    return len(letters) + 2 * dense >= FEWEST_CHARS


def _find_words(text: str, wanted: str) -> int:
    """Where `wanted` stands in `text` as whole words, or -1; places inside words are passed over, up to a limit."""
    at = -1
    for _ in range(_MOST_PLACES):
        at = text.find(wanted, at + 1)
        if at < 0 or not (_within_word(text, at) or _within_word(text, at + len(wanted))):
            return at
    return -1


def _within_word(text: str, place: int) -> bool:
    """Whether `place` lies between two letters or digits of an alphabet that puts spaces between words."""
    if not 0 < place < len(text):
        return False
    return all(c.isalnum() and unicodedata.category(c) != "Lo" for c in text[place - 1 : place + 1])


def _origins(text: str, folded: str) -> list[tuple[int, int]] | None:
    """For each character of `folded`, the stretch of `text` it comes from; None where that cannot be told.

    `text` is folded cluster by cluster: a character with the marks after it, which NFKC may put together.
    """
    characters: list[str] = []
    origin: list[tuple[int, int]] = []
    for cluster in _clusters(text):
        for c in unicodedata.normalize("NFKC", text[slice(*cluster)]).casefold():
            if c.isspace():
                if not characters or characters[-1] == " ":
                    continue
                c = " "
            characters.append(c)
            origin.append(cluster)
    return origin if "".join(characters).rstrip(" ") == folded else None


def _clusters(text: str) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(text):
        stop = at + 1
        while stop < len(text) and (unicodedata.combining(text[stop]) or "\u1161" <= text[stop] <= "\u11ff"):
            stop += 1
        yield at, stop
        at = stop
