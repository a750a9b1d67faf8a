"""Serves the agent's state over HTTP: ``/metrics`` for Prometheus, ``/healthz`` for a probe.

Nothing that a caller sends changes anything. Whoever can connect may be hostile: few connections
at once, small requests, a deadline for each, no names of callers resolved.
"""

from __future__ import annotations

import http.client
import http.server
import ipaddress
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from io import BufferedIOBase
from typing import Any, NamedTuple

import msgspec

from gpuwarden.errors import Unavailable, UsageError
from gpuwarden.outputs.metrics_state import AgentState, blindness
from gpuwarden.outputs.words import escape

MAX_CONNECTIONS = 8
REQUEST_LINE_BYTES = 2048
HEADER_BYTES = 16 << 10
SILENCE_SECONDS = 5.0
"""How long a caller may send, or take, nothing."""
CONNECTION_SECONDS = 20.0
"""A connection ends after this long, whatever it is doing."""
LOOK_UP_SECONDS = 0.25
"""How often it looks for connections that are late, and whether it is to end."""
REASONS_SHOWN = 16
REASON_CHARACTERS = 300
TEXT = "text/plain; charset=utf-8"
PATHS = ("/metrics", "/healthz")
EXAMPLES = "as 9835 (loopback), :9835 (loopback), 127.0.0.1:9835, [::1]:9835 or 0.0.0.0:9835"


class Address(NamedTuple):
    """An IP address to listen on, and a port; port 0 takes a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """What ``--metrics`` takes; a port alone means loopback. Errors: UsageError."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise _unusable(text, "it ends in no port")
    if host.startswith("[") and host.endswith("]"):
        host, wanted = host[1:-1], 6
    else:
        wanted = 4
    if not host and wanted == 4:
        return Address("127.0.0.1", int(port))
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # Names are not resolved: which address an agent listens on is not left to a name server.
        raise _unusable(text, "its host is no IP address") from None
    if address.version != wanted or "%" in host:
        raise _unusable(text, "an IPv6 address stands in brackets, without a zone")
    return Address(str(address), int(port))


def _unusable(text: str, why: str) -> UsageError:
    return UsageError(f"--metrics: {text[:80]!r} is not an address: {why}", remedy=EXAMPLES)


class Health(msgspec.Struct, frozen=True):
    """The answer of ``/healthz``."""

    status: str
    reasons: tuple[str, ...] = ()


def health(state: AgentState, monotonic_seconds: float) -> Health:
    """``ok``, or ``blind`` with the reasons."""
    found = blindness(state, monotonic_seconds)
    if not found:
        return Health("ok")
    told = [
        escape(f"{one.cause}: {one.reason}"[:REASON_CHARACTERS]) for one in found[:REASONS_SHOWN]
    ]
    if len(found) > REASONS_SHOWN:
        told.append(f"and {len(found) - REASONS_SHOWN} more")
    return Health("blind", tuple(told))


