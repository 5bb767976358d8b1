"""After each session: what was said becomes pending patches of the agent's blocks, whatever the way the run went."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sessions_rig import TALK, Rig, proposing

from phionyx_letta.demo.model import ScriptedModel


@pytest.fixture(scope="module")
def rig(
    new_letta_database: Callable[[], str], model: ScriptedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    with proposing(new_letta_database(), model, tmp_path_factory.mktemp("sessions")) as found:
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
