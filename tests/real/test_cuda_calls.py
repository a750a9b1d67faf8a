"""Calls of a driver library, seen from outside: the bytes of loads, contexts, names of kernels."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from gpuwarden.probes import uprobes
from gpuwarden.probes.cuda.calls import CallSettings, CudaCalls
from gpuwarden.probes.cuda.library import EntryPoint, FoundLibrary
from gpuwarden.probes.cuda.stopped import REASONS, boot_ns
from gpuwarden.probes.libbpf import library
from tests.support import cuda_bed, cuda_modules, gpu_images, text_pages
from tests.support.cuda_bed import running, started
from tests.support.cuda_probing import Probing, SeenLoad, Told, found_library, probing

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("built")]

RING = 8 << 20


@pytest.fixture(scope="module")
def loaded() -> Iterator[Probing]:
    with probing(cuda_bed.bed().library(), settings=CallSettings(ring_bytes=RING)) as made:
        yield made


@pytest.fixture
def probe(loaded: Probing) -> Probing:
    loaded.drain()
    for kind in (loaded.told.loads, loaded.told.contexts, loaded.told.returns, loaded.told.names):
        kind.clear()
    return loaded


@pytest.fixture(scope="module")
def cubin() -> Path:
    return cuda_modules.made("gemm")


@pytest.fixture(scope="module")
def fatbin() -> Path:
    return cuda_modules.made("gemm", "fatbin")


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


# -------------------------------------------------------------------- bytes


@pytest.mark.parametrize("where", ["heap", "map", "anonymous", "edge"])
def test_an_image_is_what_was_loaded_wherever_it_lies(
    probe: Probing, cubin: Path, where: str
) -> None:
    with running(f"image i {where} {cubin}", "load cuModuleLoadData m i") as program:
        told = probe.drain()
        seen = only_load(told)
        assert is_whole(seen, cubin.read_bytes())
        assert (seen.load.process.pid, seen.load.thread_id) == (program.pid, program.pid)
        assert seen.load.function == "cuModuleLoadData"
        assert seen.load.process.exe_path == str(cuda_bed.bed().program())
        assert abs(seen.load.at_ns - time.time_ns()) < 20e9


@pytest.mark.parametrize(
    "function",
    ["cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoadFatBinary", "cuLibraryLoadData"],
)
@pytest.mark.parametrize("form", ["cubin", "fatbin", "ptx", "wrapped"])
def test_every_function_takes_every_form(
    probe: Probing, cubin: Path, fatbin: Path, function: str, form: str
) -> None:
    image = {"cubin": cubin, "ptx": cuda_modules.made("gemm", "ptx")}.get(form, fatbin)
    commands = [f"image i heap {image}", "wrap w i"]
    handle = cuda_bed.ran(*commands, f"load {function} m {'w' if form == 'wrapped' else 'i'}")[-1]
    seen = only_load(probe.drain())
    assert is_whole(seen, image.read_bytes())
    assert seen.load.function == function
    (came,) = probe.told.returns
    assert (came.number, came.handle, came.result) == (seen.load.number, handle, 0)


@pytest.mark.parametrize("slot", [1, 6, 8])
def test_slots_of_the_runtimes_table(probe: Probing, fatbin: Path, slot: int) -> None:
    image = "i" if slot == 8 else "w"
    name = f"CUDART_INTERFACE[{slot}]"
    handle = cuda_bed.ran(f"image i heap {fatbin}", "wrap w i", f"load {name} m {image}")[-1]
    seen = only_load(probe.drain())
    assert is_whole(seen, fatbin.read_bytes())
    assert seen.load.function == name
    assert probe.told.returns[0].handle == handle


def test_text_ends_at_its_nul(probe: Probing, tmp_path: Path) -> None:
    texts = {}
    for size in (1, 15, 4094, 4095, 4096, 4097, 40_000):
        texts[size] = tmp_path / f"{size}.ptx"
        texts[size].write_bytes(b".version 8.0 //"[: min(size, 15)].ljust(size, b"x"))
    for where in ("heap", "anonymous"):
        for size, text in texts.items():
            if where == "anonymous" and size % mmap.PAGESIZE == 0:
                continue  # no NUL follows
            cuda_bed.ran(f"image i {where} {text}", "load cuModuleLoadData m i")
            seen = probe.drain().loads.pop()
            assert is_whole(seen, text.read_bytes()), (where, size)


def test_text_at_the_end_of_what_is_mapped(probe: Probing, tmp_path: Path) -> None:
    text = tmp_path / "text.ptx"
    text.write_bytes(b".version 8.0\0")
    cuda_bed.ran(f"image i edge {text}", "load cuModuleLoadData m i")
    assert only_load(probe.drain()).data == b".version 8.0"


@pytest.mark.parametrize("size", [3, 130_000])
def test_tile_ir(probe: Probing, tmp_path: Path, size: int) -> None:
    image = tmp_path / "image.tileir"
    image.write_bytes(gpu_images.tile_ir([(1, b"strings"), (2, os.urandom(size))]))
    cuda_bed.ran(f"image i heap {image}", "load cuLibraryLoadData m i")
    assert is_whole(only_load(probe.drain()), image.read_bytes())


def test_fatbins_that_were_linked_are_one_image(probe: Probing, fatbin: Path) -> None:
    other = cuda_modules.made("elementwise", "fatbin")
    code = """
