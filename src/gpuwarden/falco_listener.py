"""Takes what Falco's http_output posts.

A body proves nothing about who sent it: whoever reaches the address can post events. So it is a
loopback address unless asked for otherwise, and what comes is a claim. Names are never resolved.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from gpuwarden.errors import Malformed, Unavailable, UsageError
from gpuwarden.falco_http import LIMITS, Limits, Server
from gpuwarden.falco_losses import ListenerCounts
from gpuwarden.sensors.falco import Body, FalcoDrop, FalcoEvent, parse_body

Take = Callable[[list[FalcoEvent | FalcoDrop]], None]

QUEUE_LIMIT: Final = 4096
"""Events that wait for the daemon."""
_CLOSE_SECONDS: Final = 5.0


class FalcoListener:
    """Listens from ``start`` to ``close``; ``take`` is called on a thread of the listener's own.

    ``address`` is ``HOST:PORT`` with a literal address or ``localhost``; port 0 picks a free one.
    Errors: UsageError for an address that cannot be used; Unavailable when it cannot be bound.
    """

    def __init__(
        self,
        address: str,
        take: Take,
        path: str = "/",
        *,
        allow_remote: bool = False,
        token: str | None = None,
        queue_limit: int = QUEUE_LIMIT,
        limits: Limits = LIMITS,
    ) -> None:
        if not path.startswith("/"):
            raise UsageError(f"--falco-listen: the path {path!r} does not begin with /")
        if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
            raise UsageError("--falco-listen: the token is empty or has unusual characters")
        self.host, self._asked_port = parse_address(address, allow_remote=allow_remote)
        self.path, self.token, self.limits = path, token, limits
        self._take, self._queue_limit = take, queue_limit
        self._lock = threading.Condition()
        self._parsing = threading.Lock()
        self._queue: deque[list[FalcoEvent | FalcoDrop]] = deque()
        self._waiting = 0
        self._counts = ListenerCounts()
        self._closing = threading.Event()
        self._server: Server | None = None
        self._threads: list[threading.Thread] = []

    @property
    def port(self) -> int:
        """Where it listens, once it does."""
        return self._asked_port if self._server is None else int(self._server.server_address[1])

    def start(self) -> FalcoListener:
        try:
            server = self._server = Server((self.host, self._asked_port), self)
        except OSError as error:
            raise Unavailable(
                f"--falco-listen {self.host}:{self._asked_port}: {error.strerror or error}",
                remedy="another program may listen there: choose another port",
            ) from error
        for name, work in (
            ("falco-listen", lambda: server.serve_forever(poll_interval=0.05)),
            ("falco-take", self._hand_over),
        ):
            self._threads.append(threading.Thread(target=work, name=name, daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """Takes no more; what waits is handed over first, as far as that goes in 5 s."""
        self._closing.set()
        if self._server is not None:
            self._server.end()
        with self._lock:
            self._lock.notify_all()
        until = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            if lost := sum(map(len, self._queue)):
                self._count(failed=lost, trouble=f"{lost} events were left when it was closed")
                self._queue.clear()

    def __enter__(self) -> FalcoListener:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def counts(self) -> ListenerCounts:
        with self._lock:
            return self._counts

    # -------------------------------------------------------------- from the requests' threads

    def _count(self, *, trouble: str = "", **more: int) -> None:
        with self._lock:
            values: dict[str, Any] = {n: getattr(self._counts, n) + v for n, v in more.items()}
            if trouble:
                values["last_trouble"] = trouble[:300]
            self._counts = replace(self._counts, **values)

    def accept(self, data: bytes, *, text: bool) -> tuple[int, str]:
        """(status, one line) for a body; its events are in the queue when the status is 200."""
        try:
            # One at a time: a body may become many times its size.
            with self._parsing:
                body = parse_body(data, text=text)
        except Malformed as error:
            body = Body([], [str(error)])
        self._count(requests=1)
        if body.malformed:
            self._count(malformed=len(body.malformed), trouble=body.malformed[0])
        if not body.taken:
            return 400, body.malformed[0]
        with self._lock:
            if self._closing.is_set() or self._waiting + len(body.taken) > self._queue_limit:
                lost = len(body.taken)
                self._count(refused=lost, trouble=f"{lost} events found the queue full")
                return 503, f"{self._waiting} events wait; these are not taken"
            self._queue.append(body.taken)
            self._waiting += len(body.taken)
            self._lock.notify_all()
        if body.malformed:
            return 200, f"{len(body.taken)} taken; {body.malformed[0]}"
        return 200, ""

    def reject(self, trouble: str) -> None:
        """Counts a request that was none."""
        self._count(rejected=1, trouble=trouble)

    def _hand_over(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._closing.is_set():
                    self._lock.wait()
                if not self._queue:
                    return
                batch = self._queue.popleft()
            drops = sum(isinstance(one, FalcoDrop) for one in batch)
            try:
                self._take(batch)
            except Exception as error:  # noqa: BLE001 - the daemon's trouble must not end listening
                self._count(failed=len(batch), trouble=f"{type(error).__name__}: {error}")
            else:
                self._count(events=len(batch) - drops, drops=drops)
            with self._lock:
                # Only now: what the daemon works on still takes room.
                self._waiting -= len(batch)


def parse_address(text: str, *, allow_remote: bool = False) -> tuple[str, int]:
    """(address, port) of ``127.0.0.1:2801``, ``[::1]:2801`` or ``localhost:2801``.

    Errors: UsageError; also for an address that others can reach, without ``allow_remote``.
    """
    host, colon, port_text = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not (port_text.isascii() and port_text.isdigit()):
        raise UsageError(f"--falco-listen {text}: not of the form ADDRESS:PORT")
    port = int(port_text[:6])
    if port > 65535:
        raise UsageError(f"--falco-listen {text}: a port is at most 65535")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError as error:
        raise UsageError(
            f"--falco-listen {text}: {host!r} is not an address; names are not resolved"
        ) from error
    if not address.is_loopback and not allow_remote:
        raise UsageError(
            f"--falco-listen {text}: others can reach that address, and could post made-up events",
            remedy="listen on 127.0.0.1, or allow remote senders and set a token",
        )
    return str(address), port
