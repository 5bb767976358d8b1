"""What the log last says of every block, held in the memory of one process: rebuilt from the sealed envelopes at start, then
grown with them.

An envelope counts if a checkpoint covers it, or if a trusted key signed it and it continues its chain: a copy of an old one, or a
forged one, says nothing. The tables that keep heads and states for the sealer can be set back together with the blocks they
describe. This cannot: its tree is compared with the checkpoints that were kept outside, and it remembers how long the log
already was. No database here.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.envelope import CONTENT_UNKNOWN, GENESIS_HASH, envelope_hash
from phionyx_letta.merkle import Frontier, leaf_hash
from phionyx_letta.plugin.mutation import GONE, STATE_VERSION

__all__ = ["LogView", "Recorded", "Verifies"]

#: For so many sizes back the root can be compared with a checkpoint that becomes known only now.
_SIZES = 4096
#: How long a state that was overtaken is remembered, s: a reader may have loaded it just before.
RECENT = 60.0


Verifies = Callable[[str, str, int], bool]
"""Takes a hash, a signature over it, and the envelope's place in the log."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is recorded of one block, or of one system message."""

    state: str | None = None
    """Digest over its recorded columns; ``GONE`` if it was deleted; None if that is not known."""
    after_hash: str | None = None
    """Of its value; all there is where a library wrote the envelope."""
    history: str | None = None
    """Digest over its checkpoints; None if none was ever recorded."""
    seq: int = -1
    """Of the newest envelope about it; -1: still in the outbox."""
    salted: bool = False
    """Its hashes are keyed: only who has the salts can compare them."""

    def after(self, letta: Mapping[str, Any], diff: Mapping[str, Any] | None) -> Recorded:
        """What is recorded after one more mutation.

        A baseline of what was recorded before changes nothing: somebody could else edit a block, remove the ledger's note
        of it, and have the edit taken for its first state.
        """
        state, after_hash = self.state, self.after_hash
        known = state is not None or after_hash is not None
        told = diff["after_hash"] if diff is not None and letta.get("content") != CONTENT_UNKNOWN else None
        if letta.get("event") == "baseline" and known:
            return self
        if letta.get("event") == "delete":
            state, after_hash = GONE, None
        elif isinstance(letta.get("state"), str):
            state = letta["state"] if letta.get("state_version") == STATE_VERSION else None
            after_hash = told or after_hash
        elif told not in (None, after_hash):
            state, after_hash = None, told
        history = letta.get("history", self.history)
        salted = self.salted or isinstance(letta.get("salt"), str)
        return replace(self, state=state, after_hash=after_hash, history=history, salted=salted)


