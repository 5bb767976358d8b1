"""One armed process: capture, wrappers, heartbeat and the sealer's process, and how they start, survive a fork and stop."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import socket
import threading
import weakref
from types import ModuleType
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert

from phionyx_letta import __version__
from phionyx_letta.errors import SettingsError, StoreError, UnsupportedLetta
from phionyx_letta.ledger import tables
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.memory.policy import PolicyFile
from phionyx_letta.plugin import headers
from phionyx_letta.plugin.capture import Capture
from phionyx_letta.plugin.guard import Guard
from phionyx_letta.plugin.mutation import RECORDED
from phionyx_letta.plugin.own_model import OwnModel
from phionyx_letta.plugin.propose_only import ProposeOnly
from phionyx_letta.plugin.proposing_process import ProposingProcess
from phionyx_letta.plugin.run_ends import RunEnds
from phionyx_letta.plugin.runtime import Runtime, logger
from phionyx_letta.plugin.sealing_process import SealingProcess
from phionyx_letta.plugin.targets import FOUND, Target, Wrapping, guarded_steps
from phionyx_letta.plugin.watch import LogWatch
from phionyx_letta.settings import load_settings
from phionyx_letta.signing import TrustedKeys, Verifier, load_verifier

#: How often a worker says it lives, s; `doctor` and the sealer call one dead after 30 s of silence.
HEARTBEAT = 5.0
#: Waits between attempts while the database does not answer, s.
_RETRY = 1.0


class Worker:
    """What is armed in this process."""

    def __init__(self, runtime: Runtime, letta_version: str | None) -> None:
        """Use ``start``."""
        self.runtime = runtime
        self.letta_version = letta_version
        self.unsupported: str | None = None
        self.guard: Guard | None = None
        self._propose_only = ProposeOnly(runtime) if runtime.settings.propose_only else None
        self._policy = PolicyFile(runtime.settings.reviewers) if runtime.settings.reviewers else None
        self.wrapping = Wrapping(self._propose_only_targets())
        self.url: str | None = None
        self._capture: Capture | None = None
        self._app: Any = None
        self._thread: threading.Thread | None = None
        self._sealer: SealingProcess | None = None
        self._run_ends: RunEnds | None = None
        self._proposer: ProposingProcess | None = None
        self._own_model = OwnModel(self.runtime.settings.proposer_timeout_s)
        self._sessions_since: str | None = None
        self._watch: LogWatch | None = None
        self._stop = threading.Event()

    @classmethod
    def start(cls, orm: ModuleType, letta_version: str | None) -> Worker:
        """Begin to capture.

        Raises:
            SettingsError: a variable has an unusable value.
            UnsupportedLetta: in closed mode, the models do not have what capture needs.
        """
        worker = cls(Runtime(load_settings()), letta_version)
        worker.unsupported = _unfit(orm)
        if worker.unsupported is None:
            if worker.runtime.settings.sessions != "off" and hasattr(orm, "Run"):
                worker._run_ends = RunEnds(worker.runtime, orm)
            worker._capture = Capture(worker.runtime, orm, worker._run_ends, worker._propose_only)
            worker._capture.install()
            worker._install_guard(orm)
        elif worker.runtime.settings.on_error == "closed" or worker.runtime.settings.guard == "reject":
            raise UnsupportedLetta(worker.unsupported, remedy="install letta==0.16.8, or unset PHIONYX_LETTA_ENABLE")
        else:
            logger.error("phionyx-letta captures nothing: %s; install letta==0.16.8", worker.unsupported)
        if letta_version not in _supported() and worker.unsupported is None:
            logger.warning(
                "phionyx-letta was not tested with letta %s; `phionyx-letta doctor` shows what it found", letta_version
            )
        _survive_fork(worker)
        return worker

    def _install_guard(self, orm: ModuleType) -> None:
        if self.runtime.settings.guard == "off":
            return
        if self.runtime.key is None and self.runtime.settings.guard == "reject":
            raise SettingsError(
                f"PHIONYX_LETTA_GUARD=reject needs the signing key: {self.runtime.key_error}",
                "run `phionyx-letta keygen FILE` and set PHIONYX_LETTA_SIGNING_KEY=FILE",
            )
        if self.runtime.key is not None:
            self.guard = Guard(self.runtime, orm)
            self.guard.install()
            self.wrapping = Wrapping((*self._propose_only_targets(), *guarded_steps(self.guard.around_step)))

    def _propose_only_targets(self) -> tuple[Target, ...]:
        return self._propose_only.targets() if self._propose_only is not None else ()

    def connect(self, database: ModuleType) -> None:
        """Letta's database is known: make the tables, start the sealer."""
        self.url = _letta_url(database)
        if self._propose_only is not None:
            self._propose_only.connect(self.url, database)
        try:
            self._open(self.url).close()
        except StoreError as error:
            logger.error("phionyx-letta: %s", error)  # the thread goes on trying
        self._start_thread()
        self._start_watch()

    def wrap(self, module: ModuleType) -> None:
        """Wrap what this module has of the targets."""
        self.wrapping.wrap_module(module)
        for name, status in self.wrapping.status.items():
            if status != FOUND:
                if name.endswith("._step") and self.runtime.settings.guard == "reject":
                    raise UnsupportedLetta(
                        f"{name} is {status} in this Letta, so a step cannot be guarded",
                        remedy="install letta==0.16.8, or set PHIONYX_LETTA_GUARD=report",
                    )
                if name in (one.name for one in self._propose_only_targets()):
                    raise UnsupportedLetta(
                        f"{name} is {status} in this Letta, so an agent's writes cannot be queued",
                        remedy="install letta==0.16.8, or unset PHIONYX_LETTA_PROPOSE_ONLY",
                    )
                logger.warning("phionyx-letta: %s is %s in this Letta; it is left out", name, status)

    def watch_requests(self, app: Any) -> None:
        """Read the request headers."""
        if self._app is None:
            self._app = app
            _say_goodbye_at_sigterm()
            if self._capture is None:  # without it nothing compares what is written: nobody may decide here
                headers.watch(app, None, None, self._serving, armed=False)
            else:
                headers.watch(app, self._trusted(), self._policy, self._serving)

    def _deciding(self) -> dict[str, Any] | None:
        """Who may decide about patches, and why nobody may; None where there is no policy."""
        if self._policy is None:
            return None
        names = [one.name for one in self._policy.current().reviewers]
        return {"file": self._policy.path, "names": names, "fault": self._policy.fault}

    def _trusted(self) -> Verifier | None:
        """Whose claims on a write count where there is no policy: this server's own key and those it trusts beside it."""
        settings = self.runtime.settings
        trusted: list[Verifier] = [load_verifier(key) for key in settings.trusted_keys.split()]
        own = self.runtime.key.verifier() if self.runtime.key is not None else None
        both = [*trusted, *([own] if own is not None else [])]
        return TrustedKeys(both) if both else None

    def _serving(self, loop: asyncio.AbstractEventLoop) -> None:
        """The server's event loop is known."""
        self._own_model.loop = loop

    def stop(self) -> None:
        """Restore every original and stop the thread; what is in the outbox stays."""
        self._stop.set()
        if self._capture is not None:
            self._capture.uninstall()
        if self.guard is not None:
            self.guard.uninstall()
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self.wrapping.unwrap_all()
        if self._propose_only is not None:
            self._propose_only.close()
        if self._app is not None:
            headers.unwatch(self._app)
            self._app = None
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=10)
        self._thread = None

    def after_fork(self) -> None:
        """In the child: threads are gone, and so is the right to the parent's connections."""
        self.runtime.new_worker()
        self._stop = threading.Event()
        self._thread = None
        if self._sealer is not None:
            self._sealer.disown()
            self._sealer = None
        if self._proposer is not None:
            self._proposer.disown()
            self._proposer = None
        if self._run_ends is not None:
            self._run_ends.restart()
        if self._propose_only is not None:
            self._propose_only.restart()
        if self.guard is not None:
            self.guard.restart()
            self._watch = None
        if self.url is not None and self._capture is not None:
            self._start_thread()
            self._start_watch()

    def describe(self) -> dict[str, Any]:
        """What `doctor` shows of this process."""
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "version": __version__,
            "letta": self.letta_version,
            "unsupported": self.unsupported,
            "on_error": self.runtime.settings.on_error,
            "salted": self.runtime.salting is not None,
            "key": self.runtime.key.outbox.key_id if self.runtime.key else None,
            "key_source": self.runtime.key.source if self.runtime.key else None,
            "key_error": self.runtime.key_error,
            "sealer_pid": self._sealer.pid if self._sealer else None,
            "targets": {
                target.name: self.wrapping.status.get(target.name, "not imported") for target in self.wrapping.targets
            },
            "captured": self.runtime.counts["captured"],
            "gaps": self.runtime.counts["gaps"],
            "last_gaps": list(self.runtime.gaps),
            "guard": self.runtime.settings.guard,
            "reads_checked": self.runtime.counts["reads_checked"],
            "reads_refused": self.runtime.counts["reads_refused"],
            "last_refused": list(self.runtime.refused),
            "log": self._watch.describe() if self._watch else None,
            "sessions": self.runtime.settings.sessions,
            "proposer_pid": self._proposer.pid if self._proposer else None,
            "reviewers": self._deciding(),
            "run_ends_missed": self.runtime.counts["run_ends_missed"],
            **self._runs_under_way(),
        }

    def _runs_under_way(self) -> dict[str, Any]:
        """What the sweep for dead runs goes by (``session_queue``)."""
        if self._run_ends is None or self._sessions_since is None:
            return {}
        return {"sessions_since": self._sessions_since, "active_runs": self._run_ends.active()}

    def _start_watch(self) -> None:
        if self.guard is not None and self.url is not None and self._watch is None and not self._stop.is_set():
            self._watch = LogWatch(self.url, self.runtime, self.guard)
            self._watch.start()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        if self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, name="phionyx-letta-worker", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Beat, keep the sealer alive, and go on after every failure: the database may be away for a while."""
        stop, ledger, failing = self._stop, None, ""
        assert self.url is not None
        while not stop.is_set():
            try:
                ledger = ledger or self._open(self.url)
                self._supervise()
                self._supervise_proposer(ledger)
                self._beat(ledger)
                failing = ""
            except Exception as error:  # nothing that happens here may end the thread
                message = f"{type(error).__name__}: {error}"
                if message != failing:
                    logger.error("phionyx-letta: the ledger does not answer: %s", message)
                failing = message
            stop.wait(HEARTBEAT if not failing else _RETRY)
        if ledger is not None:
            self._leave(ledger)  # first: who ends this process may not wait for the two
        if self._proposer is not None:
            self._proposer.stop()
        if self._sealer is not None:
            self._sealer.stop()

    def _open(self, url: str) -> SqlLedger:
        """The ledger; if it has salts, this process salts too, whatever its setting says."""
        ledger = SqlLedger(url)
        if ledger.salted():
            self.runtime.salt()
        return ledger

    def _supervise(self) -> None:
        """Start the sealer's process, and start it again when it ended."""
        if self.runtime.key is None or not self.runtime.settings.sealer or self.url is None:
            return
        if self._sealer is None:
            self._sealer = SealingProcess(self.url)
        if not self._sealer.alive():
            self._sealer.start()

    def _supervise_proposer(self, ledger: SqlLedger) -> None:
        """Start the process that proposes, and start it again when it ended."""
        if self._run_ends is None or self.runtime.key is None or self.url is None:
            return
        if self._sessions_since is None:
            with ledger.engine.connect() as connection:
                self._sessions_since = connection.execute(select(func.now())).scalar_one().isoformat()
        if self._proposer is None:
            self._proposer = ProposingProcess(self.url, self.runtime.worker_id, self._own_model.ask)
        if not self._proposer.alive():
            self._proposer.start()

    def _beat(self, ledger: SqlLedger) -> None:
        key = self.runtime.key
        values = {
            "worker_id": self.runtime.worker_id,
            "seen_at": func.now(),  # the database's clock: those of the hosts may differ
            "armed": self._capture is not None,
            # what this worker can seal: another host's sealer leaves rows under this key to it
            "key_id": key.outbox.key_id if key and self.runtime.settings.sealer else None,
            "info": json.dumps(self.describe()),
        }
        statement = insert(tables.worker).values(values)
        changed = {name: value for name, value in values.items() if name != "worker_id"}
        with ledger.engine.begin() as connection:
            connection.execute(statement.on_conflict_do_update(index_elements=["worker_id"], set_=changed))
            if self.runtime.salting is not None:
                self.runtime.salting.forget_destroyed(connection)

    def _leave(self, ledger: SqlLedger) -> None:
        try:
            with ledger.engine.begin() as connection:
                if self._sessions_since is not None and self._run_ends is not None:
                    from phionyx_letta.plugin.session_queue import note_ends

                    note_ends(connection, self._run_ends.active())  # nobody else knows that they end here
                connection.execute(delete(tables.worker).where(tables.worker.c.worker_id == self.runtime.worker_id))
        except Exception as error:
            logger.warning("phionyx-letta: this worker could not sign off: %s", error)
        ledger.close()