images = [open(path, "rb").read() for path in sys.argv[2:]]
memory = [ctypes.create_string_buffer(image, len(image)) for image in images]
others = (ctypes.c_uint64 * len(memory))(*map(ctypes.addressof, memory[1:]), 0)
wrapper = (ctypes.c_uint64 * 3)(
    0x466243B1 | 2 << 32, ctypes.addressof(memory[0]), ctypes.addressof(others))
assert cuda.cuModuleLoadFatBinary(ctypes.byref(out), wrapper) == 0
"""
    called_by_python(code, fatbin, other, fatbin)
    whole = b""
    for path in (fatbin, other, fatbin):
        whole += bytes(-len(whole) % 8) + path.read_bytes()
    assert is_whole(only_load(probe.drain()), whole)


def test_what_is_overwritten_right_after_the_call(probe: Probing, cubin: Path) -> None:
    cuda_bed.ran(f"image i heap {cubin}", "load cuModuleLoadData m i", "overwrite i")
    assert is_whole(only_load(probe.drain()), cubin.read_bytes())


def test_a_process_that_ends_at_once(probe: Probing, tmp_path: Path) -> None:
    image = cuda_modules.mid_size(tmp_path)
    process = started(f"image i map {image}", "load cuModuleLoadData m i", "exit 0")
    assert process.wait(timeout=30) == 0
    process.communicate()
    assert is_whole(only_load(probe.drain()), image.read_bytes())


def test_many_processes_at_once(probe: Probing, tmp_path: Path) -> None:
    images = [cuda_modules.small(tmp_path, seed) for seed in range(24)]
    processes = [
        started(f"image i map {image}", "load cuModuleLoadData m i", "exit 0") for image in images
    ]
    for process in processes:
        process.communicate(timeout=60)
    by_pid = {seen.load.process.pid: seen.data for seen in probe.drain().loads}
    assert by_pid == {
        process.pid: image.read_bytes() for process, image in zip(processes, images, strict=True)
    }
    assert len({seen.load.number for seen in probe.told.loads}) == len(images)


def test_inputs_and_output_of_the_linker(probe: Probing, cubin: Path, fatbin: Path) -> None:
    cuda_bed.ran(
        f"image i heap {cubin}",
        *("link l", "add l 0 i", f"add-file l 2 {fatbin}", "complete l made"),
    )
    added, by_name, made = probe.drain().loads
    assert is_whole(added, cubin.read_bytes()) and added.load.function == "cuLinkAddData_v2"
    assert (by_name.load.path, by_name.load.descriptor) == (str(fatbin), None)
    assert is_whole(made, cubin.read_bytes()) and made.load.function == "cuLinkComplete"


@pytest.mark.parametrize("function", ["cuModuleLoad", "cuLibraryLoadFromFile"])
@pytest.mark.parametrize("name", ["a.cubin", "ä\udcff " + "n" * 200 + ".cubin"])
def test_loads_by_name(
    probe: Probing, tmp_path: Path, cubin: Path, function: str, name: str
) -> None:
    path = tmp_path / name.replace(" ", "_")
    path.write_bytes(cubin.read_bytes())
    cuda_bed.ran(f"load {function} m {path}")
    seen = only_load(probe.drain())
    assert (seen.load.path, seen.load.missed, seen.load.address) == (str(path), "", 0)
    assert seen.load.image_bytes is None and seen.data is None
    assert probe.told.returns[0].number == seen.load.number


# -------------------------------------------------------------------- one load, several calls


def test_what_goes_on_to_another_function_is_one_load(fatbin: Path) -> None:
    library = cuda_bed.bed().library("nested")
    with probing(library) as probe:
        for function in ("cuModuleLoadDataEx", "cuLibraryLoadData", "CUDART_INTERFACE[1]"):
            cuda_bed.ran(
                f"image i heap {fatbin}", "wrap w i", f"load {function} m w", library=library
            )
            seen = probe.drain().loads.pop()
            assert not probe.told.loads
            assert seen.load.function == function and is_whole(seen, fatbin.read_bytes())
            assert {came.number for came in probe.told.returns} == {seen.load.number}
            probe.told.returns.clear()


def test_a_load_by_name_that_goes_on_gets_its_bytes(fatbin: Path) -> None:
    library = cuda_bed.bed().library("nested")
    with probing(library) as probe:
        cuda_bed.ran(f"load cuModuleLoad m {fatbin}", library=library)
        first, again = probe.drain().loads
        assert first.load.number == again.load.number
        assert again.load.function == "cuModuleLoad" and again.load.path == str(fatbin)
        assert is_whole(again, fatbin.read_bytes())


def test_a_load_whose_return_is_never_seen_hides_none(probe: Probing, tmp_path: Path) -> None:
    """The same address, again and again from the same place, with other bytes each time."""
    images = [cuda_modules.small(tmp_path, seed) for seed in range(6)]
    library = cuda_bed.bed().library()
    source = tmp_path / "jumper.c"
    source.write_text(
        """
