"""What the driver said in one round, and the same as an answer to a scan's question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from gpuwarden.errors import GpuwardenError
from gpuwarden.model import (
    AccountedProcess,
    Gap,
    Gpu,
    GpuClient,
    LibraryCheck,
    UtilisationSample,
)
from gpuwarden.sensors.seen import Seen

RING_NS = 12 * 10**9
"""How far back a scan finds samples: 72 places of the driver's ring, about 6 a second."""


class Round(Struct, frozen=True, kw_only=True):
    """What the driver said in one round.

    With an ``error`` the facts are those that could be had before it, none in most cases.
    """

    at_ns: int
    """When it was asked for."""
    seconds: float = 0.0
    """From asking to the whole answer."""
    gpus: tuple[Gpu, ...] = ()
    clients: tuple[GpuClient, ...] = ()
    """``samples`` are those since the round before; ``sm_percent`` is the newest of them."""
    unlisted: tuple[GpuClient, ...] = ()
    """Clients of the round before that are not listed now, with their samples since.

    They have left the GPU, unless a gap says that a process list could not be read.
    """
    accounted: tuple[AccountedProcess, ...] = ()
    """Read again every 60 rounds."""
    gaps: tuple[Gap, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    error: GpuwardenError | None = None
    libraries: tuple[LibraryCheck, ...] = ()
    child_pid: int | None = None
    newest: Mapping[tuple[str, int], UtilisationSample] = {}
    """By GPU and pid: the newest sample that any round had."""

    def as_query(self) -> RoundQuery:
        """This round where a scan would ask the driver itself."""
        return RoundQuery(self)


class RoundQuery:
    """Answers a scan out of a round; has what ``NvmlQuery`` has for who reads it."""

    def __init__(self, told: Round) -> None:
        self._round = told
        self.driver_version = told.driver_version
        self.cuda_version = told.cuda_version

    @property
    def child_pid(self) -> int | None:
        """The sampler's child, which holds the driver's device nodes and is not a holder."""
        return self._round.child_pid

    def read(self, seen: Seen) -> Iterator[LibraryCheck | Gpu | GpuClient | AccountedProcess | Gap]:
        """The round's facts, then its error, if any, is raised.

        A client without a sample of its own has the ``sm_percent`` of its newest, where a scan
        would still have found that one.
        """
        del seen
        told = self._round
        yield from told.libraries
        yield from told.gpus
        for client in told.clients:
            yield self._measured(client)
        yield from told.accounted
        yield from told.gaps
        if told.error is not None:
            # It may be raised for many rounds, and must not gather the frames of each.
            raise told.error.with_traceback(None)

    def close(self) -> None:
        """Nothing: the child is the sampler's."""

    def _measured(self, client: GpuClient) -> GpuClient:
        if client.sm_percent is not None or "sm_percent" in client.unread:
            return client
        newest = self._round.newest.get((client.gpu_id, client.pid))
        if newest is None or self._round.at_ns - newest.at_ns > RING_NS:
            return client
        return replace(client, sm_percent=newest.sm_percent, samples=(newest,))
