"""Runs under this package and, in an environment of its own, under the peer's: the same calls, the same work.

Both have the API of the first seed, so nothing here knows which of the two it drives. It has no imports of its own but
``measuring``, which needs the standard library only.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from measuring import quiet, serve

from phionyx_letta import (
    FilesystemEnvelopeStore,
    MemoryMutationContext,
    UnsignedSigner,
    build_memory_envelope,
    compute_memory_diff,
)


def append(root: str, trace: str, turn: int, count: int) -> float:
    """Seconds per envelope that is built on the head and appended."""
    store = FilesystemEnvelopeStore(root)
    with quiet():
        start = time.perf_counter()
        for number in range(turn, turn + count):
            context = MemoryMutationContext(
                trace_id=trace,
                turn_index=number,
                producer="benchmark",
                block_id="block-0",
                block_label="human",
                mutation_kind="write",
                diff=compute_memory_diff("fact", "other"),
            )
            envelope = build_memory_envelope(
                context, previous_hash=store.head(trace), package_version="0.2.0", signer=UnsignedSigner()
            )
            store.append(trace, envelope)
        return (time.perf_counter() - start) / count


def diff(size: int, count: int) -> float:
    """Seconds per diff of a one-line append to a text of that many characters."""
    line = "lorem ipsum dolor sit amet, consectetur\n"
    before = (line * (size // len(line) + 1))[:size]
    after = before + "and one more line\n"
    with quiet():
        start = time.perf_counter()
        for _ in range(count):
            compute_memory_diff(before, after)
        return (time.perf_counter() - start) / count


if __name__ == "__main__":
    serve({"append": append, "diff": diff})
