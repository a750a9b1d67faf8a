"""Whether an ELF file is a CUDA driver library, by what it exports, and where to attach to it.

No file is taken for one, or passed over, for its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from gpuwarden.cuda.elf_symbols import (
    ELF64,
    EM_AARCH64,
    EM_X86_64,
    STT_FUNC,
    STT_GNU_IFUNC,
    STT_NOTYPE,
    DynamicSymbols,
)
from gpuwarden.errors import Malformed
from gpuwarden.probes.cuda.functions import CONTEXTS, LAUNCHES, LOADS, WATCHED
from gpuwarden.probes.cuda.library import EntryPoint
from gpuwarden.sensors.elf import ElfIdentity, ReadAt, parse_identity

SONAME = "libcuda.so"
# A driver library exports one of each; a program that only calls them exports none.
CORE = (
    ("cuInit",),
    ("cuModuleLoadData", "cuLibraryLoadData"),
    ("cuLaunchKernel",),
    ("cuCtxCreate_v2", "cuCtxCreate_v3", "cuCtxCreate_v4", "cuCtxCreate"),
)
CORE_NEEDED = 3
NEEDED = {"contexts": CONTEXTS, "loads": LOADS, "launches": LAUNCHES}
"""Of which any one function will do: which of them a driver has depends on its age."""
STUB_LIMIT_BYTES = 1 << 20
"""The toolkit's stub has 60 to 200 kB, driver libraries have had over 8 MB for ten years."""

# Prologue of the exported functions of drivers 470 to 555, x86-64:
# cmpl $0x321cba00, offset(%rip) (81 3d, four bytes, the constant), then je (74, or 0f 84).
_COMPARE, _CONSTANT = b"\x81\x3d", b"\x00\xba\x1c\x32"
_CONSTANT_AT, _COMPARE_BYTES = 6, 10
_JUMPS = (b"\x74", b"\x0f\x84")
_LANDING = b"\xf3\x0f\x1e\xfa"
"""endbr64, which may stand before it."""
_PROLOGUE_BYTES = len(_LANDING) + _COMPARE_BYTES + 2

Kind = Literal["driver", "copy", "wrapper", "stub", "foreign", "broken", "other", "none"]
"""``copy``: it has a driver's build-id and not its names; ``foreign``: of another machine;
``broken``: a loader may read its tables where this does not; ``other``: another ELF file;
``none``: no ELF file."""
LIBRARIES = frozenset({"driver", "copy", "wrapper", "stub"})

KnownOffsets = Mapping[str, Mapping[str, int]]
"""Build-id → name of a function or slot → its offset in the file, from a file that is trusted."""


class DriverElf(Struct, frozen=True, array_like=True):
    """What a file is, and where its functions are attached to."""

    kind: Kind
    build_id: str | None = None
    soname: str | None = None
    points: dict[str, EntryPoint] = {}
    offsets: dict[str, int] = {}
    """Of the same functions, where they begin."""
    problems: tuple[str, ...] = ()


