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
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from phionyx_letta.errors import (
    DiffConflictError,
    EvidenceRefused,
    PhionyxError,
    SigningKeyError,
    TargetRefused,
    UntrustedPatch,
)
from phionyx_letta.ledger.salts import SaltKey
from phionyx_letta.plugin.outbox import OutboxKey
from phionyx_letta.plugin.salting import Salting
from phionyx_letta.settings import Settings
from phionyx_letta.signing import (
    Ed25519Verifier,
    Signer,
    UnsignedSigner,
    Verifier,
    generate_key,
    get_signer,
    load_verifier,
)

logger = logging.getLogger("phionyx_letta")

#: The same finding is logged and kept again after so long, s.
_TELL_AGAIN = 60.0


@dataclass(frozen=True)
class PluginKey:
    """The signing key of this process."""

    signer: Signer
    source: str

    @cached_property
    def outbox(self) -> OutboxKey:
        """The key derived from it that authenticates the outbox's rows.

        Raises:
            SigningKeyError: the secret it is derived from can be neither read nor made.
        """
        return OutboxKey.of(self.signer)

    @property
    def public_key(self) -> str | None:
        """Of an Ed25519 key, as 64 hex digits; None for one that has none."""
        return getattr(self.signer, "public_key_hex", None)

    def verifier(self) -> Verifier | None:
        """What checks this key's signatures."""
        if self.public_key is not None:
            return _verifier(self.public_key)
        own = getattr(self.signer, "verifier", None)
        return own() if own is not None else None

    def made(self, signed: str, signature: str) -> bool:
        """Whether this key made a signature."""
        if self.public_key is None:  # a shared secret: signing again tells
            return self.signer.sign(signed) == signature
        return _verifier(self.public_key).verify(signed, signature)


@lru_cache(maxsize=4)
def _verifier(public_key: str) -> Ed25519Verifier:
    return load_verifier(public_key)


def load_key(settings: Settings) -> PluginKey:
    """The key this process signs with.

    From PHIONYX_LETTA_SIGNING_KEY, PHIONYX_LETTA_SIGNING_COMMAND or PHIONYX_LETTA_DEMO=1; without any of them, from
    ``signing.key`` in PHIONYX_LETTA_HOME, which is generated at the first start, so that one setting turns the plugin on.

    Raises:
        PhionyxError: the key is malformed, or none is set and none can be generated; the message says how to mend it.
    """
    signer: Signer = get_signer()
    source = "PHIONYX_LETTA_SIGNING_KEY" if settings.signing_key else "PHIONYX_LETTA_DEMO"
    source = "PHIONYX_LETTA_SIGNING_COMMAND" if settings.signing_command else source
    if isinstance(signer, UnsignedSigner):
        path = settings.home_path() / "signing.key"
        _generate(path)
        signer = get_signer({"PHIONYX_LETTA_SIGNING_KEY": str(path), "PHIONYX_LETTA_KEY_ID": settings.key_id or ""})
        source = str(path)
    return PluginKey(signer, source)


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
        self.salting: Salting | None = None
        self.counts: Counter[str] = Counter()
        self.gaps: deque[dict[str, Any]] = deque(maxlen=20)
        self.refused: deque[dict[str, Any]] = deque(maxlen=20)
        self.untold: deque[dict[str, Any]] = deque(maxlen=1000)
        self._told: dict[str, float] = {}
        self.new_worker()
        try:
            key = load_key(settings)
            _ = key.outbox  # a secret that cannot be had is told now, not with the first mutation
            self.key = key
        except PhionyxError as error:
            self.key_error = str(error)
            logger.error("phionyx-letta cannot record anything: %s", error)
        if settings.commitments == "salted":
            self.salt()

    def new_worker(self) -> None:
        """Take a new worker id: at start, and in the child after a fork."""
        self._lock = threading.Lock()  # a fork may have copied it while another thread held it
        self.worker_id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.counts.clear()
        self.gaps.clear()
        self.refused.clear()

    def read_checked(self) -> None:
        """Count a guarded read."""
        with self._lock:
            self.counts["reads_checked"] += 1

    def read_refused(self, what: str, *, refused: bool) -> None:
        """Count a read that is not what was recorded, log it, and keep it for `doctor` and `log`; the same one once a minute."""
        finding = {"at": datetime.now(UTC).isoformat(timespec="microseconds"), "what": what, "refused": refused}
        now = time.monotonic()
        with self._lock:
            self.counts["reads_refused"] += 1
            if now - self._told.get(what, float("-inf")) < _TELL_AGAIN:
                return
            self._told = {text: at for text, at in self._told.items() if now - at < _TELL_AGAIN} | {what: now}
            self.refused.append(finding)
            self.untold.append(finding)
        logger.error("phionyx-letta: %s%s", "" if refused else "(report only) ", what)

    def salt(self) -> None:
        """Commit to content under salts from now on: the setting says so, or the ledger has salts already."""
        if self.salting is None and self.key is not None:
            if self.settings.include_diff_text:
                logger.warning("phionyx-letta: this ledger is salted, so the text of changes is not kept")
            if self.settings.guard != "off":
                logger.error(
                    "phionyx-letta: this ledger is salted, and guarded reads cannot compare it: set PHIONYX_LETTA_GUARD=off"
                )
            self.salting = Salting(SaltKey.of(self.key.signer))

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
            DiffConflictError, UntrustedPatch: the write is not the one a reviewer decided about, or not his to decide about.
            TargetRefused: the write has to wait for a reviewer.
        """
        try:
            yield
        except (EvidenceRefused, DiffConflictError, UntrustedPatch, TargetRefused):
            raise
        except Exception as error:
            self.gap(what, block_ids, f"{type(error).__name__}: {error}")
