"""Pairs of texts that are hard to compare: rewrites, shuffles, repetition, wide alphabets, many small edits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

_SIZES = (2_000, 20_000, 24_000, 100_000, 300_000, 1_000_000)
_WORDS = [
    "the",
    "user",
    "prefers",
    "short",
    "answers",
    "and",
    "lives",
    "in",
    "Lisbon",
    "with",
    "two",
    "cats",
    "who",
    "sleep",
    "most",
    "of",
    "the",
    "day",
]

Pair = tuple[str, str]


def nasty_pairs() -> Iterator[tuple[str, str, str]]:
    """Yields name, before and after; the same texts in every run."""
    for size in _SIZES:
        for make in _SHAPES:
            old, new = make(random.Random(size), size)
            yield f"{make.__name__.strip('_')}-{size}", old, new


def _prose(source: random.Random, size: int) -> str:
    words = []
    length = 0
    while length < size:
        word = source.choice(_WORDS) + (f" {source.randrange(1000)}\n" if source.random() < 0.1 else " ")
        words.append(word)
        length += len(word)
    return "".join(words)[:size]


def _append(source: random.Random, size: int) -> Pair:
    text = _prose(source, size)
    return text, text + "one more line\n"


def _rewrite_letters(source: random.Random, size: int) -> Pair:
    return "".join(source.choices("abcdefgh \n", k=size)), "".join(source.choices("abcdefgh \n", k=size))


def _rewrite_prose(source: random.Random, size: int) -> Pair:
    return _prose(source, size), _prose(source, size)


def _rewrite_wide(source: random.Random, size: int) -> Pair:
    letters = [chr(0x4E00 + number) for number in range(6000)]
    return "".join(source.choices(letters, k=size)), "".join(source.choices(letters, k=size))


def _rewrite_greek(source: random.Random, size: int) -> Pair:
    letters = [chr(0x391 + number) for number in range(60)] + [" ", "\n"]
    return "".join(source.choices(letters, k=size)), "".join(source.choices(letters, k=size))


def _rewrite_astral(source: random.Random, size: int) -> Pair:
    letters = [chr(0x1F300 + number) for number in range(700)]
    return "".join(source.choices(letters, k=size)), "".join(source.choices(letters, k=size))


def _shuffled_lines(source: random.Random, size: int) -> Pair:
    lines = _prose(source, size).splitlines(keepends=True)
    moved = source.sample(lines, len(lines))
    return "".join(lines), "".join(moved)


def _reversed_text(source: random.Random, size: int) -> Pair:
    text = _prose(source, size)
    return text, text[::-1]


def _one_letter(source: random.Random, size: int) -> Pair:
    return "a" * size, "a" * (size // 2) + "b" + "a" * (size // 2)


def _period(source: random.Random, size: int) -> Pair:
    return "ab" * (size // 2), "ba" * (size // 2) + "a"


def _long_period(source: random.Random, size: int) -> Pair:
    unit = _prose(source, 97)
    return unit * (size // 97), ("x" + unit * (size // 97) + "y")[: size - 40] + unit[40:]


def _every_tenth(source: random.Random, size: int) -> Pair:
    old = _prose(source, size)
    return old, "".join("#" if place % 10 == 0 else letter for place, letter in enumerate(old))


def _every_fortieth_inserted(source: random.Random, size: int) -> Pair:
    old = _prose(source, size)
    return old, "".join(old[place : place + 40] + "é" for place in range(0, len(old), 40))


def _line_endings(source: random.Random, size: int) -> Pair:
    text = _prose(source, size)
    return text, text.replace("\n", "\r\n")


def _equal_lines(source: random.Random, size: int) -> Pair:
    return "the same line\n" * (size // 14), "the same line \n" * (size // 15)


def _small_and_large(source: random.Random, size: int) -> Pair:
    return _prose(source, 2_000), _prose(source, size)


def _surrogates(source: random.Random, size: int) -> Pair:
    letters = [chr(0xD800 + number) for number in range(300)]
    return "".join(source.choices(letters, k=size)), "".join(source.choices(letters, k=size))


_SHAPES: tuple[Callable[[random.Random, int], Pair], ...] = (
    _append,
    _rewrite_letters,
    _rewrite_prose,
    _rewrite_wide,
    _rewrite_greek,
    _rewrite_astral,
    _shuffled_lines,
    _reversed_text,
    _one_letter,
    _period,
    _long_period,
    _every_tenth,
    _every_fortieth_inserted,
    _line_endings,
    _equal_lines,
    _small_and_large,
    _surrogates,
)