def examine(read_at: ReadAt, size: int, machine: str, known: KnownOffsets) -> DriverElf:
    """What the file of ``size`` bytes behind ``read_at`` is on a ``machine`` of os.uname.

    ``known``: functions that are attached to wherever that build-id is met, if the bytes there
    still are code. Never raises: a file whose tables lead nowhere is told in ``problems``.
    """
    try:
        identity = parse_identity(read_at)
    except Malformed as error:
        # No loader maps such a file by those tables; one of its own may.
        identity = ElfIdentity(is_elf=True)
        trouble: tuple[str, ...] = (str(error),)
    else:
        trouble = ()
    if not identity.is_elf:
        return DriverElf("none")
    named = (identity.soname or "").startswith(SONAME)
    offsets_known = known.get(identity.build_id or "", {})
    suspected = named or bool(offsets_known)

    def nothing(kind: Kind, *problems: str) -> DriverElf:
        return DriverElf(kind, identity.build_id, identity.soname, problems=problems)

    try:
        if not read_at(0, len(ELF64)).startswith(ELF64):
            why = "it is for another machine (not a 64-bit little-endian file)"
            return nothing("foreign", *trouble, why) if suspected else nothing("other")
        symbols = DynamicSymbols(read_at)
        exported = sum(any(map(symbols.find, names)) for names in CORE)
    except Malformed as error:
        return nothing("broken", *trouble, str(error))
    if exported < CORE_NEEDED and not suspected:
        return nothing("other")
    if symbols.machine != {"x86_64": EM_X86_64, "aarch64": EM_AARCH64}.get(machine):
        why = f"it is for another machine (ELF number {symbols.machine})"
        return nothing("foreign", *trouble, why)
    places = Places(read_at, symbols)
    places.add_exported()
    places.add_known(offsets_known)
    kind: Kind = "driver"
    if exported < CORE_NEEDED:
        kind = "copy" if offsets_known else "wrapper"
    elif not named:
        kind = "wrapper"
    elif size <= STUB_LIMIT_BYTES and all(point.at_start for point in places.points.values()):
        kind = "stub"
    said = {
        "copy": "it has the build-id of a driver library and does not export its functions",
        "wrapper": "it exports the driver's functions and is not called libcuda: a wrapper around "
        "the library, or a copy of it",
        "stub": "it is as small as the toolkit's stub, whose functions reach no driver",
    }.get(kind)
    return DriverElf(
        kind,
        identity.build_id,
        identity.soname,
        places.points,
        places.offsets,
        (*trouble, *([said] if said else ()), *places.problems),
    )


class Places:
    """Entry points of one file, each address once, each in its code."""

    def __init__(self, read_at: ReadAt, symbols: DynamicSymbols) -> None:
        self._read_at = read_at
        self._symbols = symbols
        self.points: dict[str, EntryPoint] = {}
        self.offsets: dict[str, int] = {}
        self.problems: list[str] = []

    def add_exported(self) -> None:
        """The watched functions that the file exports."""
        for name in WATCHED:
            try:
                symbol = self._symbols.find(name)
            except Malformed as error:
                self.problems.append(f"{name} is not seen: {error}")
                continue
            if symbol is None:
                continue
            if symbol.kind not in (STT_FUNC, STT_NOTYPE):
                what = "chosen at run time" if symbol.kind == STT_GNU_IFUNC else "no function"
                self.problems.append(f"{name} is not seen: it is {what}")
            else:
                offset = self._symbols.file_offset(symbol.address, executable=True)
                self._add(name, offset)
        for what, names in NEEDED.items():
            if self.points.keys().isdisjoint(names):
                self.problems.append(f"no {what} are seen: none of their functions is there")

    def add_known(self, offsets: Mapping[str, int]) -> None:
        """Functions and slots known by their offsets in a file of the same build-id."""
        for name, offset in offsets.items():
            if name not in self.points:
                self._add(name, offset if self._symbols.in_code(offset) else None)

    def _add(self, name: str, offset: int | None) -> None:
        if offset is None:
            self.problems.append(f"{name} is not seen: its address is not in the file's code")
        elif offset not in self.offsets.values():
            self.offsets[name] = offset
            self.points[name] = entry_point(self._read_at, offset, self._symbols.machine)


def entry_point(read_at: ReadAt, offset: int, machine: int) -> EntryPoint:
    """Where the function that begins at ``offset`` is attached to: after a known compare if any.

    The kernel emulates the jump behind it; the compare itself it would have to single-step.
    """
    if machine == EM_X86_64:
        code = read_at(offset, _PROLOGUE_BYTES)
        begin = len(_LANDING) if code.startswith(_LANDING) else 0
        constant = code[begin + _CONSTANT_AT : begin + _COMPARE_BYTES]
        if (
            code.startswith(_COMPARE, begin)
            and constant == _CONSTANT
            and code.startswith(_JUMPS, begin + _COMPARE_BYTES)
        ):
            return EntryPoint(offset + begin + _COMPARE_BYTES, at_start=False)
    return EntryPoint(offset, at_start=True)
