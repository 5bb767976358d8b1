"""Ledgers and keys for the tests of the command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_helpers import Key, changes

from phionyx_letta import Ed25519Signer, FilesystemEnvelopeStore, generate_key, get_signer
from phionyx_letta.ledger.sql import SqlLedger


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the caller's settings, and a home of our own."""
    for name in list(os.environ):
        if name.startswith(("PHIONYX_LETTA_", "LETTA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def key(tmp_path: Path) -> Key:
    path = tmp_path / "keys" / "signing.key"
    public = generate_key(path)
    signer = get_signer({"PHIONYX_LETTA_SIGNING_KEY": str(path)})
    assert isinstance(signer, Ed25519Signer)
    return Key(path, public, signer)


@pytest.fixture
def database(tmp_path: Path, key: Key) -> Path:
    path = tmp_path / "ledger.db"
    ledger = SqlLedger(f"sqlite:///{path}")
    for ctx in changes():
        ledger.emit(ctx, signer=key.signer, memory_audit_parent_ref="envelope://sha256:" + "ab" * 32)
    ledger.close()
    return path


@pytest.fixture
def store(tmp_path: Path, key: Key) -> Path:
    root = tmp_path / "store"
    for ctx in changes():
        FilesystemEnvelopeStore(root).emit(ctx, signer=key.signer)
    return root
