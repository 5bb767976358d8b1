"""Reflogs that are padded, torn, forged or silent: HEAD is followed all the same, and what was not read is told."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
from code_rig import AGENT, ENVIRONMENT, KEY, SIGNER, Memory, Recorded, blob, letta

from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.letta_code import repository as repository_module
from phionyx_letta.letta_code.checking import check_memory
from phionyx_letta.letta_code.ingest import Recorder, _Run
from phionyx_letta.letta_code.places import AgentMemory
from phionyx_letta.letta_code.turns import Turn


def logs(memory: Memory) -> list[Path]:
    return [memory.path / ".git" / "logs" / name for name in ("HEAD", "refs/heads/main")]


def append(memory: Memory, data: bytes) -> None:
    for log in logs(memory):
        with log.open("ab") as file:
            file.write(data)


def reasons(memory: Memory, recorded: Recorded) -> list[str]:
    return [gap["reason"] for gap in recorded.ingest(memory).gaps]


@pytest.mark.parametrize("line", [b"x" * 1000 + b"\n", b"\0" * 3000, b"\n"])
def test_a_padded_log_does_not_hide_what_comes_after_it(
    memory: Memory, recorded: Recorded, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository_module, "_MAX_READ", 1 << 20)
    monkeypatch.setattr(repository_module, "_MAX_LINES", 10_000)
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    append(memory, line * ((2 << 20) // len(line)))
    evil = memory.commit({"a.md": "evil"})
    assert reasons(memory, recorded)[-1] == "reflog_skipped"
    assert recorded.commits()[-1] == evil
    recorded.agrees_with(memory)
    assert recorded.ingest(memory).envelopes == 0, "told once"
    after = memory.commit({"a.md": "after"})
    assert reasons(memory, recorded) == []
    assert recorded.commits()[-1] == after
    assert letta(recorded.envelopes()[-1])["seen_by"] == "reflog", "and the log is read on from its end"
    recorded.agrees_with(memory)


def test_padding_that_is_read_in_one_run_is_told_and_passed(memory: Memory, recorded: Recorded) -> None:
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    append(memory, b"junk\n" * 100_000)
    assert reasons(memory, recorded) == ["reflog_unparsed", "reflog_unparsed"]
    assert recorded.ingest(memory).envelopes == 0
    second = memory.commit({"a.md": "2"})
    assert reasons(memory, recorded) == []
    assert recorded.commits()[-1] == second


def test_a_sparse_log_of_a_terabyte_takes_no_time(
    memory: Memory, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository_module, "_MAX_LINES", 10_000)
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    for log in logs(memory):
        os.truncate(log, 1 << 40)
    evil = memory.commit({"a.md": "evil"}, "m")
    began = time.monotonic()
    assert reasons(memory, recorded) == ["reflog_skipped", "reflog_skipped"]
    assert time.monotonic() - began < 10
    assert recorded.commits()[-1] == evil
    for log in logs(memory):
        log.write_bytes(b"x\n" * (1 << 20))  # the place is searched for in vain
    assert "reflog_skipped" in reasons(memory, recorded)
    recorded.agrees_with(memory)
    assert time.monotonic() - began < 20


def test_a_torn_line_is_read_when_it_is_whole(memory: Memory, recorded: Recorded) -> None:
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    append(memory, b"torn")
    assert reasons(memory, recorded) == []
    memory.commit({"a.md": "2"})
    assert reasons(memory, recorded) == ["reflog_unparsed", "reflog_unparsed"]
    recorded.agrees_with(memory)


@pytest.mark.parametrize("length", [2001, 100_000])
def test_a_commit_under_a_long_name_that_was_taken_back_is_recorded(
    memory: Memory, recorded: Recorded, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    monkeypatch.setitem(ENVIRONMENT, "GIT_COMMITTER_NAME", "N" * length)
    evil = memory.commit({"a.md": "evil"})
    memory.git("reset", "-q", "--hard", first)
    assert reasons(memory, recorded) == []
    assert recorded.commits() == [first, evil]
    recorded.agrees_with(memory)


def elsewhere(memory: Memory, tmp_path: Path, first: str) -> str:
    """Another work tree moves the branch to a commit and back; this one's HEAD log does not know."""
    memory.git("worktree", "add", "-q", "--detach", str(tmp_path / "w"))
    other = Memory(tmp_path / "w", new=False)
    evil = other.commit({"a.md": "evil"})
    other.git("update-ref", "refs/heads/main", evil)
    assert memory.git("show", "HEAD:a.md") == "evil"
    other.git("update-ref", "refs/heads/main", first)
    return evil


