"""A ledger as the sealer writes it, bundles of it, and both verifiers over one file: they have to agree, whatever it is."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from phionyx_letta import Ed25519Signer
from phionyx_letta.evidence import container
from phionyx_letta.evidence.exporting import write_bundle
from phionyx_letta.evidence.verifying import read_history, verify_bundle
from phionyx_letta.keys import Keyring
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.audit import AuditReport
from phionyx_letta.ledger.audit_log import read_outside
from phionyx_letta.ledger.gathering import gather
from phionyx_letta.ledger.log.reading import read_statements
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.plugin.attribution import Attribution
from phionyx_letta.plugin.checkpointing import CheckpointPolicy
from phionyx_letta.plugin.mutation import BlockColumns, block_change
from phionyx_letta.plugin.runtime import PluginKey
from phionyx_letta.plugin.sealer import Sealer

Members = dict[str, bytes]
SCRIPT = Path(container.__file__).with_name("verify_evidence.py")
ORIGIN = "test/log"
HOLDER, FOREIGN = Ed25519Signer("11" * 32), Ed25519Signer("22" * 32)
CODES = {"valid": 0, "failed": 1, "not_measured": 2}


class History:
    """A SQLite ledger with a sealer; three agents write their own blocks and one they share."""

    def __init__(self, folder: Path, signer: Ed25519Signer = HOLDER, origin: str = ORIGIN) -> None:
        self.path = folder / "ledger.db"
        self.ledger = SqlLedger(f"sqlite:///{self.path}")
        self.outside = folder / "checkpoints"
        self.values: dict[str, str] = {}
        self.notes: list[str] = []
        self.use(signer, origin)

    def use(self, signer: Ed25519Signer, origin: str = ORIGIN) -> None:
        """Seal with this key from now on."""
        self.key = PluginKey(signer, "test")
        self.sealer = Sealer(self.ledger, self.key, checkpoints=CheckpointPolicy(origin, signer.public_key_hex))

    def write(self, agent: str, block: str, value: str) -> None:
        before = self.values.get(block)
        columns = [None if one is None else BlockColumns(one, "human", None, 5000, False) for one in (before, value)]
        change = block_change(block, *columns, Attribution(agent_id=agent, tool="memory_insert"), organization_id="org")
        assert change is not None
        payload, mac = self.key.outbox.seal(change)
        with self.ledger.engine.begin() as connection:
            connection.execute(tables.outbox.insert().values(payload=payload, mac=mac))
        self.values[block] = value
        report = self.sealer.seal_pending()
        assert report.sealed == 1
        if report.checkpoint is not None:
            self.notes.append(report.checkpoint[1])

    def live(self, turns: Iterable[int]) -> History:
        for turn in turns:
            for agent in ("agent-a", "agent-b", "agent-c"):
                self.write(agent, f"block-{agent}", f"{agent} {turn}")
                self.write(agent, "block-shared", f"{agent} {turn}")
        return self

    def bundle(self, path: Path, traces: Sequence[str] = (), keys: Sequence[str] | None = None) -> Path:
        """Write a bundle; all checkpoints there ever were are in it."""
        public = [self.key.signer.public_key_hex] if keys is None else keys  # type: ignore[attr-defined]
        with gather(self.ledger, traces) as material:
            write_bundle(path, material, public_keys=public, checkpoints=self.notes, created_utc="2026-01-01T00:00:00Z")
        return path


def read(path: Path) -> Members:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def write(path: Path, members: Members, **claims: Any) -> Path:
    """Zip the members as an attacker does who makes the manifest fit; `claims` go into it as they are."""
    manifest = json.loads(members["manifest.json"])
    lines = members["envelopes.jsonl"].count(b"\n")
    if "log.txt" in members:
        whole, size = layout_of(members["log.txt"])
        manifest.update(log_size=size, whole=whole)
    else:
        manifest.update(log_size=None, whole=False)
    sums = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in members.items()
        if name != "manifest.json"
    }
    manifest.update(envelopes=lines, members=sums)
    manifest.update(claims)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in {**members, "manifest.json": json.dumps(manifest).encode()}.items():
            file.writestr(name, data)
    return path


def layout_of(layout: bytes) -> tuple[bool, int]:
    words = [line.split() or [""] for line in layout.decode(errors="replace").splitlines()]
    size = 0
    for word in words:
        if len(word) > 1 and word[1].isdigit():
            size += int(word[1]) if word[0] == "envelopes" else 1 << min(int(word[1]), 80)
    return len(words) < 2 and all(word[0] == "envelopes" for word in words), size


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("verify_evidence", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["verify_evidence"] = module
    spec.loader.exec_module(module)
    return module


script = _script()


def judged(
    path: Path, *roots: str, outside: Sequence[Path] = (), statements: Sequence[Path] = (), check: Any = None
) -> AuditReport:
    """Verify with both and return our report; they must not differ in verdict, dimensions, counts or coverage."""
    ring = Keyring(list(roots)) if roots else None
    points = None
    if ring is not None:
        for source in [*outside, *statements]:
            ring.learn(read_statements(source))
        if outside:
            ring = ring.extended(read_history(path))
            points = read_outside([str(one) for one in outside], ring.public_keys, ring)
    ours = verify_bundle(path, keys=ring, outside=points)
    given = script.Given(
        list(roots), check or script.by_cryptography(), [str(one) for one in statements], [str(one) for one in outside]
    )
    theirs = script.verify(str(path), given)
    assert theirs.verdict == ours.verdict, (ours.findings, theirs)
    assert theirs.dimensions == ours.dimensions, (ours.findings, theirs.findings)
    assert (theirs.covered, theirs.envelopes, theirs.chains) == (ours.covered, ours.envelopes, ours.chains)
    assert bool(theirs.reason) == bool(ours.reason)
    return ours


def lines(members: Members) -> list[bytes]:
    return members["envelopes.jsonl"].splitlines(keepends=True)


def with_lines(members: Members, changed: Sequence[bytes]) -> Members:
    """Other envelopes, and a layout that fits them."""
    layout = f"envelopes {len(changed)}\n".encode() if changed else b""
    return {**members, "envelopes.jsonl": b"".join(changed), "log.txt": layout}


def edited(line: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """One line with its JSON changed, everything else left alone."""
    envelope = json.loads(line)
    change(envelope)
    return json.dumps(envelope, sort_keys=True, separators=(",", ":")).encode() + b"\n"
