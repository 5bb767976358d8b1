"""A memory patch: one proposed change of one target, with its reasons, its status and a signed history of who decided what.

The fields and their JSON form are the second seed's. The history lives in `metadata["history"]`: each transition names who, when
and why, is bound to the patch's content and to the transition before it, and is signed. This module knows no files and no stores.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from phionyx_letta._canonical import JSON_ERRORS, encode
from phionyx_letta.errors import IllegalTransition, InvalidPatch, UntrustedPatch
from phionyx_letta.signing import HmacSigner, HmacVerifier, Signer, UnsignedSigner, Verifier, signature_algorithm

__all__ = ["CODE_SESSION", "TRANSITIONS", "MemoryPatch", "PatchStatus", "check_trust", "content_digest", "transition"]

PatchStatus = Literal["pending", "approved", "applied", "rejected", "reverted", "conflict"]

#: What may follow what (issue 4, "Lifecycle"). A patch is born `proposed` and is `pending` as soon as it is stored.
TRANSITIONS: dict[str, frozenset[str]] = {
    "proposed": frozenset({"pending", "rejected"}),  # rejected: it was found in a state that does not verify
    "pending": frozenset({"approved", "rejected", "conflict"}),
    "approved": frozenset(
        {"approved", "applied", "rejected", "conflict"}
    ),  # again: it is about to be written, see `apply`
    "applied": frozenset({"applied", "reverted"}),  # again: it is about to be taken out
    "conflict": frozenset({"rejected"}),
    "rejected": frozenset(),
    "reverted": frozenset(),
}
HISTORY = "history"
CODE_SESSION = "letta-code:"
"""How the sessions of Letta Code's conversations begin: their patches are commands of `code`, beside a server's in one store."""
_GENESIS = "sha256:" + "0" * 64
_SIGNED_STEP = ("from", "to", "by", "at", "reason", "details", "patch", "previous", "key_id")
_MUTABLE = frozenset({"signature", "status", "applied_at", "reverted_at", "metadata"})


def now() -> str:
    """The time in UTC, ISO 8601 with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


