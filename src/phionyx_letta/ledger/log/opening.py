"""The sinks an operator names in one setting."""

from __future__ import annotations

from collections.abc import Sequence

from phionyx_letta.errors import NoteError, SettingsError
from phionyx_letta.ledger.log.folder import FolderSink
from phionyx_letta.ledger.log.git import GitSink
from phionyx_letta.ledger.log.post import Endpoint
from phionyx_letta.ledger.log.sink import Sink
from phionyx_letta.ledger.log.webhook import WebhookSink
from phionyx_letta.ledger.log.witness import WitnessSink
from phionyx_letta.notes import NoteKey

__all__ = ["open_sinks"]

_HOW = (
    "give folder:/path, git:/path, https://host/path or witness:https://host/path#<verifier key>, separated by spaces"
)


def open_sinks(names: str, public_keys: Sequence[str], *, header: str | None = None) -> list[Sink]:
    """Open the sinks named in a text.

    Args:
        names: separated by white space; see ``PHIONYX_LETTA_SINKS``.
        public_keys: of the log, each as 64 hex digits.
        header: one line that is sent to webhooks and witnesses, as ``Authorization: Bearer …``.

    Raises:
        SettingsError: one of them is not a sink; the message names it without what may be secret.
    """
    return [_open(name, public_keys, header) for name in dict.fromkeys(names.split())]


def _open(name: str, public_keys: Sequence[str], header: str | None) -> Sink:
    kind, _, rest = name.partition(":")
    if kind in ("folder", "git") and rest.startswith("/"):
        return FolderSink(rest, public_keys) if kind == "folder" else GitSink(rest, public_keys)
    if kind in ("https", "http"):
        return WebhookSink(Endpoint(name, header=header))
    if kind == "witness":
        url, _, keys = rest.partition("#")
        try:
            return WitnessSink(Endpoint(url, header=header), [NoteKey.parse(key) for key in keys.split(",") if key])
        except NoteError as error:
            raise SettingsError(f"the key of a witness cannot be read: {error.message}", error.remedy) from None
    raise SettingsError(f"{kind[:20]!r} in PHIONYX_LETTA_SINKS is no kind of sink with a full path", _HOW)
