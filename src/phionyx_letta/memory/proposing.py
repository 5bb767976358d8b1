"""From a proposer's facts to patches: counted, routed, placed, filtered, signed.

Files are data to the proposer, and so is its answer to us: a target it names is taken only if it is one of the managed ones, and
everything that is stored has gone through the filter once more.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from phionyx_letta.diff import content_hash
from phionyx_letta.errors import ProposerUnavailable, TargetRefused
from phionyx_letta.memory.binding import BOUND, bound_to
from phionyx_letta.memory.facts import same_fact
from phionyx_letta.memory.kept import KeptSessions
from phionyx_letta.memory.merging import FileDiffEngine, both_added
from phionyx_letta.memory.occurrences import OccurrenceRecord, Occurrences
from phionyx_letta.memory.patches import HISTORY, MemoryPatch, transition
from phionyx_letta.memory.pii import MemoryPIIFilter
from phionyx_letta.memory.proposer import Evidence, Proposal, collect_proposals
from phionyx_letta.memory.routing import MemoryFileCategory, MemoryFileRouter
from phionyx_letta.memory.sections import place
from phionyx_letta.memory.stored import Patches
from phionyx_letta.memory.targets import Target, Targets
from phionyx_letta.memory.transcript import UNKNOWN, Message, is_machine_id, parse_transcript
from phionyx_letta.memory.trimming import over_limit
from phionyx_letta.memory.twins import pending_twin
from phionyx_letta.signing import Signer, Verifier

__all__ = ["Found", "Proposing", "placed_again"]

SETTLED = frozenset({"pending", "approved", "applied", "rejected", "reverted"})
"""A fact whose newest patch stands so is not proposed again, unless it changes."""
_CONTEXT_CHARS = 200
_WHOLE = "whole"
_log = logging.getLogger(__name__)


@dataclass
class Found:
    """What a session's proposals are worked on with: its messages, and the texts its earlier patches lead to."""

    proposal: Proposal
    messages: Sequence[Message]
    texts: dict[str, str]
    shown: dict[int, str]
    """Messages that were filtered already, by index."""
    seen: Mapping[str, str]
    """Which part of each file the model was shown."""


class _Cleaner:
    """Filters one proposal's texts and counts what it redacted."""

    def __init__(self, pii: MemoryPIIFilter, already: Mapping[str, int]) -> None:
        self._pii = pii
        self.counts: Counter[str] = Counter(already)

    def clean(self, text: str) -> str:
        result = self._pii.filter_content(text)
        self.counts.update(result.counts)
        return result.filtered_content

    def clean_new(self, before: str, after: str) -> str:
        result = self._pii.filter_new(before, after)
        self.counts.update(result.counts)
        return result.filtered_content


