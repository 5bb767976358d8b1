"""From what a row of the outbox says to the envelope that is signed, at its place in its chain and in its block's history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phionyx_letta import __version__
from phionyx_letta.diff import MemoryDiff
from phionyx_letta.envelope import (
    CONTENT_UNKNOWN,
    MemoryConsolidationAudit,
    MemoryMutationContext,
    ParsedJson,
    draft_memory_envelope,
)
from phionyx_letta.ledger.writer import BlockState, LedgerWriter
from phionyx_letta.plugin.forgetting import Forgetting
from phionyx_letta.plugin.runtime import logger

__all__ = ["Candidate", "add_draft", "agents_after", "preload"]

_EMPTY_HASH = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
_NOTHING = MemoryDiff(_EMPTY_HASH, _EMPTY_HASH, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Candidate:
    """A row of the outbox that is to be sealed."""

    row: Any
    fields: dict[str, Any]
    """What its payload says."""
    number: int | None
    """The row's id; None if a sealed row had it already (the sequence was set back)."""


def preload(writer: LedgerWriter, candidates: Sequence[Candidate]) -> None:
    """Read heads, turns and block states of a whole batch in three statements."""
    writer.load_blocks(candidate.fields["block_id"] for candidate in candidates)
    traces = [_trace(candidate.fields, writer.block(candidate.fields["block_id"])) for candidate in candidates]
    writer.load_chains(traces)
    runs = [candidate.fields["letta"].get("run_id") for candidate in candidates]
    writer.load_runs((trace, run) for trace, run in zip(traces, runs, strict=True) if run)


def add_draft(writer: LedgerWriter, key_id: str | None, candidate: Candidate, forgetting: Forgetting) -> None:
    """Draft the envelope of a row and put it at the end of its chain."""
    fields = candidate.fields
    block = writer.block(fields["block_id"])
    agents = agents_after(fields, block)
    # the nonce is signed: a row sealed twice shows, whatever the columns say
    letta = {**fields["letta"], "nonce": fields["nonce"]}
    diff = _diff(fields["diff"])
    if diff is None:  # attach and detach: the content as it stands at this place in the order
        if block is None or block.after_hash is None:
            letta["content"] = CONTENT_UNKNOWN
            diff = _NOTHING
        else:
            diff = _unchanged(block)
            if block.salt is not None:
                letta["salt"] = block.salt
    elif block is not None and not block.forgotten and block.after_hash not in (None, diff.before_hash):
        logger.error(
            "phionyx-letta: block %s was last recorded as %s but this write found %s: a change in between was not recorded",
            fields["block_id"],
            block.after_hash,
            diff.before_hash,
        )
    destroyed = forgetting.settle(candidate.row.id, fields, block, agents)
    if destroyed is not None:
        letta["salt_destroyed"] = destroyed
    trace_id = _trace(fields, block)
    chain = writer.chain(trace_id)
    audit = fields.get("audit")
    draft = draft_memory_envelope(
        MemoryMutationContext(
            trace_id=trace_id,
            turn_index=writer.turn(trace_id, letta.get("run_id")),
            producer=fields["producer"],
            block_id=fields["block_id"],
            block_label=fields["block_label"],
            mutation_kind=fields["kind"],
            diff=diff,
            consolidation_audit=MemoryConsolidationAudit(**audit) if audit else None,
            forgetting_reason=fields.get("reason"),
            metadata=ParsedJson(letta=letta, **_reviewed(fields)),
        ),
        previous_hash=chain.head,
        package_version=__version__,
        key_id=key_id,
        memory_audit_parent_ref=fields.get("parent"),
        position=chain.length,
        timestamp_utc=fields["at"],
        organization_id=fields.get("organization_id"),
    )
    writer.add_draft(draft, outbox_id=candidate.number, nonce=fields["nonce"], agents=agents)


def _reviewed(fields: dict[str, Any]) -> dict[str, Any]:
    """The patch behind a write, where there is one."""
    claim = fields.get("living_memory")
    return {"living_memory": claim} if isinstance(claim, dict) else {}


def _diff(fields: dict[str, Any] | None) -> MemoryDiff | None:
    return MemoryDiff(**fields) if fields is not None else None


def _unchanged(block: BlockState) -> MemoryDiff:
    same, size = str(block.after_hash), block.after_size
    commitment = "sha256" if block.salt is None else "hmac-sha256"
    return MemoryDiff(same, same, size, size, 0, 0, block.chars, commitment=commitment)


def agents_after(fields: dict[str, Any], block: BlockState | None) -> Sequence[str] | None:
    """Who has the block after this mutation; None if that cannot be known."""
    event = fields["event"]
    if event in ("baseline", "adopt", "restore"):
        return sorted(fields.get("agents", []))
    if fields["kind"] == "delete":
        return []
    agents = block.agents if block else []
    if agents is None:
        return None
    if event == "attach":
        return sorted({*agents, fields["attached_agent"]})
    if event == "detach":
        return [agent for agent in agents if agent != fields["attached_agent"]]
    return agents


def _trace(fields: dict[str, Any], block: BlockState | None) -> str:
    """The chain: the agent it is attributed to; else the one agent that has the block; else the block (decision 3)."""
    owner = fields.get("agent_id") or fields.get("attached_agent")
    if owner:
        return str(owner)
    agents = agents_after(fields, block)
    return agents[0] if agents and len(agents) == 1 else str(fields["block_id"])
