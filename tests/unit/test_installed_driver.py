"""The installed driver's modules: known wherever they are met, of files that are root's alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from gpuwarden.code.digest import sha256
from gpuwarden.codescan import installed_driver as driver
from gpuwarden.errors import Unavailable
from gpuwarden.host import Host
from gpuwarden.model import DriverFile, Gap, LibraryCheck
from gpuwarden.sensors.seen import Seen
from tests.support.wheels import built, library

Installed = Callable[[Sequence[DriverFile | Gap]], None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Lets the sensor tell these files, of which those named ``refused`` do not pass its check."""

    def install(found: Sequence[DriverFile | Gap]) -> None:
        def read(host: Host, seen: Seen) -> Iterator[DriverFile | Gap]:
            if not found:
                raise Unavailable("no library of a GPU driver is installed")
            yield from found

        def check(path: str) -> LibraryCheck:
            return LibraryCheck(path=path, accepted="refused" not in path)

        monkeypatch.setattr("gpuwarden.sensors.driver_files.read", read)
        monkeypatch.setattr(driver, "check_library", check)

    return install


def file(path: Path, seed: int, writable_by: tuple[int, ...] = ()) -> DriverFile:
    path.write_bytes(library(built(seed)))
    return DriverFile(
        library="libcuda", path=str(path), device="8:1", inode=seed, writable_by=writable_by
    )


def test_the_drivers_modules_are_known_by_digest(tmp_path: Path, installed: Installed) -> None:
    own = file(tmp_path / "libcuda.so.580.95.05", 1)
    installed([own, Gap(sensor="driver_files", what="more", reason="too many")])
    known = driver.installed_driver(Host())
    origin = known.lookup(sha256(built(1)))
    assert origin is not None
    assert (origin.source, origin.version, origin.file) == ("driver", "580.95.05", own.path)
    assert known.lookup(sha256(built(2))) is None


def test_a_file_that_others_can_change_is_not_believed(
    tmp_path: Path, installed: Installed
) -> None:
    installed(
        [
            file(tmp_path / "libcuda.so.1", 1, writable_by=(1000,)),
            file(tmp_path / "libcuda.so.refused", 2),
        ]
    )
    assert driver.driver_paths(Host()) == []
    assert len(driver.installed_driver(Host())) == 0


def test_no_driver_knows_nothing(installed: Installed) -> None:
    installed([])
    assert len(driver.installed_driver(Host())) == 0


def test_a_mounted_hosts_driver_is_not_this_ones(tmp_path: Path, installed: Installed) -> None:
    installed([file(tmp_path / "libcuda.so.1", 1)])
    assert len(driver.installed_driver(Host(str(tmp_path)))) == 0