@pytest.mark.parametrize("stays", [True, False])
def test_what_only_the_branchs_log_tells_is_recorded(
    memory: Memory, recorded: Recorded, tmp_path: Path, stays: bool
) -> None:
    first = memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    evil = elsewhere(memory, tmp_path, first)
    memory.git("checkout", "-q", "-b", "z")
    aside = memory.commit({"y.md": "z"})
    if not stays:
        memory.git("checkout", "-q", "main")
    assert reasons(memory, recorded) == []
    assert sorted(recorded.commits()[1:]) == sorted([evil, aside])
    recorded.agrees_with(memory)
    assert recorded.ingest(memory).envelopes == 0
    last = memory.commit({"a.md": "2"})
    recorded.ingest(memory)
    assert recorded.commits()[-1] == last
    recorded.agrees_with(memory)


def test_a_rebase_is_told_once_though_both_logs_tell_it(memory: Memory, recorded: Recorded) -> None:
    memory.commit({"a.md": "1"})
    memory.git("checkout", "-q", "-b", "upstream")
    memory.commit({"u.md": "1"})
    memory.git("checkout", "-q", "main")
    memory.commit({"b.md": "2"})
    recorded.ingest(memory)
    memory.git("rebase", "-q", "upstream")
    assert recorded.ingest(memory).rewrites == 1
    recorded.agrees_with(memory)


def test_what_a_line_only_claims_to_have_left_says_so(memory: Memory, recorded: Recorded) -> None:
    first = memory.commit({"a.md": "0"})
    recorded.ingest(memory)
    tree = memory.git("mktree", given=f"100644 blob {blob(memory, b'framed')}\ta.md\n".encode())
    framed = memory.git("commit-tree", tree, "-p", first, "-m", "m")
    append(memory, f"{framed} {first} A <a@b> 1 +0000\treset: x\n".encode())
    recorded.ingest(memory)
    seen = {letta(one).get("commit"): letta(one).get("seen_by") for one in recorded.envelopes()[1:]}
    assert seen[framed] == "reflog_old"
    recorded.agrees_with(memory)


def test_a_run_that_is_cut_short_tells_no_detour(memory: Memory, recorded: Recorded, tmp_path: Path) -> None:
    """Each transaction knows how far both logs are read."""
    recorded.options["batch"] = 1
    first = memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    evil = elsewhere(memory, tmp_path, first)
    memory.git("checkout", "-q", "-b", "z")
    memory.commit({"y.md": "z"})
    memory.git("checkout", "-q", "main")
    for number in range(5):
        memory.commit({"a.md": str(number)})
    wanted = None
    for stop in range(12):
        ledger = SqlLedger(f"sqlite:///{tmp_path}/{stop}.db")
        here = Recorded(ledger, batch=1)
        writes, real = 0, _Run._write

        def write(run: _Run, cursor: object, real: object = real, stop: int = stop) -> None:
            nonlocal writes
            writes += 1
            if writes > stop:
                raise KeyboardInterrupt
            real(run, cursor)  # type: ignore[operator]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Run, "_write", write)
            with contextlib.suppress(KeyboardInterrupt):
                here.ingest(memory)
        here.ingest(memory)
        here.agrees_with(memory)
        told = here.told(), here.commits()
        wanted = wanted or told
        assert evil in here.commits()
        assert told == wanted
        ledger.close()


def test_verify_sees_what_ingest_could_not_read(memory: Memory, recorded: Recorded) -> None:
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    append(memory, b"x" * 1000 + b"\n")
    memory.commit({"a.md": "evil"})
    assert check_memory(recorded.ledger, SIGNER.verifier(), AgentMemory(AGENT, memory.path)).status == "behind"


