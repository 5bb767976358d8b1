"""`code`: evidence for the agents of Letta Code, whose memory is a git repository."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phionyx_letta.cli.failures import FAILED, NOT_MEASURED, OK, CommandError
from phionyx_letta.cli.options import Json, Keys
from phionyx_letta.cli.output import answer, safe, short, stdout

if TYPE_CHECKING:
    from rich.console import Console

    from phionyx_letta.letta_code.checking import Checked
    from phionyx_letta.letta_code.hooks import Hooks
    from phionyx_letta.letta_code.places import AgentMemory
    from phionyx_letta.letta_code.watching import Pass

__all__ = ["CodeLedger", "LettaDir", "chosen_memories", "code", "hooks_of"]

_NO_KEY = "no key is known here, so signatures were not checked"

code = typer.Typer(
    help="Letta Code: record the git memory of its agents, check it, and look after its hooks.\n\nSee docs/letta-code.md.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

LettaDir = Annotated[
    Path | None, typer.Option("--letta-dir", metavar="DIR", help="Letta Code's folder. Default: ~/.letta.")
]
Agents = Annotated[
    list[str] | None, typer.Option("--agent", metavar="ID", help="Only this agent; may be given several times.")
]
CodeLedger = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        metavar="URL",
        help="Database URL or SQLite file. Default: PHIONYX_LETTA_LEDGER, else ledger.db in PHIONYX_LETTA_HOME.",
    ),
]


@code.command(short_help="Record what was committed to the memories.")
def ingest(
    agent: Agents = None,
    memory: Annotated[
        Path | None,
        typer.Option("--memory", metavar="DIR", help="The memory repository of the one --agent, wherever it is."),
    ] = None,
    letta_dir: LettaDir = None,
    ledger: CodeLedger = None,
    as_json: Json = False,
) -> int:
    """Record each commit of each agent's memory as signed envelopes, one for each changed file. Run it as often as you like.

    What was recorded is not recorded again. Rewritten history, and what could not be read, is recorded as such; what is not committed
    is told. Exit 1 where a memory could not be read or has a gap, 2 where there is no memory.
    """
    from phionyx_letta.letta_code.delivering import deliver_again
    from phionyx_letta.letta_code.places import Home
    from phionyx_letta.letta_code.sealing import ingest as record
    from phionyx_letta.letta_code.sealing import missing_memories, opened_ledger
    from phionyx_letta.plugin.runtime import load_key
    from phionyx_letta.settings import load_settings

    settings = load_settings()
    memories = chosen_memories(agent, memory, letta_dir)
    hooks = hooks_of(letta_dir)
    if hooks.installed:
        hooks.cover(memories)
    key = load_key(settings)
    with opened_ledger(ledger_url(ledger)) as opened:
        if not agent:
            memories += missing_memories(opened, key, Home.find(letta_dir))
        result = record(opened, key, settings, memories)
        if result.checkpoint is None:  # the one before may not have come to every sink
            result.delivered = deliver_again(opened, key, settings)
    gaps = any(one["gaps"] for one in result.agents)
    page = {
        "envelopes": result.envelopes,
        "agents": result.agents,
        "problems": result.problems,
        "checkpoint": result.checkpoint,
        "delivered": result.delivered,
    }
    answer(page, as_json=as_json, show=lambda console: _show_ingest(console, page))
    if result.problems or gaps or result.delivered is False:
        return FAILED
    return OK if memories else NOT_MEASURED


@code.command(short_help="Compare the memories with the ledger.")
def verify(
    agent: Agents = None,
    letta_dir: LettaDir = None,
    ledger: CodeLedger = None,
    key: Keys = None,
    at_start: Annotated[
        bool,
        typer.Option("--at-start", help="As a SessionStart hook: JSON on standard input, says what differs, exit 0."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Compare what HEAD of each memory holds with what the ledger recorded last, file by file. Nothing is written.

    No private key is needed. The envelopes that are compared with are checked with --key, else with the public key of this
    machine's own; without any that is told, and their signatures are not checked. Whether the ledger itself was tampered with,
    `phionyx-letta verify` says. Exit 1 where a file was changed outside, another key signed what was recorded, or the history
    does not lead on from what was recorded; 2 where commits are not recorded yet, no key is known, or there is nothing to compare.
    """
    if at_start:
        return _report_at_start(letta_dir, ledger)
    checked, key_id = _checked(agent, letta_dir, ledger, key)

    def show(console: Console) -> None:
        _show_checked(console, checked)
        if key_id is None and checked:
            console.print(f"{_NO_KEY}: give --key", style="yellow", soft_wrap=True)

    answer({"agents": [vars(one) for one in checked], "key_id": key_id}, as_json=as_json, show=show)
    found = {one.status for one in checked}
    if found & {"changed", "rewritten", "unreadable", "several", "replaced", "other_key"}:
        return FAILED
    return OK if found == {"ok"} and key_id is not None else NOT_MEASURED


