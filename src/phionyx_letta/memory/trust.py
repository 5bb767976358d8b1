"""Why a proposal should not be applied unseen: where it comes from, and how it reads.

A mark here refuses nothing; it keeps a person in the loop. So the rules err on the side of marking, and they are no
substitute for that person: an order that is put as a harmless fact is not recognised.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from phionyx_letta.memory.answers import RawProposal
from phionyx_letta.memory.evidence import Evidence, Witness, fold
from phionyx_letta.memory.wording import addresses, doubt_about

_COMMON = """
the user users their they them this that these those with from into have has had been will would about when what which where
should could must always never prefers prefer likes like uses using used wants want said says and for not are was were his her
"""
_STOP = frozenset(_COMMON.split())


def distrust(raw: RawProposal, evidence: Sequence[Evidence], witness: Witness) -> str | None:
    """Return the reason why `raw` must not be applied without a person's look, or None."""
    names = [raw.section or "", raw.category or "", re.sub("[_-]", " ", raw.fact_key)]
    return (
        _doubt_about_source(evidence, witness)
        or doubt_about(raw.content, names, [raw.rationale, *(one.quote for one in evidence)])
        or _doubt_about_addresses(raw, witness)
        or _doubt_about_origin(raw, evidence, witness)
    )


def _doubt_about_addresses(raw: RawProposal, witness: Witness) -> str | None:
    spoken = witness.texts(trusted=True)
    for address in addresses(f"{raw.content}\n{raw.section or ''}"):
        if not any(fold(address) in text for text in spoken):
            return "risky markup: it leads to an address that nobody in the conversation named"
    return None


def _doubt_about_source(evidence: Sequence[Evidence], witness: Witness) -> str | None:
    if any(witness.trusted(one) for one in evidence):
        return None
    roles = sorted({one.role for one in evidence})
    if set(roles) <= {"tool", "system"}:
        return f"its evidence is only in text of the role {' and '.join(roles)}"
    if "unknown" in roles:
        return "its evidence is in text whose speaker is not known"
    if roles == ["assistant"] and not any(witness.forgeable(one) for one in evidence):
        return "only the assistant said it, after a tool had answered"
    return "its evidence comes after a tool's output in a text transcript and may be part of that output"


def _doubt_about_origin(raw: RawProposal, evidence: Sequence[Evidence], witness: Witness) -> str | None:
    """Compare the words of the proposal with those of the conversation and those of tools."""
    if any(one.message_index < 0 for one in evidence):
        return None
    words = {word for word in _words(fold(raw.content)) if word not in _STOP}
    if not words:
        return None
    spoken = _heard(witness.texts(trusted=True))
    unheard = {word for word in words if not _forms(word) & spoken}
    if unheard == words:
        return "nobody in the conversation used any of its words"
    elsewhere = _heard(witness.texts(trusted=False))
    from_tools = {word for word in unheard if _forms(word) & elsewhere}
    if len(from_tools) >= 2 and 2 * len(from_tools) >= len(words):
        return "what it says comes from text of a tool or the system"
    return None


_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{2,}")


def _words(folded: str) -> list[str]:
    return _WORD.findall(folded)


def _forms(word: str) -> set[str]:
    """The beginnings that stand for a word in its forms: four letters, or a short word with and without its last."""
    return {word[:4], word[:3]} if len(word) == 4 else {word[:4]}


def _heard(texts: Iterable[str]) -> set[str]:
    return {
        form
        for text in texts
        for word in set(_words(text))
        for form in (word[:4], *([word[:3]] if len(word) == 4 else []))
    }
