"""`demo`: the whole thing, real, in about a minute, leaving nothing behind."""

from __future__ import annotations

import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phionyx_letta.cli.failures import FAILED, OK
from phionyx_letta.cli.options import Json
from phionyx_letta.cli.output import complain, page, safe, short, stderr, stdout
from phionyx_letta.cli.sources import Entry, Filters, SqlSource

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from phionyx_letta.demo.remembering import Remembered
    from phionyx_letta.demo.story import Stage, Tampering
    from phionyx_letta.ledger.audit import AuditReport

__all__ = ["demo"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave everything running until Ctrl-C, to look around.")
    ] = False,
    letta_code: Annotated[
        bool, typer.Option("--letta-code", help="Letta Code in place of a Letta server; it must be installed.")
    ] = False,
    program: Annotated[
        Path | None,
        typer.Option("--program", metavar="FILE", help="The program letta of Letta Code. Default: the one on PATH."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Watch it work: a real Letta server on an embedded PostgreSQL with a scripted model, and nothing left behind.

    An agent talks and uses its memory tools, an operator edits, clears and deletes a block. Then the chain is shown, verified with
    the public key alone, and one stored envelope is edited to see the verifier name it. Three sessions end, and what was said in all
    of them waits for a person: one patch is applied, the agent knows it, and it is reverted. Needs the extras letta and pg, no
    network.
    """
    from phionyx_letta.demo import story

    if not letta_code:
        story.require_everything()
    began = time.monotonic()
    with _interruptible() as interrupted, _progress() as progress:
        try:
            if letta_code:
                from phionyx_letta.cli.code_demo import play

                return play(progress, lambda: progress.end(""), program, as_json=as_json)
            return _play(progress, began, keep=keep, as_json=as_json)
        except KeyboardInterrupt:
            progress.end("")
            complain("interrupted; everything was stopped and removed", "", as_json=as_json)
            return 128 + (interrupted or [signal.SIGINT])[0]


def _play(progress: _Progress, began: float, *, keep: bool, as_json: bool) -> int:
    from phionyx_letta.demo import story
    from phionyx_letta.demo.remembering import remember

    with story.Stage(progress) as stage, closing(stage.open_ledger()) as ledger:
        agent_id = story.act(stage, progress)
        progress("Waiting until everything is sealed")
        story.wait_until_sealed(ledger)
        progress("Verifying the ledger with the public key")
        report = story.verify(stage, ledger)
        progress("Editing one envelope in the database")
        tampering = story.tamper(stage, ledger, agent_id)
        remembered = remember(stage, ledger, agent_id, progress)
        story.wait_until_sealed(ledger)
        final = story.verify(stage, ledger)
        seconds = round(time.monotonic() - began, 1)
        source = SqlSource(ledger)
        entries = source.newest(Filters(), 1000)
        progress.end("")
        if as_json:
            page(_result(agent_id, entries, story.kinds(ledger), final, tampering, remembered, seconds))
        else:
            _show(stdout(), entries[: report.envelopes], report, tampering)
            _show_patches(stdout(), remembered, entries[report.envelopes :], final, seconds)
        if keep:
            _keep(stage, agent_id, progress)
        progress("Cleaning up")
    progress.end("")
    return OK if report.verdict == tampering.verdict_after_repair == final.verdict == "valid" else FAILED


def _result(
    agent_id: str,
    entries: list[Entry],
    kinds: dict[str, int],
    report: AuditReport,
    tampering: Tampering,
    remembered: Remembered,
    seconds: float,
) -> dict[str, Any]:
    from phionyx_letta.cli.verify import summary

    return {
        "agent_id": agent_id,
        "envelopes": len(entries),
        "kinds": kinds,
        "verify": summary(report),
        "tamper": tampering.to_dict(),
        "patches": remembered.by_status(),
        "applied_patch_envelope": remembered.envelope,
        "reverted": remembered.reverted,
        "seconds": seconds,
    }


def _show(console: Console, entries: list[Entry], report: AuditReport, tampering: Tampering) -> None:
    from phionyx_letta.cli.verify import show_findings, show_report, show_verdict

    command = "\n$ phionyx-letta verify --key signing.key.pub"
    console.print()
    console.print(_table(entries, tampering.trace_id, console.width))
    console.print(command, style="bold")
    show_report(console, report)
    console.print(f'\n$ psql -c "{tampering.edit}"', style="bold", soft_wrap=True)
    console.print(command.strip(), style="bold")
    show_verdict(console, tampering.report)
    show_findings(console, tampering.report)
    console.print(f"\nPut back, the ledger is {tampering.verdict_after_repair} again.")


def _show_patches(
    console: Console, remembered: Remembered, entries: list[Entry], report: AuditReport, seconds: float
) -> None:
    """What waited for a person, and what became of the one that was applied."""
    from phionyx_letta.cli.verify import show_verdict
    from phionyx_letta.demo.remembering import QUESTION, REVIEWER

    console.print("\nThree sessions ended. What was said in each of them waits for a person:")
    console.print("\n$ phionyx-letta memory review", style="bold")
    for one in remembered.pending:
        console.print(f"{safe(one['patch_id'])}  {safe(one['content'])}", soft_wrap=True)
        console.print(f"    {safe(one['rationale'])}", style="dim", soft_wrap=True)
        if one["untrusted"]:
            console.print(f"    untrusted: {safe(one['untrusted'])}", style="bold red", soft_wrap=True)
    [patch] = [one["patch_id"] for one in remembered.patches if one["status"] == "reverted"]
    for act, answer, entry in zip(("apply", "revert"), (remembered.knew, remembered.knows), entries, strict=False):
        console.print(f"\n$ phionyx-letta memory {act} {safe(patch)} --by {REVIEWER}", style="bold")
        console.print(_change(entry))
        console.print(f"envelope {short(entry.hash)}, which names the patch, the reviewer and the session", style="dim")
        console.print(f"Ada: {QUESTION}\nAgent: {safe(answer)}")
    console.print("\n$ phionyx-letta verify --key signing.key.pub", style="bold")
    show_verdict(console, report)
    console.print(f"\n{seconds:.0f} seconds in all.")


def _table(entries: list[Entry], agent_id: str, width: int) -> Table:
    """The agent's chain, then the chains of blocks that belonged to no agent at the time."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from phionyx_letta.cli.log import KIND_STYLES

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    table.add_column("#", justify="right", style="dim", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("block", style="bold", no_wrap=True)
    table.add_column("by", no_wrap=True, overflow="ellipsis", max_width=max(19, width // 4))
    table.add_column("what changed", overflow="fold", ratio=1)
    table.add_column("hash", style="dim", no_wrap=True)
    traces = sorted({entry.trace_id for entry in entries}, key=lambda trace: trace != agent_id)
    for entry in sorted(entries, key=lambda entry: traces.index(entry.trace_id)):
        mutation = entry.part("mutation")
        kind = str(mutation.get("mutation_kind"))
        if entry.position == 0 and entry.trace_id != agent_id:
            table.add_section()
        table.add_row(
            str(entry.position),
            Text(kind, KIND_STYLES.get(kind, "")),
            Text(safe(mutation.get("block_label"))),
            Text(safe(entry.letta.get("tool") or entry.part("subject").get("producer"))),
            _change(entry),
            short(entry.hash),
        )
    return table


def _change(entry: Entry) -> Text:
    """The lines a diff removes and adds; what else happened where there are none."""
    from rich.text import Text

    text = Text()
    for line in changed_lines(entry.diff.get("diff_text")):
        text.append(f"{safe(line)}\n", "green" if line[0] == "+" else "red")
    label = entry.letta.get("label")
    if isinstance(label, dict):
        text.append(f"{safe(label.get('before'))} → {safe(label.get('after'))}\n")
    if not text:
        text.append(f"{safe(entry.event or '')}\n", "dim")
    reason = entry.part("mutation").get("forgetting_reason")
    if reason:
        text.append(f"reason: {safe(reason)}\n", "italic")
    audit = entry.part("subject").get("metadata", {}).get("memory_audit")
    if isinstance(audit, dict):
        parent = safe(audit.get("parent_envelope_ref")).removeprefix("envelope://")
        text.append(f"caused by {parent[:15]}…\n", "italic")
    text.rstrip()
    return text


def changed_lines(diff: object) -> list[str]:
    """The lines of a unified diff that begin with + or -, less those that only gained or lost their line break."""
    lines = [line for line in (diff if isinstance(diff, str) else "").split("\n") if line[:1] in ("+", "-")]
    lines = [line for line in lines if not line.startswith(("+++", "---"))]
    removed, added = ({line[1:] for line in lines if line[0] == sign} for sign in "-+")
    return [line for line in lines if line[1:] not in removed & added]


def _keep(stage: Stage, agent_id: str, progress: _Progress) -> None:
    """Say how to look around, then wait for a signal."""
    url, key = shlex.quote(stage.ledger_url), shlex.quote(str(stage.public_key))
    private_key = shlex.quote(str(stage.public_key.with_suffix("")))
    progress.say(
        "\nEverything goes on running. In another terminal:\n\n"
        f"  export PHIONYX_LETTA_LEDGER={url}\n"
        f"  export PHIONYX_LETTA_VERIFY_KEY={key}\n"
        f"  export PHIONYX_LETTA_SIGNING_KEY={private_key}\n"
        f"  export PHIONYX_LETTA_MEMORY_STORE={url}\n"
        f"  export PHIONYX_LETTA_SERVER_URL={stage.letta.base_url}\n"
        f"  phionyx-letta log\n"
        f"  phionyx-letta show {agent_id} 3\n"
        f"  phionyx-letta explain {agent_id}/human\n"
        f"  phionyx-letta memory review\n"
        f"  phionyx-letta session list\n"
        f"  phionyx-letta verify\n"
        f"  phionyx-letta verify --checkpoint {shlex.quote(str(stage.checkpoints))}\n"
        f"  phionyx-letta doctor\n"
        f"  phionyx-letta export {agent_id} --format folder --output ./evidence\n"
        f"  phionyx-letta export --bundle --output ./evidence.zip\n"
        f"  curl {stage.letta.base_url}/v1/agents/{agent_id}/core-memory/blocks\n\n"
        "Ctrl-C stops the servers and removes everything."
    )
    with suppress(KeyboardInterrupt):
        threading.Event().wait()


class _Progress:
    """What is going on, on standard error: a spinner on a terminal, else a line for each step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("") if console.is_terminal else None
        self._began = time.monotonic()
        self._said = ""

    def __call__(self, what: str) -> None:
        """Say what is going on now."""
        if self._status is not None:
            self._status.update(f"{what} …")
            self._status.start()
        elif what.partition(",")[0] != self._said:
            self._said = what.partition(",")[0]
            self.say(f"{time.monotonic() - self._began:5.1f} s  {self._said}")

    def end(self, what: str) -> None:
        """Stop, with a last word or none."""
        if self._status is not None:
            self._status.stop()
        if what:
            self.say(what)

    def say(self, what: str) -> None:
        """Print something that stays."""
        self._console.print(what, soft_wrap=True)


@contextmanager
def _progress() -> Iterator[_Progress]:
    progress = _Progress(stderr())
    try:
        yield progress
    finally:
        progress.end("")


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """The first signal ends the demo in good order, later ones are ignored meanwhile; gives the list that will hold it."""
    received: list[int] = []

    def end(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    heeded = [one for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]  # nohup stays nohup
    before = {one: signal.signal(one, end) for one in heeded}
    try:
        yield received
    finally:
        if not received:  # else this process is about to end, and a second Ctrl-C must not change how
            for one, handler in before.items():
                signal.signal(one, handler)
