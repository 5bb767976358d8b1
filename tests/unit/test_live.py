"""`verify` on Letta's own database: what is there is compared with what was recorded of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from block_rig import BlockRig
from outbox_rig import verifier_of

from phionyx_letta.ledger.audit import AuditReport
from phionyx_letta.ledger.audit_sql import verify_ledger
from phionyx_letta.plugin.live import LiveAudit


@pytest.fixture
def rig(empty_database: str) -> Iterator[BlockRig]:
    rig = BlockRig(empty_database)
    with rig.armed(rig.runtime("plain")):
        rig.create("block-1", "one", "agent-1")
        rig.create("block-2", "two")
        rig.set("block-1", value="uno")
    rig.seal()
    yield rig
    rig.close()


def verified(rig: BlockRig) -> AuditReport:
    return verify_ledger(rig.ledger, verifier=verifier_of(rig.key), live=LiveAudit())


def test_what_is_as_it_was_recorded_is_valid(rig: BlockRig) -> None:
    report = verified(rig)
    assert (report.verdict, report.dimensions["live"]) == ("valid", "ok")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ("update block set value = 'eve' where id = 'block-1'", "the block's value is not what was recorded"),
        ("update block set label = 'eve' where id = 'block-2'", "the block's columns are not what was recorded"),
        ("delete from block where id = 'block-2'", "the block was removed outside"),
    ],
)
def test_an_edit_past_letta_fails_and_is_named(rig: BlockRig, edit: str, said: str) -> None:
    rig.sql(edit)
    report = verified(rig)
    assert (report.verdict, report.dimensions["live"], report.reason) == ("failed", "failed", said)


def test_a_block_nothing_is_recorded_of_leaves_it_open(rig: BlockRig) -> None:
    rig.sql(
        "insert into block (id, value, label, \"limit\", read_only, version) values ('block-9', 'eve', 'human', 9, false, 1)"
    )
    report = verified(rig)
    assert (report.verdict, report.dimensions["live"]) == ("not_measured", "not_measured")
    assert "nothing is recorded of 1 blocks" in str(report.reason)
    assert [one.block_id for one in report.findings] == ["block-9"]
    rig.baseline()
    assert verified(rig).verdict == "valid"


def test_a_block_whose_creation_waits_in_the_outbox_is_passed_over(rig: BlockRig) -> None:
    with rig.armed(rig.runtime("plain")):
        rig.create("block-3", "three")
    assert verified(rig).verdict == "valid"