#include <dlfcn.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
static sigjmp_buf out;
static void jump(int signal) { (void)signal; siglongjmp(out, 1); }
int main(int count, char **words)
{
	void *library = dlopen(words[1], RTLD_NOW), *image = aligned_alloc(4096, 1 << 20), *module;
	int (*load)(void *, void *) = dlsym(library, "cuModuleLoadData");
	int (*init)(int) = dlsym(library, "cuInit");
	init(0);
	signal(SIGSEGV, jump);
	for (int i = 2; i < count; i++) {
		int file = open(words[i], O_RDONLY);
		if (read(file, image, 1 << 20) < 0)
			return 1;
		close(file);
		/* The handle goes nowhere: the call ends in a signal, and is left by a jump. */
		if (!sigsetjmp(out, 1))
			load((void *)8, image);
	}
	return 0;
}
"""
    )
    binary = tmp_path / "jumper"
    subprocess.run(["gcc", "-O1", "-o", binary, source, "-ldl"], check=True)
    subprocess.run([binary, library, *images], check=True, timeout=60)
    data = [seen.data for seen in probe.drain().loads]
    assert data == [image.read_bytes() for image in images]
    assert not probe.told.returns


def test_the_next_program_in_a_thread_begins_anew(probe: Probing, cubin: Path) -> None:
    code = """
