"""`keygen`, and the keys a command trusts."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phionyx_letta.cli.options import Json
from phionyx_letta.cli.output import answer, safe

if TYPE_CHECKING:
    from rich.console import Console

    from phionyx_letta.signing import TrustedKeys

__all__ = ["ENV_VERIFY_KEY", "keygen", "trusted_keys"]

ENV_VERIFY_KEY = "PHIONYX_LETTA_VERIFY_KEY"


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


def trusted_keys(given: Iterable[str] | None) -> TrustedKeys | None:
    """The public keys of ``--key`` and ``PHIONYX_LETTA_VERIFY_KEY``; None where none is given.

    Raises:
        SigningKeyError: one of them is not a public key.
    """
    named = [*(given or ()), *os.environ.get(ENV_VERIFY_KEY, "").split(os.pathsep)]
    wanted = [name.strip() for name in named if name.strip()]
    if not wanted:
        return None
    from phionyx_letta.signing import TrustedKeys, load_verifier

    return TrustedKeys([load_verifier(name) for name in wanted])
