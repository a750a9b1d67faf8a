"""The stand-in CUDA driver library is what it says, and its programs do what their scripts say."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from gpuwarden.probes.cuda.functions import EXPORT_TABLES, WATCHED
from tests.support import cuda_bed, cuda_modules
from tests.support.code_scans import scanned
from tests.support.cuda_bed import BUILD_ID, CommandFailed, Variant, bed, ran, running, started
from tests.support.cuda_containers import LIBRARY, CudaContainers

pytestmark = pytest.mark.real

x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64's prologues")
COMPARE = bytes.fromhex("813d")
SHUT_DOWN = bytes.fromhex("00ba1c32") + b"\x74"
PUSH = bytes.fromhex("55b8030000004889e5")
FORMS = ("v1", "v2", "v3", "v4", "bypass")
OLDER_LAUNCHES = ("cuLaunch", "cuLaunchGrid", "cuLaunchGridAsync")
LAST = 0x7FFFFFFF


def exported(library: Path) -> dict[str, bytes]:
    """The first bytes of every function that it exports."""
    with library.open("rb") as file:
        elf = ELFFile(file)
        table = elf.get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection)
        found = {}
        for symbol in table.iter_symbols():
            if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["type"] == "STT_FUNC":
                [at] = elf.address_offsets(symbol["st_value"], 30)
                file.seek(at)
                found[symbol.name] = file.read(30)
        return found


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_every_watched_function_is_exported() -> None:
    assert set(WATCHED) <= set(exported(bed().library()))


@x86_64
def test_functions_begin_as_the_drivers_do() -> None:
    for name, code in exported(bed().library()).items():
        assert code[:2] == COMPARE and code[6:11] == SHUT_DOWN, name


@x86_64
@pytest.mark.parametrize(
    ("variant", "begin"), [("push", "55b803000000"), ("endbr", "f30f1efa813d"), ("nested", "813d")]
)
def test_prologues_of_variants(variant: Variant, begin: str) -> None:
    assert exported(bed().library(variant))["cuLaunchKernel"].hex().startswith(begin)


@pytest.mark.parametrize(
    ("variant", "build_id", "soname"),
    [
        ("plain", True, True),
        ("no build-id", False, True),
        ("no soname", True, False),
        ("renamed", True, True),
    ],
)
def test_identities_of_variants(variant: Variant, build_id: bool, soname: bool) -> None:
    library = bed().library(variant)
    text = subprocess.run(
        ["readelf", "-nd", library], capture_output=True, text=True, check=True
    ).stdout
    assert (BUILD_ID in text) is build_id
    assert ("[libcuda.so.1]" in text) is soname
    assert (library.name == cuda_bed.FILE_NAME) is (variant != "renamed")


OFFSETS = """
    import ctypes, sys
    library = ctypes.CDLL(sys.argv[1])
    base = int(next(l for l in open("/proc/self/maps") if sys.argv[1] in l).split("-")[0], 16)
    for told in sys.argv[2:]:
        table = ctypes.c_void_p()
        assert library.cuGetExportTable(ctypes.byref(table), bytes.fromhex(told)) == 0
        size = ctypes.c_uint64.from_address(table.value).value
        entries = (ctypes.c_uint64 * (size // 8)).from_address(table.value)
        print(*(entry - base for entry in entries[1:] if entry))
    out = ctypes.c_void_p()
    print(library.cuGetExportTable(ctypes.byref(out), bytes(16)))
"""


def test_export_tables_point_to_functions_that_are_not_exported() -> None:
    library = bed().library()
    ids = [identity.hex() for identity, _ in EXPORT_TABLES.values()]
    script = "\n".join(line[4:] for line in OFFSETS.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", script, library, *ids], capture_output=True, text=True, check=True
    )
    *tables, unknown = done.stdout.splitlines()
    assert unknown == "1"
    with library.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection)
        public = {symbol["st_value"] for symbol in table.iter_symbols()}
    for (_, slots), line in zip(EXPORT_TABLES.values(), tables, strict=True):
        offsets = [int(word) for word in line.split()]
        assert max(slots) <= len(offsets)
        assert not set(offsets) & public
        for offset in offsets if platform.machine() == "x86_64" else ():
            assert library.read_bytes()[offset:].startswith(PUSH)


def test_loads_of_every_form_give_handles(tmp_path: Path) -> None:
    cubin, image = cuda_modules.small(tmp_path), cuda_modules.made("gemm", "fatbin")
    ptx = cuda_modules.made("gemm", "ptx")
    answers = ran(
        f"image heap heap {image}",
        f"image map map {image}",
        f"image anonymous anonymous {image}",
        f"image edge edge {cubin}",
        f"image text heap {ptx}",
        "wrap wrapped heap",
        *("load cuModuleLoadData a heap", "load cuModuleLoadDataEx b map"),
        *("load cuModuleLoadFatBinary c wrapped", "load cuLibraryLoadData d edge"),
        *(f"load cuModuleLoad e {cubin}", f"load cuLibraryLoadFromFile f {cubin}"),
        *("load CUDART_INTERFACE[1] g wrapped", "load CUDART_INTERFACE[6] h wrapped"),
        *("load CUDART_INTERFACE[8] i anonymous", "load proc:cuModuleLoadData j text"),
        *("link l", "add l 0 edge", f"add-file l 2 {image}", "complete l linked"),
        "load cuModuleLoadData k linked",
    )
    handles = [*answers[6:16], answers[-1]]
    assert len(set(handles)) == len(handles) and all(handle > 4096 for handle in handles)


def test_what_is_no_code_is_refused() -> None:
    with running() as program:
        program.do("image bad at 0")
        with pytest.raises(CommandFailed, match="cuModuleLoadData 200"):
            program.do("load cuModuleLoadData m bad")
        with pytest.raises(CommandFailed, match="cuModuleLoad 301"):
            program.do("load cuModuleLoad m /nonexistent")
        with pytest.raises(CommandFailed, match="cuModuleUnload 400"):
            program.do("unload m")


def test_contexts() -> None:
    with running(environment={"STUB_CUDA_DEVICES": "3"}) as program:
        assert program.do("devices") == 3
        first, again = program.do("retain p 1"), program.do("retain p 1")
        assert first == again == program.do("enumerate 1") != program.do("retain q 2")
        program.do("release 1", "release 1")
        with pytest.raises(CommandFailed, match="cuDevicePrimaryCtxRelease_v2 201"):
            program.do("release 1")
        made = [program.do(f"create {form} {form} 0") for form in FORMS]
        made += [program.do("green g 0"), program.do("green-context c g")]
        assert len({*made}) == len(FORMS) + 2
        program.do("destroy v2", "destroy c", "green-destroy g", "reset 1")
        with pytest.raises(CommandFailed, match="v2 101"):
            program.do("create v2 x 3")


def test_without_a_device_it_answers_as_drivers_do() -> None:
    with running(environment={"STUB_CUDA_DEVICES": "0"}) as program:
        assert program.do(f"library {bed().library()}") == 100
        program.do("image i text code")
        with pytest.raises(CommandFailed, match="cuModuleLoadData 3"):
            program.do("load cuModuleLoadData m i")


def test_kernels_and_launches(tmp_path: Path) -> None:
    with running(f"image i heap {cuda_modules.small(tmp_path)}") as program:
        program.do("load cuModuleLoadData m i", "load cuLibraryLoadData l i")
        function = program.do("function f m looked_up")
        assert program.do("function g m looked_up") == function
        kernel = program.do("kernel k l looked_up")
        assert len({kernel, program.do("function-of kf k"), program.do("module lm l")}) == 3
        program.do("shape 1 2 3 4 5 6")
        watched = [name for name in WATCHED if name.startswith("cuLaunch")]
        for how in {*watched, *OLDER_LAUNCHES}:
            program.do(f"launch {how} f 3", f"launch {how} k 1 4096")
        program.do("graph graph f k", "launch cuGraphLaunch graph 2")
        program.do("sequence 3 10 f,graph*2,k 5 0 kf*3")
        assert program.do("time 1000 cuLaunchKernel f") > 0
        with pytest.raises(CommandFailed, match="cuLaunchKernel 400"):
            program.do("launch cuLaunchKernel nothing 1")


def test_addresses_by_name_are_those_of_exported_functions() -> None:
    library = ctypes.CDLL(str(bed().library()))
    out, status = ctypes.c_void_p(), ctypes.c_int()

    def address(name: bytes, flags: int) -> int | None:
        library.cuGetProcAddress_v2(
            name, ctypes.byref(out), LAST, ctypes.c_uint64(flags), ctypes.byref(status)
        )
        return out.value

    def exported_at(name: str) -> int | None:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value

    assert address(b"cuLaunchKernel", 0) == exported_at("cuLaunchKernel")
    assert address(b"cuLaunchKernel", 2) == exported_at("cuLaunchKernel_ptsz")
    assert address(b"cuCtxCreate", 0) == exported_at("cuCtxCreate_v4")
    assert address(b"cuModuleLoadData", 2) == exported_at("cuModuleLoadData")
    assert address(b"cuNothing", 0) is None and status.value == 1


def test_an_image_can_be_changed_or_gone_once_it_was_loaded(tmp_path: Path) -> None:
    path = cuda_modules.small(tmp_path)
    with running(f"image i anonymous {path}") as program:
        at = program.do("load cuModuleLoadData m i", "overwrite i")
        size = path.stat().st_size
        with Path(f"/proc/{program.pid}/mem").open("rb", buffering=0) as memory:
            assert os.pread(memory.fileno(), size, at) == b"." * size
        program.do("unmap i")
        assert f"{at:x}-" not in maps_of(program.pid)
    assert path.read_bytes() != b"." * size


def test_a_program_ends_at_once_or_forks_or_runs_threads() -> None:
    process = started("image i text code", "load cuModuleLoadData m i ; exit 7")
    assert process.communicate(timeout=20)[0].count("ok") == 1 and process.returncode == 7
    with running() as program:
        child = program.do("fork wait")
        assert Path(f"/proc/{child}/comm").read_text() == "cuda_program\n"
        os.kill(child, 9)
        program.do("thread sleep 10000 ; say done")
        program.do("join", "say after")
        assert program.said == ["done", "after"]
        descriptor = program.do("device /dev/null")
        assert os.readlink(f"/proc/{program.pid}/fd/{descriptor}") == "/dev/null"
        assert program.end() == 0


def test_libraries_are_mapped_when_they_are_asked_for() -> None:
    library = bed().copied("libother.so")
    with running(library="-") as program:
        assert str(bed().folder / "plain") not in maps_of(program.pid)
        assert program.do(f"library {library}") == 0
        assert str(library) in maps_of(program.pid)
        program.do("close-library")
        assert str(library) not in maps_of(program.pid)
    with running(linked=True) as program:
        assert program.do("devices") == 1
        assert str(bed().library()) in maps_of(program.pid)


def test_modules_are_gpu_code(tmp_path: Path) -> None:
    small, other = cuda_modules.small(tmp_path), cuda_modules.small(tmp_path, 1)
    mid = cuda_modules.mid_size(tmp_path)
    assert mid.stat().st_size > cuda_modules.MID_BYTES
    report = scanned(small, other, mid)
    assert len({one.module.digest for one in report.modules}) == 3
    assert {one.module.kernels[0].name for one in report.modules} == {cuda_modules.TABLE_KERNEL}
    large = cuda_modules.large(tmp_path)
    assert large.stat().st_size > cuda_modules.LARGE_BYTES
    digests = {one.module.digest for one in scanned(large).modules}
    assert len(digests) == -(-cuda_modules.LARGE_BYTES // cuda_modules.MID_BYTES)
    miner = scanned(cuda_modules.miner())
    assert [k.name for one in miner.modules for k in one.module.kernels] == [
        cuda_modules.MINER_KERNEL
    ]
    names = {
        k.name for one in scanned(*cuda_modules.training()).modules for k in one.module.kernels
    }
    assert names >= set(cuda_modules.TRAINING_KERNELS)


def test_containers_share_the_hosts_file_or_have_their_own(cuda_engine: CudaContainers) -> None:
    def inode(pid: int, path: str) -> int:
        # What else it maps can lie on either side, and is called a library too.
        [line] = [one for one in maps_of(pid).splitlines() if "r-xp" in one and one.endswith(path)]
        return int(line.split()[4])

    host = bed().library()
    digest = hashlib.sha256(host.read_bytes()).hexdigest()
    with (
        cuda_engine.running("devices") as one,
        cuda_engine.running(options=["--env", "STUB_CUDA_DEVICES=4"]) as two,
        cuda_engine.running(private_as="/opt/libown.so") as own,
    ):
        assert one.do("devices") == 1 and two.do("devices") == 4 and own.do("devices") == 1
        assert len({one.identity, two.identity, own.identity}) == 3
        shared = {inode(each.pid, LIBRARY) for each in (one, two)}
        assert shared == {host.stat().st_ino} != {inode(own.pid, "/opt/libown.so")}
        copy = Path(f"/proc/{own.pid}/root/opt/libown.so").read_bytes()
        assert hashlib.sha256(copy).hexdigest() == digest
