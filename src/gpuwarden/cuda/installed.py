"""This machine's own driver libraries: attached to before anybody maps one."""

from __future__ import annotations

import os
from collections.abc import Iterator

from gpuwarden.cuda.driver_elf import LIBRARIES
from gpuwarden.cuda.file_child import examine_file
from gpuwarden.cuda.slots import Trusted, installed, resolve, trusted
from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.probes.cuda.library import FoundLibrary, LibraryKey
from gpuwarden.sensors.device_nodes import read_majors


class InstalledLibraries:
    """Those where a loader looks, if root alone can change them; their descriptors stay open."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.found: dict[LibraryKey, FoundLibrary] = {}

    def close(self) -> None:
        for one in self.found.values():
            os.close(one.descriptor)
        self.found.clear()

    def look(self) -> tuple[list[FoundLibrary], list[LibraryKey]]:
        """What is there that was not, and keys that are gone: replaced, as by an upgrade.

        Waits for the answer of a library that is new, in the child that loads it.
        """
        now = dict(self._files())
        gone = [key for key in self.found if key not in now]
        for key in gone:
            os.close(self.found.pop(key).descriptor)
        new = []
        for key, library in now.items():
            if key not in self.found:
                one = _opened(library)
                if one is not None:
                    self.found[key] = one
                    new.append(one)
        return new, gone

    def _files(self) -> Iterator[tuple[LibraryKey, Trusted]]:
        for path in installed(self._host):
            try:
                status = os.stat(self._host.path(path))
                key = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
                yield key, trusted(self._host, path, key)
            except (OSError, GpuwardenError):
                continue  # It is told of when somebody maps it.


def has_kernel_driver(host: Host) -> bool:
    """Whether NVIDIA's kernel driver is loaded, as far as that can be told."""
    try:
        names = read_majors(host).names.values()
    except GpuwardenError:
        return False
    return any(name.startswith("nvidia") for name in names)


def _opened(library: Trusted) -> FoundLibrary | None:
    machine = os.uname().machine
    try:
        handle = os.open(library.path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(handle)
        if (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino) == library.key:
            elf = examine_file(handle, machine, {})
            if elf.kind in LIBRARIES:
                slots = resolve(library)
                if elf.build_id:
                    known = {elf.build_id: {**elf.offsets, **slots.offsets}}
                    elf = examine_file(handle, machine, known)
                return FoundLibrary(
                    library.key,
                    handle,
                    library.path,
                    elf.build_id,
                    elf.soname,
                    elf.points,
                    (*elf.problems, *slots.problems),
                )
    except (OSError, GpuwardenError):
        pass  # As above.
    os.close(handle)
    return None
