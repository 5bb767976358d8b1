"""What every test may ask for: a PostgreSQL of our own and the scripted model. Both end with the session, or with its death."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import count

import pytest

from phionyx_letta.demo.model import ScriptedModel
from phionyx_letta.demo.postgres import EmbeddedPostgres

_numbers = count(1)


@pytest.fixture(autouse=True, scope="session")
def _no_settings_from_outside() -> Iterator[None]:
    """A developer's own PHIONYX_LETTA_* and LETTA_* settings must not decide what the tests see."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("PHIONYX_", "LETTA_"))]:
            patch.delenv(name)
        yield


@pytest.fixture(autouse=True, scope="session")
def _interrupts_are_heard() -> None:
    """Under nohup or in a script's background a process ignores Ctrl-C, and so would each process the tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """A running PostgreSQL with pgvector; ask ``new_database`` for one to yourself."""
    with EmbeddedPostgres() as server:
        yield server


@pytest.fixture
def empty_database(postgres: EmbeddedPostgres) -> Iterator[str]:
    """The URI of a database of one's own, empty but for the extension ``vector``."""
    name = f"empty_{next(_numbers)}"
    yield postgres.new_database(name)
    postgres.drop_database(name)


@pytest.fixture(scope="session")
def model() -> Iterator[ScriptedModel]:
    """The scripted model endpoint; its ``requests`` are those of the whole session."""
    with ScriptedModel() as endpoint:
        yield endpoint
