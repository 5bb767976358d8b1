"""What a failing command says and the code it ends with: 1 something is wrong, 2 not measured or used wrongly."""

from __future__ import annotations

from phionyx_letta.errors import (
    DiffConflictError,
    EvidenceRefused,
    IllegalTransition,
    InvalidMutation,
    InvalidPatch,
    PatchChanged,
    PatchNotFound,
    PhionyxError,
    ProposerUnavailable,
    StaleHeadError,
    TargetRefused,
    TornStoreError,
    UntrustedPatch,
)

__all__ = ["FAILED", "NOT_MEASURED", "OK", "CommandError", "exit_code"]

OK, FAILED, NOT_MEASURED = 0, 1, 2
_FAILURES = (
    *(TornStoreError, StaleHeadError, EvidenceRefused, InvalidMutation),
    *(
        DiffConflictError,
        IllegalTransition,
        InvalidPatch,
        PatchChanged,
        PatchNotFound,
        TargetRefused,
        UntrustedPatch,
        ProposerUnavailable,
    ),
)


class CommandError(PhionyxError):
    """A command was used wrongly, or could not do its work here."""

    def __init__(self, message: str, remedy: str = "", code: int = NOT_MEASURED) -> None:
        """Keep what is wrong, what to do, and the exit code."""
        super().__init__(message, remedy)
        self.code = code


def exit_code(error: PhionyxError) -> int:
    """The exit code of a command that ended with this error."""
    if isinstance(error, CommandError):
        return error.code
    return FAILED if isinstance(error, _FAILURES) else NOT_MEASURED
