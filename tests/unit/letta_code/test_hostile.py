"""A repository that wants to run a program, hang, fill the memory, or hide what it did. It gets an answer, never more."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from code_rig import AGENT, Memory, Recorded, blob, letta, raw_tree, set_head

from phionyx_letta.letta_code import turns as turns_module
from phionyx_letta.letta_code.changes import file_name, label_of
from phionyx_letta.letta_code.errors import MemoryUnreadable
from phionyx_letta.letta_code.objects import Objects
from phionyx_letta.letta_code.repository import MemoryRepository
from phionyx_letta.letta_code.working_tree import uncommitted


def test_no_program_of_the_repositorys_configuration_runs(memory: Memory, recorded: Recorded, tmp_path: Path) -> None:
    memory.commit({"a.md": "1", ".gitattributes": "*.md filter=evil diff=evil merge=evil\n"})
    ran = tmp_path / "ran"
    program = f"sh -c 'touch {ran}'"
    for name in (
        *(
            "core.fsmonitor",
            "core.pager",
            "core.sshCommand",
            "core.editor",
            "diff.external",
            "pager.log",
            "pager.rev-list",
        ),
        *("filter.evil.clean", "filter.evil.smudge", "filter.evil.process", "diff.evil.textconv", "gpg.program"),
        *("core.alternateRefsCommand", "uploadpack.packObjectsHook", "credential.helper", "alias.cat-file"),
    ):
        memory.git("config", name, program)
    memory.git("config", "core.hooksPath", str(tmp_path / "hooks"))
    memory.git("config", "core.repositoryFormatVersion", "1")
    memory.git("config", "extensions.partialClone", "evil")
    memory.git("config", "remote.evil.url", f"ext::sh -c 'touch {ran}'")
    memory.git("config", "remote.evil.promisor", "true")
    memory.git("config", "core.worktree", "/")
    (tmp_path / "hooks").mkdir()
    for hook in ("reference-transaction", "post-index-change", "fsmonitor-watchman", "post-checkout"):
        (tmp_path / "hooks" / hook).write_text(f"#!/bin/sh\ntouch {ran}\n")
        (tmp_path / "hooks" / hook).chmod(0o755)
    missing = "1234567890" * 4
    set_head(memory, raw_tree(memory, [("100644", b"gone.md", missing)]))  # a promised object: git would fetch it
    assert ran.exists(), "the test's own git ran some of it"
    ran.unlink()
    report = recorded.ingest(memory)
    with Objects(MemoryRepository(memory.path).git) as objects:
        uncommitted(objects, memory.path, report.tip)
    assert not ran.exists()
    assert [gap["reason"] for gap in report.gaps] == ["unreadable"]


@pytest.mark.parametrize(
    "name",
    [
        b"line\nbreak.md",
        b"tab\t.md",
        b'quote".md',
        b"-n.md",
        b"\xff\xfe.md",
        b"%41.md",
        "ünï.md".encode(),
        b"\x1b[2J.md",
        b" .md",
    ],
)
def test_names_of_every_kind(memory: Memory, recorded: Recorded, name: bytes) -> None:
    memory.commit({name: "1"})
    memory.commit({name: "12"})
    recorded.ingest(memory)
    path = letta(recorded.envelopes()[-1])["path"]
    assert path.isprintable()
    assert recorded.told() == [(path, "write", "create"), (path, "append", "update")]
    recorded.agrees_with(memory)


def test_no_two_paths_share_a_name() -> None:
    names = [b"a", b"%41", b"A", b"%2541", b"\xff", b"%FF", b"\n", b"%0A", "\udcff".encode("utf-8", "surrogatepass")]
    assert len({file_name(name) for name in names}) == len(names)


@pytest.mark.parametrize("name", [b"..", b".git", b"~", b"\\x"])
def test_names_no_file_can_have_touch_no_file(memory: Memory, recorded: Recorded, name: bytes) -> None:
    memory.commit({"a.md": "1"})
    set_head(memory, raw_tree(memory, [("100644", name, blob(memory, b"evil"))]))
    recorded.ingest(memory)
    assert recorded.audit().verdict == "valid"
    assert ("write", "create") in [told[1:] for told in recorded.told()[1:]]


def test_a_file_named_like_the_history_is_told_apart(memory: Memory, recorded: Recorded) -> None:
    """Git refuses to check it out, but a tree can name it; it must not pass for an event of ours."""
    set_head(memory, raw_tree(memory, [("100644", b".git", blob(memory, b"evil"))]))
    recorded.ingest(memory)
    memory.git("update-ref", "refs/heads/main", memory.git("commit-tree", "HEAD^{tree}", "-m", "other"))
    recorded.ingest(memory)
    file, rewritten = recorded.envelopes()[0], recorded.history()[0]
    assert rewritten["event"] == "history_rewritten"
    assert file["mutation"]["block_id"] == f"{AGENT}:.git"
    assert recorded.envelopes()[1]["mutation"]["block_id"] == f"{AGENT}#history"


def test_a_tree_bomb_is_a_gap(memory: Memory, recorded: Recorded) -> None:
    memory.commit({"a.md": "1"})
    tree = raw_tree(memory, [("100644", b"%d" % number, blob(memory, b"x")) for number in range(10)])
    for _ in range(9):
        tree = raw_tree(memory, [("40000", b"%d" % number, tree) for number in range(10)])
    set_head(memory, tree)
    started = time.monotonic()
    report = recorded.ingest(memory)
    assert time.monotonic() - started < 20
    assert [gap["reason"] for gap in report.gaps] == ["too_many_files"]
    memory.git("reset", "-q", "--soft", "HEAD")
    assert recorded.audit().verdict == "valid"


def test_after_a_gap_the_ledger_goes_on_from_what_it_knows(memory: Memory, recorded: Recorded) -> None:
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    lost = blob(memory, b"unreadable")
    set_head(memory, raw_tree(memory, [("100644", b"a.md", lost)]))
    (memory.path / ".git" / "objects" / lost[:2] / lost[2:]).unlink()
    assert [gap["reason"] for gap in recorded.ingest(memory).gaps] == ["unreadable"]
    set_head(memory, raw_tree(memory, [("100644", b"a.md", blob(memory, b"3"))]))
    recorded.ingest(memory)
    last = recorded.envelopes()[-1]
    recorded.agrees_with(memory)
    assert last["mutation"]["diff"]["before_hash"] == recorded.envelopes()[0]["mutation"]["diff"]["after_hash"]


def test_deep_folders_are_a_gap(memory: Memory, recorded: Recorded) -> None:
    tree = raw_tree(memory, [("100644", b"x", blob(memory, b"x"))])
    for _ in range(2000):
        tree = raw_tree(memory, [("40000", b"d", tree)]) if _ < 150 else tree
    set_head(memory, tree)
    assert [gap["reason"] for gap in recorded.ingest(memory).gaps] == ["too_many_files"]


def test_a_giant_file_takes_no_memory(memory: Memory, recorded: Recorded) -> None:
    import tracemalloc

    memory.commit({"giant.bin": b"\0" * 60_000_000})
    tracemalloc.start()
    recorded.ingest(memory)
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()
    recorded.agrees_with(memory)


def test_named_pipes_do_not_hang_it(memory: Memory, recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "PATIENCE", 0.5)
    head = memory.commit({"a.md": "1", "b.md": "2"})
    for log in (memory.path / ".git" / "logs" / "HEAD", memory.path / ".git" / "logs" / "refs" / "heads" / "main"):
        log.unlink()
        os.mkfifo(log)
    os.mkfifo(memory.path / "pipe.md")
    os.mkfifo(memory.path / ".git" / "shallow")
    (memory.path / ".git" / "shallow").unlink()
    recorded.ingest(memory)
    assert recorded.commits() == [head]
    for log in (memory.path / ".git" / "logs" / "HEAD", memory.path / ".git" / "logs" / "refs" / "heads" / "main"):
        log.unlink()
    (memory.path / "pipe.md").unlink()
    memory.commit({"b.md": "3"})
    oid = memory.git("rev-parse", "HEAD:b.md")
    path = memory.path / ".git" / "objects" / oid[:2] / oid[2:]
    path.unlink()
    os.mkfifo(path)
    os.mkfifo(memory.path / "pipe.md")
    report = recorded.ingest(memory)
    assert [gap["reason"] for gap in report.gaps] == ["unreadable"]
    with Objects(MemoryRepository(memory.path).git) as objects:
        assert uncommitted(objects, memory.path, report.tip) == [], "a pipe is no file to git"


@pytest.mark.parametrize("damage", ["garbage", "truncated", "empty"])
def test_a_damaged_object(memory: Memory, recorded: Recorded, damage: str) -> None:
    memory.commit({"a.md": "1" * 100})
    recorded.ingest(memory)
    memory.commit({"a.md": "2" * 100})
    oid = memory.git("rev-parse", "HEAD:a.md")
    path = memory.path / ".git" / "objects" / oid[:2] / oid[2:]
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes({"garbage": b"\xff" * 40, "truncated": data[:10], "empty": b""}[damage])
    report = recorded.ingest(memory)
    assert [gap["reason"] for gap in report.gaps] == ["unreadable"]
    assert "a.md" in report.gaps[0]["paths"]
    memory.commit({"a.md": "3"})
    recorded.ingest(memory)
    recorded.agrees_with(memory)


@pytest.mark.parametrize("what", ["commit", "tree"])
def test_a_tip_that_cannot_be_read_is_read_later(memory: Memory, recorded: Recorded, what: str) -> None:
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    second = memory.commit({"a.md": "2"})
    oid = second if what == "commit" else memory.git("rev-parse", "HEAD^{tree}")
    path = memory.path / ".git" / "objects" / oid[:2] / oid[2:]
    hidden = path.rename(path.with_suffix(".hidden"))
    with pytest.raises(MemoryUnreadable):
        recorded.ingest(memory)
    hidden.rename(path)
    recorded.ingest(memory)
    assert recorded.commits()[-1] == second
    recorded.agrees_with(memory)


def test_a_reflog_full_of_lies(memory: Memory, recorded: Recorded) -> None:
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    memory.commit({"a.md": "2"})
    log = memory.path / ".git" / "logs" / "refs" / "heads" / "main"
    lies = [
        f"{'0' * 40} {'ab' * 20} A <a@b> 1 +0000\tcommit: x\n",
        "not a line\n",
        f"{memory.head()} {memory.git('rev-parse', 'HEAD:a.md')} A <a@b> 99999999999 +0000\tm\n",
        "\0" * 200_000 + "\n",
        f"{'1' * 40} {memory.head()} A <a@b> 1 +0000\t\x1b[2Jevil: x\n",
        "no end",
    ]
    with log.open("a") as file:
        file.writelines(lies)
    report = recorded.ingest(memory)
    assert {gap["reason"] for gap in report.gaps} <= {"unreadable", "vanished", "reflog_unparsed"}
    recorded.agrees_with(memory)
    assert recorded.ingest(memory).envelopes == 0


@pytest.mark.parametrize(
    "head", ["ref: refs/heads/../../evil", "ref: refs/heads/a b", "garbage", "", "ref: /etc/passwd"]
)
def test_a_head_that_is_none(memory: Memory, recorded: Recorded, head: str) -> None:
    memory.commit({"a.md": "1"})
    (memory.path / ".git" / "HEAD").write_text(head)
    with pytest.raises(MemoryUnreadable):
        recorded.ingest(memory)


def test_a_lock_that_was_left_behind_does_not_stop_it(memory: Memory, recorded: Recorded) -> None:
    memory.commit({"a.md": "1"})
    (memory.path / ".git" / "refs" / "heads" / "main.lock").write_text("")
    recorded.ingest(memory)
    recorded.agrees_with(memory)


def test_hidden_parents_show(memory: Memory, recorded: Recorded) -> None:
    """Neither grafts nor replacements nor a forged shallow boundary hide a commit that is there."""
    made = [memory.commit({"a.md": text}) for text in "123"]
    (memory.path / ".git" / "shallow").write_text(made[2] + "\n")
    (memory.path / ".git" / "info" / "grafts").write_text(made[2] + "\n")
    recorded.ingest(memory)
    assert recorded.commits() == made


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("---\nname: human\n---\nx", "human"),
        ("---\r\nname: 'a b'\r\n---\r\n", "a b"),
        ("---\nlabel: l\n---", "l"),
        ("---\nname: \x1b[2J\n---\n", "f"),
        ("---\nname: " + "x" * 300 + "\n---\n", "f"),
        ("name: no front\n", "f"),
        ("---\nname: never closed\n", "f"),
        ("---\n---\n", "f"),
        (None, "f"),
    ],
)
def test_labels(text: str | None, label: str) -> None:
    assert label_of("f.md", text) == label


def test_nothing_stays_open(memory: Memory, recorded: Recorded) -> None:
    memory.commit({"a.md": "1"})
    os.mkfifo(memory.path / "pipe")
    recorded.ingest(memory)
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        report = recorded.ingest(memory)
        with Objects(MemoryRepository(memory.path).git) as objects:
            uncommitted(objects, memory.path, report.tip)
    assert sorted(os.listdir("/proc/self/fd")) == before
