"""Every sensor in running order: later ones look where earlier ones found something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from gpuwarden.host import Host
from gpuwarden.model import AnyFact
from gpuwarden.sensors import (
    amd,
    containers,
    device_nodes,
    drm,
    hidden,
    holders,
    kernel_log,
    persistence,
    subjects,
)
from gpuwarden.sensors.seen import Seen


class Sensor(NamedTuple):
    """A name and the function that yields its facts; NVML's is started apart, in a child."""

    name: str
    read: Callable[[Host, Seen], Iterator[AnyFact]]


def _started_apart(host: Host, seen: Seen) -> Iterator[AnyFact]:
    raise NotImplementedError("the runner starts NVML before the others and reads it here")


SENSORS: tuple[Sensor, ...] = (
    Sensor("device_nodes", device_nodes.read),
    Sensor("kernel_log", kernel_log.read),
    Sensor("nvml", _started_apart),
    Sensor("amd", amd.read),
    Sensor("holders", holders.read),
    Sensor("drm", drm.read),
    Sensor("processes", subjects.read_processes),
    Sensor("hidden", hidden.read),
    Sensor("containers", containers.read),
    Sensor("sockets", subjects.read_sockets),
    Sensor("persistence", persistence.read),
)
SENSOR_NAMES: tuple[str, ...] = tuple(sensor.name for sensor in SENSORS)
