"""Agents whose memory tools propose only: nothing is written until a person approved it, and the tool's answer says so."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sessions_rig import Rig, proposing

from phionyx_letta.demo.model import ScriptedModel
from phionyx_letta.signing import generate_key

pytestmark = pytest.mark.slow

PATHS = Path(__file__).parent / "scripts" / "propose_only_paths.py"
TAG = "asks-first"
BY_HAND = '''
def overwrite_memory(agent_state: "AgentState", text: str) -> str:
    """Overwrite what is known of the user.

    Args:
        text: what shall be known.
    """
    agent_state.memory.update_block_value(label="human", value=text)
    return "overwritten"
'''


@pytest.fixture(scope="module")
def rig(
    new_letta_database: Callable[[], str], model: ScriptedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    settings = {"PHIONYX_LETTA_SESSIONS": "off", "PHIONYX_LETTA_PROPOSE_ONLY": f"tag:{TAG} notes"}
    with proposing(new_letta_database(), model, tmp_path_factory.mktemp("propose_only"), **settings) as found:
        yield found


def told(rig: Rig, agent: str, tool: str, arguments: dict[str, object]) -> str:
    """Have the agent call a tool; what the tool answered."""
    answer = json.loads(rig.say(agent, f"CALL {tool} {json.dumps(arguments)}"))
    [said] = [one["tool_return"] for one in answer["messages"] if one["message_type"] == "tool_return_message"]
    return str(said)


def changes(rig: Rig, block: str) -> int:
    return int(rig.sql("select count(*) from phionyx_envelope where block_id = %s and kind <> 'forget'", block)[0][0])


WRITES = [
    ("core_memory_append", {"label": "human", "content": "likes tea"}, "name: Ann\nlikes tea"),
    ("core_memory_replace", {"label": "human", "old_content": "Ann", "new_content": "Eve"}, "name: Eve"),
    ("memory_insert", {"label": "human", "new_string": "has a cat", "insert_line": -1}, "name: Ann\nhas a cat"),
    ("memory_replace", {"label": "human", "old_string": "Ann", "new_string": "Eva"}, "name: Eva"),
    ("memory_rethink", {"label": "human", "new_memory": "a user"}, "a user"),
    ("memory_apply_patch", {"label": "human", "patch": "@@\n-name: Ann\n+name: Ida\n"}, "name: Ida"),
    (
        "memory",
        {"command": "str_replace", "path": "/memories/human", "old_string": "Ann", "new_string": "Una"},
        "name: Una",
    ),
    ("memory", {"command": "insert", "path": "/memories/human", "insert_text": "has a dog", "insert_line": 1}, None),
]


@pytest.fixture(scope="module")
def asking(rig: Rig) -> str:
    """The tool of the tests' own."""
    tool = rig.rest.post("/v1/tools/", json={"source_code": BY_HAND, "source_type": "python"})
    assert tool.status_code == 200, tool.text
    return str(tool.json()["id"])


def test_each_memory_tool_queues_a_patch_says_so_and_writes_nothing(rig: Rig) -> None:
    agent = rig.agent(tags=[TAG], tools=sorted({name for name, *_ in WRITES}))
    block = rig.block(agent)
    rig.wait(lambda: changes(rig, block) == 2)  # its creation and its attachment
    for number, (tool, arguments, wanted) in enumerate(WRITES, start=1):
        said = told(rig, agent, tool, arguments)
        assert "Nothing was written" in said, (tool, said)
        assert rig.value(agent) == "name: Ann", tool
        patches = rig.patches(agent)
        assert len(patches) == number, tool
        patch = patches[-1]
        assert patch["patch_id"] in said
        assert (patch["status"], patch["author"], patch["before_content"]) == ("pending", agent, "name: Ann")
        assert wanted is None or patch["after_content"] == wanted
        assert patch["metadata"]["proposed_from"]["tool"] == tool
        assert patch["metadata"]["untrusted"]
    again = told(rig, agent, *WRITES[0][:2])
    assert rig.patches(agent)[0]["patch_id"] in again, "what waits already is not queued twice"
    assert len(rig.patches(agent)) == len(WRITES)
    assert changes(rig, block) == 2, "nothing since"

    before = len(rig.model.chats)
    rig.say(agent, "hello")
    assert all("name: Eve" not in json.dumps(chat["messages"][0]) for chat in rig.model.chats[before:])
    chosen = rig.patches(agent)[0]["patch_id"]
    assert rig.command("memory", "apply", chosen, "--by", "ada")["status"] == "applied"
    assert rig.value(agent) == "name: Ann\nlikes tea"
    assert rig.command("verify", "--key", str(rig.home / "key.pub"))["verdict"] == "valid"


