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
    from phionyx_letta.ledger.sql import SqlLedger
    from phionyx_letta.memory.policy import Policy
    from phionyx_letta.settings import Settings
    from phionyx_letta.signing import Verifier

__all__ = ["ENV_VERIFY_KEY", "keygen", "keyring_of", "known_reviewers", "trusted_keys", "verifier_here"]

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


def verifier_here(ledger: SqlLedger, settings: Settings, given: Iterable[str] | None) -> Verifier | None:
    """What checks a ledger of this machine's own: the keys of ``--key``, else the key that signs here with those it took over from and
    those of the hosts that share the ledger; None where there is none. No key is made, and a private one only read for want of
    its public half.

    Raises:
        SigningKeyError: one of them is malformed or cannot be read.
    """
    from phionyx_letta.keys import Keyring, statements_in
    from phionyx_letta.ledger.lineage import own_keys, stored_statements
    from phionyx_letta.plugin.checkpointing import trusted_hosts

    named = trusted_keys(given)
    own = None if named else _own_verifier(settings)
    roots, public = list(named.roots) if named else [], getattr(own, "public_key_hex", None)
    with ledger.engine.connect() as connection:
        if public is not None:
            roots += [*own_keys(connection, public), *trusted_hosts(settings)]
        return Keyring(roots).extended(statements_in(stored_statements(connection))) if roots else own


def _own_verifier(settings: Settings) -> Verifier | None:
    from phionyx_letta.signing import ENV_DEMO, ENV_KEY, ENV_PUBLIC, get_signer, load_verifier

    public = os.environ.get(ENV_PUBLIC, "").strip()
    if settings.signing_command and public:
        return load_verifier(public)
    beside = settings.home_path() / "signing.key"
    if not settings.signing_key and os.environ.get(ENV_DEMO, "").strip() != "1":
        pair = beside.with_name(f"{beside.name}.pub")
        if pair.is_file():
            return load_verifier(pair)
        if not beside.is_file():
            return None
        signer = get_signer({ENV_KEY: str(beside)})
    else:
        signer = get_signer()
    own = getattr(signer, "verifier", None)
    return own() if own is not None else None


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
