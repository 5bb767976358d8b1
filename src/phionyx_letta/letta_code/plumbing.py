"""Git commands that write to a memory repository: ours run none of its hooks; those run where a person asked for a commit.

Our own commands see objects as they are (no replacements, no grafts), fetch nothing, and run no program that the repository's
configuration names. Two commands run hooks: `git hook run`, and the `update-ref` that moves HEAD, since git has no other way to ask
`reference-transaction`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from phionyx_letta.errors import TargetRefused

__all__ = ["Plumbing"]

_TIMEOUT = 120.0  # s, for one git command: a repository's own hooks take part
_GRACE = 5.0  # s: git takes its locks away when it is told to end
_SETTINGS = (
    "core.fsmonitor=false",
    "core.splitIndex=false",
    "core.fsync=all",
    "commit.gpgSign=false",
    "i18n.commitEncoding=UTF-8",
)
_IDENTITY = {
    f"GIT_{role}_{part}": value
    for role in ("AUTHOR", "COMMITTER")
    for part, value in (("NAME", "phionyx-letta"), ("EMAIL", "phionyx-letta@localhost"))
}
#: Not for hooks, which would inherit it and see another repository than the agent's own commits do.
_ALONE = {
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_GRAFT_FILE": os.devnull,
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
}


class Plumbing:
    """Git in one repository, with none of the caller's GIT_* variables."""

    def __init__(self, path: Path) -> None:
        """Take the work tree's folder; nothing is run yet."""
        self._path = path

    def run(self, *arguments: str, given: bytes = b"", extra: Mapping[str, str] | None = None) -> str:
        """Run git without any hook; return what it wrote, without its last line feed.

        Raises:
            TargetRefused: it failed or did not end.
        """
        settings = (f"core.hooksPath={os.devnull}", *_SETTINGS)
        return self._run(settings, arguments, given, {**_ALONE, **(extra or {})})

    def hook(self, name: str, *arguments: str, extra: Mapping[str, str] | None = None) -> None:
        """Run one of the repository's hooks, if it has it.

        Raises:
            TargetRefused: it failed or did not end.
        """
        self._run(_SETTINGS, ("hook", "run", "--ignore-missing", name, "--", *arguments), b"", extra or {})

    def move_head(self, base: str, new: str, subject: str) -> None:
        """Move the branch HEAD stands for from `base` to `new`, if `reference-transaction` lets it.

        Raises:
            TargetRefused: it is elsewhere by now, or the hook refuses.
        """
        self._run(_SETTINGS, ("update-ref", "-m", f"commit: {subject}", "HEAD", new, base), b"", {})

    def _run(
        self, settings: tuple[str, ...], arguments: tuple[str, ...], given: bytes, extra: Mapping[str, str]
    ) -> str:
        """No option is given that git hands on to hooks and that changes what they see (`--literal-pathspecs` made Letta's validator
        find no file).
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        own = {
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_CEILING_DIRECTORIES": os.path.dirname(os.path.realpath(self._path)),
            "LANGUAGE": "en",
        }
        command = ["git", "-C", str(self._path), *(word for one in settings for word in ("-c", one)), *arguments]
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            code = _ended(command, {**kept, **own, **_IDENTITY, **extra}, given, output.fileno(), errors.fileno())
            if code == 0:
                output.seek(0)
                return output.read().decode("utf-8", "surrogateescape").removesuffix("\n")
            said = (_last(errors) or _last(output)).decode("utf-8", "replace").strip()[-400:]
        shown = "".join(char if char.isprintable() else " " for char in said)
        if arguments[0] == "hook" and "is not a git command" in said:
            raise TargetRefused("this git is too old to run a repository's hooks", "use git 2.36 or newer")
        raise TargetRefused(
            f"the memory's repository refuses it ({' '.join(arguments[: 1 + 3 * (arguments[0] == 'hook')])}): {shown}",
            "correct the patch (`phionyx-letta code review -i`) or the repository, and apply again",
        )


def _last(file: IO[bytes]) -> bytes:
    """What was written at the end: a hook may write without limit."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 4096))
    return file.read()


def _ended(command: list[str], environment: dict[str, str], given: bytes, output: int, errors: int) -> int:
    """Run to the end and return the code. Files, not pipes: what a hook leaves running in the background would keep a pipe open."""
    with tempfile.TemporaryFile() as source:
        source.write(given)
        source.seek(0)
        try:
            process = subprocess.Popen(
                command, stdin=source, stdout=output, stderr=errors, env=environment, start_new_session=True
            )
        except OSError as error:
            raise TargetRefused(f"git cannot be run: {error.strerror}", "install git, or check its rights") from error
    try:
        return process.wait(_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise TargetRefused(
            f"git {' '.join(command[-4:])} did not end within {_TIMEOUT:.0f} s", "check the repository's hooks"
        ) from None
    finally:
        if process.returncode is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
            return
