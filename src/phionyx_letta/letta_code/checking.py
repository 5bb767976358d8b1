"""Whether an agent's prompt is about to be made of what the ledger recorded: HEAD is compared with it, file by file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phionyx_letta.errors import PhionyxError, StoreError
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.letta_code.changes import block_id, file_name
from phionyx_letta.letta_code.contents import ABSENT
from phionyx_letta.letta_code.cursor import read_cursor
from phionyx_letta.letta_code.history import NAMED
from phionyx_letta.letta_code.known import Known
from phionyx_letta.letta_code.objects import Objects
from phionyx_letta.letta_code.places import AgentMemory
from phionyx_letta.letta_code.repository import MemoryRepository
from phionyx_letta.letta_code.trees import changed_files
from phionyx_letta.letta_code.turns import Turn
from phionyx_letta.letta_code.working_tree import uncommitted
from phionyx_letta.signing import Signer

__all__ = ["Checked", "check_memory"]

#: For one memory; of which git may say nothing.
_SECONDS, _SILENCE = 60.0, 5.0


@dataclass
class Checked:
    """How one memory stands to the ledger."""

    agent_id: str
    status: str
    """`ok`; `behind`: commits are not recorded yet; `changed`: HEAD holds what was never recorded; `rewritten`: HEAD does not lead on
    from what was recorded; `unrecorded`: nothing is; `unreadable`; `several`: HEAD is as recorded, and there is another memory
    of the agent, which is not compared; `replaced`: git puts other objects in the place of some, and so may the prompt."""
    head: str | None = None
    recorded: str | None = None
    files: list[str] = field(default_factory=list)
    """Files whose content is not what the ledger recorded last."""
    uncommitted: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""


def check_memory(ledger: SqlLedger, signer: Signer, memory: AgentMemory) -> Checked:
    """Compare one memory with the ledger.

    Raises:
        LedgerUnavailable: the ledger cannot be read.
    """
    with ledger.engine.connect() as connection:
        cursor = read_cursor(connection, signer, memory.agent_id)
    states = Known(ledger, signer, memory.agent_id).files()
    prefix = block_id(memory.agent_id, "")
    path = memory.recorded_at(cursor.path)
    try:
        repository = MemoryRepository(path)
        with Objects(repository.git, Turn(_SECONDS, silence=_SILENCE, final=False)) as objects:
            head = objects.head()
            replaced = repository.replaced(objects)
            found = Checked(memory.agent_id, "ok", head, cursor.at)
            found.uncommitted = uncommitted(objects, path, head)
            tree = objects.commit(head).tree if head else None
            held = {
                block_id(memory.agent_id, file_name(path)): objects.content(entry).digest
                for path, _, entry in changed_files(objects, None, tree)
            }
    except PhionyxError as error:
        return Checked(memory.agent_id, "unreadable", recorded=cursor.at, why=error.message)
    except Exception as error:  # whatever a hostile repository brings about is its own agent's problem
        why = f"{path}: {type(error).__name__}: {error}"
        return Checked(memory.agent_id, "unreadable", recorded=cursor.at, why=why)
    known = {name: state.after_hash for name, state in states.items()}
    differing = [
        name for name in held.keys() | known.keys() if held.get(name, ABSENT.digest) != known.get(name, ABSENT.digest)
    ]
    found.files = sorted(name.removeprefix(prefix) for name in differing)
    found.status = _status(path, found, cursor.at)
    if replaced and found.status in ("ok", "behind", "unrecorded"):
        found.status, found.why = "replaced", ", ".join(replaced[:NAMED])
    if memory.others and found.status == "ok":
        found.status = "several"
        found.why = ", ".join(str(one) for one in (memory.path, *memory.others) if one != path)
    return found


def _status(path: Path, found: Checked, recorded: str | None) -> str:
    if recorded is None:
        return "unrecorded" if found.head else "ok"
    if found.head == recorded:
        return "changed" if found.files else "ok"
    try:
        git = MemoryRepository(path).git
        leads = found.head and git.run("merge-base", "--is-ancestor", recorded, found.head, failing_is_none=True)
    except StoreError as error:
        found.why = error.message
        return "rewritten"
    return "behind" if leads is not None and found.head else "rewritten"
