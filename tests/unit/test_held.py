"""What PHIONYX_LETTA_PROPOSE_ONLY names."""

from __future__ import annotations

import pytest

from phionyx_letta.errors import SettingsError
from phionyx_letta.plugin.held import Chosen, Hold
from phionyx_letta.settings import load_settings


def hold(named: str) -> Hold:
    return Chosen(named)._hold([])


@pytest.mark.parametrize(
    "label",
    [
        "Policy",
        "policy ",
        "polic\u0443",
        "\uff50olicy",
        "/policy",
        "./policy",
        "pol\u200bicy",
        "p\u03bflicy",
        "polic\u0443/",
    ],
)
def test_a_label_that_looks_like_the_named_one_is_held(label: str) -> None:
    assert hold("policy").holds(None, label)
    assert hold(f"'{label}'").holds(None, "policy")


def test_another_label_is_not_held() -> None:
    for label in ("policies", "notes/policy", "pol icy", None):
        assert not hold("policy").holds(None, label)
    assert hold("notes/policy").holds(None, "notes//policy")


def test_names_with_spaces_are_quoted() -> None:
    found = hold("'tag:asks first' \"my notes\" human")
    assert found.chosen == {"tag:asks first", "my notes", "human"}
    assert found.holds(None, "my notes")


@pytest.mark.parametrize("value", ["human, notes", "'my notes", "tag: asks", "human ''", "Ann's"])
def test_a_setting_that_names_nothing_is_an_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHIONYX_LETTA_PROPOSE_ONLY", value)
    with pytest.raises(SettingsError, match=r"PHIONYX_LETTA_PROPOSE_ONLY.*quote"):
        load_settings()
