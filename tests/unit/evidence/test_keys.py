"""Keys over time: what is believed of which key, on a ledger that lived on through rotations and on forged histories.

Every case is verified as a bundle by both verifiers, and as a database.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from bundle_rig import FOREIGN, HOLDER, ORIGIN, History, Members, edited, judged, lines, read, with_lines, write

from phionyx_letta import Ed25519Signer
from phionyx_letta.checkpoint import Checkpoint
from phionyx_letta.envelope import envelope_hash
from phionyx_letta.errors import SigningKeyError, StoreError
from phionyx_letta.keys import Keyring, Statement, issue_revocation, issue_rotation
from phionyx_letta.ledger.audit import AuditReport
from phionyx_letta.ledger.audit_sql import verify_ledger
from phionyx_letta.ledger.gathering import gather
from phionyx_letta.ledger.statements import rotate, store_statement
from phionyx_letta.ledger.tree import sql_nodes
from phionyx_letta.merkle import EMPTY_ROOT, root_at

FIRST, SECOND, THIRD, THIEF = HOLDER, Ed25519Signer("33" * 32), Ed25519Signer("44" * 32), FOREIGN
NOW = datetime(2026, 1, 31, tzinfo=UTC)


def point(history: History, size: int) -> Checkpoint:
    with history.ledger.engine.connect() as connection:
        return Checkpoint(ORIGIN, size, root_at(sql_nodes(connection), size))


def say(history: History, note: str) -> None:
    with history.ledger.writing() as connection:
        assert connection is not None
        store_statement(connection, note)


def turn_over(history: History, old: Ed25519Signer, new: Ed25519Signer) -> None:
    rotate(history.ledger, old, new, ORIGIN)
    history.use(new)


@pytest.fixture
def lived(tmp_path: Path) -> History:
    """Six envelopes by each of three keys."""
    history = History(tmp_path).live([0])
    turn_over(history, FIRST, SECOND)
    history.live([1])
    turn_over(history, SECOND, THIRD)
    return history.live([2])


def both(history: History, path: Path, *roots: str, statements: Sequence[Path] = ()) -> AuditReport:
    """As a bundle by both verifiers and as a database: the answer is the same."""
    path.unlink(missing_ok=True)
    ring = Keyring(list(roots))
    for source in statements:
        ring.learn([Statement.parse(source.read_bytes())])
    database = verify_ledger(history.ledger, verifier=ring)
    report = judged(history.bundle(path, keys=[]), *roots, statements=statements)
    assert (report.verdict, report.dimensions["key_trust"]) == (database.verdict, database.dimensions["key_trust"])
    return report


def test_the_root_leads_to_all_that_followed(lived: History, path: Path) -> None:
    report = both(lived, path, FIRST.public_key_hex)
    assert (report.verdict, report.envelopes, report.dimensions["key_trust"]) == ("valid", 18, "ok")
    assert report.key_id is not None
    assert report.key_id.count("ed25519") == 3


def test_a_later_key_does_not_speak_for_an_earlier_one(lived: History, path: Path) -> None:
    for root in (SECOND, THIRD, THIEF):
        report = both(lived, path, root.public_key_hex)
        assert (report.verdict, report.dimensions["key_trust"]) == ("failed", "failed")


def test_several_roots(lived: History, path: Path) -> None:
    assert both(lived, path, FIRST.public_key_hex, THIRD.public_key_hex).verdict == "valid"


def test_a_part_of_the_log_shows_where_keys_changed(lived: History, path: Path) -> None:
    lived.bundle(path, ["agent-b"])
    assert judged(path, FIRST.public_key_hex).verdict == "valid"
    members = read(path)
    layout = members["log.txt"].decode()
    assert judged(write(path, {**members, "log.txt": layout.encode()}), FIRST.public_key_hex).verdict == "valid"
    hidden = {**members, "log.txt": b"".join(line for line in members["log.txt"].splitlines(keepends=True)[:-1])}
    assert judged(write(path, hidden), FIRST.public_key_hex).verdict == "failed"


def test_without_the_statements_later_keys_are_strangers(lived: History, path: Path) -> None:
    members = read(lived.bundle(path))
    assert judged(write(path, {**members, "key-history": b""}), FIRST.public_key_hex).verdict == "failed"
    own = path.with_name("own")
    own.write_bytes(members["key-history"])
    report = judged(write(path, {**members, "key-history": b""}), FIRST.public_key_hex, statements=[own])
    assert report.verdict == "valid"


def resigned(members: Members, places: Sequence[int], signer: Ed25519Signer) -> Members:
    """These envelopes, and all after them in their chains as far as the list goes, are edited and signed by one key."""
    found, heads = lines(members), dict[str, str]()

    def redo(envelope: dict) -> None:  # type: ignore[type-arg]
        trace, integrity = envelope["subject"]["trace_id"], envelope["integrity"]
        envelope["subject"]["metadata"]["letta"]["tool"] = "human_operator"
        envelope["subject"]["key_id"] = signer.key_id
        integrity["previous"] = heads.get(trace, integrity["previous"])
        integrity["current"] = heads[trace] = envelope_hash(envelope, integrity["previous"])
        integrity["signature"] = signer.sign(integrity["current"])

    for place in places:
        found[place] = edited(found[place], redo)
    return with_lines({**members, "checkpoints": b""}, found)


class TestTheft:
    def test_the_newest_key_cannot_rewrite_the_past(self, lived: History, path: Path) -> None:
        """The epoch: everything signed anew with the stolen newest key, checkpoints gone. Roots and epochs both say no."""
        members = read(lived.bundle(path))
        report = judged(write(path, resigned(members, range(18), THIRD)), FIRST.public_key_hex)
        assert report.verdict == "failed"
        messages = str(report.findings)
        assert "the key was not in use yet: it seals from envelope 12 of the log on" in messages
        assert report.dimensions["inclusion"] == "failed"

    def test_the_same_in_the_database(self, lived: History, path: Path) -> None:
        from phionyx_letta.ledger import tables

        members = read(lived.bundle(path))
        with lived.ledger.engine.begin() as connection:
            for seq, line in enumerate(lines(resigned(members, range(18), THIRD))):
                table = tables.envelope
                connection.execute(table.update().where(table.c.seq == seq).values(body=line.decode().rstrip()))
        report = verify_ledger(lived.ledger, verifier=Keyring([FIRST.public_key_hex]))
        assert report.dimensions["key_trust"] == "failed"
        assert "a key was replaced or revoked at another state of the log" in str(report.findings)

    def test_an_old_key_seals_nothing_any_more(self, lived: History, path: Path) -> None:
        members = read(lived.bundle(path))
        report = judged(write(path, resigned(members, range(12, 18), FIRST)), FIRST.public_key_hex)
        assert "the key was replaced when the log had 6 envelopes" in str(report.findings)
        assert report.dimensions["key_trust"] == "failed"

    def test_the_sealer_refuses_a_replaced_key(self, lived: History) -> None:
        lived.use(FIRST)
        with pytest.raises(SigningKeyError, match="was replaced by"):
            lived.write("agent-a", "block-agent-a", "late")
        lived.use(THIRD)
        assert lived.ledger.select(newest=True, limit=1)[-1].seq == 17
        assert lived.ledger.has_pending()

    def test_a_replacement_that_the_key_did_not_sign_stops_nothing(self, lived: History) -> None:
        from phionyx_letta.ledger import tables

        row = {"kind": "key-rotation/v1", "signer": THIRD.public_key_hex, "subject": "ab" * 32, "at": ""}
        for note in ("hello", issue_rotation(point(lived, 6), FIRST, SECOND, NOW)):
            with lived.ledger.engine.begin() as connection:
                connection.execute(tables.key_statement.insert().values(**row, note=note))
        lived.write("agent-a", "block-agent-a", "goes on")

    def test_what_a_replaced_key_recorded_holds_up_the_next_rotation(self, lived: History) -> None:
        lived.use(FIRST)
        with pytest.raises(SigningKeyError):
            lived.write("agent-a", "block-agent-a", "late")
        with pytest.raises(StoreError, match="1 rows of the outbox wait"):
            rotate(lived.ledger, THIRD, Ed25519Signer(os.urandom(32).hex()), ORIGIN)

    def test_two_successors_are_a_conflict(self, lived: History, path: Path) -> None:
        """Whoever stole the first key before it was destroyed writes a rotation of his own; nobody can tell which is true."""
        say(lived, issue_rotation(point(lived, 6), FIRST, THIEF, NOW))
        report = both(lived, path, FIRST.public_key_hex)
        assert report.dimensions["key_trust"] == "failed"
        assert "two rotations contradict each other" in str(report.findings)

    def test_a_root_settles_the_conflict_for_itself(self, lived: History, path: Path) -> None:
        say(lived, issue_rotation(point(lived, 6), FIRST, THIEF, NOW))
        with gather(lived.ledger, []) as material:
            ring = Keyring([FIRST.public_key_hex, SECOND.public_key_hex])
            ring.learn(Statement.parse(note) for note in material.statements)
        assert THIEF.public_key_hex not in ring.public_keys
        assert THIRD.public_key_hex in ring.public_keys

    def test_a_rotation_signed_by_one_of_the_two_is_none(self, lived: History, path: Path) -> None:
        good = issue_rotation(point(lived, 18), THIRD, THIEF, NOW)
        for cut in (1, 2):
            signatures = good.split("\n\n")[1].splitlines(keepends=True)
            text = good.split("\n\n")[0]
            say(lived, f"{text}\n\n{signatures[cut - 1]}")
        lived.live([])
        report = both(lived, path, FIRST.public_key_hex)
        assert report.verdict == "valid"
        assert THIEF.key_id not in str(report.key_id)

    def test_statements_of_strangers_change_nothing(self, lived: History, path: Path) -> None:
        stranger = Ed25519Signer(os.urandom(32).hex())
        say(lived, issue_rotation(point(lived, 6), THIEF, stranger, NOW))
        say(lived, issue_revocation(point(lived, 1), THIEF, THIRD.public_key_hex, NOW))
        assert both(lived, path, FIRST.public_key_hex).verdict == "valid"

    def test_the_place_of_a_rotation_cannot_be_moved(self, lived: History, path: Path) -> None:
        members = read(lived.bundle(path))
        moved = {**members, "key-history": members["key-history"].replace(b"\n6\n", b"\n2\n")}
        assert judged(write(path, moved), FIRST.public_key_hex).verdict == "failed"


class TestRevocation:
    def test_what_is_not_shown_to_be_older_is_not_believed(self, lived: History, path: Path) -> None:
        say(lived, issue_revocation(point(lived, 3), THIRD, FIRST.public_key_hex, NOW))
        report = both(lived, path, FIRST.public_key_hex)
        assert report.dimensions["key_trust"] == "failed"
        failed = [one for one in report.findings if one.dimension == "signatures"]
        assert len(failed) == 3
        assert "the key was revoked from 2026-01-31T00:00:00Z on, and only the first 3 envelopes" in failed[0].message

    def test_what_is_shown_to_be_older_is(self, lived: History, path: Path) -> None:
        say(lived, issue_revocation(point(lived, 6), THIRD, FIRST.public_key_hex, NOW))
        assert both(lived, path, FIRST.public_key_hex).verdict == "valid"

    def test_nothing_of_the_key(self, lived: History, path: Path) -> None:
        say(lived, issue_revocation(Checkpoint(ORIGIN, 0, EMPTY_ROOT), SECOND, FIRST.public_key_hex, NOW))
        report = both(lived, path, FIRST.public_key_hex)
        assert len([one for one in report.findings if one.dimension == "signatures"]) == 6

    def test_a_thief_of_an_old_key_cannot_revoke_the_new_one(self, lived: History, path: Path) -> None:
        say(lived, issue_revocation(Checkpoint(ORIGIN, 0, EMPTY_ROOT), FIRST, THIRD.public_key_hex, NOW))
        assert both(lived, path, FIRST.public_key_hex).verdict == "valid"

    def test_a_rotation_by_a_thief_after_the_revocation(self, tmp_path: Path, path: Path) -> None:
        """The owner's new key, given to verifiers as a root, revokes the stolen one: what the thief introduced falls with it."""
        history = History(tmp_path).live([0])
        say(history, issue_revocation(point(history, 3), SECOND, FIRST.public_key_hex, NOW))
        turn_over(history, FIRST, THIEF)
        history.live([1])
        report = both(history, path, FIRST.public_key_hex, SECOND.public_key_hex)
        assert len([one for one in report.findings if one.dimension == "signatures"]) == 9
        assert THIEF.key_id not in str(report.key_id)

    def test_a_statement_the_reader_brought_along(self, lived: History, path: Path) -> None:
        """The attacker's bundle leaves the revocation out; the reader has it from elsewhere."""
        own = path.with_name("own")
        own.write_text(issue_revocation(point(lived, 3), THIRD, FIRST.public_key_hex, NOW))
        assert both(lived, path, FIRST.public_key_hex).verdict == "valid"
        assert both(lived, path, FIRST.public_key_hex, statements=[own]).verdict == "failed"

    def test_at_a_state_the_log_never_had(self, lived: History, path: Path) -> None:
        say(lived, issue_revocation(Checkpoint(ORIGIN, 5, b"0" * 32), THIRD, FIRST.public_key_hex, NOW))
        assert both(lived, path, FIRST.public_key_hex).verdict == "failed"


