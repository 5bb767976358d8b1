"""What a model proposes to remember of a session, and what of it may be believed.

A proposer is anything with ``generate(prompt) -> str`` or ``async agenerate(prompt) -> str`` (the seed's protocol). Its
answer is checked here and never trusted: evidence must be found in the transcript, and a proposal that rests on what
nobody in the conversation said, or that reads like an order to the agent, is marked.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phionyx_letta.errors import ProposerUnavailable
from phionyx_letta.memory.answers import MalformedAnswer, RawProposal, read_answer
from phionyx_letta.memory.evidence import Evidence, Witness
from phionyx_letta.memory.pii import MemoryPIIFilter
from phionyx_letta.memory.prompting import PART_CHARS, build_prompt, build_repair_prompt, show_files, split_messages
from phionyx_letta.memory.transcript import Message
from phionyx_letta.memory.trust import distrust

__all__ = ["Dropped", "Evidence", "Proposal", "ProposalReport", "collect_proposals"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Proposal:
    """One fact to remember. All its text is free of personal data; ``untrusted`` is the reason not to apply it unseen."""

    fact_key: str
    category: str | None
    content: str
    section: str | None
    file_path: str | None
    rationale: str
    evidence: tuple[Evidence, ...]
    untrusted: str | None


@dataclass(frozen=True)
class Dropped:
    """A proposal that was not taken, and why."""

    reason: str
    fact_key: str


@dataclass
class ProposalReport:
    """What came of one session: how many parts it was read in, and which part of each file the model saw."""

    proposals: list[Proposal] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    parts: int = 0
    seen: dict[str, str] = field(default_factory=dict)


async def collect_proposals(
    proposer: Any,
    messages: Sequence[Message],
    files: Mapping[str, str],
    *,
    pii: MemoryPIIFilter,
    require_evidence: bool = True,
    part_chars: int = PART_CHARS,
    attempts: int = 3,
    backoff: float = 0.5,
) -> ProposalReport:
    """Ask `proposer` about every part of a session and return what survives the checks.

    Args:
        proposer: an object with ``agenerate(prompt)`` or ``generate(prompt)``.
        messages: the session, see :func:`.transcript.parse_transcript`.
        files: path -> text of the memory files, as context for the model.
        pii: applied to all that is sent to the model and to all that it answers.
        require_evidence: False keeps proposals without found evidence, and only where the transcript names no speaker
            at all and so has no message to quote (the peers' tests do this); such proposals carry no evidence.
        part_chars: most characters of transcript in one prompt.
        attempts: how often a part is asked for before giving up.
        backoff: seconds before the second attempt; doubled for each further one.

    Raises:
        ProposerUnavailable: no usable answer for some part after every attempt; the session should be kept for later.
    """
    shown, seen = show_files({path: pii.filter_content(text).filtered_content for path, text in files.items()})
    witness = Witness(messages, pii)
    parts = split_messages(witness.redacted, part_chars)
    report = ProposalReport(parts=len(parts), seen=seen)
    for part in parts:
        prompt = build_prompt(part, shown)
        accepted, rejected = await _ask(proposer, prompt, attempts, backoff)
        report.dropped += [Dropped(reason, pii.filter_content(key).filtered_content) for reason, key in rejected]
        for raw in accepted:
            _weigh(raw, witness, files, pii, require_evidence, report)
    return report


async def _ask(
    proposer: Any, prompt: str, attempts: int, backoff: float
) -> tuple[list[RawProposal], list[tuple[str, str]]]:
    for attempt in range(1, attempts + 1):
        try:
            return await _ask_with_repair(proposer, prompt)
        except ProposerUnavailable:
            raise
        except Exception as error:  # whatever a proposer of the user's own raises must not lose the session
            _log.warning("proposer failed, attempt %d of %d: %s", attempt, attempts, type(error).__name__)
            if attempt == attempts:
                raise ProposerUnavailable(
                    f"the proposer gave no usable answer in {attempts} attempts ({type(error).__name__})",
                    remedy="the session is unchanged; propose from it again later",
                ) from error
            await asyncio.sleep(backoff * 2 ** (attempt - 1))
    raise AssertionError("unreachable")


async def _ask_with_repair(proposer: Any, prompt: str) -> tuple[list[RawProposal], list[tuple[str, str]]]:
    answer = await _generate(proposer, prompt)
    try:
        return read_answer(answer)
    except MalformedAnswer as error:
        _log.warning("the proposer's answer is malformed (%s); asking once more", error)
        return read_answer(await _generate(proposer, build_repair_prompt(prompt, str(answer), str(error))))


async def _generate(proposer: Any, prompt: str) -> Any:
    asynchronous = getattr(proposer, "agenerate", None)
    answer = asynchronous(prompt) if asynchronous else await asyncio.to_thread(proposer.generate, prompt)
    return await answer if inspect.isawaitable(answer) else answer


def _weigh(
    raw: RawProposal,
    witness: Witness,
    files: Mapping[str, str],
    pii: MemoryPIIFilter,
    require_evidence: bool,
    report: ProposalReport,
) -> None:
    """Take `raw` into the report, as a proposal or as dropped."""

    def clean(text: str) -> str:
        return pii.filter_content(text).filtered_content

    evidence = witness.find_all(raw.evidence)
    if not evidence and (require_evidence or witness.labelled):
        report.dropped.append(Dropped("its evidence is not in the transcript", clean(raw.fact_key)))
        return
    path = (
        raw.file_path if raw.file_path in files or not raw.file_path or clean(raw.file_path) == raw.file_path else None
    )
    report.proposals.append(
        Proposal(
            fact_key=clean(raw.fact_key),
            category=clean(raw.category) if raw.category else None,
            content=clean(raw.content),
            section=clean(raw.section) if raw.section else None,
            file_path=path,
            rationale=clean(raw.rationale),
            evidence=evidence,
            untrusted=distrust(raw, evidence, witness),
        )
    )
