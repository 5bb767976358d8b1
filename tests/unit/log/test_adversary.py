"""An attacker who owns the database, against what an auditor may have: nothing, the public key, and checkpoints kept outside.

Every attack is carried out on a ledger as the sealer writes it. `EXPECTED` is the table of docs/attacks.md, and is compared with it.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from phionyx_letta import Ed25519Signer, Ed25519Verifier
from phionyx_letta.envelope import envelope_hash, envelope_line
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.audit import AuditReport
from phionyx_letta.ledger.audit_log import read_outside
from phionyx_letta.ledger.audit_sql import verify_ledger
from phionyx_letta.ledger.log.folder import FolderSink
from phionyx_letta.ledger.log.sink import Published
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.merkle import leaf_hash
from phionyx_letta.plugin.attribution import Attribution
from phionyx_letta.plugin.checkpointing import CheckpointPolicy
from phionyx_letta.plugin.mutation import BlockColumns, block_change
from phionyx_letta.plugin.runtime import PluginKey
from phionyx_letta.plugin.sealer import Sealer
from phionyx_letta.signing import TrustedKeys

STOLEN = Ed25519Signer("11" * 32)
OTHER = Ed25519Signer("22" * 32)
DOCS = Path(__file__).parents[3] / "docs" / "attacks.md"


class World:
    """A ledger, its sealer, and a folder of checkpoints that the attacker cannot reach."""

    def __init__(self, folder: Path) -> None:
        self.path, self.outside = folder / "ledger.db", folder / "outside"
        self.ledger = SqlLedger(f"sqlite:///{self.path}")
        self.key = PluginKey(STOLEN, "test")
        self.sink = FolderSink(self.outside, [STOLEN.public_key_hex])
        self.values: dict[str, str] = {}
        self.sealer = self.new_sealer()

    def new_sealer(self) -> Sealer:
        return Sealer(self.ledger, self.key, checkpoints=CheckpointPolicy("test/log", STOLEN.public_key_hex))

    def write(self, block: str, value: str, agent: str, *, deliver: bool = True) -> None:
        """One write of an agent, sealed; its checkpoint goes outside."""
        before = self.values.get(block)
        columns = [None if one is None else BlockColumns(one, "human", None, 5000, False) for one in (before, value)]
        change = block_change(block, *columns, Attribution(agent_id=agent, tool="memory_insert"), organization_id="org")
        assert change is not None
        payload, mac = self.key.outbox.seal(change)
        with self.ledger.engine.begin() as connection:
            connection.execute(tables.outbox.insert().values(payload=payload, mac=mac))
        self.values[block] = value
        signed = self.sealer.seal_pending().checkpoint
        if signed is not None and deliver:
            self.sink.deliver(Published(*signed, self.ledger.consistency_proof))

    def history(self) -> None:
        for turn in range(4):
            for agent in ("a", "b", "c"):
                self.write(f"block-{agent}", f"{agent} {turn}", f"agent-{agent}")

    def verify(self, *, key: bool, checkpoint: bool) -> AuditReport:
        verifier = TrustedKeys([Ed25519Verifier(STOLEN.public_key_hex)]) if key else None
        outside = read_outside([str(self.outside)], [STOLEN.public_key_hex]) if checkpoint else None
        return verify_ledger(self.ledger, verifier=verifier, outside=outside)


class Attacker:
    """Edits the database file; knows how everything is stored."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.database = sqlite3.connect(world.path, isolation_level=None)

    def sql(self, statement: str, *values: object) -> list[Any]:
        return self.database.execute(statement, values).fetchall()

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for (body,) in self.sql("select body from phionyx_envelope order by seq")]

    def rewrite(self, envelopes: list[dict[str, Any]], signer: Ed25519Signer | None) -> None:
        """Store this history in place of the old one, everything beside it made to fit: hashes, positions, heads, states, log."""
        heads: dict[str, tuple[str, int, int]] = {}
        blocks: dict[str, tuple[str, int]] = {}
        rows = []
        for seq, envelope in enumerate(envelopes):
            subject, mutation = envelope["subject"], envelope["mutation"]
            trace = subject["trace_id"]
            previous, length, turns = heads.get(trace, ("sha256:" + "0" * 64, 0, 0))
            if signer is not None:
                subject["position"], subject["turn_index"] = length, min(subject["turn_index"], turns)
                subject["key_id"] = STOLEN.key_id if signer is STOLEN else signer.key_id
                current = envelope_hash(envelope, previous)
                integrity = {"previous": previous, "current": current, "signature": signer.sign(current)}
                envelope["integrity"] = {**integrity, "canonical_json": True}
            current = envelope["integrity"]["current"]
            heads[trace] = (current, length + 1, max(turns, subject["turn_index"] + 1))
            blocks[mutation["block_id"]] = (mutation["diff"]["after_hash"], seq)
            letta = subject["metadata"]["letta"]
            body = envelope_line(envelope)
            rows.append(
                (
                    *(seq, trace, length, current, seq, letta["nonce"], subject["turn_index"]),
                    *(
                        subject["timestamp_utc"],
                        mutation["block_id"],
                        mutation["block_label"],
                        mutation["mutation_kind"],
                    ),
                    *(letta.get("event"), letta.get("agent_id"), letta.get("run_id"), body, leaf_hash(body.encode())),
                )
            )
        self.sql("delete from phionyx_envelope")
        for row in rows:
            self.sql(f"insert into phionyx_envelope values ({','.join('?' * len(row))})", *row)
        self.sql("delete from phionyx_chain")
        for trace, state in heads.items():
            self.sql("insert into phionyx_chain(trace_id, head, length, turns) values (?, ?, ?, ?)", trace, *state)
        for (block,) in self.sql("select block_id from phionyx_block"):
            if block not in blocks:
                self.sql("delete from phionyx_block where block_id = ?", block)
        for block, state in blocks.items():
            self.sql("update phionyx_block set after_hash = ?, seq = ? where block_id = ?", *state, block)
        self.sql("delete from phionyx_log")
        self.sql("delete from phionyx_checkpoint")


