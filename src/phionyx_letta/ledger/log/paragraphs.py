"""A file of signed notes: each note is two paragraphs, its text and its signature lines, and a blank line stands between notes.

So the file can be read by eye, and a note copied out of it is a note. What a writer left half-written, or somebody edited,
costs that note alone: reading goes on at the next paragraph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from phionyx_letta.notes import MAX_BYTES

__all__ = ["FILE", "notes_in"]

#: The file of a folder sink.
FILE = "checkpoints"

_SIGNATURES = "\N{EM DASH} ".encode()
_NO_SIGNATURES = "a checkpoint without signature lines: half-written, or cut"
_CARRIAGE_RETURNS = "its lines end in CRLF: it was changed on the way, and has to be sent as it is, as a binary file"
_NO_TEXT = "signature lines without a checkpoint"
_TOO_LARGE = f"a paragraph larger than {MAX_BYTES} bytes"


def notes_in(file: BinaryIO) -> Iterator[tuple[int, bytes | None, str]]:
    """Yield (line number from 1, note, "") for each pair of paragraphs, (line number, None, why) for what is no such pair."""
    text: tuple[int, bytes] | None = None
    for line, paragraph in _paragraphs(file):
        signatures = paragraph.startswith(_SIGNATURES)
        if text is not None and not signatures:
            yield text[0], None, _unsigned(text[1])
            text = None
        if len(paragraph) > MAX_BYTES:
            text = None
            yield line, None, _TOO_LARGE
        elif not signatures:
            text = line, paragraph
        elif text is None:
            yield line, None, _NO_TEXT
        else:
            yield text[0], text[1] + b"\n" + paragraph, ""
            text = None
    if text is not None:
        yield text[0], None, _unsigned(text[1])


def _unsigned(text: bytes) -> str:
    return _CARRIAGE_RETURNS if b"\r\n" in text else _NO_SIGNATURES


def _paragraphs(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (number of the first line, the lines) of each run of lines that are not empty; of a giant one only its start."""
    number, first, size = 1, 1, 0
    held: list[bytes] = []
    at_start = True
    while piece := file.readline(MAX_BYTES):  # a line without an end is read in pieces, not at once
        if at_start and piece == b"\n":
            if held:
                yield first, b"".join(held)
            held, size = [], 0
        elif size <= MAX_BYTES:
            first = first if held else number
            held.append(piece)
            size += len(piece)
        at_start = piece.endswith(b"\n")
        number += at_start
    if held:
        yield first, b"".join(held)
