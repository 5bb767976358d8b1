"""Inside a Letta server: capture, attribution, sealer. Importing this package arms nothing and imports nothing of Letta.

``install()`` and ``uninstall()`` arm and disarm by hand; ``PHIONYX_LETTA_ENABLE=1`` does it without code.
``mutation_context(parent_envelope=…, forgetting_reason=…)`` says what caused the memory changes in its body.
"""

from __future__ import annotations

from phionyx_letta.plugin.attribution import mutation_context

__all__ = ["install", "mutation_context", "uninstall"]


def install() -> None:
    """Capture every memory change of this process from now on; calling it again changes nothing.

    Works before and after Letta is imported. Settings are read from the environment when Letta's models are there.

    Raises:
        SettingsError: in closed mode, a PHIONYX_LETTA_* variable has an unusable value; in open mode it is logged.
        UnsupportedLetta: in closed mode, this Letta cannot be instrumented; in open mode it is logged.
    """
    from phionyx_letta.plugin import activation

    activation.arm()


def uninstall() -> None:
    """Stop capturing, restore every wrapped original, stop the sealer. Rows already in the outbox stay and can be sealed."""
    from phionyx_letta.plugin import activation

    activation.disarm()
