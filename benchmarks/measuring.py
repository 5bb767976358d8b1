"""How all benchmarks measure: pairs taken in turn, the garbage collector out of the way, medians of the pairs' ratios.

Two things that are compared run directly after each other, in changing order, so that whatever else the machine does
meets both. The figure is the median over the pairs, so one disturbed pair does not count.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class NotMeasured(Exception):
    """What a benchmark needs is not there (Letta, uv); its row says so."""


@contextmanager
def quiet() -> Iterator[None]:
    """Everything that exists now is exempt from collection, and nothing is collected inside."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleaved(rounds: int, first: Callable[[], float], second: Callable[[], float]) -> list[tuple[float, float]]:
    """Measure both in every round, the other one first in every second round."""
    pairs = []
    for number in range(rounds):
        if number % 2:
            b = second()
            pairs.append((first(), b))
        else:
            a = first()
            pairs.append((a, second()))
    return pairs


def ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """The median of second / first."""
    return statistics.median(b / a for a, b in pairs)


def medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The median of each side, for the details of a row."""
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


class Child:
    """A process that takes one JSON line and answers with one, so that several can be driven in turn."""

    def __init__(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        """Start it; it has to say ``"ready"`` first."""
        self._log = log or cwd / "benchmark-child.log"
        with self._log.open("ab") as said:
            self._process = subprocess.Popen(
                list(command),
                cwd=cwd,
                env=None if env is None else dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )

    def wait_until_ready(self) -> None:
        """Raises ``RuntimeError`` with the end of its log when it dies first."""
        if self._answer() != "ready":
            raise RuntimeError("the process did not say that it is ready")

    def ask(self, **question: Any) -> Any:
        """Send a question and wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # what a library prints in between is not for us
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        self._process.wait()
        said = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"a benchmark's process ended with code {self._process.returncode}:\n{said}")

    def close(self) -> None:
        """End it by closing its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(commands: Mapping[str, Callable[..., Any]]) -> None:
    """The child's side: answer questions until the input ends."""
    say("ready")
    for line in sys.stdin:
        question = json.loads(line)
        say(commands[question.pop("do")](**question))


def say(answer: object) -> None:
    """One answer of a child."""
    print("answer " + json.dumps(answer), flush=True)
