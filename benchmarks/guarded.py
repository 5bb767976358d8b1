"""What guarded reads cost a real Letta: an agent's step, and a read of twenty blocks.

Two processes on one database, both with the plugin and fail-closed capture, one with guarded reads and a folder of checkpoints,
one without. They take turns.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring import Child, interleaved, medians, ratio

from phionyx_letta.demo.environment import letta_environment
from phionyx_letta.demo.model import ScriptedModel
from phionyx_letta.signing import generate_key

if TYPE_CHECKING:
    from catalogue import Bench

Measured = tuple[float, dict[str, Any]]
_SCRIPT = str(Path(__file__).with_name("guard_child.py"))


class GuardPair:
    """Letta without and with guarded reads."""

    def __init__(self, uri: str, folder: Path) -> None:
        """``uri`` is of a database with Letta's tables."""
        self._uri, self._folder = uri, folder / "guard"
        self._model = ScriptedModel()
        self._children: list[Child] = []

    def start(self) -> None:
        """Start both, one after the other: Letta's first start makes rows that two would make at once."""
        self._folder.mkdir()
        generate_key(self._folder / "key")
        self._model.__enter__()
        for guard in ("off", "reject"):
            home = self._folder / guard
            home.mkdir()
            settings = {
                "PYTHONWARNINGS": "ignore",
                "PHIONYX_LETTA_SIGNING_KEY": str(self._folder / "key"),
                "PHIONYX_LETTA_SINKS": f"folder:{self._folder / 'outside'}",
                "PHIONYX_LETTA_ON_ERROR": "closed",
                "PHIONYX_LETTA_GUARD": guard,
            }
            environment = letta_environment(
                self._uri, home, model_base_url=self._model.base_url, plugin=True, extra=settings
            )
            child = Child([sys.executable, _SCRIPT], cwd=home, env=environment)
            self._children.append(child)
            child.wait_until_ready()

    def ask(self, which: int, **question: Any) -> float:
        """Ask the one without (0) or the one with guarded reads (1)."""
        return float(self._children[which].ask(**question))

    def close(self) -> None:
        """End both."""
        for child in self._children:
            child.close()
        self._model.__exit__(None, None, None)


def step(bench: Bench) -> Measured:
    """Loading an agent with five blocks and one step of it that answers in words, guarded against not. A turn is 5 steps."""
    return _compared(bench, "steps", 5, 40)


def read(bench: Bench) -> Measured:
    """``get_all_blocks_by_ids_async`` of twenty blocks of 2 kB: milliseconds on top. A turn is 20 reads."""
    factor, details = _compared(bench, "reads", 20, 40)
    return details["guarded_ms"] - details["off_ms"], {**details, "ratio": factor}


def _compared(bench: Bench, what: str, count: int, rounds: int) -> Measured:
    pair = bench.guarded
    for which in (0, 1):  # connections, caches
        pair.ask(which, do=what, count=count)
    pairs = interleaved(
        bench.rounds(rounds), lambda: pair.ask(0, do=what, count=count), lambda: pair.ask(1, do=what, count=count)
    )
    off, guarded = medians(pairs)
    return ratio(pairs), {"off_ms": off * 1e3, "guarded_ms": guarded * 1e3}
