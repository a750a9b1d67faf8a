"""Every sensor in running order: later ones look where earlier ones found something.

Each is imported when it is first run, so that a scan of few sensors loads few modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from gpuwarden.host import Host
from gpuwarden.model import AnyFact
from gpuwarden.sensors.seen import Seen

ReadSensor = Callable[[Host, Seen], Iterator[AnyFact]]


class Sensor(NamedTuple):
    """A name and the function that yields its facts; NVML's is started apart, in a child."""

    name: str
    read: ReadSensor


def _device_nodes(host: Host, seen: Seen) -> Iterator[AnyFact]:
    from gpuwarden.sensors import device_nodes

    return device_nodes.read(host, seen)


def _driver_files(host: Host, seen: Seen) -> Iterator[AnyFact]:
    from gpuwarden.sensors import driver_files

    return driver_files.read(host, seen)


def _kernel_log(host: Host, seen: Seen) -> Iterator[AnyFact]:
    from gpuwarden.sensors import kernel_log

    return kernel_log.read(host, seen)


def _nvml(host: Host, seen: Seen) -> Iterator[AnyFact]:
    raise NotImplementedError("the runner starts NVML before the others and reads it here")


def _amd(host: Host, seen: Seen) -> Iterator[AnyFact]:
    from gpuwarden.sensors import amd

    return amd.read(host, seen)


def _holders(host: Host, seen: Seen) -> Iterator[AnyFact]:
    from gpuwarden.sensors import holders

    return holders.read(host, seen)


def _drm(host: Host, seen: Seen) -> Iterator[AnyFact]:
    from gpuwarden.sensors import drm

    return drm.read(host, seen)


def _processes(host: Host, seen: Seen) -> Iterator[AnyFact]:
    from gpuwarden.sensors import subjects

    return subjects.read_processes(host, seen)


def _hidden(host: Host, seen: Seen) -> Iterator[AnyFact]:
    from gpuwarden.sensors import hidden

    return hidden.read(host, seen)


def _containers(host: Host, seen: Seen) -> Iterator[AnyFact]:
    from gpuwarden.sensors import containers

    return containers.read(host, seen)


def _sockets(host: Host, seen: Seen) -> Iterator[AnyFact]:
    from gpuwarden.sensors import subjects

    return subjects.read_sockets(host, seen)


def _persistence(host: Host, seen: Seen) -> Iterator[AnyFact]:
    from gpuwarden.sensors import persistence

    return persistence.read(host, seen)


SENSORS: tuple[Sensor, ...] = (
    Sensor("device_nodes", _device_nodes),
    Sensor("driver_files", _driver_files),
    Sensor("kernel_log", _kernel_log),
    Sensor("nvml", _nvml),
    Sensor("amd", _amd),
    Sensor("holders", _holders),
    Sensor("drm", _drm),
    Sensor("processes", _processes),
    Sensor("hidden", _hidden),
    Sensor("containers", _containers),
    Sensor("sockets", _sockets),
    Sensor("persistence", _persistence),
)
SENSOR_NAMES: tuple[str, ...] = tuple(sensor.name for sensor in SENSORS)