class Proposing:
    """Makes patches of proposals; the caller holds the store alone while `patch_for` and `successor` run."""

    def __init__(
        self,
        *,
        targets: Targets,
        store: Patches,
        occurrences: Occurrences,
        threshold: int,
        pii: MemoryPIIFilter,
        router: MemoryFileRouter,
        signer: Signer,
        verifier: Verifier | None,
        evidence_required: bool,
        kept: KeptSessions | None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        """Take what `LivingMemory` was made of."""
        self._targets = targets
        self._store = store
        self._occurrences = occurrences
        self._threshold = threshold
        self._pii = pii
        self._router = router
        self._signer = signer
        self._verifier = verifier
        self._evidence_required = evidence_required
        self.kept = kept
        self._provenance = dict(provenance or {})

    async def ask(
        self,
        proposer: Any,
        session_id: str,
        transcript: str | None,
        session_records: Sequence[Mapping[str, Any]] | None,
    ) -> list[Found]:
        """Ask the proposer; nothing is stored yet, but for a session it does not answer about, which is kept for later.

        Evidence is not demanded in one case only (the peer's own tests): neither approval nor signatures are wanted, and the
        transcript names no speaker, so that there is no message to quote.

        Raises:
            ProposerUnavailable: it gave no usable answer.
        """
        messages = parse_transcript(transcript, session_records)
        if not messages:
            return []
        summary = all(message.role == UNKNOWN for message in messages)
        try:
            report = await collect_proposals(
                proposer,
                messages,
                self._texts(),
                about={name: self._targets.about(name) for name in self._targets.names()},
                pii=self._pii,
                require_evidence=self._evidence_required or not summary,
            )
        except ProposerUnavailable:
            if self.kept is not None:
                self.kept.keep(self.clean_session(session_id), messages)
            raise
        for dropped in report.dropped:
            _log.warning("the proposal %r was dropped: %s", dropped.fact_key, dropped.reason)
        texts: dict[str, str] = {}
        shown: dict[int, str] = {}
        return [Found(proposal, messages, texts, shown, report.seen) for proposal in report.proposals]

    def _texts(self) -> dict[str, str]:
        found = {}
        for name in self._targets.names():
            try:
                text = self._targets.resolve(name).read()
            except TargetRefused as error:
                _log.warning("%s", error)
                continue
            if text is not None:
                found[name] = text
        return found

    def patch_for(self, found: Found, session_id: str) -> MemoryPatch | None:
        """Return the signed pending patch of a proposal, or None where it waits, is settled, or has no place to go."""
        proposal = found.proposal
        cleaner = _Cleaner(self._pii, getattr(proposal, "redactions", {}))
        content, key = cleaner.clean(proposal.content), cleaner.clean(proposal.fact_key)
        quotes = [cleaner.clean(evidence.quote) for evidence in proposal.evidence]
        session = self.clean_session(session_id)
        record = self._counted(key, session, quotes[0] if quotes else "", content)
        if record is None:
            return None
        category = _category(proposal.category) or self._router.categorize(content)
        target, name = self._target(proposal.file_path, category)
        if target is None:
            return None
        name = target.name
        section = cleaner.clean(proposal.section) if proposal.section else None
        try:
            before = found.texts.get(target.identity)
            before = (target.read() or "") if before is None else before
        except TargetRefused as error:
            _log.warning("the fact %r waits: %s", key, error)
            return None
        if _holds(before, content):
            _log.info("%s already says %r", name, key)
            return None
        after = cleaner.clean_new(before, place(before, content, section))
        metadata: dict[str, Any] = {
            "fact_key": record.fact_key,
            "section": section,
            "content": content,
            "found": content_hash(target.read() or ""),
            "evidence": [self._in_context(one, found) for one in proposal.evidence],
            "pii": dict(cleaner.counts),
            "pii_filtered": bool(cleaner.counts),
        }
        if found.seen.get(name, _WHOLE) != _WHOLE:
            metadata["file_seen"] = found.seen[name]
        if self._provenance:
            metadata["proposed_from"] = self._provenance
        if proposal.untrusted is not None:
            metadata["untrusted"] = cleaner.clean(proposal.untrusted)
        if (over := over_limit(before, after, target.limit)) is not None:
            metadata["over_limit"] = over
        patch = self._born(name, before, after, cleaner.clean(proposal.rationale), quotes, category, session, metadata)
        found.texts[target.identity] = after
        twin = pending_twin(patch, self._store, self._verifier)
        return twin if twin is not None else self._saved(patch)

    def _saved(self, patch: MemoryPatch) -> MemoryPatch:
        """Store a patch as the newest of its fact; noted first, so that a crash in between cannot lead to a second one."""
        key, content = patch.metadata.get("fact_key"), patch.metadata.get("content")
        if isinstance(key, str) and isinstance(content, str):
            self._occurrences.note_patch(key, patch.patch_id, content)
        return self._store.save(patch)

    def successor(self, patch: MemoryPatch, before: str, after: str, relation: str, author: str) -> MemoryPatch:
        """Store a pending patch that takes another's place, with `relation` naming it."""
        after = _Cleaner(self._pii, {}).clean_new(before, after)
        kept = {name: value for name, value in patch.metadata.items() if name not in (HISTORY, "found", "over_limit")}
        metadata = {**kept, relation: patch.patch_id, "found": content_hash(before)}
        if (over := over_limit(before, after, self._targets.resolve(patch.file_path).limit)) is not None:
            metadata["over_limit"] = over
        new = self._born(
            *(patch.file_path, before, after, patch.rationale, list(patch.evidence_refs)),
            *(patch.category, patch.session_id, metadata),
            author=author,
        )
        return self._saved(new)

    def _born(
        self,
        name: str,
        before: str,
        after: str,
        rationale: str,
        quotes: list[str],
        category: str,
        session: str | None,
        metadata: dict[str, Any],
        author: str = "living-memory",
    ) -> MemoryPatch:
        diff = FileDiffEngine.generate_unified_diff(before, after, name)
        patch = MemoryPatch(
            file_path=name,
            before_content=before,
            after_content=after,
            unified_diff=diff,
            rationale=rationale,
            evidence_refs=quotes,
            category=category,
            session_id=session,
            author=author,
            metadata={**metadata, "diff_stats": FileDiffEngine.count_changed_lines(diff)},
        )
        patch.metadata[BOUND] = bound_to(patch, self._store, self._targets.resolve(name))
        transition(patch, "pending", by=author, signer=self._signer)
        return patch

    def _counted(self, key: str, session: str, quote: str, content: str) -> OccurrenceRecord | None:
        """Count the fact; return its record if it is time to propose it."""
        record = self._occurrences.record_occurrence(key, session, quote, content=content)
        if self._settled(record):
            if _same(record.content, content):
                return None
            # the fact has changed: what it says now is counted as a fact of its own
            record = self._occurrences.record_occurrence(
                f"{record.fact_key} {content}", session, quote, content=content
            )
            if self._settled(record):
                return None
        return record if record.count >= self._threshold else None

    def _settled(self, record: OccurrenceRecord) -> bool:
        status = self._store.status(record.patch_id) if record.patch_id is not None else None
        if record.patch_id is None or status != "rejected":
            return status in SETTLED
        patch = self._store.get(record.patch_id)
        last = patch.history[-1].get("details") if patch is not None and patch.history else None
        return not (isinstance(last, dict) and "untrusted" in last)  # that decided about a forgery, not about the fact

    def _target(self, wanted: str | None, category: MemoryFileCategory) -> tuple[Target | None, str]:
        names = self._targets.names()
        if not names and not self._router.allow_new_files:
            _log.warning("none of the managed files exists, so the fact waits; create one, or use allow_new_files")
            return None, ""
        name = wanted if wanted in names else self._router.resolve_target_path(category, names)
        try:
            target = self._targets.resolve(name)
            if target.read() is None and not self._router.allow_new_files:
                _log.warning(
                    "%s does not exist, so nothing can be proposed for it; create it, or use allow_new_files", name
                )
                return None, name
        except TargetRefused as error:
            _log.warning("%s", error)
            return None, name
        return target, name

    def clean_session(self, session_id: str) -> str:
        """A session id without personal data; four digits keep two such sessions apart, too few to try names on."""
        written = session_id.encode(
            "utf-8", "backslashreplace"
        ).decode()  # a lone surrogate cannot be stored everywhere
        clean = self._clean_id(written)
        if clean == session_id:
            return clean
        return f"{clean}-{hashlib.sha256(session_id.encode('utf-8', 'surrogatepass')).hexdigest()[:4]}"

    def _clean_id(self, text: str) -> str:
        return text if is_machine_id(text) else self._pii.filter_content(text).filtered_content

    def _in_context(self, evidence: Evidence, found: Found) -> dict[str, Any]:
        """A quote with the words around it, all of it filtered."""
        quote = self._pii.filter_content(evidence.quote).filtered_content
        if evidence.message_index not in found.shown:
            said = next((one.text for one in found.messages if one.index == evidence.message_index), "")
            found.shown[evidence.message_index] = self._pii.filter_content(said).filtered_content
        text = found.shown[evidence.message_index]
        at = max(0, text.casefold().find(quote.casefold()))
        start, end = max(0, at - _CONTEXT_CHARS), at + len(quote) + _CONTEXT_CHARS
        return {
            "quote": quote,
            "role": evidence.role,
            "message_index": evidence.message_index,
            "message_id": evidence.message_id and self._clean_id(evidence.message_id),
            "context": ("…" if start else "") + text[start:end] + ("…" if end < len(text) else ""),
        }


def placed_again(patch: MemoryPatch, text: str) -> str | None:
    """Return `text` with the patch's addition placed in it anew, or None where the patch is no mere addition."""
    content, section = patch.metadata.get("content"), patch.metadata.get("section")
    if not isinstance(content, str) or "edited_from" in patch.metadata:  # not a fact: what an agent or a reviewer wrote
        return both_added(patch.before_content, patch.after_content, text)
    return text if _holds(text, content) else place(text, content, section if isinstance(section, str) else None)


def _category(given: str | None) -> MemoryFileCategory | None:
    return next((one for one in get_args(MemoryFileCategory) if one == given), None)


def _same(one: str, other: str) -> bool:
    return one.split() == other.split() or same_fact(one, other)


def _holds(text: str, content: str) -> bool:
    """Whether a text already has exactly these lines, one below the other."""
    wanted = [line.strip() for line in content.strip().splitlines()]
    lines = [line.strip() for line in text.splitlines()]
    return any(lines[at : at + len(wanted)] == wanted for at in range(len(lines) - len(wanted) + 1))
