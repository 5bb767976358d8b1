"""Signing by a program of the operator's: a KMS, an HSM, a card. The private key never enters this process.

The program is started once and kept. It reads a line for each message, the base64 of the bytes to sign, and answers each, in
order, with a line ``ed25519:<128 hex digits>`` (RFC 8032). Everything it answers is checked against the public key before it is
used. What it writes to standard error goes where ours goes.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import secrets
import selectors
import shlex
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from phionyx_letta.ed25519_keys import create_file
from phionyx_letta.errors import SigningKeyError
from phionyx_letta.signing import Ed25519Verifier, HmacSigner

__all__ = ["SECRET_FILE", "CommandSigner", "load_secret"]

#: In PHIONYX_LETTA_HOME.
SECRET_FILE = "outbox.secret"

_log = logging.getLogger("phionyx_letta")

#: Messages that are given at once: they and their answers fit into the pipes, so neither side waits for the other.
_AT_ONCE = 100
_LONGEST_ANSWER = 4096
_REMEDY = "check PHIONYX_LETTA_SIGNING_COMMAND; what waits is sealed once it signs again"


class CommandSigner:
    """Signs with an Ed25519 key that a program holds."""

    algorithm = "ed25519"

    def __init__(
        self, command: str, public_key: str, secret: str | Path, *, key_id: str | None = None, timeout: float = 30.0
    ) -> None:
        """Remember the program; it is started when something is first signed.

        Args:
            command: words as a shell has them, without a shell.
            public_key: 64 hex digits or a .pub file: what the program's answers are checked with.
            secret: what the keys that authenticate rows of the database are derived from, or its file, which is made when it is
                first needed: whoever only reads leaves nothing behind.
            key_id: name of the key; derived from it by default.
            timeout: longest wait for an answer, s.

        Raises:
            SigningKeyError: the command or the public key is malformed.
        """
        try:
            self._command = shlex.split(command)
        except ValueError as error:
            raise SigningKeyError(f"the signing command cannot be read: {error}", _REMEDY) from None
        if not self._command:
            raise SigningKeyError("the signing command is empty", _REMEDY)
        self._verifier = Ed25519Verifier(public_key, key_id)
        self.public_key_hex = self._verifier.public_key_hex
        self.key_id = self._verifier.key_id
        self._secret = secret
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def sign(self, message: str, /) -> str:
        """Return `ed25519:<128 hex>`.

        Raises:
            SigningKeyError: the program does not run, does not answer, or answers something else.
        """
        return self.sign_many([message])[0]

    def sign_many(self, messages: Sequence[str]) -> list[str]:
        """Return the signature of each message.

        Raises:
            SigningKeyError: as ``sign``; nothing of the answers is used then.
        """
        with self._lock:
            try:
                found = [
                    answer
                    for start in range(0, len(messages), _AT_ONCE)
                    for answer in self._asked(messages[start : start + _AT_ONCE])
                ]
            except BaseException:
                self._end()  # whatever it still says belongs to what was given up
                raise
        for message, signature in zip(messages, found, strict=True):
            if not self._verifier.verify(message, signature):
                with self._lock:
                    self._end()
                raise SigningKeyError("the signing command's answer is no signature by its public key", _REMEDY)
        return found

    def derive_key(self, purpose: str) -> bytes:
        """Return 32 bytes derived from the secret.

        Raises:
            SigningKeyError: its file can be neither read nor made.
        """
        if isinstance(self._secret, Path):
            self._secret = load_secret(self._secret)
        return HmacSigner(self._secret).derive_key(purpose)

    def verifier(self) -> Ed25519Verifier:
        """Return what checks this key's signatures."""
        return self._verifier

    def close(self) -> None:
        """End the program."""
        with self._lock:
            self._end()

    def __repr__(self) -> str:
        """Name the key; the command may hold what is secret."""
        return f"CommandSigner(key_id={self.key_id!r})"

    def _asked(self, messages: Sequence[str]) -> list[str]:
        process = self._started()
        assert process.stdin is not None
        lines = [base64.b64encode(message.encode("utf-8", "surrogatepass")) + b"\n" for message in messages]
        try:
            process.stdin.write(b"".join(lines))
            process.stdin.flush()
        except OSError as error:
            raise SigningKeyError(f"the signing command ended ({_how(process)})", _REMEDY) from error
        return self._answers(process, len(messages))

    def _answers(self, process: subprocess.Popen[bytes], count: int) -> list[str]:
        assert process.stdout is not None
        deadline, held = time.monotonic() + self._timeout, b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while held.count(b"\n") < count:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise SigningKeyError(f"the signing command did not answer within {self._timeout:g} s", _REMEDY)
                piece = os.read(process.stdout.fileno(), 65_536)
                held += piece
                deadline = time.monotonic() + self._timeout
                if not piece:
                    raise SigningKeyError(f"the signing command ended ({_how(process)})", _REMEDY)
                if len(held) > count * _LONGEST_ANSWER:
                    raise SigningKeyError("the signing command answers without end", _REMEDY)
        answers = held.decode("ascii", "replace").splitlines()
        if len(answers) != count:
            raise SigningKeyError("the signing command gave more answers than it was asked for", _REMEDY)
        return answers

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner != os.getpid():
            self._process = None  # a fork: the parent's
        if self._process is None or self._process.poll() is not None:
            try:
                self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            except (OSError, ValueError) as error:
                raise SigningKeyError(f"the signing command cannot be run: {error}", _REMEDY) from error
            self._owner = os.getpid()
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if stream is not None:
                        stream.close()
            process.wait()


def load_secret(path: Path) -> str:
    """Return the secret in this file; where there is none it is made, readable by its owner only.

    Raises:
        SigningKeyError: it cannot be read or made.
    """
    remedy = "set PHIONYX_LETTA_HOME to a folder this user can write; every host of one database needs the same file"
    try:
        if not path.exists():
            _make(path)
        text = path.read_text(encoding="ascii").strip().rpartition("\n")[2]
    except (OSError, UnicodeDecodeError) as error:
        raise SigningKeyError(
            f"the secret in {path} can be neither read nor made ({type(error).__name__})", remedy
        ) from None
    if len(text) != 64:
        raise SigningKeyError(f"{path} does not end in a line of 64 hex digits", remedy)
    return text


def _make(path: Path) -> None:
    """Make the file whole or not at all: workers that start together agree on one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    heading = "# phionyx-letta secret: authenticates rows of the database, signs nothing"
    create_file(partial, f"{heading}\n{secrets.token_hex(32)}\n", 0o600)
    try:
        os.link(partial, path)
    except FileExistsError:  # another worker was faster
        return
    finally:
        partial.unlink()
    _log.warning("phionyx-letta made a secret: %s. Keep it, and give it to every host of this database.", path)


def _how(process: subprocess.Popen[bytes]) -> str:
    try:
        return f"exit code {process.wait(1)}"
    except subprocess.TimeoutExpired:
        return "it closed its output"
