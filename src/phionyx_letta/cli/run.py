"""`run`: a command with the plugin armed in every Python process it starts."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import typer

from phionyx_letta.cli.failures import CommandError
from phionyx_letta.cli.options import Json

__all__ = ["run"]


def run(context: typer.Context, as_json: Json = False) -> int:
    """Run a command armed: phionyx-letta run -- letta server.

    Sets PHIONYX_LETTA_ENABLE=1 and replaces this process, so signals and the exit code are the command's own. Where the
    package's .pth file does not do it, a sitecustomize on PYTHONPATH arms (not in `python -I` or `-E`, which ignore it).
    """
    command = list(context.args)
    if not command:
        raise CommandError("no command was given", "for example: phionyx-letta run -- letta server")
    from phionyx_letta.plugin.environment import armed_environment
    from phionyx_letta.settings import load_settings

    load_settings()  # a wrong setting is said here, before a server starts
    program = shutil.which(command[0])
    if program is None:
        there = Path(command[0]).exists()
        reason = "is not an executable file" if there else "was not found"
        raise CommandError(f"the command {command[0]} {reason}", "check the name, or give its path")
    environment = armed_environment(program)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(program, command, environment)
    except OSError as error:
        raise CommandError(f"the command {program} cannot be run: {error.strerror}", "check the file") from None
