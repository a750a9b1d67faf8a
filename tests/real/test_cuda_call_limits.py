"""Loads that cannot be had whole: what is told of them, and that others are not touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuwarden.probes.cuda import captures, stopped_image
from gpuwarden.probes.cuda.calls import CallSettings
from gpuwarden.probes.cuda.stopped import REASONS, boot_ns
from gpuwarden.probes.libbpf import library
from tests.support import cuda_bed, cuda_modules
from tests.support.cuda_bed import started
from tests.support.cuda_probing import (
    RING,
    Probing,
    called_by_python,
    is_whole,
    only_load,
    probing,
)
from tests.support.idle import PATIENCE_SECONDS, wait_for
from tests.support.stopping import state

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("built")]


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


def test_a_stop_gets_what_found_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped_image, "STOP_LIMIT_SECONDS", PATIENCE_SECONDS)
    image = cuda_modules.mid_size(tmp_path)
    text = tmp_path / "text.ptx"
    text.write_bytes(b".version 8.0 ".ljust((3 << 20) + 5, b"x"))
    settings = CallSettings(ring_bytes=1 << 20, wait_ms=1, may_stop=True)
    with probing(cuda_bed.bed().library(), settings=settings) as probe:
        allow_stops(probe)
        for path in (image, text):
            process = started(f"image i map {path}", "load cuModuleLoadData m i", "exit 0")
            # Before the ring is looked at: a quick reader makes room for all of it.
            wait_for_stillness(process.pid)
            probe.until(lambda: bool(probe.told.loads), "the load")
            seen = probe.told.loads.pop()
            assert seen.load.stopped and is_whole(seen, path.read_bytes())
            process.communicate(timeout=30)
            assert process.returncode == 0
        assert probe.calls.counters().stops == 2


def wait_for_stillness(pid: int) -> None:
    wait_for(lambda: state(pid) == "T", "the stop")


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


def test_who_serves_pages_slowly_keeps_nobody_waiting(
    probe: Probing, cubin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page whose contents are owed by the process itself: its load waits, others are told."""
    monkeypatch.setattr(captures, "PATIENCE_SECONDS", 10 * PATIENCE_SECONDS)
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
    before = probe.calls.counters().loads
    process = subprocess.Popen(
        [sys.executable, "-c", begin + code, cuda_bed.bed().library()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    if process.stdout.readline() != b"waits\n":
        pytest.skip("this kernel has no userfaultfd")
    wait_for(lambda: probe.calls.counters().loads > before, "the load that waits")
    cuda_bed.ran(f"image i heap {cubin}", "load cuModuleLoadData m i")
    assert is_whole(only_load(probe.drain()), cubin.read_bytes())
    process.communicate(timeout=30)
    assert process.returncode == 0
    last = probe.drain().loads[-1]
    assert last.load.process.pid == process.pid and last.data == b"x" * 4096


def test_a_flood_of_names_leaves_room_for_loads(cubin: Path) -> None:
    settings = CallSettings(ring_bytes=1 << 20, names_of_one=100, window_seconds=60.0)
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
        assert len(told.names) == 100
        assert [is_whole(seen, cubin.read_bytes()) for seen in told.loads] == [True, True]
        counters = probe.calls.counters()
        assert (counters.names, counters.dropped) == (3000, 2900)


def test_a_process_that_loads_on_and_on_is_known(cubin: Path) -> None:
    settings = CallSettings(ring_bytes=RING, loads_of_one=10, window_seconds=60.0)
    with probing(cuda_bed.bed().library(), settings=settings) as probe:
        loads = ["load cuModuleLoadData m i"] * 30
        cuda_bed.ran(f"image i heap {cubin}", *loads)
        cuda_bed.ran(f"image i heap {cubin}", loads[0])
        *whole, last, other = probe.drain().loads
        assert [is_whole(seen, cubin.read_bytes()) for seen in (*whole, other)] == [True] * 10
        assert "more at once than is told of" in last.load.missed and last.data is None
        assert last.load.process.pid == whole[0].load.process.pid != other.load.process.pid
        counters = probe.calls.counters()
        assert (counters.loads, counters.dropped, counters.missed_loads) == (31, 20, 1)
