"""A patch of a block, decided by a person at the command line: applied through Letta, proven by the chain, never over anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sessions_rig import TALK, Rig, proposing

from phionyx_letta.demo.model import ScriptedModel
from phionyx_letta.memory.claims import CLAIM_HEADER, make_claim
from phionyx_letta.signing import generate_key, get_signer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rig(
    new_letta_database: Callable[[], str], model: ScriptedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    with proposing(
        new_letta_database(), model, tmp_path_factory.mktemp("patches"), PHIONYX_LETTA_INCLUDE_DIFF_TEXT="1"
    ) as found:
        yield found


def proposed(rig: Rig, **more: Any) -> tuple[str, str]:
    """An agent, and the id of the one patch that was proposed for it."""
    agent = rig.agent(**more)
    rig.say(agent)
    rig.finished(agent)
    [patch] = rig.patches(agent)
    return agent, str(patch["patch_id"])


def status(rig: Rig, agent: str) -> str:
    return str(rig.patches(agent)[-1]["status"])


def test_apply_writes_through_letta_and_the_envelope_names_the_patch_and_the_patch_the_envelope(rig: Rig) -> None:
    agent, patch = proposed(rig)
    approved = rig.command("memory", "approve", patch, "--by", "ada", "--reason", "true")
    assert approved["status"] == "approved"
    assert rig.value(agent) == "name: Ann", "approving writes nothing"

    applied = rig.command("memory", "apply", patch, "--by", "ada")
    assert applied["status"] == "applied"
    assert rig.value(agent) == "name: Ann\n\n- Deploys with uv."
    [stored] = rig.patches(agent)
    reference = stored["metadata"]["history"][-1]["details"]["envelope"]
    assert applied["evidence"]["verify"] == f"phionyx-letta show {reference}"
    shown = rig.command("show", reference)
    said = shown["envelope"]["subject"]["metadata"]["living_memory"]
    assert (said["patch_id"], said["reviewer"], said["event"]) == (patch, "ada", "apply")
    assert said["session"] == stored["session_id"]
    assert said["proposer_model"] == stored["metadata"]["proposed_from"]["model"]
    assert rig.sql("select role from messages where id = any(%s)", said["evidence_messages"]) == [("user",)]
    assert rig.sql("select count(*) from runs where id = any(%s)", said["runs"]) == [(1,)]
    assert rig.command("memory", "review", "--patch-id", patch)["envelope"] == reference
    session = rig.command("session", "show", said["session"])
    assert [one["patch_id"] for one in session["proposed"]] == [patch]
    assert session["run_ids"] == said["runs"]

    # the agent's next turn knows it
    before = len(rig.model.chats)
    rig.say(agent, "hello")
    assert any("Deploys with uv." in json.dumps(chat) for chat in rig.model.chats[before:])

    assert rig.command("memory", "revert", patch, "--by", "ada")["status"] == "reverted"
    assert rig.value(agent) == "name: Ann"
    verified = rig.command("verify", "--key", str(rig.home / "key.pub"))
    assert verified["verdict"] == "valid", verified


def test_what_the_agent_wrote_meanwhile_is_a_conflict_and_rebase_offers_both(rig: Rig) -> None:
    agent, patch = proposed(rig)
    rig.say(agent, 'CALL core_memory_append {"label": "human", "content": "likes tea"}')
    held = rig.value(agent)
    assert "likes tea" in held

    answer = rig.command("memory", "apply", patch, code=1)
    assert "diverged" in answer["error"]
    assert rig.value(agent) == held
    assert status(rig, agent) == "conflict"
    new = rig.command("memory", "rebase", patch)["patch_id"]
    rig.command("memory", "apply", new)
    assert rig.value(agent).startswith(held)
    assert rig.value(agent).endswith("- Deploys with uv.")


def test_a_write_between_the_last_look_and_the_write_is_refused_in_the_transaction(rig: Rig) -> None:
    """The claim is a compare-and-swap: signed for what was reviewed, it does not overwrite what came since."""
    agent = rig.agent()
    block, signer = rig.block(agent), get_signer({"PHIONYX_LETTA_SIGNING_KEY": str(rig.home / "key")})
    from phionyx_letta.diff import content_hash

    cause = {"event": "apply", "patch_id": "p1", "reviewer": "ada"}
    claim = make_claim(cause, block, content_hash("name: Ann"), content_hash("name: Bob"), signer)
    rig.rest.patch(f"/v1/blocks/{block}", json={"value": "name: Eve"}).raise_for_status()
    answer = rig.rest.patch(f"/v1/blocks/{block}", json={"value": "name: Bob"}, headers={CLAIM_HEADER: claim})
    assert answer.status_code == 409, answer.text
    assert rig.value(agent) == "name: Eve"
    # nor does it cover any other text, or any other block
    fits = make_claim(cause, block, content_hash("name: Eve"), content_hash("name: Bob"), signer)
    assert rig.rest.patch(f"/v1/blocks/{block}", json={"value": "x"}, headers={CLAIM_HEADER: fits}).status_code == 409
    other = rig.block(agent, "persona")
    assert (
        rig.rest.patch(f"/v1/blocks/{other}", json={"value": "name: Bob"}, headers={CLAIM_HEADER: fits}).status_code
        == 409
    )
    # nor anything of the block beside its text
    for more in ({"label": "project"}, {"description": "obey"}, {"limit": 77}, {"read_only": True}):
        answer = rig.rest.patch(
            f"/v1/blocks/{block}", json={"value": "name: Bob", **more}, headers={CLAIM_HEADER: fits}
        )
        assert answer.status_code == 403, answer.text
    assert rig.value(agent) == "name: Eve"
    assert (
        rig.rest.patch(f"/v1/blocks/{block}", json={"value": "name: Bob"}, headers={CLAIM_HEADER: fits}).status_code
        == 200
    )


def test_no_claim_without_a_trusted_signature_passes(rig: Rig) -> None:
    """An agent, or whoever may use the API, cannot write in a reviewer's name."""
    from phionyx_letta.diff import content_hash

    agent = rig.agent()
    block = rig.block(agent)
    generate_key(rig.home / "agents_own.key")
    stranger = get_signer({"PHIONYX_LETTA_SIGNING_KEY": str(rig.home / "agents_own.key")})
    hashes = content_hash("name: Ann"), content_hash("mine")
    forged = make_claim({"event": "apply", "patch_id": "p1", "reviewer": "ada"}, block, *hashes, stranger)
    for header in (forged, "garbage", forged.partition(".")[0] + ".", "e30.e30"):
        answer = rig.rest.patch(f"/v1/blocks/{block}", json={"value": "mine"}, headers={CLAIM_HEADER: header})
        assert answer.status_code == 403, answer.text
    assert rig.value(agent) == "name: Ann"
    assert not rig.sql("select 1 from phionyx_envelope where block_id = %s and body like '%%living_memory%%'", block)


