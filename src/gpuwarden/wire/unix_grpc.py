"""Unary gRPC calls over a unix socket, each with a deadline.

grpcio is an optional dependency and its import takes 0.16 s and 21 MB: it is imported when a
socket has been found and its listener is known, never before.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from gpuwarden.errors import Denied, GpuwardenError, Malformed, TimedOut, Unavailable
from gpuwarden.wire.peer import connect, listener_uid

MESSAGE_LIMIT_BYTES = 32 << 20
INSTALL_REMEDY = "pip install 'gpuwarden[kubernetes]'"
CRI_SOCKETS = (
    ("containerd", "/run/containerd/containerd.sock"),
    ("containerd", "/run/k3s/containerd/containerd.sock"),
    ("containerd", "/run/k0s/containerd.sock"),
    ("containerd", "/var/snap/microk8s/common/run/containerd.sock"),
    ("crio", "/run/crio/crio.sock"),
)
"""(runtime, where it listens by default)."""
_BATCH = 64
"""Calls under way at once; a runtime answers them side by side."""


class NotKnown(Unavailable):
    """The other end answered that it has no such thing."""


class NotInstalled(Unavailable):
    """grpcio or protobuf is missing on this machine."""


class UnixChannel:
    """A gRPC channel to the socket at ``path``; a context manager.

    ``uid`` is who listens there. Errors on entering: Unavailable, TimedOut, Denied, NotInstalled.
    """

    def __init__(self, path: str, *, deadline_seconds: float) -> None:
        self.path = path
        self.deadline_seconds = deadline_seconds
        self.uid = -1
        self._grpc: Any = None
        self._channel: Any = None

    def __enter__(self) -> UnixChannel:
        with connect(self.path, self.deadline_seconds) as probe:
            self.uid = listener_uid(probe)
        # The C core writes about every failed call to our standard error otherwise.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        self._grpc = load("grpc")
        self._channel = self._grpc.insecure_channel(
            f"unix://{self.path}",
            options=[
                ("grpc.default_authority", "localhost"),
                ("grpc.enable_http_proxy", 0),
                ("grpc.enable_retries", 0),
                ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def call(self, method: str, request: Any, response: Any) -> Any:
        """One call of ``/package.Service/Method``. Errors: Unavailable, TimedOut, Denied,
        Malformed, NotKnown."""
        answer = self.calls(method, [request], response)[0]
        if isinstance(answer, GpuwardenError):
            raise answer
        return answer

    def calls(self, method: str, requests: Sequence[Any], response: Any) -> list[Any]:
        """Many calls at once; each place holds the answer or the error that came instead."""
        ask = self._channel.unary_unary(
            method,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )
        answers: list[Any] = []
        for at in range(0, len(requests), _BATCH):
            waiting = [
                ask.future(request, timeout=self.deadline_seconds)
                for request in requests[at : at + _BATCH]
            ]
            for future in waiting:
                try:
                    answers.append(future.result())
                except self._grpc.RpcError as error:
                    answers.append(self._translated(method, error))
            if any(isinstance(answer, TimedOut) for answer in answers[at:]):
                late = TimedOut(f"{self.path}: gave no answer in time; not asked again")
                answers.extend(late for _ in requests[len(answers) :])
                break
        return answers

    def _translated(self, method: str, error: Any) -> GpuwardenError:
        code = error.code()
        codes = self._grpc.StatusCode
        what = f"{self.path}: {method.rpartition('/')[2]}"
        details = str(error.details() or "")[:300]
        if code is codes.NOT_FOUND:
            return NotKnown(f"{what}: {details}")
        if code is codes.DEADLINE_EXCEEDED:
            return TimedOut(f"{what}: no answer within {self.deadline_seconds:g} s")
        if code in (codes.PERMISSION_DENIED, codes.UNAUTHENTICATED):
            return Denied(f"{what}: {details}")
        if "deserializ" in details.lower():
            return Malformed(f"{what}: the answer is not the message it should be")
        return Unavailable(f"{what}: {code.name.lower()}: {details}")


def load(module: str) -> Any:
    """Imports grpcio or one of our generated modules. Errors: NotInstalled."""
    try:
        with warnings.catch_warnings():
            # Some protobuf releases warn about code generated for the major release before.
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise NotInstalled(
            f"{module.partition('.')[0]}: not usable here ({error})", remedy=INSTALL_REMEDY
        ) from error
    except Exception as error:  # protobuf raises its own VersionError on a mismatch
        raise NotInstalled(
            f"{module}: does not load with this protobuf ({error})", remedy=INSTALL_REMEDY
        ) from error
