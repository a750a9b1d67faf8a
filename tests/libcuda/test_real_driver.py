"""NVIDIA's real driver library is found and probed, and its calls are seen, without a GPU.

Every call fails there, cuInit with 100, once the library has been given what it was given.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from gpuwarden.probes.cuda.calls import CallSettings, CudaCalls
from gpuwarden.probes.cuda.functions import EXPORT_TABLES, SLOTS, WATCHED
from gpuwarden.probes.cuda.launches import LaunchProbe
from gpuwarden.probes.cuda.library import FoundLibrary
from gpuwarden.probes.cuda.records import ContextCall
from tests.support import cuda_modules
from tests.support.cuda_bed import CommandFailed, Program
from tests.support.cuda_probing import Probing, SeenLoad, Told

pytestmark = pytest.mark.real

NO_DEVICE, NOT_INITIALIZED = 100, 3
PROLOGUE = re.compile(rb"\x81\x3d.{4}\x00\xba\x1c\x32\x74", re.DOTALL)
PROLOGUE_BYTES = 10
# Drivers before 12.4 have no green contexts, those before 12.5 no fourth form of cuCtxCreate.
YOUNGER = {"cuCtxCreate_v4", "cuGreenCtxCreate", "cuGreenCtxDestroy", "cuCtxFromGreenCtx"}

ADDRESSES = """
import ctypes, re, sys
library = ctypes.CDLL(sys.argv[1])
names = sys.stdin.read().split()
exported = {ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names}
plain = {re.sub(r"(_v\\d+)?(_pt(ds|sz))?$", "", name) for name in names}
asked = given = 0
for name in plain:
    for version in (10000, 11000, 11040, 12000, 12020, 13000):
        for flags in (0, 1, 2):
            out, status = ctypes.c_void_p(), ctypes.c_int()
            asked += 1
            library.cuGetProcAddress_v2(
                name.encode(), ctypes.byref(out), version, ctypes.c_uint64(flags),
                ctypes.byref(status),
            )
            if out.value:
                given += 1
                assert out.value in exported, (name, version, flags)
