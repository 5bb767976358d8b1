"""The environment in which a program runs armed: the one setting, and a way in where the package's .pth file is not read."""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

_BOOTSTRAP = Path(__file__).with_name("bootstrap")


def armed_environment(program: str) -> dict[str, str]:
    """The environment in which ``program`` is armed."""
    environment = {**os.environ, "PHIONYX_LETTA_ENABLE": "1"}
    ours = Path(program).absolute().parent == Path(sys.prefix).absolute() / "bin"
    if not (ours and pth_installed()):
        rest = [
            entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(_BOOTSTRAP)
        ]
        environment["PYTHONPATH"] = os.pathsep.join([str(_BOOTSTRAP), *rest])
        environment["PHIONYX_LETTA_RUN_PYTHON"] = str(sys.implementation.cache_tag)
    return environment


def pth_installed() -> bool:
    """Whether this environment's interpreter reads our .pth file at its start."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return any((Path(folder) / "phionyx_letta.pth").is_file() for folder in folders)
