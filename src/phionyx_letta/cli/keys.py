"""`keygen`, and the keys a command trusts."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phionyx_letta.cli.options import Json
from phionyx_letta.cli.output import answer, safe

if TYPE_CHECKING:
    from rich.console import Console

    from phionyx_letta.keys import Keyring
    from phionyx_letta.memory.policy import Policy

__all__ = ["ENV_VERIFY_KEY", "keygen", "keyring_of", "known_reviewers", "trusted_keys"]

ENV_VERIFY_KEY, ENV_REVIEWERS = "PHIONYX_LETTA_VERIFY_KEY", "PHIONYX_LETTA_REVIEWERS"


def keygen(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where to write the private key; FILE.pub gets the public one.")
    ],
    as_json: Json = False,
) -> int:
    """Create a signing key: FILE (only its owner can read it) and FILE.pub, the key to give to whoever verifies.

    An existing file is never overwritten. The same key belongs on every host that writes to one database.
    """
    from phionyx_letta.signing import generate_key, key_id_of

    public = generate_key(file)
    path = file.absolute()
    made = {
        "public_key": public,
        "key_id": key_id_of(public),
        "private_key_file": str(path),
        "public_key_file": f"{path}.pub",
        "export": f"export PHIONYX_LETTA_SIGNING_KEY={shlex.quote(str(path))}",
    }

    def show(console: Console) -> None:
        for name, value in (
            ("public key", made["public_key"]),
            ("key id", made["key_id"]),
            ("private key", f"{made['private_key_file']} (keep it secret, and keep a copy)"),
            ("public key in", f"{made['public_key_file']} (give it to whoever verifies)"),
            ("to sign with it", made["export"]),
        ):
            console.print(f"{name:<16} {safe(value)}", soft_wrap=True)

    answer(made, as_json=as_json, show=show)
    return 0


def trusted_keys(given: Iterable[str] | None, histories: Iterable[str] | None = None) -> Keyring | None:
    """The public keys of ``--key`` and ``PHIONYX_LETTA_VERIFY_KEY``, and what is stated about them; None where none is given.

    Args:
        given: keys.
        histories: files of statements, folders or git repositories of checkpoints, which hold statements too.

    Raises:
        SigningKeyError: one of them is not a public key.
        StoreError: a file of statements is not there.
    """
    named = [*(given or ()), *os.environ.get(ENV_VERIFY_KEY, "").split(os.pathsep)]
    wanted = [name.strip() for name in named if name.strip()]
    if not wanted:
        return None
    from phionyx_letta.keys import Keyring
    from phionyx_letta.ledger.log.reading import read_statements
    from phionyx_letta.signing import load_verifier

    ring = Keyring([load_verifier(name).public_key_hex for name in wanted])
    for history in histories or ():
        ring.learn(read_statements(history))
    return ring


def known_reviewers(given: Sequence[str] | None) -> Policy | None:
    """The reviewers of ``--reviewers``, else of PHIONYX_LETTA_REVIEWERS; None where neither names any.

    Raises:
        SettingsError: a policy cannot be used.
    """
    named = list(given or ()) or [os.environ.get(ENV_REVIEWERS, "").strip()]
    wanted = [path for path in named if path]
    if not wanted:
        return None
    from phionyx_letta.memory.policy import Policy

    return Policy.load_all(wanted)


def keyring_of(public_keys: Sequence[str], notes: Iterable[str]) -> Keyring:
    """The keyring of these keys that knows the statements among these notes."""
    from phionyx_letta.keys import Keyring, statements_in

    ring = Keyring(list(public_keys))
    ring.learn(statements_in(notes))
    return ring
