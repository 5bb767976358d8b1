"""What a store of envelope chains must do, whatever it stands on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from phionyx_letta.envelope import MemoryMutationContext, Signs

__all__ = ["EnvelopeStore"]


@runtime_checkable
class EnvelopeStore(Protocol):
    """Chains of envelopes by trace id; every trace id is a chain of its own, whatever characters it has.

    Several threads, processes or hosts may use one store at once: a chain never forks.
    """

    def head(self, trace_id: str) -> str:
        """Return the chain's last hash, `GENESIS_HASH` for a chain that does not exist."""
        ...

    def append(self, trace_id: str, envelope: Mapping[str, Any]) -> None:
        """Add an envelope built on the current head; it is durable on return.

        Raises:
            StaleHeadError: another envelope was appended since the head was read; build it again, or use `emit`.
            StoreError: the store cannot be written.
            InvalidMutation: the envelope's own hash is wrong.
        """
        ...

    def emit(
        self,
        ctx: MemoryMutationContext,
        *,
        signer: Signs,
        package_version: str = ...,
        memory_audit_parent_ref: str | None = None,
        timestamp_utc: str | None = None,
        organization_id: str | None = None,
    ) -> dict[str, Any]:
        """Build the envelope of `ctx` on the chain's head and append it, as one step no other writer can come between.

        Raises:
            StoreError, InvalidMutation: as `append`; never `StaleHeadError`.
        """
        ...

    def iter_chain(self, trace_id: str) -> Iterator[dict[str, Any]]:
        """Yield the chain's envelopes from the first on, reading as it goes.

        Raises:
            TornStoreError: what is stored cannot be read; the message names the place.
        """
        ...

    def traces(self) -> Iterator[str]:
        """Yield the trace ids of all chains."""
        ...
