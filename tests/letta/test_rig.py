"""The ground the other tests stand on: the real Letta server runs here, offline, obeys the script, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phionyx_letta.demo.errors import DemoError
from phionyx_letta.demo.letta_server import LettaServer
from phionyx_letta.demo.model import ScriptedModel

APPEND = 'CALL core_memory_append {"label": "human", "content": "%s"}'


def say(server: LettaServer, agent: Any, text: str) -> list[Any]:
    answer = server.client().agents.messages.create(agent_id=agent.id, messages=[{"role": "user", "content": text}])
    return list(answer.messages)


def memory(server: LettaServer, agent: Any) -> str:
    return server.client().agents.blocks.retrieve("human", agent_id=agent.id).value


def wait_for(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class TestAnAgentObeysTheScript:
    @pytest.mark.parametrize("kind", ["letta_v1_agent", "memgpt_v2_agent"])
    def test_each_call_is_one_step_and_then_it_speaks(
        self, letta: LettaServer, new_agent: Callable[..., Any], kind: str
    ) -> None:
        agent = new_agent(letta, kind)
        messages = say(letta, agent, "\n".join(["please", APPEND % "tea", APPEND % "jam", "SAY well then"]))
        assert memory(letta, agent) == "Ann\ntea\njam"
        assert [m.message_type for m in messages].count("tool_call_message") == 2
        assert messages[-1].content == "well then"

    def test_the_next_message_does_not_repeat_the_script(
        self, letta: LettaServer, new_agent: Callable[..., Any]
    ) -> None:
        agent = new_agent(letta)
        say(letta, agent, APPEND % "tea")
        assert say(letta, agent, "thank you")[-1].content == "ok, done"
        assert memory(letta, agent) == "Ann\ntea"

    def test_streaming(self, letta: LettaServer, model: ScriptedModel, new_agent: Callable[..., Any]) -> None:
        agent = new_agent(letta)
        stream = letta.client().agents.messages.create(
            agent_id=agent.id,
            messages=[{"role": "user", "content": APPEND % "tea"}],
            streaming=True,
            stream_tokens=True,
        )
        kinds = {event.message_type for event in stream}
        assert {"tool_call_message", "tool_return_message", "assistant_message", "stop_reason"} <= kinds
        assert model.chats[-1]["stream"] is True
        assert memory(letta, agent) == "Ann\ntea"

    def test_parallel_calls_are_made_in_one_step(
        self, letta: LettaServer, model: ScriptedModel, new_agent: Callable[..., Any]
    ) -> None:
        agent = new_agent(letta, parallel_tool_calls=True)
        before = len(model.chats)
        say(letta, agent, f"PAR{APPEND % 'tea'}\nPAR{APPEND % 'jam'}")
        assert sorted(memory(letta, agent).split("\n")) == ["Ann", "jam", "tea"]
        assert len(model.chats) - before == 2

    def test_a_sleeptime_agent_makes_its_own_calls_and_not_the_foreground_ones(
        self, letta: LettaServer, new_agent: Callable[..., Any]
    ) -> None:
        agent = new_agent(letta, enable_sleeptime=True)
        dream = 'SLEEP_CALL memory_insert {"label": "human", "new_string": "dreamt", "insert_line": -1}'
        say(letta, agent, f"{dream}\n{APPEND % 'awake'}")
        assert wait_for(lambda: "dreamt" in memory(letta, agent))
        time.sleep(1)  # were it to go on, it would do so now
        assert memory(letta, agent) == "Ann\nawake\ndreamt"

    def test_a_summary_is_asked_for_and_given(self, letta: LettaServer, new_agent: Callable[..., Any]) -> None:
        agent = new_agent(letta)
        for word in ("tea", "jam", "bread"):
            say(letta, agent, APPEND % word)
        request = urllib.request.Request(
            f"{letta.base_url}/v1/agents/{agent.id}/summarize", b"{}", {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["summary"].startswith("Summary:")
        assert memory(letta, agent) == "Ann\ntea\njam\nbread"


class TestAScriptInsideLetta:
    def test_it_uses_lettas_own_managers_and_returns_what_it_found(self, run_in_letta: Any, database: str) -> None:
        found = run_in_letta(_UPDATE_A_BLOCK, "after", database=database)
        assert found == {"value": "after"}

    def test_its_failure_is_shown(self, run_in_letta: Any, empty_database: str) -> None:
        with pytest.raises(pytest.fail.Exception, match="no such luck"):
            run_in_letta("raise SystemExit('no such luck')", database=empty_database)


_UPDATE_A_BLOCK = """
import asyncio, json, sys
from letta.schemas.block import Block, BlockUpdate
from letta.services.block_manager import BlockManager
from letta.services.organization_manager import OrganizationManager
from letta.services.user_manager import UserManager

