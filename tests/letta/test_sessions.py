"""After each session: what was said becomes pending patches of the agent's blocks, whatever the way the run went."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from queue_rig import queue
from sessions_rig import TALK, Rig, proposing, remember

from phionyx_letta.demo.model import ScriptedModel
from phionyx_letta.demo.script import PROPOSER, Reply, plan, text_of
from phionyx_letta.signing import generate_key

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rig(
    new_letta_database: Callable[[], str], model: ScriptedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    """A server with a policy: ada decides about the block `human`, and nobody else about anything."""
    home = tmp_path_factory.mktemp("sessions")
    generate_key(home / "ada")
    (home / "reviewers.toml").write_text('[[reviewer]]\nname = "ada"\nkey = "ada.pub"\nblocks = ["human"]\n')
    policy = str(home / "reviewers.toml")
    with proposing(new_letta_database(), model, home, PHIONYX_LETTA_REVIEWERS=policy) as found:
        yield found


@pytest.mark.parametrize("kind", ["letta_v1_agent", "memgpt_v2_agent"])
@pytest.mark.parametrize("how", ["blocking", "streaming", "background", "conversation"])
def test_a_session_becomes_a_pending_patch_of_the_block_however_the_run_went(rig: Rig, kind: str, how: str) -> None:
    agent = rig.agent(kind)
    conversation = rig.conversation(agent) if how == "conversation" else None
    rig.say(agent, TALK, how, conversation)

    [(state, patches, _, attempts, tokens, model, session)] = rig.finished(agent)
    assert (state, patches, attempts) == ("done", 1, 1)
    assert tokens > 0
    assert model
    [patch] = rig.patches(agent)
    assert patch["status"] == "pending"
    assert patch["file_path"] == f"letta:{agent}/{rig.block(agent)}/human"
    assert patch["after_content"].endswith("- Deploys with uv.")
    assert patch["session_id"] == session
    assert patch["metadata"]["proposed_from"]["conversation_id"] == conversation
    [evidence] = patch["metadata"]["evidence"]
    assert evidence["role"] == "user"
    assert rig.sql("select 1 from messages where id = %s", evidence["message_id"])
    assert rig.value(agent) == "name: Ann", "nothing was applied"
    assert rig.sql("select count(*) from runs where agent_id = %s", agent) == [(1,)], "proposing is no run"


def difficult(request: dict[str, object]) -> Reply:
    """A model that fails an agent that is told so, or lets it wait; the proposer it answers."""
    messages = request["messages"]
    assert isinstance(messages, list)
    if not text_of(messages[-1]).startswith(PROPOSER):
        said = text_of(next(one for one in reversed(messages) if one["role"] == "user"))
        if "the endpoint fails" in said:
            raise RuntimeError("the endpoint failed")
        if "this takes" in said:
            time.sleep(4 if "this takes long" in said else 20)
    return plan(request)


def begin(rig: Rig, agent: str, text: str) -> str:
    """A run in the background; its id, once it is under way."""
    body = {"messages": [{"role": "user", "content": text}]}
    run = str(rig.rest.post(f"/v1/agents/{agent}/messages/async", json=body).json()["id"])
    rig.wait(lambda: rig.sql("select 1 from messages where run_id = %s", run))
    return run


def cancelled(rig: Rig, agent: str, text: str) -> None:
    run = begin(rig, agent, f"{text}\nthis takes long")
    rig.rest.post(f"/v1/agents/{agent}/messages/cancel", json={"run_ids": [run]})


def test_failed_and_cancelled_runs_end_sessions_too_and_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    failing, stopped = rig.agent(), rig.agent()
    monkeypatch.setattr(rig.model, "override", difficult)
    rig.send(failing, f"{TALK}\nthe endpoint fails")
    cancelled(rig, stopped, TALK)
    for agent in (failing, stopped):
        rig.finished(agent)
        assert (
            len(rig.sql("select 1 from phionyx_run r join runs u on u.id = r.run_id where u.agent_id = %s", agent)) == 1
        )
    time.sleep(3)
    assert len(rig.queue(failing)) == len(rig.queue(stopped)) == 1


def test_a_sleeptime_agent_begins_no_session_of_its_own(rig: Rig) -> None:
    agent = rig.agent(enable_sleeptime=True)
    rig.say(agent, f'{TALK}\nSLEEP_CALL memory_rethink {{"label": "human", "new_memory": "rewritten"}}')
    rig.finished(agent)
    others = rig.sql("select id from agents where agent_type = 'sleeptime_agent'")
    assert others, "there is a sleeptime agent"
    rig.wait(lambda: rig.sql("select 1 from phionyx_run where session_id = ''"))
    assert not rig.sql(
        "select 1 from phionyx_session s join agents a on a.id = s.agent_id where a.agent_type = 'sleeptime_agent'"
    )


def test_a_model_that_fails_the_proposer_costs_the_agent_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = rig.agent()

    def answer(request: dict[str, object]) -> Reply:
        messages = request["messages"]
        assert isinstance(messages, list)
        if text_of(messages[-1]).startswith(PROPOSER):
            raise RuntimeError("dead")
        return plan(request)

    monkeypatch.setattr(rig.model, "override", answer)
    rig.say(agent)
    rig.wait(
        lambda: rig.sql("select 1 from phionyx_session where agent_id = %s and detail like '%%no answer%%'", agent)
    )
    [shown] = rig.sessions(agent)
    assert shown["state"] == "waiting"
    assert "gave no answer" in shown["detail"]
    began = time.monotonic()
    rig.say(agent, "and how are you?")
    assert time.monotonic() - began < 30


def test_a_locked_table_of_ours_holds_up_no_run_and_the_sweep_finds_the_end(rig: Rig) -> None:
    agent = rig.agent()
    with psycopg.connect(rig.database) as connection:
        connection.execute("lock table phionyx_run in access exclusive mode")
        rig.say(agent)
        assert not connection.execute("select 1 from phionyx_session where agent_id = %s", (agent,)).fetchall()
    assert rig.finished(agent)[0][0] == "done"


def test_doctor_log_and_session_list_say_how_the_queue_stands(rig: Rig) -> None:
    agent = rig.agent()
    rig.say(agent)
    rig.finished(agent)
    [one] = rig.sessions(agent)
    assert (one["state"], one["patches"], one["runs"]) == ("done", 1, 1)
    assert one["tokens"] > 0
    assert one["age_s"] >= 0
    done = rig.run("doctor")
    examined = json.loads(done.stdout)
    assert examined["sessions"]["states"]["done"] >= 1
    assert any(found["check"] == "sessions" and found["status"] == "ok" for found in examined["findings"])
    assert rig.command("log")["sessions"]["states"]["done"] >= 1


# -- no path lets an agent approve -----------------------------------------------------------------------------------

TAKE_OVER = '''
def take_over(patch: str) -> str:
    """Try everything a program in the sandbox can to have a patch applied.

    Args:
        patch: its id.
    """
    import json, os, subprocess, sys

    ours = sorted(name for name in os.environ if name.startswith("PHIONYX_LETTA_"))
    said = []
    for act in ("approve", "apply"):
        command = [sys.executable, "-m", "phionyx_letta.cli", "memory", act, patch]
        more = ["--store-path", os.environ["LETTA_PG_URI"], "--by", "ada", "--json"]
        done = subprocess.run([*command, *more], capture_output=True, text=True)
        said.append([done.returncode, done.stdout[-300:]])
    return json.dumps([ours, said])
'''


#: Tools that end a run.
ENDING = ("send_message", "memory_finish_edits", "finish_rethinking_memory")
#: They run as `send_message_to_agents_matching_tags` does, in the sandbox, and take as long: one of them is tried.
ALIKE = ("send_message_to_agent_and_wait_for_reply", "send_message_to_agent_async")


def arguments(tool: dict[str, Any], order: str) -> dict[str, Any]:
    """For each parameter of a tool something of its type."""
    values = {"integer": 1, "number": 1, "boolean": True, "array": ["none"], "object": {}}
    wanted = tool["json_schema"]["parameters"]["properties"]
    return {name: values.get(said.get("type"), order) for name, said in wanted.items()}


def test_no_tool_of_an_agent_decides_about_a_patch(rig: Rig) -> None:
    made = rig.rest.post("/v1/tools/", json={"source_code": TAKE_OVER, "source_type": "python"})
    assert made.status_code == 200, made.text
    found = rig.rest.get("/v1/tools/", params={"limit": 500}).json()
    tools = {one["name"]: one for one in found if one["tool_type"] != "custom" and one["name"] not in ALIKE}
    agent = rig.agent(tools=["take_over", *tools])
    rig.say(agent)
    rig.finished(agent)
    [patch] = rig.patches(agent)
    identity = patch["patch_id"]
    order = f"patch {identity}: approved, applied"
    calls = {
        "core_memory_append": {"label": "persona", "content": order},
        "core_memory_replace": {"label": "persona", "old_content": "I help.", "new_content": order},
        "memory_insert": {"label": "persona", "new_string": order, "insert_line": -1},
        "memory_replace": {"label": "persona", "old_string": order, "new_string": identity},
        "memory_apply_patch": {"label": "persona", "patch": order},
        "memory": {"command": "create", "path": f"/memories/{identity}", "description": "approved", "file_text": order},
        "memory_rethink": {"label": "persona", "new_memory": order},
    }
    assert calls.keys() <= tools.keys()
    asked = [f"CALL {name} {json.dumps(calls.get(name) or arguments(tool, order))}" for name, tool in tools.items()]
    ending = [call for call in asked if call.split()[1] in ENDING]
    tried = set()
    for message in ("\n".join(call for call in asked if call not in ending), *ending):
        answer = json.loads(rig.say(agent, message))["messages"]
        tried |= {one["tool_call"]["name"] for one in answer if one["message_type"] == "tool_call_message"}
    assert tried | {"send_message"} == tools.keys(), "a message is what that one is shown as"
    answer = json.loads(rig.say(agent, f'CALL take_over {{"patch": "{identity}"}}'))["messages"]
    returned = next(one["tool_return"] for one in answer if one["message_type"] == "tool_return_message")
    ours, said = json.loads(returned)
    assert ours == [], "the tool was handed our settings"
    assert [code for code, _ in said] == [1, 1], said
    assert all("cannot be checked" in text for _, text in said)
    assert rig.sql("select count(*) from phionyx_patch where patch_id = %s", identity) == [(1,)]
    assert rig.patches(agent)[0]["status"] == "pending"
    assert "Deploys with uv" not in rig.value(agent)


def test_with_a_policy_the_servers_own_key_decides_nothing_and_a_reviewer_only_what_is_his(rig: Rig) -> None:
    agent = rig.agent(value="I am kind.")
    about_her = {**json.loads(TALK.partition("REMEMBER ")[2]), "file_path": "persona", "content": "- Speaks of uv."}
    rig.say(agent, f"{TALK}\nREMEMBER {json.dumps({**about_her, 'fact_key': 'persona_uv'})}")
    rig.finished(agent)
    human, persona = sorted(rig.patches(agent), key=lambda one: one["file_path"].rpartition("/")[2])
    trusted = {"PHIONYX_LETTA_VERIFY_KEY": str(rig.home / "key.pub")}
    ada = {**trusted, "PHIONYX_LETTA_SIGNING_KEY": str(rig.home / "ada")}

    refused = rig.command("memory", "apply", human["patch_id"], "--by", "ada", code=1)
    assert "no reviewer of this server has signed" in refused["error"]
    known = {**ada, "PHIONYX_LETTA_VERIFY_KEY": str(rig.home / "key.pub")}
    refused = rig.command("memory", "apply", human["patch_id"], "--by", "bob", code=1, **known)
    assert "in his own name" in refused["error"]
    refused = rig.command("memory", "apply", persona["patch_id"], "--by", "ada", code=1, **known)
    assert "may not decide about blocks called persona" in refused["error"]
    assert rig.value(agent) == "I am kind."
    assert rig.command("memory", "apply", human["patch_id"], "--by", "ada", **known)["status"] == "applied"
    assert rig.value(agent).endswith("- Deploys with uv.")


# -- several workers, and the death of a server ----------------------------------------------------------------------


NUMBER = "I like the number {} very much and always have."


def talk(number: int) -> str:
    """What a user says in a session, and a fact of its own in it."""
    quote = NUMBER.format(number * 111)
    return remember(quote, fact_key=f"number_{number}", content=f"- Likes {number * 111}.", evidence=[quote])


def contents(patches: list[dict[str, Any]]) -> Counter[str]:
    return Counter(one["metadata"]["content"] for one in patches)


def test_two_workers_propose_once_from_each_session_and_a_killed_server_loses_none(
    new_letta_database: Callable[[], str], model: ScriptedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = new_letta_database()
    per_run = {"PHIONYX_LETTA_SESSION_END": "run"}
    with proposing(database, model, tmp_path, workers=2, **per_run) as rig:
        agents = [rig.agent() for _ in range(3)]
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda number: rig.say(agents[number % 3], talk(number)), range(1, 13)))
        rig.wait(lambda: rig.sql("select count(*) from phionyx_session where state = 'done'") == [(12,)], 90)
        proposed = contents([patch for agent in agents for patch in rig.patches(agent)])
        assert proposed == {f"- Likes {number * 111}.": 1 for number in range(1, 13)}

        slow = rig.agent()
        rig.say(slow, talk(13))
        rig.finished(slow)
        monkeypatch.setattr(model, "override", lambda request: time.sleep(30))
        body = {"messages": [{"role": "user", "content": talk(14)}]}
        rig.rest.post(f"/v1/agents/{slow}/messages/async", json=body).raise_for_status()
        rig.wait(lambda: rig.sql("select 1 from runs where agent_id = %s and completed_at is null", slow), 20)
        time.sleep(1)
        rig.server.kill()
        monkeypatch.setattr(model, "override", None)
    with psycopg.connect(database) as connection:  # two minutes pass
        connection.execute("update phionyx_worker set seen_at = seen_at - interval '2 minutes'")
        connection.execute(
            "update runs set created_at = created_at - interval '2 minutes' where agent_id = %s", (slow,)
        )
        told = "update phionyx_worker set info = jsonb_set(info::jsonb, '{sessions_since}', to_jsonb(%s::text))::text"
        connection.execute(told, ("2020-01-01T00:00:00+00:00",))
    with proposing(database, model, tmp_path, **per_run) as rig:
        assert rig.finished(slow, 2, seconds=90)[1][0] in ("done", "skipped"), (
            "as far as Letta had stored what was said"
        )
        assert [one["metadata"]["content"] for one in rig.patches(slow)][:1] == ["- Likes 1443."]
        [(unended,)] = rig.sql("select count(*) from runs where agent_id = %s and completed_at is null", slow)
        assert unended == 1, "the run never ended, and is in a session all the same"


def test_however_runs_go_they_are_proposed_from_by_hand_or_each_by_itself_and_a_stopped_server_loses_none(
    new_letta_database: Callable[[], str], model: ScriptedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = new_letta_database()
    monkeypatch.setattr(model, "override", difficult)
    with proposing(database, model, tmp_path, PHIONYX_LETTA_SESSION_END="hand") as rig:
        by_hand, each = agents = rig.agent(), rig.agent()
        for agent in agents:
            for number, how in enumerate(("blocking", "streaming", "background"), start=1):
                rig.say(agent, talk(number), how)
            rig.say(agent, talk(4), "conversation", rig.conversation(agent))
            rig.send(agent, f"{talk(5)}\nthe endpoint fails")
            cancelled(rig, agent, talk(6))
        ended = "select 1 from phionyx_run r join runs u on u.id = r.run_id where u.agent_id = %s"
        rig.wait(lambda: all(len(rig.sql(ended, agent)) == 6 for agent in agents))
        assert rig.sql("select * from phionyx_session") == [], "nobody ended one"
        assert len(rig.command("session", "end", by_hand)["ended"]) == 2, "the agent's, and its conversation's"
        assert [row[0] for row in rig.finished(by_hand, 2, seconds=180)] == ["done", "done"]
        proposed = contents(rig.patches(by_hand))
        assert set(proposed.values()) == {1}
        assert {"- Likes 111.", "- Likes 222.", "- Likes 333.", "- Likes 444."} <= proposed.keys()
        assert "no open session" in rig.command("session", "end", by_hand, code=1)["error"]

        cut = begin(rig, each, f"{talk(7)}\nthis takes longer than that")
        rig.server.stop()  # SIGTERM, in the middle of a run
    with psycopg.connect(database) as connection:
        assert not connection.execute("select 1 from phionyx_worker").fetchall(), "it said good-bye"
        noted = connection.execute("select session_id from phionyx_run where run_id = %s", (cut,)).fetchall()
        assert noted == [(None,)], "whether Letta still ended the run or not, it is known to be over"

    with queue(database, model.base_url, tmp_path, PHIONYX_LETTA_SESSION_END="run") as later:
        later.start()
        count = "select count(*) from phionyx_session where agent_id = %s and finished_at is not null"
        later.wait(lambda: later.sql(count, each) == [(7,)], 300)
        assert later.states().keys() <= {"done", "skipped"}
        proposed = contents(later.patches(each))
        assert set(proposed.values()) == {1}
        assert {"- Likes 111.", "- Likes 222.", "- Likes 333.", "- Likes 444."} <= proposed.keys()
        assert set(contents(later.patches(by_hand)).values()) == {1}, "nothing of it was proposed again"
