"""agmi's nine edits of a store at rest (PyPI ``agent-memory-integrity``), in an environment of its own: all are found.

agmi's own controls are part of each row: a clean store has to verify, it has to verify after a restart, and each edit has to have
landed; else the verdict is NOT EVALUABLE or ERROR, which fails here.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec

import pytest
from run_agmi import EDITS, run

from phionyx_letta.demo.postgres import EmbeddedPostgres

pytestmark = [
    pytest.mark.slow,
    pytest.mark.letta,
    pytest.mark.skipif(shutil.which("uv") is None, reason="uv installs agmi where nothing else sees it"),
    pytest.mark.skipif(find_spec("letta") is None, reason="the Letta server is not installed"),
]


@pytest.mark.parametrize(("guard", "verdict"), [("reject", "REJECTED"), ("off", "REPORTED")])
def test_every_edit_is_refused_on_the_read_path_or_reported_by_verify(
    guard: str, verdict: str, postgres: EmbeddedPostgres
) -> None:
    result = run(guard, uri=postgres.new_database(f"agmi_{guard}"))
    postgres.drop_database(f"agmi_{guard}")
    assert len(result["edits"]) == EDITS
    for edit in result["edits"]:
        assert edit["verdict"] == verdict, edit
        reason = "ReadRefused" if guard == "reject" else "AssertionError"  # no crash may pass for a discovery
        assert reason in edit["detail"], edit