print(asked, given)
"""


@pytest.fixture(scope="module")
def functions(library: Path) -> dict[str, int]:
    """What it exports, and where in the file."""
    with library.open("rb") as file:
        elf = ELFFile(file)
        table = elf.get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection)
        return {
            symbol.name: next(iter(elf.address_offsets(symbol["st_value"])))
            for symbol in table.iter_symbols()
            if symbol["st_info"]["type"] == "STT_FUNC" and re.match("cu[A-Z]", symbol.name)
        }


def test_every_function_is_found_where_it_begins(
    library: Path, found: FoundLibrary, functions: dict[str, int]
) -> None:
    there = set(WATCHED) & functions.keys()
    assert set(WATCHED) - there <= YOUNGER
    assert set(found.points) == there | set(SLOTS)
    assert found.soname == "libcuda.so.1" and found.build_id is not None
    assert not found.problems
    code = library.read_bytes()
    for name in there:
        point, begin = found.points[name], functions[name]
        assert PROLOGUE.match(code, begin), name
        assert (point.file_offset, point.at_start) == (begin + PROLOGUE_BYTES, False), name
    others = {name for name, at in functions.items() if not PROLOGUE.match(code, at)}
    print(f"{len(functions) - len(others)} of {len(functions)} functions begin so")


def test_slots_lead_to_functions_that_are_not_exported(
    library: Path, found: FoundLibrary, functions: dict[str, int]
) -> None:
    with library.open("rb") as file:
        text = ELFFile(file).get_section_by_name(".text")
        assert text is not None
        begin, end = text["sh_offset"], text["sh_offset"] + text["sh_size"]
    offsets = {name: found.points[name].file_offset for name in SLOTS}
    assert len(SLOTS) == sum(len(slots) for _, slots in EXPORT_TABLES.values())
    assert all(begin <= offset < end for offset in offsets.values())
    assert not set(offsets.values()) & set(functions.values())


def test_addresses_by_name_are_those_of_exported_functions(
    library: Path, functions: dict[str, int]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ADDRESSES, library],
        input=" ".join(functions),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    asked, given = map(int, done.stdout.split())
    assert given > len(functions), (asked, given)


# -------------------------------------------------------------------- calls


@pytest.fixture
def probed(found: FoundLibrary) -> Iterator[Probing]:
    told = Told()
    with CudaCalls(CallSettings(), told) as calls:
        attached = calls.attach(found)
        assert not attached.problems
        probing = Probing(calls, told)
        yield probing
        probing.close()


def failed(program: Program, command: str) -> None:
    """Does what must fail, with the result of a driver that was not initialised."""
    with pytest.raises(CommandFailed, match=rf" ({NOT_INITIALIZED}|{NO_DEVICE})$"):
        program.do(command)


def load_of(probed: Probing, program: Program, function: str) -> SeenLoad:
    def there() -> list[SeenLoad]:
        return [
            one
            for one in probed.told.loads
            if one.load.process.pid == program.pid and one.load.function == function
        ]

    probed.until(lambda: bool(there()), f"the load by {function}")
    return there()[0]


def test_the_library_says_that_there_is_no_gpu(library: Path, program: Program) -> None:
    assert program.do(f"library {library}") == NO_DEVICE


@pytest.mark.parametrize(
    "function", ["cuModuleLoadData", "cuModuleLoadDataEx", "cuLibraryLoadData"]
)
def test_the_bytes_of_a_load_are_seen(probed: Probing, program: Program, function: str) -> None:
    image = cuda_modules.miner()
    program.do(f"image i heap {image}")
    failed(program, f"load {function} m i")
    seen = load_of(probed, program, function)
    size = image.stat().st_size
    assert seen.data == image.read_bytes() and not seen.load.missed
    assert seen.load.image_bytes == seen.load.captured_bytes == size


@pytest.mark.parametrize("slot", [1, 6, 8])
def test_the_bytes_of_a_load_by_an_export_table_are_seen(
    probed: Probing, program: Program, slot: int
) -> None:
    image = cuda_modules.miner("fatbin")
    program.do(f"image i heap {image}", "wrap w i")
    failed(program, f"load CUDART_INTERFACE[{slot}] m {'i' if slot == 8 else 'w'}")
    seen = load_of(probed, program, f"CUDART_INTERFACE[{slot}]")
    assert seen.data == image.read_bytes() and not seen.load.missed


def test_a_load_by_name_is_seen(probed: Probing, program: Program) -> None:
    path = cuda_modules.miner()
    failed(program, f"load cuModuleLoad m {path}")
    seen = load_of(probed, program, "cuModuleLoad")
    assert seen.load.path == str(path) and not seen.data


@pytest.mark.parametrize(
    ("command", "function"),
    [
        ("create v2 c 0", "cuCtxCreate_v2"),
        ("create v3 c 0", "cuCtxCreate_v3"),
        ("retain c 0", "cuDevicePrimaryCtxRetain"),
    ],
)
def test_calls_about_contexts_are_seen(
    probed: Probing, program: Program, command: str, function: str
) -> None:
    failed(program, command)

    def told() -> list[ContextCall]:
        return [one for one in probed.told.contexts if one.function == function]

    probed.until(lambda: bool(told()), f"the call of {function}")
    assert told()[0].result in (NOT_INITIALIZED, NO_DEVICE)
    assert told()[0].process.pid == program.pid


@pytest.mark.parametrize(
    "function", [name for name in WATCHED if name.startswith("cuLaunch") or "GraphLaunch" in name]
)
def test_launches_are_counted(found: FoundLibrary, program: Program, function: str) -> None:
    program.do("image none at 0")
    with LaunchProbe() as probe:
        assert not probe.attach(found).problems
        with pytest.raises(CommandFailed, match=function):
            program.do(f"launch {function} none 3")
        launches = [one.launches for one in probe.counts() if one.pid == program.pid]
    assert sum(launches) == 3
