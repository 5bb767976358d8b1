"""Runs under this package and, in an environment of its own, under the second peer: both have the seed's ``PatchStore``."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from measuring import quiet, serve

if sys.argv[1] == "ours":
    from phionyx_letta.memory import MemoryPatch, PatchStore
else:
    from synapsekit.memory import MemoryPatch, PatchStore


def fill(path: str, count: int, size: int) -> float:
    """Save patches, every tenth of them applied."""
    store = PatchStore(path)
    for number in range(count):
        text = f"{number} {'lorem ipsum ' * (size // 12)}\n"
        patch = MemoryPatch("CLAUDE.md", text, text + "- one more\n", "@@ -1 +1,2 @@", f"fact {number}")
        store.save(patch)
        if number % 10 == 0:
            patch.status = "applied"
            store.update(patch)
    return 0.0


def load(path: str, count: int) -> float:
    """Seconds per patch to open the store and say how many are pending."""
    gc.collect()
    with quiet():
        start = time.perf_counter()
        store = PatchStore(path)
        pending = store.count("pending")
        taken = time.perf_counter() - start
    if pending < count * 9 // 10:
        raise RuntimeError(f"{pending} of {count} patches are pending")
    return taken / count


if __name__ == "__main__":
    serve({"fill": fill, "load": load})
