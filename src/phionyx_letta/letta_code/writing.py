"""From mutations of a memory to envelopes in the ledger; the caller holds its lock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phionyx_letta import __version__
from phionyx_letta.diff import MemoryDiff
from phionyx_letta.envelope import MemoryMutationContext, ParsedJson, draft_memory_envelope
from phionyx_letta.ledger.writer import BlockState, LedgerWriter
from phionyx_letta.letta_code.changes import Mutation, block_id
from phionyx_letta.letta_code.contents import ABSENT, Content, content_diff
from phionyx_letta.letta_code.cursor import SOURCE
from phionyx_letta.signing import Signer

__all__ = ["Item", "held", "write_items"]

PRODUCER = "letta-code.git"
_EMPTY = MemoryDiff(ABSENT.digest, ABSENT.digest, 0, 0, 0, 0, 0)


@dataclass(slots=True)
class Item:
    """A mutation with what its envelope says of where it comes from."""

    mutation: Mutation
    run: str
    nonce: str
    letta: dict[str, Any]


def write_items(writer: LedgerWriter, signer: Signer, agent: str, items: Sequence[Item], batch: int) -> int:
    """Put the envelopes of one transaction into the ledger, `batch` at a time; return how many."""
    written = 0
    for start in range(0, len(items), batch):
        part = items[start : start + batch]
        writer.load_blocks(block_id(agent, item.mutation.path) for item in part)
        writer.load_runs((agent, item.run) for item in part)
        for item in part:
            _add(writer, signer, agent, item)
        written += writer.flush()
    return written


def _add(writer: LedgerWriter, signer: Signer, agent: str, item: Item) -> None:
    mutation, block = item.mutation, block_id(agent, item.mutation.path)
    letta = {
        "source": SOURCE,
        "event": mutation.event,
        "agent_id": agent,
        "run_id": item.run,
        **({} if mutation.path is None else {"path": mutation.path}),
        **item.letta,
        **mutation.details,
        "nonce": item.nonce,
    }
    diff = _EMPTY if mutation.diff is None else mutation.diff
    known = writer.block(block)
    if mutation.diff is not None and known is not None and known.after_hash not in (None, diff.before_hash):
        letta["unlinked"] = (
            "what was recorded last is not what git has as the state before: a change between is missing"
        )
        letta["git_before_hash"] = diff.before_hash
        diff = _continued(known, diff)
    chain = writer.chain(agent)
    draft = draft_memory_envelope(
        MemoryMutationContext(
            trace_id=agent,
            turn_index=writer.turn(agent, item.run),
            producer=PRODUCER,
            block_id=block,
            block_label=mutation.label,
            mutation_kind=mutation.kind,
            diff=diff,
            consolidation_audit=mutation.audit,
            metadata=ParsedJson(letta=letta),
        ),
        previous_hash=chain.head,
        package_version=__version__,
        key_id=signer.key_id,
        position=chain.length,
    )
    writer.add_draft(draft, nonce=item.nonce, agents=[agent])


def held(state: BlockState | None) -> Content:
    """What the ledger knows of a file's content."""
    if state is None or state.after_hash is None:
        return ABSENT
    return Content(state.after_hash, state.after_size, state.chars, None)


def _continued(known: BlockState, diff: MemoryDiff) -> MemoryDiff:
    """The same change, from what the ledger recorded last: all of that counts as replaced."""
    after = Content(diff.after_hash, diff.after_size_bytes, diff.added_chars + diff.unchanged_chars, None)
    return content_diff(held(known), after, include_text=False)
