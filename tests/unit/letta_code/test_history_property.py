"""Whatever is done to a repository and whenever it is recorded: the ledger verifies and says what HEAD holds."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from code_rig import Memory, Recorded, letta
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phionyx_letta.ledger.sql import SqlLedger

pytestmark = pytest.mark.slow

FILES = ["a.md", "notes/b.md", "c.md"]
OPERATIONS = st.tuples(
    st.sampled_from(
        [
            *("write", "write", "append", "delete", "rename", "amend", "reset", "merge", "rebase", "detach", "back"),
            *("branch", "other", "raw", "expire", "gc", "empty", "record", "record"),
        ]
    ),
    st.integers(0, 5),
)


class Repository(Memory):
    """Does one operation; what git refuses is given up."""

    count = 0

    def do(self, operation: str, number: int) -> None:
        self.count += 1
        name = FILES[number % 3]
        there = (self.path / name).is_file()
        if operation == "write" or (operation in ("append", "delete", "rename") and not there):
            self.commit({name: f"{number} {self.count}\n"})
        elif operation == "append":
            self.commit({name: (self.path / name).read_bytes() + b"more\n"})
        elif operation == "delete":
            self.commit({name: None})
        elif operation == "rename":
            self.git("mv", "-f", name, f"moved{number}.md", fails=True)
            self.commit({})
        elif operation == "amend":
            self.commit({name: f"amended {self.count}\n"}, "amended", "--amend")
        elif operation == "empty":
            self.commit({})
        else:
            self.move(operation, number)

    def move(self, operation: str, number: int) -> None:
        commands = {
            "reset": ["reset", "-q", "--hard", f"HEAD~{number % 3}"],
            "merge": ["merge", "-q", "-X", "ours", "--allow-unrelated-histories", "-m", "merged", "side"],
            "rebase": ["rebase", "-q", "-X", "ours", "side"],
            "detach": ["checkout", "-q", "--detach"],
            "back": ["checkout", "-q", "-f", "main"],
            "branch": ["branch", "-f", "side", f"HEAD~{number % 3}"],
            "other": ["checkout", "-q", "-f", "side"],
            "expire": ["reflog", "expire", "--expire=now", "--all"],
            "gc": ["gc", "-q", "--prune=now"],
        }
        if operation == "raw":
            old = self.git("rev-parse", "--verify", "--quiet", f"HEAD~{number % 3}", fails=True)
            ref = self.git("symbolic-ref", "--quiet", "HEAD", fails=True)
            if old and ref and (self.path / ".git" / ref).is_file():
                (self.path / ".git" / ref).write_text(old + "\n")
            self.git("reset", "-q", "--hard")
            return
        self.git(*commands[operation], fails=True)
        for started in ("merge", "rebase"):
            self.git(started, "--abort", fails=True)


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(st.lists(OPERATIONS, min_size=4, max_size=12))
def test_the_ledger_says_what_the_history_is(operations: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        memory = Repository(Path(folder) / "memory")
        memory.commit({"a.md": "first\n"})
        with closing(SqlLedger(f"sqlite:///{folder}/ledger.db")) as ledger:
            recorded = Recorded(ledger)
            for operation, number in operations:
                if operation == "record":
                    recorded.ingest(memory)
                    assert recorded.state() == memory.files()
                else:
                    memory.do(operation, number)
            recorded.ingest(memory)
            recorded.agrees_with(memory)
            assert recorded.ingest(memory).envelopes == 0
            everything_is_accounted_for(memory, recorded)


def everything_is_accounted_for(memory: Memory, recorded: Recorded) -> None:
    """Each commit of the branch that changed something is recorded, or named by the merge that brought it."""
    named = set(recorded.commits())
    for one in recorded.envelopes():
        named.update(letta(one).get("merged", []))
    for commit in memory.git("rev-list", "--first-parent", "HEAD").split():
        changed = memory.git("diff-tree", "--root", "--no-commit-id", "-m", "--first-parent", "--name-only", commit)
        assert commit in named or not changed
