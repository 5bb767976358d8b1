"""Memory files as targets: which are managed, and that writing one keeps everything about it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phionyx_letta.errors import DiffConflictError, TargetRefused
from phionyx_letta.memory import MemoryPIIFilter, OccurrenceTracker, files
from phionyx_letta.memory.kept import KeptSessions
from phionyx_letta.memory.managed import ManagedFiles
from phionyx_letta.memory.transcript import Message


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder to be in, with a secret beside it."""
    (tmp_path / "secret.md").write_text("secret\n")
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def put(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")


class TestManagedPaths:
    def test_links_to_folders_are_not_entered_so_that_no_circle_hangs(self, here):
        (here / "loops" / ".dot").mkdir(parents=True)
        (here / "loops" / "a.md").write_text("a\n")
        (here / "loops" / ".dot" / "b.md").write_text("b\n")
        for name in "xyz":
            (here / "loops" / name).symlink_to(".")
        begun = time.monotonic()
        assert ManagedFiles(["loops/**/*.md"]).names() == ["loops/a.md"]
        assert ManagedFiles(["loops/*/*/*/*.md"]).names() == []
        assert ManagedFiles(["loops/**/.dot/*.md"]).names() == ["loops/.dot/b.md"]
        assert time.monotonic() - begun < 60  # a walk through the links takes 3 ** 40 steps

    def test_the_folder_in_front_of_a_wildcard_may_be_reached_in_any_way(self, here):
        (here / "real").mkdir()
        (here / "real" / "a.md").write_text("a\n")
        (here / "way").symlink_to("real")
        assert ManagedFiles(["way/*.md"]).names() == ["way/a.md"]
        assert ManagedFiles(["./real/../way/*.md"]).names() == ["./real/../way/a.md"]
        assert ManagedFiles([f"{here}/real/[a]*"]).names() == [f"{here}/real/a.md"]

    def test_globs_are_recursive_and_each_file_comes_once(self, here):
        put(here, "CLAUDE.md", "memory/a.md", "memory/deep/er/b.md", "memory/c.txt", "memory/.hidden.md", ".git/d.md")
        managed = ManagedFiles(["./CLAUDE.md", "./memory/**/*.md", "memory/a.md"])
        assert managed.names() == ["./CLAUDE.md", "./memory/a.md", "./memory/deep/er/b.md"]
        assert ManagedFiles(["**/*.md"]).names() == ["CLAUDE.md", "memory/a.md", "memory/deep/er/b.md"]

    @pytest.mark.parametrize(
        ("pattern", "allowed", "refused"),
        [
            ("memory/*.md", "memory/new.md", "memory/deep/new.md"),
            ("memory/**/*.md", "memory/x/y/new.md", "memory/x/new.txt"),
            ("memory/user_?.md", "memory/user_1.md", "memory/user_/.md"),
            ("memory/[ab].md", "memory/a.md", "memory/c.md"),
            ("memory/[!ab].md", "memory/c.md", "memory/a.md"),
            ("memory/*.md", "./memory/../memory/new.md", "memory/../new.md"),
            ("CLAUDE.md", "./CLAUDE.md", "claude.md"),
            ("a+b(c)/*.md", "a+b(c)/x.md", "aab(c)/x.md"),
            ("**", "x/y.md", "x/.y.md"),
            ("memory/**/*.md", "memory/new.md", "memory/.hidden/new.md"),
        ],
    )
    def test_a_file_that_does_not_exist_yet_is_told_from_others(self, here, pattern, allowed, refused):
        managed = ManagedFiles([pattern])
        assert managed.resolve(allowed).read() is None
        with pytest.raises(TargetRefused, match="outside the managed paths"):
            managed.resolve(refused)

    @pytest.mark.parametrize(
        "name", ["../secret.md", "memory/../../secret.md", "/etc/passwd", "memory", ".", "", "a\0.md"]
    )
    def test_what_is_outside_is_refused(self, here, name):
        put(here, "memory/a.md")
        with pytest.raises(TargetRefused):
            ManagedFiles(["memory/*.md"]).resolve(name)

    def test_an_absolute_path_outside_is_refused(self, here):
        with pytest.raises(TargetRefused, match="secret"):
            ManagedFiles(["**/*.md"]).resolve(str(here.parent / "secret.md"))

    def test_a_link_out_is_neither_listed_nor_resolved(self, here):
        (here / "link.md").symlink_to("../secret.md")
        (here / "folder").symlink_to("..")
        managed = ManagedFiles(["**/*.md"])
        assert managed.names() == []
        for name in ("link.md", "folder/secret.md"):
            with pytest.raises(TargetRefused, match=r"it is .*secret\.md"):
                managed.resolve(name)

    def test_a_link_put_in_the_way_later_is_not_followed(self, here):
        put(here, "memory/secret.md")
        target = ManagedFiles(["memory/*.md"]).resolve("memory/secret.md")
        (here / "memory" / "secret.md").unlink()
        (here / "memory" / "secret.md").symlink_to("../../secret.md")
        with pytest.raises(TargetRefused, match="link"):
            target.read()
        with pytest.raises(TargetRefused, match="link"):
            target.write("secret\n", "evil\n")
        (here / "memory").rename(here / "moved")
        (here / "memory").symlink_to("..")
        with pytest.raises(TargetRefused, match="link"):
            target.write("secret\n", "evil\n")
        assert (here.parent / "secret.md").read_text() == "secret\n"

    def test_a_folder_reached_through_a_link_of_the_operators_is_fine(self, here):
        put(here, "real/a.md")
        (here / "linked").symlink_to("real")
        managed = ManagedFiles(["linked/*.md"])
        assert managed.names() == ["linked/a.md"]
        assert managed.resolve("real/a.md").identity == managed.resolve("linked/a.md").identity

    def test_a_name_with_what_would_be_wildcards_is_itself(self, here):
        put(here, "a[1]/b*.md", "a1/b2.md", "a[1]/c.md")
        assert ManagedFiles(["a[1]/b*.md"]).names() == ["a[1]/b*.md"]
        with pytest.raises(TargetRefused):
            ManagedFiles(["a[1]/b*.md"]).resolve("a1/b2.md")
        assert ManagedFiles(["a[1]"]).names() == ["a[1]/b*.md", "a[1]/c.md"]
        assert ManagedFiles(["a[[]1]/*.md"]).resolve("a[1]/new.md").read() is None

    def test_a_folder_stands_for_its_markdown(self, here):
        put(here, "memory/a.md", "memory/b/c.md", "memory/d.txt")
        assert ManagedFiles(["memory"]).names() == ["memory/a.md", "memory/b/c.md"]


class TestWriting:
    def target(self, here: Path, data: bytes) -> files.FileTarget:
        (here / "a.md").write_bytes(data)
        return ManagedFiles(["*.md"]).resolve("a.md")

    @pytest.mark.parametrize(
        "data",
        [
            b"a\r\nb\r\n",
            b"a\nb",
            b"\xef\xbb\xbfa\n",
            "ğüş 🍵\n".encode(),
            b"a\r\nb\nc\rd\x0b\x85".replace(b"\x85", b"\xc2\x85"),
            b"",
        ],
    )
    def test_bytes_that_are_not_the_patchs_stay(self, here, data):
        target = self.target(here, data)
        text = target.read()
        target.write(text, text + "x\n")
        assert (here / "a.md").read_bytes() == data + b"x\n"
        target.write(text + "x\n", text)
        assert (here / "a.md").read_bytes() == data

    @pytest.mark.slow
    @given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff")))
    def test_any_text_comes_back(self, text, tmp_path_factory):
        path = tmp_path_factory.mktemp("any") / "a.md"
        files.write_text(path, text)
        assert files.read_text(path) == text

    @pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755])
    def test_the_mode_stays(self, here, mode):
        target = self.target(here, b"a\n")
        (here / "a.md").chmod(mode)
        target.write("a\n", "b\n")
        assert stat.S_IMODE((here / "a.md").stat().st_mode) == mode

    def test_nothing_else_is_left_in_the_folder(self, here):
        target = self.target(here, b"a\n")
        target.write("a\n", "b\n")
        with pytest.raises(DiffConflictError):
            target.write("a\n", "c\n")
        assert sorted(os.listdir(here)) == ["a.md"]

    @pytest.mark.parametrize("data", [b"\xff\xfea\0", b"caf\xe9\n", b"\xef\xbb\xbf\xff", b"a\0b"])
    def test_what_is_not_utf_8_is_refused_and_left(self, here, data):
        target = self.target(here, data)
        with pytest.raises(TargetRefused, match="convert it to UTF-8"):
            target.read()
        with pytest.raises(TargetRefused, match="convert it to UTF-8"):
            target.write("a", "b")
        assert (here / "a.md").read_bytes() == data

    def test_a_lone_surrogate_is_refused(self, here):
        target = self.target(here, b"a\n")
        with pytest.raises(TargetRefused, match="surrogate"):
            target.write("a\n", "\ud800")
        assert target.read() == "a\n"

    def test_nul_bytes_are_refused(self, here):
        target = self.target(here, b"a\n")
        with pytest.raises(TargetRefused, match="NUL"):
            target.write("a\n", "a\0")
        assert target.read() == "a\n"

    def test_without_hard_links_a_new_file_is_made_all_the_same(self, here, monkeypatch):
        def refused(*_, **__):
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refused)
        target = ManagedFiles(["*.md"]).resolve("new.md")
        target.write(None, "a\n")
        assert target.read() == "a\n"
        with pytest.raises(DiffConflictError):
            target.write(None, "b\n")
        assert os.listdir(here) == ["new.md"]

    def test_other_content_is_never_overwritten(self, here):
        target = self.target(here, b"mine\n")
        with pytest.raises(DiffConflictError) as caught:
            target.write("a\n", "b\n")
        assert caught.value.expected_hash != caught.value.actual_hash
        with pytest.raises(DiffConflictError):
            target.write(None, "b\n")
        assert target.read() == "mine\n"

    def test_an_edit_in_the_last_moment_is_put_back(self, here, monkeypatch):
        target = self.target(here, b"a\n")
        exchange = files._exchange

        def edited_first(folder, one, other, calls=[]):  # noqa: B006
            if not calls:
                (here / "mine").write_text("mine\n")
                os.replace(here / "mine", here / "a.md")
            calls.append(1)
            return exchange(folder, one, other)

        monkeypatch.setattr(files, "_exchange", edited_first)
        with pytest.raises(DiffConflictError):
            target.write("a\n", "b\n")
        assert (here / "a.md").read_text() == "mine\n"
        assert sorted(os.listdir(here)) == ["a.md"]

    def test_without_an_exchange_it_is_replaced(self, here, monkeypatch):
        target = self.target(here, b"a\n")
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
        target.write("a\n", "b\n")
        assert target.read() == "b\n"

    def test_a_file_that_is_missing_is_made_with_its_folders(self, here):
        target = ManagedFiles(["memory/**/*.md"]).resolve("memory/a/b.md")
        assert target.read() is None
        target.write(None, "a\n")
        assert target.read() == "a\n"

    def test_a_file_that_was_removed_is_not_made_again(self, here):
        target = self.target(here, b"a\n")
        (here / "a.md").unlink()
        with pytest.raises(DiffConflictError):
            target.write("a\n", "b\n")
        assert not (here / "a.md").exists()

    def test_a_read_only_file_is_left(self, here):
        target = self.target(here, b"a\n")
        (here / "a.md").chmod(0o444)
        with pytest.raises(TargetRefused, match="read-only"):
            target.write("a\n", "b\n")

    @pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: os.mkfifo(path)], ids=["folder", "fifo"])
    def test_what_is_no_regular_file_is_refused(self, here, make):
        make(here / "a.md")
        target = ManagedFiles(["*.md"]).resolve("a.md")
        with pytest.raises(TargetRefused, match=r"regular file|directory"):
            target.read()

    def test_writers_never_interleave(self, here):
        target = self.target(here, b"0\n")

        def count() -> None:
            for _ in range(50):
                while True:
                    text = target.read()
                    try:
                        target.write(text, f"{int(text) + 1}\n")
                    except DiffConflictError:
                        continue
                    break

        threads = [threading.Thread(target=count) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert target.read() == "200\n"


WRITER = """
import sys
from pathlib import Path
from phionyx_letta.memory.files import FileTarget
target = FileTarget("a.md", sys.argv[1])
number = 0
while True:
    number += 1
    target.write(target.read(), f"{number}\\n" * 20_000)
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_one_of_its_texts(tmp_path):
    path = tmp_path / "a.md"
    path.write_text("0\n")
    path.chmod(0o640)
    for moment in range(12):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
            for _ in range(3 + moment):
                process.stdout.readline()
            process.kill()
        lines = path.read_text().splitlines()
        assert len(set(lines)) == 1
        assert len(lines) == 20_000
        assert stat.S_IMODE(path.stat().st_mode) == 0o640


class TestNamesAndModes:
    @pytest.mark.parametrize("name", ["a\ud800.md", "", "a\0.md"])
    def test_a_name_that_is_no_text_is_refused(self, tmp_path, name):
        with pytest.raises(TargetRefused, match="is not a path"):
            ManagedFiles([str(tmp_path / "*.md")]).resolve(name)
        with pytest.raises(TargetRefused, match="is not a path"):
            ManagedFiles([name])

    def test_what_is_kept_beside_the_store_is_for_its_owner_alone(self, tmp_path):
        before = os.umask(0o022)
        try:
            OccurrenceTracker(tmp_path / "facts.json").record_occurrence("uv", "s1")
            KeptSessions(tmp_path / "kept", MemoryPIIFilter()).keep("s1", [Message("user", "hello", None, 0)])
            (target := ManagedFiles([str(tmp_path / "*.md")]).resolve(str(tmp_path / "a.md"))).write(None, "a\n")
        finally:
            os.umask(before)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()}
        assert modes.pop(target.label) == 0o644
        assert modes.pop("facts.json") == 0o600
        assert list(modes.values()) == [0o600]
