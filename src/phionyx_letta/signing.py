"""Signers and verifiers.

Ed25519 for evidence; HMAC for demonstrations (whoever can check it can also forge it); `unsigned` where nothing is
configured, so that a missing key is visible in every envelope. No error, log line or repr here shows key material.
`cryptography` is imported when a key is first used.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from phionyx_letta.ed25519_keys import (
    ENV_KEY,
    generate_key,
    key_id_of,
    load_seed,
    private_key_of,
    public_key_of,
    read_public_key,
    seed_bytes,
)
from phionyx_letta.errors import SigningKeyError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = [
    "DEMO_SECRET",
    "ENV_KEY",
    "Ed25519Signer",
    "Ed25519Verifier",
    "HmacSigner",
    "HmacVerifier",
    "PlacedVerifier",
    "Signer",
    "TrustedKeys",
    "UnsignedSigner",
    "Verifier",
    "generate_key",
    "get_signer",
    "key_id_of",
    "load_verifier",
    "sign_all",
    "signature_algorithm",
]

ENV_KEY_ID, ENV_DEMO = "PHIONYX_LETTA_KEY_ID", "PHIONYX_LETTA_DEMO"
ENV_COMMAND, ENV_PUBLIC, ENV_HOME = "PHIONYX_LETTA_SIGNING_COMMAND", "PHIONYX_LETTA_PUBLIC_KEY", "PHIONYX_LETTA_HOME"
DEMO_SECRET = "published with phionyx-letta: proves nothing"
UNSIGNED = "unsigned"

_ED25519 = re.compile(r"ed25519:[0-9a-f]{128}")
_HMAC = re.compile(r"hmac-sha256:[0-9a-f]{32}")
_HMAC_DIGITS = 32  # the peers' envelopes carry the first half of the digest


class Signs(Protocol):
    """What can sign and need do no more."""

    def sign(self, message: str, /) -> str:
        """Return `<algorithm>:<hex>` over `message`, or `unsigned`."""
        ...


class Signer(Protocol):
    """Signs the ASCII text of an envelope's hash."""

    @property
    def algorithm(self) -> str:
        """`ed25519`, `hmac-sha256` or `unsigned`."""
        ...

    @property
    def key_id(self) -> str | None:
        """The name of the key, or None where there is none."""
        ...

    def sign(self, message: str, /) -> str:
        """Return `<algorithm>:<hex>` over `message`, or `unsigned`."""
        ...

    def derive_key(self, purpose: str) -> bytes:
        """Return 32 bytes that only the holder of this key can know, different for each purpose."""
        ...


class Verifier(Protocol):
    """Checks signatures against a key its user has chosen to trust."""

    @property
    def algorithm(self) -> str:
        """The algorithm it checks."""
        ...

    @property
    def key_id(self) -> str:
        """The name of the key (or keys) it trusts."""
        ...

    def verify(self, signed: str, signature: str) -> bool:
        """Return whether `signature` is this key's signature of `signed`; never raise."""
        ...


@runtime_checkable
class PlacedVerifier(Verifier, Protocol):
    """A verifier whose keys were each to be used in some part of the log only (`keys.Keyring`)."""

    @property
    def needs_places(self) -> bool:
        """Whether that is so, or the place makes no difference."""
        ...

    def verify_at(self, signed: str, signature: str, place: int) -> bool:
        """Return whether a key that is trusted at this place of the log made the signature; never raise."""
        ...

    def why_not(self, signed: str, signature: str, place: int) -> str | None:
        """Return why a known key's signature is not good at this place; None if no known key made it."""
        ...


class Ed25519Signer:
    """Signs with an Ed25519 private key."""

    algorithm = "ed25519"

    def __init__(self, private_key_hex: str, key_id: str | None = None) -> None:
        """Load the 32-byte seed given as 64 hex digits; `key_id` is derived from the public key unless given.

        Raises:
            SigningKeyError: the seed is not 64 hex digits, or the key id is empty.
        """
        self._seed = seed_bytes(private_key_hex, "the private key")
        self._key: Ed25519PrivateKey = private_key_of(self._seed)
        self.public_key_hex: str = self._key.public_key().public_bytes_raw().hex()
        self.key_id: str = _checked_key_id(key_id) if key_id is not None else key_id_of(self.public_key_hex)

    def sign(self, message: str, /) -> str:
        """Return `ed25519:<128 hex>`."""
        return "ed25519:" + self._key.sign(_signed_bytes(message)).hex()

    def derive_key(self, purpose: str) -> bytes:
        """Return 32 bytes by HKDF-SHA256 (RFC 5869) from the seed."""
        return _hkdf(self._seed, purpose)

    def verifier(self) -> Ed25519Verifier:
        """Return what checks this key's signatures."""
        return Ed25519Verifier(self.public_key_hex, self.key_id)

    def __repr__(self) -> str:
        """Name the key, not its value."""
        return f"Ed25519Signer(key_id={self.key_id!r})"


