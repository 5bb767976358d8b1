"""Signed, hash-chained evidence for every change of an agent's memory.

These are the names of the library; importing the package imports nothing else, each name loads its module when it is first
used. The plugin for a running Letta server is `phionyx_letta.plugin`, the ledger in a database `phionyx_letta.ledger.sql`.
"""

from phionyx_letta.version import __version__

TYPE_CHECKING = False  # type checkers take it for true; importing typing for it would cost more than all the rest
if TYPE_CHECKING:
    from phionyx_letta.diff import MemoryDiff, compute_memory_diff, content_hash
    from phionyx_letta.envelope import (
        GENESIS_HASH,
        MUTATION_KINDS,
        SCHEMA_ID,
        MemoryConsolidationAudit,
        MemoryMutationContext,
        build_memory_envelope,
        canonical_json,
        envelope_hash,
        envelope_line,
        envelope_schema,
    )
    from phionyx_letta.errors import (
        EvidenceRefused,
        InvalidMutation,
        LedgerUnavailable,
        PhionyxError,
        SettingsError,
        SigningKeyError,
        StaleHeadError,
        StoreError,
        TornStoreError,
        UnsupportedLetta,
    )
    from phionyx_letta.ledger.filesystem import FilesystemEnvelopeStore
    from phionyx_letta.ledger.store import EnvelopeStore
    from phionyx_letta.signing import (
        Ed25519Signer,
        Ed25519Verifier,
        HmacSigner,
        HmacVerifier,
        Signer,
        TrustedKeys,
        UnsignedSigner,
        Verifier,
        generate_key,
        get_signer,
        load_verifier,
        signature_algorithm,
    )
    from phionyx_letta.verification import ChainVerifier, verify_chain

__all__ = [
    "GENESIS_HASH",
    "MUTATION_KINDS",
    "SCHEMA_ID",
    "ChainVerifier",
    "Ed25519Signer",
    "Ed25519Verifier",
    "EnvelopeStore",
    "EvidenceRefused",
    "FilesystemEnvelopeStore",
    "HmacSigner",
    "HmacVerifier",
    "InvalidMutation",
    "LedgerUnavailable",
    "MemoryConsolidationAudit",
    "MemoryDiff",
    "MemoryMutationContext",
    "PhionyxError",
    "SettingsError",
    "Signer",
    "SigningKeyError",
    "StaleHeadError",
    "StoreError",
    "TornStoreError",
    "TrustedKeys",
    "UnsignedSigner",
    "UnsupportedLetta",
    "Verifier",
    "__version__",
    "build_memory_envelope",
    "canonical_json",
    "compute_memory_diff",
    "content_hash",
    "envelope_hash",
    "envelope_line",
    "envelope_schema",
    "generate_key",
    "get_signer",
    "load_verifier",
    "signature_algorithm",
    "verify_chain",
]

_NAMES = {
    "diff": ("MemoryDiff", "compute_memory_diff", "content_hash"),
    "envelope": (
        "GENESIS_HASH",
        "MUTATION_KINDS",
        "SCHEMA_ID",
        "MemoryConsolidationAudit",
        "MemoryMutationContext",
        "build_memory_envelope",
        "canonical_json",
        "envelope_hash",
        "envelope_line",
        "envelope_schema",
    ),
    "errors": (
        "EvidenceRefused",
        "InvalidMutation",
        "LedgerUnavailable",
        "PhionyxError",
        "SettingsError",
        "SigningKeyError",
        "StaleHeadError",
        "StoreError",
        "TornStoreError",
        "UnsupportedLetta",
    ),
    "ledger.filesystem": ("FilesystemEnvelopeStore",),
    "ledger.store": ("EnvelopeStore",),
    "signing": (
        "Ed25519Signer",
        "Ed25519Verifier",
        "HmacSigner",
        "HmacVerifier",
        "Signer",
        "TrustedKeys",
        "UnsignedSigner",
        "Verifier",
        "generate_key",
        "get_signer",
        "load_verifier",
        "signature_algorithm",
    ),
    "verification": ("ChainVerifier", "verify_chain"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # so that a type checker still reports names that do not exist

    def __getattr__(name: str) -> object:
        """Load the module of a public name (PEP 562): the first `import phionyx_letta` of a server must cost nothing."""
        module = _MODULES.get(name)
        if module is None:
            raise AttributeError(f"module 'phionyx_letta' has no attribute {name!r}")
        from importlib import import_module

        value: object = getattr(import_module(f"phionyx_letta.{module}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