class LogView:
    """The log as this process knows it. Every method may be called from any thread."""

    def __init__(self, verifies: Verifies) -> None:
        """Know nothing yet. ``verifies`` says whether a trusted key made a signature over a hash."""
        self._verifies = verifies
        self._lock = threading.Lock()
        self._tree = Frontier()
        self._sizes: deque[tuple[int, tuple[bytes, ...]]] = deque([(0, ())], maxlen=_SIZES)
        self._last = b""
        self._known: dict[str, Recorded] = {}
        self._heads: dict[str, str] = {}
        self._nonces: set[int] = set()  # the first 64 bits of each: the rest would double what they take
        self._recent: dict[str, list[tuple[float, Recorded]]] = {}
        self._awaited: dict[str, tuple[str, float]] = {}  # nonces of rows that were committed and are not sealed yet
        self._outside: Checkpoint | None = None
        self.disbelieved = 0
        """Envelopes that say nothing: no trusted key signed them, or they do not continue their chain."""
        self.fault: str | None = None
        """Why nothing of this log can be believed; None while it can."""

    @property
    def size(self) -> int:
        """How many envelopes were taken."""
        return self._tree.size

    @property
    def last_leaf(self) -> bytes:
        """Of the newest of them."""
        return self._last

    @property
    def outside(self) -> Checkpoint | None:
        """The largest checkpoint that is known from outside."""
        return self._outside

    def extend(self, bodies: Iterable[tuple[int, str]]) -> None:
        """Take envelopes in sealing order; those that were taken before are passed over."""
        with self._lock:
            for seq, body in bodies:
                if seq < self._tree.size or self.fault is not None:
                    continue
                if seq > self._tree.size:
                    self.fault = f"envelope {self._tree.size} is missing in the sealing order"
                    return
                self._take(seq, body)

    def expect(self, checkpoint: Checkpoint) -> None:
        """Hold the log to a checkpoint from outside; the larger counts."""
        with self._lock:
            if self._outside is None or checkpoint.size > self._outside.size:
                self._outside = checkpoint
                for size, hashes in self._sizes:
                    if size == checkpoint.size:
                        self._compare(size, hashes)

    def shorter(self, size: int, least: int) -> None:
        """Note that the database has only ``size`` envelopes, where it had ``least``."""
        with self._lock:
            if self.fault is None:
                self.fault = (
                    f"the log has {size} envelopes and had {least}: its end was cut, or the database was set back"
                )

    def changed(self, seq: int) -> None:
        """Note that the envelope at ``seq`` is not the one that was taken."""
        with self._lock:
            self.fault = self.fault or f"envelope {seq} is not the one it was: the log was rewritten"

    def recorded(self, block_id: str) -> Recorded | None:
        """What the newest envelope about this block says; None if there is none."""
        return self._known.get(block_id)

    def recently(self, block_id: str, since: float) -> list[Recorded]:
        """What was recorded before, and was learned to be overtaken only after ``since`` (monotonic, s)."""
        return [one for until, one in self._recent.get(block_id, ()) if until >= since]

    def await_sealing(self, block_id: str, nonce: str) -> None:
        """A row with this nonce was committed: from now on it is in the outbox or in the log."""
        with self._lock:
            self._awaited.setdefault(nonce, (block_id, time.monotonic()))

    def is_sealed(self, nonce: str) -> bool:
        """Whether a row with this nonce was sealed: it waits no more, and one that is there again is a copy."""
        return _shortened(nonce) in self._nonces

    def awaited(self, block_ids: Iterable[str], before: float) -> dict[str, list[str]]:
        """Nonces of rows about these blocks that were committed before ``before`` and are not sealed yet."""
        wanted, found = set(block_ids), dict[str, list[str]]()
        with self._lock:
            for nonce, (block_id, since) in self._awaited.items():
                if block_id in wanted and since < before:
                    found.setdefault(block_id, []).append(nonce)
        return found

    def _take(self, seq: int, body: str) -> None:
        leaf = leaf_hash(body.encode("utf-8", "surrogatepass"))
        self._tree.append(leaf)
        self._last = leaf
        self._sizes.append((self._tree.size, self._tree.hashes))
        if self._outside is not None and self._tree.size == self._outside.size:
            self._compare(self._tree.size, self._tree.hashes)
        try:
            envelope = json.loads(body)
            mutation, letta = envelope["mutation"], envelope["subject"]["metadata"].get("letta")
            block_id, diff = mutation["block_id"], mutation["diff"]
            letta = letta if isinstance(letta, dict) else {}
            believed = self._believes(seq, envelope)
            before = self._known.get(block_id, Recorded())
            after = replace(before.after(letta, diff), seq=seq)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.fault = f"envelope {seq} is not one: the ledger was changed in the database"
            return
        if not believed:
            self.disbelieved += 1
            return
        nonce = letta.get("nonce")
        if isinstance(nonce, str):
            self._awaited.pop(nonce, None)
            self._nonces.add(_shortened(nonce))
        self._known[block_id] = after
        if before.seq >= 0 and (before.state, before.history) != (after.state, after.history):
            self._overtake(block_id, before)

    def _believes(self, seq: int, envelope: dict[str, Any]) -> bool:
        integrity, trace = envelope["integrity"], str(envelope["subject"].get("trace_id"))
        previous, current = integrity["previous"], integrity["current"]
        covered = self._outside is not None and seq < self._outside.size
        if not covered and (
            previous != self._heads.get(trace, GENESIS_HASH)
            or envelope_hash(envelope, previous) != current
            or not self._verifies(current, integrity["signature"], seq)
        ):
            return False
        self._heads[trace] = current
        return True

    def _overtake(self, block_id: str, before: Recorded) -> None:
        now = time.monotonic()
        recent = [one for one in self._recent.get(block_id, ()) if one[0] > now - RECENT]
        self._recent[block_id] = [*recent, (now, before)]

    def _compare(self, size: int, hashes: tuple[bytes, ...]) -> None:
        assert self._outside is not None
        if Frontier(size, hashes).root() != self._outside.root:
            self.fault = f"the first {size} envelopes are not those of a checkpoint from outside: the log was rewritten"


def _shortened(nonce: str) -> int:
    try:
        return int(nonce[:16], 16)
    except ValueError:
        return -1
