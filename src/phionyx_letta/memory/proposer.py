"""What a model proposes to remember of a session, and what of it may be believed.

A proposer is anything with ``generate(prompt) -> str`` or ``async agenerate(prompt) -> str`` (the seed's protocol). Its
answer is checked here and never trusted: evidence must be found in the transcript, and a proposal that rests on what
nobody in the conversation said, or that reads like an order to the agent, is marked.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phionyx_letta.errors import ProposerUnavailable
from phionyx_letta.memory.answers import MalformedAnswer, RawProposal, read_answer
from phionyx_letta.memory.evidence import Evidence, Witness
from phionyx_letta.memory.pii import PLACEHOLDERS, MemoryPIIFilter
from phionyx_letta.memory.prompting import PART_CHARS, build_prompt, build_repair_prompt, show_files, split_messages
from phionyx_letta.memory.transcript import UNKNOWN, Message
from phionyx_letta.memory.trust import distrust

__all__ = ["Dropped", "Evidence", "Proposal", "ProposalReport", "collect_proposals"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Proposal:
    """One fact to remember, its text free of personal data.

    ``untrusted`` is the reason not to apply it unseen, None without one; ``redactions`` counts, per kind, what was
    replaced in the model's answer.
    """

    fact_key: str
    category: str | None
    content: str
    section: str | None
    file_path: str | None
    rationale: str
    evidence: tuple[Evidence, ...]
    untrusted: str | None
    redactions: dict[str, int] = field(default_factory=dict, compare=False)


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
    about: Mapping[str, str] | None = None,
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
        about: path -> what that file is for, where somebody said so.
        pii: applied to all that is sent to the model and to all that it answers.
        require_evidence: False keeps proposals without found evidence, and only where the transcript names no speaker
            at all and so has no message to quote (the peers' tests do this); such quotes have the index -1.
        part_chars: most characters of transcript in one prompt.
        attempts: how often a part is asked for before giving up.
        backoff: seconds before the second attempt; doubled for each further one.

    Raises:
        ProposerUnavailable: no usable answer for some part after every attempt; the session should be kept for later.
    """
    shown, seen = show_files({path: pii.filter_content(text).filtered_content for path, text in files.items()})
    for one in shown:
        if said := (about or {}).get(one["path"]):
            one["description"] = pii.filter_content(said[:2000]).filtered_content
    if not callable(getattr(proposer, "agenerate", None)) and not callable(getattr(proposer, "generate", None)):
        raise ProposerUnavailable(
            f"the proposer ({type(proposer).__name__}) has neither `agenerate` nor `generate`",
            remedy="give an object with one of them, such as OpenAIProposer",
        )
    witness = await asyncio.to_thread(Witness, messages, pii)  # seconds for a megabyte: not in the caller's event loop
    parts = split_messages(witness.redacted, part_chars)
    report = ProposalReport(parts=len(parts), seen=seen)
    weighing = _Weighing(witness, files, pii, require_evidence, report)
    for part in parts:
        prompt = build_prompt(part, shown)
        accepted, rejected = await _ask(proposer, prompt, attempts, backoff)
        for reason, fact_key in rejected:
            weighing.drop(reason, fact_key)
        for raw in accepted:
            weighing.take(raw)
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


class _Weighing:
    """Takes raw proposals into a report, cleaned and judged, or drops them."""

    def __init__(
        self, witness: Witness, files: Mapping[str, str], pii: MemoryPIIFilter, strict: bool, report: ProposalReport
    ) -> None:
        self._witness = witness
        self._files = files
        self._pii = pii
        self._strict = strict or witness.labelled
        self._report = report

    def drop(self, reason: str, fact_key: str) -> None:
        _log.info("proposal dropped: %s", reason)
        self._report.dropped.append(Dropped(reason, self._clean(fact_key, Counter())))

    def take(self, raw: RawProposal) -> None:
        counts: Counter[str] = Counter()

        def clean(text: str) -> str:
            return self._clean(text, counts)

        evidence = self._witness.find_all(raw.evidence)
        if not evidence and raw.evidence and not self._strict:
            evidence = tuple(Evidence(clean(quote), -1, UNKNOWN, None) for quote in raw.evidence)
        elif not evidence:
            self.drop("its evidence is not in the transcript", raw.fact_key)
            return
        proposal = Proposal(
            fact_key=clean(raw.fact_key),
            category=clean(raw.category) if raw.category else None,
            content=clean(raw.content),
            section=clean(raw.section) if raw.section else None,
            file_path=self._path(raw.file_path),
            rationale=clean(raw.rationale),
            evidence=evidence,
            untrusted=distrust(raw, evidence, self._witness),
            redactions=dict(counts),
        )
        if proposal not in self._report.proposals:  # the parts of a long message overlap
            self._report.proposals.append(proposal)

    def _clean(self, text: str, counts: Counter[str]) -> str:
        """`text` without personal data, also where a value of the session stands without the words that gave it away."""
        result = self._pii.filter_content(text)
        counts.update(result.counts)
        clean = result.filtered_content
        for value, kind in self._witness.secrets.items() if self._pii.redact else ():
            if value in clean:
                counts[kind] += clean.count(value)
                clean = clean.replace(value, PLACEHOLDERS[kind])
        return clean

    def _path(self, path: str | None) -> str | None:
        """A path of a file that was given, or one without personal data; else none, and the category decides."""
        return path if path and (path in self._files or self._clean(path, Counter()) == path) else None