def limit(rig: Rig, agent: str) -> None:
    rig.rest.patch(f"/v1/blocks/{rig.block(agent)}", json={"limit": 12}).raise_for_status()


def read_only(rig: Rig, agent: str) -> None:
    rig.rest.patch(f"/v1/blocks/{rig.block(agent)}", json={"read_only": True}).raise_for_status()


def deleted(rig: Rig, agent: str) -> None:
    rig.rest.delete(f"/v1/blocks/{rig.block(agent)}").raise_for_status()


def detached(rig: Rig, agent: str) -> None:
    rig.rest.patch(f"/v1/agents/{agent}/core-memory/blocks/detach/{rig.block(agent)}").raise_for_status()


def agent_deleted(rig: Rig, agent: str) -> None:
    rig.rest.delete(f"/v1/agents/{agent}").raise_for_status()


@pytest.mark.parametrize(
    ("happens", "said"),
    [
        (limit, "may hold 12 characters"),
        (read_only, "is read-only"),
        (deleted, "does not exist any more"),
        (detached, "is not attached to"),
        (agent_deleted, "is not attached to"),
    ],
)
def test_what_happened_to_the_block_since_is_said_and_nothing_is_written(
    rig: Rig, happens: Callable[[Rig, str], None], said: str
) -> None:
    agent, patch = proposed(rig)
    block = rig.block(agent)
    happens(rig, agent)

    answer = rig.command("memory", "apply", patch, code=1)
    assert said in answer["error"], answer
    assert answer["remedy"]
    assert "Traceback" not in json.dumps(answer)
    assert not rig.sql("select 1 from block where id = %s and value like '%%uv%%'", block)
    assert status(rig, agent) in ("pending", "approved")
    assert rig.command("memory", "reject", patch)["status"] == "rejected"


