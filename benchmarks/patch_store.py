"""Opening a store of 10 000 patches, against the second peer: synapsekit 2.0.1 in an environment of its own.

Each side opens a file it wrote itself. The peer reads the content of every patch; ours reads what lists need and leaves the
content on the disk until a patch is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from measuring import interleaved, medians, ratio

if TYPE_CHECKING:
    from catalogue import Bench

Measured = tuple[float, dict[str, Any]]
PEER = "synapsekit==2.0.1"
_PATCHES, _SIZE = 10_000, 2_000


def load_against_peer(bench: Bench) -> Measured:
    """Open and count the pending ones; the file of the peer read by ours is in the details."""
    paths = {side: str(bench.folder / f"patches-{side}.jsonl") for side in ("ours", "theirs")}
    bench.memory_peer.ours(do="fill", path=paths["ours"], count=_PATCHES, size=_SIZE)
    bench.memory_peer.theirs(do="fill", path=paths["theirs"], count=_PATCHES, size=_SIZE)

    def load(side: str, path: str) -> float:
        who = bench.memory_peer.ours if side == "ours" else bench.memory_peer.theirs
        return who(do="load", path=paths[path], count=_PATCHES)

    load("ours", "ours"), load("theirs", "theirs")
    pairs = interleaved(bench.rounds(9), lambda: load("ours", "ours"), lambda: load("theirs", "theirs"))
    ours, theirs = medians(pairs)
    foreign = load("ours", "theirs")
    return ratio(pairs), {"ours_us": ours * 1e6, "peer_us": theirs * 1e6, "ours_on_the_peers_file_us": foreign * 1e6}
