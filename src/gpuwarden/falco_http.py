"""Events that are posted: HTTP for the few, bounded in time, bytes and connections."""

from __future__ import annotations

import hmac
import io
import socket
import socketserver
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any, Final, NamedTuple, Protocol

from gpuwarden import __version__
from gpuwarden.sensors.falco import BODY_LIMIT_BYTES

HEAD_LIMIT_BYTES: Final = 16 << 10
DRAIN_LIMIT_BYTES: Final = 8 << 20
_JSON_TYPES: Final = frozenset({"application/json", "application/x-ndjson"})
_TEXT_TYPE: Final = "text/plain"


class Limits(NamedTuple):
    """How much one sender may take of us."""

    connections: int = 16
    """At a time; more wait."""
    request_seconds: float = 10.0
    """For a whole request, however its bytes drip in."""
    idle_seconds: float = 60.0
    """Between the requests of one connection."""


LIMITS: Final = Limits()


class Receiver(Protocol):
    """Who takes the bodies."""

    path: str
    token: str | None
    limits: Limits

    def accept(self, data: bytes, *, text: bool) -> tuple[int, str]:
        """(status, one line) for a body."""

    def reject(self, trouble: str) -> None:
        """Told of each request that had no body to take."""


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A thread a connection, up to the limit. Errors: OSError if the address cannot be bound."""

    # Not HTTPServer, which looks up the name of its address.
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], receiver: Receiver) -> None:
        self.receiver = receiver
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._slots = threading.BoundedSemaphore(receiver.limits.connections)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def end(self) -> None:
        """Stops ``serve_forever`` and hangs up on whoever is connected."""
        self._closing.set()
        self.shutdown()
        self.server_close()
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        # Further connections wait in the kernel's queue, so that Falco loses nothing by it.
        while not self._slots.acquire(timeout=0.1):
            if self._closing.is_set():
                self.shutdown_request(request)
                return
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            self._slots.release()
            self.shutdown_request(request)
            self.receiver.reject("no thread could be started for a request")

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.discard(request)
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        self.receiver.reject("a request ended with an error of ours")


class _TooMuch(OSError):
    """More bytes than a request's head may have."""


