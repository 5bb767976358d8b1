"""Every way a memory repository changes: each committed change is recorded once, in order, or named as a gap with its reason."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from code_rig import AGENT, EMPTY, ENVIRONMENT, Memory, Recorded, letta

from phionyx_letta.letta_code.errors import MemoryUnreadable

HUMAN = "---\nname: human\ndescription: who it is\n---\nAda\n"


def events(recorded: Recorded) -> list[str]:
    return [one["event"] for one in recorded.history()]


class TestCommits:
    def test_each_commit_is_an_envelope_for_each_file_it_changed(self, memory: Memory, recorded: Recorded) -> None:
        first = memory.commit({"human.md": HUMAN, "MEMORY.md": "index\n"})
        second = memory.commit({"human.md": HUMAN + "likes tea\n"})
        third = memory.commit({"human.md": "---\nname: human\n---\n\n", "MEMORY.md": None})
        report = recorded.ingest(memory)
        assert recorded.told() == [
            ("MEMORY.md", "write", "create"),
            ("human.md", "write", "create"),
            ("human.md", "append", "update"),
            ("MEMORY.md", "delete", "delete"),
            ("human.md", "clear", "update"),
        ]
        assert (report.commits, report.envelopes, report.gaps, report.rewrites) == (3, 5, [], 0)
        assert recorded.commits() == [first, second, third]
        recorded.agrees_with(memory)

    def test_what_an_envelope_says(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"human.md": HUMAN})
        head = memory.commit({"human.md": HUMAN + "tea\n"}, "a secret plan\n\nGenerated-By: Letta Code\nAgent-ID: x")
        recorded.ingest(memory)
        one = recorded.envelopes()[-1]
        assert one["mutation"]["block_id"] == f"{AGENT}:human.md"
        assert one["mutation"]["block_label"] == "human"
        assert one["subject"]["trace_id"] == AGENT
        assert one["subject"]["turn_index"] == 1
        said = letta(one)
        assert (said["commit"], said["seen_by"], said["source"]) == (head, "reflog", "letta-code")
        assert said["claims"]["author"]["email"] == f"{AGENT}@letta.com"
        assert said["claims"]["trailers"] == [["Generated-By", "Letta Code"], ["Agent-ID", "x"]]
        assert "secret" not in str(one), "a commit's message may hold content"
        diff = one["mutation"]["diff"]
        assert (diff["added_chars"], diff["removed_chars"], diff["diff_text"]) == (4, 0, None)

    def test_recording_again_finds_nothing_new(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1"})
        assert recorded.ingest(memory).envelopes == 1
        assert [recorded.ingest(memory).envelopes for _ in range(3)] == [0, 0, 0]
        memory.commit({"a.md": "12"})
        assert recorded.ingest(memory).envelopes == 1
        recorded.agrees_with(memory)

    def test_a_diff_is_kept_where_content_is_asked_for(self, memory: Memory, recorded: Recorded) -> None:
        recorded.options["include_text"] = True
        memory.commit({"a.md": "one\n"})
        recorded.ingest(memory)
        assert "+one" in recorded.envelopes()[0]["mutation"]["diff"]["diff_text"]

    @pytest.mark.parametrize("option", ["--no-verify", "--amend"])
    def test_options_of_commit(self, memory: Memory, recorded: Recorded, option: str) -> None:
        memory.commit({"a.md": "1"})
        recorded.ingest(memory)
        memory.commit({"a.md": "2"}, "again", option)
        recorded.ingest(memory)
        assert len(recorded.commits()) == 2
        recorded.agrees_with(memory)

    def test_hooks_turned_off_change_nothing(self, memory: Memory, recorded: Recorded) -> None:
        memory.write("a.md", "1")
        memory.git("add", "-A")
        memory.git("-c", "core.hooksPath=/dev/null", "commit", "-q", "-m", "m")
        recorded.ingest(memory)
        assert recorded.told() == [("a.md", "write", "create")]

    def test_a_commit_that_changes_nothing_leaves_no_envelope(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1"})
        memory.commit({})
        memory.commit({"a.md": "2"})
        assert recorded.ingest(memory).envelopes == 2
        recorded.agrees_with(memory)


class TestFiles:
    def test_both_layouts_and_subfolders(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"system/persona.md": "---\ndescription: d\nlimit: 5000\n---\nI am\n", "system/a/b.md": "x"})
        recorded.ingest(memory)
        labels = [one["mutation"]["block_label"] for one in recorded.envelopes()]
        assert labels == ["system/a/b", "system/persona"]
        memory.commit({"MEMORY.md": "m", "notes/MEMORY.md": "n", "notes/tea.md": "---\nlabel: 'tea time'\n---\n"})
        recorded.ingest(memory)
        labels = [one["mutation"]["block_label"] for one in recorded.envelopes()][2:]
        assert labels == ["MEMORY", "notes/MEMORY", "tea time"]
        recorded.agrees_with(memory)

    def test_a_rename_names_both_ends(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": HUMAN})
        memory.git("mv", "a.md", "b.md")
        memory.git("commit", "-q", "-m", "m")
        recorded.ingest(memory)
        gone, come = recorded.envelopes()[1:]
        assert (letta(gone)["renamed_to"], gone["mutation"]["mutation_kind"]) == ("b.md", "delete")
        assert (letta(come)["renamed_from"], come["mutation"]["mutation_kind"]) == ("a.md", "write")
        recorded.agrees_with(memory)

    def test_a_file_that_becomes_a_folder_and_back(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a": "1"})
        memory.commit({"a": None})
        memory.commit({"a/b.md": "2"})
        shutil.rmtree(memory.path / "a")
        memory.commit({"a": "3"})
        recorded.ingest(memory)
        recorded.agrees_with(memory)

    def test_binary_files_count_bytes(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.bin": b"\xff\x00abc", "b.md": "text"})
        memory.commit({"a.bin": b"\xff\x00", "b.md": b"\xfe"})
        recorded.ingest(memory)
        diff = recorded.envelopes()[2]["mutation"]["diff"]
        assert (diff["counts_method"], diff["removed_chars"], diff["added_chars"]) == ("replaced", 5, 2)
        recorded.agrees_with(memory)

    def test_modes_links_and_submodules(self, memory: Memory, recorded: Recorded, tmp_path: Path) -> None:
        other = Memory(tmp_path / "other")
        other.commit({"x": "1"})
        memory.commit({"run.sh": "true\n"})
        os.chmod(memory.path / "run.sh", 0o755)
        os.symlink("/etc/passwd", memory.path / "link.md")
        memory.commit({})
        memory.git("submodule", "--quiet", "add", str(other.path), "sub")
        memory.commit({})
        recorded.ingest(memory)
        found = {letta(one)["path"]: one for one in recorded.envelopes()}
        assert letta(found["run.sh"])["mode"] == {"before": "100644", "after": "100755"}
        assert letta(found["link.md"])["file_type"] == "symlink"
        assert found["link.md"]["mutation"]["diff"]["after_size_bytes"] == len("/etc/passwd")
        assert letta(found["sub"])["file_type"] == "submodule"
        recorded.agrees_with(memory)

    def test_large_files_are_hashed_without_being_held(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"big.md": b"x" * 3_000_000})
        memory.commit({"big.md": b"x" * 3_000_001})
        recorded.ingest(memory)
        assert recorded.envelopes()[1]["mutation"]["diff"]["counts_method"] == "replaced"
        recorded.agrees_with(memory)


class TestMerges:
    def reflect(self, memory: Memory, *, diverge: bool) -> list[str]:
        """As Letta Code 0.34 does it: a worktree on its own branch, merged into the memory's."""
        tree = Memory(memory.path.parent / "memory-worktrees" / "reflection-1", new=False)
        tree.path.parent.mkdir()
        memory.git("worktree", "add", "-q", str(tree.path), "-b", "letta/reflection/1", "HEAD")
        made = [tree.commit({"human.md": HUMAN + "tea\n"}), tree.commit({"new.md": "learnt\n"})]
        if diverge:
            memory.commit({"other.md": "meanwhile\n"})
        memory.git("merge", "-q", "letta/reflection/1", "-m", "merge reflection")
        memory.git("worktree", "remove", "--force", str(tree.path))
        memory.git("branch", "-D", "letta/reflection/1")
        return made

    def test_a_reflection_that_is_merged_is_consolidation(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"human.md": HUMAN})
        recorded.ingest(memory)
        made = self.reflect(memory, diverge=True)
        report = recorded.ingest(memory)
        assert recorded.told()[1:] == [
            ("other.md", "write", "create"),
            ("human.md", "consolidate", "update"),
            ("new.md", "consolidate", "create"),
        ]
        audit = recorded.envelopes()[-1]["memory_consolidation_audit"]
        assert audit["from_episodic"] == [f"commit:{oid}" for oid in reversed(made)]
        assert audit["consolidation_method"] == "letta-code.reflection"
        assert report.gaps == []
        recorded.agrees_with(memory)

    def test_one_that_is_fast_forwarded_is_recorded_commit_by_commit(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"human.md": HUMAN})
        recorded.ingest(memory)
        made = self.reflect(memory, diverge=False)
        recorded.ingest(memory)
        assert recorded.commits()[1:] == made
        assert {kind for _, kind, _ in recorded.told()[1:]} == {"consolidate"}
        recorded.agrees_with(memory)

    def test_a_merge_of_anything_else_is_a_write(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1"})
        memory.git("checkout", "-q", "-b", "side")
        memory.commit({"b.md": "1"})
        memory.git("checkout", "-q", "main")
        memory.commit({"c.md": "1"})
        recorded.ingest(memory)
        memory.git("merge", "-q", "side", "-m", "m")
        recorded.ingest(memory)
        assert recorded.told()[-1] == ("b.md", "write", "create")
        assert len(letta(recorded.envelopes()[-1])["merged"]) == 1
        recorded.agrees_with(memory)

    def test_a_branch_that_took_the_memory_in_before_it_went_forward(self, memory: Memory, recorded: Recorded) -> None:
        """The memory's commit is then a second parent: nothing is rewritten."""
        memory.commit({"a.md": "1"})
        memory.git("branch", "side")
        memory.commit({"main.md": "1"})
        recorded.ingest(memory)
        memory.git("checkout", "-q", "side")
        memory.commit({"side.md": "1"})
        memory.git("merge", "-q", "main", "-m", "takes main in")
        memory.commit({"after.md": "1"})
        memory.git("update-ref", "refs/heads/main", "side")
        memory.git("symbolic-ref", "HEAD", "refs/heads/main")
        memory.git("reflog", "delete", "--rewrite", "HEAD@{0}")
        shutil.rmtree(memory.path / ".git" / "logs")
        report = recorded.ingest(memory)
        assert report.rewrites == 0
        told = [path for path, _, _ in recorded.told()]
        assert [path for path in told if path != "history"] == ["a.md", "main.md", "side.md", "after.md"]
        assert told.count("history") == 2, "both logs are gone, which is told"
        recorded.agrees_with(memory)


class TestRewrittenHistory:
    def test_amend(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1"})
        dropped = memory.commit({"a.md": "12"})
        recorded.ingest(memory)
        kept = memory.commit({"a.md": "13"}, "m", "--amend")
        report = recorded.ingest(memory)
        assert report.rewrites == 1
        event = recorded.history()[0]
        assert event["event"] == "history_rewritten"
        assert (event["history"]["from"], event["history"]["to"]) == (dropped, kept)
        assert event["history"]["dropped"] == [dropped]
        assert event["history"]["reflog_entry"]["action"] == "commit (amend)"
        assert [letta(one).get("rewound", False) for one in recorded.envelopes()[-2:]] == [True, False]
        recorded.agrees_with(memory)

    def test_an_amend_between_two_runs_is_seen_too(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1"})
        first = memory.commit({"a.md": "12"})
        second = memory.commit({"a.md": "13"}, "m", "--amend")
        recorded.ingest(memory)
        assert recorded.commits()[1:] == [first, second]
        recorded.agrees_with(memory)

    def test_reset_and_reset_back(self, memory: Memory, recorded: Recorded) -> None:
        for text in "123":
            memory.commit({"a.md": text})
        memory.git("reset", "-q", "--hard", "HEAD~2")
        recorded.ingest(memory)
        assert events(recorded) == ["history_rewritten"]
        recorded.agrees_with(memory)
        memory.git("reset", "-q", "--hard", "ORIG_HEAD")
        recorded.ingest(memory)
        assert len(recorded.commits()) == 3, "each commit once"
        assert [letta(one).get("again") for one in recorded.envelopes()[-2:]] == [True, True]
        recorded.agrees_with(memory)

    def test_update_ref(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1"})
        memory.commit({"a.md": "2"})
        recorded.ingest(memory)
        memory.git("update-ref", "refs/heads/main", "HEAD~1")
        recorded.ingest(memory)
        assert events(recorded) == ["history_rewritten"]
        recorded.agrees_with(memory)

    def test_a_raw_write_to_the_reference(self, memory: Memory, recorded: Recorded) -> None:
        first = memory.commit({"a.md": "1"})
        memory.commit({"a.md": "2"})
        recorded.ingest(memory)
        (memory.path / ".git" / "refs" / "heads" / "main").write_text(first + "\n")
        recorded.ingest(memory)
        assert [(one["event"], "reflog_entry" in one["history"]) for one in recorded.history()] == [
            ("history_rewritten", False)
        ]
        recorded.agrees_with(memory)

    def test_a_raw_write_right_after_a_commit_loses_neither(self, memory: Memory, recorded: Recorded) -> None:
        first = memory.commit({"a.md": "1"})
        recorded.ingest(memory)
        second = memory.commit({"a.md": "2"})
        (memory.path / ".git" / "refs" / "heads" / "main").write_text(first + "\n")
        recorded.ingest(memory)
        assert recorded.commits() == [first, second]
        recorded.agrees_with(memory)

    def test_rebase(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1"})
        memory.git("checkout", "-q", "-b", "upstream")
        memory.commit({"u.md": "1"})
        memory.git("checkout", "-q", "main")
        for text in "23":
            memory.commit({"b.md": text})
        recorded.ingest(memory)
        memory.git("rebase", "-q", "upstream")
        recorded.ingest(memory)
        assert set(memory.git("rev-list", "HEAD").split()) <= set(recorded.commits())
        recorded.agrees_with(memory)
        assert recorded.ingest(memory).envelopes == 0

    def test_a_pull_that_was_force_pushed(self, memory: Memory, recorded: Recorded, tmp_path: Path) -> None:
        origin = tmp_path / "origin.git"
        memory.commit({"a.md": "1"})
        memory.commit({"a.md": "2"})
        memory.git("clone", "-q", "--bare", str(memory.path), str(origin))
        memory.git("remote", "add", "origin", str(origin))
        recorded.ingest(memory)
        other = Memory(tmp_path / "other", new=False)
        subprocess.run(["git", "clone", "-q", str(origin), str(other.path)], env=ENVIRONMENT, check=True)
        other.git("reset", "-q", "--hard", "HEAD~1")
        other.commit({"a.md": "other"})
        other.git("push", "-q", "--force", "origin", "main")
        memory.git("fetch", "-q", "origin")
        memory.git("reset", "-q", "--hard", "origin/main")
        recorded.ingest(memory)
        assert events(recorded) == ["history_rewritten"]
        recorded.agrees_with(memory)

    def test_fast_import(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1"})
        recorded.ingest(memory)
        stream = "".join(
            f"commit refs/heads/main\ncommitter A <a@b> {1700000000 + number} +0000\ndata 1\nm\n"
            + ("from refs/heads/main^0\n" if number == 0 else "")
            + f"M 100644 inline f{number}.md\ndata 1\n{number}\n\n"
            for number in range(5)
        )
        memory.git("fast-import", "--quiet", given=stream.encode())
        recorded.ingest(memory)
        assert len(recorded.commits()) == 6
        recorded.agrees_with(memory)

    def test_an_orphan_branch_in_its_place(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1", "b.md": "1"})
        recorded.ingest(memory)
        memory.git("checkout", "-q", "--orphan", "fresh")
        memory.git("rm", "-rfq", "--cached", ".")
        memory.commit({"a.md": "1", "b.md": None, "c.md": "1"})
        memory.git("branch", "-M", "main")
        recorded.ingest(memory)
        recorded.agrees_with(memory)

    def test_stash_moves_nothing(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1"})
        recorded.ingest(memory)
        memory.write("a.md", "dirty")
        memory.git("stash", "-q")
        assert recorded.ingest(memory).envelopes == 0
        memory.git("stash", "pop", "-q")
        assert recorded.ingest(memory).envelopes == 0
        recorded.agrees_with(memory)


class TestHead:
    def test_commits_on_a_detached_head(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1"})
        recorded.ingest(memory)
        memory.git("checkout", "-q", "--detach")
        second = memory.commit({"a.md": "2"})
        report = recorded.ingest(memory)
        assert report.branch == ""
        assert recorded.commits()[-1] == second
        recorded.agrees_with(memory)
        memory.git("checkout", "-q", "main")
        recorded.ingest(memory)
        recorded.agrees_with(memory)

    def test_a_visit_to_another_branch_between_two_runs(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1"})
        recorded.ingest(memory)
        memory.git("checkout", "-q", "-b", "visit")
        visited = memory.commit({"a.md": "visited"})
        memory.git("checkout", "-q", "main")
        recorded.ingest(memory)
        assert visited in recorded.commits(), "its text was in the prompt"
        recorded.agrees_with(memory)

    def test_a_branch_moved_from_another_work_tree(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1"})
        recorded.ingest(memory)
        tree = Memory(memory.path.parent / "tree", new=False)
        memory.git("worktree", "add", "-q", str(tree.path), "-b", "side")
        first, second = tree.commit({"b.md": "1"}), tree.commit({"b.md": "2"})
        tree.git("update-ref", "refs/heads/main", first)
        tree.git("update-ref", "refs/heads/main", second)
        recorded.ingest(memory)
        assert recorded.commits()[-2:] == [first, second]
        recorded.agrees_with(memory)

    def test_no_commit_yet(self, memory: Memory, recorded: Recorded) -> None:
        assert recorded.ingest(memory).envelopes == 0
        memory.commit({"a.md": "1"})
        assert recorded.ingest(memory).envelopes == 1

    def test_a_linked_work_tree_as_the_memory(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1"})
        tree = Memory(memory.path.parent / "tree", new=False)
        memory.git("worktree", "add", "-q", str(tree.path), "-b", "side")
        recorded.ingest(tree)
        tree.commit({"a.md": "2"})
        tree.commit({"a.md": "3"}, "m", "--amend")
        recorded.ingest(tree)
        assert len(recorded.commits()) == 3
        recorded.agrees_with(tree)


class TestLostHistory:
    def test_objects_that_git_threw_away(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1", "same.md": "1"})
        memory.commit({"a.md": "2"})
        recorded.ingest(memory)
        memory.commit({"a.md": "never recorded"})
        memory.git("reset", "-q", "--hard", "HEAD~2")
        memory.git("reflog", "expire", "--expire=now", "--all")
        memory.git("gc", "-q", "--prune=now")
        report = recorded.ingest(memory)
        assert report.gaps[0]["reason"] == "vanished"
        assert events(recorded) == ["history_lost"]
        assert recorded.told()[-1] == ("a.md", "write", "restored")
        recorded.agrees_with(memory)

    def test_a_repository_made_anew(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1", "b.md": "1"})
        recorded.ingest(memory)
        shutil.rmtree(memory.path / ".git")
        with pytest.raises(MemoryUnreadable, match="no git repository"):
            recorded.ingest(memory)
        with pytest.raises(MemoryUnreadable):
            recorded.ingest(memory)
        memory.git("init", "-q", "-b", "main")
        first = memory.commit({"b.md": None})
        second = memory.commit({"a.md": "2"})
        recorded.ingest(memory)
        assert [one["history"].get("reason") or one["event"] for one in recorded.history()] == [
            "repository_gone",
            "history_lost",
        ]
        assert recorded.commits()[-2:] == [first, second]
        recorded.agrees_with(memory)

    def test_expired_reflogs(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1"})
        recorded.ingest(memory)
        made = [memory.commit({"a.md": text}) for text in "234"]
        memory.git("reflog", "expire", "--expire=now", "--all")
        recorded.ingest(memory)
        assert recorded.commits()[1:] == made
        recorded.agrees_with(memory)

    def test_reflogs_that_are_not_kept(self, memory: Memory, recorded: Recorded) -> None:
        memory.git("config", "core.logAllRefUpdates", "false")
        made = [memory.commit({"a.md": text}) for text in "12"]
        recorded.ingest(memory)
        made.append(memory.commit({"a.md": "3"}))
        recorded.ingest(memory)
        assert recorded.commits() == made
        recorded.agrees_with(memory)

    def test_a_shallow_clone(self, memory: Memory, recorded: Recorded, tmp_path: Path) -> None:
        for text in "1234":
            memory.commit({"a.md": text})
        clone = Memory(tmp_path / "clone", new=False)
        source = f"file://{memory.path}"
        subprocess.run(["git", "clone", "-q", "--depth", "2", source, str(clone.path)], env=ENVIRONMENT, check=True)
        report = recorded.ingest(clone)
        assert [gap["reason"] for gap in report.gaps] == ["shallow"]
        assert len(recorded.commits()) == 2
        recorded.agrees_with(clone)
        clone.git("fetch", "-q", "--unshallow")
        assert recorded.ingest(clone).envelopes == 0
        clone.commit({"a.md": "5"})
        recorded.ingest(clone)
        recorded.agrees_with(clone)

    @pytest.mark.parametrize("behind", [False, True])
    def test_a_shallow_clone_in_the_place_of_what_was_recorded(
        self, memory: Memory, recorded: Recorded, tmp_path: Path, behind: bool
    ) -> None:
        """Its only commit's parent is recorded, and not there."""
        parent = memory.commit({"a.md": "1", "b.md": "1"})
        if behind:
            memory.commit({"a.md": "old"})
        recorded.ingest(memory)
        memory.git("reset", "-q", "--hard", parent)
        memory.commit({"a.md": "2", "b.md": None})
        source, clone = f"file://{memory.path}", tmp_path / "clone"
        subprocess.run(["git", "clone", "-q", "--depth", "1", source, str(clone)], env=ENVIRONMENT, check=True)
        shutil.rmtree(memory.path)
        clone.rename(memory.path)
        assert {gap["reason"] for gap in recorded.ingest(memory).gaps} == {"vanished", "shallow"}
        recorded.agrees_with(memory)
        assert recorded.ingest(memory).envelopes == 0

    def test_a_cursor_that_is_not_ours_is_worked_out_anew(self, memory: Memory, recorded: Recorded) -> None:
        memory.commit({"a.md": "1"})
        memory.commit({"a.md": "2"})
        recorded.ingest(memory)
        memory.commit({"a.md": "3"})
        with recorded.ledger.engine.begin() as connection:
            connection.exec_driver_sql("update phionyx_code_cursor set body = replace(body, 'main', 'sub')")
        assert recorded.ingest(memory).envelopes == 1
        with recorded.ledger.engine.begin() as connection:
            connection.exec_driver_sql("drop table phionyx_code_cursor")
        assert recorded.ingest(memory).envelopes == 0
        recorded.agrees_with(memory)


def test_the_content_hash_is_that_of_the_bytes_git_has(memory: Memory, recorded: Recorded) -> None:
    memory.write(".gitattributes", "* text=auto eol=crlf\n")
    memory.commit({"a.md": "one\r\ntwo\r\n"})
    recorded.ingest(memory)
    assert recorded.state()["a.md"] == "sha256:" + hashlib.sha256(b"one\ntwo\n").hexdigest()
    assert EMPTY not in recorded.state().values()
