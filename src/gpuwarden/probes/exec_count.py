"""How often a process has executed a program, by the kernel's own count, which nobody can set.

Needs kernel 5.8 with BTF, and CAP_BPF with CAP_PERFMON (or root). Nothing is attached to anything:
the kernel's list of tasks is read when it is asked for.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from msgspec import Struct

from gpuwarden.errors import GpuwardenError
from gpuwarden.probes import layouts
from gpuwarden.probes.events import ticks
from gpuwarden.probes.layouts import Layouts
from gpuwarden.probes.libbpf import Libbpf, library
from gpuwarden.probes.loading import NOT_LOADED, explained
from gpuwarden.probes.probe_object import ObjectHolder, ProbeObject

OBJECT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "exec_count.bpf.o")
LIMIT_BYTES = 64 << 20
"""Of one reading; more than the 4 million processes that a kernel can have."""
LAYOUTS: Layouts = {
    "exec_record": (
        ("start_ns", "Q"),
        ("count", "Q"),
        ("exe_inode", "Q"),
        ("pid", "I"),
        ("exe_device", "I"),
    )
}
_RECORD = layouts.packed("exec_record", among=LAYOUTS)
_READ_BYTES = 1 << 16
_PROGRAM = "exec_counts"
_MINOR_BITS = 20
"""Of the kernel's own dev_t."""


class ExecCount(Struct, frozen=True):
    """A process's count of execs, with the file that the kernel itself keeps as its binary.

    On overlayfs and btrfs that file's device is another one than stat(2) tells.
    """

    pid: int
    start_time_ticks: int
    count: int
    exe_device: str | None = None
    exe_inode: int | None = None


def parse(data: bytes) -> list[ExecCount]:
    """The records of one reading; a cut one at the end is left out."""
    found = []
    whole = len(data) - len(data) % _RECORD.size
    for start_ns, count, inode, pid, device in _RECORD.iter_unpack(data[:whole]):
        major, minor = device >> _MINOR_BITS, device & (1 << _MINOR_BITS) - 1
        exe = (f"{major}:{minor}", inode) if inode else (None, None)
        found.append(ExecCount(pid, ticks(start_ns), count, *exe))
    return found


class ExecCounts(ObjectHolder):
    """The probe between ``with`` and its end; where it cannot be loaded ``unavailable`` says why.

    Nothing is raised then: ``of`` says None for every process.
    """

    def __init__(self, object_path: str = OBJECT) -> None:
        super().__init__()
        self._path = object_path
        self._link = -1
        self.unavailable = NOT_LOADED

    def __enter__(self) -> ExecCounts:
        try:
            with library() as bpf, ExitStack() as stack:
                try:
                    self._load(bpf, stack)
                except OSError as error:
                    raise explained(bpf, error) from error
                self._stack = stack.pop_all()
                self.unavailable = ""
        except GpuwardenError as error:
            self.unavailable = str(error)
        return self

    def close(self) -> None:
        """Unloads. Twice does nothing."""
        self._left()
        self.unavailable = NOT_LOADED
        super().close()

    def _load(self, bpf: Libbpf, stack: ExitStack) -> None:
        loaded = ProbeObject(bpf, stack, self._path, among=LAYOUTS, programs=(_PROGRAM,))
        link = bpf.pointer("bpf_program__attach_iter", loaded.program(_PROGRAM), None)
        stack.callback(bpf.call, "bpf_link__destroy", link)
        self._link = bpf.checked("bpf_link__fd", link)
        self._object = loaded

    def of(self, pid: int) -> ExecCount | None:
        """That process's; None where it is not there, or cannot be asked for."""
        return next((one for one in self._read(pid) if one.pid == pid), None)

    def all(self) -> dict[int, ExecCount]:
        """Those of all processes by pid; empty where they cannot be asked for."""
        return {one.pid: one for one in self._read(0)}

    def _read(self, pid: int) -> list[ExecCount]:
        loaded = self._object
        if loaded is None:
            return []
        first = (0).to_bytes(4, "little")
        try:
            loaded.put("wanted", first, pid.to_bytes(4, "little"))
            descriptor = loaded.bpf.checked("bpf_iter_create", self._link)
        except (OSError, OverflowError):
            return []
        chunks: list[bytes] = []
        total = 0
        try:
            while total < LIMIT_BYTES and (chunk := os.read(descriptor, _READ_BYTES)):
                chunks.append(chunk)
                total += len(chunk)
        except OSError:
            return []
        finally:
            os.close(descriptor)
        return parse(b"".join(chunks))
