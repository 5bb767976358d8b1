"""When and what a sealer signs of the log: checkpoints, in the transaction that grew it or in one of their own."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import Connection

from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.errors import SigningKeyError
from phionyx_letta.ledger.lineage import own_keys
from phionyx_letta.ledger.rollback import current_origin
from phionyx_letta.ledger.rollback_sql import own_rollbacks
from phionyx_letta.ledger.tree import LogWriter, default_origin, stored_checkpoint
from phionyx_letta.plugin.runtime import PluginKey, logger
from phionyx_letta.settings import Settings
from phionyx_letta.signing import Signer, load_verifier

__all__ = ["CheckpointPolicy", "CheckpointSigner", "checkpoint_policy", "trusted_hosts"]


@dataclass(frozen=True)
class CheckpointPolicy:
    """When a checkpoint of the log is signed; always in the transaction of a batch, or in one of its own."""

    origin: str
    public_key: str
    """Of the sealer's key: what is stored under the origin counts if this key signed it."""
    every: int = 1
    """Envelopes."""
    seconds: float | None = None
    """The longest a grown log goes without one."""


def checkpoint_policy(key: PluginKey, settings: Settings) -> CheckpointPolicy | None:
    """When this key signs checkpoints; None for a key that cannot, which is not one of Ed25519."""
    if key.public_key is None:
        return None
    origin = settings.log_origin or default_origin(str(key.signer.key_id))
    return CheckpointPolicy(origin, key.public_key, settings.checkpoint_every, settings.checkpoint_seconds)


def trusted_hosts(settings: Settings) -> list[str]:
    """Public keys of the other hosts on the database; one that is none is named in the log and left out."""
    found = []
    for name in settings.trusted_keys.split():
        try:
            found.append(load_verifier(name).public_key_hex)
        except SigningKeyError as error:
            logger.error("phionyx-letta: a key of PHIONYX_LETTA_TRUSTED_KEYS is not used: %s", error)
    return found


class CheckpointSigner:
    """Signs the log as transactions leave it; knows no more of the ledger than the size that was signed last."""

    def __init__(self, policy: CheckpointPolicy, signer: Signer) -> None:
        """Nothing is read yet.

        Args:
            policy: when it signs.
            signer: signs.
        """
        self._policy, self._signer = policy, signer
        self._origin = policy.origin  # of the log since the last accepted rollback
        self._signed_size: int | None = None  # of the log in its newest checkpoint; None: not asked yet
        self._grown_since: float | None = None  # when the log outgrew it
        self._went_back = False  # it was seen shorter than in a checkpoint: signing on would fork it

    def overdue(self) -> bool:
        """Whether the log has gone without a checkpoint for as long as it may."""
        seconds, since = self._policy.seconds, self._grown_since
        return seconds is not None and since is not None and time.monotonic() - since >= seconds

    def sign_due(self, connection: Connection, log: LogWriter) -> tuple[Checkpoint, str] | None:
        """Sign the log as this transaction leaves it, where that is due; the checkpoint and its note."""
        signed = self.sign(connection, log, every=1 if self.overdue() else self._policy.every)
        if signed is None and self._grown_since is None:
            self._grown_since = time.monotonic()
        return signed

    def committed(self, checkpoint: Checkpoint) -> None:
        """The transaction in which it was signed holds."""
        self._signed_size, self._grown_since = checkpoint.size, None

    def sign(self, connection: Connection, log: LogWriter, *, every: int = 1) -> tuple[Checkpoint, str] | None:
        """Sign the log if it grew by `every` envelopes since its newest checkpoint, and never where it went back."""
        origin = current_origin(self._policy.origin, own_rollbacks(connection, self._signer))
        if origin != self._origin:
            logger.warning("phionyx-letta: a rollback was accepted: the log goes on as %r", origin)
            self._origin, self._signed_size, self._went_back = origin, None, False
        if self._signed_size is None:
            stored = stored_checkpoint(connection, origin, own_keys(connection, self._policy.public_key))
            self._signed_size = stored[0].size if stored else 0
        if not log.whole:
            return None  # it was said why
        if log.size < self._signed_size and not self._went_back:
            self._went_back = True
            logger.error(
                "phionyx-letta: the log had %s envelopes in its last checkpoint and has %s now: the database was set back, or "
                "envelopes were removed. No checkpoint is signed until that is resolved: `phionyx-letta verify` says more; after "
                "a restore that was meant, `phionyx-letta reconcile --accept-rollback`",
                self._signed_size,
                log.size,
            )
        if self._went_back or log.size < self._signed_size + every:
            return None
        return log.issue(self._signer, origin)