def test_what_is_no_change_of_text_is_refused_and_the_agent_is_told(rig: Rig) -> None:
    agent = rig.agent(tags=[TAG], tools=["memory"])
    for arguments in (
        {"command": "create", "path": "/memories/trip", "description": "a trip", "file_text": "Porto"},
        {"command": "rename", "old_path": "/memories/human", "new_path": "/memories/person"},
        {"command": "delete", "path": "/memories/human"},
    ):
        assert "only after a person approved it" in told(rig, agent, "memory", arguments), arguments
    labels = sorted(one["label"] for one in rig.rest.get(f"/v1/agents/{agent}/core-memory/blocks").json())
    assert labels == ["human", "persona"]
    assert rig.patches(agent) == []


def test_a_tool_of_several_steps_queues_each_text_once_and_tells_what_was_refused(rig: Rig) -> None:
    agent = rig.agent(tags=[TAG], tools=["memory_apply_patch"])
    persona = rig.value(agent, "persona")
    steps = f"*** Update Block: human\n@@\n-name: Ann\n+name: Eve\n*** Update Block: persona\n@@\n-{persona}\n+a spy\n"
    said = told(rig, agent, "memory_apply_patch", {"label": "human", "patch": steps})
    assert "Nothing was written" in said
    assert sorted(one["after_content"] for one in rig.patches(agent)) == ["a spy", "name: Eve"]
    said = told(rig, agent, "memory_apply_patch", {"label": "human", "patch": steps + "*** Add Block: trip\n+Porto\n"})
    assert "a new block trip cannot wait for that" in said
    assert "Nothing was written" in said
    assert (rig.value(agent), rig.value(agent, "persona")) == ("name: Ann", persona)


def test_a_block_alone_can_be_meant_and_other_agents_write_as_ever(rig: Rig) -> None:
    blocks = [{"label": "human", "value": "name: Ann"}, {"label": "notes", "value": "none"}]
    agent = rig.agent(memory_blocks=blocks)
    assert "Nothing was written" in told(rig, agent, "core_memory_append", {"label": "notes", "content": "x"})
    told(rig, agent, "core_memory_append", {"label": "human", "content": "likes tea"})
    assert (rig.value(agent, "notes"), rig.value(agent)) == ("none", "name: Ann\nlikes tea")
    # a person writes it without being asked
    rig.rest.patch(f"/v1/blocks/{rig.block(agent, 'notes')}", json={"value": "mine"}).raise_for_status()
    assert rig.value(agent, "notes") == "mine"


def test_a_named_label_cannot_be_taken_by_a_block_of_another_name(rig: Rig) -> None:
    agent = rig.agent(tools=["memory"])
    made = {"command": "create", "path": "/memories/draft", "description": "d", "file_text": "mine"}
    assert "only after a person approved it" not in told(rig, agent, "memory", made)
    for path in ("/memories/notes", "/memories/Notes", "/memories/n\u043etes"):
        for name in ("draft", "human"):  # one that came since the agent was looked up, and one that was known
            renamed = {"command": "rename", "old_path": f"/memories/{name}", "new_path": path}
            assert "only after a person approved it" in told(rig, agent, "memory", renamed), (name, path)
        assert "only after a person approved it" in told(rig, agent, "memory", {**made, "path": path}), path
    labels = sorted(one["label"] for one in rig.rest.get(f"/v1/agents/{agent}/core-memory/blocks").json())
    assert labels == ["draft", "human", "persona"]
    told(rig, agent, "memory", {"command": "rename", "old_path": "/memories/draft", "new_path": "/memories/plan"})
    assert rig.value(agent, "plan") == "mine"


def test_a_sandboxed_tool_that_changes_the_agents_state_proposes_too(rig: Rig, asking: str) -> None:
    agent = rig.agent(tags=[TAG], tool_ids=[asking])
    assert "Nothing was written" in told(rig, agent, "overwrite_memory", {"text": "owned"})
    assert rig.value(agent) == "name: Ann"
    assert [one["after_content"] for one in rig.patches(agent)] == ["owned"]


