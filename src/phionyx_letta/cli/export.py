"""`export`: chains as a file of lines, or as the folder the peers' verifier reads."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from phionyx_letta.cli.failures import FAILED, CommandError
from phionyx_letta.cli.options import Json, Keys, Ledger
from phionyx_letta.cli.output import answer
from phionyx_letta.cli.sources import Source, existing_chain, open_source
from phionyx_letta.errors import PhionyxError

__all__ = ["export"]

_FORMATS = ("jsonl", "folder")


def export(
    traces: Annotated[
        list[str] | None,
        typer.Argument(metavar="TRACE", help="The chain: an agent's id, or a block's. With --bundle, several."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATH", help="The file or folder to write.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every chain.")] = False,
    form: Annotated[
        str,
        typer.Option(
            "--format", metavar="FORMAT", help="jsonl: one envelope a line; folder: a store, a folder for each chain."
        ),
    ] = "jsonl",
    as_bundle: Annotated[
        bool,
        typer.Option(
            "--bundle",
            help="One zip that proves itself: chains, log, checkpoints, public keys, a verifier. Default: all.",
        ),
    ] = False,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoint",
            metavar="PATH",
            help="With --bundle: put in these checkpoints too (a file, a folder, a git repository). May be given several times.",
        ),
    ] = None,
    key: Keys = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is at PATH.")] = False,
    ledger: Ledger = None,
    as_json: Json = False,
) -> int:
    """Write chains to a file or a folder, for an auditor: `verify` reads both, and the folder is the peers' layout.

    With --all a file holds all chains in the order of sealing. Nothing is checked, except that a folder takes no envelope
    whose hash is wrong. A bundle goes to somebody who has nothing but a public key: docs/evidence.md.
    """
    traces = traces or []
    if as_bundle:
        return _bundle(output, traces, checkpoint or [], key, form, every, ledger, force=force, as_json=as_json)
    if checkpoint or key:
        raise CommandError("only a bundle takes checkpoints and keys", "add --bundle")
    if len(traces) > 1:
        raise CommandError("several chains go into a bundle only", "add --bundle, or export one at a time")
    trace = traces[0] if traces else None
    if output is None or (trace is None) == (not every):
        raise CommandError(
            "give TRACE or --all, and --output PATH", "for example: phionyx-letta export --all -o ledger.jsonl"
        )
    if form not in _FORMATS:
        raise CommandError(f"there is no format {form!r}", f"give one of {', '.join(_FORMATS)}")
    _check_free(output, force=force)
    with open_source(ledger) as source:
        if trace is not None:
            existing_chain(source, trace)
        with _translated(output):
            count, chains = (_write_lines if form == "jsonl" else _write_folder)(source, trace, output)
    result = {"output": str(output), "format": form, "envelopes": count, "chains": chains}
    line = f"wrote {count} envelopes of {chains} chain{'' if chains == 1 else 's'} to {output}"
    answer(result, as_json=as_json, show=lambda console: console.print(line, soft_wrap=True))
    return 0


def _bundle(
    output: Path | None,
    traces: list[str],
    checkpoints: list[str],
    key: list[str] | None,
    form: str,
    every: bool,
    ledger: str | None,
    *,
    force: bool,
    as_json: bool,
) -> int:
    from phionyx_letta.cli.bundling import bundle

    if output is None or (traces and every) or form != "jsonl":
        raise CommandError(
            "a bundle takes TRACE or --all, and --output FILE",
            "for example: phionyx-letta export --bundle -o evidence.zip",
        )
    if output.is_dir():
        raise CommandError(f"{output} is a folder", "give the path of a file")
    _check_free(output, force=force)
    with _translated(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(output) as partial:
            result = bundle(output, partial, traces, ledger, key, checkpoints)
    count = result["checkpoints"]
    line = f"wrote a bundle of {result['envelopes']} envelopes and {count} checkpoint{'' if count == 1 else 's'} to {output}"
    answer(result, as_json=as_json, show=lambda console: console.print(line, soft_wrap=True))
    return 0


def _check_free(output: Path, *, force: bool) -> None:
    taken = output.is_symlink() or (any(output.iterdir()) if output.is_dir() else output.exists())
    if taken and not force:
        raise CommandError(f"{output} exists", "choose another path, or --force to replace it")
    if taken and output.is_dir() and not _is_export(output):
        raise CommandError(f"{output} holds something else than exported chains", "choose another path")


def _is_export(folder: Path) -> bool:
    return all((child / "chain.jsonl").is_file() for child in folder.iterdir())


def _write_lines(source: Source, trace: str | None, output: Path) -> tuple[int, int]:
    if output.is_dir():
        raise CommandError(f"{output} is a folder", "give the path of a file")
    envelopes = source.everything() if trace is None else source.chain(trace)
    output.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(output) as partial, partial.open("w", encoding="ascii") as file:
        count, traces = 0, set()
        for line, name in _lines(envelopes):
            file.write(line + "\n")
            count += 1
            traces.add(name)
        file.flush()
        os.fsync(file.fileno())
    return count, len(traces)


def _lines(envelopes: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    from phionyx_letta.envelope import envelope_line

    for envelope in envelopes:
        subject = envelope.get("subject")
        yield envelope_line(envelope), str(subject.get("trace_id")) if isinstance(subject, dict) else ""


def _write_folder(source: Source, trace: str | None, output: Path) -> tuple[int, int]:
    from phionyx_letta.ledger.filesystem import FilesystemEnvelopeStore

    output.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(output) as partial:
        partial.mkdir()
        store, count, chains = FilesystemEnvelopeStore(partial), 0, 0
        for name in [trace] if trace is not None else source.traces():
            chains += 1
            for position, envelope in enumerate(source.chain(name)):
                _append(store, name, position, envelope)
                count += 1
    return count, chains


def _append(store: Any, trace: str, position: int, envelope: dict[str, Any]) -> None:
    try:
        store.append(trace, envelope)
    except PhionyxError as error:
        raise CommandError(
            f"position {position} of the chain {trace!r} is not as it was sealed: {error.message}",
            "`phionyx-letta verify` says more; --format jsonl exports it as it is",
            FAILED,
        ) from error


@contextmanager
def _replacing(output: Path) -> Iterator[Path]:
    """A path beside ``output`` that takes its place at the end: there is the whole export, or what was there before."""
    folder = Path(tempfile.mkdtemp(prefix=".phionyx-export-", dir=output.absolute().parent))
    try:
        yield folder / "new"
        if output.is_dir() and not output.is_symlink():
            output.rename(folder / "old")
        (folder / "new").rename(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _translated(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(
            f"{output} cannot be written: {error.strerror}", "choose a place this user may write"
        ) from None
