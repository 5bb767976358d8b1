"""The blocks of Letta agents over Letta's REST API, with `letta-client`: where a reviewer's patches are written.

Letta's API has no compare-and-swap. A server armed with the plugin adds it: the claim that goes along names the hash of what the
block must hold, and in the transaction of the write it is compared (409). A server that is not armed is not written to.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from phionyx_letta.diff import content_hash
from phionyx_letta.errors import DiffConflictError, MissingExtra, TargetRefused
from phionyx_letta.memory.blocks import PREFIX, BlockName, parse_block_name
from phionyx_letta.memory.claims import CLAIM_HEADER, SERVER_HEADER, make_claim
from phionyx_letta.memory.targets import Target, Targets
from phionyx_letta.signing import Signer

if TYPE_CHECKING:
    from letta_client import Letta

    from phionyx_letta.ledger.sql import SqlLedger

__all__ = ["FilesAndBlocks", "RestBlocks"]

_TRIES = 3
#: Agents listed at once.
_PAGE = 1000
#: Conversations listed at once.
_CONVERSATIONS = 200
_FINDS_OUT = "if it was in the middle of a write, apply the patch again: that finds out"
#: How long the envelope of a write is waited for, s: the sealer looks ten times a second.
_SEALED_WITHIN = 10.0


class RestBlocks:
    """All blocks of a Letta server."""

    def __init__(
        self,
        base_url: str,
        signer: Signer,
        *,
        token: str | None = None,
        ledger: SqlLedger | None = None,
        read_only: bool = False,
    ) -> None:
        """Nothing is connected yet.

        Args:
            base_url: of the server.
            signer: the reviewer's; the server must trust its key.
            token: of the API, where it wants one.
            ledger: where the envelopes of writes are looked up.
            read_only: whether blocks that are read-only may be written.
        """
        self.base_url = base_url
        self.signer = signer
        self.ledger = ledger
        self.read_only = read_only
        self._token = token
        self._client: Letta | None = None

    def names(self) -> list[str]:
        """Return none: patches name their blocks, nobody goes through all of a server's."""
        return []

    def about(self, name: str) -> str:
        """Return the description of a block."""
        return str(self.resolve(name).fetched().get("description") or "")

    def resolve(self, name: str) -> RestBlock:
        """Return the block of this name.

        Raises:
            TargetRefused: it does not name a block.
        """
        return RestBlock(self, name, parse_block_name(name))

    def client(self) -> Letta:
        """The client.

        Raises:
            MissingExtra: `letta-client` is not installed.
            TargetRefused: the URL names no server.
        """
        if self._client is None:
            try:
                from letta_client import Letta
            except ImportError as error:
                raise MissingExtra(
                    "blocks are written with letta-client, which is not installed", "pip install letta-client"
                ) from error
            import httpx

            try:
                url = httpx.URL(self.base_url)
            except (httpx.InvalidURL, UnicodeError):
                raise self.unusable() from None
            if url.scheme not in ("http", "https") or not url.host:
                raise self.unusable()
            token = self._token or "none"
            if not token.isascii() or not token.isprintable():  # it goes into a header
                raise TargetRefused("the token of the Letta server is not ASCII text", "set PHIONYX_LETTA_SERVER_TOKEN")
            self._client = Letta(base_url=self.base_url, api_key=token, max_retries=0, timeout=60.0)
        return self._client

    def unusable(self) -> TargetRefused:
        """The error for a URL that names no server."""
        return TargetRefused(
            f"{self.base_url!r} is not the URL of a server",
            "set PHIONYX_LETTA_SERVER_URL to http://host:port or https://…",
        )


