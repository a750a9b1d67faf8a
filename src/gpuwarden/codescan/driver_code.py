"""Whether a mapped file is one of the installed GPU driver's own libraries.

The driver's libraries hold modules of their own (libcuda some two hundred), which no baseline of a
framework knows. A name proves nothing: the file must be the one that the host has installed where
its driver is, and nobody but root may be able to change it.
"""

from __future__ import annotations

import os
import stat
from functools import cached_property

from gpuwarden.codescan.process_memory import MappedFile
from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.model import DriverFile
from gpuwarden.pattern import pattern
from gpuwarden.sensors import driver_files
from gpuwarden.sensors.seen import Seen

_NAMES = pattern(
    r"lib(?:cuda|cudadebugger|nvcuvid|nvoptix|nvidia-[a-z0-9-]{1,40}|amdhip64|hsa-runtime64)"
    r"\.so(?:\.[0-9.]{1,20})?"
)


class DriverCode:
    """The driver's libraries as they are installed on a host, looked for when first asked."""

    def __init__(self, host: Host) -> None:
        self._host = host

    @cached_property
    def _directories(self) -> tuple[str, ...]:
        try:
            found = [
                os.path.dirname(fact.path)
                for fact in driver_files.read(self._host, Seen())
                if isinstance(fact, DriverFile) and not fact.writable_by
            ]
        except GpuwardenError:
            return ()
        return tuple(dict.fromkeys(found))

    def is_own(self, file: MappedFile) -> bool:
        """Whether it is the host's own file of that name, beside its driver, and root's alone."""
        name = os.path.basename(file.path)
        if file.owner_uid or file.mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
        if _NAMES.fullmatch(name) is None:
            return False
        for directory in self._directories:
            try:
                status = os.stat(self._host.path(f"{directory}/{name}"))
            except (OSError, ValueError, GpuwardenError):
                continue
            if (status.st_dev, status.st_ino) == file.inode:
                return True
        return False