def _checked(
    agent: list[str] | None, letta_dir: Path | None, ledger: str | None, key: list[str] | None = None
) -> tuple[list[Checked], str | None]:
    """How the memories stand, and the ids of the keys that signatures were checked with; None where none is known."""
    from phionyx_letta.cli.keys import verifier_here
    from phionyx_letta.letta_code.checking import check_memory
    from phionyx_letta.letta_code.places import Home
    from phionyx_letta.letta_code.sealing import missing_memories, opened_ledger
    from phionyx_letta.settings import load_settings

    memories = chosen_memories(agent, None, letta_dir)
    with opened_ledger(ledger_url(ledger), create=False) as opened:
        if not agent:
            memories += missing_memories(opened, None, Home.find(letta_dir))
        verifier = verifier_here(opened, load_settings(), key)
        return [check_memory(opened, verifier, memory) for memory in memories], verifier.key_id if verifier else None


def _report_at_start(letta_dir: Path | None, ledger: str | None) -> int:
    """A hook that fails would keep the user's other hooks from running."""
    import json
    import sys

    from phionyx_letta.errors import PhionyxError

    try:
        said = json.loads(sys.stdin.read(1 << 20))
        agent = said.get("agent_id") if isinstance(said, dict) else None
        checked, key_id = _checked([agent] if isinstance(agent, str) else None, letta_dir, ledger)
    except (ValueError, RecursionError, PhionyxError) as error:
        stdout().print(f"phionyx-letta: the memory was not compared with the ledger: {safe(error)}", soft_wrap=True)
        return OK
    differing = [one for one in checked if one.status != "ok"]
    if differing or key_id is None:
        stdout().print("phionyx-letta code verify:")
        _show_checked(stdout(), differing)
    if key_id is None:
        stdout().print(_NO_KEY, soft_wrap=True)
    return OK


@code.command(short_help="Record whenever a memory changes, in the foreground.")
def watch(
    poll: Annotated[float, typer.Option("--poll", min=0.1, metavar="SECONDS", help="How often to look.")] = 2.0,
    idle: Annotated[
        float,
        typer.Option("--idle", min=1, metavar="SECONDS", help="A conversation ended when nothing happens for so long."),
    ] = 600.0,
    letta_dir: LettaDir = None,
    ledger: CodeLedger = None,
    as_json: Json = False,
) -> int:
    """Record the memories whenever they change, sign checkpoints, and propose patches from conversations that ended.

    Proposals are made where PHIONYX_LETTA_PROPOSER_MODEL names a model. Ends with Ctrl-C or SIGTERM; docs/letta-code.md has a unit for
    systemd. With --json one object is printed for each look that did something.
    """
    import signal
    import threading

    from phionyx_letta.letta_code.places import Home
    from phionyx_letta.letta_code.watching import Watch
    from phionyx_letta.plugin.runtime import load_key
    from phionyx_letta.settings import load_settings

    settings, stop = load_settings(), threading.Event()
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, lambda *_: stop.set())
    proposer = None
    if settings.proposer_model:
        from phionyx_letta.memory import OpenAIProposer

        proposer = OpenAIProposer()
    told = _Told(as_json)
    watch = Watch(ledger_url(ledger), load_key(settings), settings, Home.find(letta_dir), proposer=proposer, idle=idle)
    watch.run(stop, poll, told)
    return OK


