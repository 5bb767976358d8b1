"""`verify`: is this what was written? A database, a store, a chain, a file or one envelope."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phionyx_letta.cli.failures import FAILED, NOT_MEASURED, OK, CommandError
from phionyx_letta.cli.keys import known_reviewers, trusted_keys
from phionyx_letta.cli.ledgers import is_sqlite, ledger_name, open_database, refuse_malformed_url
from phionyx_letta.cli.options import Json, Keys, Ledger, Policies
from phionyx_letta.cli.output import answer, safe, stderr, styled

if TYPE_CHECKING:
    from rich.console import Console

    from phionyx_letta.keys import Keyring, Statement
    from phionyx_letta.ledger.audit import AuditReport, Progress
    from phionyx_letta.ledger.audit_log import Outside
    from phionyx_letta.ledger.sql import SqlLedger
    from phionyx_letta.memory.policy import Policy
    from phionyx_letta.plugin.live import LiveAudit

__all__ = ["show_findings", "show_report", "show_verdict", "summary", "verify"]

_CODES = {"valid": OK, "failed": FAILED, "not_measured": NOT_MEASURED}
_SHOWN = 20
_INDEX = "chain.jsonl"
_MEANING = {
    "hashes": {"ok": "every envelope is what was hashed", "failed": "an envelope was changed"},
    "continuity": {
        "ok": "nothing missing, moved or from another chain",
        "failed": "something was removed, inserted or moved",
        "not_measured": "one envelope shows no chain",
    },
    "signatures": {
        "ok": "every envelope is signed by a trusted key",
        "failed": "a signature is missing or another key's",
        "not_measured": "not checked against a key",
    },
    "key_trust": {
        "ok": "the keys are the ones you gave",
        "failed": "signed by a key you did not give",
        "not_measured": "give --key",
    },
    "checkpoint": {
        "ok": "as far as the checkpoints kept outside reach, it is the log they are of",
        "failed": "not the log that was signed and kept outside",
        "not_measured": "a cut end cannot be seen without one: give --checkpoint",
    },
    "block_linkage": {
        "ok": "each change starts where the last one ended",
        "failed": "a change between is not recorded",
        "not_measured": "only the whole ledger shows it",
    },
    "receipt": {
        "ok": "it says what its signed envelope says",
        "failed": "it does not say what its envelope says",
    },
    "reviewers": {
        "ok": "each change by a patch is signed by the reviewer it names",
        "failed": "a change by a patch is not what a reviewer signed",
        "not_measured": "not all of it was checked: give --reviewers, or the hashes are salted",
    },
    "live": {
        "ok": "the blocks in Letta's tables hold what was recorded",
        "failed": "a block or its checkpoints were changed outside",
    },
    "bundle": {
        "ok": "the zip is one of ours, and undamaged",
        "failed": "the zip is damaged, changed, or none of ours",
    },
    "inclusion": {
        "ok": "each envelope is at its place in the log of a checkpoint",
        "failed": "not in the log that was signed",
        "not_measured": "no checkpoint shows where they stand in the log",
    },
    "database": {
        "ok": "columns, heads and order agree with the envelopes",
        "failed": "the tables contradict the envelopes",
    },
}


def verify(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="Database URL, SQLite file, bundle, store folder, folder of one chain, .jsonl file of envelopes, "
            "or .json file of one or of a receipt. Default: the ledger.",
        ),
    ] = None,
    key: Keys = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoint",
            metavar="PATH",
            help="Checkpoints kept outside the database: a file, a folder or a git repository. May be given several times.",
        ),
    ] = None,
    history: Annotated[
        list[str] | None,
        typer.Option(
            "--keys",
            metavar="FILE",
            help="Statements about keys (rotations, revocations) from elsewhere than TARGET. May be given several times.",
        ),
    ] = None,
    reviewers: Policies = None,
    trace: Annotated[str | None, typer.Option("--trace", metavar="ID", help="Only this chain.")] = None,
    ledger: Ledger = None,
    as_json: Json = False,
) -> int:
    """Check that nothing was changed, removed, inserted, moved or signed by somebody else.

    VALID (exit 0) needs a public key; without one the answer is NOT MEASURED (exit 2) or FAILED (exit 1). Reads only, needs no Letta.
    """
    if target and ledger:
        raise CommandError("both TARGET and --ledger were given", "give one of them")
    keys = trusted_keys(key, [*(history or []), *(checkpoint or [])])
    if history and keys is None:
        raise CommandError("statements about keys are believed from a key on", "give the root key with --key")
    if checkpoint and trace:
        raise CommandError("a checkpoint covers the whole ledger, and --trace is one chain of it", "leave out --trace")
    name = target or ledger_name(ledger)
    if keys is not None:
        keys = keys.extended(_stated(name))
    outside = _outside(checkpoint, keys) if checkpoint else None
    policy = known_reviewers(reviewers)
    began = time.monotonic()
    with _progress(quiet=as_json) as progress:
        report = _verified(name, keys, trace, outside, policy, progress)
    result = {**report.to_dict(), "seconds": round(time.monotonic() - began, 3)}
    answer(result, as_json=as_json, show=lambda console: show_report(console, report))
    return _CODES[report.verdict]


def _stated(name: str) -> list[Statement]:
    """The statements about keys that the target itself holds."""
    from phionyx_letta.evidence.container import looks_like_zip
    from phionyx_letta.evidence.verifying import read_history

    path = Path(name)
    if "://" in name or (path.is_file() and is_sqlite(path)):
        from phionyx_letta.keys import statements_in
        from phionyx_letta.ledger.lineage import stored_statements

        with open_database(name) as ledger, ledger.engine.connect() as connection:
            return list(statements_in(stored_statements(connection)))
    with suppress(OSError):  # said when it is verified
        if path.is_file() and looks_like_zip(path):
            return read_history(path)
    return []


def _outside(sources: list[str], keys: Keyring | None) -> Outside:
    from phionyx_letta.ledger.audit_log import read_outside

    if keys is None:
        raise CommandError("a checkpoint is checked with the log's public key", "give it with --key")
    return read_outside(sources, keys.public_keys, keys)


def _verified(
    name: str,
    keys: Keyring | None,
    trace: str | None,
    outside: Outside | None,
    reviewers: Policy | None,
    progress: Progress,
) -> AuditReport:
    path = Path(name)
    if "://" in name or (path.is_file() and is_sqlite(path)):
        from phionyx_letta.ledger.audit_sql import verify_ledger

        with open_database(name) as ledger:
            report = verify_ledger(
                ledger,
                verifier=keys,
                trace_id=trace,
                outside=outside,
                live=_live(ledger),
                reviewers=reviewers,
                progress=progress,
            )
            return _with_chain(report, trace)
    try:
        if path.is_dir():
            _refuse_checkpoints(outside)
            return _folder(path, keys, trace, reviewers)
        if path.is_file():
            return _file(path, keys, trace, outside, reviewers, progress)
    except OSError as error:
        raise CommandError(f"{name} cannot be read: {error.strerror}", "check its permissions") from None
    refuse_malformed_url(name)
    raise CommandError(f"{name} does not exist", "give a database URL, a folder or a file")


def _live(ledger: SqlLedger) -> LiveAudit | None:
    """What compares the blocks themselves, where Letta's tables are beside the ledger's."""
    from sqlalchemy import inspect

    from phionyx_letta.plugin.live import LiveAudit

    names = inspect(ledger.engine).get_table_names() if ledger.engine.dialect.name == "postgresql" else ()
    return LiveAudit() if {"block", "block_history"} <= set(names) else None


def _folder(path: Path, keys: Keyring | None, trace: str | None, reviewers: Policy | None) -> AuditReport:
    from phionyx_letta.ledger.audit import verify_store
    from phionyx_letta.ledger.filesystem import FilesystemEnvelopeStore

    if (path / _INDEX).is_file():
        path = path.absolute()
        named = _trace_of(path)
        if trace not in (None, named):
            raise CommandError(f"{path} is the chain {named!r}, not {trace!r}", "leave out --trace")
        return verify_store(FilesystemEnvelopeStore(path.parent), verifier=keys, trace_id=named, reviewers=reviewers)
    if not any((child / _INDEX).is_file() for child in path.iterdir()):
        raise CommandError(f"there is no chain in the folder {path}", f"a chain is a folder with a file {_INDEX}")
    store = FilesystemEnvelopeStore(path)
    return _with_chain(verify_store(store, verifier=keys, trace_id=trace, reviewers=reviewers), trace)


def _trace_of(folder: Path) -> str:
    from phionyx_letta.ledger.filesystem import FilesystemEnvelopeStore
    from phionyx_letta.ledger.folders import folder_of, is_long, trace_of

    if not is_long(folder.name):
        return trace_of(folder.name)
    return next(name for name in FilesystemEnvelopeStore(folder.parent).traces() if folder_of(name) == folder.name)


def _refuse_checkpoints(outside: Outside | None) -> None:
    if outside is not None:
        remedy = "verify the database, or a file with all its envelopes in sealing order (`phionyx-letta export`)"
        raise CommandError("checkpoints cover a whole ledger in the order of its sealing, which this is not", remedy)


def _file(
    path: Path,
    keys: Keyring | None,
    trace: str | None,
    outside: Outside | None,
    reviewers: Policy | None,
    progress: Progress,
) -> AuditReport:
    from phionyx_letta._lines import parse_unique
    from phionyx_letta.evidence.container import looks_like_zip
    from phionyx_letta.ledger.audit import verify_envelope, verify_lines
    from phionyx_letta.ledger.audit_log import LogAudit
    from phionyx_letta.ledger.receipt import is_receipt, verify_receipt

    if path.name == _INDEX and _is_index(path):
        _refuse_checkpoints(outside)
        return _folder(path.absolute().parent, keys, trace, reviewers)
    if looks_like_zip(path):
        return _bundle(path, keys, trace, outside, reviewers, progress)
    if path.suffix == ".json":
        _refuse_checkpoints(outside)
        try:
            content = parse_unique(path.read_bytes())
        except (ValueError, RecursionError):
            raise CommandError(
                f"{path} is not JSON, or repeats a key", "give one envelope, or a .jsonl file", FAILED
            ) from None
        if is_receipt(content):
            return verify_receipt(content, verifier=keys)
        if isinstance(content, dict) and content.keys() <= {
            "trace_id",
            "position",
            "seq",
            "envelope",
            "caused",
            "reviewer_signature",
        }:
            content = _unwrapped(content)  # what `show --json` prints
        return verify_envelope(content, verifier=keys, reviewers=reviewers)
    with path.open("rb") as lines:
        log = None if outside is None else lambda audit: LogAudit(audit, outside)
        return verify_lines(lines, verifier=keys, trace_id=trace, log=log, reviewers=reviewers, progress=progress)


def _bundle(
    path: Path,
    keys: Keyring | None,
    trace: str | None,
    outside: Outside | None,
    reviewers: Policy | None,
    progress: Progress,
) -> AuditReport:
    from phionyx_letta.evidence.verifying import verify_bundle

    if trace is not None:
        raise CommandError("a bundle is verified as a whole", "leave out --trace, or export that chain alone")
    return verify_bundle(path, keys=keys, outside=outside, reviewers=reviewers, progress=progress)


def _is_index(path: Path) -> bool:
    """A chain exported under the name of an index is a file of envelopes."""
    with path.open("rb") as file:
        return b'"envelope_path"' in file.readline()


def _unwrapped(shown: dict[str, Any]) -> object:
    """The envelope; what stands around it must not say otherwise."""
    envelope = shown.get("envelope")
    subject = envelope.get("subject") if isinstance(envelope, dict) else None
    for name in ("trace_id", "position"):
        if isinstance(subject, dict) and name in shown and subject.get(name, shown[name]) != shown[name]:
            raise CommandError(
                f"the file's {name} is not that of the envelope in it", "give the envelope alone", FAILED
            )
    return envelope


def _with_chain(report: AuditReport, trace: str | None) -> AuditReport:
    if trace is not None and not report.envelopes and report.verdict != "failed":
        raise CommandError(f"there is no chain {trace!r} in this ledger", "`phionyx-letta log` shows what there is")
    return report


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Progress]:
    console = stderr()
    if quiet or not console.is_terminal:
        yield lambda seen: None
        return
    with console.status("verifying") as status:
        yield lambda seen: status.update(f"verifying: {seen} envelopes")


def show_report(console: Console, report: AuditReport) -> None:
    """Print the verdict, the dimensions and the findings."""
    from rich.table import Table
    from rich.text import Text

    show_verdict(console, report)
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    for name, status in report.dimensions.items():
        meaning = _MEANING.get(name, {}).get(status, "") if report.envelopes else ""
        grid.add_row("  " + name.replace("_", " "), styled(status), Text(meaning, "dim"))
    console.print(grid)
    show_findings(console, report)


def show_verdict(console: Console, report: AuditReport) -> None:
    """Print the verdict and what it is about."""
    from rich.text import Text

    line = styled(report.verdict)
    line = Text(line.plain.upper(), line.style)
    line.append(f"  {_count(report.envelopes, 'envelope')} in {_count(report.chains, 'chain')}", "default")
    if report.key_id:
        line.append(f", checked with {safe(report.key_id)}", "default")
    console.print(line)
    if report.covered is not None:
        console.print(f"checkpoints cover the first {_count(report.covered, 'envelope')} sealed", soft_wrap=True)
    if report.reason and not any(one.status == "failed" for one in report.findings):
        console.print(f"{_said(report.verdict)}{safe(report.reason)}", soft_wrap=True)


def show_findings(console: Console, report: AuditReport) -> None:
    """Print what is wrong, and where."""
    for finding in report.findings[:_SHOWN]:
        where = [f"position {finding.position}"] if finding.position is not None else []
        where += [f"chain {finding.trace_id}"] if finding.trace_id is not None else []
        console.print()
        line = styled(finding.status)
        line.append(f"  {safe(' of '.join(where) or 'the ledger')}", "bold default")
        console.print(line, soft_wrap=True)
        console.print(f"  {finding.dimension.replace('_', ' ')}: {safe(finding.message)}", soft_wrap=True)
        for name, value in (("block", finding.block_id), ("expected", finding.expected), ("found", finding.found)):
            if value is not None:
                console.print(f"  {name:<8}  {safe(value)}", soft_wrap=True)
    hidden = report.findings_total - min(_SHOWN, len(report.findings))
    if hidden > 0:
        console.print(f"\nand {_count(hidden, 'more finding')}; --json lists the first {len(report.findings)}")


def _said(verdict: str) -> str:
    return "not measured: " if verdict == "not_measured" else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def summary(report: AuditReport) -> dict[str, Any]:
    """The verdict in short, as `demo --json` gives it."""
    return {
        name: getattr(report, name) for name in ("verdict", "reason", "envelopes", "chains", "key_id", "dimensions")
    }
