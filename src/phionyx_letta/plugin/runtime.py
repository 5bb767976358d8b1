"""What one armed process knows: its settings, its key, what it captured, what it could not.

One instance per process, made at activation and shared by capture, sealer and heartbeat. Imports nothing of Letta.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from phionyx_letta.errors import EvidenceRefused, PhionyxError, SigningKeyError
from phionyx_letta.plugin.outbox import OutboxKey
from phionyx_letta.settings import Settings
from phionyx_letta.signing import Signer, UnsignedSigner, generate_key, get_signer

logger = logging.getLogger("phionyx_letta")


@dataclass(frozen=True)
class PluginKey:
    """The signing key of this process and the outbox key derived from it."""

    signer: Signer
    outbox: OutboxKey
    source: str

    @property
    def public_key(self) -> str | None:
        """Of an Ed25519 key, as 64 hex digits; None for one that has none."""
        return getattr(self.signer, "public_key_hex", None)


def load_key(settings: Settings) -> PluginKey:
    """The key this process signs with.

    From PHIONYX_LETTA_SIGNING_KEY (or PHIONYX_LETTA_DEMO=1); without either, from ``signing.key`` in PHIONYX_LETTA_HOME,
    which is generated at the first start, so that one setting turns the plugin on.

    Raises:
        PhionyxError: the key is malformed, or none is set and none can be generated; the message says how to mend it.
    """
    signer: Signer = get_signer()
    source = "PHIONYX_LETTA_SIGNING_KEY" if settings.signing_key else "PHIONYX_LETTA_DEMO"
    if isinstance(signer, UnsignedSigner):
        path = settings.home_path() / "signing.key"
        _generate(path)
        signer = get_signer({"PHIONYX_LETTA_SIGNING_KEY": str(path), "PHIONYX_LETTA_KEY_ID": settings.key_id or ""})
        source = str(path)
    return PluginKey(signer, OutboxKey.of(signer), source)


def _generate(path: Path) -> None:
    """Make the key file if it is missing; workers that start together agree on one."""
    public_path = path.with_name(path.name + ".pub")
    if not path.exists():
        try:
            public = generate_key(path)
        except SigningKeyError as error:
            if not path.exists():
                raise SigningKeyError(
                    f"no signing key is set and none can be generated: {error.message}",
                    remedy="run `phionyx-letta keygen FILE` and set PHIONYX_LETTA_SIGNING_KEY=FILE, "
                    "or set PHIONYX_LETTA_HOME to a folder this user can write",
                ) from error
        else:
            logger.warning(
                "phionyx-letta generated a signing key: %s (public key %s). "
                "Keep it, and give it to every host of this database.",
                path,
                public,
            )
    for _ in range(40):  # the public key is written last: another worker may be between the two
        if public_path.exists():
            return
        time.sleep(0.05)


class Runtime:
    """Counters and failures of one process, and the rule what a failure means for Letta's write."""

    def __init__(self, settings: Settings) -> None:
        """Load the key; a key that cannot be loaded is an answer (``key_error``), not an exception."""
        self.settings = settings
        self.worker_id = ""
        self.key: PluginKey | None = None
        self.key_error: str | None = None
        self.counts: Counter[str] = Counter()
        self.gaps: deque[dict[str, Any]] = deque(maxlen=20)
        self.targets: dict[str, str] = {}
        self.new_worker()
        try:
            self.key = load_key(settings)
        except PhionyxError as error:
            self.key_error = str(error)
            logger.error("phionyx-letta cannot record anything: %s", error)

    def new_worker(self) -> None:
        """Take a new worker id: at start, and in the child after a fork."""
        self._lock = threading.Lock()  # a fork may have copied it while another thread held it
        self.worker_id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.counts.clear()
        self.gaps.clear()

    def captured(self, rows: int) -> None:
        """Count rows written to the outbox (not yet committed)."""
        with self._lock:
            self.counts["captured"] += rows

    def gap(self, what: str, block_ids: Iterable[str], cause: object = None) -> None:
        """A write goes on without evidence (``open``), or not at all (``closed``).

        Raises:
            EvidenceRefused: in closed mode. Letta's transaction is rolled back by it.
        """
        detail = f"{what}: {cause}" if cause is not None else what
        blocks = list(block_ids)
        if self.settings.on_error == "closed":
            raise EvidenceRefused(
                f"the memory write was refused, because it cannot be recorded ({detail})",
                remedy="run `phionyx-letta doctor` on this host; PHIONYX_LETTA_ON_ERROR=open lets writes go on unrecorded",
            )
        with self._lock:
            self.counts["gaps"] += 1
            self.gaps.append({"at": datetime.now(UTC).isoformat(), "what": detail[:500], "block_ids": blocks[:50]})
        logger.error("phionyx-letta: a memory write of %s went on without evidence: %s", blocks or "a block", detail)

    @contextmanager
    def guarded(self, what: str, block_ids: Iterable[str]) -> Iterator[None]:
        """Our own failures never reach Letta in open mode.

        Raises:
            EvidenceRefused: in closed mode, for any failure of the body.
        """
        try:
            yield
        except EvidenceRefused:
            raise
        except Exception as error:
            self.gap(what, block_ids, f"{type(error).__name__}: {error}")
