"""What `doctor` says of the armed processes: what each told the ledger about itself. That is not authenticated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, select

from phionyx_letta.cli.examine import FAIL, OK, WARN, Finding
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.bulk import finite
from phionyx_letta.version import __version__

__all__ = ["examine_workers"]

SILENCE = timedelta(seconds=30)
_RECENT = timedelta(hours=1)
_GAPS = 3


def examine_workers(connection: Connection, key_id: str | None) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Look at every worker that signed on; `key_id` is the key of this environment."""
    seen_at = tables.worker.c.seen_at
    rows = connection.execute(select(tables.worker).where(finite(connection, seen_at)).order_by(seen_at))
    workers = [_worker(row) for row in rows]
    alive = [one for one in workers if one["alive"]]
    findings = []
    if not alive:
        message = f"no armed worker has reported in the last {SILENCE.seconds} s: nothing is being recorded"
        findings.append(
            Finding(
                "workers", FAIL, message, "start Letta with PHIONYX_LETTA_ENABLE=1; its log says why it does not arm"
            )
        )
    findings += [finding for one in alive for finding in _living(one)]
    findings += _silent([one for one in workers if not one["alive"]])
    findings += _keys({str(one["key_id"]) for one in alive if one["key_id"]}, key_id)
    return findings, workers


def _worker(row: Any) -> dict[str, Any]:
    try:
        info = json.loads(row.info)
    except (ValueError, RecursionError):
        info = {}
    info = info if isinstance(info, dict) else {}
    silent = datetime.now(UTC) - (row.seen_at if row.seen_at.tzinfo else row.seen_at.replace(tzinfo=UTC))
    return {
        "worker_id": row.worker_id,
        "alive": silent < SILENCE,
        "silent_s": max(0.0, round(silent.total_seconds(), 1)),
        "armed": row.armed,
        "key_id": info.get("key") or row.key_id,  # the column is null where a worker runs no sealer
        **{
            name: value
            for name, value in info.items()
            if name not in ("worker_id", "alive", "silent_s", "armed", "key_id")
        },
    }


def _living(worker: dict[str, Any]) -> list[Finding]:
    check = f"worker {worker.get('pid', '?')}"
    where = f"on {worker.get('host', '?')}, letta {worker.get('letta', '?')}, plugin {worker.get('version', '?')}"
    if not worker["armed"]:
        message = f"is not armed ({where}): {worker.get('unsupported') or 'its log says why'}"
        return [Finding(check, FAIL, message, "install letta==0.16.8 on that host")]
    captured, mode = worker.get("captured", 0), worker.get("on_error", "?")
    findings = [Finding(check, OK, f"armed {where}, on_error={mode}, {captured} changes captured")]
    if worker.get("version") != __version__:
        message = f"has plugin {worker.get('version', '?')}, and this is {__version__}"
        findings.append(Finding(check, WARN, message, "install the same version everywhere"))
    findings += _version(check, worker)
    findings += [*_key(check, worker), _targets(check, worker), *_gaps(check, worker), *_guard(check, worker)]
    return findings


def _version(check: str, worker: dict[str, Any]) -> list[Finding]:
    from phionyx_letta.plugin.activation import SUPPORTED

    if worker.get("letta") in SUPPORTED:
        return []
    message = f"runs letta {worker.get('letta', '?')}; this release was tested with {', '.join(SUPPORTED)}"
    return [Finding(check, WARN, message, f"install letta=={SUPPORTED[-1]}")]


def _key(check: str, worker: dict[str, Any]) -> list[Finding]:
    if worker.get("key_error"):
        return [
            Finding(
                check, FAIL, f"cannot sign: {worker['key_error']}", "set PHIONYX_LETTA_SIGNING_KEY there and restart it"
            )
        ]
    return [Finding(check, OK, f"signs with {worker['key_id']} from {worker.get('key_source', '?')}")]


def _targets(check: str, worker: dict[str, Any]) -> Finding:
    targets = worker.get("targets")
    targets = targets if isinstance(targets, dict) else {}
    by_status: dict[str, list[str]] = {}
    for name, status in targets.items():
        by_status.setdefault(str(status), []).append(str(name))
    counted = (
        ", ".join(f"{len(names)} {status}" for status, names in sorted(by_status.items(), reverse=True)) or "none known"
    )
    wrong = [
        f"{name.rpartition('.')[2]} is {status}"
        for status in ("missing", "changed")
        for name in by_status.get(status, [])
    ]
    if not wrong:
        return Finding(check, OK, f"wrapped functions: {counted}")
    message = (
        f"wrapped functions: {counted}; {', '.join(wrong)}: changes are recorded, who made them is not always known"
    )
    return Finding(check, WARN, message, "install letta==0.16.8, or look for a newer phionyx-letta")


