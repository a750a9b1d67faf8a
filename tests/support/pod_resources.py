"""A pod-resources service on a unix socket: the wire is real, the kubelet behind it is ours."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import grpc

from gpuwarden.wire.unix_grpc import load


class PodResources:
    """Answers List with ``pods``, a message's keyword arguments; may refuse or hang."""

    def __init__(self) -> None:
        self.messages = load("gpuwarden.wire.podresources_pb2")
        self.pods: list[dict[str, Any]] = []
        self.refuse: Any = None
        self.hang: Event | None = None
        self.raw: bytes | None = None

    def answer(self, _request: Any, context: Any) -> Any:
        if self.refuse is not None:
            context.abort(self.refuse, "refused for the test")
        if self.hang is not None:
            self.hang.wait(30)
        if self.raw is not None:
            return self.raw
        return self.messages.ListPodResourcesResponse(
            pod_resources=[self.messages.PodResources(**pod) for pod in self.pods]
        )


@contextmanager
def pod_resources(socket: Path) -> Iterator[PodResources]:
    """A server on ``socket`` for as long as the block runs."""
    socket.parent.mkdir(parents=True, exist_ok=True)
    state = PodResources()
    messages = state.messages
    handler = grpc.method_handlers_generic_handler(
        "v1.PodResourcesLister",
        {
            "List": grpc.unary_unary_rpc_method_handler(
                state.answer,
                request_deserializer=messages.ListPodResourcesRequest.FromString,
                response_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
            )
        },
    )
    pool = ThreadPoolExecutor(2)
    server = grpc.server(pool)
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"unix://{socket}")
    server.start()
    try:
        yield state
    finally:
        if state.hang is not None:
            state.hang.set()
        server.stop(0).wait()
        pool.shutdown()
