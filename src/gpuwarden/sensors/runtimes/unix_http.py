"""HTTP GET over a unix socket, with a deadline and a bounded answer."""

from __future__ import annotations

import http.client
from types import TracebackType
from typing import Final

from gpuwarden.errors import Denied, Malformed, TimedOut, Unavailable
from gpuwarden.wire.peer import connect, listener_uid

ANSWER_LIMIT_BYTES: Final = 4 << 20


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, deadline_seconds: float) -> None:
        super().__init__("localhost", timeout=deadline_seconds)
        self._path = path
        self._deadline_seconds = deadline_seconds

    def connect(self) -> None:
        self.sock = connect(self._path, self._deadline_seconds)


class UnixHttp:
    """An HTTP service at a unix socket; a context manager.

    ``uid`` is who listens there. Errors on entering: Unavailable, TimedOut, Denied.
    """

    def __init__(self, path: str, *, deadline_seconds: float) -> None:
        self.path = path
        self.uid = -1
        self._deadline_seconds = deadline_seconds
        self._connection = _Connection(path, deadline_seconds)

    def __enter__(self) -> UnixHttp:
        with connect(self.path, self._deadline_seconds) as probe:
            self.uid = listener_uid(probe)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    def get(self, target: str) -> bytes | None:
        """The body, or None for 404. Errors: Unavailable, TimedOut, Denied, Malformed."""
        try:
            self._connection.request("GET", target)
            response = self._connection.getresponse()
            body = response.read(ANSWER_LIMIT_BYTES + 1)
        except TimeoutError as error:
            self._connection.close()
            raise TimedOut(f"{self.path}: no answer in time") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection.close()
            what = f"{type(error).__name__}: {str(error)[:200]}"
            raise Unavailable(f"{self.path}: {what}") from error
        if len(body) > ANSWER_LIMIT_BYTES:
            self._connection.close()
            raise Malformed(f"{self.path}: an answer of more than {ANSWER_LIMIT_BYTES} bytes")
        if response.status == 404:
            return None
        if response.status in (401, 403):
            raise Denied(f"{self.path}: refused with status {response.status}")
        if response.status != 200:
            raise Unavailable(f"{self.path}: answered with status {response.status}")
        return body
