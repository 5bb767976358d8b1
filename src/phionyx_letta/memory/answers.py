"""The answer of a proposer, read: ours (an object with ``proposals``) or the seed's (a list with ``proposed_addition``)."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator

_FENCED = re.compile(r"```[a-zA-Z]*\s*\n(.*?)\n?```", re.DOTALL)
#: Most proposals taken from one answer.
MOST_PROPOSALS = 100


_TEXT_OR_NULL = {"type": ["string", "null"]}
_PROPOSAL = {
    "fact_key": {"type": "string"},
    "category": _TEXT_OR_NULL,
    "content": {"type": "string"},
    "section": _TEXT_OR_NULL,
    "file_path": _TEXT_OR_NULL,
    "rationale": {"type": "string"},
    "evidence": {"type": "array", "items": {"type": "string"}},
}
#: Our answer's form, in the strict subset that endpoints accept as structured output.
ANSWER_SCHEMA = {
    "type": "object",
    "properties": {
        "proposals": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": _PROPOSAL,
                "required": [*_PROPOSAL],
                "additionalProperties": False,
            },
        }
    },
    "required": ["proposals"],
    "additionalProperties": False,
}


class MalformedAnswer(ValueError):
    """The answer is not the JSON that was asked for; the text says what is wrong, without quoting it."""


class RawProposal(BaseModel):
    """One proposal as the model gave it, before any check of its truth."""

    model_config = ConfigDict(extra="ignore", str_strip_whitespace=True)

    fact_key: str = Field(min_length=1, max_length=200)
    category: str | None = Field(default=None, max_length=50)
    content: str = Field(min_length=1, max_length=4000, validation_alias=AliasChoices("content", "proposed_addition"))
    section: str | None = Field(default=None, max_length=200)
    file_path: str | None = Field(default=None, max_length=1000)
    rationale: str = Field(default="", max_length=2000)
    evidence: list[Annotated[str, Field(max_length=4000)]] = Field(default_factory=list, max_length=20)

    @field_validator("fact_key", "category", "section", "file_path")
    @classmethod
    def _on_one_line(cls, value: str | None) -> str | None:
        return " ".join(value.split()) or None if value else None

    @field_validator("evidence", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        items = value if isinstance(value, list) else [value]
        quotes = [item.get("quote") if isinstance(item, dict) else item for item in items]
        return [quote for quote in quotes if quote is not None]


def read_answer(answer: Any) -> tuple[list[RawProposal], list[tuple[str, str]]]:
    """Return the well-formed proposals, and (reason, fact key) of the others.

    Raises:
        MalformedAnswer: the answer as a whole is not a list of proposals.
    """
    if not isinstance(answer, str):
        raise MalformedAnswer(f"the answer is {type(answer).__name__}, not text")
    items = _items(_load(answer))
    accepted, rejected = [], []
    for item in items[:MOST_PROPOSALS]:
        try:
            accepted.append(RawProposal.model_validate(item))
        except ValidationError as error:
            key = item.get("fact_key") if isinstance(item, dict) else None
            where = ".".join(map(str, error.errors()[0]["loc"])) or "it"
            rejected.append((f"malformed: {where}: {error.errors()[0]['msg']}", str(key or "")[:200]))
    rejected += [(f"beyond the first {MOST_PROPOSALS} of an answer", "") for _ in items[MOST_PROPOSALS:]]
    return accepted, rejected


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = value.get("proposals", [value] if "fact_key" in value else None)
    if not isinstance(value, list):
        raise MalformedAnswer("the JSON is neither a list nor an object with the list `proposals`")
    return value


def _load(answer: str) -> Any:
    text = answer.strip()
    candidates = [text, *(match[1] for match in _FENCED.finditer(text))]
    for candidate in candidates:
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):
            continue
    raise MalformedAnswer("the answer is not JSON")