@dataclass
class MemoryPatch:
    """One change of one target: the text before and after, why, on what evidence, and where it stands.

    `evidence_refs` are quotes of the session; `metadata` holds what the seed keeps there (`fact_key`, `diff_stats`) and the
    history. Times are ISO 8601 in UTC.

    Raises:
        InvalidPatch: a field has the wrong type, or the status is unknown.
    """

    file_path: str
    before_content: str
    after_content: str
    unified_diff: str
    rationale: str
    evidence_refs: list[str] = field(default_factory=list)
    patch_id: str = field(default_factory=lambda: secrets.token_hex(8))
    created_at: str = field(default_factory=now)
    status: PatchStatus = "pending"
    category: str = "general"
    session_id: str | None = None
    author: str = "living-memory"
    signature: str = ""
    applied_at: str | None = None
    reverted_at: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what no reader of the JSON could use."""
        for name in _TEXTS:
            if not isinstance(getattr(self, name), str):
                raise InvalidPatch(f"{name} is {type(getattr(self, name)).__name__}, not text", "pass a str")
        for name in ("session_id", "applied_at", "reverted_at"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidPatch(f"{name} is neither text nor None", "pass a str, or leave it out")
        for name in _NAMES:
            if _SURROGATE.search(getattr(self, name) or ""):
                raise InvalidPatch(
                    f"{name} {getattr(self, name)!r} holds a lone surrogate, so it cannot be written as UTF-8",
                    "give it as Unicode text",
                )
        if not self.patch_id:
            raise InvalidPatch("the patch id is empty", "leave it out to have one made")
        if self.status not in get_args(PatchStatus):
            raise InvalidPatch(f"there is no status {self.status!r}", f"use one of {', '.join(get_args(PatchStatus))}")
        if not isinstance(self.evidence_refs, list) or not all(isinstance(one, str) for one in self.evidence_refs):
            raise InvalidPatch("evidence_refs is not a list of text", "pass a list of str")
        if not isinstance(self.metadata, dict):
            raise InvalidPatch("metadata is not a dict", "pass a dict")

    @property
    def history(self) -> list[dict[str, Any]]:
        """The transitions so far, oldest first; empty where the patch was made without them, or they are damaged."""
        found = self.metadata.get(HISTORY)
        sound = isinstance(found, list) and all(isinstance(step, dict) for step in found)
        return found if sound else []  # type: ignore[return-value]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MemoryPatch:
        """Read the JSON form; unknown keys are left aside.

        Raises:
            InvalidPatch: a field is missing or has the wrong type.
        """
        if not isinstance(data, Mapping):
            raise InvalidPatch(f"a patch is a JSON object, not {type(data).__name__}")
        known = {one.name for one in fields(cls)}
        try:
            return cls(**{name: value for name, value in data.items() if name in known})
        except TypeError as error:
            raise InvalidPatch(f"this is not a patch: {error}".replace("MemoryPatch.__init__() ", "")) from None

    def sign(self, secret: str = "") -> str:
        """Sign the patch as it stands with HMAC-SHA256 and return the signature; without a secret it says `unsigned`."""
        return self.sign_with(HmacSigner(secret) if secret else UnsignedSigner())

    def sign_with(self, signer: Signer) -> str:
        """Sign the patch as it stands and return the signature."""
        self.signature = signer.sign(self._digest())
        return self.signature

    def verify(self, secret: str = "") -> bool:
        """Return whether the signature was made with this secret over the patch as it stands; never without a secret."""
        return bool(secret) and self.verify_with(HmacVerifier(secret))

    def verify_with(self, verifier: Verifier) -> bool:
        """Return whether a trusted key signed the patch as it stands."""
        return verifier.verify(self._digest(), self.signature)

    def _digest(self) -> str:
        data = self.to_dict()
        del data["signature"]
        return _sha256(data)


_NAMES = ("file_path", "rationale", "patch_id", "category", "session_id", "author")
_SURROGATE = re.compile("[\ud800-\udfff]")
_TEXTS = (
    *("file_path", "before_content", "after_content", "unified_diff", "rationale"),
    *("patch_id", "created_at", "status", "category", "author", "signature"),
)


def content_digest(patch: MemoryPatch) -> str:
    """Return `sha256:<hex>` over everything that no transition changes: what a reviewer decided about."""
    data = {name: value for name, value in patch.to_dict().items() if name not in _MUTABLE}
    data["metadata"] = {name: value for name, value in patch.metadata.items() if name != HISTORY}
    return _sha256(data)


def transition(
    patch: MemoryPatch,
    to: PatchStatus,
    *,
    by: str,
    reason: str = "",
    signer: Signer,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Move a patch on: append the signed step to its history, set the status and sign the whole.

    Raises:
        IllegalTransition: the table does not allow it.
    """
    steps = patch.history
    born = not steps and (to == "pending" or "untrusted" in (details or {}))
    come_from = "proposed" if born else patch.status
    if to not in TRANSITIONS[come_from]:
        raise IllegalTransition(
            f"Patch {patch.patch_id} has status '{patch.status}', it cannot become '{to}'",
            f"from '{patch.status}' it can become {_listed(TRANSITIONS[patch.status])}",
        )
    step: dict[str, Any] = {
        "from": come_from,
        "to": to,
        "by": by,
        "at": now(),
        "reason": reason,
        "details": dict(details or {}),
        "patch": content_digest(patch),
        "previous": steps[-1]["hash"] if steps else _GENESIS,
        "key_id": signer.key_id,
    }
    step["hash"] = _sha256(step)
    step["signature"] = signer.sign(step["hash"])
    patch.metadata = {**patch.metadata, HISTORY: [*steps, step]}
    patch.status = to
    if to == "applied" and come_from != "applied":
        patch.applied_at = step["at"]
    elif to == "reverted":
        patch.reverted_at = step["at"]
    patch.sign_with(signer)


