"""What git gives out for an object is checked: its hash, its form, and how long one waits for it."""

from __future__ import annotations

import os
import time
import tracemalloc
import zlib
from pathlib import Path

import pytest
from code_rig import AGENT, SIGNER, Memory, Recorded, blob, raw_tree, set_head

from phionyx_letta.letta_code import objects as objects_module
from phionyx_letta.letta_code import turns as turns_module
from phionyx_letta.letta_code.checking import check_memory
from phionyx_letta.letta_code.errors import MemoryUnreadable, ObjectMalformed, ObjectUnreadable
from phionyx_letta.letta_code.history import Move, steps
from phionyx_letta.letta_code.objects import Entry, Objects
from phionyx_letta.letta_code.places import AgentMemory
from phionyx_letta.letta_code.repository import MemoryRepository


def loose(memory: Memory, oid: str) -> Path:
    return memory.path / ".git" / "objects" / oid[:2] / oid[2:]


def forge(memory: Memory, oid: str, kind: str, data: bytes) -> bytes:
    """Put other bytes in a loose object's place; return what was there."""
    path = loose(memory, oid)
    kept = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(zlib.compress(b"%s %d\0%s" % (kind.encode(), len(data), data)))
    return kept


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_a_file_with_other_bytes_than_its_id_says_is_a_gap(memory: Memory, recorded: Recorded, size: int) -> None:
    memory.commit({"a.md": "1", "b.md": b"x" * size})
    recorded.ingest(memory)
    memory.commit({"a.md": "2", "b.md": b"y" * size})
    oid = memory.git("rev-parse", "HEAD:b.md")
    kept = forge(memory, oid, "blob", b"z" * size)
    report = recorded.ingest(memory)
    assert [(gap["reason"], gap["paths"]) for gap in report.gaps] == [("unreadable", ["b.md"])]
    assert recorded.told()[-2] == ("a.md", "write", "update")
    loose(memory, oid).write_bytes(kept)
    memory.commit({"b.md": "3"})
    recorded.ingest(memory)
    recorded.agrees_with(memory)


@pytest.mark.parametrize("what", ["commit", "tree"])
def test_a_forged_tip_is_not_recorded(memory: Memory, recorded: Recorded, what: str) -> None:
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    memory.commit({"a.md": "2"})
    real, other = ("HEAD", "HEAD~1") if what == "commit" else ("HEAD^{tree}", "HEAD~1^{tree}")
    oid = memory.git("rev-parse", real)
    kind, data = what, memory.raw(other)
    kept = forge(memory, oid, kind, data)
    with pytest.raises(MemoryUnreadable, match=oid):
        recorded.ingest(memory)
    assert check_memory(recorded.ledger, SIGNER.verifier(), AgentMemory(AGENT, memory.path)).status == "unreadable"
    loose(memory, oid).write_bytes(kept)
    recorded.ingest(memory)
    recorded.agrees_with(memory)


def test_a_commit_that_is_made_its_own_ancestor_ends(memory: Memory, recorded: Recorded) -> None:
    first = memory.commit({"a.md": "1"})
    second = memory.commit({"a.md": "2"})
    tree, _, rest = memory.raw(first).partition(b"\n")
    forge(memory, first, "commit", tree + b"\nparent " + second.encode() + b"\n" + rest)
    began = time.monotonic()
    report = recorded.ingest(memory)
    with Objects(MemoryRepository(memory.path).git) as objects:
        assert [one.oid for one in objects.first_parents(second)] == [second]
    assert time.monotonic() - began < 10
    assert recorded.commits() == [second]
    assert {gap["reason"] for gap in report.gaps} <= {"parents_missing", "unreadable"}


def test_one_forged_object_does_not_hide_the_others(memory: Memory) -> None:
    memory.commit({f"{number}.md": str(number) for number in range(5)})
    oids = [memory.git("rev-parse", f"HEAD:{number}.md") for number in range(5)]
    forge(memory, oids[2], "blob", b"other")
    with Objects(MemoryRepository(memory.path).git) as objects:
        objects.prefetch(oids)
        read = [oid for oid in oids if oid in objects._cache]
        assert read == [oid for oid in oids if oid != oids[2]]
        with pytest.raises(ObjectUnreadable, match="not what its id says"):
            objects.content(Entry("100644", oids[2]))


