"""Comparing the live blocks of Letta's database with what the ledger last recorded of them, what waits in the outbox included.

What the ledger says is believed only where it is signed or authenticated; a difference is something that was done past the
plugin: with psql, by another program, while the plugin was off, or in an `open` gap.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlalchemy import Connection, select, text

from phionyx_letta._shape import find_fault
from phionyx_letta.diff import content_hash
from phionyx_letta.envelope import envelope_hash
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.rollback import LOG_BLOCK
from phionyx_letta.ledger.salts import Salt, SaltKey, named_salts
from phionyx_letta.ledger.writer import BlockState, read_block_states
from phionyx_letta.plugin.drafting import agents_after
from phionyx_letta.plugin.evidence import NO_HISTORY
from phionyx_letta.plugin.mutation import RECORDED, BlockColumns
from phionyx_letta.plugin.outbox import authentic, open_payload
from phionyx_letta.plugin.runtime import PluginKey
from phionyx_letta.plugin.stored import stored_histories
from phionyx_letta.signing import Verifier

__all__ = [
    "ATTACHMENTS",
    "CHANGED",
    "CREATED",
    "DAMAGED",
    "DELETED",
    "FORGOTTEN",
    "LOST_SALT",
    "Difference",
    "LiveBlock",
    "Recorded",
    "compare",
    "differences",
    "is_known",
    "read_live",
    "read_recorded",
]

CREATED, DELETED, CHANGED, ATTACHMENTS = "created", "deleted", "changed", "attachments"
LOST_SALT, DAMAGED, FORGOTTEN = "salt lost", "record damaged", "forgotten"
_COLUMNS = ", ".join(f'b."{name}"' for name in RECORDED)
# only envelopes about a block's content name the version of its state, and of those the ones of system messages are not wanted
_NEWEST = """select distinct on (block_id) block_id, body from phionyx_envelope
    where event is not null and block_id not like 'message-%' and position('"state_version":' in body) > 0 {}
    order by block_id, seq desc"""


_NEWEST_HISTORY = """select distinct on (block_id) block_id, body from phionyx_envelope
    where event is not null and position('"history":"' in body) > 0 {} order by block_id, seq desc"""


@dataclass(frozen=True)
class Recorded:
    """What the ledger last recorded of a block."""

    block_id: str
    label: str
    exists: bool
    """False after a delete."""
    after_hash: str
    size: int
    chars: int
    state: str | None
    """Digest over all recorded columns."""
    salt: str | None
    at: str
    producer: str
    actor_id: str | None
    envelope: str | None
    """Its hash; None while it waits in the outbox."""
    agents: tuple[str, ...] | None = None
    """Who has the block; None if that is not known."""
    forgotten: bool = False
    """Its salt was destroyed: its content can be compared with nothing."""
    history: str | None = None
    """Digest over Letta's checkpoints of it; None if none was ever recorded, as in a salted ledger."""
    damaged: str | None = None
    """Why the record is not believed."""


@dataclass(frozen=True)
class LiveBlock:
    """A row of Letta's table."""

    columns: BlockColumns
    organization_id: str | None
    agents: tuple[str, ...]
    history: str = NO_HISTORY


@dataclass(frozen=True)
class Difference:
    """One block that is not as it was recorded."""

    block_id: str
    label: str
    what: str
    columns: tuple[str, ...]
    """Which recorded columns differ; `other` stands for description, limit or read-only, of which one hash was kept,
    `checkpoints` for Letta's history of the block."""
    recorded: Recorded | None
    found_hash: str | None
    """Of the value, made as the recorded one was; None where there is no row or no salt."""
    found_size: int | None
    agents: tuple[str, ...] | None
    """Who has the block now; None where there is no row."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; it holds no content."""
        said = None
        if self.recorded is not None:
            said = {name: value for name, value in asdict(self.recorded).items() if name not in ("block_id", "chars")}
        found = (
            None if self.agents is None else {"hash": self.found_hash, "size": self.found_size, "agents": self.agents}
        )
        return {
            "block_id": self.block_id,
            "label": self.label,
            "what": self.what,
            "columns": list(self.columns),
            "recorded": said,
            "found": found,
        }


def differences(
    connection: Connection, key: PluginKey, verifier: Verifier | None = None, block_id: str | None = None
) -> list[Difference]:
    """What is not as it was recorded, sorted by block.

    Args:
        connection: of Letta's database, in a snapshot or under the ledger's lock.
        key: authenticates block states and outbox rows, opens salts and made the newest signatures.
        verifier: further trusted keys, of envelopes that an older key signed.
        block_id: only this block.
    """
    ids = None if block_id is None else [block_id]
    recorded = read_recorded(connection, key, verifier, ids)
    live = read_live(connection, ids)
    salts = read_salts_of(connection, key, recorded.values())
    found = (compare(one, recorded.get(one), live.get(one), salts) for one in sorted({*recorded, *live}))
    return [one for one in found if one is not None]