def _unfit(orm: ModuleType) -> str | None:
    """Why these models cannot be watched; None if they can."""
    for name in ("Block", "BlocksAgents", "Agent", "BlockHistory", "Message"):
        if not hasattr(orm, name):
            return f"letta.orm has no {name}"
    missing = [name for name in RECORDED if name not in orm.Block.__table__.c]
    return f"the table block has no column {', '.join(missing)}" if missing else None


def _supported() -> tuple[str, ...]:
    from phionyx_letta.plugin.activation import SUPPORTED

    return SUPPORTED


def _letta_url(database: ModuleType) -> str:
    """The URI of Letta's own engine, with its password."""
    return str(database.engine.url.render_as_string(hide_password=False))


_alive: weakref.WeakSet[Worker] = weakref.WeakSet()
_registered = False


def _survive_fork(worker: Worker) -> None:
    global _registered
    _alive.add(worker)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_fork_all)
        atexit.register(_stop_all)


def _fork_all() -> None:
    for worker in list(_alive):
        worker.after_fork()


def _stop_all() -> None:
    for worker in list(_alive):
        worker.stop()


def _say_goodbye_at_sigterm() -> None:
    """uvicorn lets a server finish and then raises the signal again, which ends the process before ``atexit`` has its turn."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _told_to_end)


def _told_to_end(number: int, _frame: object) -> None:
    _stop_all()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