def test_what_a_conversation_wants_of_its_own_copy_of_a_block_is_applied_to_the_copy(rig: Rig) -> None:
    agent = rig.agent(tags=[TAG])
    conversation = rig.conversation(agent, isolated_block_labels=["human"])
    [copy] = rig.rest.get(f"/v1/conversations/{conversation}").json()["isolated_block_ids"]
    call = 'CALL core_memory_append {"label": "human", "content": "likes tea"}'
    assert "Nothing was written" in rig.say(agent, call, "conversation", conversation)
    [patch] = rig.patches(agent)
    assert patch["file_path"] == f"letta:{agent}/{copy}/human"
    assert patch["metadata"]["proposed_from"]["conversation_id"] == conversation
    assert rig.command("memory", "apply", patch["patch_id"], "--by", "ada")["status"] == "applied"
    assert rig.sql("select value from block where id = %s", copy) == [("name: Ann\nlikes tea",)]
    assert rig.value(agent) == "name: Ann"


def test_a_sleeptime_agent_proposes_for_the_agent_whose_memory_it_tidies(rig: Rig) -> None:
    agent = rig.agent(tags=[TAG], enable_sleeptime=True)
    block = rig.block(agent)
    rig.say(agent, 'hello\nSLEEP_CALL memory_rethink {"label": "human", "new_memory": "rewritten"}')
    rig.wait(lambda: rig.sql("select 1 from phionyx_patch where file_path like %s", f"%/{block}/human"))
    assert rig.value(agent) == "name: Ann"
    [(body,)] = rig.sql("select body from phionyx_patch where newest and file_path like %s", f"%/{block}/human")
    patch = json.loads(body)
    assert patch["after_content"] == "rewritten"
    assert patch["author"] != agent
    assert rig.command("memory", "apply", patch["patch_id"])["status"] == "applied"
    assert rig.value(agent) == "rewritten"


# -- ways that no REST request reaches -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ways(run_in_letta: Callable[..., Any], new_letta_database: Callable[[], str], tmp_path_factory: Any) -> Any:
    """What scripts/propose_only_paths.py found."""
    key, block = tmp_path_factory.mktemp("ways") / "key", f"block-{uuid.uuid4()}"
    generate_key(key)
    settings = {"PHIONYX_LETTA_SIGNING_KEY": str(key), "PHIONYX_LETTA_PROPOSE_ONLY": f"tag:{TAG} {block}"}
    return run_in_letta(PATHS, block, database=new_letta_database(), plugin=True, env=settings)


def test_the_batch_api_queues_what_a_named_agent_wants_and_writes_for_the_others(ways: Any) -> None:
    found = ways["batch"]
    assert "Nothing was written" in found["answers"][0]
    assert found["answers"][1] is None
    assert found["values"] == ["name: Ann", "rewritten"]
    assert found["patches"] == ["rewritten"]


def test_a_way_of_writing_that_no_tool_takes_today_is_refused_in_its_transaction(ways: Any) -> None:
    found = ways["other ways"]
    assert found.pop("patches") == []
    assert found.keys() == {"bulk", "by label", "delete"}
    for name, (answer, value) in found.items():
        assert "only after a person approved it" in answer, name
        assert value == "name: Ann", name


def test_tools_of_one_step_that_run_at_the_same_time_queue_each_what_it_wanted(ways: Any) -> None:
    found = ways["parallel"]
    assert all("Nothing was written" in answer for answer in found["answers"])
    assert found["patches"] == found["wanted"]
    assert found["state"] == ["name: Ann", "I help."]


def test_a_git_backed_block_is_held_before_its_repository_is_written(ways: Any) -> None:
    found = ways["git"]
    assert "Nothing was written" in found["answer"]
    assert found["unchanged"]
    assert (found["value"], found["patches"]) == ("name: Ann", ["name: Ann\nlikes tea"])
    assert found["a person wrote"]


def test_a_conversations_copy_of_a_named_block_is_held_from_its_first_message(ways: Any) -> None:
    found = ways["isolated"]
    assert found["is a copy"]
    assert "Nothing was written" not in found["answers"][0]
    assert "Nothing was written" in found["answers"][1]
    assert (found["value"], found["patches"]) == ("name: Ann", ["name: Ann\nlikes tea"])


def test_where_a_patch_cannot_be_queued_the_named_agent_is_told_and_others_write(ways: Any) -> None:
    found = ways["unqueued"]
    refused, written = found["answers"]
    assert "nothing was written" in refused
    assert "could not be queued" in refused
    assert "s3cret" not in refused
    assert found["values"] == ["name: Ann", "name: Ann\nlikes tea"]
    assert "likes tea" in written
    assert "Nothing was written" in found["later"]


def test_an_agent_that_is_not_named_is_looked_up_once_in_a_while(ways: Any) -> None:
    assert ways["cost"]["lines"] == 21
    assert ways["cost"]["asked"] <= 3