def test_objects_of_sha256(tmp_path: Path, recorded: Recorded) -> None:
    memory = Memory(tmp_path / "memory", new=False)
    memory.path.mkdir()
    memory.git("init", "-q", "-b", "main", "--object-format=sha256")
    memory.commit({"a.md": "1", "big.bin": b"x" * 2_000_000})
    recorded.ingest(memory)
    recorded.agrees_with(memory)


@pytest.mark.parametrize(
    "entries", [[b"human.md", b"human.md"], [b"a/b.md"], [b"/etc/passwd"], [b""], [b"../../evil.md"]]
)
def test_a_tree_no_file_system_can_hold_is_a_gap_and_the_run_goes_on(
    memory: Memory, recorded: Recorded, entries: list[bytes]
) -> None:
    """Two entries of one name, or a name with a slash: which file is meant depends on who reads."""
    memory.commit({"x.md": "0"})
    good = memory.git("rev-parse", "HEAD^{tree}")
    set_head(
        memory,
        raw_tree(memory, [("100644", name, blob(memory, b"%d" % at)) for at, name in enumerate(entries)]),
    )
    report = recorded.ingest(memory)
    assert [gap["reason"] for gap in report.gaps] == ["malformed"]
    assert recorded.ingest(memory).gaps == [], "told once"
    assert check_memory(recorded.ledger, SIGNER.verifier(), AgentMemory(AGENT, memory.path)).status == "unreadable"
    set_head(memory, good)
    recorded.ingest(memory)
    assert recorded.audit().verdict == "valid"
    memory.git("reset", "-q", "--hard")
    memory.commit({"x.md": "1"})
    recorded.ingest(memory)
    recorded.agrees_with(memory)


def test_a_folder_and_a_name_with_a_slash_are_not_one_file(memory: Memory, recorded: Recorded) -> None:
    memory.commit({"x.md": "0"})
    below = raw_tree(memory, [("100644", b"b.md", blob(memory, b"first"))])
    set_head(memory, raw_tree(memory, [("40000", b"a", below), ("100644", b"a/b.md", blob(memory, b"second"))]))
    assert [gap["reason"] for gap in recorded.ingest(memory).gaps] == ["malformed"]
    assert recorded.audit().verdict == "valid"


def test_a_branch_that_stands_at_a_tag_object_is_followed(memory: Memory, recorded: Recorded) -> None:
    """Git peels it, and so the prompt is made of the tagged commit."""
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    evil = memory.commit({"a.md": "evil"})
    memory.git("tag", "-a", "t", "-m", "x")
    (memory.path / ".git" / "refs" / "heads" / "main").write_text(memory.git("rev-parse", "t") + "\n")
    assert memory.git("show", "HEAD:a.md") == "evil"
    checked = check_memory(recorded.ledger, SIGNER.verifier(), AgentMemory(AGENT, memory.path))
    assert (checked.status, checked.head) == ("behind", evil)
    recorded.ingest(memory)
    assert recorded.commits()[-1] == evil


@pytest.mark.parametrize("what", ["HEAD:a.md", "HEAD^{tree}"])
def test_a_branch_that_stands_at_no_commit_is_unreadable(memory: Memory, recorded: Recorded, what: str) -> None:
    memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    (memory.path / ".git" / "refs" / "heads" / "main").write_text(memory.git("rev-parse", what) + "\n")
    with pytest.raises(MemoryUnreadable, match="leads to no commit"):
        recorded.ingest(memory)
    assert check_memory(recorded.ledger, SIGNER.verifier(), AgentMemory(AGENT, memory.path)).status == "unreadable"


def test_many_named_pipes_cost_one_long_wait(
    memory: Memory, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns_module, "PATIENCE", 2.0)
    monkeypatch.setattr(objects_module, "_THEN", 0.05)
    memory.commit({f"{number}.md": str(number) for number in range(10)})
    for number in range(10):
        path = loose(memory, memory.git("rev-parse", f"HEAD:{number}.md"))
        path.unlink()
        os.mkfifo(path)
    began = time.monotonic()
    report = recorded.ingest(memory)
    assert time.monotonic() - began < 12  # ten would take twenty
    assert [gap["paths_total"] for gap in report.gaps] == [10]


