"""Random histories: whatever people and patches do in whatever order, no person's edit is lost and the log explains every state."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_helpers import Scripted, fact, memory, propose

from phionyx_letta import Ed25519Signer, FilesystemEnvelopeStore, verify_chain
from phionyx_letta.errors import DiffConflictError, IllegalTransition
from phionyx_letta.memory import files
from phionyx_letta.memory.patches import TRANSITIONS, check_trust

pytestmark = pytest.mark.slow

KEY = Ed25519Signer("11" * 32)
NAMES = [f"{one}{two}{three}" for one, two, three in itertools.product("bdfgkl", "aeiou", "mnrst")]


def there_is(*statuses: str):
    """A rule for patches in one of these statuses waits until there is one."""
    return lambda machine: bool(machine.ids(*statuses))


class Died(BaseException):
    """The process ends here."""


class Memories(RuleBasedStateMachine):
    """One file, one store, one person who edits by hand, and a process that dies at times."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="phionyx-property-"))
        self.file = self.folder / "CLAUDE.md"
        self.names = iter(NAMES)
        self.sessions = itertools.count()
        self.mine: set[str] = set()
        self.contents: dict[str, str] = {}
        self.open()

    def open(self) -> None:
        self.living = memory(self.folder, signer=KEY, envelopes=FilesystemEnvelopeStore(self.folder / "audit"))

    @initialize(
        lines=st.lists(st.sampled_from(["# Notes", "- old", "", "text", "## Other"]), max_size=6), final=st.booleans()
    )
    def begin(self, lines, final):
        self.file.write_text("\n".join(lines) + ("\n" if final and lines else ""))
        self.propose(2, "Notes")

    def ids(self, *statuses: str) -> list[str]:
        return [one.patch_id for one in self.living.store.summaries() if one.status in statuses]

    def some(self, data: st.DataObject, *statuses: str) -> str:
        return data.draw(st.sampled_from(self.ids(*statuses)))

    # -- what may happen --------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 2), section=st.sampled_from(["Notes", "Other", "New", None]))
    def propose(self, count, section):
        words = [next(self.names, None) for _ in range(count)]
        words = [word for word in words if word]
        self.living.proposer = Scripted(
            *(fact(f"- likes {word} tea", section=section, fact_key=word) for word in words)
        )
        transcript = f"user: said: likes {' '.join(words)} tea"
        for one in propose(self.living, f"s{next(self.sessions)}", transcript):
            self.contents[one.patch_id] = one.metadata["content"]

    @precondition(there_is("pending"))
    @rule(data=st.data())
    def approve(self, data):
        found = self.some(data, "pending")
        self.living.approve(found)

    @precondition(there_is("pending", "approved", "conflict"))
    @rule(data=st.data())
    def reject(self, data):
        with contextlib.suppress(IllegalTransition):  # it was written by a run that died
            self.living.reject(self.some(data, "pending", "approved", "conflict"), "no")

    @precondition(there_is("pending", "approved"))
    @rule(data=st.data())
    def apply(self, data):
        found = self.some(data, "pending", "approved")
        before = self.file.read_text()
        try:
            self.living.apply(found)
            assert self.contents[found] in self.file.read_text()
        except DiffConflictError:
            assert self.file.read_text() == before
            assert self.living.store.status(found) == "conflict"

    @precondition(there_is("pending", "approved", "conflict"))
    @rule(data=st.data())
    def rebase(self, data):
        found = self.some(data, "pending", "approved", "conflict")
        before = self.file.read_text()
        try:
            new = self.living.rebase(found)
            self.contents[new.patch_id] = self.contents[found]
            assert new.before_content == before
        except (DiffConflictError, IllegalTransition):
            pass
        assert self.file.read_text() == before

    @precondition(there_is("applied"))
    @rule(data=st.data())
    def revert(self, data):
        found = self.some(data, "applied")
        before = self.file.read_text()
        try:
            self.living.revert(found)
            assert self.contents[found] not in self.file.read_text().splitlines()
        except DiffConflictError:
            assert self.file.read_text() == before
            assert self.living.store.status(found) == "applied"

    @precondition(there_is("pending", "approved", "applied"))
    @rule(data=st.data(), at=st.integers(0, 3), act=st.sampled_from(["apply", "revert"]))
    def die_in_the_middle(self, data, at, act):
        """At one of the moments between what an act writes; afterwards everything is opened anew."""
        statuses = ["pending", "approved"] if act == "apply" else ["applied"]
        if not self.ids(*statuses):
            return
        found = self.some(data, *statuses)
        moments = itertools.count()
        with pytest.MonkeyPatch.context() as dying:
            for owner, name in (("store", "update"), ("recorder", "record"), ("file", "write")):
                target = {
                    "store": (self.living.store, name),
                    "recorder": (self.living._recorder, name),
                    "file": (files, "_write"),
                }[owner]
                original = getattr(*target)

                def dies(*args, original=original, **options):
                    if next(moments) == at:
                        raise Died
                    return original(*args, **options)

                dying.setattr(*target, dies)
            with contextlib.suppress(Died, DiffConflictError):
                getattr(self.living, act)(found)
        self.open()

    @rule(data=st.data(), how=st.sampled_from(["above", "below", "between"]))
    def add_a_line_by_hand(self, data, how):
        word = next(self.names, None)
        if word is None:
            return
        lines = self.file.read_text().split("\n")
        at = {"above": 0, "below": len(lines)}.get(how)
        at = data.draw(st.integers(0, len(lines))) if at is None else at
        lines.insert(at, f"mine {word}")
        self.mine.add(f"mine {word}")
        self.file.write_text("\n".join(lines))

    @precondition(lambda self: self.mine)
    @rule(data=st.data())
    def change_a_line_by_hand(self, data):
        old = data.draw(st.sampled_from(sorted(self.mine)))
        self.mine = {*self.mine - {old}, f"{old}!"}
        self.file.write_text(
            "\n".join(f"{old}!" if line == old else line for line in self.file.read_text().split("\n"))
        )

    @rule(data=st.data())
    def take_over_a_patchs_line(self, data):
        """A person makes a line of a patch their own: from now on no patch may take it away."""
        lines = self.file.read_text().split("\n")
        ours = [at for at, line in enumerate(lines) if line in self.contents.values()]
        word = next(self.names, None)
        if ours and word:
            at = data.draw(st.sampled_from(ours))
            lines[at] = f"mine {word}"
            self.mine.add(lines[at])
            self.file.write_text("\n".join(lines))

    @precondition(there_is("pending"))
    @rule()
    def apply_the_oldest(self):
        with contextlib.suppress(DiffConflictError):
            self.living.apply(self.ids("pending")[0])

    @rule()
    def reload(self):
        self.open()

    # -- what must hold ---------------------------------------------------------------------------------------

    @invariant()
    def no_edit_of_a_person_is_lost(self):
        if self.file.exists():
            lines = self.file.read_text().split("\n")
            assert self.mine <= set(lines)

    @invariant()
    def each_state_is_explained_by_the_log(self):
        for one in self.living.patch_history():
            check_trust(one, KEY.verifier())
            steps = [(step["from"], step["to"]) for step in one.history]
            assert steps[0] == ("proposed", "pending")
            assert all(to in TRANSITIONS[come_from] for come_from, to in steps)
            assert steps[-1][1] == one.status

    @invariant()
    def the_evidence_verifies(self):
        chain = list(FilesystemEnvelopeStore(self.folder / "audit").iter_chain(f"file:{self.file}"))
        if chain:
            assert verify_chain(chain, verifier=KEY.verifier(), expected_trace=f"file:{self.file}")["valid"] is True

    @invariant()
    def what_is_applied_is_in_the_evidence(self):
        chain = FilesystemEnvelopeStore(self.folder / "audit").iter_chain(f"file:{self.file}")
        noted = {one["subject"]["metadata"]["living_memory"].get("patch_id") for one in chain}
        assert set(self.ids("applied")) <= noted

    def teardown(self):
        shutil.rmtree(self.folder)


Memories.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestMemories = Memories.TestCase