def edit_a_body(attacker: Attacker) -> None:
    attacker.sql("update phionyx_envelope set body = replace(body, 'memory_insert', 'human_operator') where seq = 5")


def relabel(signer: Ed25519Signer | None) -> Callable[[Attacker], None]:
    """Another agent's tool is said to have made a write, and everything after it is made to fit."""

    def attack(attacker: Attacker) -> None:
        envelopes = attacker.bodies()
        envelopes[5]["subject"]["metadata"]["letta"]["tool"] = "human_operator"
        attacker.rewrite(envelopes, signer)

    return attack


def delete_from_the_middle(attacker: Attacker) -> None:
    attacker.sql("delete from phionyx_envelope where seq = 5")


def cut_the_end(attacker: Attacker) -> None:
    attacker.rewrite(attacker.bodies()[:-2], None)


def remove_a_chain(attacker: Attacker) -> None:
    attacker.rewrite([one for one in attacker.bodies() if one["subject"]["trace_id"] != "agent-b"], None)


def reorder(attacker: Attacker) -> None:
    """Two neighbours of different chains: nothing in them says which came first."""
    envelopes = attacker.bodies()
    envelopes[5], envelopes[6] = envelopes[6], envelopes[5]
    attacker.rewrite(envelopes, None)


def insert_without_a_key(attacker: Attacker) -> None:
    forged = json.loads(json.dumps(attacker.bodies()[5]))
    forged["subject"]["metadata"]["letta"]["nonce"] = "0" * 32
    forged["integrity"]["current"] = envelope_hash(forged, forged["integrity"]["previous"])
    attacker.rewrite([*attacker.bodies(), forged], None)


def insert_with(signer: Ed25519Signer) -> Callable[[Attacker], None]:
    def attack(attacker: Attacker) -> None:
        envelopes = attacker.bodies()
        forged = json.loads(json.dumps(envelopes[5]))
        last = next(one for one in reversed(envelopes) if one["mutation"]["block_id"] == forged["mutation"]["block_id"])
        diff, state = forged["mutation"]["diff"], last["mutation"]["diff"]
        diff["before_hash"] = diff["after_hash"] = state["after_hash"]
        forged["subject"]["metadata"]["letta"]["nonce"] = "0" * 32
        attacker.rewrite([*envelopes, forged], signer)

    return attack


def replay_across_agents(attacker: Attacker) -> None:
    """A genuine envelope of one agent, moved into another's chain."""
    attacker.sql(
        "update phionyx_envelope set trace_id = 'agent-b', position = 4 where trace_id = 'agent-a' and position = 3"
    )
    attacker.sql("update phionyx_chain set length = length + 1 where trace_id = 'agent-b'")


def strip_the_signatures(attacker: Attacker) -> None:
    attacker.sql(
        "update phionyx_envelope set body = substr(body, 1, instr(body, '\"signature\":\"') + 12) || 'unsigned'"
        " || substr(body, instr(body, '\"},\"memory_consolidation_audit'))"
    )


def wipe(attacker: Attacker) -> None:
    attacker.rewrite([], None)


def set_back(attacker: Attacker) -> None:
    """The whole database as it was earlier, all of the plugin's tables with it."""
    shutil.copy(attacker.world.path.with_suffix(".old"), attacker.world.path)


def set_back_and_go_on(attacker: Attacker) -> None:
    """And then the agents write on, sealed with the genuine key by a sealer that was started anew."""
    set_back(attacker)
    world = attacker.world
    world.ledger.close()
    world.ledger = SqlLedger(f"sqlite:///{world.path}")
    world.values = {f"block-{one}": f"{one} 2" for one in "abc"}
    world.sealer = world.new_sealer()
    for turn in range(6):
        world.write("block-a", f"other {turn}", "agent-a", deliver=False)


def edit_what_stands_beside(statement: str) -> Callable[[Attacker], None]:
    return lambda attacker: attacker.sql(statement) and None


