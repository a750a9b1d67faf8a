"""Where functions begin in the driver libraries that are trusted, by build-id."""

from __future__ import annotations

import os
from typing import NamedTuple

from gpuwarden.cuda.driver_elf import LIBRARIES, DriverElf
from gpuwarden.cuda.file_child import examine_file
from gpuwarden.cuda.library_book import Library
from gpuwarden.cuda.slots import SlotChild, Slots, Trusted, ask, installed, trusted
from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.probes.cuda.library import LibraryKey


class _Asked(NamedTuple):
    child: SlotChild
    elf: DriverElf
    library: Library | None
    """None for a library that nobody was seen to map yet."""


class SlotBook:
    """Asks each library once; nothing here waits."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._offsets: dict[str, dict[str, int]] = {}
        self._asked: list[_Asked] = []

    def close(self) -> None:
        for asked in self._asked:
            asked.child.close()
        self._asked.clear()

    @property
    def pids(self) -> set[int]:
        """Our own processes, which map a driver library for a moment."""
        return {asked.child.pid for asked in self._asked}

    def filenos(self) -> set[int]:
        """Readable when an answer is there."""
        return {asked.child.fileno() for asked in self._asked}

    def known(self, build_id: str | None) -> dict[str, int]:
        """What is known of the libraries of that build-id."""
        return self._offsets.get(build_id or "", {})

    def prepare(self, machine: str) -> None:
        """Asks the libraries that are installed here before anybody maps one."""
        for path in installed(self._host):
            try:
                handle = os.open(self._host.path(path), os.O_PATH | os.O_CLOEXEC)
            except (OSError, GpuwardenError):
                continue
            try:
                status = os.fstat(handle)
                key = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
                library = trusted(self._host, path, key)
                elf = examine_file(handle, machine, {})
                if elf.kind in LIBRARIES and not self._is_asked(elf):
                    self._ask(library, elf, None)
            except (OSError, GpuwardenError):
                # It is told when somebody maps it.
                continue
            finally:
                os.close(handle)

    def ask(self, library: Library, path: str, key: LibraryKey) -> None:
        """Asks a library that is mapped. Errors: Unavailable with the reason why it is not."""
        refused: GpuwardenError | None = None
        # A container calls the host's file by another name than the host.
        for place in (path, *installed(self._host)):
            try:
                self._ask(trusted(self._host, place, key), library.elf, library)
            except GpuwardenError as error:
                refused = refused or error
            else:
                return
        raise refused or Unavailable("it has no path")

    def take(self) -> list[tuple[Library, Slots]]:
        """The answers by now for libraries that are mapped; those for others are kept."""
        found = []
        for asked in list(self._asked):
            slots = asked.child.take()
            if slots is None:
                continue
            self._asked.remove(asked)
            if asked.elf.build_id and slots.offsets:
                self._offsets[asked.elf.build_id] = {**asked.elf.offsets, **slots.offsets}
            if asked.library is not None:
                found.append((asked.library, slots))
        return found

    def _is_asked(self, elf: DriverElf) -> bool:
        return any(asked.elf.build_id == elf.build_id for asked in self._asked)

    def _ask(self, library: Trusted, elf: DriverElf, mapped: Library | None) -> None:
        self._asked.append(_Asked(ask(library), elf, mapped))
