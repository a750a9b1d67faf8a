"""A probe that stops every caller of a function, and what tells whether processes stand still."""

from __future__ import annotations

import select
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from gpuwarden.cuda.guardian import Guardian
from gpuwarden.errors import Unavailable
from gpuwarden.probes import uprobes
from gpuwarden.probes.cuda import stopped
from gpuwarden.probes.cuda.object import UprobeObject
from gpuwarden.probes.cuda.stopped import StoppedMap, StopRecord, boot_ns
from gpuwarden.probes.libbpf import Libbpf, library
from gpuwarden.probes.probe_object import ProbeObject
from gpuwarden.sensors.process.stat_lines import parse_stat
from tests.support import cuda_bed
from tests.support.cuda_bed import Program
from tests.support.idle import PATIENCE_SECONDS, wait_for
from tests.support.packages import require, require_root, unavailable

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("stop_probe.bpf.c")
FOREVER_NS = 3600 * 10**9


@cache
def _object() -> tempfile.TemporaryDirectory[str]:
    require_root()
    require("clang", "libbpf-dev", "libc6-dev", "libbpf1", "gcc")
    folder = tempfile.TemporaryDirectory(prefix="gpuwarden-stop-")
    argv = ["clang", "-g", "-O2", "-Wall", "-Werror", "-target", "bpf", "-D__TARGET_ARCH_x86"]
    argv += ["-I", str(ROOT / "src/gpuwarden/probes"), "-idirafter"]
    argv += ["/usr/include/x86_64-linux-gnu", "-c", str(SOURCE), "-o", f"{folder.name}/stop.o"]
    subprocess.run(argv, check=True)
    return folder


def file_offset(file: Path, symbol: str) -> int:
    """Where a dynamic symbol's code begins in its file."""
    with file.open("rb") as opened:
        elf = ELFFile(opened)
        symbols = elf.get_section_by_name(".dynsym")
        assert isinstance(symbols, SymbolTableSection)
        [found] = symbols.get_symbol_by_name(symbol) or []
        return int(next(iter(elf.address_offsets(found["st_value"]))))


class StopProbe:
    """The maps and what stops; whoever uses it says until when processes may be stopped."""

    def __init__(self, bpf: Libbpf, made: ProbeObject, stack: ExitStack) -> None:
        self.bpf = bpf
        self._made = made
        self._stack = stack
        self.map = StoppedMap(bpf, made.map("stopped"))
        self.stops_until = made.map("stops_until")

    def attach(self, file: Path, symbol: str = "cuModuleLoadData") -> None:
        """Every process that calls the function is stopped from now on."""
        with file.open("rb") as opened:
            points = [uprobes.Point(file_offset(file, symbol), 0)]
            program = self._made.program("stop_caller")
            links = uprobes.attach(self.bpf, program, opened.fileno(), points)
        self._stack.callback(uprobes.detach, self.bpf, links)

    def allow(self, until_ns: int | None = None) -> None:
        """Without a guardian: until then, or for an hour."""
        word = boot_ns() + FOREVER_NS if until_ns is None else until_ns
        self._made.put("stops_until", struct.pack("=I", 0), struct.pack("=Q", word))

    def write_down(self, pid: int, start_time_ns: int, stopped_at_ns: int | None = None) -> None:
        """A record as if a probe had made it."""
        at = boot_ns() if stopped_at_ns is None else stopped_at_ns
        record = stopped.RECORD.pack(start_time_ns, at)
        self._made.put("stopped", stopped.KEY.pack(pid), record)

    def outcomes(self) -> list[int]:
        """How often each outcome of ``enum stop_outcome`` was had."""
        found = [self._made.get("outcomes", struct.pack("=I", number), 8) for number in range(6)]
        return [int.from_bytes(each or b"", "little") for each in found]


@contextmanager
def stop_probe() -> Iterator[StopProbe]:
    """The probe, loaded and attached to nothing."""
    path = f"{_object().name}/stop.o"
    with library() as bpf:
        pass
    with ExitStack() as stack:
        try:
            made = UprobeObject(bpf, stack, path, among=stopped.LAYOUTS, programs=("stop_caller",))
        except Unavailable as error:
            unavailable(f"this kernel takes no such probe: {error}")
        yield StopProbe(bpf, made, stack)


def start_time_ns(pid: int) -> int:
    """When a process began, as a probe has it, to the tick."""
    line = parse_stat(Path(f"/proc/{pid}/stat").read_bytes())
    return line.start_time_ticks * 10_000_000


def state(pid: int) -> str:
    """A process's state letter; empty once it is gone."""
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_bytes()).state
    except (OSError, ProcessLookupError):
        return ""


@contextmanager
def guarded(probe: StopProbe, directory: Path | str = "/nowhere") -> Iterator[Guardian]:
    """A guardian that has given its word."""
    made = Guardian(probe.map.descriptor, probe.stops_until, directory=str(directory))
    with made:
        wait_for(lambda: made._said() > boot_ns(), "the guardian's word")
        yield made


@contextmanager
def loading(image: Path) -> Iterator[tuple[Program, int]]:
    """A program, and where its image is."""
    with cuda_bed.running() as program:
        yield program, program.do(f"image i heap {image}")


def load(program: Program) -> None:
    """Has it call the driver, without waiting."""
    program.tell("load cuModuleLoadData m i")


def stopped_record(probe: StopProbe, program: Program) -> StopRecord:
    """The record of a program that stands still by now."""
    record = wait_for(lambda: probe.map.record(program.pid), "a record")
    wait_for(lambda: state(program.pid) == "T", "the stop")
    assert isinstance(record, StopRecord)
    return record


def wait_for_stop(probe: StopProbe, count: int = 1) -> None:
    """Until so many processes were stopped, whether they still are or not."""
    wait_for(lambda: probe.outcomes()[0] >= count, f"stop {count}")


def answered(program: Program) -> int:
    """What its call came to. Errors: AssertionError when it stays stopped."""
    assert program.process.stdout is not None
    ready, _, _ = select.select([program.process.stdout], [], [], PATIENCE_SECONDS)
    assert ready, f"it does not go on: {state(program.pid)}"
    return program.answer()