class TestHandingOver:
    def test_block_states_and_the_logs_end_are_the_new_keys(
        self, lived: History, caplog: pytest.LogCaptureFixture
    ) -> None:
        from outbox_rig import attached

        payload, mac = lived.key.outbox.seal(attached("block-shared", "agent-z"))
        from phionyx_letta.ledger import tables

        with lived.ledger.engine.begin() as connection:
            connection.execute(tables.outbox.insert().values(payload=payload, mac=mac))
        assert lived.sealer.seal_pending().sealed == 1
        last = list(lived.ledger.iter_all())[-1]
        assert "content" not in last["subject"]["metadata"]["letta"]
        assert "is not this key's" not in caplog.text

    def test_guarded_reads_know_what_earlier_keys_sealed(self, lived: History) -> None:
        from phionyx_letta.ledger.lineage import OwnKeys, lineage
        from phionyx_letta.plugin.logview import LogView
        from phionyx_letta.plugin.watch import open_view

        with lived.ledger.engine.connect() as connection:
            rotations = lineage(connection, THIRD.public_key_hex)
            assert lineage(connection, THIEF.public_key_hex) == []
            assert [one.signer for one in rotations] == [SECOND.public_key_hex, FIRST.public_key_hex]
            own, thief = OwnKeys(connection, lived.key.signer), OwnKeys(connection, THIEF)
        view = LogView(own.verifies)
        open_view(
            view, lived.ledger, None, "another/origin", [THIRD.public_key_hex], taken_over=rotations[0].checkpoint
        )
        assert (view.fault, view.size, view.disbelieved) == (None, 18, 0)
        older = LogView(thief.verifies)
        open_view(older, lived.ledger, None, "another/origin", [THIRD.public_key_hex])
        assert older.disbelieved == 18

    def test_a_key_takes_over_once(self, lived: History) -> None:
        with pytest.raises(SigningKeyError, match="was replaced"):
            rotate(lived.ledger, FIRST, THIEF, ORIGIN)
        with pytest.raises(SigningKeyError, match="was in use before"):
            rotate(lived.ledger, THIRD, FIRST, ORIGIN)

    def test_the_log_goes_on_under_its_checkpoints(self, lived: History, path: Path) -> None:
        lived.outside.write_text("\n".join(lived.notes), encoding="utf-8")
        report = judged(lived.bundle(path), FIRST.public_key_hex, outside=[lived.outside])
        assert (report.verdict, report.covered) == ("valid", 18)

    def test_checkpoints_of_the_wrong_time(self, lived: History, path: Path) -> None:
        """The newest key signs a checkpoint of an old size, an old key one of today's: neither counts."""
        from phionyx_letta.checkpoint import issue_checkpoint

        members = read(lived.bundle(path))
        for signer, size in ((THIRD, 3), (FIRST, 18), (SECOND, 18)):
            forged = issue_checkpoint(point(lived, size), signer)
            report = judged(write(path, {**members, "checkpoints": forged.encode()}), FIRST.public_key_hex)
            assert (report.verdict, report.dimensions["checkpoint"]) == ("failed", "failed")


def test_a_file_of_lines_shows_no_places(lived: History) -> None:
    from io import BytesIO

    from phionyx_letta.envelope import envelope_line
    from phionyx_letta.ledger.audit import verify_lines

    with gather(lived.ledger, []) as material:
        ring = Keyring([FIRST.public_key_hex])
        ring.learn(Statement.parse(note) for note in material.statements)
    text = "".join(envelope_line(one) + "\n" for one in lived.ledger.iter_all())
    report = verify_lines(BytesIO(text.encode()), verifier=ring)
    assert (report.verdict, report.dimensions["signatures"], report.dimensions["key_trust"]) == (
        "not_measured",
        "ok",
        "not_measured",
    )