def check_trust(patch: MemoryPatch, verifier: Verifier | None) -> None:
    """Return if the patch may be acted on: its history holds together and a trusted key signed it all.

    Without a verifier only unsigned patches pass: a signature that nobody can check is worth nothing.

    Raises:
        UntrustedPatch: naming what does not verify, and what to do.
    """
    _check_history(patch, verifier)
    algorithm = signature_algorithm(patch.signature)
    if verifier is None:
        if algorithm != "unsigned":
            raise UntrustedPatch(
                f"the signature of patch {patch.patch_id} ({algorithm}) cannot be checked: no key is configured",
                "configure the key it was signed with",
            )
        return
    if algorithm == "unsigned":
        raise UntrustedPatch(
            f"patch {patch.patch_id} is unsigned, and a key is configured",
            "reject it and propose it again with the key, or work without a key",
        )
    if not patch.verify_with(verifier):
        raise UntrustedPatch(
            f"the signature of patch {patch.patch_id} is not that of a trusted key over this content",
            "reject it and propose it again; trust the key it was signed with only if you know it",
        )
    if not patch.history:
        raise UntrustedPatch(f"patch {patch.patch_id} has no history", "reject it and propose it again")


_UNKNOWN_KEY = "is not signed by a trusted key"


def _check_history(patch: MemoryPatch, verifier: Verifier | None) -> None:
    if HISTORY not in patch.metadata:
        return
    fault = _fault_in_history(patch, verifier)
    if fault:
        remedy = "reject it and propose it again"
        if fault.endswith(_UNKNOWN_KEY):
            remedy += (
                "; or trust the key, if you know it: a reviewer's as PHIONYX_LETTA_REVIEWERS lists it, "
                "the server's as PHIONYX_LETTA_VERIFY_KEY"
            )
        raise UntrustedPatch(f"the history of patch {patch.patch_id} does not verify: {fault}", remedy)


def _fault_in_history(patch: MemoryPatch, verifier: Verifier | None) -> str | None:
    steps = patch.metadata[HISTORY]
    if not isinstance(steps, list) or not steps or not all(isinstance(step, dict) for step in steps):
        return "it is not a list of steps"
    digest, previous, status = content_digest(patch), _GENESIS, steps[0].get("from")
    if not isinstance(status, str) or status not in TRANSITIONS or (verifier is not None and status != "proposed"):
        return f"it begins with {status!r}"
    for number, step in enumerate(steps, start=1):
        if not isinstance(step.get("to"), str) or step.get("from") != status or step["to"] not in TRANSITIONS[status]:
            return f"step {number} goes from {step.get('from')!r} to {step.get('to')!r}"
        try:
            found = _sha256({name: step[name] for name in _SIGNED_STEP})
        except (KeyError, InvalidPatch):
            return f"step {number} is incomplete"
        if (
            step.get("hash") != found
            or step["previous"] != previous
            or set(step) != {*_SIGNED_STEP, "hash", "signature"}
        ):
            return f"step {number} was changed, or one before it removed"
        if step["patch"] != digest:
            return f"step {number} is about other content"
        if verifier is not None and not verifier.verify(found, step["signature"]):
            return f"step {number} {_UNKNOWN_KEY}"
        previous, status = found, step["to"]
    return None if status == patch.status else f"it ends with {status!r}, the patch says {patch.status!r}"


def _sha256(data: Mapping[str, Any]) -> str:
    try:
        text = encode(dict(data))
    except JSON_ERRORS as error:
        raise InvalidPatch(
            f"the patch is not JSON: {type(error).__name__}", "keep text, numbers, lists and dicts in it"
        ) from None
    return "sha256:" + hashlib.sha256(text.encode("ascii")).hexdigest()


def _listed(statuses: frozenset[str]) -> str:
    return " or ".join(f"'{one}'" for one in sorted(statuses)) or "nothing"
