"""``python -m phionyx_letta.cli`` is the command ``phionyx-letta``."""

from phionyx_letta.cli import main

main()
