"""What `doctor` says of the approval policy: who may decide about patches, and whether every worker knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phionyx_letta.cli.examine import FAIL, OK, WARN, Finding

__all__ = ["examine_reviewers"]

_CHECK = "reviewers"


def examine_reviewers(workers: Sequence[dict[str, Any]]) -> list[Finding]:
    """Look at the living workers' policies; nothing is said where there is none."""
    alive = [one for one in workers if one["alive"] and one["armed"]]
    policies = [one.get("reviewers") for one in alive]
    known = [one for one in policies if one]
    if not known:
        return []
    faults = sorted({str(one["fault"]) for one in known if one.get("fault")})
    if faults:
        remedy = "mend the file: it is read again at once"
        return [Finding(_CHECK, FAIL, f"nobody may decide about patches: {one}", remedy) for one in faults]
    names = sorted({str(name) for one in known for name in one.get("names", ())})
    if len(known) < len(policies) or any(sorted(one.get("names", ())) != names for one in known):
        message = "the workers differ in who may decide about patches"
        return [Finding(_CHECK, WARN, message, "give every worker the same PHIONYX_LETTA_REVIEWERS, and the same file")]
    return [Finding(_CHECK, OK, f"about patches decide {', '.join(names)}, and no other key")]
