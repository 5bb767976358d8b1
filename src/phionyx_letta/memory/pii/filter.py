"""The filter of the second seed: finds personal data and secrets, and replaces them by placeholders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import phonenumbers

from phionyx_letta.errors import SettingsError
from phionyx_letta.memory.pii import rules
from phionyx_letta.memory.pii.added import kept
from phionyx_letta.memory.pii.findings import KINDS, PLACEHOLDERS, Finding, PIIBackend
from phionyx_letta.settings import load_settings


@dataclass
class PIIFilterResult:
    """What a filter found in one text: the seed's fields, and in ``counts`` how many of each kind."""

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
        regions: ISO 3166 codes of the countries whose national telephone formats are recognised (numbers with a + need
            none); default: ``PHIONYX_LETTA_PII_REGIONS``.
        backend: a further source of findings, asked beside the rules.

    Raises:
        SettingsError: `detect` or `regions` names something unknown.
    """

    def __init__(
        self,
        detect: Sequence[str] | None = None,
        *,
        redact: bool = True,
        regions: Sequence[str] | None = None,
        backend: PIIBackend | None = None,
    ) -> None:
        """Keep the choices; nothing is loaded."""
        self.kinds = frozenset(KINDS if detect is None else [detect] if isinstance(detect, str) else detect)
        if unknown := self.kinds - set(KINDS):
            raise SettingsError(
                f"unknown kind of personal data {sorted(unknown)}", remedy=f"choose from {', '.join(KINDS)}"
            )
        self.redact = redact
        if regions is None:
            regions = load_settings().pii_regions
        regions = regions.split(",") if isinstance(regions, str) else regions
        self.regions = tuple(region.strip().upper() for region in regions)
        if strange := set(self.regions) - phonenumbers.SUPPORTED_REGIONS:
            raise SettingsError(f"unknown region {sorted(strange)}", remedy="use ISO 3166 codes such as US, GB, DE")
        self.backend = backend

    def filter_content(self, text: str) -> PIIFilterResult:
        """Find everything in `text` and, unless ``redact=False``, replace it."""
        findings = self.find(text)
        return self._result(text, findings, self.replace(text, findings))

    def check(self, text: str) -> PIIFilterResult:
        """Find everything in `text` and change nothing."""
        return self._result(text, self.find(text), text)

    def filter_new(self, before: str, after: str) -> PIIFilterResult:
        """Filter what `after` has and `before` had not.

        A value that lies whole in a stretch taken over from `before` is left alone; one that lies on the border of old
        and new text is new.
        """
        findings = self.find(after)
        if findings:
            old = kept(before, after)
            findings = [one for one in findings if not old.covers(one.start, one.end)]
        return self._result(after, findings, self.replace(after, findings))

    def find(self, text: str) -> list[Finding]:
        """Return what is found in `text`, in order and without overlaps."""
        found = list(rules.find(text, self.kinds, self.regions))
        if self.backend is not None:
            found += (one for one in self.backend.find(text, self.kinds) if one.kind in self.kinds)
        return _without_overlaps(found)

    def replace(self, text: str, findings: Iterable[Finding]) -> str:
        """Return `text` with `findings` (in order, without overlaps) replaced; as it is with ``redact=False``."""
        pieces, at = [], 0
        for one in findings if self.redact else ():
            pieces += [text[at : one.start], PLACEHOLDERS[one.kind]]
            at = one.end
        return "".join([*pieces, text[at:]])

    def _result(self, text: str, findings: list[Finding], filtered: str) -> PIIFilterResult:
        counts = Counter(one.kind for one in findings)
        return PIIFilterResult(
            is_clean=not findings,
            original_content=text,
            filtered_content=filtered,
            redacted_count=len(findings),
            redaction_types=[kind for kind in KINDS if counts[kind]],
            counts=dict(counts),
        )


def _without_overlaps(findings: Iterable[Finding]) -> list[Finding]:
    """Join what overlaps; of the joined, the first given (the surest) names the kind."""
    ranked = sorted(enumerate(findings), key=lambda item: item[1].start)
    joined: list[tuple[int, Finding]] = []
    for rank, one in ranked:
        if joined and one.start < joined[-1][1].end:
            best, last = joined[-1]
            kind = one.kind if rank < best else last.kind
            joined[-1] = (min(rank, best), Finding(kind, last.start, max(last.end, one.end)))
        else:
            joined.append((rank, one))
    return [one for _, one in joined]
