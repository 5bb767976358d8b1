"""Why a proposal should not be applied unseen."""

from __future__ import annotations

from collections.abc import Sequence

from phionyx_letta.memory.answers import RawProposal
from phionyx_letta.memory.evidence import Evidence, Witness


def distrust(raw: RawProposal, evidence: Sequence[Evidence], witness: Witness) -> str | None:
    """Return the reason not to trust `raw`, or None."""
    if evidence and all(one.role in ("tool", "system") for one in evidence):
        return "it rests only on text of a tool or the system"
    if "you must" in raw.content.casefold():
        return "it reads like an instruction to the agent"
    return None
