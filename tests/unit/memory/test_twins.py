"""Several additions to one text, as agents that only propose make them: each can be rebased, and none waits twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from memory_helpers import patch

from phionyx_letta import Ed25519Signer
from phionyx_letta.errors import DiffConflictError, TargetRefused
from phionyx_letta.memory import LivingMemory, twins
from phionyx_letta.memory.merging import both_added
from phionyx_letta.memory.patches import transition
from phionyx_letta.memory.stored import Patches
from phionyx_letta.memory.twins import save_once

KEY = Ed25519Signer("11" * 32)


class Block:
    """A block that is written like a server's."""

    records_itself, label = True, "human"

    def __init__(self, name: str) -> None:
        self.name = self.identity = name
        self.text, self.limit = "name: Ann", 40

    def names(self) -> list[str]:
        return []

    def about(self, name: str) -> str:
        return ""

    def resolve(self, name: str) -> Block:
        return self

    def notes(self) -> list[str]:
        return []

    def read(self) -> str | None:
        return self.text

    def write(self, expected: str | None, text: str, cause: Mapping[str, Any] | None = None) -> str | None:
        if self.text != expected:
            raise DiffConflictError(self.name, "", "")
        self.text = text
        return None


@pytest.fixture
def living(new_store: Callable[[], Patches]) -> LivingMemory:
    return LivingMemory([], store=new_store(), targets=Block("b"), signer=KEY, occurrence_path=None)


def proposed(after: str, before: str = "name: Ann", signer: Ed25519Signer = KEY, **more: Any) -> Any:
    """What an agent's own tool would have written, queued: there is no fact, and so no content to place anew."""
    one = patch("b", before, after, **more)
    transition(one, "pending", by="agent-1", signer=signer)
    return one


class TestTwoAdditions:
    def test_to_one_block_are_both_applied_one_after_a_rebase(self, living: LivingMemory) -> None:
        first, second, third = (
            living.store.save(proposed(f"name: Ann\n{more}")) for more in ("likes tea", "likes figs", "likes tea")
        )
        living.apply(first)
        with pytest.raises(DiffConflictError):
            living.apply(second)
        living.apply(living.rebase(second))
        assert living.targets.resolve("b").read() == "name: Ann\nlikes tea\nlikes figs"
        assert living.rebase(third).after_content == "name: Ann\nlikes tea\nlikes figs\nlikes tea"

    def test_that_do_more_than_add_still_conflict(self, living: LivingMemory) -> None:
        first, second = (living.store.save(proposed(f"name: {name}\nx")) for name in ("Bob", "Eve"))
        living.apply(first)
        with pytest.raises(DiffConflictError):
            living.rebase(second)

    def test_a_successor_is_measured_against_the_limit_anew(self, living: LivingMemory) -> None:
        long, short = "likes " + "tea" * 7, "tea"
        one = living.store.save(proposed(f"name: Ann\n{long}", metadata={"over_limit": {"limit": 9, "length": 99}}))
        edited = living.edit(one, f"name: Ann\n{short}")
        assert "over_limit" not in edited.metadata
        other = living.store.save(proposed(f"name: Ann\n{long}"))
        living.apply(edited)
        rebased = living.rebase(other)
        assert rebased.metadata["over_limit"]["length"] == len(rebased.after_content) == 41


@pytest.mark.parametrize(
    ("before", "after", "current", "both"),
    [
        ("", "b", "c", "c\nb"),
        ("a", "a\nb", "a\nc", "a\nc\nb"),
        ("a\n", "a\nb\n", "a\nc\n", "a\nc\nb\n"),
        ("a\nz", "a\nb\nz", "a\nc\nz", "a\nc\nb\nz"),
        ("a\nz", "a\nb\nz", "a\nz\nmore", "a\nb\nz\nmore"),
        ("a\nz", "a\nb", "a\nz\nc", None),
        ("a\nz", "a\nz\nb", "a\ny", None),
    ],
)
def test_both_added(before: str, after: str, current: str, both: str | None) -> None:
    assert both_added(before, after, current) == both


class TestTheSameAgain:
    def test_is_the_patch_that_waits(self, living: LivingMemory) -> None:
        one = save_once(proposed("name: Ann\ntea"), living.store, living.verifier)
        assert save_once(proposed("name: Ann\ntea"), living.store, living.verifier).patch_id == one.patch_id
        assert living.store.count() == 1

    def test_is_another_where_text_target_or_what_was_there_differ_or_it_was_decided(
        self, living: LivingMemory
    ) -> None:
        one = save_once(proposed("name: Ann\ntea"), living.store, living.verifier)
        save_once(proposed("name: Ann\nfigs"), living.store, living.verifier)
        save_once(proposed("name: Ann\ntea", before="Ann"), living.store, living.verifier)
        assert living.store.count() == 3
        living.reject(one)
        assert save_once(proposed("name: Ann\ntea"), living.store, living.verifier).patch_id != one.patch_id

    def test_is_not_swallowed_by_a_forged_one(self, living: LivingMemory) -> None:
        forged = living.store.save(proposed("name: Ann\ntea", signer=Ed25519Signer("99" * 32)))
        assert save_once(proposed("name: Ann\ntea"), living.store, living.verifier).patch_id != forged.patch_id

    def test_is_still_found_where_no_more_may_wait_and_anything_else_is_refused(
        self, living: LivingMemory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(twins, "MOST_PENDING", 2)
        first, _ = (save_once(proposed(f"Ann {n}"), living.store, living.verifier) for n in range(2))
        with pytest.raises(TargetRefused, match="2 changes of b wait for review already"):
            save_once(proposed("name: Ann\ntea"), living.store, living.verifier)
        assert save_once(proposed("Ann 0"), living.store, living.verifier).patch_id == first.patch_id
        living.reject(first)
        save_once(proposed("name: Ann\ntea"), living.store, living.verifier)
        assert living.store.count("pending") == 2