class HmacSigner:
    """Signs with a shared secret: whoever verifies can forge, so it is evidence of nothing towards a third party."""

    algorithm = "hmac-sha256"

    def __init__(self, secret: str) -> None:
        """Take the secret (any non-empty text).

        Raises:
            SigningKeyError: the secret is empty or not text.
        """
        self._secret = _secret_bytes(secret)
        self.key_id: str = "hmac:" + _hkdf(self._secret, "key id").hex()[:16]

    def sign(self, message: str, /) -> str:
        """Return `hmac-sha256:<32 hex>`."""
        return _hmac_signature(self._secret, message)

    def derive_key(self, purpose: str) -> bytes:
        """Return 32 bytes by HKDF-SHA256 (RFC 5869) from the secret."""
        return _hkdf(self._secret, purpose)

    def verifier(self) -> HmacVerifier:
        """Return what checks this secret's signatures."""
        return HmacVerifier(self._secret.decode("utf-8", "surrogatepass"))

    def __repr__(self) -> str:
        """Name the key, not its value."""
        return f"HmacSigner(key_id={self.key_id!r})"


class UnsignedSigner:
    """Says `unsigned` in every envelope: hashes and order still hold, but nobody vouches for them."""

    algorithm = UNSIGNED
    key_id: str | None = None

    def sign(self, message: str, /) -> str:
        """Return `unsigned`."""
        return UNSIGNED

    def derive_key(self, purpose: str) -> bytes:
        """Refuse: there is no secret.

        Raises:
            SigningKeyError: always.
        """
        raise SigningKeyError(f"there is no key to derive the {purpose} key from", f"set {ENV_KEY}")


class Ed25519Verifier:
    """Checks `ed25519:` signatures with one public key."""

    algorithm = "ed25519"

    def __init__(self, public_key: str | os.PathLike[str], key_id: str | None = None) -> None:
        """Load a public key from its 64 hex digits or from a `.pub` file.

        Raises:
            SigningKeyError: neither hex digits nor a readable public-key file; or a private key given by mistake.
        """
        self.public_key_hex: str = read_public_key(public_key)
        from cryptography.exceptions import InvalidSignature

        self._invalid = InvalidSignature
        self._key: Ed25519PublicKey = public_key_of(self.public_key_hex)
        self.key_id: str = _checked_key_id(key_id) if key_id is not None else key_id_of(self.public_key_hex)

    def verify(self, signed: str, signature: str) -> bool:
        """Return whether the signature is this key's; anything malformed is simply not."""
        if not isinstance(signed, str) or not isinstance(signature, str) or not _ED25519.fullmatch(signature):
            return False
        try:
            self._key.verify(bytes.fromhex(signature[8:]), _signed_bytes(signed))
        except self._invalid:
            return False
        return True


class HmacVerifier:
    """Checks `hmac-sha256:` signatures with the shared secret."""

    algorithm = "hmac-sha256"

    def __init__(self, secret: str) -> None:
        """Take the secret (any non-empty text).

        Raises:
            SigningKeyError: the secret is empty or not text.
        """
        self._secret = _secret_bytes(secret)
        self.key_id: str = "hmac:" + _hkdf(self._secret, "key id").hex()[:16]

    def verify(self, signed: str, signature: str) -> bool:
        """Return whether the signature was made with this secret; anything malformed is simply not."""
        if not isinstance(signed, str) or not isinstance(signature, str) or not _HMAC.fullmatch(signature):
            return False
        return hmac.compare_digest(_hmac_signature(self._secret, signed), signature)


class TrustedKeys:
    """Several trusted keys: a signature is good if it is that of any of them (keys change over a chain's life)."""

    def __init__(self, verifiers: Iterable[Verifier]) -> None:
        """Take the verifiers.

        Raises:
            SigningKeyError: there are none.
        """
        self._verifiers = list(verifiers)
        if not self._verifiers:
            raise SigningKeyError("no trusted key was given", "pass at least one verifier")

    @property
    def algorithm(self) -> str:
        """The algorithms, comma separated."""
        return ",".join(sorted({one.algorithm for one in self._verifiers}))

    @property
    def key_id(self) -> str:
        """The key ids, comma separated."""
        return ",".join(sorted({one.key_id for one in self._verifiers}))

    @property
    def public_keys(self) -> list[str]:
        """Those of Ed25519, each as 64 hex digits."""
        return [one.public_key_hex for one in self._verifiers if isinstance(one, Ed25519Verifier)]

    def verify(self, signed: str, signature: str) -> bool:
        """Return whether any trusted key made the signature."""
        for index, one in enumerate(self._verifiers):
            if one.verify(signed, signature):
                if index:  # chains are signed in long runs by one key: try that one first next time
                    self._verifiers.insert(0, self._verifiers.pop(index))
                return True
        return False


