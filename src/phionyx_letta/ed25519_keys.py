"""Key files and the keys in them: hex digits in a small text file, the public one beside the private one.

No error and no log line here shows key material.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from phionyx_letta.errors import SigningKeyError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = [
    "create_file",
    "generate_key",
    "key_id_of",
    "load_seed",
    "private_key_of",
    "public_key_of",
    "read_public_key",
    "seed_bytes",
]

ENV_KEY = "PHIONYX_LETTA_SIGNING_KEY"

_log = logging.getLogger(__name__)
_SEED = re.compile(r"[0-9a-fA-F]{64}")
_PRIVATE_MARK = "# phionyx-letta private signing key"
_PUBLIC_MARK = "# phionyx-letta public key"


def generate_key(path: str | os.PathLike[str]) -> str:
    """Create an Ed25519 key: the private key in `path` (mode 0600), the public key in `<path>.pub` (0644).

    Returns:
        The public key as 64 hex digits.

    Raises:
        SigningKeyError: either file exists (a key is never overwritten) or the folder cannot be written.
    """
    seed = os.urandom(32)
    public = private_key_of(seed).public_key().public_bytes_raw().hex()
    key_id = key_id_of(public)
    private_path = Path(path)
    public_path = private_path.with_name(private_path.name + ".pub")
    try:
        private_path.parent.mkdir(parents=True, exist_ok=True)
        create_file(private_path, f"{_PRIVATE_MARK} {key_id}\n{seed.hex()}\n", 0o600)
        try:
            create_file(public_path, f"{_PUBLIC_MARK} {key_id}\n{public}\n", 0o644)
        except OSError:
            private_path.unlink()  # ours, made a moment ago: leave no half pair behind
            raise
    except FileExistsError as error:
        raise SigningKeyError(f"{error.filename} exists", "choose another path, or move the old key away") from None
    except OSError as error:
        raise SigningKeyError(
            f"no key can be written to {private_path}: {error.strerror}", "choose a folder this user may write"
        ) from None
    return public


def key_id_of(public_key_hex: str) -> str:
    """Return `ed25519:` and the first 16 hex digits of the SHA-256 of the public key's 32 bytes.

    Raises:
        SigningKeyError: not 64 hex digits.
    """
    return "ed25519:" + hashlib.sha256(seed_bytes(public_key_hex, "the public key")).hexdigest()[:16]


def load_seed(given: str) -> str:
    """The private key's 64 hex digits, from the value of `PHIONYX_LETTA_SIGNING_KEY`: themselves, or the path of a key file.

    Raises:
        SigningKeyError: it is neither, or a public key.
    """
    if _SEED.fullmatch(given):
        return given
    path = Path(given)
    remedy = f"give {ENV_KEY} the path of a key file or 64 hex digits; `phionyx-letta keygen PATH` makes one"
    text = _read_key_file(path, f"the signing key of {ENV_KEY}", remedy)
    if text.lstrip().startswith(_PUBLIC_MARK):
        raise SigningKeyError(f"{ENV_KEY} names a public key", "give it the private key, the file without .pub")
    value = _last_line(text)
    if not _SEED.fullmatch(value):
        raise SigningKeyError(f"the key file of {ENV_KEY} does not end in a line of 64 hex digits", remedy)
    _warn_if_open(path)
    return value


def read_public_key(given: str | os.PathLike[str]) -> str:
    """The public key's 64 hex digits, from themselves or from a `.pub` file.

    Raises:
        SigningKeyError: it is neither, or a private key given by mistake.
    """
    remedy = "give 64 hex digits or the path of a .pub file"
    if isinstance(given, str) and _SEED.fullmatch(given.strip()):
        return given.strip().lower()
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise SigningKeyError("no public key was given", remedy)
    path = Path(given)
    text = _read_key_file(path, "the public key", remedy)
    if _PRIVATE_MARK in text or _is_private_of_pair(path, text):
        raise SigningKeyError(f"{path} is a private key", f"give the public key, {path}.pub, and keep this one secret")
    value = _last_line(text)
    if not _SEED.fullmatch(value):
        raise SigningKeyError(f"{path} does not end in a line of 64 hex digits", remedy)
    return value.lower()


def _is_private_of_pair(path: Path, text: str) -> bool:
    """Recognise a private key without our heading: the public key beside it is the one it makes."""
    public_path = path.with_name(path.name + ".pub")
    value = _last_line(text)
    if not _SEED.fullmatch(value) or not public_path.is_file():
        return False
    made = private_key_of(bytes.fromhex(value)).public_key().public_bytes_raw().hex()
    return _last_line(_read_key_file(public_path, "the public key", "")).lower() == made


def _read_key_file(path: Path, what: str, remedy: str) -> str:
    """Read a small text file; what was given may be key material typed wrongly, so it is shown only if it is a file."""
    try:
        if not path.is_file():
            raise SigningKeyError(f"{what} is neither 64 hex digits nor an existing file", remedy)
        with path.open("rb") as file:
            return file.read(65_536).decode("utf-8")
    except UnicodeDecodeError:
        raise SigningKeyError(f"{what} in {path} is not a text file", remedy) from None
    except ValueError as error:  # NUL in the path
        if isinstance(error, SigningKeyError):
            raise
        raise SigningKeyError(f"{what} is not a path", remedy) from None
    except OSError as error:
        raise SigningKeyError(f"{what} cannot be read: {error.strerror}", remedy) from None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in reversed(lines) if line and not line.startswith("#")), "")


def _warn_if_open(path: Path) -> None:
    with contextlib.suppress(OSError):
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            _log.warning("the private key %s can be read by other users; chmod 600 it", path)


def create_file(path: Path, text: str, mode: int) -> None:
    """Create a file that did not exist, with its final mode from the start, and make it durable."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        os.fchmod(descriptor, mode)  # whatever the umask says
        file.write(text)
        file.flush()
        os.fsync(descriptor)


def seed_bytes(given: str, what: str) -> bytes:
    """The 32 bytes of a key of either kind given as hex digits; `what` names it in the error.

    Raises:
        SigningKeyError: it is not 64 hex digits.
    """
    if not isinstance(given, str) or not _SEED.fullmatch(given.strip()):
        raise SigningKeyError(f"{what} is not 64 hex digits", "`phionyx-letta keygen PATH` makes a key")
    return bytes.fromhex(given.strip())


def private_key_of(seed: bytes) -> Ed25519PrivateKey:
    """The key of a 32-byte seed (RFC 8032)."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(seed)


def public_key_of(public_key_hex: str) -> Ed25519PublicKey:
    """The key of its 64 hex digits.

    Raises:
        SigningKeyError: they are no point of the curve.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key_hex))
    except ValueError:
        raise SigningKeyError(
            "these 32 bytes are not an Ed25519 public key", "check the key for a typing error"
        ) from None
