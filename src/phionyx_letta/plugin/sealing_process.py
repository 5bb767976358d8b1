"""The sealer in a process of its own, started by each armed worker and ending with it (docs/adr/0001).

In a thread of the server it shared the interpreter with the agents and slowed their writes; a process of its own costs
them nothing. It reads where the ledger is from standard input, and takes the end of that input, which comes however the
worker dies, as the sign to seal what is left and go.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import asdict

from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.errors import PhionyxError
from phionyx_letta.ledger.lineage import own_keys
from phionyx_letta.ledger.log.keeper import SinkKeeper
from phionyx_letta.ledger.log.opening import open_sinks
from phionyx_letta.ledger.log.sink import Published
from phionyx_letta.ledger.rollback import current_origin
from phionyx_letta.ledger.rollback_sql import own_rollbacks
from phionyx_letta.ledger.salts import SaltKey
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.ledger.tree import stored_checkpoint
from phionyx_letta.plugin.baseline import record_baseline
from phionyx_letta.plugin.checkpointing import CheckpointPolicy, checkpoint_policy, trusted_hosts
from phionyx_letta.plugin.child_process import ChildProcess
from phionyx_letta.plugin.runtime import PluginKey, load_key, logger
from phionyx_letta.plugin.sealer import Sealer
from phionyx_letta.settings import Settings, load_settings

#: Wait after a failure, and between looks for blocks without a record while some are left, s.
_RETRY = 1.0
#: How long a worker waits for its sealer at the end, s; the rows it leaves are sealed at the next start.
_FAREWELL = 5.0
#: How often the standing of the sinks is written for `doctor`, s.
_TELL = 5.0


class SealingProcess(ChildProcess):
    """The worker's handle on its sealer."""

    def __init__(self, url: str) -> None:
        """Nothing is started yet; ``url`` is the ledger's."""
        super().__init__(__name__, {"url": url}, farewell=_FAREWELL)


def seal_until(stop: threading.Event, ledger: SqlLedger, key: PluginKey, settings: Settings) -> None:
    """Take the baseline and seal until told to stop, then seal what is left.

    Raises:
        LedgerUnavailable: the database does not answer; nothing is lost, call again.
    """
    policy = checkpoint_policy(key, settings)
    sealer = Sealer(ledger, key, batch=settings.batch, checkpoints=policy, trusted=trusted_hosts(settings))
    sinks = _Sinks(ledger, key, settings, policy)
    try:
        _seal(stop, sealer, ledger, key, settings, sinks)
        sinks.publish(sealer.sign_last())
    finally:
        sinks.close()


class _Sinks:
    """Where this process brings checkpoints, and how they stand, written where `doctor` can read it."""

    def __init__(self, ledger: SqlLedger, key: PluginKey, settings: Settings, policy: CheckpointPolicy | None) -> None:
        self._ledger = ledger
        self._key_id = key.outbox.key_id
        self._told = 0.0
        sinks = []
        if policy is not None and settings.sinks:
            try:
                sinks = open_sinks(settings.sinks, [policy.public_key], header=settings.sink_header)
            except PhionyxError as error:
                logger.error("phionyx-letta: checkpoints go nowhere: %s", error)
        self._keeper = SinkKeeper(sinks, cosigned=self._cosigned)
        if policy is not None and sinks:
            with ledger.engine.connect() as connection:
                origin = current_origin(policy.origin, own_rollbacks(connection, key.signer))
                self.publish(stored_checkpoint(connection, origin, own_keys(connection, policy.public_key)))

    def publish(self, signed: tuple[Checkpoint, str] | None) -> None:
        """Offer a checkpoint to every sink."""
        if signed is not None:
            self._keeper.publish(Published(*signed, self._ledger.consistency_proof))

    def tell(self) -> None:
        """Write how the sinks stand, every few seconds."""
        if time.monotonic() - self._told < _TELL or not self._keeper.states():
            return
        self._told = time.monotonic()
        self._write()

    def close(self) -> None:
        """Deliver what waits."""
        self._keeper.close(_FAREWELL / 2)
        with contextlib.suppress(PhionyxError):
            self._write()

    def _write(self) -> None:
        named: dict[str, str] = {}
        for state in self._keeper.states():  # two paths of one host have one name: a path may be a secret
            same = sum(name.partition(" (")[0] == state.name for name in named)
            named[f"{state.name} ({same + 1})" if same else state.name] = json.dumps(asdict(state))
        self._ledger.tell_sinks(self._key_id, named)

    def _cosigned(self, published: Published, note: str) -> None:
        """Keep a witness's cosignatures beside the checkpoint they are about."""
        self._ledger.keep_cosigned(published.checkpoint.origin, published.note, note)


def _seal(
    stop: threading.Event, sealer: Sealer, ledger: SqlLedger, key: PluginKey, settings: Settings, sinks: _Sinks
) -> None:
    baseline_at = None if settings.baseline == "off" else 0.0
    salts, salted = SaltKey.of(key.signer), settings.commitments == "salted"
    while not stop.is_set():
        if baseline_at is not None and time.monotonic() >= baseline_at:
            prompts = settings.guard != "off"
            left = record_baseline(
                ledger, key.outbox, f"baseline:{os.getpid()}", salts=salts, salted=salted, prompts=prompts
            )
            baseline_at = time.monotonic() + (0 if left > 1 else _RETRY) if left else None
        if sealer.due() or ledger.has_pending():
            sinks.publish(sealer.seal_pending().checkpoint)
        sinks.tell()
        stop.wait(settings.poll_ms / 1000)
    sinks.publish(sealer.seal_pending().checkpoint)


def main() -> None:
    """Entry point of the process: one JSON line with the ledger's URL on standard input, then nothing until the end."""
    logging.basicConfig(format="%(name)s - %(levelname)s - %(message)s")
    with contextlib.suppress(OSError):
        os.nice(10)  # where all cores are busy, the agents go first; rows can wait
    stop = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server; its end closes our input
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    line = sys.stdin.readline()
    if not line:
        return
    url = json.loads(line)["url"]
    threading.Thread(target=_wait_for_end, args=(stop,), daemon=True).start()
    settings = load_settings()
    key = load_key(settings)
    failing = ""
    while True:  # also when told to stop before the first round: what is left is sealed first
        try:
            with contextlib.closing(SqlLedger(url, ping=False)) as ledger:
                seal_until(stop, ledger, key, settings)
            return
        except Exception as error:  # whatever it is, rows wait in the outbox and nothing is lost by trying again
            message = f"{type(error).__name__}: {error}"
            if message != failing:
                logger.error("phionyx-letta: the sealer waits for the ledger: %s", message)
            failing = message
            if stop.wait(_RETRY):
                return


def _wait_for_end(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


if __name__ == "__main__":
    main()
