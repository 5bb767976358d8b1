"""The real Letta Code, in a virtual environment of its own: it has no Python module, and its name is that of the server's program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

#: A program that is installed already, in place of installing one (250 MB).
GIVEN = "LETTACODE_PROGRAM"


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.environ.get(GIVEN):
        return Path(os.environ[GIVEN])
    folder = tmp_path_factory.mktemp("letta-code") / "venv"
    environment = {**os.environ, "UV_LINK_MODE": "copy"}
    uv = shutil.which("uv")
    if uv:
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True, env=environment)
        install = [uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), "letta==0.34.12"]
    else:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "letta==0.34.12"]
    subprocess.run(install, check=True, env=environment)
    return folder / "bin" / "letta"
