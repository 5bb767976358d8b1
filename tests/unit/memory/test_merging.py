"""Diffs, three-way merges and their reverse."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phionyx_letta.errors import TargetRefused
from phionyx_letta.memory import FileDiffEngine
from phionyx_letta.memory.merging import merge, reverse_merge, same_but_whitespace

LINES = st.lists(st.sampled_from(["a", "b", "c", "- x", "", "  y"]), max_size=8).map(
    lambda lines: "".join(f"{one}\n" for one in lines)
)


class TestUnifiedDiff:
    @given(before=LINES, after=LINES, final=st.booleans())
    def test_patch_can_apply_it(self, before, after, final, tmp_path_factory):
        after = after if final else after.removesuffix("\n")
        diff = FileDiffEngine.generate_unified_diff(before, after, "f.md")
        if not diff:
            assert before == after
            return
        folder = tmp_path_factory.mktemp("diff")
        (folder / "f.md").write_text(before)
        subprocess.run(["patch", "-p1", "-s"], input=diff, text=True, cwd=folder, check=True)
        found = (folder / "f.md").read_text() if (folder / "f.md").exists() else ""
        assert found == after

    def test_lines_that_look_like_headers_are_counted(self):
        diff = FileDiffEngine.generate_unified_diff("x\n", "x\n++ plus\n-- minus\n")
        assert FileDiffEngine.count_changed_lines(diff) == {"added": 2, "removed": 0, "net": 2}
        diff = FileDiffEngine.generate_unified_diff("x\n-- gone\n", "x\n")
        assert FileDiffEngine.count_changed_lines(diff) == {"added": 0, "removed": 1, "net": -1}

    def test_similarity_is_one_for_equals_and_none_for_strangers(self):
        assert FileDiffEngine.compute_similarity("abc", "abc") == 1
        assert FileDiffEngine.compute_similarity("abc", "xyz") == 0


class TestMerge:
    def test_an_edit_elsewhere_merges(self):
        assert merge("a\nb\nc\n", "a\nb\nc\nnew\n", "A\nb\nc\n") == "A\nb\nc\nnew\n"

    def test_an_edit_of_the_same_line_does_not(self):
        assert merge("a\nb\n", "a\nB\n", "a\nbb\n") is None

    def test_two_additions_at_one_place_do_not(self):
        assert merge("a\n", "a\nx\n", "a\ny\n") is None

    def test_whitespace_of_the_same_line_gives_way(self):
        assert merge("Hello\n", "Hello World\n", "Hello \n") == "Hello World\n"

    def test_whitespace_elsewhere_stays(self):
        assert merge("a\nb\nc\n", "a\nb\nc\nd\n", "a  \nb\nc\n") == "a  \nb\nc\nd\n"

    @given(before=LINES, after=LINES)
    def test_onto_what_it_was_made_for_it_gives_what_it_says(self, before, after):
        assert merge(before, after, before) == after

    @given(before=LINES, after=LINES, current=LINES)
    def test_it_keeps_every_line_a_person_added(self, before, after, current):
        merged = merge(before, after, current)
        if merged is not None:
            own = set(current.split()) - set(before.split())
            assert own <= set(merged.split())


class TestReverseMerge:
    def test_a_line_added_directly_below_stays(self):
        assert reverse_merge("# M\n", "# M\n- f1\n", "# M\n- f1\n- mine\n") == "# M\n- mine\n"

    def test_a_line_added_directly_above_stays(self):
        assert reverse_merge("# M\n", "# M\n- f1\n", "# M\n- mine\n- f1\n") == "# M\n- mine\n"

    def test_an_edit_of_what_it_added_is_a_conflict(self):
        assert reverse_merge("# M\n", "# M\n- f1\n", "# M\n- f1, but only on Mondays\n") is None

    @given(before=LINES, after=LINES)
    def test_undone_at_once_it_restores_exactly_what_was(self, before, after):
        assert reverse_merge(before, after, after) == before

    @given(before=LINES, after=LINES, current=LINES)
    def test_it_keeps_every_line_a_person_added(self, before, after, current):
        merged = reverse_merge(before, after, current)
        if merged is not None:
            own = set(current.split()) - set(after.split())
            assert own <= set(merged.split())


class TestWhitespaceOfAPerson:
    """What a person did to whitespace stays byte for byte, wherever the patch itself did not change the line."""

    BEFORE = "# T\n\n- a\n- b\n"
    AFTER = "# T\n\n- a\n- b\n- new\n"

    @pytest.mark.parametrize(
        ("current", "merged"),
        [
            ("# T\n\n- a\n  - b\n", "# T\n\n- a\n  - b\n- new\n"),
            ("# T\n\n\n-  a  \n- b\n\n\n", "# T\n\n\n-  a  \n- b\n- new\n\n\n"),
            ("# T\n- a\n- b", "# T\n- a\n- b\n- new\n"),
            ("# T\n\n- a\n\n- b \n", "# T\n\n- a\n\n- b \n- new\n"),
            ("#  T\n \n- a\n\t- b\n", "#  T\n \n- a\n\t- b\n- new\n"),
        ],
    )
    def test_it_stays_beside_an_addition_and_survives_its_reverse(self, current, merged):
        assert merge(self.BEFORE, self.AFTER, current) == merged
        taken_out = reverse_merge(self.BEFORE, self.AFTER, merged)
        assert taken_out.removesuffix("\n") == current.removesuffix("\n")

    def test_it_stays_on_both_sides_of_an_insertion(self):
        before, after = "- a\n- b\n", "- a\n- new\n- b\n"
        assert merge(before, after, "  - a\n  - b\n") == "  - a\n- new\n  - b\n"

    def test_code_keeps_its_indentation(self):
        before = "```python\nif x:\n  y()\nz()\n```\n"
        current = before.replace("z()", "  z()")
        assert merge(before, before + "- new\n", current) == current + "- new\n"

    @pytest.mark.parametrize("current", ["  - a\n", "-   a\n"])
    def test_a_line_both_changed_is_a_conflict(self, current):
        assert merge("- a\n", "- A!\n", current) is None
        assert reverse_merge("- A!\n", "- a\n", current) is None

    def test_a_line_the_patch_takes_away_may_have_been_moved(self):
        assert merge("- a\n- b\n", "- a\n", "- a\n  - b\n") == "- a\n"

    @pytest.mark.parametrize(("current", "merged"), [("a", "a\nb\n"), ("A", None)])
    def test_a_missing_final_newline_glues_no_lines_together(self, current, merged):
        assert merge("a\n", "a\nb\n", current) == merged
        assert reverse_merge("a\nb\n", "a\n", current) == (merged or "A\nb\n")

    @given(
        base=LINES,
        places=st.sets(st.integers(0, 8), max_size=3),
        spaces=st.lists(st.sampled_from(["", " ", "\t"]), min_size=8, max_size=8),
        blanks=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    )
    def test_an_addition_changes_nothing_else_byte_for_byte(self, base, places, spaces, blanks):
        lines = [line for line in base.split("\n") if line.strip()]
        current = "".join(
            "\n" * count + space + line + space + "\n"
            for count, space, line in zip(blanks, spaces, lines, strict=False)
        )
        added = base.splitlines(keepends=True)
        for place in sorted(places, reverse=True):
            added.insert(place, f"new {place}\n")
        merged = merge(base, "".join(added), current)
        kept = [line for line in merged.splitlines(keepends=True) if not line.startswith("new")]
        assert "".join(kept) == current
        assert merged.count("new") == len(places)


class TestWhitespace:
    @pytest.mark.parametrize(
        ("one", "other"),
        [("a b\n", "a  b\n"), ("a\n", "a \r\n"), ("a\nb\n", "a\n\n\nb"), ("  - x\n", "- x\n"), ("", "\n")],
    )
    def test_it_alone_makes_no_difference(self, one, other):
        assert same_but_whitespace(one, other)

    @pytest.mark.parametrize(("one", "other"), [("a b\n", "ab\n"), ("a\nb\n", "a b\n"), ("a\n", "A\n"), ("", "a")])
    def test_anything_else_does(self, one, other):
        assert not same_but_whitespace(one, other)


class TestHelpersWithAPath:
    def test_they_write_and_validate(self, tmp_path):
        file = tmp_path / "a.md"
        assert FileDiffEngine.apply_patch(file, "new\n") == "new\n"
        assert FileDiffEngine.validate_patch_applicable(file, "new\n") == (True, "")
        assert FileDiffEngine.revert_to_content(str(file), "old\n") == "old\n"
        ok, why = FileDiffEngine.validate_patch_applicable(file, "new\n")
        assert not ok
        assert str(file) in why

    def test_what_is_not_there_fits_only_an_empty_beginning(self, tmp_path):
        assert FileDiffEngine.validate_patch_applicable(tmp_path / "no.md", "") == (True, "")
        assert FileDiffEngine.validate_patch_applicable(tmp_path / "no.md", "x")[0] is False

    def test_95_percent_alike_is_not_the_same(self, tmp_path):
        file = tmp_path / "a.md"
        file.write_text("x" * 1000 + "\nmine\n")
        assert FileDiffEngine.validate_patch_applicable(file, "x" * 1000 + "\n")[0] is False

    def test_what_is_not_text_is_refused(self, tmp_path):
        (tmp_path / "a.md").write_bytes(b"\xff\xfe")
        with pytest.raises(TargetRefused, match="UTF-8"):
            FileDiffEngine.validate_patch_applicable(tmp_path / "a.md", "x")