data = open(sys.argv[2], "rb").read()
image = ctypes.create_string_buffer(data, len(data))
cuda.cuModuleLoadData(ctypes.byref(out), image)
if len(sys.argv) > 3:
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[3], *sys.argv[1:3]])
"""
    again = "import ctypes, os, sys\ncuda = ctypes.CDLL(sys.argv[1])\ncuda.cuInit(0)\n"
    again += "out = ctypes.c_void_p()\n" + code
    pid = called_by_python(code, cubin, again)
    told = probe.drain()
    assert [seen.load.process.pid for seen in told.loads] == [pid, pid]
    assert all(is_whole(seen, cubin.read_bytes()) for seen in told.loads)
    assert len(told.returns) == 2


# -------------------------------------------------------------------- what cannot be had


def test_what_leads_nowhere_is_told_as_missed(probe: Probing) -> None:
    code = """
import mmap
page = mmap.mmap(-1, 8192)
at = ctypes.addressof(ctypes.c_char.from_buffer(page))
libc = ctypes.CDLL(None)
libc.mprotect(ctypes.c_void_p(at + 4096), 4096, 0)
page[:16] = (0xBA55ED50).to_bytes(4, "little") + bytes((1, 0, 16, 0)) + (9000).to_bytes(8, "little")
cuda.cuModuleLoadData(ctypes.byref(out), ctypes.c_void_p(at))
page[8:16] = (1 << 63).to_bytes(8, "little")
cuda.cuModuleLoadData(ctypes.byref(out), ctypes.c_void_p(at))
page[:4096] = b"\\x7fELF\\2\\1\\1".ljust(4096, b"\\xff")
cuda.cuModuleLoadData(ctypes.byref(out), ctypes.c_void_p(at))
"""
    called_by_python(code)
    short, huge, broken = probe.drain().loads
    assert "could not be read" in short.load.missed and short.load.image_bytes == 9016
    assert short.load.captured_bytes == 0
    assert "larger than" in huge.load.missed and huge.data is None
    assert broken.load.missed and broken.data is None
    assert probe.calls.counters().missed_loads >= 3


def test_nothing_at_all_is_told_as_missed(probe: Probing) -> None:
    cuda = "cuda.cuModuleLoadData(ctypes.byref(out), None)\n"
    called_by_python(cuda + "cuda.cuLinkAddData_v2(None, 1, None, 100, None)\n")
    nothing, sized = probe.drain().loads
    assert "could not be read" in nothing.load.missed and nothing.data is None
    assert "could not be read" in sized.load.missed and sized.load.image_bytes == 100


def test_larger_than_what_is_copied(cubin: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.ptx"
    text.write_bytes(b".version 8.0 ".ljust(20_000, b"x"))
    settings = CallSettings(ring_bytes=RING, module_limit_bytes=8192)
    with probing(cuda_bed.bed().library(), settings=settings) as probe:
        cuda_bed.ran(f"image i heap {cubin}", "load cuModuleLoadData m i")
        cuda_bed.ran(f"image i heap {text}", "load cuModuleLoadData m i")
        elf, ptx = probe.drain().loads
        assert "larger than" in elf.load.missed
        assert elf.load.image_bytes == cubin.stat().st_size and elf.data is None
        assert "larger than" in ptx.load.missed and ptx.load.image_bytes is None
        assert ptx.data == text.read_bytes()[:8192]


def test_a_full_ring_is_told(tmp_path: Path) -> None:
    image = cuda_modules.mid_size(tmp_path)
    settings = CallSettings(ring_bytes=1 << 20, wait_ms=1)
    with probing(cuda_bed.bed().library(), settings=settings) as probe:
        cuda_bed.ran(
            f"image i map {image}", "load cuModuleLoadData m i", f"load cuModuleLoad n {image}"
        )
        seen, by_name = probe.drain().loads
        assert "ring buffer was full" in seen.load.missed and not seen.load.stopped
        assert seen.load.image_bytes == image.stat().st_size
        assert 0 < seen.load.captured_bytes < 1 << 20
        assert seen.data == image.read_bytes()[: seen.load.captured_bytes]
        assert by_name.load.path == str(image)
        counters = probe.calls.counters()
        assert (counters.loads, counters.missed_loads, counters.dropped) == (2, 1, 0)


def test_a_stop_gets_what_found_no_room(tmp_path: Path) -> None:
    image = cuda_modules.mid_size(tmp_path)
    text = tmp_path / "text.ptx"
    text.write_bytes(b".version 8.0 ".ljust((3 << 20) + 5, b"x"))
    settings = CallSettings(ring_bytes=1 << 20, wait_ms=1, may_stop=True)
    with probing(cuda_bed.bed().library(), settings=settings) as probe:
        allow_stops(probe)
        for path in (image, text):
            process = started(f"image i map {path}", "load cuModuleLoadData m i", "exit 0")
            probe.until(lambda: bool(probe.told.loads), "the load")
            seen = probe.told.loads.pop()
            assert seen.load.stopped and is_whole(seen, path.read_bytes())
            process.communicate(timeout=30)
            assert process.returncode == 0
        assert probe.calls.counters().stops == 2


def test_without_a_guardian_nobody_is_stopped(tmp_path: Path) -> None:
    image = cuda_modules.mid_size(tmp_path)
    settings = CallSettings(ring_bytes=1 << 20, wait_ms=1, may_stop=True)
    with probing(cuda_bed.bed().library(), settings=settings) as probe:
        cuda_bed.ran(f"image i map {image}", "load cuModuleLoadData m i")
        seen = only_load(probe.drain())
        assert REASONS[1] in seen.load.missed and not seen.load.stopped


def allow_stops(probe: Probing) -> None:
    until = boot_ns() + 60_000_000_000
    with library() as bpf:
        bpf.checked(
            "bpf_map_update_elem", probe.calls.stops_until, bytes(4), until.to_bytes(8, "little"), 0
        )


def test_who_serves_pages_slowly_keeps_nobody_waiting(probe: Probing, cubin: Path) -> None:
    """A page whose contents are owed by the process itself: its load waits, others are told."""
    code = """
