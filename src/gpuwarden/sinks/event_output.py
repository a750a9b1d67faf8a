"""Event lines to standard output, without waiting for whoever reads it."""

from __future__ import annotations

import threading
import time
from collections import deque

from gpuwarden.sinks.lines import StdoutSink

LIMIT_BYTES = 8 << 20
"""What may wait; a line that has no room is dropped and counted."""
BATCH_BYTES = 64 << 10


class EventOutput:
    """A thread that writes; ``put`` takes a line from any other and never waits for the reader.

    Events are not spooled as findings are: what nobody reads in time is lost, and ``dropped`` says
    how many lines that are.
    """

    def __init__(self, descriptor: int = 1, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self.dropped = 0
        self._sink = StdoutSink(descriptor)
        self._limit_bytes = limit_bytes
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._ending = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, line: bytes) -> None:
        """Takes a line, without its end."""
        with self._changed:
            if self._bytes + len(line) > self._limit_bytes:
                self.dropped += 1
                return
            self._lines.append(line)
            self._bytes += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="events", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, seconds: float = 2.0) -> bool:
        """Waits for what is not written yet; False when it is still not."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._ending = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(max(deadline - time.monotonic(), 0.0))
            return not self._thread.is_alive()
        return True

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._lines:
                    if self._ending:
                        return
                    self._changed.wait()
                batch: list[bytes] = []
                size = 0
                while self._lines and size < BATCH_BYTES:
                    batch.append(self._lines.popleft())
                    size += len(batch[-1])
            outcome = self._sink.write(b"".join(line + b"\n" for line in batch))
            with self._changed:
                # Until it is written it takes up room.
                self._bytes -= size
                if outcome.kind != "delivered":
                    self.dropped += len(batch)
