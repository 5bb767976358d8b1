"""A real git repository as an agent's memory, a ledger beside it, and what must hold of both at any time."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

from phionyx_letta import Ed25519Signer
from phionyx_letta.ledger.audit import AuditReport
from phionyx_letta.ledger.audit_sql import verify_ledger
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.letta_code.changes import file_name
from phionyx_letta.letta_code.ingest import AgentReport, Recorder
from phionyx_letta.plugin.runtime import PluginKey

AGENT = "agent-0c0de000-0000-4000-8000-000000000001"
SIGNER = Ed25519Signer("22" * 32)
KEY = PluginKey(SIGNER, "the tests")
EMPTY = "sha256:" + hashlib.sha256().hexdigest()
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_AUTHOR_NAME": "Agent",
    "GIT_AUTHOR_EMAIL": f"{AGENT}@letta.com",
    "GIT_COMMITTER_NAME": "Agent",
    "GIT_COMMITTER_EMAIL": f"{AGENT}@letta.com",
    "GIT_EDITOR": "true",
    "GIT_SEQUENCE_EDITOR": "true",
}


class Memory:
    """One agent's memory repository, driven with git itself."""

    def __init__(self, path: Path, *, new: bool = True) -> None:
        self.path = path
        if new:
            path.mkdir(parents=True)
            self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str, given: bytes | None = None, fails: bool = False) -> str:
        command = ["git", "-C", str(self.path), "-c", "protocol.file.allow=always", *arguments]
        done = subprocess.run(command, input=given, capture_output=True, env=ENVIRONMENT, timeout=60)
        assert fails or done.returncode == 0, done.stderr.decode()
        return done.stdout.decode("utf-8", "surrogateescape").strip()

    def write(self, name: str | bytes, text: str | bytes) -> None:
        path = os.path.join(os.fsencode(self.path), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)

    def commit(self, files: dict[Any, str | bytes | None], message: str = "a change", *arguments: str) -> str:
        for name, text in files.items():
            if text is None:
                os.unlink(os.path.join(os.fsencode(self.path), os.fsencode(name)))
            else:
                self.write(name, text)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message, *arguments)
        return self.head()

    def head(self) -> str:
        return self.git("rev-parse", "HEAD")

    def raw(self, name: str) -> bytes:
        """The bytes of an object as git has them."""
        kind = self.git("cat-file", "-t", name)
        command = ["git", "-C", str(self.path), "cat-file", kind, name]
        return subprocess.run(command, capture_output=True, env=ENVIRONMENT, check=True).stdout

    def files(self, commit: str = "HEAD") -> dict[str, str]:
        """What a commit holds: names as the ledger writes them, and hashes."""
        command = ["git", "-C", str(self.path), "ls-tree", "-r", "-z", commit]
        listed = subprocess.run(command, capture_output=True, env=ENVIRONMENT, check=True).stdout
        found = {}
        for line in listed.split(b"\0")[:-1]:
            (_, kind, oid), path = line.partition(b"\t")[0].split(), line.partition(b"\t")[2]
            show = ["git", "-C", str(self.path), "cat-file", "blob", oid.decode()]
            data = oid if kind == b"commit" else subprocess.run(show, capture_output=True, check=True).stdout
            found[file_name(path)] = "sha256:" + hashlib.sha256(data).hexdigest()
        return found


class Recorded:
    """A ledger, and what it says of the agent."""

    def __init__(self, ledger: SqlLedger, **options: Any) -> None:
        self.ledger = ledger
        self.options = options

    def ingest(self, memory: Memory, agent: str = AGENT) -> AgentReport:
        return Recorder(self.ledger, KEY, **self.options).record(agent, memory.path)

    def envelopes(self, agent: str = AGENT) -> list[dict[str, Any]]:
        return list(self.ledger.iter_chain(agent))

    def told(self, agent: str = AGENT) -> list[tuple[str, str, str]]:
        """(path, kind, event) of each envelope."""
        return [
            (letta(one).get("path", "history"), one["mutation"]["mutation_kind"], letta(one)["event"])
            for one in self.envelopes(agent)
        ]

    def commits(self, agent: str = AGENT) -> list[str]:
        """The commits recorded as such, in order, each once."""
        runs = [letta(one)["run_id"] for one in self.envelopes(agent)]
        return list(dict.fromkeys(run.removeprefix("commit:") for run in runs if run.startswith("commit:")))

    def history(self, agent: str = AGENT) -> list[dict[str, Any]]:
        return [letta(one) for one in self.envelopes(agent) if "path" not in letta(one)]

    def state(self, agent: str = AGENT) -> dict[str, str]:
        """What the envelopes say the memory holds now."""
        found: dict[str, str] = {}
        for one in self.envelopes(agent):
            if "path" not in letta(one):
                continue
            if one["mutation"]["mutation_kind"] == "delete":
                found.pop(letta(one)["path"], None)
            else:
                found[letta(one)["path"]] = one["mutation"]["diff"]["after_hash"]
        return found

    def audit(self) -> AuditReport:
        return verify_ledger(self.ledger, verifier=SIGNER.verifier())

    def agrees_with(self, memory: Memory, agent: str = AGENT) -> None:
        """The ledger verifies, links, and holds what HEAD holds."""
        report = self.audit()
        assert report.verdict == "valid", report.findings
        assert report.dimensions["block_linkage"] == "ok", report.findings
        assert self.state(agent) == memory.files()


def letta(envelope: dict[str, Any]) -> dict[str, Any]:
    found = envelope["subject"]["metadata"]["letta"]
    assert isinstance(found, dict)
    return found


def raw_tree(memory: Memory, entries: list[tuple[str, bytes, str]]) -> str:
    data = b"".join(mode.encode() + b" " + name + b"\0" + bytes.fromhex(oid) for mode, name, oid in entries)
    return memory.git("hash-object", "-t", "tree", "-w", "--literally", "--stdin", given=data)


def set_head(memory: Memory, tree: str) -> None:
    parent = memory.git("rev-parse", "--verify", "--quiet", "HEAD", fails=True)
    parents = ["-p", parent] if parent else []
    memory.git("update-ref", "refs/heads/main", memory.git("commit-tree", tree, *parents, "-m", "m"))


def blob(memory: Memory, data: bytes) -> str:
    return memory.git("hash-object", "-w", "--stdin", given=data)