def is_known(connection: Connection, block_id: str) -> bool:
    """Whether there is such a block, or ever was one in the ledger."""
    if not block_id.isprintable():  # the database could not even look for it
        return False
    found = text(
        "select 1 where exists (select 1 from block where id = :id)"
        " or exists (select 1 from phionyx_envelope where block_id = :id)"
    )
    return connection.execute(found, {"id": block_id}).first() is not None


def compare(
    block_id: str, recorded: Recorded | None, live: LiveBlock | None, salts: dict[str, Salt]
) -> Difference | None:
    """The difference of one block; None if it is as it was recorded, or was forgotten and nobody has it."""
    if live is None:
        if recorded is None or not recorded.exists:
            return None
        return Difference(block_id, recorded.label, DELETED, (), recorded, None, None, None)
    columns = live.columns
    size = len(columns.value.encode("utf-8", "surrogatepass"))
    if recorded is None or not recorded.exists:
        return Difference(block_id, columns.label, CREATED, (), recorded, None, size, live.agents)
    salt = salts.get(recorded.salt) if recorded.salt else None

    def difference(what: str, names: tuple[str, ...] = (), found: str | None = None) -> Difference:
        return Difference(block_id, columns.label, what, names, recorded, found, size, live.agents)

    if recorded.damaged:
        return difference(DAMAGED)
    if recorded.salt and salt is None:
        if not recorded.forgotten:
            return difference(LOST_SALT)
        return difference(FORGOTTEN) if live.agents else None
    found = content_hash(columns.value, salt=salt.value if salt else None)
    names = _differing(recorded, columns, found, salt)
    if _other_checkpoints(recorded, live):
        names += ("checkpoints",)
    if names:
        return difference(CHANGED, names, found)
    if recorded.agents is not None and set(recorded.agents) != set(live.agents):
        return difference(ATTACHMENTS, (), found)
    return None


def _differing(recorded: Recorded, columns: BlockColumns, found: str, salt: Salt | None) -> tuple[str, ...]:
    names = []
    if found != recorded.after_hash:
        names.append("value")
    if columns.label != recorded.label:
        names.append("label")
    # with value and label as they were recorded, what is left of a difference is in the other columns
    as_recorded = replace(columns, label=recorded.label)
    digest = as_recorded.digest(recorded.after_hash, salt.value if salt else None)
    if recorded.state is not None and digest != recorded.state:
        names.append("other")
    return tuple(names)


def _other_checkpoints(recorded: Recorded, live: LiveBlock) -> bool:
    return recorded.salt is None and (recorded.history or NO_HISTORY) != live.history


def read_live(
    connection: Connection, block_ids: Collection[str] | None = None, *, lock: bool = False
) -> dict[str, LiveBlock]:
    """Letta's rows; ``lock`` keeps them from changing until the end of the transaction."""
    where = "" if block_ids is None else "where b.id = any(:ids)"
    values = {} if block_ids is None else {"ids": list(block_ids)}
    rows = connection.execute(
        text(f"select b.id, b.organization_id, {_COLUMNS} from block b {where} {'for update' if lock else ''}"), values
    ).all()
    of_blocks = "" if block_ids is None else "where block_id = any(:ids)"
    agents: dict[str, list[str]] = {}
    for block_id, agent_id in connection.execute(
        text(f"select block_id, agent_id from blocks_agents {of_blocks}"), values
    ):
        agents.setdefault(block_id, []).append(agent_id)
    histories = stored_histories(connection, [row[0] for row in rows])
    return {
        row[0]: LiveBlock(
            BlockColumns(*row[2:]), row[1], tuple(sorted(agents.get(row[0], ()))), histories.get(row[0], NO_HISTORY)
        )
        for row in rows
    }


def read_recorded(
    connection: Connection, key: PluginKey, verifier: Verifier | None, block_ids: Collection[str] | None = None
) -> dict[str, Recorded]:
    """What is sealed of each block, and what waits."""
    states = read_block_states(connection, key.signer, block_ids)
    out = {one.block_id: one for one in _sealed(connection, key, verifier, states, block_ids)}
    for block_id, history in _sealed_histories(connection, key, verifier, block_ids):
        if block_id in out:
            out[block_id] = replace(out[block_id], history=history)
    _add_waiting(connection, key, out, states, block_ids)
    return out


def read_salts_of(connection: Connection, key: PluginKey, recorded: Iterable[Recorded]) -> dict[str, Salt]:
    """The salts these records were made with, where they are still there."""
    wanted = [(one.block_id, one.salt) for one in recorded if one.salt]
    return named_salts(connection, SaltKey.of(key.signer), wanted)


