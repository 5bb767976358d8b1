"""Signed, hash-chained evidence for every change of an agent's memory.

These are the names of the library; importing them imports neither Letta nor a database. The plugin for a running Letta server is
`phionyx_letta.plugin`, the ledger in a database `phionyx_letta.ledger.sql`.
"""

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
from phionyx_letta.version import __version__

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