def test_a_renamed_and_shared_block_is_the_same_block_and_the_review_says_so(rig: Rig) -> None:
    agent, patch = proposed(rig)
    block = rig.block(agent)
    other = rig.agent(memory_blocks=[{"label": "persona", "value": "I am another."}], block_ids=[block])
    rig.rest.patch(f"/v1/blocks/{block}", json={"label": "the_user"}).raise_for_status()

    described = rig.command("memory", "review", "--patch-id", patch)
    assert any("the_user" in note for note in described["target_notes"])
    assert any(other in note for note in described["target_notes"])
    assert described["target"] == "unchanged"
    rig.command("memory", "apply", patch)
    assert rig.value(other, "the_user").endswith("- Deploys with uv.")


def test_a_fact_that_does_not_fit_says_so_and_what_could_go(rig: Rig) -> None:
    blocks = [{"label": "human", "value": "first note\nsecond note", "limit": 35}]
    agent = rig.agent(memory_blocks=blocks)
    rig.say(agent, TALK)
    rig.finished(agent)
    [patch] = rig.patches(agent)
    over = patch["metadata"]["over_limit"]
    assert (over["limit"], over["trim"]) == (35, ["first note"])


def test_a_server_that_is_away_or_not_armed_is_not_written_to(rig: Rig, letta: Any) -> None:
    _, patch = proposed(rig)
    away = rig.command("memory", "apply", patch, code=1, PHIONYX_LETTA_SERVER_URL="http://127.0.0.1:9")
    assert "does not answer" in away["error"]
    other = rig.command("memory", "apply", patch, code=1, PHIONYX_LETTA_SERVER_URL=letta.base_url)
    assert "does not exist" in other["error"]  # that server has no such block


def test_inside_the_servers_process_the_same_is_done_without_rest(
    run_in_letta: Callable[..., Any], new_letta_database: Callable[[], str], tmp_path: Path
) -> None:
    generate_key(tmp_path / "key")
    script = Path(__file__).parent / "scripts" / "server_blocks.py"
    env = {"PHIONYX_LETTA_SIGNING_KEY": str(tmp_path / "key")}
    found = run_in_letta(script, database=new_letta_database(), plugin=True, env=env)
    assert (found["applied"], found["reverted"], found["at last"]) == ("Ada\nLikes tea.", "Ada", "Eve")
    assert [(one["event"], one["reviewer"]) for one in found["behind"]] == [("apply", "ada"), ("revert", "ada")]
    assert found["raced"][0] == found["conflict"][0] == "DiffConflictError"
    assert "may hold 500 characters" in found["too long"][1]
    assert "is not attached to agent-none" in found["no such"][1]
    assert found["copy"] == ["Eve", "copied"], "a conversation's own copy of the block is written too"
    # asking an agent's model never takes longer than it may, whatever of it does not answer
    assert found["no key"][0] == "TimeoutError"
    assert found["no key"][1] < 5
