"""What `doctor` says of proposals after sessions: who proposes, what waits, what was parked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from phionyx_letta.cli.examine import FAIL, OK, WARN, Finding

__all__ = ["examine_sessions"]

#: How long a session may be due before something is wrong, s.
SLOW_QUEUE = 600.0
_CHECK = "sessions"


def examine_sessions(connection: Connection, workers: Sequence[dict[str, Any]]) -> tuple[list[Finding], dict[str, Any]]:
    """Look at the queue, and at the living workers' settings."""
    from phionyx_letta.plugin.session_views import counts

    found = counts(connection)
    alive = [one for one in workers if one["alive"] and one["armed"]]
    modes = sorted({str(one.get("sessions", "off")) for one in alive})
    found["modes"] = modes
    if modes in ([], ["off"]) and not found["states"]:
        return [Finding(_CHECK, OK, "proposals after sessions are off (PHIONYX_LETTA_SESSIONS)")], found
    findings = [_queue(found, modes)]
    if len(modes) > 1:
        message = f"the workers differ: {', '.join(modes)}; runs of those that are off are noted late or never"
        findings.append(Finding(_CHECK, WARN, message, "give every worker the same PHIONYX_LETTA_SESSIONS"))
    silent = [one for one in alive if one.get("sessions", "off") != "off" and not one.get("proposer_pid")]
    if silent:
        pids = ", ".join(str(one.get("pid", "?")) for one in silent)
        message = f"the process that proposes does not run beside worker {pids}"
        findings.append(Finding(_CHECK, WARN, message, "look at its log; it is started again every few seconds"))
    missed = sum(int(one.get("run_ends_missed") or 0) for one in alive)
    if missed:
        findings.append(Finding(_CHECK, WARN, f"{missed} ends of runs were found by the sweep only", "see the log"))
    for one in found["parked"]:
        remedy = "mend the cause, then `phionyx-letta session retry ID`"
        findings.append(Finding(_CHECK, WARN, f"{one['session_id']} is parked: {one['detail']}", remedy))
    return findings, found


def _queue(found: dict[str, Any], modes: list[str]) -> Finding:
    counted = ", ".join(f"{number} {state}" for state, number in sorted(found["states"].items())) or "none yet"
    message = f"proposals are {'/'.join(modes) or 'off'}: {counted}; {found['tokens_today']} tokens today"
    if found["oldest_due_s"] > SLOW_QUEUE:
        message += f"; the oldest has been due for {found['oldest_due_s']:.0f} s: nobody proposes"
        return Finding(
            _CHECK, FAIL, message, "start an armed worker with PHIONYX_LETTA_SESSIONS=on, or look at its log"
        )
    return Finding(_CHECK, OK, message)
