"""Appending to a chain in a folder, long against short and against the peer; and the peer's diff.

The peer is phionyx-letta 0.1.0a3 in an environment of its own. Its chains have the same layout, so both sides append
to chains that were made the same way; the peer does not sync what it writes, ours does.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chains import contexts
from measuring import Child, NotMeasured, interleaved, medians, quiet, ratio, seconds

from phionyx_letta import FilesystemEnvelopeStore, UnsignedSigner

if TYPE_CHECKING:
    from catalogue import Bench

Measured = tuple[float, dict[str, Any]]
PEER = "phionyx-letta==0.1.0a3"
_LONG, _SHORT, _APPENDS = 20_000, 100, 20


class PeerPair:
    """One script under both packages; its argument says under which."""

    def __init__(self, folder: Path, peer: str = PEER, script: str = "peer_child.py") -> None:
        """Nothing is started yet."""
        self._folder = folder
        self._peer = peer
        self._script = script
        self._children: list[Child] = []

    def start(self) -> None:
        """Raises ``NotMeasured`` without uv or without a way to fetch the peer."""
        if shutil.which("uv") is None:
            raise NotMeasured("uv makes the peer's environment")
        script = str(Path(__file__).with_name(self._script))
        isolated = ["uv", "run", "-q", "--isolated", "--no-project", "--with", self._peer, "python", script, "theirs"]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        for number, command in enumerate(([sys.executable, script, "ours"], isolated)):
            log = self._folder / f"{self._script}-{number}.log"
            child = Child(command, cwd=self._folder, env=clean, log=log)
            self._children.append(child)
            try:
                child.wait_until_ready()
            except RuntimeError as error:
                if number == 0:
                    raise
                raise NotMeasured(f"{self._peer} does not run: {error}") from None

    def ours(self, **question: Any) -> float:
        """Ask the one under this package."""
        return float(self._children[0].ask(**question))

    def theirs(self, **question: Any) -> float:
        """Ask the one under the peer."""
        return float(self._children[1].ask(**question))

    def close(self) -> None:
        """End both."""
        for child in self._children:
            child.close()


def append_flat(bench: Bench) -> Measured:
    """20 appends to a chain of 100 and 20 to one of 20 000, durable on return, in turn.

    The short one is put back to 100 after each round.
    """
    root = bench.folder / "flat"
    store, signer = FilesystemEnvelopeStore(root), UnsignedSigner()
    _build(store, "long", _LONG)
    lengths = {"long": _LONG}

    def append(trace: str) -> float:
        made = list(contexts(trace, _APPENDS, first=lengths[trace]))
        lengths[trace] += _APPENDS
        with quiet():
            return seconds(lambda: [store.emit(one, signer=signer) for one in made]) / _APPENDS

    def append_to_short() -> float:
        shutil.rmtree(root / "short", ignore_errors=True)
        _build(store, "short", _SHORT)
        lengths["short"] = _SHORT
        return append("short")

    append_to_short(), append("long")
    pairs = interleaved(bench.rounds(25), append_to_short, lambda: append("long"))
    short, long = medians(pairs)
    return ratio(pairs), {"short_ms": short * 1e3, "long_ms": long * 1e3}


def append_against_peer(bench: Bench) -> Measured:
    """Build on the head and append, at 20 000 envelopes, by the same script."""
    root = bench.folder / "peer"
    store = FilesystemEnvelopeStore(root)
    for trace in ("ours", "theirs"):
        _build(store, trace, _LONG)
    turns = {"ours": _LONG, "theirs": _LONG}

    def ask(side: str, count: int) -> float:
        turn = turns[side]
        turns[side] += count
        who = bench.peer.ours if side == "ours" else bench.peer.theirs
        return who(do="append", root=str(root), trace=side, turn=turn, count=count)

    ask("ours", 1), ask("theirs", 1)
    pairs = interleaved(bench.rounds(15), lambda: ask("ours", _APPENDS), lambda: ask("theirs", _APPENDS))
    ours, theirs = medians(pairs)
    return ratio(pairs), {"ours_ms": ours * 1e3, "peer_ms": theirs * 1e3}


def diff_against_peer(bench: Bench) -> Measured:
    """One line appended to 20 000 characters: ours 100 times, the peer's once, in turn (seconds per diff)."""
    bench.peer.ours(do="diff", size=20_000, count=1)
    pairs = interleaved(
        bench.rounds(3),
        lambda: bench.peer.ours(do="diff", size=20_000, count=100),
        lambda: bench.peer.theirs(do="diff", size=20_000, count=1),
    )
    ours, theirs = medians(pairs)
    return ratio(pairs), {"ours_ms": ours * 1e3, "peer_ms": theirs * 1e3}


def _build(store: FilesystemEnvelopeStore, trace: str, length: int) -> None:
    """A chain of this length, without waiting for the disk."""
    signer = UnsignedSigner()
    with _unsynced():
        for context in contexts(trace, length):
            store.emit(context, signer=signer)


@contextmanager
def _unsynced() -> Iterator[None]:
    real = os.fsync
    os.fsync = lambda descriptor: None  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = real
