"""Change a stored envelope and see the verifier name it.

python examples/caught.py
"""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path

from phionyx_letta import (
    Ed25519Signer,
    Ed25519Verifier,
    FilesystemEnvelopeStore,
    MemoryMutationContext,
    compute_memory_diff,
    verify_chain,
)


def main() -> None:
    signer = Ed25519Signer("07" * 32)  # a key of 64 hex digits; use `phionyx-letta keygen` for a real one
    with tempfile.TemporaryDirectory(prefix="phionyx-example-") as folder:
        record_change_and_verify(signer, Path(folder))


def record_change_and_verify(signer: Ed25519Signer, root: Path) -> None:
    store = FilesystemEnvelopeStore(root=root)
    contents = ["", "Prefers trains.", "Prefers trains. Allergic to nuts."]
    for before, after in pairwise(contents):
        diff = compute_memory_diff(before=before, after=after, include_diff_text=True)
        store.emit(MemoryMutationContext("alex", 0, "example.agent", "block-1", "human", "append", diff), signer=signer)

    victim = sorted((root / "alex").glob("0*.json"))[1]
    envelope = json.loads(victim.read_text())
    envelope["mutation"]["diff"]["diff_text"] = envelope["mutation"]["diff"]["diff_text"].replace("nuts", "nothing")
    victim.write_text(json.dumps(envelope))

    report = verify_chain(store.iter_chain("alex"), verifier=Ed25519Verifier(signer.public_key_hex))
    print(f"valid = {report['valid']}: {report['reason']}")
    for finding in report["findings"]:
        print(f"  position {finding['position']}, {finding['block_id']}: {finding['message']}")


if __name__ == "__main__":
    main()
