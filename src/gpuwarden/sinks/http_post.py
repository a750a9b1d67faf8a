"""One POST over http or https: bounded in time and size, redirects not followed."""

from __future__ import annotations

import hashlib
import socket
import threading
import urllib.parse
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import NamedTuple

from gpuwarden import __version__
from gpuwarden.errors import UsageError
from gpuwarden.sinks.sink import DELIVERED, Outcome

TIMEOUT_SECONDS = 10.0
"""For the connection and for each silence of the receiver."""
DEADLINE_SECONDS = 30.0
"""For the whole exchange: a receiver that drips bytes does not hold it any longer."""
ANSWER_BYTES = 64 << 10
BODY_BYTES = 256 << 10

# Statuses that are about what was sent; the same body will not be taken the next time either.
REFUSED = frozenset({400, 413, 415, 422})


class Endpoint(NamedTuple):
    """Where to post."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def shown(self) -> str:
        """Without the path and the query, which may hold a secret."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def digest(self) -> str:
        """Tells endpoints apart without naming them."""
        return hashlib.sha256("\0".join(map(str, self)).encode()).hexdigest()[:16]


def parse_url(text: str, what: str) -> Endpoint:
    """The endpoint of a URL. Errors: UsageError; ``what`` names the place it was given at."""
    if not text.isascii() or any(
        ord(character) <= 0x20 or character == "\x7f" for character in text
    ):
        raise UsageError(f"{what}: a URL has no blanks, control or non-ASCII characters")
    try:
        parts = urllib.parse.urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{what}: not a URL: {error}") from error
    if parts.scheme not in ("http", "https"):
        raise UsageError(f"{what}: a URL that starts with http:// or https:// is needed")
    if not parts.hostname:
        raise UsageError(f"{what}: the URL names no host")
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            f"{what}: user and password in the URL are not supported",
            remedy="put the secret into the path, or a proxy in between that adds it",
        )
    if parts.fragment:
        raise UsageError(f"{what}: a URL to post to has no #fragment")
    target = parts.path or "/"
    if parts.query:
        target += f"?{parts.query}"
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    return Endpoint(parts.scheme, parts.hostname, port, target)


def _connection(endpoint: Endpoint, timeout_seconds: float) -> HTTPConnection:
    if endpoint.scheme == "https":
        import ssl

        return HTTPSConnection(
            endpoint.host,
            endpoint.port,
            timeout=timeout_seconds,
            context=ssl.create_default_context(),
        )
    return HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_seconds)


def post(
    endpoint: Endpoint,
    body: bytes,
    headers: Mapping[str, str],
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Outcome:
    """``delivered`` for a status of 2xx and nothing else."""
    if len(body) > BODY_BYTES:
        return Outcome("refused", f"{len(body)} bytes are more than a request may have")
    connection = _connection(endpoint, timeout_seconds)
    ended = threading.Event()

    connected: list[socket.socket] = []

    def hang_up() -> None:
        ended.set()
        for sock in connected:
            # Not the method of a TLS socket, which changes what the other thread is reading with.
            with suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    watchdog = threading.Timer(deadline_seconds, hang_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        connection.connect()
        connected.append(connection.sock)
        connection.request(
            "POST",
            endpoint.target,
            body=body,
            headers={
                "Content-Type": "application/json",
                "User-Agent": f"gpuwarden/{__version__}",
                "Connection": "close",
                **headers,
            },
        )
        answer = connection.getresponse()
        status = answer.status
        said = answer.read(ANSWER_BYTES)[:200].decode("utf-8", "backslashreplace")
        failure = ""
    except (OSError, HTTPException, ValueError) as error:
        status, said, failure = 0, "", (str(error) or type(error).__name__)[:200]
    finally:
        watchdog.cancel()
        connection.close()
    # First: http.client takes headers that we cut off by hanging up for complete ones.
    if ended.is_set():
        return Outcome("retry", f"no answer within {deadline_seconds:g} s")
    if failure:
        return Outcome("retry", failure)
    if 200 <= status < 300:
        return DELIVERED
    reason = f"it answered {status}: {said}" if said else f"it answered {status}"
    return Outcome("refused" if status in REFUSED else "retry", reason)
