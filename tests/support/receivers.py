"""A real HTTP receiver on loopback that can be down, slow, wrong, hang, or hang up."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Request(NamedTuple):
    """What came, if it was answered as wanted or not."""

    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Receiver:
    """``behaviour`` is looked at for each request and may be changed at any time.

    A number answers with that status; ``hang`` reads and never answers, ``drip`` answers a byte at
    a time and never ends, ``reset`` ends the connection hard, ``redirect`` sends elsewhere.
    """

    def __init__(self) -> None:
        self.behaviour: int | str = 200
        self.answer = b"{}"
        self.requests: list[Request] = []
        """All that came whole, also those that were answered badly."""
        self.accepted: list[Request] = []
        """Those that got a status of 2xx."""
        self._released = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        # Bound for as long as this is there: nobody else gets the port while nobody listens.
        kept = socket.socket()
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        weakref.finalize(self, kept.close)
        self.port = int(kept.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def up(self) -> Receiver:
        """Listens; before that and after ``down``, connections are refused."""
        receiver = self
        self._released.clear()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                receiver._answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", self.port), Handler)
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        return self

    def down(self) -> None:
        self._released.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> Receiver:
        return self.up()

    def __exit__(self, *_: object) -> None:
        self.down()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        size = int(handler.headers.get("Content-Length", "0"))
        body = handler.rfile.read(size)
        if len(body) < size:
            # Whoever sent it is gone: as any receiver, this one takes no half request.
            handler.close_connection = True
            return
        request = Request(handler.path, dict(handler.headers.items()), body)
        self.requests.append(request)
        behaviour = self.behaviour
        handler.close_connection = True
        if behaviour == "hang":
            self._released.wait(60)
        elif behaviour == "drip":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while not self._released.wait(0.02):
                handler.wfile.write(b"a")
        elif behaviour == "reset":
            handler.connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            handler.connection.close()
        elif behaviour == "redirect":
            handler.send_response(307)
            handler.send_header("Location", f"{self.url}/elsewhere")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        else:
            assert isinstance(behaviour, int)
            if 200 <= behaviour < 300:
                self.accepted.append(request)
            handler.send_response(behaviour)
            handler.send_header("Content-Length", str(len(self.answer)))
            handler.end_headers()
            handler.wfile.write(self.answer)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Polls a condition; fails the test when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
