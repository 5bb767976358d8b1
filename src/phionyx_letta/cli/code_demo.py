"""`demo --letta-code`: the real Letta Code in a clean home, its memory recorded, changed by an approved patch, and tampered with."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phionyx_letta.cli.failures import FAILED, OK
from phionyx_letta.cli.output import page, safe, short, stdout

if TYPE_CHECKING:
    from phionyx_letta.ledger.audit import AuditReport
    from phionyx_letta.ledger.sql import SqlLedger

__all__ = ["play"]

_EDIT = (
    'cd "$MEMORY_DIR" && printf "\\nAda likes tea.\\n" >>human.md && git add -A && git commit -qm "learnt about Ada"'
    " && printf 'Ada lives in Lisbon.\\n' >>human.md && git commit -qam 'and more'"
)


def play(progress: Callable[[str], None], end: Callable[[], None], program: Path | None, *, as_json: bool) -> int:
    """Tell the story; everything is removed at the end.

    Raises:
        DemoError: Letta Code is not here, or failed.
    """
    from phionyx_letta.demo.errors import DemoError
    from phionyx_letta.demo.letta_code import LettaCode, find_program, shell_call
    from phionyx_letta.demo.model import ScriptedModel

    began = time.monotonic()
    found = find_program(program)
    with tempfile.TemporaryDirectory(prefix="phionyx-demo-") as folder, ScriptedModel() as model:
        progress("Starting Letta Code in a clean home")
        letta = LettaCode(found, Path(folder), model, progress)
        progress("A new agent, which says hello")
        agent = letta.ask("SAY hello").agent_id
        stage = _Stage(Path(folder), letta.letta_dir)
        stage.install()
        stage.ingest()
        progress("Ada tells it two things; it edits its memory and commits")
        letta.ask(shell_call(_EDIT), agent)
        if stage.ingest() == 0:
            raise DemoError(
                "the agent committed nothing: its shell tool failed or took too long", "try again on a quieter machine"
            )
        progress("A patch is proposed, approved and applied as a commit")
        stage.approve(agent, letta.memory(agent))
        progress("Somebody takes the last commits out of the memory's history")
        subprocess.run(["git", "-C", str(letta.memory(agent)), "reset", "-q", "--hard", "HEAD~2"], check=True)
        caught = stage.check(agent, letta.memory(agent))
        stage.ingest()
        result = stage.result(agent, caught, time.monotonic() - began)
    end()
    if as_json:
        page(result)
    else:
        _show(result)
    whole = result["verdict"] == "valid" and caught == "rewritten" and "history_rewritten" in result["events"]
    return OK if whole else FAILED


class _Stage:
    """The ledger and the key of the demo."""

    def __init__(self, folder: Path, letta_dir: Path) -> None:
        from phionyx_letta.letta_code.places import Home
        from phionyx_letta.plugin.runtime import PluginKey
        from phionyx_letta.settings import Settings
        from phionyx_letta.signing import generate_key, get_signer

        self.own = folder / "own"
        self.own.mkdir()
        path = self.own / "signing.key"
        generate_key(path)
        signer = get_signer({"PHIONYX_LETTA_SIGNING_KEY": str(path)})
        self.key = PluginKey(signer, str(path))
        self.settings = Settings(home=str(self.own), include_diff_text=True)
        self.url = f"sqlite:///{self.own / 'ledger.db'}"
        self.home = Home.find(letta_dir)

    def install(self) -> None:
        from phionyx_letta.letta_code.hooks import Hooks

        Hooks(self.home, self.own).install(self.home.memories())

    def opened(self) -> Any:
        from phionyx_letta.letta_code.sealing import opened_ledger

        return opened_ledger(self.url)

    def ingest(self) -> int:
        """Record; return how many envelopes there are more."""
        from phionyx_letta.letta_code.sealing import ingest

        with self.opened() as ledger:
            return ingest(ledger, self.key, self.settings, self.home.memories()).envelopes

    def approve(self, agent: str, memory: Path) -> None:
        """What a proposer would store and a person approve: one more fact."""
        import asyncio

        from phionyx_letta.letta_code.proposals import Proposals

        proposals = Proposals(
            str(self.own / "patches.jsonl"),
            self.home.memories(),
            self.key.signer,
            proposer=_Proposer(agent),
            threshold=1,
        )
        records = [{"role": "user", "content": "I take the night train.", "id": "message-1"}]
        made = asyncio.run(proposals.living.propose_from_session("conversation:demo", session_records=records))
        proposals.apply(made[0].patch_id, by="a person")
        self.ingest()

    def check(self, agent: str, memory: Path) -> str:
        from phionyx_letta.letta_code.checking import check_memory
        from phionyx_letta.letta_code.places import AgentMemory

        with self.opened() as ledger:
            return check_memory(ledger, self.key.verifier(), AgentMemory(agent, memory)).status

    def result(self, agent: str, caught: str, seconds: float) -> dict[str, Any]:
        with self.opened() as ledger:
            report = _audited(ledger, str(self.key.public_key))
            envelopes = list(ledger.iter_chain(agent))
        return {
            "agent_id": agent,
            "envelopes": len(envelopes),
            "events": [one["subject"]["metadata"]["letta"]["event"] for one in envelopes],
            "kinds": [one["mutation"]["mutation_kind"] for one in envelopes],
            "rows": [_row(one) for one in envelopes],
            "code_verify": caught,
            "verdict": report.verdict,
            "seconds": round(seconds, 1),
        }


class _Proposer:
    """Stands for a model that found one fact in the session."""

    def __init__(self, agent: str) -> None:
        self._agent = agent

    def generate(self, prompt: str) -> str:
        import json

        fact = {
            "content": "Takes the night train.",
            "fact_key": "night train",
            "file_path": f"{self._agent}/human.md",
            "rationale": "she said so",
            "category": "user",
            "evidence": [{"message_index": 0, "quote": "I take the night train"}],
        }
        return json.dumps([fact])


def _audited(ledger: SqlLedger, public_key: str) -> AuditReport:
    from phionyx_letta.ledger.audit_sql import verify_ledger
    from phionyx_letta.signing import load_verifier

    return verify_ledger(ledger, verifier=load_verifier(public_key))


def _row(envelope: dict[str, Any]) -> list[str]:
    letta, mutation = envelope["subject"]["metadata"]["letta"], envelope["mutation"]
    trailers = dict(letta.get("claims", {}).get("trailers", []))
    by = (
        f"patch, {trailers['Phionyx-Reviewer']}" if "Phionyx-Reviewer" in trailers else letta.get("conversation_id", "")
    )
    return [
        str(envelope["subject"]["position"]),
        mutation["mutation_kind"],
        letta["event"],
        mutation["block_label"],
        by,
        short(envelope["integrity"]["current"]),
    ]


def _show(result: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    console = stdout()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for name in ("#", "kind", "event", "file", "by", "hash"):
        table.add_column(name, overflow="fold")
    for row in result["rows"]:
        table.add_row(*(safe(cell) for cell in row))
    console.print(table)
    console.print("\n$ phionyx-letta code verify", style="bold")
    console.print(f"after the last commits were taken out: {result['code_verify']}", style="red")
    console.print("\n$ phionyx-letta verify --key signing.key.pub", style="bold")
    console.print(
        f"{result['verdict'].upper()}  {result['envelopes']} envelopes; {result['seconds']:.0f} seconds in all"
    )
