"""What a diff counts, how it commits to content, and what its text is good for."""

from __future__ import annotations

import hashlib
import io
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unidiff import PatchSet

from phionyx_letta import InvalidMutation, _align, compute_memory_diff, content_hash

texts = st.text(alphabet=st.characters())
few = st.text(alphabet="ab\n", max_size=40)
lines = st.lists(
    st.sampled_from(["a", "b", "", "c\r", "\u2028x", "\x0b", "--- y", "+++ z", "@@ -1 +1 @@", "\\ No"])
).map("\n".join)


def common_by_table(a: str, b: str) -> int:
    """The textbook's longest common subsequence, as an independent judge."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


class TestCounts:
    @given(texts, texts)
    def test_what_is_kept_added_and_removed_makes_up_both_texts(self, before, after):
        diff = compute_memory_diff(before, after)
        assert diff.added_chars + diff.unchanged_chars == len(after)
        assert diff.removed_chars + diff.unchanged_chars == len(before)

    @given(few | texts, few | texts)
    def test_ordinary_texts_are_counted_exactly(self, before, after):
        diff = compute_memory_diff(before, after)
        assert diff.unchanged_chars == common_by_table(before, after)
        assert "counts_method" not in diff.to_dict()

    @given(few | texts)
    def test_a_text_shares_all_of_itself(self, text):
        diff = compute_memory_diff(text, text)
        assert (diff.added_chars, diff.removed_chars, diff.unchanged_chars) == (0, 0, len(text))

    @given(few, few)
    def test_added_and_removed_swap_with_the_texts(self, before, after):
        one, other = compute_memory_diff(before, after), compute_memory_diff(after, before)
        assert (one.added_chars, one.removed_chars) == (other.removed_chars, other.added_chars)

    @given(few | lines, few | lines, st.integers(0, 60))
    def test_the_spans_between_passages_are_equal_however_the_texts_are_split(self, before, after, small):
        at = at_new = 0
        for p, p_end, q, q_end in _align.differing_gaps(before, after, lambda m, n: m * n <= small):
            assert before[at:p] == after[at_new:q]
            at, at_new = p_end, q_end
        assert before[at:] == after[at_new:]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "alphabet", ["ab", "абвгд", "ab\u0416\U0001f600\0", "".join(map(chr, range(0x4E00, 0x5200)))]
    )
    def test_every_alphabet_is_counted_alike(self, alphabet):
        draw = random.Random(7)
        before, after = ("".join(draw.choices(alphabet, k=1500)) for _ in range(2))
        assert compute_memory_diff(before, after).unchanged_chars == common_by_table(before, after)

    def test_an_append_to_a_large_block_is_exact(self):
        before = "x" * 1_000_000
        diff = compute_memory_diff(before, before + "\nnew")
        assert (diff.added_chars, diff.removed_chars, diff.counts_method) == (4, 0, "lcs")


class TestBeyondTheBound:
    def test_the_method_is_recorded(self):
        draw = random.Random(1)
        before, after = ("".join(draw.choices("abc ", k=60_000)) for _ in range(2))
        assert compute_memory_diff(before, after).to_dict()["counts_method"] == "passages"

    @pytest.mark.parametrize("newline", ["\n", " "])
    def test_a_few_edits_far_apart_are_counted_almost_exactly(self, newline):
        draw = random.Random(2)
        words = ["".join(draw.choices("abcdefgh ", k=49)) for _ in range(20_000)]
        before = newline.join(words)
        for place in range(1000, 20_000, 2000):
            words[place] = "#" * 49
        diff = compute_memory_diff(before, newline.join(words))
        assert diff.counts_method == "passages"
        assert 10 * 49 <= diff.added_chars <= 10 * 49 + 200
        assert diff.added_chars + diff.unchanged_chars == len(before)

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("\n" * 1_000_000, "x\n" * 400_000),
            ("a" * 999_999 + "b", "b" + "a" * 999_999),
            ("ab" * 400_000, "ba" * 400_000 + "c"),
            ("\ud800" * 300_000, "\udc00" * 300_000),
        ],
    )
    def test_texts_made_to_be_slow_are_counted_too(self, before, after):
        diff = compute_memory_diff(before, after, include_diff_text=True)
        assert diff.added_chars + diff.unchanged_chars == len(after)
        assert diff.removed_chars + diff.unchanged_chars == len(before)

    def test_the_same_texts_always_give_the_same_counts(self):
        draw = random.Random(3)
        before, after = ("\n".join("".join(draw.choices("ab", k=6)) for _ in range(9000)) for _ in range(2))
        assert compute_memory_diff(before, after) == compute_memory_diff(before, after)


class TestHashes:
    @given(texts)
    def test_a_hash_is_that_of_the_utf8_bytes(self, text):
        data = text.encode("utf-8", "surrogatepass")
        assert content_hash(text) == "sha256:" + hashlib.sha256(data).hexdigest()
        assert compute_memory_diff(text, "").before_size_bytes == len(data)

    def test_a_salt_changes_the_hash_and_is_named(self):
        diff = compute_memory_diff("1234", "", salt=b"s" * 16)
        assert diff.before_hash == content_hash("1234", salt=b"s" * 16) != content_hash("1234")
        assert diff.to_dict()["commitment"] == "hmac-sha256"

    @pytest.mark.parametrize(
        "arguments", [{"salt": b"short"}, {"salt": "text"}, {"salt": b"s" * 16, "include_diff_text": True}]
    )
    def test_a_weak_or_contradicted_salt_is_refused(self, arguments):
        with pytest.raises(InvalidMutation):
            compute_memory_diff("a", "b", **arguments)

    @pytest.mark.parametrize("content", [None, b"bytes", 7])
    def test_what_is_not_text_is_refused(self, content):
        with pytest.raises(InvalidMutation):
            compute_memory_diff(content, "")


def patched(folder: Path, before: str, diff_text: str) -> str:
    target = folder / "block"
    target.write_bytes(before.encode())
    done = subprocess.run(
        ["patch", "--binary", "--silent", "--force", "--fuzz=0", str(target)],
        input=diff_text.encode(),
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout
    return target.read_bytes().decode() if target.exists() else ""  # patch removes what becomes empty


class TestDiffText:
    CASES = (
        ("", "a"),
        ("", "a\n"),
        ("a", ""),
        ("a\n", "a"),
        ("a", "a\n"),
        ("a\r\nb\r\n", "a\r\nc\r\n"),
        ("a\rb\rc", "a\rB\rc"),
        ("a\x0bb\u2028c\x85d", "a\x0bb\u2028c\x85D"),
        ("\n\n\n", "\n\n"),
        ("-- x\n++ y\n@@ -1 +1 @@\n\\ No newline\n", "-- X\n++ y\n@@ -2 +2 @@\n"),
        ("".join(f"line {n}\n" for n in range(100)), "".join(f"line {n * (n % 30 > 0)}\n" for n in range(100))),
    )

    @pytest.mark.parametrize(("before", "after"), CASES)
    def test_patch_turns_before_into_after(self, before, after, tmp_path):
        diff_text = compute_memory_diff(before, after, include_diff_text=True).diff_text
        assert patched(tmp_path, before, diff_text) == after

    @pytest.mark.parametrize(("before", "after"), CASES)
    def test_unidiff_reads_the_same_change(self, before, after):
        diff_text = compute_memory_diff(before, after, include_diff_text=True).diff_text
        (patch,) = PatchSet(io.StringIO(diff_text, newline="\n"))
        assert patch.source_file == "before"
        removed, added = before.count("\n") + 1, after.count("\n") + 1
        assert 0 <= patch.removed <= removed
        assert 0 <= patch.added <= added

    @given(
        before=few | lines,
        after=few | lines,
        split=st.sampled_from([4_000_000, 30]),
        budget=st.sampled_from([10**8, 0]),
    )
    def test_a_diff_applies_however_finely_the_texts_were_compared(self, before, after, split, budget):
        from phionyx_letta import _unified

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_unified, "_SPLIT_CELLS", split)
            patch.setattr(_unified, "_LINE_BUDGET", budget)
            assert applied(before, _unified.unified_diff(before, after)) == after

    def test_equal_texts_have_an_empty_diff(self):
        assert compute_memory_diff("same", "same", include_diff_text=True).diff_text == ""

    def test_a_small_edit_shows_three_lines_of_context(self):
        before = "".join(f"{n}\n" for n in range(20))
        diff_text = compute_memory_diff(before, before.replace("10\n", "ten\n"), include_diff_text=True).diff_text
        assert diff_text == "--- before\n+++ after\n@@ -8,7 +8,7 @@\n 7\n 8\n 9\n-10\n+ten\n 11\n 12\n 13\n"

    def test_content_stays_out_unless_asked_for(self):
        assert compute_memory_diff("secret", "other").diff_text is None


def applied(before: str, diff_text: str) -> str:
    """Apply a unified diff by the book: an independent reader that checks every line, number and count."""
    old, rows = kept_lines(before), diff_text.split("\n")[:-1]
    out: list[str] = []
    at, index = 0, 2
    while index < len(rows):
        spans = [part[1:].split(",") for part in rows[index].split(" ")[1:3]]
        (start, count), (new_start, new_count) = ((int(first), int(length)) for first, length in spans)
        first = start - 1 if count else start
        out += old[at:first]
        assert len(out) == (new_start - 1 if new_count else new_start)
        at, index = first, index + 1
        while count or new_count:
            mark, line = rows[index][0], rows[index][1:] + "\n"
            index += 1
            if index < len(rows) and rows[index] == "\\ No newline at end of file":
                line, index = line[:-1], index + 1
            if mark in " -":
                assert old[at] == line
                at, count = at + 1, count - 1
            if mark in " +":
                out.append(line)
                new_count -= 1
    return "".join(out + old[at:])


def kept_lines(text: str) -> list[str]:
    *whole, last = text.split("\n")
    return [line + "\n" for line in whole] + ([last] if last else [])