def test_a_commit_of_endless_header_lines_takes_no_memory_of_its_own(memory: Memory) -> None:
    import resource

    memory.commit({"a.md": "1"})
    head = memory.raw("HEAD")
    tree, _, rest = head.partition(b"author")
    oid = memory.git(
        "hash-object", "-t", "commit", "-w", "--literally", "--stdin",
        given=tree + b"author" + rest.partition(b"\n\n")[0] + b"\n" + b"x\n" * (10 << 20) + b"\nm\n",
    )  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Objects(MemoryRepository(memory.path).git) as objects:
        assert objects.commit(oid).tree == memory.git("rev-parse", "HEAD^{tree}")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kB"


def test_malformed_is_told_from_unreadable(memory: Memory) -> None:
    memory.commit({"a.md": "1"})
    tree = raw_tree(memory, [("100644", b"a", blob(memory, b"1")), ("100644", b"a", blob(memory, b"2"))])
    with Objects(MemoryRepository(memory.path).git) as objects, pytest.raises(ObjectMalformed):
        objects.tree(tree)


def test_a_commit_of_a_message_without_end_is_recorded(memory: Memory, recorded: Recorded) -> None:
    memory.write("a.md", "1")
    memory.git("add", "-A")
    memory.git("commit", "-q", "-F", "-", given=b"m\n\n" + b"x" * (10 << 20))
    recorded.ingest(memory)
    assert recorded.told() == [("a.md", "write", "create")]
    recorded.agrees_with(memory)


def test_a_forged_commit_on_the_way_does_not_keep_head_from_being_recorded(memory: Memory, recorded: Recorded) -> None:
    root = memory.commit({"r.md": "1"})
    old = memory.commit({"a.md": "1"})
    recorded.ingest(memory)
    memory.git("checkout", "-q", "-b", "x")
    forged = memory.commit({"x.md": "1"})
    memory.git("checkout", "-q", "-B", "main", root)
    memory.commit({"s.md": "1"})
    memory.git("merge", "-q", "-m", "m", "x")
    forge(memory, forged, "commit", memory.raw(forged) + b"forged\n")
    for log in (memory.path / ".git" / "logs").rglob("*"):
        if log.is_file():
            log.unlink()
    recorded.ingest(memory)
    assert old in recorded.commits()
    recorded.agrees_with(memory)
    assert recorded.ingest(memory).envelopes == 0


@pytest.mark.parametrize(("mode", "file"), [("40755", "d/x.md"), ("1040000", "d/x.md"), ("160001", "d")])
def test_a_mode_git_would_not_write_is_what_git_reads(memory: Memory, recorded: Recorded, mode: str, file: str) -> None:
    memory.commit({"x.md": "1"})
    set_head(memory, raw_tree(memory, [(mode, b"d", memory.git("rev-parse", "HEAD^{tree}"))]))
    assert recorded.ingest(memory).gaps == []
    assert list(recorded.state()) == [file]
    recorded.agrees_with(memory)


@pytest.mark.slow
def test_a_history_of_merges_of_thousands_takes_no_memory_of_its_own(memory: Memory) -> None:
    memory.commit({"a.md": "1"})
    head = memory.raw("HEAD")
    tree, _, rest = head.partition(b"\n")
    side, at = memory.head(), memory.head()
    for number in range(100):
        parents = b"".join(b"\nparent " + one.encode() for one in (at, *[side] * 20_000))
        data = tree + parents + b"\n" + rest + b"%d\n" % number
        at = memory.git("hash-object", "-t", "commit", "-w", "--literally", "--stdin", given=data)
    tracemalloc.start()
    with Objects(MemoryRepository(memory.path).git) as objects:
        plan = list(steps(objects, Move(None, at, None, {}), lambda _: None))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(plan) == 101
    assert peak < 100_000_000, "what is read ahead, and not all of it"
