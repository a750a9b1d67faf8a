"""Which way of seeing device opens works on this machine, found out by trying."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct
from msgspec.structs import replace

from gpuwarden.errors import Denied, GpuwardenError, Malformed, Unavailable, UsageError
from gpuwarden.host import Host
from gpuwarden.probes import ways as ways_of_bpf
from gpuwarden.probes.events import Source
from gpuwarden.probes.loader import WAYS, DeviceOpenProbe
from gpuwarden.probes.poll import HolderPoll
from gpuwarden.probes.settings import Number, Settings
from gpuwarden.probes.ways import Way
from gpuwarden.sensors.device_nodes import Majors

POLL: Source = "proc poll"


class Refusal(Struct, frozen=True):
    """A way that does not work here, why, and what would help."""

    way: str
    reason: str
    remedy: str = ""


class Choice(Struct, frozen=True):
    """The way that is used and those that were tried before it; one of the two is set."""

    way: str
    """For people; ``source`` is the name that it and its events have."""
    source: Source = POLL
    probe: DeviceOpenProbe | None = None
    poll: HolderPoll | None = None
    limits: str = ""
    """What this way cannot see or do."""
    can_deny: bool = False
    refused: tuple[Refusal, ...] = ()

    def __str__(self) -> str:
        text = f"device opens are seen by {self.way}"
        if self.limits:
            text += f" ({self.limits})"
        return "; ".join([text, *(f"not by {one.way}: {one.reason}" for one in self.refused)])


def watched_numbers(majors: Majors) -> set[Number]:
    """What to watch for the accelerators that /proc/devices and /proc/misc name."""
    return {(major, None) for major in majors.names} | {(10, minor) for minor in majors.misc}


@contextmanager
def chosen(
    devices: Iterable[Number],
    settings: Settings | None = None,
    *,
    host: Host | None = None,
    object_path: str | None = None,
    ways: Sequence[str] | None = None,
) -> Iterator[Choice]:
    """The best way that loads, of ``WAYS`` or of those in ``ways``; if none does, polling /proc.

    Where only the return values of a way cannot be had, it is used without them.
    Errors: UsageError for a way that there is not.
    """
    settings = settings or Settings()
    numbers = set(devices)
    refused: list[Refusal] = []
    for way, title, wanted in _tries(settings, ways):
        probe = DeviceOpenProbe(numbers, wanted, host=host, way=way.name, object_path=object_path)
        try:
            probe.__enter__()
        except (Unavailable, Denied, Malformed) as error:
            refused.append(_refusal(title, error))
            continue
        try:
            yield Choice(
                way=title,
                source=way.name,
                probe=probe,
                limits=way.limits,
                can_deny=way.can_deny,
                refused=tuple(refused),
            )
        finally:
            probe.close()
        return
    poll = HolderPoll(host)
    yield Choice(way="polling /proc", poll=poll, limits=poll.limits, refused=tuple(refused))


def _tries(settings: Settings, names: Sequence[str] | None) -> Iterator[tuple[Way, str, Settings]]:
    """Each way with its title and settings, in the order in which they are tried."""
    for name in names or ():
        if name not in WAYS:
            raise UsageError(f"{name}: none of the ways {', '.join(WAYS)}")
    for name in WAYS:
        if names is not None and name not in names:
            continue
        way = ways_of_bpf.BY_NAME[name]
        if settings.return_values and not way.gives_results:
            yield way, f"eBPF ({name}, return values)", settings
        yield way, f"eBPF ({name})", replace(settings, return_values=False)


def _refusal(way: str, error: GpuwardenError) -> Refusal:
    return Refusal(way, str(error), error.remedy)
