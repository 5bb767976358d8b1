"""A git repository as a sink: one commit for each checkpoint, on a branch of its own.

Made with git's plumbing alone (``hash-object``, ``mktree``, ``commit-tree``, ``update-ref``): no index, no work tree, no hook,
no signing program and no identity of the user's takes part, and a bare repository will do. The branch moves by
compare-and-swap, so several sealers never lose each other's commits.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.errors import SinkConflict, SinkError, StoreError
from phionyx_letta.ledger.log.sink import Published, follows, largest
from phionyx_letta.notes import MAX_BYTES

__all__ = ["BRANCH", "GitRepository", "GitSink", "is_repository"]

BRANCH = "phionyx-checkpoints"
#: The file of each commit.
_NAME = "checkpoint"
_TIMEOUT = 60.0  # s, for one git command: a repository on a slow disk
_TRIES = 5
_GC_EVERY = 500
_MAX_MEMORY = 1 << 30  # bytes of its own that git may hold: the repository decides how large its objects are
_OVERRIDES = {
    "core.bigFileThreshold": "16m",  # what is larger is not held in memory
    "core.hooksPath": os.devnull,
    "core.commitGraph": "false",  # a cache of who is whose parent, which an attacker may edit
    "core.fsmonitor": "false",  # may name a program
    "core.fsync": "all",
    "core.fsyncMethod": "fsync",
    "gc.autoDetach": "false",
    "i18n.commitEncoding": "UTF-8",
    "log.showSignature": "false",
}
_IDENTITY = {
    f"GIT_{role}_{part}": value
    for role in ("AUTHOR", "COMMITTER")
    for part, value in (("NAME", "phionyx-letta"), ("EMAIL", "phionyx-letta@localhost"))
}


def is_repository(path: Path) -> bool:
    """Return whether this folder is a git repository or the top of a work tree, by its files alone."""
    bare = os.path.isfile(path / "HEAD") and os.path.isdir(path / "objects")
    return bare or os.path.exists(path / ".git")


class GitRepository:
    """The few git commands that are needed, with nothing of the caller's environment."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Use the repository at this path, bare or the top of a work tree. Nothing is run yet."""
        self.path = Path(path)

    def run(
        self, *arguments: str, given: bytes = b"", failing_is_none: bool = False, timeout: float = _TIMEOUT
    ) -> str | None:
        """Run git for at most `timeout` s and return what it wrote, stripped; None if it failed and that is an answer.

        Raises:
            StoreError: git is not installed, does not end, or failed; the message has its own first line.
        """
        command = self._command(arguments)
        try:
            done = subprocess.run(
                command, input=given, capture_output=True, env=_environment(self.path), timeout=timeout
            )
        except FileNotFoundError:
            raise StoreError("the program git was not found", "install git, or use a folder") from None
        except subprocess.TimeoutExpired:
            raise StoreError(f"git {arguments[0]} in {self.path} did not end", "check its disk") from None
        except (OSError, ValueError) as error:
            raise StoreError(f"git cannot be run in {self.path}: {error}", "check the path") from error
        if done.returncode == 0:
            return done.stdout.decode("utf-8", "replace").strip()
        if failing_is_none:
            return None
        silent = f"it was ended by signal {-done.returncode}" if done.returncode < 0 else "it gave no reason"
        said = (done.stderr.decode("utf-8", "replace").strip().splitlines() or [silent])[0][:300]
        shown = "".join(char if char.isprintable() else "?" for char in said)  # it may quote what is in the repository
        raise StoreError(
            f"git {arguments[0]} failed in {self.path}: {shown}",
            f"check the repository: git -C {self.path} fsck",
        )

    def tip(self, branch: str) -> str | None:
        """Return the commit a branch ends in, None where there is no such branch.

        Raises:
            StoreError: there is no repository at the path.
        """
        if not is_repository(self.path):
            raise StoreError(f"there is no git repository at {self.path}", f"make one: git init --bare {self.path}")
        self.run("rev-parse", "--git-dir")
        return self.run("rev-parse", "--verify", "--quiet", f"refs/heads/{branch}^{{commit}}", failing_is_none=True)

    def notes(self, branch: str, *, after: str | None = None) -> Iterator[tuple[str, bytes | None, str]]:
        """Yield (commit, note, "") or (commit, None, why) for each commit of the branch, oldest first, reading as it goes.

        Args:
            branch: its name.
            after: a commit; only what came after it.

        Raises:
            StoreError: the repository or the branch is not there.
        """
        tip = self.tip(branch)
        if tip is None:
            raise StoreError(f"{self.path} has no branch {branch}", "name the branch the checkpoints are on")
        known = [f"^{after}"] if after else []
        with contextlib.ExitStack() as stack:
            commits = stack.enter_context(self.started("rev-list", "--first-parent", "--reverse", tip, *known))
            objects = stack.enter_context(self.started("cat-file", "--batch"))
            assert commits.stdout is not None
            for line in commits.stdout:
                commit = line.decode("ascii", "replace").strip()
                note = _blob(objects, f"{commit}:{_NAME}")
                if note is None and objects.poll() is not None:  # a damaged object ended it
                    objects = stack.enter_context(self.started("cat-file", "--batch"))
                yield f"{self.path}, commit {commit}", note, "" if note else f"no readable file {_NAME} in the commit"
            if commits.wait() != 0:
                yield (
                    f"{self.path}, branch {branch}",
                    None,
                    "its history is damaged and cannot be read to its beginning",
                )

    @contextlib.contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run git in the background, with pipes to it and from it; it is ended at the end of the block."""
        process = subprocess.Popen(
            self._command(arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(self.path),
        )
        try:
            if sys.platform == "linux":
                import resource

                resource.prlimit(process.pid, resource.RLIMIT_DATA, (_MAX_MEMORY, _MAX_MEMORY))
            yield process
        finally:
            process.kill()
            process.communicate()

    def _command(self, arguments: Sequence[str]) -> list[str]:
        settings = [part for name, value in _OVERRIDES.items() for part in ("-c", f"{name}={value}")]
        return ["git", "--no-replace-objects", "-C", os.fspath(self.path), *settings, *arguments]


def _blob(objects: subprocess.Popen[bytes], name: str) -> bytes | None:
    """Ask a running ``cat-file --batch`` for a blob; None if it is missing, no blob, or larger than a note can be."""
    assert objects.stdin is not None
    assert objects.stdout is not None
    try:
        objects.stdin.write(name.encode() + b"\n")
        objects.stdin.flush()
        words = objects.stdout.readline().split()
        if len(words) != 3 or words[1] == b"missing":
            if not words:
                objects.wait()
            return None
        left, kept = int(words[2]) + 1, b""
        while left:
            piece = objects.stdout.read(min(left, MAX_BYTES))
            if not piece:
                objects.wait()
                return None
            left -= len(piece)
            kept = (kept + piece)[: MAX_BYTES + 2]
    except (OSError, ValueError):
        return None
    return kept[:-1] if words[1] == b"blob" and len(kept) <= MAX_BYTES + 1 else None


class GitSink:
    """Checkpoints as commits on the branch ``phionyx-checkpoints`` of an existing repository."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        public_keys: Sequence[str],
        *,
        branch: str = BRANCH,
        interval: float = 10.0,
    ) -> None:
        """Use the repository at ``path``; the branch is made with the first checkpoint.

        Args:
            path: of a bare repository or the top of a work tree.
            public_keys: of the log, each as 64 hex digits.
            branch: of one log alone.
            interval: least time between two commits, s.
        """
        self._repository = GitRepository(path)
        self._keys = tuple(public_keys)
        self._branch = branch
        self._seen: str | None = None
        self._made = 0
        self._read: dict[
            str, tuple[str, Checkpoint | None]
        ] = {}  # by origin: up to which commit, and the largest until there
        self._known: dict[str, Checkpoint] = {}  # the largest it ever had, even if it was set back since
        self.interval = interval
        self.name = f"git repository {self._repository.path}"

    def deliver(self, offered: Published, /) -> None:
        """Commit the checkpoint, unless the branch has one that it leads to; it is durable on return.

        Raises:
            SinkConflict: the branch's largest checkpoint and the log do not agree, or the branch was set back.
            SinkError: it cannot be committed.
        """
        origin = offered.checkpoint.origin
        try:
            for _ in range(_TRIES):
                tip = self._checked_tip()
                held = self._largest(origin, tip) if tip else None
                if self._known.get(origin) != held:
                    follows(self._known.get(origin), offered, self.name)
                if not follows(held, offered, self.name):
                    return
                if self._commit(offered, tip):
                    self._known[origin] = offered.checkpoint
                    return
        except StoreError as error:
            raise SinkError(error.message, error.remedy) from error
        raise SinkError(f"{self.name} is busy: other sealers keep committing to it", "it is tried again")

    def _checked_tip(self) -> str | None:
        """Return where the branch ends, and notice one that does not contain the commit it ended in before; said once."""
        tip = self._repository.tip(self._branch)
        seen, self._seen = self._seen, tip
        run = self._repository.run
        if (
            seen
            and seen != tip
            and (not tip or run("merge-base", "--is-ancestor", seen, tip, failing_is_none=True) is None)
        ):
            self._read.clear()
            raise SinkConflict(
                f"the branch {self._branch} of {self._repository.path} was set back or replaced",
                f"compare it with another copy; it ended in {seen}",
            )
        if seen is None and f"branch refs/heads/{self._branch}\n" in f"{run('worktree', 'list', '--porcelain')}\n":
            raise SinkError(
                f"the branch {self._branch} of {self._repository.path} is checked out in a work tree",
                "check out another branch there: its files would seem deleted",
            )
        return tip

    def _largest(self, origin: str, tip: str) -> Checkpoint | None:
        """Return the branch's largest checkpoint of the log; what was read before is not read again."""
        read, held = self._read.get(origin, (None, None))
        if read != tip:
            notes = self._repository.notes(self._branch, after=read)
            held = largest((note for _, note, _ in notes), origin, self._keys, held)
            self._read[origin] = tip, held
        if held is not None and (origin not in self._known or held.size > self._known[origin].size):
            self._known[origin] = held
        return held

    def _commit(self, offered: Published, tip: str | None) -> bool:
        """Return False where another process moved the branch meanwhile."""
        run, point = self._repository.run, offered.checkpoint
        blob = run("hash-object", "-w", "--stdin", given=offered.note.encode())
        tree = run("mktree", given=f"100644 blob {blob}\t{_NAME}\n".encode())
        message = f"Checkpoint of {point.origin} at {point.size}\n".encode()
        commit = run("commit-tree", str(tree), *(["-p", tip] if tip else []), "-F", "-", given=message)
        assert commit is not None
        moved = run("update-ref", f"refs/heads/{self._branch}", commit, tip or "0" * len(commit), failing_is_none=True)
        if moved is None:
            if self._repository.tip(self._branch) == tip:  # nobody moved it: it cannot be moved
                run("update-ref", f"refs/heads/{self._branch}", commit, tip or "0" * len(commit))
            return False
        self._seen = commit
        self._made += 1
        if self._made % _GC_EVERY == 0:
            run("gc", "--auto", "--quiet", failing_is_none=True)
        return True


def _environment(path: Path) -> dict[str, str]:
    """Return the environment without a caller's GIT_*; git finds the repository at the path, not one around it, and
    fetches nothing: a repository that is read as evidence must not have commands run that its configuration names.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    own = {
        "GIT_CEILING_DIRECTORIES": os.path.dirname(os.path.realpath(path)),
        "GIT_GRAFT_FILE": os.devnull,
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        "LC_ALL": "C",
    }
    return {**kept, **_IDENTITY, **own}
