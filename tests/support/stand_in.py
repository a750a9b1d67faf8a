"""The live machine with stand-ins for accelerators, for machines that have none.

A node of a major number without a driver cannot be opened, so tests make a node of a driver that
every kernel has and let the scan read another number there::

    os.mknod(folder / "nvidia0", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    host = StandInHost(nodes={str(folder / "nvidia0"): (195, 0)})

- ``nodes`` (path → number): that node alone, known by its inode, whatever name or mount a process
  opened it by; the real /dev/null stays /dev/null. A missing path is an error.
- ``link_paths`` (path → number): a character device that a descriptor's link calls so, such as
  ``/dev/nvidia0``: for containers, whose runtime makes a node of its own, with an inode of its own
  (``--device FOLDER/nvidia0:/dev/nvidia0``). ``/dev/null`` cannot be given here.
- ``numbers`` (real number → number): each node of a rarely used driver, such as (1, 7), which is
  /dev/full: holds for renamed, copied and deleted nodes everywhere, so for every process of the
  machine that has it open.

``/proc/devices`` reads as if the drivers for these numbers were loaded, under the names in
``MAJOR_NAMES``; the numbers' nodes are found in /dev only if they are there (``nodes`` are also
listed as ``/dev/<name>`` when ``list_nodes`` is set).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from msgspec.structs import replace

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import FILE_LIMIT_BYTES, FileStatus, Host, OpenFiles

Number = tuple[int, int]

MAJOR_NAMES = {
    195: "nvidia",
    226: "drm",
    261: "accel",
    508: "nvidia-caps",
    509: "nvidia-uvm",
    235: "kfd",
}


class StandInHost(Host):
    """The live ``Host``, where some nodes answer with an accelerator's device number.

    A test's own children are seen, unlike a scan's.
    """

    children_are_ours = False

    def __init__(
        self,
        nodes: Mapping[str, Number] | None = None,
        *,
        link_paths: Mapping[str, Number] | None = None,
        numbers: Mapping[Number, Number] | None = None,
        list_nodes: bool = False,
        root: str = "/",
    ) -> None:
        super().__init__(root)
        if "/dev/null" in (link_paths or {}):
            raise ValueError("/dev/null is everybody's; give a node of its own instead")
        self.nodes = dict(nodes or {})
        self.link_paths = dict(link_paths or {})
        self.numbers = dict(numbers or {})
        self.listed = {"/dev/" + os.path.basename(p): p for p in self.nodes} if list_nodes else {}
        self._inodes: dict[tuple[Number, int], Number] = {}
        for path, number in self.nodes.items():
            real = os.stat(path)
            if not stat.S_ISCHR(real.st_mode):
                raise ValueError(f"{path} is not a character device")
            device = (os.major(real.st_dev), os.minor(real.st_dev))
            self._inodes[device, real.st_ino] = number

    def _number(self, status: FileStatus, path: str) -> FileStatus:
        if not status.is_character_device:
            return status
        number = self._inodes.get((status.device, status.inode)) or self.numbers.get(status.special)
        if number is None and self.link_paths and path.startswith("/proc/"):
            try:
                target = os.fsdecode(os.readlink(self._prefix + path))
            except OSError:
                return status
            number = self.link_paths.get(target.removesuffix(" (deleted)"))
        elif number is None:
            number = self.link_paths.get(path)
        return status if number is None else replace(status, special=number)

    def status(self, path: str) -> FileStatus:
        return self._number(super().status(self.listed.get(path, path)), path)

    def link_target_status(self, path: str) -> FileStatus:
        return self._number(super().link_target_status(path), path)

    def open_files(self, directory: str) -> OpenFiles:
        found = super().open_files(directory)
        devices = []
        for descriptor, _ in found.devices:
            try:
                status = self.link_target_status(f"{directory}/{descriptor}")
            except GpuwardenError:
                continue
            devices.append((descriptor, status.special))
        return OpenFiles(devices, found.sockets, found.unread)

    def names(self, path: str) -> list[str]:
        names = super().names(path)
        if path == "/dev":
            names = sorted({*names, *(os.path.basename(p) for p in self.listed)})
        return names

    def read_bytes(self, path: str, limit: int = FILE_LIMIT_BYTES) -> bytes:
        data = super().read_bytes(path, limit)
        if path != "/proc/devices":
            return data
        given = [*self.nodes.values(), *self.link_paths.values(), *self.numbers.values()]
        majors = sorted({major for major, _ in given})
        lines = "".join(f"{m:3} {MAJOR_NAMES.get(m, f'driver{m}')}\n" for m in majors)
        head, block, tail = data.partition(b"\nBlock devices:")
        return head.rstrip(b"\n") + b"\n" + lines.encode() + block + tail
