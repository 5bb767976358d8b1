"""Replaying the diffs an envelope keeps: what `reconcile --restore` stands on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phionyx_letta._unified import apply_unified, revert_unified, unified_diff

_TEXT = st.text(st.sampled_from("ab\n\r@-+\\ é\u2028"), max_size=60) | st.lists(
    st.sampled_from(["one", "two", ""])
).map("\n".join)


@given(_TEXT, _TEXT)
def test_gives_the_text_after(before: str, after: str) -> None:
    assert apply_unified(before, unified_diff(before, after)) == after


@given(_TEXT, _TEXT)
def test_gives_the_text_before(before: str, after: str) -> None:
    assert revert_unified(after, unified_diff(before, after)) == before


@given(_TEXT, _TEXT, _TEXT)
def test_on_another_text_it_never_raises(before: str, after: str, other: str) -> None:
    assert isinstance(apply_unified(other, unified_diff(before, after)), str | None)
    assert isinstance(apply_unified(before, other), str | None)
    assert isinstance(revert_unified(other, unified_diff(before, after)), str | None)
    assert isinstance(revert_unified(after, other), str | None)


@pytest.mark.parametrize(
    "patch", ["", "x", "--- before\n+++ after\n@@ -9,1 +9,1 @@\n-a\n+b\n", "a\nb\n@@ -1,1 +1,1 @@\n\\ x"]
)
def test_a_patch_that_is_none_changes_nothing(patch: str) -> None:
    assert apply_unified("a\n", patch) in ("a\n", None)
