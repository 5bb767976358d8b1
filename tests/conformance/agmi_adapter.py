"""The adapter with which agmi (PyPI ``agent-memory-integrity``) attacks a Letta that this package guards.

Runs inside a process that may import Letta, with the plugin armed; see ``run_agmi.py``. The attacker edits Letta's rows with
psycopg; a snapshot is every table of the database, ours included, and the plugin is closed while it is put back. What the
attacker does not have is the folder of checkpoints and the key. Each store is a new schema, key and folder; ``reload`` closes
the plugin and starts it again, so that nothing it held in memory is left.

With ``AGMI_GUARD=off`` reads are not guarded, and the answer is that of ``phionyx-letta verify``.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import letta.orm
import psycopg
from agmi.adapters.base import MemoryAdapter, Record
from letta.orm.base import Base
from letta.schemas.block import Block, BlockUpdate
from letta.server.db import engine
from letta.services.block_manager import BlockManager
from letta.services.organization_manager import OrganizationManager
from letta.services.user_manager import UserManager
from sqlalchemy import text

from phionyx_letta.ledger.log.reading import read_checkpoints
from phionyx_letta.plugin import activation
from phionyx_letta.signing import generate_key

URL = os.environ["LETTA_PG_URI"]
GUARDED = os.environ.get("AGMI_GUARD", "reject") == "reject"
COLUMNS = ("id", "block_id", "sequence_number", "value", "label", "limit", "actor_type", "actor_id", "organization_id")
#: What Letta says where there is nothing left to undo.
BOTTOM = "already at the earliest checkpoint"

Row = dict[str, Any]


class PhionyxLettaAdapter(MemoryAdapter):  # type: ignore[misc]  # agmi has no type hints that are exported
    """Letta's blocks and their checkpoint history, on PostgreSQL."""

    name = "letta+phionyx" if GUARDED else "letta+phionyx (verify)"
    detection_point = "read" if GUARDED else "audit"
    supports_replay = supports_metadata = supports_snapshot = True

    def setup(self) -> None:
        activation.disarm()
        self._folder = Path(tempfile.mkdtemp(prefix="agmi-outside-"))
        self._public = generate_key(self._folder / "key")
        asyncio.run(_new_schema())
        os.environ.update(
            PHIONYX_LETTA_SIGNING_KEY=str(self._folder / "key"),
            PHIONYX_LETTA_SINKS=f"folder:{self._folder}",
            PHIONYX_LETTA_ON_ERROR="closed",
            PHIONYX_LETTA_GUARD="reject" if GUARDED else "off",
        )
        activation.arm()
        self._actor = asyncio.run(_actor())
        self._block = self._other = ""

    def teardown(self) -> None:
        activation.disarm()

    # -- through Letta -------------------------------------------------------------------------------------------

    def seed(self, n: int) -> None:
        self._block = asyncio.run(self._write("human", [f"remembered {i}" for i in range(n)]))

    def seed_other(self, n: int) -> None:
        self._other = asyncio.run(self._write("persona", [f"somebody else's {i}" for i in range(n)]))

    async def _write(self, label: str, values: list[str]) -> str:
        manager = BlockManager()
        block = await manager.create_or_update_block_async(Block(label=label, value=values[0]), self._actor)
        for value in values:
            if value != values[0]:
                await manager.update_block_async(block.id, BlockUpdate(value=value), self._actor)
            await manager.checkpoint_block_async(block.id, self._actor)
        return block.id

    def append_genuine(self) -> None:
        async def append() -> None:
            manager = BlockManager()
            await manager.update_block_async(self._block, BlockUpdate(value="remembered last"), self._actor)
            await manager.checkpoint_block_async(self._block, self._actor)

        asyncio.run(append())
        self._wait_until_outside()  # what is newer than the newest checkpoint outside is the documented window

    def _wait_until_outside(self) -> None:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            waiting = _sql("select count(*) from phionyx_outbox")[0]["count"]
            sealed = _sql("select count(*) from phionyx_envelope")[0]["count"]
            if not waiting and sealed == max((size for size in self._outside_sizes()), default=0):
                return
            time.sleep(0.05)
        raise RuntimeError("the newest write is not outside after 30 s")

    def _outside_sizes(self) -> list[int]:
        records = read_checkpoints(self._folder, [self._public]) if (self._folder / "checkpoints").exists() else ()
        return [record.signed.checkpoint.size for record in records if record.signed]

    def reload(self) -> None:
        activation.disarm()
        activation.arm()

    def verify(self) -> bool:
        self.verify_detail = None
        try:
            asyncio.run(self._walk()) if GUARDED else self._audit()
        except Exception as error:
            self.verify_detail = f"{type(error).__name__}: {error}"
        return self.verify_detail is None

    async def _walk(self) -> None:
        """Read the block, go back to its first checkpoint and forward again."""
        manager = BlockManager()
        if await manager.get_block_by_id_async(self._block, self._actor) is None:
            raise LookupError("the block is gone")
        steps = 0
        try:
            while True:
                await manager.undo_checkpoint_block(self._block, self._actor)
                steps += 1
        except Exception as error:
            if BOTTOM not in str(error):
                raise
        for _ in range(steps):
            await manager.redo_checkpoint_block(self._block, self._actor)

    def _audit(self) -> None:
        """The command, as an auditor runs it: public key and checkpoints, no secret."""
        self._wait_until_sealed()
        command = [Path(sys.executable).with_name("phionyx-letta"), "verify", URL, "--key", self._public, "--json"]
        done = subprocess.run([*command, "--checkpoint", self._folder], capture_output=True, text=True, check=False)
        report = json.loads(done.stdout)
        if report["verdict"] != "valid":
            raise AssertionError("; ".join(finding["message"] for finding in report["findings"]) or report["reason"])

    def _wait_until_sealed(self) -> None:
        while _sql("select 1 from phionyx_outbox limit 1"):
            time.sleep(0.05)

    # -- past Letta ----------------------------------------------------------------------------------------------

    def read_all_raw(self) -> list[Record]:
        return [Record(seq=i, fields=row) for i, row in enumerate(_history_of(self._block))]

    def read_other_raw(self) -> list[Record]:
        return [Record(seq=i, fields=row) for i, row in enumerate(_history_of(self._other))]

    def write_raw(self, record: Record) -> None:
        fields, rows = record.fields, _history_of(self._block)
        if record.seq < len(rows):
            self._set_value(rows[record.seq]["id"], fields["value"])
            return
        names = ", ".join(f'"{name}"' for name in COLUMNS)
        marks = ", ".join(["%s"] * len(COLUMNS))
        _sql(f"insert into block_history ({names}) values ({marks})", *(fields[name] for name in COLUMNS))
        self._point_to(fields["id"], fields["value"])

    def _set_value(self, row_id: str, value: str) -> None:
        """Change a checkpoint, and the block itself if it stands on it."""
        _sql("update block_history set value = %s where id = %s", value, row_id)
        _sql("update block set value = %s where id = %s and current_history_entry_id = %s", value, self._block, row_id)

    def _point_to(self, row_id: str, value: str) -> None:
        _sql("update block set current_history_entry_id = %s, value = %s where id = %s", row_id, value, self._block)

    def delete_raw(self, seq: int) -> None:
        rows = _history_of(self._block)
        victim, left = rows[seq], [row for row in rows if row is not rows[seq]]
        on_it = _sql("select 1 from block where id = %s and current_history_entry_id = %s", self._block, victim["id"])
        if on_it:
            self._point_to(left[-1]["id"], left[-1]["value"])
        _sql("delete from block_history where id = %s", victim["id"])

    def replay_onto(self, victim_seq: int, donor: Record) -> None:
        self._set_value(_history_of(self._block)[victim_seq]["id"], donor.fields["value"])

    def read_meta(self, seq: int) -> Row:
        row = _history_of(self._block)[seq]
        return {name: row[name] for name in ("actor_id", "actor_type", "organization_id", "label")}

    def write_meta(self, seq: int, meta: Row) -> None:
        row = _history_of(self._block)[seq]
        _sql("update block_history set actor_id = %s where id = %s", f"{meta['actor_id']}-forged", row["id"])

    def identity_of(self, record: Record) -> str:
        return str(record.fields["id"])

    def payload_of(self, record: Record) -> str:
        return str(record.fields["value"])

    def owner_of(self, record: Record) -> str:
        return str(record.fields["block_id"])

    def mutate_payload(self, record: Record) -> Record:
        record.fields["value"] = "forged: " + record.fields["value"]
        return record

    def forge_record(self, template: Record) -> Record:
        number = template.fields["sequence_number"] + 1
        fields = {**template.fields, "id": f"block_hist-{uuid.uuid4()}", "sequence_number": number}
        return self.mutate_payload(Record(seq=template.seq + 1, fields=fields))

    # -- the whole store -----------------------------------------------------------------------------------------

    def snapshot_store(self) -> dict[str, bytes]:
        with psycopg.connect(URL) as connection, connection.cursor() as cursor:
            kept = {}
            for table in _tables():
                with cursor.copy(f'copy "{table}" to stdout (format binary)') as copy:
                    kept[table] = b"".join(copy)
            return kept

    def restore_store(self, token: dict[str, bytes]) -> None:
        activation.disarm()
        with psycopg.connect(URL) as connection, connection.cursor() as cursor:
            cursor.execute("set session_replication_role = replica")  # the tables refer to each other
            for table in _tables():
                cursor.execute(f'delete from "{table}"')
            for table, rows in token.items():
                with cursor.copy(f'copy "{table}" from stdin (format binary)') as copy:
                    copy.write(rows)


def _sql(statement: str, *values: object) -> list[Row]:
    with psycopg.connect(URL, row_factory=psycopg.rows.dict_row) as connection:
        done = connection.execute(statement, values or None)
        return done.fetchall() if done.description else []


def _history_of(block_id: str) -> list[Row]:
    names = ", ".join(f'"{name}"' for name in COLUMNS)
    return _sql(f"select {names} from block_history where block_id = %s order by sequence_number", block_id)


def _tables() -> list[str]:
    return [row["tablename"] for row in _sql("select tablename from pg_tables where schemaname = 'public'")]


async def _new_schema() -> None:
    assert letta.orm  # registers every table
    async with engine.begin() as connection:
        await connection.execute(text("drop schema public cascade"))
        await connection.execute(text("create schema public"))
        await connection.execute(text("create extension if not exists vector"))
        await connection.run_sync(Base.metadata.create_all)


async def _actor() -> Any:
    organization = await OrganizationManager().create_default_organization_async()
    return await UserManager().create_default_actor_async(org_id=organization.id)