def sign_all(signer: Signs, messages: Sequence[str]) -> list[str]:
    """Return the signature of each message; a signer that has a ``sign_many`` is asked once for all."""
    many = getattr(signer, "sign_many", None)
    return list(many(messages)) if many is not None else [signer.sign(message) for message in messages]


def signature_algorithm(signature: str) -> str:
    """Return what comes before the colon; `unsigned` for none; `unknown` for what has no algorithm."""
    if not isinstance(signature, str):
        return "unknown"
    if signature in ("", UNSIGNED):
        return UNSIGNED
    algorithm, colon, _ = signature.partition(":")
    return algorithm if colon and algorithm else "unknown"


def get_signer(environ: Mapping[str, str] | None = None) -> Signer:
    """Return the signer the environment (`os.environ` unless given) asks for.

    `PHIONYX_LETTA_SIGNING_KEY` (a path or 64 hex digits) gives Ed25519, named by `PHIONYX_LETTA_KEY_ID` or by the key
    itself; `PHIONYX_LETTA_SIGNING_COMMAND` with `PHIONYX_LETTA_PUBLIC_KEY` a program that signs (`signing_command`), with
    a secret in `PHIONYX_LETTA_HOME` for what is no signature; else `PHIONYX_LETTA_DEMO=1` gives HMAC with a published
    secret; else envelopes say `unsigned`.

    Raises:
        SigningKeyError: the key is set but missing, unreadable or malformed.
    """
    environ = os.environ if environ is None else environ
    given = environ.get(ENV_KEY, "").strip()
    command = environ.get(ENV_COMMAND, "").strip()
    if command:
        if given:
            raise SigningKeyError(f"both {ENV_KEY} and {ENV_COMMAND} are set", "unset one of them")
        return _command_signer(command, environ)
    if given:
        return Ed25519Signer(load_seed(given), environ.get(ENV_KEY_ID, "").strip() or None)
    if environ.get(ENV_DEMO, "").strip() == "1":
        return HmacSigner(DEMO_SECRET)
    return UnsignedSigner()


def _command_signer(command: str, environ: Mapping[str, str]) -> Signer:
    from phionyx_letta.signing_command import SECRET_FILE, CommandSigner

    public = environ.get(ENV_PUBLIC, "").strip()
    if not public:
        raise SigningKeyError(
            f"{ENV_COMMAND} is set, and {ENV_PUBLIC} is not", f"give {ENV_PUBLIC} the key it signs with"
        )
    try:
        home = Path(environ.get(ENV_HOME, "").strip() or Path.home() / ".phionyx" / "letta")
    except RuntimeError:
        raise SigningKeyError("no home directory is known for this user", f"set {ENV_HOME} to a folder") from None
    return CommandSigner(command, public, home / SECRET_FILE, key_id=environ.get(ENV_KEY_ID, "").strip() or None)


def load_verifier(key: str | os.PathLike[str], key_id: str | None = None) -> Ed25519Verifier:
    """Return the verifier of a public key given as 64 hex digits or as the path of a `.pub` file.

    Raises:
        SigningKeyError: as for `Ed25519Verifier`.
    """
    return Ed25519Verifier(key, key_id)


def _checked_key_id(key_id: str) -> str:
    if not isinstance(key_id, str) or not key_id:
        raise SigningKeyError("the key id is empty", f"unset {ENV_KEY_ID} to derive it from the key")
    return key_id


def _secret_bytes(secret: str) -> bytes:
    if not isinstance(secret, str) or not secret:
        raise SigningKeyError("the HMAC secret is empty", "pass a long random text")
    return secret.encode("utf-8", "surrogatepass")


def _signed_bytes(message: str) -> bytes:
    return message.encode("utf-8", "surrogatepass")


def _hmac_signature(secret: bytes, message: str) -> str:
    return "hmac-sha256:" + hmac.new(secret, _signed_bytes(message), hashlib.sha256).hexdigest()[:_HMAC_DIGITS]


def _hkdf(secret: bytes, purpose: str) -> bytes:
    """HKDF-SHA256 (RFC 5869), one block: extract under a fixed salt, expand for the purpose."""
    extracted = hmac.new(b"phionyx-letta/hkdf/v1", secret, hashlib.sha256).digest()
    return hmac.new(extracted, purpose.encode("utf-8", "surrogatepass") + b"\x01", hashlib.sha256).digest()
