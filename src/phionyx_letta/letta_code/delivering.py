"""The ledger's newest checkpoint, brought to the sinks that are set: after it was signed, and again where one did not take it."""

from __future__ import annotations

from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.ledger.log.keeper import SinkKeeper
from phionyx_letta.ledger.log.opening import open_sinks
from phionyx_letta.ledger.log.sink import Published
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.ledger.tree import stored_checkpoint
from phionyx_letta.plugin.checkpointing import CheckpointPolicy, checkpoint_policy
from phionyx_letta.plugin.runtime import PluginKey
from phionyx_letta.settings import Settings

__all__ = ["check_sinks", "deliver", "deliver_again"]

_TIMEOUT = 20.0  # s, for all sinks together


def check_sinks(key: PluginKey, settings: Settings) -> None:
    """Before anything is recorded: can the sinks that are set be any?

    Raises:
        SettingsError: one cannot.
    """
    policy = checkpoint_policy(key, settings)
    if policy is not None:
        open_sinks(settings.sinks, [policy.public_key], header=settings.sink_header)


def deliver(
    ledger: SqlLedger, policy: CheckpointPolicy, settings: Settings, signed: tuple[Checkpoint, str]
) -> bool | None:
    """Offer a checkpoint to every sink; return whether each took it, None without sinks.

    Raises:
        SettingsError: a sink that is set cannot be one.
    """
    sinks = open_sinks(settings.sinks, [policy.public_key], header=settings.sink_header)
    if not sinks:
        return None
    keeper = SinkKeeper(sinks, cosigned=lambda one, note: ledger.keep_cosigned(one.checkpoint.origin, one.note, note))
    keeper.publish(Published(*signed, ledger.consistency_proof))
    return keeper.close(timeout=_TIMEOUT)


def deliver_again(ledger: SqlLedger, key: PluginKey, settings: Settings) -> bool | None:
    """Offer the newest checkpoint that the ledger keeps; None where there is none, or no sink.

    Raises:
        SettingsError: a sink that is set cannot be one.
    """
    policy = checkpoint_policy(key, settings)
    if policy is None or not settings.sinks:
        return None
    with ledger.engine.connect() as connection:
        signed = stored_checkpoint(connection, policy.origin, [policy.public_key])
    return None if signed is None else deliver(ledger, policy, settings, signed)
