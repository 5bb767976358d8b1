"""Other versions of Letta's server, their real code on this environment's packages: armed where the models fit, and said so.

Only the wheel itself is fetched; it goes before the installed 0.16.8 on the path, metadata included.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from phionyx_letta.demo.environment import letta_environment

SCRIPT = """
import asyncio, json, sys
sys.argv.append("--no-generation")
from phionyx_letta.demo.launcher import create_schema
create_schema()
import letta.server.rest_api.app as app
from letta.schemas.block import Block, BlockUpdate

async def main():
    server = app.server
    server.default_org = await server.organization_manager.create_default_organization_async()
    user = await server.user_manager.create_default_actor_async()
    block = await server.block_manager.create_or_update_block_async(Block(label="a", value="1"), user)
    await server.block_manager.update_block_async(block.id, BlockUpdate(value="12"), user)
    from phionyx_letta.plugin import activation
    worker = activation.worker()
    print(json.dumps({"letta": worker.letta_version, "unsupported": worker.unsupported,
                      "captured": worker.runtime.counts["captured"], "gaps": worker.runtime.counts["gaps"]}))

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.16.7", "0.15.1"])
def test_another_server_whose_models_fit_is_recorded_and_called_untested(
    version: str, empty_database: str, tmp_path: Path
) -> None:
    code, home = tmp_path / "code", tmp_path / "home"
    home.mkdir()
    fetch = ["uv", "run", "-q", "--isolated", "--no-project", "--with", "pip", "python", "-m", "pip", "download", "-q"]
    subprocess.run([*fetch, "--no-deps", "-d", str(tmp_path), f"letta=={version}"], check=True, capture_output=True)
    [wheel] = tmp_path.glob("letta-*.whl")
    zipfile.ZipFile(wheel).extractall(code)
    extra = {"PYTHONPATH": str(code), "PHIONYX_LETTA_SIGNING_KEY": "11" * 32, "PHIONYX_LETTA_BASELINE": "off"}
    nowhere = "http://127.0.0.1:9/v1"
    env = letta_environment(empty_database, home, model_base_url=nowhere, plugin=True, extra=extra)
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {"letta": version, "unsupported": None, "captured": 2, "gaps": 0}
    assert f"not tested with letta {version}" in done.stdout + done.stderr