def test_a_first_run_that_is_cut_short_reads_on_the_log_of_the_branch_head_left(
    memory: Memory, recorded: Recorded
) -> None:
    first = memory.commit({"a.md": "1"})
    memory.commit({"a.md": "2"})
    dropped = memory.commit({"a.md": "3"})
    memory.git("reset", "-q", "--hard", first)
    assert Recorder(recorded.ledger, KEY).record(AGENT, memory.path, Turn(envelopes=1)).unfinished
    memory.git("checkout", "-q", "-b", "side")
    memory.commit({"b.md": "1"})
    recorded.ingest(memory)
    assert dropped in recorded.commits()
    recorded.agrees_with(memory)
    assert recorded.ingest(memory).envelopes == 0


def test_what_only_a_branchs_new_log_tells_is_recorded(memory: Memory, recorded: Recorded, tmp_path: Path) -> None:
    """The branch was replaced by another of its name, and its log with it."""
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    memory.git("checkout", "-q", "--orphan", "new")
    first = memory.commit({"a.md": "2"})
    memory.git("branch", "-M", "main")
    evil = elsewhere(memory, tmp_path, first)
    recorded.ingest(memory)
    assert evil in recorded.commits()
    recorded.agrees_with(memory)
    assert recorded.ingest(memory).envelopes == 0


def test_a_line_of_heads_log_alone_that_says_where_it_stood_is_followed(memory: Memory, recorded: Recorded) -> None:
    first = memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    kept = [log.read_bytes() for log in logs(memory)]
    evil = memory.commit({"a.md": "evil"})
    memory.git("reset", "-q", "--hard", first)
    for log, data in zip(logs(memory), kept, strict=True):
        log.write_bytes(data)
    branch = memory.path / ".git" / "refs" / "heads" / "main"
    branch.write_text(f"{evil}\n")
    memory.git("checkout", "-q", "--detach")
    (memory.path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    branch.write_text(f"{first}\n")
    recorded.ingest(memory)
    assert recorded.commits() == [first, evil]


def test_a_log_that_is_none_is_told_once_whatever_the_branch_is_called(memory: Memory, recorded: Recorded) -> None:
    memory.git("symbolic-ref", "HEAD", "refs/heads/ma\u00a0in")
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    log = memory.path / ".git" / "logs" / "refs" / "heads" / "ma\u00a0in"
    log.unlink()
    log.symlink_to(os.devnull)
    assert reasons(memory, recorded) == ["reflog_unreadable"]
    assert reasons(memory, recorded) == []


def test_where_the_branchs_log_is_lost_in_the_middle_heads_is_read_on(memory: Memory, recorded: Recorded) -> None:
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    made = [memory.commit({"a.md": "2"}), memory.commit({"a.md": "3"}, "instead", "--amend")]
    made += [memory.commit({"a.md": "4"}), memory.commit({"a.md": "5"}, "instead", "--amend")]
    Recorder(recorded.ledger, KEY).record(AGENT, memory.path, Turn(envelopes=1))
    (memory.path / ".git" / "logs" / "refs" / "heads" / "main").unlink()
    recorded.ingest(memory)
    assert recorded.commits()[1:] == made
    recorded.agrees_with(memory)


def test_the_branch_that_head_left_is_read_on_though_its_log_was_written_anew(
    memory: Memory, recorded: Recorded
) -> None:
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    log = memory.path / ".git" / "logs" / "refs" / "heads" / "main"
    log.write_text(log.read_text().replace("a change", "another message"))
    other = Memory(memory.path.parent / "other", new=False)
    memory.git("worktree", "add", "-q", "--force", str(other.path), "main")
    made = [other.commit({"b.md": "1"}), other.commit({"b.md": "2"}, "instead", "--amend")]
    memory.git("checkout", "-q", "-f", "-b", "elsewhere")
    recorded.ingest(memory)
    assert recorded.commits()[1:] == made
    recorded.agrees_with(memory)
