"""Which file a fact belongs in."""

from __future__ import annotations

import pytest

from phionyx_letta.memory import MemoryFileRouter


@pytest.mark.parametrize(
    ("text", "category"),
    [
        ("I always deploy with uv", "user"),
        ("The user prefers tabs over spaces.", "user"),
        ("Always use type hints.", "user"),
        ("My workflow starts with a test.", "user"),
        ("I'd like short answers", "user"),
        ("I want no emojis", "user"),
        ("That was a mistake, let’s fix it.", "feedback"),
        ("Correction: the port is 8080.", "feedback"),
        ("It is better to ask first.", "feedback"),
        ("You got it wrong.", "feedback"),
        ("The database architecture is PostgreSQL.", "project"),
        ("Dependencies are pinned.", "project"),
        ("The codebase follows one convention.", "project"),
        ("Our tech stack is Django.", "project"),
        ("Random fact about spaceships.", "general"),
        ("", "general"),
        ("A needle in a haystack", "general"),
        ("The test fixture is slow", "general"),
        ("unlike before", "general"),
        ("Prefix and suffix", "general"),
    ],
)
def test_categories_by_whole_words(text, category):
    assert MemoryFileRouter().categorize(text) == category


def test_more_signals_win():
    assert MemoryFileRouter().categorize("I like the architecture, the stack and every dependency") == "project"


class TestTargetPaths:
    managed = ("./CLAUDE.md", "memory/user_prefs.md", "memory/project.md", "memory/userland.md")

    def test_the_map_comes_first_and_is_compared_as_paths(self):
        router = MemoryFileRouter({"user": "./memory/../memory/project.md"})
        assert router.resolve_target_path("user", self.managed) == "memory/project.md"

    def test_then_a_name_that_begins_with_the_category(self):
        router = MemoryFileRouter()
        assert router.resolve_target_path("user", self.managed) == "memory/user_prefs.md"
        assert router.resolve_target_path("project", self.managed) == "memory/project.md"

    def test_a_name_that_only_begins_with_the_same_letters_does_not(self):
        assert MemoryFileRouter().resolve_target_path("user", ["CLAUDE.md", "memory/userland.md"]) == "CLAUDE.md"

    def test_then_the_primary_path(self):
        assert MemoryFileRouter().resolve_target_path("general", self.managed) == "./CLAUDE.md"
        assert (
            MemoryFileRouter(primary_path="memory/project.md").resolve_target_path("general", self.managed)
            == "memory/project.md"
        )

    def test_never_one_that_is_not_managed(self):
        router = MemoryFileRouter({"user": "elsewhere.md"}, primary_path="nowhere.md")
        assert router.resolve_target_path("user", ["a.md"]) == "a.md"
        assert MemoryFileRouter().resolve_target_path("general", ["x/CLAUDE.md", "b.md"]) == "x/CLAUDE.md"

    def test_unless_new_files_are_allowed(self):
        router = MemoryFileRouter({"user": "elsewhere.md"}, allow_new_files=True)
        assert router.resolve_target_path("user", ["a.md"]) == "elsewhere.md"
