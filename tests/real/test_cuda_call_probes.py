"""Contexts and names of kernels; how probes are attached, and what older kernels get."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from gpuwarden.probes import return_probes, uprobes
from gpuwarden.probes.cuda import calls
from gpuwarden.probes.cuda.calls import CallSettings, CudaCalls
from gpuwarden.probes.cuda.library import EntryPoint, FoundLibrary
from tests.support import cuda_bed, gpu_images, nvcc, text_pages
from tests.support.cuda_bed import running
from tests.support.cuda_probing import (
    RING,
    Probing,
    Told,
    found_library,
    is_whole,
    only_load,
    probing,
)

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("built")]


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
    before = probe.calls.counters().names
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
    assert probe.calls.counters().names - before == len(told)


# -------------------------------------------------------------------- attaching


def test_what_is_probed_is_told() -> None:
    bed = cuda_bed.bed()
    plain, pushing = found_library(bed.library()), found_library(bed.library("push"))
    try:
        with CudaCalls(CallSettings(ring_bytes=RING), Told()) as probes:
            first, second = probes.attach(plain), probes.attach(pushing)
            assert probes.attach(plain) == first
            probes.detach(plain.key)
            probes.detach(plain.key)
            assert probes.attach(plain) == first
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
        with CudaCalls(CallSettings(ring_bytes=RING), Told()) as probes:
            attached = probes.attach(broken)
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
        with made.open("rb") as file, CudaCalls(CallSettings(ring_bytes=RING), told) as probes:
            status = os.fstat(file.fileno())
            key = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
            points = {"cuModuleLoadData": EntryPoint(offset, at_start=True)}
            found = FoundLibrary(key, file.fileno(), str(made), None, None, points)
            for times in (1, 2):
                assert probes.attach(found).probed == ("cuModuleLoadData",)
                assert text_pages.changed(process.pid, made, [offset]) == [offset]
                call()
                probes.poll()
                assert [seen.data for seen in told.loads] == [b".version 8.0"] * times
                probes.detach(key)
                assert not text_pages.changed(process.pid, made, [offset])
                call()
        assert text_pages.bpf_of(os.getpid()) == before
        probes.close()
        assert len(told.loads) == 2
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("form", ["cubin", "fatbin", "ptx", "tile-ir"])
def test_where_programs_cannot_sleep_images_are_read_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str
) -> None:
    monkeypatch.setattr(calls, "SLEEPING", ("no_such_program",))
    if form == "tile-ir":
        image = tmp_path / "image.tileir"
        image.write_bytes(gpu_images.tile_ir([(1, b"strings"), (2, os.urandom(70_000))]))
    else:
        image = {"cubin": nvcc.cubin, "fatbin": nvcc.fatbin, "ptx": nvcc.ptx}[form]("gemm")
    path = cuda_bed.bed().library()
    with probing(path, settings=CallSettings(ring_bytes=RING)) as probe:
        assert "by a race" in probe.calls.no_copies
        wrapped = ("wrap w i", "load CUDART_INTERFACE[1] n w") if form == "fatbin" else ()
        with running(f"image i heap {image}", "load cuModuleLoadData m i", *wrapped):
            told = probe.drain()
        whole = [is_whole(seen, image.read_bytes()) for seen in told.loads]
        assert whole == [True] * (2 if wrapped else 1)
        told.loads.clear()
        cuda_bed.ran(f"image i heap {image}", "load cuModuleLoadData m i", "link l", "add l 0 i")
        cuda_bed.ran(f"load cuModuleLoad m {image}")
        *ended, by_name = probe.drain().loads
        assert [seen.load.missed != "" for seen in ended] == [True, True]
        assert not by_name.load.missed and "by a race" in ended[0].load.missed


def test_where_returns_cannot_be_probed(monkeypatch: pytest.MonkeyPatch, cubin: Path) -> None:
    monkeypatch.setattr(return_probes, "danger", lambda: "returns are dangerous here")
    found = found_library(cuda_bed.bed().library())
    os.close(found.descriptor)
    with probing(cuda_bed.bed().library(), settings=CallSettings(ring_bytes=RING)) as probe:
        cuda_bed.ran(f"image i heap {cubin}", "load cuModuleLoadData m i", "create v2 c 0")
        assert is_whole(only_load(probe.drain()), cubin.read_bytes())
        assert not probe.told.returns
        (context,) = probe.told.contexts
        assert (context.call, context.handle, context.device) == ("created", 0, 0)


@pytest.mark.skipif(not uprobes.together(), reason="this kernel has one kind of link only")
def test_on_kernels_without_links_of_many_points(
    monkeypatch: pytest.MonkeyPatch, cubin: Path
) -> None:
    monkeypatch.setattr(uprobes, "together", lambda: False)
    with probing(cuda_bed.bed().library(), settings=CallSettings(ring_bytes=RING)) as probe:
        cuda_bed.ran(f"image i heap {cubin}", "load cuModuleLoadData m i", "function f m gemm")
        assert is_whole(only_load(probe.drain()), cubin.read_bytes())
        assert [each.name for each in probe.told.names] == ["gemm"]
