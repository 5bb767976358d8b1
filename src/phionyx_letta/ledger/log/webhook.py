"""A webhook as a sink: each checkpoint is posted to a URL, as the note it is."""

from __future__ import annotations

from phionyx_letta.errors import SinkError
from phionyx_letta.ledger.log.post import Endpoint
from phionyx_letta.ledger.log.sink import Published

__all__ = ["WebhookSink"]


class WebhookSink:
    """Posts the note; any 2xx means that it was taken. What it holds cannot be asked, so it is told the newest again at each start."""

    def __init__(self, endpoint: Endpoint, *, interval: float = 1.0) -> None:
        """Post to this endpoint, at most once in ``interval`` seconds."""
        self._endpoint = endpoint
        self.interval = interval
        self.name = f"webhook {endpoint.name}"

    def deliver(self, offered: Published, /) -> None:
        """Post the checkpoint.

        Raises:
            SinkError: the answer was not 2xx, or there was none.
        """
        answer = self._endpoint.post(offered.note.encode(), "text/plain; charset=utf-8")
        if not 200 <= answer.status < 300:
            raise SinkError(f"{self.name} answered {answer.status}", "check the URL, the header and the receiver's log")
