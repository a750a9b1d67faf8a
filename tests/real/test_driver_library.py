"""A process on a stand-in GPU that loads its own driver library, in a scan of this machine."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuwarden.finding import Finding
from gpuwarden.judge import judge
from gpuwarden.model import DriverFile, Snapshot
from gpuwarden.policy import Policy
from gpuwarden.scan import take_snapshot
from gpuwarden.sensors import driver_files
from gpuwarden.sensors.seen import Seen
from tests.support.fakenvml import build_library
from tests.support.idle import idlers
from tests.support.packages import require_root
from tests.support.stand_in import StandInHost

pytestmark = pytest.mark.real

LOAD = """
    import ctypes, os, sys
    held = os.open(sys.argv[1], os.O_RDWR)
    libraries = [ctypes.CDLL(path) for path in sys.argv[2:]]
    print("loaded")
"""


def of(pid: int, snapshot: Snapshot) -> list[Finding]:
    report = judge(snapshot, Policy())
    found = [f for f in report.findings if f.rule == "driver_library_unexpected"]
    return [f for f in found if f.subject.pid == pid]


def test_a_loaded_library_is_held_against_the_installed_ones(tmp_path: Path) -> None:
    require_root()
    node = tmp_path / "nvidia0"
    os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    root = tmp_path / "host"
    folder = root / "usr/lib64"
    folder.mkdir(parents=True)
    installed = Path(shutil.copy(build_library(), folder / "libnvidia-ml.so.570.00"))
    (folder / "libnvidia-ml.so.1").symlink_to(installed.name)
    other = Path(shutil.copy(installed, tmp_path / "libnvidia-ml.so.1"))
    with idlers() as started:
        honest, _ = started.python(LOAD, str(node), str(folder / "libnvidia-ml.so.1"))
        liar, _ = started.python(LOAD, str(node), str(other))
        snapshot = take_snapshot(StandInHost(nodes={str(node): (195, 0)}))
        # The files that a scan of a machine with this driver would have told.
        machine = StandInHost(root=str(root))
        files = tuple(f for f in driver_files.read(machine, Seen()) if isinstance(f, DriverFile))
    assert [file.path for file in files] == ["/usr/lib64/libnvidia-ml.so.570.00"]
    assert {honest, liar} <= {holder.pid for holder in snapshot.holders}
    with_driver = replace(snapshot, driver_files=files)
    assert of(honest, with_driver) == []
    (found,) = of(liar, with_driver)
    assert found.severity == "error"
    assert str(other) in found.evidence[0].text
    # Where no driver's files are known, a place that no driver has still tells.
    assert len(of(liar, replace(snapshot, driver_files=()))) == 1