class MetricsServer:
    """Listens between ``start`` and ``stop``; ``state`` is called on a thread of its own."""

    def __init__(
        self,
        address: Address,
        state: Callable[[], AgentState],
        *,
        passed: socket.socket | None = None,
    ) -> None:
        """``passed`` already listens, and is used in place of ``address``."""
        self._wanted = address
        self._state = state
        self._passed = passed
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Errors: Unavailable, when the address cannot be had."""
        try:
            self._server = _Server(self._wanted, self._state, self._passed)
        except OSError as error:
            raise Unavailable(
                f"--metrics: cannot listen on {self._wanted}: {error.strerror or error}",
                remedy="choose another port, or see who has it: ss -ltnp",
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(LOOK_UP_SECONDS,), daemon=True
        )
        self._thread.name = "metrics"
        self._thread.start()

    @property
    def address(self) -> Address:
        """Where it listens, with the port that it got."""
        if self._server is None:
            return self._wanted
        host, port = self._server.server_address[:2]
        return Address(str(host), int(port))

    def stop(self) -> None:
        """Ends it, and with it the connections; a second time does nothing."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        if self._thread is not None:
            self._thread.join(2.0)
            self._thread = None

    def __enter__(self) -> MetricsServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """At most ``MAX_CONNECTIONS`` at once; one more is closed unanswered."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 2 * MAX_CONNECTIONS
    allow_reuse_address = True

    def __init__(
        self, address: Address, state: Callable[[], AgentState], passed: socket.socket | None
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.state = state
        self._lock = threading.Lock()
        self._until: dict[socket.socket, float] = {}
        """The connections there are, and when each has to be over."""
        if passed is not None:
            # The library makes a socket in any case; one of the network may be forbidden here.
            self.address_family = socket.AF_UNIX
        super().__init__((address.host, address.port), _Handler, bind_and_activate=passed is None)
        if passed is not None:
            self.socket.close()
            self.socket = passed
            self.server_address = passed.getsockname()
            self.server_name, self.server_port = "", self.server_address[1]

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Not HTTPServer's own: that asks a name server what we are called.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = len(self._until) >= MAX_CONNECTIONS
            if not full:
                self._until[request] = time.monotonic() + CONNECTION_SECONDS
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._until.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Ends what is late: a caller that drips a byte now and then is never silent."""
        now = time.monotonic()
        self._hang_up(lambda until: until < now)

    def server_close(self) -> None:
        super().server_close()
        self._hang_up(lambda _: True)

    def _hang_up(self, late: Callable[[float], bool]) -> None:
        with self._lock:
            for request, until in self._until.items():
                if late(until):
                    # Its thread then reads an end, and closes it.
                    with suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away is no news; a defect was answered with 500."""


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection, one request."""

    server: _Server
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.1"
    timeout = SILENCE_SECONDS

    def version_string(self) -> str:
        return "gpuwarden"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        pass

    def handle_one_request(self) -> None:
        self.close_connection = True
        self.requestline, self.request_version, self.command = "", self.protocol_version, ""
        try:
            self.raw_requestline = self.rfile.readline(REQUEST_LINE_BYTES + 1)
            if not self.raw_requestline:
                return
            if len(self.raw_requestline) > REQUEST_LINE_BYTES:
                self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG)
                return
            if self._parse():
                self._route()
            self.wfile.flush()
        except TimeoutError:
            pass
        finally:
            self.close_connection = True

    def _parse(self) -> bool:
        whole = self.rfile
        self.rfile = _Bounded(whole)  # type: ignore[assignment]
        try:
            return self.parse_request()
        finally:
            self.rfile = whole

    def _route(self) -> None:
        path = self.path.partition("?")[0]
        if path not in PATHS:
            self._refuse(HTTPStatus.NOT_FOUND)
        elif self.command not in ("GET", "HEAD"):
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, ("Allow", "GET, HEAD"))
        else:
            try:
                status, content_type, body = self._answer(path)
            except Exception:  # noqa: BLE001 - a defect must not end the endpoint
                self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR)
                return
            self._send(status, content_type, body)

    def _answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        state = self.server.state()
        now = time.monotonic()
        if path == "/healthz":
            answer = health(state, now)
            status = HTTPStatus.OK if answer.status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
            return status, "application/json", msgspec.json.encode(answer) + b"\n"
        # Imported here: the client library is paid for by those that are scraped.
        from gpuwarden.outputs.prometheus import negotiated

        accept = ",".join(self.headers.get_all("Accept", []))
        content_type, body = negotiated(state, accept, monotonic_seconds=now)
        return HTTPStatus.OK, content_type, body

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library refuses by itself, without repeating what was sent."""
        self._refuse(HTTPStatus(code))

    def _refuse(self, status: HTTPStatus, *headers: tuple[str, str]) -> None:
        self._send(status, TEXT, f"{status.value} {status.phrase}\n".encode(), *headers)

    def _send(
        self, status: HTTPStatus, content_type: str, body: bytes, *headers: tuple[str, str]
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Bounded:
    """The header lines of a request, up to ``HEADER_BYTES`` in all."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self._left = HEADER_BYTES

    def readline(self, size: int) -> bytes:
        """The library's own error when there is more; it answers 431 to that."""
        line = self._file.readline(min(size, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("headers")
        return line
