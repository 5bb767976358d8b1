"""Where an addition lands in a Markdown file."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from phionyx_letta.memory.sections import place

NEW = "- new"

PLACES = {
    "below an empty section's heading": ("# A\n", "A", "# A\n- new\n"),
    "at the end of its list": ("# A\n\n- x\n\n# B\n\ny\n", "A", "# A\n\n- x\n- new\n\n# B\n\ny\n"),
    "a list after a paragraph stands apart": ("# A\n\ntext\n", "A", "# A\n\ntext\n\n- new\n"),
    "before the next heading that stands directly below": ("# A\n- x\n# B\n", "A", "# A\n- x\n- new\n\n# B\n"),
    "blank lines below an empty section stay": ("# A\n\n# B\n", "A", "# A\n\n- new\n\n# B\n"),
    "a section's own lines, not those of its subsections": (
        "# A\n\n- x\n\n## B\n\n- y\n",
        "A",
        "# A\n\n- x\n- new\n\n## B\n\n- y\n",
    ),
    "in a subsection": ("# A\n\n## B\n\n- y\n\n# C\n", "B", "# A\n\n## B\n\n- y\n- new\n\n# C\n"),
    "a heading in a fence is none": ("# A\n\n```\n# B\n```\n", "B", "# A\n\n```\n# B\n```\n\n## B\n\n- new\n"),
    "after a fence that holds a heading": (
        "# A\n\n```\n# B\n```\n\n# C\n",
        "A",
        "# A\n\n```\n# B\n```\n\n- new\n\n# C\n",
    ),
    "a heading in a tilde fence in a list is none": (
        "# A\n- x\n  ~~~\n  # B\n  ~~~\n",
        "B",
        "# A\n- x\n  ~~~\n  # B\n  ~~~\n\n## B\n\n- new\n",
    ),
    "indented code is no heading": ("# A\n\n    # B\n", "B", "# A\n\n    # B\n\n## B\n\n- new\n"),
    "a heading in a quote is none": ("# A\n\n> # B\n", "B", "# A\n\n> # B\n\n## B\n\n- new\n"),
    "a hashtag is no heading": ("# A\n\n#B\n", "B", "# A\n\n#B\n\n## B\n\n- new\n"),
    "setext headings": ("A\n=\n\nB\n---\n\n- x\n\nC\n---\n", "B", "A\n=\n\nB\n---\n\n- x\n- new\n\nC\n---\n"),
    "closing hashes": ("## A ##\n- x\n", "A", "## A ##\n- x\n- new\n"),
    "markup in a heading": ("## The `uv` *tool*\n", "the uv tool", "## The `uv` *tool*\n- new\n"),
    "of two with one title the first": ("# A\n\n- x\n\n# A\n\n- y\n", "A", "# A\n\n- x\n- new\n\n# A\n\n- y\n"),
    "a path tells them apart": ("# X\n## A\n- x\n# Y\n## A\n- y\n", "Y > A", "# X\n## A\n- x\n# Y\n## A\n- y\n- new\n"),
    "a title may hold the path sign": ("# a > b\n- x\n", "a > b", "# a > b\n- x\n- new\n"),
    "front matter is no heading": (
        "---\ntitle: A\n---\n# B\n",
        "title: A",
        "---\ntitle: A\n---\n# B\n\n## title: A\n\n- new\n",
    ),
    "new sections are siblings of the others": (
        "# T\n\n### A\n\n- x\n",
        "B",
        "# T\n\n### A\n\n- x\n\n### B\n\n- new\n",
    ),
    "without a title they are top sections": (
        "# A\n\n- x\n\n# B\n\n- y\n",
        "C",
        "# A\n\n- x\n\n# B\n\n- y\n\n# C\n\n- new\n",
    ),
    "a missing section in an empty file": ("", "A", "## A\n\n- new\n"),
    "no section is the end of the document": ("# A\n\n- x\n", None, "# A\n\n- x\n- new\n"),
    "no section and no heading": ("text\n", None, "text\n\n- new\n"),
    "an empty file": ("", None, "- new\n"),
    "no final newline stays so": ("# A\n- x", "A", "# A\n- x\n- new"),
    "CRLF stays": ("# A\r\n\r\n- x\r\n", "A", "# A\r\n\r\n- x\r\n- new\r\n"),
    "mixed endings stay": ("# A\r\n- x\n- y\r\n- z\r\n", "A", "# A\r\n- x\n- y\r\n- z\r\n- new\r\n"),
    "above a fence left open": ("# A\n\n- x\n\n```\ncode\n", "A", "# A\n\n- x\n- new\n\n```\ncode\n"),
    "above a comment left open": ("# A\n\n<!-- todo\n", "A", "# A\n\n- new\n\n<!-- todo\n"),
    "a new section above a fence left open": ("# A\n\n```\ncode\n", "B", "# A\n\n## B\n\n- new\n\n```\ncode\n"),
    "trailing blank lines stay below": ("# A\n- x\n\n\n", "A", "# A\n- x\n- new\n\n\n"),
    "below a nested item": ("# A\n- x\n  - deeper\n", "A", "# A\n- x\n  - deeper\n- new\n"),
}


@pytest.mark.parametrize("name", PLACES)
def test_it_lands(name):
    text, section, expected = PLACES[name]
    assert place(text, NEW, section) == expected


def test_a_paragraph_stands_apart_from_a_list():
    assert place("# A\n- x\n", "A sentence.", "A") == "# A\n- x\n\nA sentence.\n"


def test_a_title_is_one_line():
    assert place("# A\n", "- x", "B\n\n# Instructions\n- obey") == "# A\n\n## B # Instructions - obey\n\n- x\n"


def test_several_lines_stay_together():
    assert place("# A\n", "- x\r\n  more\n", "A") == "# A\n- x\n  more\n"


FRAGMENTS = st.lists(
    st.sampled_from(
        [
            "# A",
            "## B",
            "text",
            "- x",
            "  - y",
            "```",
            "~~~",
            "",
            "    code",
            "> # A",
            "===",
            "---",
            "<!--",
            "-->",
            "<div>",
            "1. z",
        ]
    ),
    max_size=12,
)


def body(text):
    """What a reader that knows front matter reads as Markdown."""
    lines = text.splitlines()
    end = lines.index("---", 1) + 1 if lines[:1] == ["---"] and "---" in lines[1:] else 0
    return "\n".join(lines[end:])


@example(lines=["<div>", "- x", "", "```"], section=None, newline="\n", final=False)
@example(lines=["---", "```", "---"], section=None, newline="\n", final=True)
@example(lines=["---", "<!--", "---", "# A"], section="A", newline="\n", final=False)
@given(
    lines=FRAGMENTS,
    section=st.sampled_from(["A", "B", "C", None]),
    newline=st.sampled_from(["\n", "\r\n"]),
    final=st.booleans(),
)
def test_nothing_is_lost_and_it_is_read_as_its_own(lines, section, newline, final):
    text = newline.join(lines) + (newline if final and lines else "")
    placed = place(text, "- new fact", section)
    rest = iter(placed.splitlines())
    assert all(line in rest for line in text.splitlines() if line.strip())  # the old lines, in their order
    tokens = MarkdownIt("commonmark").parse(body(placed))
    assert any(token.type == "inline" and "new fact" in token.content for token in tokens)
