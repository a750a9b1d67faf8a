"""The probes of calls in tests and bench: attached to the bed's library, what they tell kept."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from gpuwarden.cuda.driver_elf import entry_point, examine
from gpuwarden.probes.cuda.calls import CallSettings, CudaCalls
from gpuwarden.probes.cuda.library import EntryPoint, FoundLibrary
from gpuwarden.probes.cuda.records import CapturedLoad, ContextCall, HandleNamed, LoadReturn
from tests.support import cuda_bed

SLOTS = {
    "CUDART_INTERFACE[1]": "table_load",
    "CUDART_INTERFACE[2]": "table_primary",
    "CUDART_INTERFACE[6]": "table_load_more",
    "CUDART_INTERFACE[8]": "table_load_header",
    "CTX_CREATE_BYPASS[1]": "table_create",
}
"""Slot → what the bed's library calls its function inside."""
WAIT_SECONDS = 20.0
RING = 8 << 20
"""Enough for what tests load, and soon there."""


@dataclass(frozen=True)
class SeenLoad:
    """A load and its bytes."""

    load: CapturedLoad
    data: bytes | None


@dataclass
class Told:
    """A sink that keeps everything."""

    loads: list[SeenLoad] = field(default_factory=list)
    contexts: list[ContextCall] = field(default_factory=list)
    returns: list[LoadReturn] = field(default_factory=list)
    names: list[HandleNamed] = field(default_factory=list)

    def context(self, call: ContextCall) -> None:
        self.contexts.append(call)

    def load(self, load: CapturedLoad) -> None:
        data = None
        if load.descriptor is not None:
            data = os.pread(load.descriptor, load.captured_bytes + 1, 0)
            os.close(load.descriptor)
        self.loads.append(SeenLoad(load, data))

    def returned(self, load: LoadReturn) -> None:
        self.returns.append(load)

    def named(self, handle: HandleNamed) -> None:
        self.names.append(handle)


class Probing:
    """The probes and what they told so far."""

    def __init__(self, calls: CudaCalls, told: Told) -> None:
        self.calls = calls
        self.told = told
        self._poll = select.epoll()
        self._poll.register(calls.fileno(), select.EPOLLIN)

    def until(self, condition: Callable[[], bool], what: str = "what was awaited") -> None:
        """Polls until something was told. Errors: AssertionError."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{what} was not told; told: {self.told}"[:4000]
            self._poll.poll(0.1)
            self.calls.poll()

    def drain(self) -> Told:
        """All that was told before now."""
        while self._poll.poll(0):
            self.calls.poll()
        self.calls.poll()
        return self.told

    def close(self) -> None:
        self._poll.close()


def found_library(path: Path) -> FoundLibrary:
    """A library of the bed as its finder gives it; the caller closes the descriptor."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    status = os.fstat(descriptor)

    def read_at(offset: int, size: int) -> bytes:
        return os.pread(descriptor, size, offset)

    elf = examine(read_at, status.st_size, os.uname().machine, {})
    with path.open("rb") as file:
        parsed = ELFFile(file)
        machine = parsed.header.e_machine
        symbols = parsed.get_section_by_name(".symtab")
        assert isinstance(symbols, SymbolTableSection)
        inside: dict[str, EntryPoint] = {}
        for slot, name in SLOTS.items():
            symbol = (symbols.get_symbol_by_name(name) or [])[0]
            offset = next(iter(parsed.address_offsets(symbol.entry.st_value)))
            number = {"EM_X86_64": 62, "EM_AARCH64": 183}[machine]
            inside[slot] = entry_point(read_at, offset, number)
    return FoundLibrary(
        key=(os.major(status.st_dev), os.minor(status.st_dev), status.st_ino),
        descriptor=descriptor,
        path=str(path),
        build_id=elf.build_id,
        soname=elf.soname,
        points={**elf.points, **inside},
    )


@contextmanager
def probing(*libraries: Path, settings: CallSettings | None = None) -> Iterator[Probing]:
    """Probes that are attached to ``libraries``."""
    told = Told()
    found = [found_library(path) for path in libraries]
    try:
        with CudaCalls(settings or CallSettings(), told) as calls:
            for one in found:
                calls.attach(one)
            probing = Probing(calls, told)
            try:
                yield probing
            finally:
                probing.close()
    finally:
        for one in found:
            os.close(one.descriptor)


def only_load(told: Told) -> SeenLoad:
    assert len(told.loads) == 1, told.loads
    return told.loads[0]


def is_whole(seen: SeenLoad, data: bytes) -> bool:
    load = seen.load
    assert not load.missed, load.missed
    assert load.image_bytes == load.captured_bytes == len(data)
    return seen.data == data


def called_by_python(code: str, *arguments: object) -> int:
    """Runs Python with the bed's library as ``cuda``; the pid it had."""
    begin = "import ctypes, os, sys\ncuda = ctypes.CDLL(sys.argv[1])\ncuda.cuInit(0)\n"
    begin += "out = ctypes.c_void_p()\n"
    process = subprocess.Popen(
        [sys.executable, "-c", begin + code, str(cuda_bed.bed().library()), *map(str, arguments)]
    )
    assert process.wait(timeout=60) == 0
    return process.pid
