"""Record three changes of a memory in a folder, then check them with the public key alone.

python examples/record_and_verify.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from phionyx_letta import (
    Ed25519Signer,
    Ed25519Verifier,
    FilesystemEnvelopeStore,
    MemoryMutationContext,
    compute_memory_diff,
    generate_key,
    verify_chain,
)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="phionyx-example-"))
    public_key = generate_key(folder / "signing.key")  # the private key stays; the public one goes to who verifies
    signer = Ed25519Signer((folder / "signing.key").read_text().splitlines()[-1])
    store = FilesystemEnvelopeStore(root=folder / "audit")

    memory = ""
    for turn, (kind, after) in enumerate(
        [("write", "Likes tea."), ("append", "Likes tea. Lives in Oslo."), ("clear", "")]
    ):
        context = MemoryMutationContext(
            trace_id="alex",
            turn_index=turn,
            producer="example.agent",
            block_id="block-1",
            block_label="human",
            mutation_kind=kind,
            diff=compute_memory_diff(before=memory, after=after),
            forgetting_reason="explicit_user_request" if kind == "clear" else None,
        )
        store.emit(context, signer=signer)
        memory = after

    report = verify_chain(store.iter_chain("alex"), verifier=Ed25519Verifier(public_key), expected_trace="alex")
    print(f"{report['checked']} envelopes in {folder / 'audit'}: valid = {report['valid']}")
    for name, answer in report["assurance"]["dimensions"].items():
        print(f"  {name:14} {answer}")


if __name__ == "__main__":
    main()
