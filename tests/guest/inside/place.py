"""The guest as a place to open devices in: nodes, control groups, processes."""

from __future__ import annotations

import ctypes
import glob
import os
import stat
import subprocess
import time
from collections.abc import Callable, Sequence

OPENER = "/opt/checks/opener"
NODES = "/tmp/nodes"
GROUPS = "/sys/fs/cgroup/gpuwarden-test"
MAJOR = 195
GPU = f"{NODES}/nvidia0"
"""A node that really opens; the kernel lists its major as NVIDIA's."""
ABSENT = f"{NODES}/nvidia9"
"""A node of the same major behind which there is no device."""
ALICE = 1234


def insert_modules() -> None:
    """The kernel's modules that were put into the image. Source: finit_module(2)."""
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    for path in sorted(glob.glob("/opt/checks/modules/*.ko")):
        with open(path, "rb") as file:
            if system_call(313, file.fileno(), b"", 0) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


def make_device() -> subprocess.Popen[str]:
    """A device of NVIDIA's major that really opens, and nodes for it."""
    insert_modules()
    device = subprocess.Popen(
        ["/opt/checks/cuse_node", str(MAJOR), "0", "nvidia-frontend"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert device.stdout is not None
    if device.stdout.readline() != "ready\n":
        raise OSError("no device through CUSE")
    os.makedirs(NODES, exist_ok=True)
    wait_for(lambda: any(line.split() == [str(MAJOR), "nvidia-frontend"] for line in devices()))
    for path, minor in ((GPU, 0), (ABSENT, 9), ("/dev/nvidia0", 0)):
        node(path, MAJOR, minor)
    return device


def devices() -> list[str]:
    """The lines of /proc/devices."""
    with open("/proc/devices", encoding="ascii") as file:
        return file.read().splitlines()


def node(path: str, major: int, minor: int, mode: int = 0o666) -> str:
    """A device node for whom ``mode`` says."""
    os.mknod(path, stat.S_IFCHR | mode, os.makedev(major, minor))
    os.chmod(path, mode)
    return path


def group(name: str) -> str:
    """The directory of a control group of ours."""
    path = f"{GROUPS}/{name}"
    os.makedirs(path, exist_ok=True)
    return path


def started(
    argv: Sequence[str], where: str | None = None, uid: int | None = None
) -> subprocess.Popen[str]:
    """A process in a control group, as a user."""

    def prepare() -> None:
        if where is not None:
            with open(f"{where}/cgroup.procs", "w", encoding="ascii") as file:
                file.write("0")
        if uid is not None:
            os.setgid(uid)
            os.setuid(uid)

    return subprocess.Popen(
        argv,
        preexec_fn=prepare,  # noqa: PLW1509 - there are no threads here
        stdout=subprocess.PIPE,
        text=True,
    )


def opened(path: str, where: str | None = None, uid: int | None = None) -> bool:
    """Whether an opener in a control group could open it."""
    child = started([OPENER, "open", path], where, uid)
    said = child.communicate(timeout=60)[0]
    if child.returncode != 0:
        raise OSError(f"the opener ended with {child.returncode}")
    return said.strip() == "1"


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Until it holds. Errors: TimeoutError."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it did not come true")
        time.sleep(0.02)
