"""Runs agmi's nine edits against a real Letta that this package guards, and prints the row: ``run_agmi.py [--json] [--guard off]``.

With ``--guard off`` reads are not guarded and ``phionyx-letta verify`` is asked instead. Exit 0: every edit was found.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from phionyx_letta.demo.environment import letta_environment
from phionyx_letta.demo.postgres import EmbeddedPostgres

AGMI = "agent-memory-integrity==0.6.3"
ADAPTER = "agmi_adapter:PhionyxLettaAdapter"
FOUND = {"reject": "REJECTED", "off": "REPORTED"}
EDITS = 9


def run(guard: str = "reject", *, uri: str | None = None) -> dict[str, Any]:
    """Run the nine edits.

    Args:
        guard: ``reject`` or ``off``.
        uri: a database of its own, whose schema is made anew; one is started by default.

    Returns:
        agmi's own JSON: ``tool`` and ``edits``, each with ``edit``, ``verdict`` and ``detail``.

    Raises:
        RuntimeError: agmi gave no row.
    """
    if uri is None:
        with EmbeddedPostgres() as postgres:
            return run(guard, uri=postgres.new_database("agmi"))
    with tempfile.TemporaryDirectory(prefix="agmi-") as name:
        folder = Path(name)
        # beside the project's packages, not among them: agmi needs none of its own
        subprocess.run(
            ["uv", "pip", "install", "--quiet", "--target", str(folder / "agmi"), "--python", sys.executable, AGMI],
            check=True,
        )
        environment = letta_environment(
            uri,
            folder,
            model_base_url="http://127.0.0.1:9/v1",
            plugin=True,
            extra={
                "PYTHONPATH": f"{folder / 'agmi'}:{Path(__file__).parent}",
                "PYTHONWARNINGS": "ignore",
                "AGMI_GUARD": guard,
                "PHIONYX_LETTA_HOME": str(folder),
                # each call of the adapter has an event loop of its own, which a pool of connections does not survive
                "LETTA_DISABLE_SQLALCHEMY_POOLING": "true",
            },
        )
        row = folder / "row.json"
        command = [sys.executable, "-m", "agmi.check", "--adapter", ADAPTER, "--json", str(row)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if not row.exists():
            raise RuntimeError(f"agmi ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        result: dict[str, Any] = json.loads(row.read_text())
        return result


def main() -> int:
    """Print the row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--guard", choices=("reject", "off"), default="reject")
    arguments = parser.parse_args()
    result = run(arguments.guard)
    found = sum(edit["verdict"] == FOUND[arguments.guard] for edit in result["edits"])
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{result['tool']}: {found} of {len(result['edits'])} {FOUND[arguments.guard].lower()}")
        for edit in result["edits"]:
            print(f"  {edit['edit']:<24} {edit['verdict']:<14} {edit['detail']}")
    return 0 if found == len(result["edits"]) == EDITS else 1


if __name__ == "__main__":
    sys.exit(main())
