"""Which way of seeing device opens works on this machine, found out by trying."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from msgspec import Struct
from msgspec.structs import replace

from gpuwarden.errors import Denied, GpuwardenError, Malformed, Unavailable
from gpuwarden.host import Host
from gpuwarden.probes.loader import OBJECT, DeviceOpenProbe
from gpuwarden.probes.poll import HolderPoll
from gpuwarden.probes.settings import Number, Settings
from gpuwarden.sensors.device_nodes import Majors


class Refusal(Struct, frozen=True):
    """A way that does not work here, why, and what would help."""

    way: str
    reason: str
    remedy: str = ""


class Choice(Struct, frozen=True):
    """The way that is used and those that were tried before it; one of the two is set."""

    way: str
    probe: DeviceOpenProbe | None = None
    poll: HolderPoll | None = None
    refused: tuple[Refusal, ...] = ()

    def __str__(self) -> str:
        text = f"device opens are seen by {self.way}"
        if self.poll is not None:
            text += f" ({self.poll.limits})"
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
    object_path: str = OBJECT,
) -> Iterator[Choice]:
    """The best way that loads: cgroup/dev, it without return values if only those fail, /proc."""
    settings = settings or Settings()
    numbers = set(devices)
    refused: list[Refusal] = []
    ways = [("eBPF (cgroup/dev)", settings)]
    if settings.return_values:
        ways = [
            ("eBPF (cgroup/dev, return values)", settings),
            ("eBPF (cgroup/dev)", replace(settings, return_values=False)),
        ]
    for way, wanted in ways:
        probe = DeviceOpenProbe(numbers, wanted, host=host, object_path=object_path)
        try:
            probe.__enter__()
        except (Unavailable, Denied, Malformed) as error:
            refused.append(_refusal(way, error))
            continue
        try:
            yield Choice(way=way, probe=probe, refused=tuple(refused))
        finally:
            probe.close()
        return
    yield Choice(way="polling /proc", poll=HolderPoll(host), refused=tuple(refused))


def _refusal(way: str, error: GpuwardenError) -> Refusal:
    return Refusal(way, str(error), error.remedy)