class _Incoming(io.RawIOBase):
    """A socket's bytes, with one deadline and one budget for each request."""

    def __init__(self, connection: socket.socket, limits: Limits) -> None:
        self._socket, self._limits = connection, limits
        self.begun, self.left_bytes, self._until = False, 0, 0.0

    def readable(self) -> bool:
        return True

    def next_request(self, *, first: bool) -> None:
        """Who never sent anything may not wait as long as who did."""
        limits = self._limits
        self.begun, self.left_bytes = False, HEAD_LIMIT_BYTES
        self._until = time.monotonic() + (limits.request_seconds if first else limits.idle_seconds)

    def readinto(self, buffer: Any) -> int:
        left_seconds = self._until - time.monotonic()
        if left_seconds <= 0:
            raise TimeoutError
        if self.left_bytes <= 0:
            raise _TooMuch
        self._socket.settimeout(left_seconds)
        count = self._socket.recv_into(memoryview(buffer)[: self.left_bytes])
        self.left_bytes -= count
        if not self.begun:
            self.begun = True
            self._until = time.monotonic() + self._limits.request_seconds
        return count


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = f"gpuwarden/{__version__}"
    sys_version = ""
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        server = self.server
        if not isinstance(server, Server):
            raise TypeError("not a server of this module")
        self.receiver, self._answered = server.receiver, False
        self._incoming = _Incoming(self.connection, server.receiver.limits)
        self.rfile.close()
        self.rfile = io.BufferedReader(self._incoming)

    def __getattr__(self, name: str) -> Any:
        # http.server looks for a method a verb.
        if name.startswith("do_"):
            return lambda: self._refuse(405, "events are posted")
        raise AttributeError(name)

    def handle_one_request(self) -> None:
        self._incoming.next_request(first=not self._answered)
        # What an answer needs, if there is to be one before the request is read.
        self.command, self.requestline, self.request_version = "", "", self.protocol_version
        try:
            super().handle_one_request()
        except _TooMuch:
            self._refuse(431, "the head of the request is too long")
        except OSError:
            self.close_connection = True
            if self._incoming.begun:
                self.receiver.reject("a request broke off")

    def log_error(self, *_: Any) -> None:
        # http.server catches a deadline of ours itself, says so here and closes.
        if self._incoming.begun:
            self.receiver.reject("a request came too slowly, or is not HTTP")

    def log_message(self, *_: Any) -> None:
        pass

    def handle_expect_100(self) -> bool:
        # Asked before the body is sent: one that would not be taken need not come.
        if self._body_length() is None:
            return False
        return super().handle_expect_100()

    def do_POST(self) -> None:
        length = self._body_length()
        if length is None:
            return
        self._incoming.left_bytes = max(self._incoming.left_bytes, length)
        data = self.rfile.read(length)
        if len(data) < length:
            self.close_connection = True
            self.receiver.reject("a request broke off")
            return
        status, line = self.receiver.accept(data, text=self._content_type() == _TEXT_TYPE)
        self._answer(status, line)
        self._answered = True

    def _content_type(self) -> str:
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    def _body_length(self) -> int | None:
        """The length of a body that will be taken; without one the answer has been sent."""
        refusal = self._refusal()
        if refusal is not None:
            self._refuse(*refusal)
            return None
        return int(self.headers["Content-Length"])

    def _refusal(self) -> tuple[int, str] | None:
        receiver, length = self.receiver, self.headers.get("Content-Length", "")
        if receiver.token is not None:
            given = self.headers.get("Authorization", "").encode("utf-8", "replace")
            if not hmac.compare_digest(given, f"Bearer {receiver.token}".encode()):
                return 401, "the token is missing or wrong"
        if self.headers.get("Origin") is not None:
            return 403, "a web page may not post here"
        if self.path != receiver.path:
            return 404, "events are posted elsewhere"
        if self.command != "POST":
            return 405, "events are posted"
        if self.headers.get("Transfer-Encoding") is not None or not length:
            return 411, "the request has no Content-Length"
        if len(self.headers.get_all("Content-Length", [])) > 1 or not (
            length.isascii() and length.isdigit()
        ):
            return 400, "the Content-Length is not one number"
        if len(length) > 9 or int(length) > BODY_LIMIT_BYTES:
            return 413, f"a body may have {BODY_LIMIT_BYTES} bytes"
        if self._content_type() not in (*_JSON_TYPES, _TEXT_TYPE):
            return 415, "events are application/json, or text/plain without json_output"
        if self.headers.get("Content-Encoding", "identity").lower() != "identity":
            return 415, "the body is compressed"
        return None

    def _answer(self, status: int, line: str, *, close: bool = False) -> None:
        body = line.encode("utf-8", "backslashreplace")
        # One line, whatever the body that it speaks of held.
        body = bytes(byte if byte >= 0x20 else 0x20 for byte in body[:500])
        body += b"\n" if body else b""
        self.connection.settimeout(self.receiver.limits.request_seconds)
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if status == 405:
            self.send_header("Allow", "POST")
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if close:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, line: str) -> None:
        self.receiver.reject(line)
        self.close_connection = True
        with suppress(OSError):
            self._answer(status, line, close=True)
            # What is not read when a connection is closed can cost the sender the answer.
            self.connection.shutdown(socket.SHUT_WR)
            until = time.monotonic() + self.receiver.limits.request_seconds
            left = DRAIN_LIMIT_BYTES
            while left > 0 and (seconds := until - time.monotonic()) > 0:
                self.connection.settimeout(seconds)
                count = len(self.connection.recv(64 << 10))
                if not count:
                    break
                left -= count
