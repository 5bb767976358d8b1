"""The command ``phionyx-letta``. Each command does what the function of the same name does in the library.

Importing this package imports nothing; no command imports Letta into its own process.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process; ends with `SystemExit`."""
    from phionyx_letta.cli.app import main as run

    run()