import fcntl, mmap, struct, threading, time
libc = ctypes.CDLL(None, use_errno=True)
uffd = libc.syscall(323 if os.uname().machine == "x86_64" else 282, 0)
if uffd < 0:
    os._exit(3)
fcntl.ioctl(uffd, 0xC018AA3F, struct.pack("QQQ", 0xAA, 0, 0))
page = mmap.mmap(-1, 4096)
at = ctypes.addressof(ctypes.c_char.from_buffer(page))
fcntl.ioctl(uffd, 0xC020AA00, struct.pack("QQQQ", at, 4096, 1, 0))
threading.Thread(
    target=lambda: cuda.cuLinkAddData_v2(None, 1, ctypes.c_void_p(at), 4096, None)).start()
print("waits", flush=True)
sys.stdin.read()
source = ctypes.create_string_buffer(b"x" * 4096, 4096)
fcntl.ioctl(uffd, 0xC028AA03, struct.pack("QQQQq", at, ctypes.addressof(source), 4096, 0, 0))
"""
    begin = "import ctypes, os, sys\ncuda = ctypes.CDLL(sys.argv[1])\n"
    process = subprocess.Popen(
        [sys.executable, "-c", begin + code, cuda_bed.bed().library()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    if process.stdout.readline() != b"waits\n":
        pytest.skip("this kernel has no userfaultfd")
    time.sleep(0.2)
    cuda_bed.ran(f"image i heap {cubin}", "load cuModuleLoadData m i")
    assert is_whole(only_load(probe.drain()), cubin.read_bytes())
    process.communicate(timeout=30)
    assert process.returncode == 0
    last = probe.drain().loads[-1]
    assert last.load.process.pid == process.pid and last.data == b"x" * 4096


# -------------------------------------------------------------------- contexts


def test_contexts(probe: Probing) -> None:
    with running(environment={"STUB_CUDA_DEVICES": "3"}) as program:
        made = {form: program.do(f"create {form} {form} 1") for form in ("v2", "v3", "v4")}
        bypass = program.do("create bypass b 2")
        primary = program.do("retain p 1")
        assert program.do("enumerate 2")
        green, of_green = program.do("green g 0"), program.do("green-context c g")
        program.do("release 1", "reset 1", "destroy v2", "green-destroy g")
        with pytest.raises(cuda_bed.CommandFailed):
            program.do("create v2 x 7")
        told = [
            (each.function, each.call, each.device, each.result) for each in probe.drain().contexts
        ]
        handles = {each.function: each.handle for each in probe.told.contexts[:8]}
        assert {each.process.pid for each in probe.told.contexts} == {program.pid}
    assert told == [
        ("cuCtxCreate_v2", "created", 1, 0),
        ("cuCtxCreate_v3", "created", 1, 0),
        ("cuCtxCreate_v4", "created", 1, 0),
        ("CTX_CREATE_BYPASS[1]", "created", 2, 0),
        ("cuDevicePrimaryCtxRetain", "retained", 1, 0),
        ("CUDART_INTERFACE[2]", "retained", 2, 0),
        ("cuGreenCtxCreate", "green", 0, 0),
        ("cuCtxFromGreenCtx", "green", None, 0),
        ("cuDevicePrimaryCtxRelease_v2", "released", 1, 0),
        ("cuDevicePrimaryCtxReset_v2", "reset", 1, 0),
        ("cuCtxDestroy_v2", "destroyed", None, 0),
        ("cuGreenCtxDestroy", "destroyed", None, 0),
        ("cuCtxCreate_v2", "created", 7, 101),
    ]
    assert handles["cuCtxCreate_v3"] == made["v3"] and handles["CTX_CREATE_BYPASS[1]"] == bypass
    assert handles["cuDevicePrimaryCtxRetain"] == primary
    assert (handles["cuGreenCtxCreate"], handles["cuCtxFromGreenCtx"]) == (green, of_green)
    assert probe.told.contexts[10].handle == made["v2"]


# -------------------------------------------------------------------- names


def test_names_of_kernels(probe: Probing, cubin: Path) -> None:
    with running(f"image i heap {cubin}") as program:
        module = program.do("load cuModuleLoadData m i")
        library_ = program.do("load cuLibraryLoadData l i")
        function = program.do("function f m gemm_tile")
        kernel = program.do("kernel k l " + "n" * 300)
        of_kernel, of_library = program.do("function-of kf k"), program.do("module lm l")
        for _ in range(50):
            program.do("function f m gemm_tile")
        told = probe.drain().names
    assert [(each.function, each.handle, each.of, each.name) for each in told] == [
        ("cuModuleGetFunction", function, module, "gemm_tile"),
        ("cuLibraryGetKernel", kernel, library_, "n" * 255),
        ("cuKernelGetFunction", of_kernel, kernel, ""),
        ("cuLibraryGetModule", of_library, library_, ""),
    ]
    assert probe.calls.counters().names == len(told)


def test_a_flood_of_names_leaves_room_for_loads(cubin: Path) -> None:
    settings = CallSettings(ring_bytes=1 << 20, names_of_one=100)
    with probing(cuda_bed.bed().library(), settings=settings) as probe:
        code = """
