"""The error of the demo's machinery."""

from __future__ import annotations

from phionyx_letta.errors import PhionyxError

__all__ = ["DemoError"]


class DemoError(PhionyxError, RuntimeError):
    """A part of the demo could not be had or did not start."""