def _gaps(check: str, worker: dict[str, Any]) -> list[Finding]:
    if not worker.get("gaps"):
        return []
    last = worker.get("last_gaps")
    shown = [
        f"{gap.get('at', '?')}: {gap.get('what', '?')} ({', '.join(map(str, gap.get('block_ids') or [])) or 'a block'})"
        for gap in (last if isinstance(last, Sequence) else [])[-_GAPS:]
        if isinstance(gap, dict)
    ]
    message = f"{worker['gaps']} writes went on without evidence; the last: {'; '.join(shown) or 'not told'}"
    return [Finding(check, FAIL, message, "mend the cause; PHIONYX_LETTA_ON_ERROR=closed refuses such writes")]


def _guard(check: str, worker: dict[str, Any]) -> list[Finding]:
    """What a worker with guarded reads says of them, and of the log they rest on."""
    mode, log = worker.get("guard", "off"), worker.get("log")
    if mode == "off":
        return []
    log = log if isinstance(log, dict) else {}
    findings = [_standing(check, mode, worker, log)]
    if log.get("fault"):
        remedy = "`phionyx-letta verify --checkpoint` says more; after a legitimate restore: `phionyx-letta reconcile`"
        findings.append(Finding(check, FAIL, f"believes nothing of the log: {log['fault']}", remedy))
    if log.get("disbelieved"):
        message = (
            f"{log['disbelieved']} envelopes count for nothing: not signed by a trusted key, or not in their chain"
        )
        findings.append(Finding(check, WARN, message, "`phionyx-letta verify` names them; PHIONYX_LETTA_TRUSTED_KEYS"))
    if log.get("outside_problem"):
        findings.append(Finding(check, WARN, str(log["outside_problem"]), "a rollback cannot be seen without it"))
    if worker.get("reads_refused"):
        last = [one.get("what", "?") for one in worker.get("last_refused") or () if isinstance(one, dict)]
        done = "were refused" if mode == "reject" else "did not agree and were served"
        message = f"{worker['reads_refused']} reads {done}; the last: {last[-1] if last else 'not told'}"
        findings.append(Finding(check, FAIL, message, "`phionyx-letta log` lists them; `phionyx-letta reconcile`"))
    return findings


def _standing(check: str, mode: str, worker: dict[str, Any], log: dict[str, Any]) -> Finding:
    message = f"guard={mode}, {worker.get('reads_checked', 0)} reads checked"
    if log.get("read_in_s") is None:
        return Finding(check, WARN, f"{message}; it is still reading the log: reads wait", "wait, or look at its log")
    message += f", {log.get('size')} envelopes known, {log.get('outside_size') or 0} of them covered from outside"
    if not log.get("outside_readable"):
        remedy = "set PHIONYX_LETTA_SINKS to a folder or a git repository that the server can read"
        return Finding(check, WARN, f"{message}: after a restart a rolled-back database looks new", remedy)
    return Finding(check, OK, message)


def _silent(workers: list[dict[str, Any]]) -> list[Finding]:
    recent = [one for one in workers if one["silent_s"] < _RECENT.total_seconds()]
    findings = [
        Finding(
            f"worker {one.get('pid', '?')}",
            WARN,
            f"on {one.get('host', '?')} has been silent for {one['silent_s']:.0f} s and has not signed off: killed, or cut off",
            "look at its log; what it captured is in the outbox and not lost",
        )
        for one in recent
    ]
    if len(workers) > len(recent):
        findings.append(Finding("workers", OK, f"{len(workers) - len(recent)} ended long ago without signing off"))
    return findings


def _keys(used: set[str], here: str | None) -> list[Finding]:
    if len(used) > 1:
        message = f"the workers sign with {len(used)} keys: {', '.join(sorted(used))}"
        return [
            Finding(
                "keys",
                WARN,
                message,
                "give every host the same PHIONYX_LETTA_SIGNING_KEY, and verifiers all public keys",
            )
        ]
    if here is not None and used and here not in used:
        message = f"the workers sign with {', '.join(used)}, and the key here is {here}"
        return [Finding("keys", WARN, message, "`phionyx-letta seal` needs the workers' key")]
    return []