class _Told:
    """Prints what a look did, and an error once."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._errors: list[str] = []

    def __call__(self, found: Pass) -> None:
        envelopes = found.ingested.envelopes if found.ingested else 0
        news = found.errors if found.errors != self._errors else []
        self._errors = found.errors
        if not (envelopes or found.patches or news):
            return
        page = {"envelopes": envelopes, "patches": found.patches, "errors": news}

        def show(console: Console) -> None:
            console.print(f"{envelopes} envelopes, {len(found.patches)} patches to review")
            for error in news:
                console.print(safe(error), style="red", soft_wrap=True)

        answer(page, as_json=self._as_json, show=show)


def _show_checked(console: Console, checked: list[Checked]) -> None:
    words = {
        "ok": "HEAD holds what was recorded",
        "behind": "commits are not recorded yet: run `phionyx-letta code ingest`",
        "changed": "HEAD holds what was never recorded",
        "rewritten": "the history does not lead on from what was recorded",
        "unrecorded": "nothing was recorded yet: run `phionyx-letta code ingest`",
        "unreadable": "the repository cannot be read",
        "replaced": "git's replacements (refs/replace) may put something else into the prompt than what was compared",
        "other_key": "HEAD is compared with envelopes that no key known here has signed",
        "several": "HEAD holds what was recorded, but the agent has another memory, which is not recorded",
    }
    for one in checked:
        style = "green" if one.status == "ok" else "yellow" if one.status in ("behind", "unrecorded") else "red"
        why = f": {safe(one.why)}" if one.why else ""
        console.print(f"{safe(one.agent_id)}: {words[one.status]}{why}", style=style, soft_wrap=True)
        for name in one.files:
            console.print(f"  differs: {safe(name)}", soft_wrap=True)
        for file in one.uncommitted:
            console.print(f"  not committed: {safe(file['path'] or file.get('why'))} ({file['state']})", soft_wrap=True)


def hooks_of(letta_dir: Path | None, ledger: str | None = None) -> Hooks:
    """The hooks of the Letta Code in this folder; their report reads this ledger."""
    from phionyx_letta.letta_code.hooks import Hooks, report_environment
    from phionyx_letta.letta_code.places import Home
    from phionyx_letta.settings import load_settings

    return Hooks(Home.find(letta_dir), load_settings().home_path(), report_environment(ledger_url(ledger)))


def ledger_url(given: str | None) -> str:
    """The database URL of the ledger of these commands.

    Raises:
        CommandError: what is given is a folder, or a malformed URL.
    """
    from phionyx_letta.cli.ledgers import refuse_malformed_url
    from phionyx_letta.letta_code.sealing import default_ledger
    from phionyx_letta.settings import load_settings

    name = given or default_ledger(load_settings())
    if "://" in name:
        return name
    refuse_malformed_url(name)
    if Path(name).is_dir():
        raise CommandError(f"{name} is a folder, and this command needs the ledger's database", "give a SQLite file")
    return f"sqlite:///{Path(name).absolute()}"


def chosen_memories(agents: list[str] | None, memory: Path | None, letta_dir: Path | None) -> list[AgentMemory]:
    """The memories a command works on.

    Raises:
        CommandError: an agent has none, or a memory is given without the one agent it is of.
    """
    from phionyx_letta.letta_code.places import AgentMemory, Home

    if memory is not None:
        if not agents or len(agents) != 1:
            raise CommandError("--memory is of one agent", "give its --agent")
        return [AgentMemory(agents[0], memory.absolute())]
    home = Home.find(letta_dir)
    found = home.memories()
    if not agents:
        return found
    missing = sorted(set(agents) - {one.agent_id for one in found})
    if missing:
        raise CommandError(
            f"there is no memory of {', '.join(missing)} in {home.letta}", "give --memory, or --letta-dir"
        )
    return [one for one in found if one.agent_id in agents]


def _show_ingest(console: Console, page: dict[str, Any]) -> None:
    if not page["agents"] and not page["problems"]:
        console.print("no memory of Letta Code is here; give --letta-dir, or --agent and --memory", soft_wrap=True)
    for one in page["agents"]:
        line = f"{safe(one['agent_id'])}: {one['envelopes']} envelopes of {one['commits']} commits, at {short(one['tip'] or '-', 12)}"
        console.print(line, soft_wrap=True)
        if one["tip"] and one["layout"] == "unknown":
            console.print(
                "  the layout is unknown: neither MEMORY.md nor a folder system", style="yellow", soft_wrap=True
            )
        if one["rewrites"]:
            console.print(f"  history was rewritten {one['rewrites']} times", style="yellow")
        for gap in one["gaps"]:
            console.print(f"  gap: {safe(gap.get('why') or gap['reason'])}", style="red", soft_wrap=True)
        for file in one["uncommitted"]:
            console.print(f"  not committed: {safe(file['path'] or file.get('why'))} ({file['state']})", soft_wrap=True)
    for problem in page["problems"]:
        console.print(
            f"{safe(problem['agent_id'])}: {safe(problem['what'])}; {safe(problem['remedy'])}",
            style="red",
            soft_wrap=True,
        )
    if page["checkpoint"] is not None:
        console.print(f"checkpoint of {page['checkpoint']} envelopes")
    if page["delivered"] is False:
        console.print("not every sink took the checkpoint; it is offered again", style="red")