#: attack -> what is seen with nothing, with the public key, with the key and checkpoints from outside
ATTACKS: dict[str, tuple[Callable[[Attacker], None], tuple[bool, bool, bool]]] = {
    "edit a stored envelope": (edit_a_body, (True, True, True)),
    "relabel who wrote, hashes left as they were": (relabel(None), (True, True, True)),
    "relabel who wrote, everything after it re-hashed and signed with another key": (
        relabel(OTHER),
        (False, True, True),
    ),
    "the same with the stolen key": (relabel(STOLEN), (False, False, True)),
    "delete from the middle": (delete_from_the_middle, (True, True, True)),
    "reorder two writes of different agents": (reorder, (False, False, True)),
    "insert a copy with a new nonce, without a key": (insert_without_a_key, (True, True, True)),
    "append a forged envelope, signed with another key": (insert_with(OTHER), (False, True, True)),
    "append a forged envelope, signed with the stolen key": (insert_with(STOLEN), (False, False, False)),
    "replay one agent's envelope in another's chain": (replay_across_agents, (True, True, True)),
    "strip all signatures": (strip_the_signatures, (True, True, True)),
    "cut the end, heads made to fit": (cut_the_end, (False, False, True)),
    "remove a whole chain": (remove_a_chain, (False, False, True)),
    "wipe the ledger": (wipe, (False, False, True)),
    "set the database back to an older state": (set_back, (False, False, True)),
    "set it back and let the agents write on": (set_back_and_go_on, (False, False, True)),
    "change a column that queries use": (
        edit_what_stands_beside("update phionyx_envelope set agent_id = 'agent-z' where seq = 3"),
        (True, True, True),
    ),
    "change a hash that proofs are made from": (
        edit_what_stands_beside("update phionyx_envelope set leaf = x'00' where seq = 3"),
        (True, True, True),
    ),
    "change a chain's head": (
        edit_what_stands_beside("update phionyx_chain set head = 'sha256:0' where trace_id = 'agent-a'"),
        (True, True, True),
    ),
}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    for agent in ("a", "b", "c"):
        for turn in range(3):
            made.write(f"block-{agent}", f"{agent} {turn}", f"agent-{agent}")
    with closing(sqlite3.connect(made.path)) as database:
        database.execute("pragma wal_checkpoint(truncate)")
    shutil.copy(made.path, made.path.with_suffix(".old"))
    for agent in ("a", "b", "c"):
        made.write(f"block-{agent}", f"{agent} 3", f"agent-{agent}")
    with closing(sqlite3.connect(made.path)) as database:
        database.execute("pragma wal_checkpoint(truncate)")
    yield made
    made.ledger.close()


def test_the_untouched_ledger_is_valid_and_covered_to_its_end(world: World) -> None:
    report = world.verify(key=True, checkpoint=True)
    assert report.verdict == "valid", report.findings
    assert (report.dimensions["checkpoint"], report.covered, report.envelopes) == ("ok", 12, 12)


@pytest.mark.parametrize("name", ATTACKS)
def test_what_is_seen_of_an_attack(name: str, world: World) -> None:
    attack, expected = ATTACKS[name]
    attacker = Attacker(world)
    attack(attacker)
    attacker.database.close()
    reports = [
        world.verify(key=key, checkpoint=outside) for key, outside in ((False, False), (True, False), (True, True))
    ]
    assert tuple(report.verdict == "failed" for report in reports) == expected, [one.findings for one in reports]
    if expected == (False, False, True):
        assert reports[2].dimensions["checkpoint"] == "failed"


def test_a_cut_is_seen_at_every_position(world: World) -> None:
    envelopes = Attacker(world).bodies()
    for kept in range(len(envelopes)):
        attacker = Attacker(world)
        attacker.rewrite(envelopes[:kept], None)
        attacker.database.close()
        report = world.verify(key=True, checkpoint=True)
        assert report.verdict == "failed"
        assert f"{kept} envelopes" in str(report.findings)


def test_the_findings_name_the_place(world: World) -> None:
    attacker = Attacker(world)
    relabel(STOLEN)(attacker)
    attacker.database.close()
    report = world.verify(key=True, checkpoint=True)
    assert "envelopes 5 to 5 in the sealing order" in str(report.findings), report.findings


def test_a_rollback_is_refused_by_the_sink_and_by_the_running_sealer(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    set_back(Attacker(world))
    world.values["block-a"] = "a 2"
    world.write("block-a", "other", "agent-a", deliver=False)
    assert "the database was set back" in caplog.text
    assert world.verify(key=True, checkpoint=True).verdict == "failed"


def test_the_table_in_the_docs_is_this_one() -> None:
    rows = re.findall(r"^\| (.+?) \| (\S+) \| (\S+) \| (\S+) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {row[0]: tuple(cell == "seen" for cell in row[1:]) for row in rows if row[1] in ("seen", "–")}
    assert documented == {name: expected for name, (_, expected) in ATTACKS.items()}
