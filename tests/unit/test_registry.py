"""The lists of sensors and sources: each entry leads somewhere, and is loaded when it is run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuwarden.errors import GpuwardenError
from gpuwarden.expected.registry import SOURCES, ReadSource
from gpuwarden.host import Host
from gpuwarden.sensors.registry import SENSOR_NAMES, SENSORS, Sensor
from gpuwarden.sensors.seen import Seen

LISTS = ("gpuwarden.sensors.registry", "gpuwarden.expected.registry")
LIGHT = {"gpuwarden.sensors", "gpuwarden.sensors.seen", "gpuwarden.expected", *LISTS}
SHOW = """
import contextlib, sys
from gpuwarden.errors import GpuwardenError
from gpuwarden.expected.registry import SOURCES
from gpuwarden.host import Host
from gpuwarden.sensors.registry import SENSORS
from gpuwarden.sensors.seen import Seen
for sensor in SENSORS:
    if sensor.name in sys.argv[1:]:
        with contextlib.suppress(GpuwardenError):
            list(sensor.read(Host("/nowhere"), Seen()))
print(*(n for n in sys.modules if n.startswith(("gpuwarden.sensors", "gpuwarden.expected"))))
"""


def loaded(*sensors: str) -> set[str]:
    """What a fresh interpreter has loaded of sensors and sources once it ran ``sensors``."""
    done = subprocess.run(
        [sys.executable, "-c", SHOW, *sensors], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_names_are_unique() -> None:
    names = [name for name, _ in SOURCES]
    assert len(set(SENSOR_NAMES)) == len(SENSORS) > 0
    assert len(set(names)) == len(names) > 0


@pytest.mark.parametrize("sensor", [s for s in SENSORS if s.name != "nvml"], ids=lambda s: s.name)
def test_each_sensor_resolves(sensor: Sensor, tmp_path: Path) -> None:
    try:
        list(sensor.read(Host(str(tmp_path)), Seen()))
    except GpuwardenError:
        pass  # nothing is there to be seen; anything else is a broken entry


def test_nvml_is_left_to_the_runner() -> None:
    (nvml,) = (sensor for sensor in SENSORS if sensor.name == "nvml")
    with pytest.raises(NotImplementedError):
        nvml.read(Host(), Seen())


@pytest.mark.parametrize(("name", "read"), SOURCES, ids=[name for name, _ in SOURCES])
def test_each_source_resolves_and_answers_by_its_name(
    name: str, read: ReadSource, tmp_path: Path
) -> None:
    run, workloads = read(Host(str(tmp_path)), Seen())
    assert (run.name, workloads) == (name, [])


def test_the_lists_load_no_sensor_and_no_source() -> None:
    assert loaded() == LIGHT


def test_a_sensor_is_loaded_when_it_is_run() -> None:
    assert loaded("device_nodes") == {*LIGHT, "gpuwarden.sensors.device_nodes"}
