"""One git hook in a memory repository, before the one that is there already, which goes on running."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from phionyx_letta.letta_code.reading import open_regular

__all__ = [
    "FOLDER",
    "HOOK",
    "MARK",
    "hooks_folder",
    "is_ours",
    "not_run",
    "put_git_hook",
    "take_git_hook",
    "write_whole",
]

HOOK = "reference-transaction"
BEFORE = ".phionyx-original"
#: Where it is run from: a hook may ask for its own name, and for what lies beside it.
FOLDER = "phionyx-original"
_MOST_BESIDE = 200
MARK = "# phionyx-letta"
_TIMEOUT = 10.0  # s


def hooks_folder(memory: Path, *, make: bool = False) -> Path | str:
    """The repository's folder of hooks, made if asked for, or why none can be put there: a link in it may lead anywhere."""
    git = memory / ".git"
    for folder in (git, git / "hooks"):
        try:
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                return f"{folder} is not a folder"
        except FileNotFoundError:
            if folder == git:
                return "there is no git repository"
            if make:
                with contextlib.suppress(OSError):
                    folder.mkdir()
        except OSError as error:
            return f"{folder}: {error.strerror}"
    return git / "hooks"


def not_run(memory: Path, hooks: Path) -> str | None:
    """Why git runs none of the hooks of this folder; None if it does: `core.hooksPath` can name another, in any configuration."""
    command = ["git", "-C", str(memory), "rev-parse", "--git-path", "hooks"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = os.path.dirname(os.path.realpath(memory))
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, env=environment, timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"git cannot be asked: {type(error).__name__}"
    if done.returncode:
        return f"git cannot read it: {done.stderr.decode('utf-8', 'replace').strip()[:300]}"
    used = os.path.realpath(memory / os.fsdecode(done.stdout.removesuffix(b"\n")))
    if used != os.path.realpath(hooks):
        return f"git is told to run the hooks of {used} (core.hooksPath), so ours is not run"
    return None


def put_git_hook(hooks: Path, script: bytes) -> None:
    """Put ours in place. The one that is there gets a second name first, so there is a hook at every moment."""
    hook, original = hooks / HOOK, hooks / (HOOK + BEFORE)
    if os.path.lexists(hook) and not is_ours(hook):
        if not os.path.lexists(original):
            try:
                os.link(hook, original, follow_symlinks=False)
            except OSError:  # no hard links here
                os.rename(hook, original)
        elif not _same(hook, original):
            return  # two originals: neither is lost, and `state` says that ours is missing
    if os.path.lexists(original):
        _link_beside(hooks)
    if not _holds(hook, script):
        write_whole(hook, script, 0o755)


def take_git_hook(hooks: Path) -> None:
    """Take ours out and put back what was there, also where putting ours in or taking it out was cut short."""
    hook, original = hooks / HOOK, hooks / (HOOK + BEFORE)
    if os.path.lexists(original):
        if is_ours(hook) or not os.path.lexists(hook):
            os.replace(original, hook)
        elif _same(hook, original):
            original.unlink()
    elif is_ours(hook):
        hook.unlink()
    _unlink_beside(hooks)


def _link_beside(hooks: Path) -> None:
    """A folder with links in which the original has its own name, and beside it what was beside it.

    Raises:
        OSError: it cannot be made, or something else is in its place.
    """
    folder = hooks / FOLDER
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    targets = {name: name for name in sorted(os.listdir(hooks)) if name != FOLDER and not name.endswith(".sample")}
    targets = {**dict(list(targets.items())[:_MOST_BESIDE]), HOOK: HOOK + BEFORE}
    with _opened(folder) as descriptor:
        for name, target in targets.items():
            with contextlib.suppress(FileExistsError):
                os.symlink(f"../{target}", name, dir_fd=descriptor)


def _unlink_beside(hooks: Path) -> None:
    """Take the folder away, if it holds nothing but links."""
    with contextlib.suppress(OSError):
        with _opened(hooks / FOLDER) as descriptor:
            for name in os.listdir(descriptor):
                if stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=descriptor)
        (hooks / FOLDER).rmdir()


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_ours(path: Path) -> bool:
    """Whether a file carries our mark."""
    try:
        with open_regular(path) as file:
            return MARK.encode() in file.read(200)
    except OSError:
        return False


def _holds(path: Path, data: bytes) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(len(data) + 1) == data
    except OSError:
        return False


def write_whole(path: Path, data: bytes, mode: int) -> None:
    """All or nothing; a link at `path` is replaced, not followed.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(6)}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _same(one: Path, other: Path) -> bool:
    return os.path.samestat(os.lstat(one), os.lstat(other))
