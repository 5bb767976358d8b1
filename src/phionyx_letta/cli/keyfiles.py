"""The files of a rotation: the new key beside the old one, and the old one's end. Interrupted anywhere, it can be taken up again."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phionyx_letta.cli.failures import CommandError

if TYPE_CHECKING:
    from phionyx_letta.settings import Settings
    from phionyx_letta.signing import Signer

__all__ = ["KeyFiles", "new_signer"]


@dataclass(frozen=True)
class KeyFiles:
    """Where the old private key is, if it is in a file, and where the new one is made."""

    old: Path | None
    new: Path
    in_place: bool
    """The new key takes the old one's name at the end."""

    @classmethod
    def of(cls, settings: Settings, new: Path | None) -> KeyFiles:
        """Return the files of these settings.

        Raises:
            CommandError: the new key would be the old one.
        """
        given = settings.signing_key
        old = Path(given) if given and not re.fullmatch("[0-9a-fA-F]{64}", given) else None
        if old is None and not given and not settings.signing_command:
            old = settings.home_path() / "signing.key"
        if new is not None:
            if old is not None and new.absolute() == old.absolute():
                raise CommandError(f"{new} is the key that signs now", "name another file for the new one")
            return cls(old, new, False)
        if old is None:
            return cls(None, settings.home_path() / "signing.key", False)
        return cls(old, old.with_name(old.name + ".new"), True)

    def waiting(self) -> str | None:
        """Return the public key of a new key that is there already, None if there is none.

        Raises:
            SigningKeyError: what is there is no key.
        """
        from phionyx_letta.signing import ENV_KEY, get_signer

        signer = get_signer({ENV_KEY: str(self.new)}) if self.new.exists() else None
        return getattr(signer, "public_key_hex", None)

    def holds(self) -> str | None:
        """Return the public key of the old file; None where there is none any more, or it was overwritten."""
        from phionyx_letta.errors import SigningKeyError
        from phionyx_letta.signing import ENV_KEY, get_signer

        try:
            signer = get_signer({ENV_KEY: str(self.old)}) if self.old is not None else None
        except SigningKeyError:
            return None
        return getattr(signer, "public_key_hex", None)

    def finish(self, *, keep_old: bool, command: bool) -> bool:
        """Put the new key in its place and destroy the old one; return whether that was done.

        Overwriting a file does not reach copies of it: backups, snapshots, the spare blocks of a flash disk, a file system that
        writes elsewhere (docs/keys.md).
        """
        if self.old is None:
            return False
        if keep_old and self.in_place and self.old.exists():
            os.replace(self.old, self.old.with_name(self.old.name + ".old"))
        elif not keep_old and self.old.exists():
            _overwrite(self.old)
        public, fresh = _public_of(self.old), _public_of(self.new)
        if self.in_place and not command:  # in this order, so that it can be taken up again wherever it ends
            if fresh.exists():
                if public.exists():
                    os.replace(public, self.old.with_name(self.old.name + ".old.pub"))
                os.replace(fresh, public)
            os.replace(self.new, self.old)
        elif not keep_old:
            self.old.unlink(missing_ok=True)
        _sync(self.old.parent)
        return not keep_old

    def use(self, command: str | None, public: str | None) -> str:
        """Return the setting the servers need."""
        if command:
            return f"PHIONYX_LETTA_SIGNING_COMMAND={command} PHIONYX_LETTA_PUBLIC_KEY={public}"
        return f"PHIONYX_LETTA_SIGNING_KEY={(self.old if self.in_place else self.new)}"


def new_signer(files: KeyFiles, command: str | None, public: str | None) -> Signer:
    """Return the key that takes over; its file is made if it is missing.

    Raises:
        CommandError: a command without a public key, or the reverse.
        SigningKeyError: the key cannot be made or read.
    """
    from phionyx_letta.signing import ENV_COMMAND, ENV_HOME, ENV_KEY, ENV_PUBLIC, generate_key, get_signer

    if (command is None) != (public is None):
        raise CommandError("--new-command and --new-public-key belong together", "give both")
    if command is not None and public is not None:
        return get_signer({ENV_COMMAND: command, ENV_PUBLIC: public, ENV_HOME: os.environ.get(ENV_HOME, "")})
    if not files.new.exists():
        generate_key(files.new)
    return get_signer({ENV_KEY: str(files.new)})


def _public_of(path: Path) -> Path:
    return path.with_name(path.name + ".pub")


def _overwrite(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        for filler in (os.urandom(size), b"\0" * size):
            file.seek(0)
            file.write(filler)
            file.flush()
            os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
