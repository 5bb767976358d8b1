"""A database with Letta's tables, and the processes that propose, without a server: sessions are written as Letta writes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.signing import generate_key

LLM = {
    "model": "gpt-4o-mini",
    "model_endpoint_type": "openai",
    "context_window": 8000,
    "handle": "openai-proxy/gpt-4o-mini",
}
EMBEDDING = {
    "embedding_model": "none",
    "embedding_endpoint_type": "openai",
    "embedding_dim": 8,
}


@dataclass
class QueueRig:
    """The database, and what may be put into it."""

    url: str
    home: Path
    settings: dict[str, str]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def sql(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as connection:
            done = connection.execute(statement, values or None)
            return done.fetchall() if done.description else []

    def agent(self, *, kind: str = "letta_v1_agent", tag: str | None = None) -> str:
        agent, block = f"agent-{uuid.uuid4()}", f"block-{uuid.uuid4()}"
        with psycopg.connect(self.url) as connection:
            connection.execute(
                "insert into organizations(id, name, created_at, updated_at, is_deleted, privileged_tools) "
                "values ('org-1', 'one', now(), now(), false, false) on conflict do nothing"
            )
            connection.execute(
                "insert into agents(id, name, agent_type, llm_config, embedding_config, organization_id, created_at, updated_at, "
                "is_deleted, message_buffer_autoclear) values (%s, 'a', %s, %s, %s, 'org-1', now(), now(), false, false)",
                (agent, kind, json.dumps(LLM), json.dumps(EMBEDDING)),
            )
            connection.execute(
                'insert into block(id, label, value, "limit", is_template, preserve_on_migration, read_only, organization_id, hidden, '
                "created_at, updated_at, is_deleted, version) "
                "values (%s, 'human', '', 5000, false, false, false, 'org-1', false, now(), now(), false, 1)",
                (block,),
            )
            connection.execute(
                "insert into blocks_agents(agent_id, block_id, block_label) values (%s, %s, 'human')", (agent, block)
            )
            if tag:
                connection.execute("insert into agents_tags(agent_id, tag) values (%s, %s)", (agent, tag))
        return agent

    def run(
        self,
        agent: str,
        *said: str,
        ended: bool = True,
        noted: bool = True,
        age: float = 10,
        stop_reason: str = "end_turn",
        run_type: str | None = None,
    ) -> str:
        """A run of the agent in which the user said this, `age` seconds ago."""
        run = f"run-{uuid.uuid4()}"
        with psycopg.connect(self.url) as connection:
            connection.execute(
                "insert into runs(id, status, completed_at, stop_reason, agent_id, organization_id, metadata_, created_at, "
                "updated_at, is_deleted) values (%s, %s, case when %s then now() end, %s, %s, 'org-1', %s, "
                "now() - make_interval(secs => %s), now() - make_interval(secs => %s), false)",
                (
                    *(run, "completed" if ended else "running", ended, stop_reason if ended else None, agent),
                    *(json.dumps({"run_type": run_type} if run_type else {}), age, age),
                ),
            )
            for text in said:
                content = json.dumps([{"type": "text", "text": text}])
                connection.execute(
                    "insert into messages(id, role, content, tool_calls, agent_id, run_id, organization_id, created_at, "
                    "updated_at, is_deleted, sequence_id) values (%s, 'user', %s, '[]', %s, %s, 'org-1', now(), now(), false, "
                    "(select coalesce(max(sequence_id), 0) + 1 from messages))",
                    (f"message-{uuid.uuid4()}", content, agent, run),
                )
            if noted:
                connection.execute(
                    "insert into phionyx_run(run_id, ended_at) values (%s, now() - make_interval(secs => %s))",
                    (run, age),
                )
        return run

    def start(self, **more: str) -> subprocess.Popen[str]:
        """A process that proposes, as a worker starts it; its input is held open by this one."""
        process = subprocess.Popen(
            [sys.executable, "-m", "phionyx_letta.plugin.sessions"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **self.settings, **more},
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({"url": self.url, "name": "test"}) + "\n")
        process.stdin.flush()
        self.processes.append(process)
        return process

    def kill(self, process: subprocess.Popen[str]) -> None:
        """SIGKILL it, and let its lease run out at once."""
        process.kill()
        process.wait()
        self.expire(process)

    def expire(self, process: subprocess.Popen[str]) -> None:
        self.sql(
            "update phionyx_session set claimed_until = now() - interval '1 second' where claimed_by like %s",
            f"%/{process.pid}",
        )

    def command(self, *arguments: str, code: int = 0) -> Any:
        """The JSON of a command on this database."""
        command = [Path(sys.executable).with_name("phionyx-letta"), *arguments, "--ledger", self.url, "--json"]
        done = subprocess.run(command, env={**os.environ, **self.settings}, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout)

    def states(self) -> dict[str, int]:
        return dict(self.sql("select state, count(*) from phionyx_session group by state"))

    def patches(self, agent: str | None = None) -> list[dict[str, Any]]:
        found = self.sql(
            "select body from phionyx_patch where newest and file_path like %s order by seq", f"letta:{agent or ''}%"
        )
        return [json.loads(body) for (body,) in found]

    def wait(self, ready: Callable[[], object], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, self.sql("select * from phionyx_session")
            time.sleep(0.1)


@contextmanager
def queue(url: str, model_url: str, home: Path, **more: str) -> Iterator[QueueRig]:
    """A queue in this database, whose sessions are single runs and whose proposer is the scripted model; `more` goes over that."""
    if not (home / "key").exists():
        generate_key(home / "key")
    settings = {
        "PHIONYX_LETTA_SIGNING_KEY": str(home / "key"),
        "PHIONYX_LETTA_SESSIONS": "on",
        "PHIONYX_LETTA_SESSION_END": "run",
        "PHIONYX_LETTA_SESSION_THRESHOLD": "1",
        "PHIONYX_LETTA_SESSION_MIN_CHARS": "10",
        "PHIONYX_LETTA_SESSION_PROPOSER": "openai",
        "PHIONYX_LETTA_PROPOSER_MODEL": "gpt-4o-mini",
        "PHIONYX_LETTA_PROPOSER_BASE_URL": model_url,
        "PHIONYX_LETTA_PROPOSER_ATTEMPTS": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        **more,
    }
    SqlLedger(url).close()  # makes the tables
    rig = QueueRig(url, home, settings)
    try:
        yield rig
    finally:
        for process in rig.processes:
            process.kill()
            process.communicate()


@dataclass(frozen=True)
class Drained:
    """How a queue was emptied: seconds, and the most memory of the process in kB, after a quarter and at all."""

    seconds: float
    early_kb: int
    peak_kb: int


def drain(rig: QueueRig, agent: str, said: str, sessions: int) -> Drained:
    """Let one process empty a queue of so many sessions, in each of which the user said this and 4 000 characters more."""
    text = said + "\n" + "And we talked about many other things. " * 100
    for _ in range(sessions):
        rig.run(agent, text)
    began, process = time.monotonic(), rig.start(PHIONYX_LETTA_SESSION_TOKENS="0")
    early = peak = done = 0
    while done < sessions:
        assert time.monotonic() - began < 300 + sessions, rig.sql("select state, detail from phionyx_session")
        assert process.poll() is None, "the process ended"
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = max(peak, int(status.split("VmRSS:")[1].split()[0]))
        done = rig.states().get("done", 0)
        early = early if done > sessions // 4 and early else peak
        time.sleep(0.2)
    return Drained(time.monotonic() - began, early, peak)
