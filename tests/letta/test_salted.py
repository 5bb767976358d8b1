"""A salted ledger under Letta's own managers: every way a block changes leaves the same envelopes, all under salts, and all linked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from test_coverage_managers import ERRORS, EXPECTED, SCRIPT

from phionyx_letta import generate_key
from phionyx_letta.ledger.audit_sql import verify_ledger
from phionyx_letta.ledger.sql import SqlLedger
from phionyx_letta.signing import load_verifier


@dataclass
class Done:
    database: str
    public: str
    cases: dict[str, Any]


@pytest.fixture(scope="module")
def done(
    run_in_letta: Callable[..., Any], new_letta_database: Callable[[], str], tmp_path_factory: pytest.TempPathFactory
) -> Done:
    key = tmp_path_factory.mktemp("salted") / "signing.key"
    public, database = generate_key(key), new_letta_database()
    settings = {"PHIONYX_LETTA_COMMITMENTS": "salted", "PHIONYX_LETTA_SIGNING_KEY": str(key)}
    result = run_in_letta(SCRIPT, database=database, plugin=True, env=settings)
    return Done(database, public, result["cases"])


@pytest.mark.parametrize("name", EXPECTED)
def test_every_way_a_block_changes_leaves_the_same_envelopes(name: str, done: Done) -> None:
    case = done.cases[name]
    assert case["error"] == ERRORS.get(name)
    found = [
        (one["mutation"]["mutation_kind"], one["subject"]["metadata"]["letta"]["event"]) for one in case["envelopes"]
    ]
    # digests of Letta's checkpoints could be guessed: a salted ledger has none
    expected = [(change.kind, change.event) for change in EXPECTED[name] if change.event != "checkpoint"]
    assert sorted(found) == sorted(expected)
    for envelope in case["envelopes"]:
        diff, letta = envelope["mutation"]["diff"], envelope["subject"]["metadata"]["letta"]
        assert (diff["commitment"], len(letta["salt"])) == ("hmac-sha256", 32)
        if letta["event"] in ("attach", "detach"):
            assert diff["before_hash"] == diff["after_hash"]


def test_all_of_it_links_and_verifies(done: Done) -> None:
    ledger = SqlLedger(done.database, create=False)
    report = verify_ledger(ledger, verifier=load_verifier(done.public))
    ledger.close()
    assert (report.verdict, report.dimensions["block_linkage"]) == ("valid", "ok"), report.findings
    assert report.envelopes > 40


def test_what_was_forgotten_has_no_salt_any_more(done: Done) -> None:
    ledger = SqlLedger(done.database, create=False)
    with ledger.engine.connect() as connection:
        rows = connection.exec_driver_sql(
            "select s.wrapped is null from phionyx_salt s join phionyx_block b on b.salt = s.name"
            " join phionyx_envelope e on e.seq = b.seq where e.kind = 'delete'"
        ).scalars()
        assert set(rows) == {True}
    ledger.close()
