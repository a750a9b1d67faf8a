"""Functions of the driver that are reached by tables alone: asked of the library in a child.

A runtime library asks cuGetExportTable for a table by UUID and calls what is in it: no exported
name leads there. So the library is loaded, by a child without rights, and asked too. Only a file
that root alone can put there or change is loaded; what was found holds for its build-id.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import time
from typing import NamedTuple, NoReturn

import msgspec
from msgspec import Struct

from gpuwarden.codescan.memory_map import MAPS_LIMIT_BYTES, Region, parse_maps
from gpuwarden.confinement.places import leave_network
from gpuwarden.confinement.rights import (
    default_signals,
    drop_rights,
    end_with,
    keep_descriptors,
    limit,
    unblock_signals,
)
from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.probes.cuda.functions import EXPORT_TABLES, slot_name
from gpuwarden.probes.cuda.library import LibraryKey
from gpuwarden.sensors.nvml.library import DIRECTORIES, check_library

LIBRARY_NAMES = ("libcuda.so.1", "libcuda.so")
ANSWER_SECONDS = 2.0
"""Until the library is attached to without them; drivers took 10 ms."""
CPU_SECONDS = 10
ANSWER_LIMIT_BYTES = 1 << 16
TABLE_LIMIT_BYTES = 1 << 16
_POINTER = ctypes.sizeof(ctypes.c_void_p)


class Slots(Struct, frozen=True, array_like=True):
    """Name of a slot → where its function begins in the library's file; what was not found."""

    offsets: dict[str, int] = {}
    problems: tuple[str, ...] = ()


class Trusted(NamedTuple):
    """A library that may be loaded: its path without links, and the file that must be there."""

    path: str
    key: LibraryKey


def trusted(host: Host, path: str, key: LibraryKey) -> Trusted:
    """The library at ``path`` if it is the file ``key`` and root's alone, its folders too.

    Errors: Unavailable with the reason why it is not loaded.
    """
    try:
        checked = check_library(host.path(path))
    except GpuwardenError as error:
        raise Unavailable(str(error)) from error
    if not checked.accepted or checked.resolved is None:
        raise Unavailable(checked.reason or "it is not to be trusted")
    status = os.lstat(checked.resolved)
    if (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino) != key:
        raise Unavailable("its path leads to another file here")
    return Trusted(checked.resolved, key)


def installed(host: Host) -> list[str]:
    """Paths where this machine's own driver library is, by what a loader would look for."""
    found: list[str] = []
    for directory in DIRECTORIES:
        for name in LIBRARY_NAMES:
            path = f"{directory}/{name}"
            with contextlib.suppress(GpuwardenError):
                if os.path.exists(host.path(path)):
                    found.append(path)
    return found


class SlotChild(Struct):
    """One child that asks one library; ``fileno`` is readable when it has answered or ended."""

    pid: int
    pipe: int
    deadline: float
    received: bytearray
    reaped: bool = False

    def fileno(self) -> int:
        return self.pipe

    def take(self) -> Slots | None:
        """Its answer; None while there is none yet. It has ended with it, and is closed."""
        why = ""
        while not why:
            try:
                data = os.read(self.pipe, ANSWER_LIMIT_BYTES)
            except BlockingIOError:
                if time.monotonic() < self.deadline:
                    return None
                why = f"the library did not answer in {ANSWER_SECONDS:g} s"
                break
            self.received += data
            if not data or len(self.received) > ANSWER_LIMIT_BYTES:
                break
        self.close()
        if not why:
            try:
                return msgspec.msgpack.decode(bytes(self.received), type=Slots)
            except (msgspec.DecodeError, UnicodeDecodeError):
                why = "the library ended the process that asked it"
        return Slots(problems=(f"functions reached by export tables are not seen: {why}",))

    def close(self) -> None:
        if self.pipe < 0:
            return
        os.close(self.pipe)
        self.pipe = -1
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        # It is killed and has no descriptor or file of a server's to wait for but the library.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def ask(library: Trusted) -> SlotChild:
    """Forks a child that loads the library. Errors: Unavailable when no process can be made."""
    parent = os.getpid()
    try:
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        pid = os.fork()
    except OSError as error:
        raise Unavailable(f"no process to ask the library in: {error.strerror}") from error
    if pid == 0:
        _serve(writer, library, parent)
    os.close(writer)
    return SlotChild(pid, reader, time.monotonic() + ANSWER_SECONDS, bytearray())


def resolve(library: Trusted) -> Slots:
    """``ask``, waited for. Errors: Unavailable when no process can be made."""
    child = ask(library)
    while (slots := child.take()) is None:
        select.select([child.pipe], [], [], 0.1)
    return slots


def _serve(writer: int, library: Trusted, parent: int) -> NoReturn:
    # Nothing may leave but _exit: no handler, finaliser or buffer of the parent's.
    code = 1
    try:
        default_signals()
        unblock_signals()
        gc.freeze()
        gc.disable()
        (writer,) = keep_descriptors([writer])
        limit(
            {
                resource.RLIMIT_CORE: 0,
                resource.RLIMIT_FSIZE: 0,
                resource.RLIMIT_NOFILE: 64,
                resource.RLIMIT_CPU: CPU_SECONDS,
            }
        )
        leave_network()
        drop_rights(nobody=True)
        if end_with(parent):
            os.write(writer, msgspec.msgpack.encode(_slots(library)))
            code = 0
    except BaseException:  # noqa: BLE001, S110 - the parent hears of it by the end
        pass
    finally:
        os._exit(code)


# -------------------------------------------------------------------- in the child


def _slots(library: Trusted) -> Slots:
    status = os.lstat(library.path)
    if (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino) != library.key:
        return Slots(problems=("export tables: another file is at the library's path",))
    try:
        loaded = ctypes.CDLL(library.path)
        give = loaded.cuGetExportTable
    except (OSError, AttributeError) as error:
        return Slots(problems=(f"export tables: {error}"[:300],))
    own = ctypes.cast(give, ctypes.c_void_p).value or 0
    with open("/proc/self/maps", "rb") as file:
        regions = parse_maps(file.read(MAPS_LIMIT_BYTES))
    code = [region for region in regions if region.start <= own < region.end]
    regions = [region for region in regions if code and region.key == code[0].key]
    offsets: dict[str, int] = {}
    problems: list[str] = []
    for name, (uuid, slots) in EXPORT_TABLES.items():
        table = ctypes.c_void_p()
        result = give(ctypes.byref(table), uuid)
        if result != 0 or not table.value:
            problems.append(f"{name}: the library has no such export table (result {result})")
            continue
        # A table begins with its own size.
        size = ctypes.c_uint64.from_address(table.value).value
        for slot in slots:
            what = slot_name(name, slot)
            if (slot + 1) * _POINTER > min(size, TABLE_LIMIT_BYTES):
                problems.append(f"{what}: the library's table ends before it")
                continue
            address = ctypes.c_uint64.from_address(table.value + slot * _POINTER).value
            offset = _offset(regions, address)
            if offset is None:
                problems.append(f"{what}: it does not lead into the library's code")
            else:
                offsets[what] = offset
    return Slots(offsets, tuple(problems))


def _offset(regions: list[Region], address: int) -> int | None:
    """Where in the library's file the code at ``address`` is from."""
    for region in regions:
        if region.start <= address < region.end and "x" in region.permissions:
            return address - region.start + region.offset
    return None