async def main():
    await OrganizationManager().create_default_organization_async()
    actor = await UserManager().create_default_actor_async()
    block = await BlockManager().create_or_update_block_async(Block(label="human", value="before"), actor)
    await BlockManager().update_block_async(block.id, BlockUpdate(value=sys.argv[1]), actor)
    print(json.dumps({"value": (await BlockManager().get_block_by_id_async(block.id, actor)).value}))

asyncio.run(main())
"""


class TestTheServer:
    @pytest.mark.slow
    def test_it_speaks_to_this_machine_only(
        self, letta_server_factory: Any, new_agent: Callable[..., Any], tmp_path: Path
    ) -> None:
        """Also two workers, so that what the launcher does for one process is seen to hold for its children."""
        record = tmp_path / "addresses"
        (tmp_path / "sitecustomize.py").write_text(_RECORD_ADDRESSES)
        server = letta_server_factory(workers=2, env={"PYTHONPATH": str(tmp_path), "RECORD": str(record)})
        agent = new_agent(server)
        say(server, agent, APPEND % "tea")
        addresses = {tuple(json.loads(line)) for line in record.read_text().splitlines()}
        assert {host for _, host in addresses} <= {"127.0.0.1", "localhost", ""}
        assert len({pid for pid, _ in addresses}) >= 2

    @pytest.mark.slow
    def test_another_command_can_be_run_in_its_place(
        self, letta_server_factory: Any, new_agent: Callable[..., Any]
    ) -> None:
        letta_command = shutil.which("letta", path=str(Path(sys.executable).parent))
        assert letta_command is not None
        server = letta_server_factory(command=[letta_command, "server", "--host", "127.0.0.1", "--port", "{port}"])
        agent = new_agent(server)
        say(server, agent, APPEND % "tea")
        assert memory(server, agent) == "Ann\ntea"

    def test_one_that_cannot_start_says_why(self) -> None:
        command = [sys.executable, "-c", "import sys; sys.exit('the roof is on fire')"]
        server = LettaServer("postgresql://x", "http://127.0.0.1:9/v1", command=command, schema=False)
        with pytest.raises(DemoError, match=r"(?s)code 1.*the roof is on fire"):
            server.start()
        assert not server.log.exists()


_RECORD_ADDRESSES = """
import json, os, sys
def record(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        host = arguments[1][0] if event == "socket.connect" else arguments[0]
        if not isinstance(host, (bytes, int)):
            with open(os.environ["RECORD"], "a") as file:
                file.write(json.dumps([os.getpid(), host or ""]) + "\\n")
sys.addaudithook(record)
"""


class TestNothingIsLeftBehind:
    @pytest.mark.slow
    def test_when_the_parent_is_killed(self, tmp_path: Path) -> None:
        """With no HOME to speak of, either; and of the caller's variables nothing came to the server."""
        own = {"ANTHROPIC_API_KEY": "x", "HTTPS_PROXY": "http://127.0.0.1:9", "PYTHONDONTWRITEBYTECODE": "1"}
        environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "TMPDIR": str(tmp_path), **own}
        parent = subprocess.Popen(
            [sys.executable, "-c", _START_EVERYTHING], stdout=subprocess.PIPE, text=True, env=environment
        )
        with parent:
            assert parent.stdout is not None
            line = parent.stdout.readline()
            passed = dict(
                entry.split("=", 1)
                for entry in Path(f"/proc/{json.loads(line)[1]}/environ").read_text().split("\0")[:-1]
            )
            parent.send_signal(signal.SIGKILL)
        pids = json.loads(line)
        assert len(pids) == 2
        assert Path(passed["HOME"]).parent == tmp_path
        assert not own.keys() & passed.keys()
        assert wait_for(lambda: not any(is_running(pid) for pid in pids))
        assert wait_for(lambda: list(tmp_path.iterdir()) == []), list(tmp_path.iterdir())


_START_EVERYTHING = """
import json, time
from phionyx_letta.demo.letta_server import LettaServer
from phionyx_letta.demo.model import ScriptedModel
from phionyx_letta.demo.postgres import EmbeddedPostgres
with EmbeddedPostgres() as postgres, ScriptedModel() as model, LettaServer(postgres.uri, model.base_url) as letta:
    print(json.dumps([postgres.pid, letta.pid]), flush=True)
    time.sleep(600)
"""
