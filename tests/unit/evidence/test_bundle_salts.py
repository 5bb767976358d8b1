"""A bundle of a salted ledger in which something was forgotten: both verifiers say the same as of any other."""

from __future__ import annotations

from pathlib import Path

import pytest
from bundle_rig import HOLDER, History, judged

from phionyx_letta.ledger import tables
from phionyx_letta.ledger.salts import SaltKey, salt_row
from phionyx_letta.plugin.attribution import Attribution
from phionyx_letta.plugin.mutation import BlockColumns, Commitment, attachment_change, block_change


def _put(history: History, change: dict[str, object] | None) -> None:
    assert change is not None
    payload, mac = history.key.outbox.seal(change)
    with history.ledger.engine.begin() as connection:
        connection.execute(tables.outbox.insert().values(payload=payload, mac=mac))
    report = history.sealer.seal_pending()
    assert (report.sealed, report.refusals) == (1, [])
    assert report.checkpoint is not None
    history.notes.append(report.checkpoint[1])


@pytest.mark.parametrize("traces", [(), ("agent-a",)])
def test_both_verifiers_let_one_link_go_where_a_salt_was_destroyed(tmp_path: Path, traces: tuple[str, ...]) -> None:
    history, who = History(tmp_path), Attribution(agent_id="agent-a")
    keys, old, new = SaltKey.of(HOLDER), SaltKey.new(), SaltKey.new()
    with history.ledger.engine.begin() as connection:
        connection.execute(tables.salt.insert(), [salt_row(keys, "block-a", salt) for salt in (old, new)])
    one, two = (BlockColumns(value, "human", None, 5000, False) for value in ("4711", "two"))
    _put(history, block_change("block-a", None, one, who, organization_id="org", commitment=Commitment(old)))
    _put(history, attachment_change("attach", "block-a", "human", "agent-a", who, organization_id="org"))
    _put(history, attachment_change("detach", "block-a", "human", "agent-a", who, organization_id="org"))
    _put(history, attachment_change("attach", "block-a", "human", "agent-a", who, organization_id="org"))
    _put(
        history,
        block_change("block-a", one, two, who, organization_id="org", commitment=Commitment(new, SaltKey.new())),
    )
    path = history.bundle(tmp_path / "b.zip", traces)
    report = judged(path, HOLDER.public_key_hex)
    assert (report.verdict, report.dimensions["block_linkage"]) == ("valid", "ok"), report.findings
    _put(history, block_change("block-a", one, two, who, organization_id="org", commitment=Commitment(SaltKey.new())))
    report = judged(history.bundle(tmp_path / "c.zip", traces), HOLDER.public_key_hex)
    assert report.dimensions["block_linkage"] != "ok"
