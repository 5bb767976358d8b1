"""The filter of the second seed: finds personal data and secrets, and replaces them by placeholders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from phionyx_letta.memory.pii import rules
from phionyx_letta.memory.pii.added import kept
from phionyx_letta.memory.pii.findings import KINDS, PLACEHOLDERS, Finding, PIIBackend

#: Countries whose national telephone formats are understood; numbers with a + need none.
DEFAULT_REGIONS: tuple[str, ...] = ("US", "GB", "DE", "FR", "TR", "IN", "JP", "BR")


@dataclass
class PIIFilterResult:
    """What a filter found in one text (the seed's result, and how many of each kind)."""

    is_clean: bool
    original_content: str
    filtered_content: str
    redacted_count: int = 0
    redaction_types: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


class MemoryPIIFilter:
    """Finds personal data and secrets in text and replaces them by placeholders.

    Args:
        detect: the kinds to look for (see ``KINDS``); all by default.
        redact: False to report only and leave every text as it is.
        regions: ISO 3166 codes of the countries whose national telephone formats count.
        backend: a further source of findings, asked beside the rules.

    Raises:
        ValueError: `detect` or `regions` names something unknown.
    """

    def __init__(
        self,
        detect: Sequence[str] | None = None,
        *,
        redact: bool = True,
        regions: Sequence[str] = DEFAULT_REGIONS,
        backend: PIIBackend | None = None,
    ) -> None:
        """Keep the choices; nothing is loaded."""
        self.kinds = frozenset(KINDS if detect is None else detect)
        if unknown := self.kinds - set(KINDS):
            raise ValueError(f"unknown kind of personal data {sorted(unknown)}; choose from {', '.join(KINDS)}")
        self.redact = redact
        self.regions = tuple(regions)
        self.backend = backend

    def filter_content(self, text: str) -> PIIFilterResult:
        """Find everything in `text` and, unless ``redact=False``, replace it."""
        return self._result(text, self._find(text), self.redact)

    def check(self, text: str) -> PIIFilterResult:
        """Find everything in `text` and change nothing."""
        return self._result(text, self._find(text), redact=False)

    def filter_new(self, before: str, after: str) -> PIIFilterResult:
        """Filter what `after` has and `before` had not; a value on the border of both counts as new."""
        findings = self._find(after)
        if findings:
            kept_text = kept(before, after)
            findings = [one for one in findings if not kept_text.covers(one.start, one.end)]
        return self._result(after, findings, self.redact)

    def _find(self, text: str) -> list[Finding]:
        found = list(rules.find(text, self.kinds, self.regions))
        if self.backend is not None:
            found += self.backend.find(text, self.kinds)
        found.sort(key=lambda one: (one.start, -one.end))
        kept: list[Finding] = []
        for one in found:
            if not kept or one.start >= kept[-1].end:
                kept.append(one)
            elif one.end > kept[-1].end:
                kept[-1] = Finding(kept[-1].kind, kept[-1].start, one.end)
        return kept

    @staticmethod
    def _result(text: str, findings: list[Finding], redact: bool) -> PIIFilterResult:
        counts = Counter(one.kind for one in findings)
        pieces, at = [], 0
        for one in findings if redact else ():
            pieces += [text[at : one.start], PLACEHOLDERS[one.kind]]
            at = one.end
        filtered = "".join([*pieces, text[at:]])
        return PIIFilterResult(
            not findings, text, filtered, len(findings), [k for k in KINDS if counts[k]], dict(counts)
        )
