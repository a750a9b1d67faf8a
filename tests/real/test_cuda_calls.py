"""Loads of a driver library, seen from outside: their bytes, and that each is one load."""

from __future__ import annotations

import mmap
import os
import subprocess
import time
from pathlib import Path

import pytest

from gpuwarden.code import elf
from gpuwarden.errors import Malformed
from gpuwarden.probes.cuda.image_memory import Extent, extents
from tests.support import cuda_bed, cuda_modules, gpu_images, nvcc
from tests.support.cuda_bed import running, started
from tests.support.cuda_probing import (
    Probing,
    called_by_python,
    is_whole,
    only_load,
    probing,
)

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("built")]


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


def many_sections(count: int) -> bytes:
    """An ELF file with so many sections that their number does not fit its field."""
    at = elf.HEADER.size
    head = bytearray(elf.HEADER.pack(2, 7, 8, 2, 190, 1, 0, 0, at, 0, at, 56, 0, 64, 0, 0))
    head[:7] = elf.IDENT_64_LITTLE
    first = elf.SECTION.pack(0, 0, 0, 0, 0, count, 0, 0, 0, 0)
    last = elf.SECTION.pack(0, 1, 0, 0, at + count * 64, 321, 0, 0, 0, 0)
    return bytes(head) + first + bytes(64 * (count - 2)) + last + os.urandom(321)


def test_an_image_ends_where_it_says_itself(probe: Probing, tmp_path: Path) -> None:
    """By the kernel's count, by ours from outside, and by what reads files: all the same."""
    images = [
        nvcc.cubin("gemm"),
        nvcc.cubin("gemm", "80", "-rdc=true"),
        nvcc.cubin("gemm", "80", "-rdc=true", "-G"),
        nvcc.fatbin("gemm", ("sm_80",), "-G"),
    ]
    data = [path.read_bytes() for path in images]
    data += [many_sections(70_000), many_sections(60_000), gpu_images.tile_ir()]
    for number, image in enumerate(data):
        path = tmp_path / str(number)
        path.write_bytes(image + os.urandom(5000))
        cuda_bed.ran(f"image i heap {path}", "load cuModuleLoadData m i")
        seen = probe.drain().loads.pop()

        def read(address: int, size: int, image: bytes = path.read_bytes()) -> bytes:
            return image[address : address + size]

        if number == 4:
            assert seen.load.missed and seen.data is None
            with pytest.raises(Malformed):
                list(extents(read, 0))
            continue
        assert is_whole(seen, image), number
        assert list(extents(read, 0)) == [Extent(0, len(image))]
        if image.startswith(elf.MAGIC):
            assert elf.end_of(image) == len(image)


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
