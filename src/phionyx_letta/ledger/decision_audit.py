"""`verify`, of what people decided: is each change by a patch signed by the reviewer it names, and was each decision used once?"""

from __future__ import annotations

from phionyx_letta._shape import find_fault
from phionyx_letta.decisions import Reviewers, decision_in, fault_in, is_salted

__all__ = ["REVIEWERS", "SALTED", "DecisionAudit"]

REVIEWERS = "reviewers"
"""The dimension; there where an envelope names a patch or a reviewer."""
SALTED = "signed by the reviewer it names; about which text cannot be checked, as the hashes are salted"
OK, FAILED, NOT_MEASURED = "ok", "failed", "not_measured"


class DecisionAudit:
    """Whether the decisions that envelopes name are those of reviewers, each about the one change that it stands in."""

    def __init__(self, reviewers: Reviewers | None) -> None:
        """Take whose decisions count."""
        self._reviewers = reviewers
        self._signatures: set[str] = set()
        self.salted = 0
        """Decisions that are a reviewer's, about a text that its hash does not tell."""

    def feed(self, envelope: object) -> tuple[str | None, str]:
        """Return the status of the decision in an envelope, and what is wrong; no status where there is none."""
        said = decision_in(envelope)
        if said is None:
            return None, ""
        if self._reviewers is None:
            return NOT_MEASURED, ""
        if not isinstance(envelope, dict) or find_fault(envelope) is not None:
            return None, ""  # which is a finding of its own
        fault = fault_in(envelope, said, self._reviewers)
        if fault is None and said["signature"] in self._signatures:
            fault = "the reviewer's one decision stands behind another change too: it was sent again"
        self._signatures.add(str(said.get("signature")))
        if fault is not None:
            return FAILED, fault
        if not is_salted(envelope):
            return OK, ""
        self.salted += 1
        return NOT_MEASURED, SALTED