class RestBlock:
    """A `Target`: one block of one agent."""

    def __init__(self, server: RestBlocks, name: str, parts: BlockName) -> None:
        """Use `RestBlocks.resolve`."""
        self._server = server
        self._parts = parts
        self._armed = False
        self.name = name
        self.identity = parts.block_id
        self.label = parts.label
        self.records_itself = True

    @property
    def limit(self) -> int | None:
        """The block's limit now."""
        found = self.fetched().get("limit")
        return found if isinstance(found, int) else None

    def read(self) -> str | None:
        """Return the block's value.

        Raises:
            TargetRefused: it was deleted or detached, may not be written, or the server does not answer.
        """
        found = self.fetched()
        if self._parts.agent_id not in self._agents() and not self._a_conversations():
            raise TargetRefused(
                f"the block {self.label} ({self.identity}) is not attached to {self._parts.agent_id} any more",
                "attach it again, or reject the patch: it was meant for that agent's memory",
            )
        if found.get("read_only") and not self._server.read_only:
            raise TargetRefused(
                f"the block {self.label} ({self.identity}) is read-only",
                "make it writable, or set PHIONYX_LETTA_SESSION_READ_ONLY=1 if patches may change it",
            )
        return str(found.get("value") or "")

    def notes(self) -> list[str]:
        """Say who else has the block, and what became of it."""
        found, agents = self.fetched(), self._agents()
        said = []
        if found.get("label") != self.label:
            said.append(f"it is called {found.get('label')} now")
        others = sorted(set(agents) - {self._parts.agent_id})
        if others:
            said.append(f"shared: it is also the memory of {', '.join(others)}")
        if found.get("read_only"):
            said.append("read-only for the agent")
        return said

    def write(self, expected: str | None, text: str, cause: Mapping[str, Any] | None = None) -> str | None:
        """Replace what was reviewed by `text`, through Letta; see `Target.write`."""
        for attempt in range(_TRIES):
            found = self.read()
            if found != expected:
                raise self._conflict(expected, found)
            limit = self.limit
            if limit is not None and len(text) > limit:
                raise TargetRefused(
                    f"the block {self.label} may hold {limit} characters, and would hold {len(text)}",
                    "trim it: `memory review -i` edits the patch; or raise the block's limit",
                )
            if not self._armed:
                raise TargetRefused(
                    f"the Letta server at {self._server.base_url} is not armed with phionyx-letta: a write would leave no evidence",
                    "start it with PHIONYX_LETTA_ENABLE=1, or name another with PHIONYX_LETTA_SERVER_URL",
                )
            hashes = content_hash(expected or ""), content_hash(text)
            if self._sent(text, make_claim(cause or {}, self.identity, *hashes, self._server.signer)):
                return self._envelope(cause or {})
            time.sleep(0.1 * (attempt + 1))  # somebody wrote at the same moment: look whether it was this
        raise self._conflict(expected, self.read())

    def _sent(self, text: str, claim: str) -> bool:
        """Have Letta write it; False where somebody else did at the same moment."""
        answer = self._asked(
            lambda client: client.blocks.with_raw_response.update(
                self.identity, value=text, extra_headers={CLAIM_HEADER: claim}
            ),
            conflict=True,
        )
        if answer is None:
            return False
        if self._block_in(answer).get("value") != text:  # a redirect, or a server in between, took it for a question
            raise self._foreign("it was asked to write, and answers with another text")
        return True

    def fetched(self) -> dict[str, Any]:
        """Return the block as the server has it.

        Raises:
            TargetRefused: it was deleted, or the server does not answer, or not as Letta does.
        """
        answer = self._asked(
            lambda client: client.blocks.with_raw_response.retrieve(self.identity, extra_headers={SERVER_HEADER: "?"})
        )
        self._armed = bool(answer.headers.get(SERVER_HEADER))
        return self._block_in(answer)

    def _block_in(self, answer: Any) -> dict[str, Any]:
        found = self._json_of(answer)
        if not isinstance(found, dict) or found.get("id") != self.identity or not isinstance(found.get("value"), str):
            raise self._foreign("its answer is no block of Letta's")
        return found

    def _agents(self) -> list[str]:
        """All agents that have the block; the server gives a thousand at a time."""
        found: dict[str, None] = {}
        while True:
            page = self._agents_after(next(reversed(found), None))
            before = len(found)
            found.update(dict.fromkeys(page))
            if len(page) < _PAGE or len(found) == before:
                return list(found)

    def _agents_after(self, last: str | None) -> list[str]:
        more: dict[str, Any] = {"after": last} if last is not None else {}
        answer = self._asked(
            lambda client: client.blocks.agents.with_raw_response.list(self.identity, include=[], limit=_PAGE, **more)
        )
        page = self._json_of(answer)
        if not isinstance(page, list) or not all(isinstance(one, dict) and "id" in one for one in page):
            raise self._foreign("its answer is no list of agents")
        return [str(one["id"]) for one in page]

    def _json_of(self, answer: Any) -> Any:
        """What the server answered; not as `letta-client` reads it, which takes any text for a block."""
        try:
            return json.loads(answer.http_response.content)
        except (ValueError, RecursionError):
            raise self._foreign("its answer is not JSON") from None

    def _foreign(self, why: str) -> TargetRefused:
        return TargetRefused(
            f"what answers at {self._server.base_url} is not a Letta server: {why}",
            f"set PHIONYX_LETTA_SERVER_URL to the server itself; {_FINDS_OUT}",
        )

    def _a_conversations(self) -> bool:
        """Whether it is the copy of a block that one of the agent's conversations has for itself."""
        params: dict[str, Any] = {"agent_id": self._parts.agent_id, "limit": _CONVERSATIONS}
        while True:
            listed = self._asked(partial(_conversations, params))
            if not isinstance(listed, list) or not all(isinstance(one, dict) and "id" in one for one in listed):
                raise self._foreign("its answer is no list of conversations")
            if any(self.identity in (one.get("isolated_block_ids") or ()) for one in listed):
                return True
            if len(listed) < _CONVERSATIONS:
                return False
            params = {**params, "after": listed[-1]["id"]}

    def _asked(self, ask: Callable[[Letta], Any], *, conflict: bool = False) -> Any:
        """Ask the server; None for a conflict, where that is to be looked into."""
        client = self._server.client()
        import httpx
        import letta_client

        try:
            return ask(client)
        except letta_client.ConflictError as error:
            if conflict:
                return None
            raise self._refused(error) from None
        except letta_client.NotFoundError:
            raise TargetRefused(
                f"the block {self.label} ({self.identity}) does not exist any more",
                "reject the patch; a session that names the fact again proposes it anew",
            ) from None
        except letta_client.APIStatusError as error:
            raise self._refused(error) from None
        except (letta_client.LettaError, httpx.HTTPError, httpx.StreamError) as error:
            cause = error.__cause__ or error
            raise TargetRefused(
                f"the Letta server at {self._server.base_url} does not answer: {type(cause).__name__}",
                f"start it, or set PHIONYX_LETTA_SERVER_URL; {_FINDS_OUT}",
            ) from None
        except (httpx.InvalidURL, UnicodeError):
            raise self._server.unusable() from None

    def _refused(self, error: Any) -> TargetRefused:
        body = error.body if isinstance(error.body, dict) else {}
        said = str(body.get("detail") or error)[:500]
        return TargetRefused(f"Letta refused the write of {self.label} (HTTP {error.status_code}): {said}")

    def _conflict(self, expected: str | None, found: str | None) -> DiffConflictError:
        return DiffConflictError(self.name, content_hash(expected or ""), content_hash(found or ""))

    def _envelope(self, cause: Mapping[str, Any]) -> str | None:
        """The reference of the write's envelope, once it is sealed; None where it is not, or cannot be looked up."""
        ledger, deadline = self._server.ledger, time.monotonic() + _SEALED_WITHIN
        while ledger is not None:
            for row in reversed(ledger.select(block_id=self.identity, limit=20, newest=True)):
                said = _said(row.body)
                if all(said.get(name) == cause.get(name) for name in ("patch_id", "event")):
                    return f"envelope://{row.current_hash}"
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return None


class FilesAndBlocks:
    """`Targets` for a reviewer: blocks by their names, everything else is a file."""

    def __init__(self, files: Targets, blocks: RestBlocks) -> None:
        """Take both."""
        self._files = files
        self._blocks = blocks

    def names(self) -> list[str]:
        """Return the files."""
        return self._files.names()

    def about(self, name: str) -> str:
        """Return what it is for."""
        return self._of(name).about(name)

    def resolve(self, name: str) -> Target:
        """Return the target of this name."""
        return self._of(name).resolve(name)

    def _of(self, name: str) -> Targets:
        return self._blocks if name.startswith(PREFIX) else self._files


def _said(body: str) -> dict[str, Any]:
    try:
        found = json.loads(body)["subject"]["metadata"]["living_memory"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _conversations(params: dict[str, Any], client: Letta) -> Any:
    return client.get("/v1/conversations/", cast_to=object, options={"params": params})
