"""Posting to a web server that is not trusted: no redirects, an end in time whatever it does, and a short answer.

The standard library's ``http.client``, because the base install has no HTTP client and this needs none of what one adds: it
runs in a thread of its own, follows nothing, keeps no cookies and asks no proxy. Errors and names show the host alone: a path
or a header may be a secret.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from phionyx_letta.errors import SettingsError, SinkError
from phionyx_letta.version import __version__

__all__ = ["Answer", "Endpoint"]

#: Longest answer that is read, bytes.
MAX_ANSWER = 65_536
_HEADER = re.compile(r"([A-Za-z0-9!#$%&'*+.^_`|~-]+):[ \t]*([\x20-\x7e]*)")
_PATH = re.compile(r"[\x21-\x7e]*")


@dataclass(frozen=True)
class Answer:
    """What the server said."""

    status: int
    body: bytes


class Endpoint:
    """One URL, with the header that opens it."""

    def __init__(
        self,
        url: str,
        *,
        header: str | None = None,
        timeout: float = 10.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Take the URL to post to.

        Args:
            url: ``https://…``; ``http://…`` only where the host is this one (localhost, 127.0.0.0/8, ::1).
            header: one line, as ``Authorization: Bearer …``; never shown.
            timeout: for the whole exchange, s.
            tls: the certificates to trust; those of the system by default.

        Raises:
            SettingsError: the URL or the header cannot be used.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except (ValueError, TypeError, AttributeError):
            raise SettingsError("the URL of a sink cannot be read", "give https://host/path") from None
        self.name = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}" + (f":{port}" if port else "")
        if parts.scheme not in ("https", "http") or not re.fullmatch(r"[0-9A-Za-z.:_-]+", host):
            raise SettingsError("the URL of a sink is not one of a web server", "give https://host/path")
        if parts.scheme == "http" and not _is_loopback(host):
            raise SettingsError(f"{self.name} would be sent to unencrypted", "give an https:// URL")
        if parts.username is not None or parts.fragment or not _PATH.fullmatch(parts.path + parts.query):
            raise SettingsError(f"the URL of {self.name} has more than host and path", "give a token as a header")
        self._secure = parts.scheme == "https"
        self._host, self._port = host, port
        self._path, self._query = parts.path, f"?{parts.query}" if parts.query else ""
        self._headers = _headers(header, self.name)
        self._timeout = timeout
        self._tls = tls

    def post(self, body: bytes, content_type: str, *, below: str = "") -> Answer:
        """Post and return the answer, whatever its status; ``below`` is added to the path.

        Raises:
            SinkError: no whole answer came within the timeout, or it is too long, or it is a redirect.
        """
        end = time.monotonic() + self._timeout
        connection = self._connection()
        cut = threading.Event()
        watchdog: threading.Timer | None = None
        try:
            connection.connect()  # with its TLS handshake ends in time by itself
            watchdog = threading.Timer(max(0.0, end - time.monotonic()), _cut, (connection.sock, cut))
            watchdog.daemon = True
            watchdog.start()
            path = (self._path.rstrip("/") + below if below else self._path) or "/"
            connection.request("POST", path + self._query, body, {**self._headers, "Content-Type": content_type})
            response = connection.getresponse()
            answer = Answer(response.status, response.read(MAX_ANSWER + 1))
            if cut.is_set():
                raise TimeoutError
            if response.length and len(answer.body) <= MAX_ANSWER:  # http.client takes the end of a connection for one
                raise http.client.IncompleteRead(answer.body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = "timed out" if cut.is_set() else _reason(error)
            raise SinkError(f"{self.name} gave no answer: {reason}", "it is tried again") from error
        finally:
            if watchdog is not None:
                watchdog.cancel()
            connection.close()
        if len(answer.body) > MAX_ANSWER:
            raise SinkError(f"{self.name} gave an answer of more than {MAX_ANSWER} bytes", "check what runs there")
        if 300 <= answer.status < 400:
            raise SinkError(
                f"{self.name} answered with a redirect ({answer.status}), which is not followed",
                "give the URL it leads to",
            )
        return answer

    def _connection(self) -> http.client.HTTPConnection:
        if not self._secure:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout, context=self._tls)


def _cut(sock: socket.socket, cut: threading.Event) -> None:
    """End an exchange that takes too long: a server may send a byte now and then for ever."""
    cut.set()
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _headers(header: str | None, name: str) -> dict[str, str]:
    out = {"User-Agent": f"phionyx-letta/{__version__}", "Connection": "close"}
    if header:
        found = _HEADER.fullmatch(header)
        if not found or found[1].lower() in (
            "host",
            "content-length",
            "transfer-encoding",
            "content-type",
            "connection",
        ):
            raise SettingsError(f"the header for {name} cannot be used", "give one line, as Authorization: Bearer …")
        out[found[1]] = found[2]
    return out


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _reason(error: Exception) -> str:
    """In a few words of ours or the system's, never the server's."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    if isinstance(error, TimeoutError):
        return "timed out"
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