data = open(sys.argv[2], "rb").read()
image = ctypes.create_string_buffer(data, len(data))
module = ctypes.c_void_p()
assert cuda.cuModuleLoadData(ctypes.byref(module), image) == 0
for number in range(3000):
    assert cuda.cuModuleGetFunction(ctypes.byref(out), module, b"kernel%d" % number) == 0
assert cuda.cuModuleLoadData(ctypes.byref(module), image) == 0
"""
        called_by_python(code, cubin)
        told = probe.drain()
        assert len(told.names) % 100 == 0 and 0 < len(told.names) < 3000
        assert [is_whole(seen, cubin.read_bytes()) for seen in told.loads] == [True, True]
        counters = probe.calls.counters()
        assert counters.names == 3000 and counters.dropped == 3000 - len(told.names)


# -------------------------------------------------------------------- attaching


def test_what_is_probed_is_told() -> None:
    bed = cuda_bed.bed()
    plain, pushing = found_library(bed.library()), found_library(bed.library("push"))
    try:
        with CudaCalls(CallSettings(ring_bytes=RING), Told()) as calls:
            first, second = calls.attach(plain), calls.attach(pushing)
            assert calls.attach(plain) == first
            calls.detach(plain.key)
            calls.detach(plain.key)
            assert calls.attach(plain) == first
    finally:
        os.close(plain.descriptor)
        os.close(pushing.descriptor)
    assert set(first.probed) == set(second.probed) >= {"cuModuleLoadData", "CUDART_INTERFACE[8]"}
    assert not first.problems and not second.problems
    assert "cuModuleLoadData" not in first.at_start and set(second.at_start) == set(second.probed)


def test_what_cannot_be_probed_keeps_nothing_else_from_it() -> None:
    found = found_library(cuda_bed.bed().library())
    nowhere = found.points["cuModuleLoad"]._replace(file_offset=1 << 40)
    broken = found._replace(points={**found.points, "cuModuleLoad": nowhere})
    try:
        with CudaCalls(CallSettings(ring_bytes=RING), Told()) as calls:
            attached = calls.attach(broken)
    finally:
        os.close(found.descriptor)
    assert "cuModuleLoad" not in attached.probed and "cuModuleLoadData" in attached.probed
    assert any("cuModuleLoad " in problem for problem in attached.problems)


PLAIN = "int plain_load(void **out, const void *image) { *out = (void *)image; return 0; }"


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """In a library that is like no driver's, so that nobody else on the machine probes it."""
    made = tmp_path / "plain.so"
    (tmp_path / "plain.c").write_text(PLAIN)
    subprocess.run(["gcc", "-O1", "-shared", "-o", made, tmp_path / "plain.c"], check=True)
    with made.open("rb") as file:
        parsed = ELFFile(file)
        symbols = parsed.get_section_by_name(".dynsym")
        assert isinstance(symbols, SymbolTableSection)
        symbol = (symbols.get_symbol_by_name("plain_load") or [])[0]
        offset = next(iter(parsed.address_offsets(symbol.entry.st_value)))
    code = "import ctypes, sys; plain = ctypes.CDLL(sys.argv[1]); out = ctypes.c_void_p()\n"
    code += "for line in sys.stdin:\n"
    code += "    plain.plain_load(ctypes.byref(out), b'.version 8.0'); print('ok', flush=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code, made], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdin is not None and process.stdout is not None
    asked, answers = process.stdin, process.stdout

    def call() -> None:
        asked.write(b"\n")
        assert answers.readline() == b"ok\n"

    told = Told()
    try:
        call()
        before = text_pages.bpf_of(os.getpid())
        with made.open("rb") as file, CudaCalls(CallSettings(ring_bytes=RING), told) as calls:
            status = os.fstat(file.fileno())
            key = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
            points = {"cuModuleLoadData": EntryPoint(offset, at_start=True)}
            found = FoundLibrary(key, file.fileno(), str(made), None, None, points)
            for times in (1, 2):
                assert calls.attach(found).probed == ("cuModuleLoadData",)
                assert text_pages.changed(process.pid, made, [offset]) == [offset]
                call()
                calls.poll()
                assert [seen.data for seen in told.loads] == [b".version 8.0"] * times
                calls.detach(key)
                assert not text_pages.changed(process.pid, made, [offset])
                call()
        assert text_pages.bpf_of(os.getpid()) == before
        calls.close()
        assert len(told.loads) == 2
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(not uprobes.together(), reason="this kernel has one kind of link only")
def test_on_kernels_without_links_of_many_points(
    monkeypatch: pytest.MonkeyPatch, cubin: Path
) -> None:
    monkeypatch.setattr(uprobes, "together", lambda: False)
    with probing(cuda_bed.bed().library(), settings=CallSettings(ring_bytes=RING)) as probe:
        cuda_bed.ran(f"image i heap {cubin}", "load cuModuleLoadData m i", "function f m gemm")
        assert is_whole(only_load(probe.drain()), cubin.read_bytes())
        assert [each.name for each in probe.told.names] == ["gemm"]