def _sealed(
    connection: Connection,
    key: PluginKey,
    verifier: Verifier | None,
    states: dict[str, BlockState],
    block_ids: Collection[str] | None,
) -> Iterator[Recorded]:
    query = text(_NEWEST.format("" if block_ids is None else "and block_id = any(:ids)"))
    for block_id, body in connection.execute(query, {} if block_ids is None else {"ids": list(block_ids)}):
        if block_id == LOG_BLOCK:
            continue
        envelope = _trusted(body, key, verifier)
        if envelope is None or envelope["mutation"]["block_id"] != block_id:
            yield Recorded(
                block_id, "", True, "", 0, 0, None, None, "", "", None, None, damaged="its envelope is not authentic"
            )
            continue
        one, state = _of_envelope(envelope), states.get(block_id)
        if state is None or state.seq < 0:
            yield one
        elif state.after_hash not in (None, one.after_hash):
            yield replace(one, damaged="its newest envelope is not the one the ledger's state was made of")
        else:
            agents = None if state.agents is None else tuple(state.agents)
            yield replace(one, agents=agents, forgotten=state.forgotten)


def _sealed_histories(
    connection: Connection, key: PluginKey, verifier: Verifier | None, block_ids: Collection[str] | None
) -> Iterator[tuple[str, str]]:
    """The newest recorded digest of each block's checkpoints."""
    query = text(_NEWEST_HISTORY.format("" if block_ids is None else "and block_id = any(:ids)"))
    for block_id, body in connection.execute(query, {} if block_ids is None else {"ids": list(block_ids)}):
        envelope = _trusted(body, key, verifier)
        history = envelope["subject"]["metadata"]["letta"].get("history") if envelope is not None else None
        if isinstance(history, str):
            yield block_id, history


def _of_envelope(envelope: dict[str, Any]) -> Recorded:
    subject, mutation = envelope["subject"], envelope["mutation"]
    known = {"kind": mutation["mutation_kind"], "at": subject["timestamp_utc"], "producer": subject["producer"]}
    known |= {name: mutation[name] for name in ("block_id", "block_label", "diff")}
    return _record({**known, "letta": subject["metadata"]["letta"]}, envelope["integrity"]["current"])


def _record(fields: dict[str, Any], envelope: str | None) -> Recorded:
    diff, letta = fields["diff"], fields["letta"]
    return Recorded(
        block_id=fields["block_id"],
        label=fields["block_label"],
        exists=fields["kind"] != "delete",
        after_hash=diff["after_hash"],
        size=diff["after_size_bytes"],
        chars=diff["added_chars"] + diff["unchanged_chars"],
        state=letta.get("state"),
        salt=letta.get("salt"),
        at=fields["at"],
        producer=fields["producer"],
        actor_id=letta.get("actor_id"),
        envelope=envelope,
    )


def _trusted(body: str, key: PluginKey, verifier: Verifier | None) -> dict[str, Any] | None:
    """The envelope, if it was signed by this key or by a trusted one."""
    try:
        envelope = json.loads(body)
        if find_fault(envelope) is not None:
            return None
        integrity = envelope["integrity"]
        if envelope_hash(envelope, integrity["previous"]) != integrity["current"]:
            return None
    except (ValueError, TypeError, RecursionError):
        return None
    current, signature = integrity["current"], integrity["signature"]
    good = key.made(current, signature) or (verifier is not None and verifier.verify(current, signature))
    return envelope if good and isinstance(envelope["subject"]["metadata"].get("letta"), dict) else None


def _add_waiting(
    connection: Connection,
    key: PluginKey,
    out: dict[str, Recorded],
    states: dict[str, BlockState],
    block_ids: Collection[str] | None,
) -> None:
    outbox = tables.outbox.c
    query = select(outbox.payload, outbox.mac).where(outbox.refused.is_(None)).order_by(outbox.id)
    wanted = None if block_ids is None else set(block_ids)
    for payload, mac in connection.execute(query):
        fields = open_payload(payload)
        if fields is None or (wanted is not None and fields["block_id"] not in wanted):
            continue
        if fields["key_id"] != key.outbox.key_id or not authentic(key.outbox, payload, mac):
            continue  # another host's, which counts once it is sealed; or forged
        block_id = fields["block_id"]
        known = out.get(block_id)
        agents = _agents_after(fields, known, states.get(block_id))
        history = fields["letta"].get("history", known.history if known is not None else None)
        if fields["diff"] is not None:
            out[block_id] = _record(fields, None)
        if block_id in out:
            out[block_id] = replace(out[block_id], agents=agents, history=history)
        elif block_id in states:
            states[block_id].agents = agents


def _agents_after(
    fields: dict[str, Any], recorded: Recorded | None, state: BlockState | None
) -> tuple[str, ...] | None:
    before = recorded.agents if recorded is not None else (state.agents if state is not None else ())
    as_state = BlockState(None, 0, 0, "", before, 0)
    agents = agents_after(fields, as_state)
    return None if agents is None else tuple(agents)
