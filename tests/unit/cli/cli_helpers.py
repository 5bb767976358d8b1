"""What the tests of the command line share: running a command, and a small history of two agents and two blocks."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from phionyx_letta import Ed25519Signer, MemoryConsolidationAudit, MemoryMutationContext, compute_memory_diff
from phionyx_letta.cli.app import app
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.plugin.outbox import OutboxKey

ROOT = Path(__file__).parents[3]
AGENT, OTHER = "agent-aaaaaaaa-0000-4000-8000-000000000001", "agent-bbbbbbbb-0000-4000-8000-000000000002"
HUMAN, NOTES = "block-aaaaaaaa-0000-4000-8000-000000000001", "block-bbbbbbbb-0000-4000-8000-000000000002"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def run_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    answer = json.loads(result.stdout)
    assert isinstance(answer, dict)
    return answer


def error_of(*arguments: object, code: int = 2) -> str:
    """The one line of an error, which must also come as JSON."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    as_json = run_json(*arguments, code=code)
    assert set(as_json) == {"error", "remedy"}
    return result.stderr


@dataclass
class Key:
    path: Path
    public: str
    signer: Ed25519Signer


def change(
    trace: str, turn: int, block: str, label: str, kind: str, before: str, after: str, **more: Any
) -> MemoryMutationContext:
    diff = compute_memory_diff(before, after, include_diff_text=True)
    return MemoryMutationContext(trace, turn, more.pop("producer", f"letta.{trace}"), block, label, kind, diff, **more)


def changes() -> list[MemoryMutationContext]:
    def letta(event: str, agent: str, **more: str) -> dict[str, Any]:
        return {"letta": {"event": event, "agent_id": agent, "run_id": "run-1", **more}}

    audit = MemoryConsolidationAudit(
        from_episodic=["m1", "m2"], to_semantic=["s1"], consolidation_method="letta.sleeptime"
    )
    return [
        change(AGENT, 0, HUMAN, "human", "write", "", "Ada", metadata=letta("create", AGENT)),
        change(
            AGENT,
            1,
            HUMAN,
            "human",
            "append",
            "Ada",
            "Ada\ntea",
            metadata=letta("update", AGENT, tool="core_memory_append"),
        ),
        change(
            OTHER,
            0,
            HUMAN,
            "human",
            "write",
            "Ada\ntea",
            "Ada\ncoffee",
            metadata=letta("update", OTHER, tool="core_memory_replace"),
        ),
        change(
            AGENT, 2, NOTES, "notes", "consolidate", "", "x", metadata=letta("update", AGENT), consolidation_audit=audit
        ),
        change(
            AGENT,
            3,
            HUMAN,
            "human",
            "clear",
            "Ada\ncoffee",
            "",
            metadata=letta("update", AGENT),
            forgetting_reason="retention_policy",
        ),
    ]


def sql(database: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute(statement, values)
    connection.close()


def waiting_row(key: Key, database: Path, after: str = "hello", forge: Callable[[str], str] = str) -> None:
    """Put a captured change into the outbox, as a worker would have."""
    mutation = {
        "at": datetime.now(UTC).isoformat(timespec="microseconds"),
        "kind": "write",
        "event": "create",
        "agent_id": AGENT,
        "block_id": f"block-{after}",
        "block_label": "new",
        "producer": f"letta.{AGENT}",
        "letta": {"event": "create"},
        "diff": compute_memory_diff("", after).to_dict(),
    }
    payload, mac = OutboxKey.of(key.signer).seal(mutation)
    ledger = SqlLedger(f"sqlite:///{database}")
    with ledger.engine.begin() as connection:
        connection.execute(tables.outbox.insert().values(payload=forge(payload), mac=mac))
    ledger.close()
