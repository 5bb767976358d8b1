"""The git repository: real git, bare and with a work tree, with a user's hooks and signing in the way, and read back."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
from log_rig import ORIGIN, Log

from phionyx_letta import Ed25519Signer, StoreError
from phionyx_letta.errors import SinkConflict, SinkError
from phionyx_letta.ledger.log.git import BRANCH, GitSink
from phionyx_letta.ledger.log.reading import read_checkpoints

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(path: Path, *arguments: str, given: str = "") -> str:
    identity = ["-c", "user.name=someone", "-c", "user.email=someone@example.org", "-c", "commit.gpgSign=false"]
    command = ["git", "-C", str(path), *identity, *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def log(signer: Ed25519Signer) -> Log:
    return Log(signer, 3)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints.git"
    git(tmp_path, "init", "-q", "--bare", str(path))
    return path


@pytest.fixture
def worktree(tmp_path: Path) -> Path:
    path = tmp_path / "project"
    git(tmp_path, "init", "-q", "-b", "main", str(path))
    (path / "file").write_text("committed")
    git(path, "add", "file")
    git(path, "commit", "-q", "-m", "first")
    (path / "file").write_text("changed")
    (path / "staged").write_text("staged")
    git(path, "add", "staged")
    return path


def sizes(source: Path, log: Log) -> list[int]:
    return [one.signed.checkpoint.size for one in read_checkpoints(source, log.keys) if one.signed]


def problems(source: Path, log: Log) -> list[str]:
    return [f"{one.place}: {one.problem}" for one in read_checkpoints(source, log.keys) if one.problem]


class TestCommitting:
    def test_each_checkpoint_is_a_commit(self, bare: Path, log: Log):
        sink = GitSink(bare, log.keys)
        for size in (1, 2, 2, 3, 1):
            sink.deliver(log.published(size))
        assert git(bare, "rev-list", "--count", BRANCH) == "3"
        assert git(bare, "show", f"{BRANCH}:checkpoint") == log.published(3).note.strip()
        assert git(bare, "log", "-1", "--format=%an <%ae> %s", BRANCH) == (
            f"phionyx-letta <phionyx-letta@localhost> Checkpoint of {ORIGIN} at 3"
        )
        assert sizes(bare, log) == [1, 2, 3]
        assert problems(bare, log) == []
        git(bare, "fsck", "--strict")

    def test_a_work_tree_its_index_and_its_branch_are_left_alone(self, worktree: Path, log: Log):
        before = (git(worktree, "status", "--porcelain"), git(worktree, "rev-parse", "HEAD"))
        GitSink(worktree, log.keys).deliver(log.published())
        assert (git(worktree, "status", "--porcelain"), git(worktree, "rev-parse", "HEAD")) == before
        assert sizes(worktree, log) == [3]

    def test_a_linked_work_tree_and_a_folder_beside_the_file_are_read(self, worktree: Path, log: Log, tmp_path: Path):
        GitSink(worktree, log.keys).deliver(log.published())
        linked = tmp_path / "linked"
        git(worktree, "worktree", "add", "-q", "-b", "other", str(linked))
        assert sizes(linked, log) == [3]
        (linked / "checkpoints").write_text(log.published(1).note)
        assert sizes(linked, log) == [1, 3]

    def test_it_goes_on_after_a_start(self, bare: Path, log: Log):
        for _ in range(3):
            GitSink(bare, log.keys).deliver(log.grow().published())
        assert sizes(bare, log) == [4, 5, 6]

    def test_hooks_signing_and_the_environment_of_the_user_take_no_part(
        self, worktree: Path, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        trace = tmp_path / "trace"
        for hook in ("pre-commit", "commit-msg", "post-commit", "reference-transaction", "post-update", "pre-auto-gc"):
            path = worktree / ".git" / "hooks" / hook
            path.write_text(f"#!/bin/sh\necho {hook} >> {trace}\nexit 1\n")
            path.chmod(0o755)
        for name, value in (
            ("commit.gpgSign", "true"),
            ("gpg.program", "/bin/false"),
            ("log.showSignature", "true"),
            ("user.useConfigOnly", "true"),
            ("core.editor", "/bin/false"),
            ("core.autocrlf", "true"),
            ("i18n.commitEncoding", "latin1"),
        ):
            git(worktree, "config", name, value)
        monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
        monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
        monkeypatch.setenv("GIT_AUTHOR_DATE", "garbage")
        sink = GitSink(worktree, log.keys)
        sink.deliver(log.published())
        sink.deliver(log.grow().published())
        monkeypatch.undo()
        assert not trace.exists()
        assert sizes(worktree, log) == [3, 4]

    def test_a_clock_that_steps_back_keeps_the_order(self, bare: Path, log: Log, mocker):
        sink = GitSink(bare, log.keys)
        for size, when in ((1, "2030-01-01T00:00:00Z"), (2, "2020-01-01T00:00:00Z"), (3, "2025-01-01T00:00:00Z")):
            mocker.patch.dict(
                "phionyx_letta.ledger.log.git._IDENTITY", {"GIT_COMMITTER_DATE": when, "GIT_AUTHOR_DATE": when}
            )
            sink.deliver(log.published(size))
        assert sizes(bare, log) == [1, 2, 3]
        assert git(bare, "log", "--format=%cI", BRANCH).split()[0].startswith("2025")

    def test_packed_by_gc_it_is_the_same(self, bare: Path, log: Log):
        sink = GitSink(bare, log.keys)
        for _ in range(3):
            sink.deliver(log.grow().published())
        git(bare, "gc", "-q")
        sink.deliver(log.grow().published())
        assert sizes(bare, log) == [4, 5, 6, 7]


def _commit_many(path: str, start: int) -> None:
    log = Log(Ed25519Signer("11" * 32), 100)
    sink = GitSink(path, log.keys)
    for size in range(start, start + 24, 3):
        for _ in range(20):  # as the keeper does
            with contextlib.suppress(SinkError):  # busy, or the ref is locked: tried again
                sink.deliver(log.published(size))
                break


def _commit_on_a_full_disk(path: str, results) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    log = Log(Ed25519Signer("11" * 32), 7)
    try:
        GitSink(path, log.keys).deliver(log.published())
    except SinkError as error:
        results.put(str(error))


def test_a_disk_that_is_full(bare: Path, log: Log) -> None:
    sink = GitSink(bare, log.keys)
    sink.deliver(log.published())
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_commit_on_a_full_disk, args=(str(bare), results))
    process.start()
    assert re.match(r"git hash-object failed in .*(signal|too large|unable)", results.get(timeout=30))
    process.join()
    assert sizes(bare, log) == [3]
    sink.deliver(log.grow().published())
    assert sizes(bare, log) == [3, 4]


@pytest.mark.slow
def test_several_processes_at_once(bare: Path, log: Log) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_commit_many, args=(str(bare), first)) for first in (1, 2, 3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 3
    found = sizes(bare, log)
    assert found == sorted(set(found))
    assert found[-1] == 24
    assert problems(bare, log) == []


class TestConflicts:
    @pytest.mark.parametrize(
        "offered", [Log(Ed25519Signer("11" * 32), 2), Log(Ed25519Signer("11" * 32), 9, forked_at=1)]
    )
    def test_a_log_that_went_back_or_was_rewritten(self, bare: Path, log: Log, offered: Log):
        GitSink(bare, log.keys).deliver(log.published())
        with pytest.raises(SinkConflict, match="does not agree"):
            GitSink(bare, log.keys).deliver(offered.published())
        assert sizes(bare, log) == [3]

    def test_a_branch_that_was_set_back_is_named_once_and_then_gone_on_with(self, bare: Path, log: Log):
        sink = GitSink(bare, log.keys)
        for _ in range(3):
            sink.deliver(log.grow().published())
        git(bare, "update-ref", f"refs/heads/{BRANCH}", f"{BRANCH}~2")
        with pytest.raises(SinkConflict, match="was set back or replaced"):
            sink.deliver(log.grow().published())
        sink.deliver(log.published())
        assert sizes(bare, log) == [4, 7]
        git(bare, "update-ref", "-d", f"refs/heads/{BRANCH}")
        with pytest.raises(SinkConflict, match="was set back or replaced"):
            sink.deliver(log.grow().published())

    def test_an_old_checkpoint_committed_again_does_not_hide_a_database_that_was_set_back(self, bare: Path, log: Log):
        sink = GitSink(bare, log.keys)
        log.grow(10)
        for size in (4, 13):
            sink.deliver(log.published(size))
        tree = git(bare, "rev-parse", f"{BRANCH}~1^{{tree}}")
        again = git(bare, "commit-tree", tree, "-p", BRANCH, "-m", "x")
        git(bare, "update-ref", f"refs/heads/{BRANCH}", again)
        for one in (sink, GitSink(bare, log.keys)):
            with pytest.raises(SinkConflict, match="holds a checkpoint of 13"):
                one.deliver(Log(log.signer, 5).published())

    def test_setting_the_branch_back_does_not_hide_it_either(self, bare: Path, log: Log):
        sink = GitSink(bare, log.keys)
        for _ in range(3):
            sink.deliver(log.grow().published())
        git(bare, "update-ref", f"refs/heads/{BRANCH}", f"{BRANCH}~2")
        for said in ("was set back or replaced", "holds a checkpoint of 6", "holds a checkpoint of 6"):
            with pytest.raises(SinkConflict, match=said):
                sink.deliver(Log(log.signer, 5).published())

    def test_commits_of_others_are_named_and_do_not_count(self, bare: Path, log: Log):
        sink = GitSink(bare, log.keys)
        sink.deliver(log.published())
        thief = Log(Ed25519Signer("55" * 32), 1000)
        big = "x" * 1_000_000
        for content in (thief.published().note, "garbage\n", big, ""):
            blob = git(bare, "hash-object", "-w", "--stdin", given=content)
            tree = git(bare, "mktree", given=f"100644 blob {blob}\tcheckpoint\n")
            commit = git(bare, "commit-tree", tree, "-p", BRANCH, "-m", "x")
            git(bare, "update-ref", f"refs/heads/{BRANCH}", commit)
        empty = git(bare, "commit-tree", git(bare, "mktree"), "-p", BRANCH, "-m", "x")
        nested = git(bare, "mktree", given=f"040000 tree {git(bare, 'mktree')}\tcheckpoint\n")
        git(bare, "update-ref", f"refs/heads/{BRANCH}", git(bare, "commit-tree", nested, "-p", empty, "-m", "x"))
        sink.deliver(log.grow().published())
        assert sizes(bare, log) == [3, 4]
        assert len(problems(bare, log)) == 6
        assert all("commit" in one for one in problems(bare, log))

    def test_a_damaged_object_costs_its_own_commit_alone(self, bare: Path, log: Log):
        sink = GitSink(bare, log.keys)
        for _ in range(5):
            sink.deliver(log.grow().published())
        blob = git(bare, "rev-parse", f"{BRANCH}~2:checkpoint")
        path = bare / "objects" / blob[:2] / blob[2:]
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-20] + b"x" * 20)
        assert sizes(bare, log) == [4, 5, 7, 8]
        assert len(problems(bare, log)) == 1

    def test_a_damaged_history_is_said(self, bare: Path, log: Log):
        sink = GitSink(bare, log.keys)
        for _ in range(4):
            sink.deliver(log.grow().published())
        commit = git(bare, "rev-parse", f"{BRANCH}~2")
        (bare / "objects" / commit[:2] / commit[2:]).unlink()
        assert any("history is damaged" in one for one in problems(bare, log))


class TestPlaces:
    def test_no_repository(self, tmp_path: Path, log: Log, worktree: Path):
        inside = worktree / "folder"  # git would find the repository around it
        inside.mkdir()
        for path in (tmp_path, tmp_path / "nothing", inside):
            with pytest.raises(SinkError, match="there is no git repository at"):
                GitSink(path, log.keys).deliver(log.published())

    def test_no_branch(self, bare: Path, log: Log):
        with pytest.raises(StoreError, match=f"has no branch {BRANCH}"):
            list(read_checkpoints(bare, log.keys))

    def test_a_folder_sink_in_a_work_tree_without_the_branch(self, worktree: Path, log: Log):
        (worktree / "checkpoints").write_text(log.published().note)
        assert sizes(worktree, log) == [3]

    def test_a_branch_that_is_checked_out(self, worktree: Path, log: Log):
        git(worktree, "checkout", "-q", "-b", BRANCH)
        with pytest.raises(SinkError, match="is checked out in a work tree"):
            GitSink(worktree, log.keys).deliver(log.published())

    def test_a_repository_that_cannot_be_written(self, bare: Path, log: Log, tmp_path: Path):
        (bare / "objects").rename(tmp_path / "away")
        (bare / "objects").write_text("in the way")
        with pytest.raises(SinkError, match="no git repository"):
            GitSink(bare, log.keys).deliver(log.published())
        (bare / "objects").unlink()
        (tmp_path / "away").rename(bare / "objects")
        lock = bare / "refs" / "heads" / f"{BRANCH}.lock"
        lock.write_text("")
        with pytest.raises(SinkError, match=r"git update-ref failed in .*\.lock"):
            GitSink(bare, log.keys).deliver(log.published())
        lock.unlink()
        GitSink(bare, log.keys).deliver(log.published())
        assert sizes(bare, log) == [3]

    def test_git_is_not_installed(self, bare: Path, log: Log, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(SinkError, match="git was not found"):
            GitSink(bare, log.keys).deliver(log.published())

    @pytest.mark.parametrize("branch", ["-d", "a b", "../x", "x..y", "", "x\ny", "x\0y"])
    def test_odd_branches(self, bare: Path, log: Log, branch: str):
        sink = GitSink(bare, log.keys, branch=branch)
        if branch == "-d":
            sink.deliver(log.published())
        else:
            with pytest.raises(SinkError):
                sink.deliver(log.published())
        assert os.listdir(bare / "refs" / "heads") in ([], ["-d"])

    def test_reading_runs_no_command_that_the_repository_names(self, bare: Path, log: Log, tmp_path: Path):
        """A partial clone fetches what it lacks, with a program its configuration may choose."""
        GitSink(bare, log.keys).deliver(log.published())
        trace = tmp_path / "trace"
        program = tmp_path / "program"
        program.write_text(f"#!/bin/sh\ntouch {trace}\nexit 1\n")
        program.chmod(0o755)
        for name, value in (
            ("core.repositoryFormatVersion", "1"),
            ("extensions.partialClone", "origin"),
            ("remote.origin.url", str(bare)),
            ("remote.origin.promisor", "true"),
            ("remote.origin.uploadpack", str(program)),
            ("core.fsmonitor", str(program)),
            ("core.pager", str(program)),
        ):
            git(bare, "config", name, value)
        blob = git(bare, "rev-parse", f"{BRANCH}:checkpoint")
        (bare / "objects" / blob[:2] / blob[2:]).unlink()
        assert sizes(bare, log) == []
        assert len(problems(bare, log)) == 1
        assert not trace.exists()

    def test_grafts_replacements_and_caches_of_the_repository_hide_nothing(self, bare: Path, log: Log):
        sink = GitSink(bare, log.keys)
        for _ in range(4):
            sink.deliver(log.grow().published())
        tip, first = git(bare, "rev-parse", BRANCH), git(bare, "rev-parse", f"{BRANCH}~3")
        git(bare, "commit-graph", "write", "--reachable")
        git(bare, "replace", "--graft", tip, first)
        (bare / "info" / "grafts").write_text(f"{tip} {first}\n")
        assert sizes(bare, log) == [4, 5, 6, 7]
