"""Processes are stopped only when they may be, read while they stand still, and continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuwarden.probes.cuda import stopped_image
from gpuwarden.probes.cuda.stopped import REASONS, boot_ns
from gpuwarden.probes.cuda.stopped_image import WantedImage, read_stopped
from tests.support import cuda_bed
from tests.support.idle import PATIENCE_SECONDS, wait_for
from tests.support.stopping import (
    FOREVER_NS,
    StopProbe,
    answered,
    load,
    loading,
    start_time_ns,
    state,
    stopped_record,
)

pytestmark = pytest.mark.real

STOPPED, NOT_ALLOWED, OTHERS = 0, 1, 2


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch, stopper: StopProbe) -> None:
    """Processes may be stopped, and be so for as long as it takes to read them."""
    monkeypatch.setattr(stopped_image, "STOP_LIMIT_SECONDS", PATIENCE_SECONDS)
    stopper.allow()


# -------------------------------------------------------------------- who may be stopped


def test_without_a_guardians_word_nobody_is_stopped(stopper: StopProbe, bulk: Path) -> None:
    with loading(bulk) as (program, _):
        load(program)
        answered(program)
        stopper.allow(boot_ns() - 1)
        load(program)
        answered(program)
    assert stopper.outcomes()[NOT_ALLOWED] == 2
    assert sum(stopper.outcomes()) == 2
    assert len(REASONS) == 6


def test_a_process_that_its_owner_or_a_debugger_holds_is_not_stopped(
    stopper: StopProbe, bulk: Path
) -> None:
    stopper.allow()
    with loading(bulk) as (program, _):
        tracer = subprocess.Popen(
            [sys.executable, "-c", _SEIZE, str(program.pid)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert tracer.stdout is not None
            assert tracer.stdout.readline() == "0\n"
            load(program)
            answered(program)
        finally:
            tracer.kill()
            tracer.communicate()
        assert stopper.outcomes() == [0, 0, 1, 0, 0, 0]
        # No longer traced, it can be stopped.
        load(program)
        assert stopper.map.release(stopped_record(stopper, program)) == "continued"
        answered(program)


_SEIZE = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(0x4206, ctypes.c_long(int(sys.argv[1])), None, None), flush=True)
time.sleep(60)
"""


# -------------------------------------------------------------------- read and continued


@pytest.mark.usefixtures("patient")
def test_an_image_is_read_whole_and_the_process_goes_on(stopper: StopProbe, bulk: Path) -> None:
    with loading(bulk) as (program, address):
        load(program)
        record = stopped_record(stopper, program)
        content = bulk.read_bytes()
        wanted = WantedImage(address, len(content), prefix=content[:64])
        found = read_stopped(stopper.map, record.pid, record.start_time_ns, program.pid, wanted)
        answered(program)
        assert found.missed == ""
        assert found.captured_bytes == len(content)
        assert found.descriptor is not None
        assert os.pread(found.descriptor, len(content) + 1, 0) == content
        with pytest.raises(OSError, match="not permitted"):
            os.pwrite(found.descriptor, b"x", 0)
        os.close(found.descriptor)
        assert stopper.map.records() == []
        # And it can be stopped again.
        load(program)
        assert stopper.map.release(stopped_record(stopper, program)) == "continued"
        answered(program)


@pytest.mark.usefixtures("patient")
def test_what_cannot_be_read_is_said(stopper: StopProbe, bulk: Path) -> None:
    with loading(bulk) as (program, address):
        for wanted, missed in (
            (WantedImage(8, 4096), "at byte 0: Input/output error"),
            (WantedImage(address, 64, prefix=b"others"), "other bytes"),
            (WantedImage(address, 3, until_nul=True), "its text goes on"),
        ):
            load(program)
            record = stopped_record(stopper, program)
            found = read_stopped(stopper.map, record.pid, record.start_time_ns, program.pid, wanted)
            answered(program)
            assert missed in found.missed
            if found.descriptor is not None:
                assert found.captured_bytes == 3
                os.close(found.descriptor)
        late = read_stopped(
            stopper.map, record.pid, record.start_time_ns, program.pid, WantedImage(address, 64)
        )
        assert late.missed == "the process went on before its memory was read"
        assert stopper.map.records() == []


def test_pages_that_nobody_serves_hang_no_reader(stopper: StopProbe) -> None:
    stopper.allow()
    argv = [sys.executable, "-c", _UNSERVED, str(cuda_bed.bed().library())]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if not said.strip().isdecimal():
                pytest.skip(f"no page faults for user space here: {said}")
            record = wait_for(lambda: stopper.map.record(process.pid), "a record")
            wanted = WantedImage(int(said), 4096)
            found = read_stopped(stopper.map, record.pid, record.start_time_ns, process.pid, wanted)
            # Linux lets others than the process itself wait for no page-fault handler.
            assert found.missed in (
                "at byte 0: Input/output error",
                "reading the stopped process took longer than it may be stopped",
            )
            assert found.descriptor is None
            wait_for(lambda: state(process.pid) not in "T", "its going on")
        finally:
            process.kill()


_UNSERVED = """
import ctypes, fcntl, mmap, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
faults = libc.syscall(323, 0)
if faults < 0:
    sys.exit(f"errno {ctypes.get_errno()}")
fcntl.ioctl(faults, 0xC018AA3F, struct.pack("=QQQ", 0xAA, 0, 0))
pages = mmap.mmap(-1, 1 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
fcntl.ioctl(faults, 0xC020AA00, struct.pack("=QQQQ", address, 1 << 20, 1, 0))
driver = ctypes.CDLL(sys.argv[1])
print(address, flush=True)
driver.cuModuleLoadData(ctypes.byref(ctypes.c_void_p()), ctypes.c_void_p(address))
"""


# -------------------------------------------------------------------- whose stop it is


def test_a_stop_of_the_owners_is_left_to_the_owner(stopper: StopProbe, bulk: Path) -> None:
    stopper.allow()
    with loading(bulk) as (program, _):
        load(program)
        record = stopped_record(stopper, program)
        os.kill(program.pid, signal.SIGSTOP)
        assert stopper.map.release(record, was_sent=True) == "others"
        assert stopper.map.records() == []
        time.sleep(0.1)
        assert state(program.pid) == "T"
        os.kill(program.pid, signal.SIGCONT)
        answered(program)


def test_the_first_process_of_a_container_is_stopped_and_continued(
    stopper: StopProbe, bulk: Path
) -> None:
    stopper.allow()
    bed = cuda_bed.bed()
    argv = ["unshare", "--pid", "--fork", "--kill-child", str(bed.program()), str(bed.library())]
    commands = [f"image i heap {bulk}", "load cuModuleLoadData m i"]
    with subprocess.Popen([*argv, *commands], stdout=subprocess.PIPE, text=True) as process:
        try:
            [record] = wait_for(stopper.map.records, "a record")
            wait_for(lambda: state(record.pid) == "T", "the stop")
            status = Path(f"/proc/{record.pid}/status").read_text()
            assert f"NSpid:\t{record.pid}\t1\n" in status
            assert stopper.map.release(record) == "continued"
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()


def test_only_the_process_of_a_record_is_continued(stopper: StopProbe, bulk: Path) -> None:
    with loading(bulk) as (program, _):
        began = start_time_ns(program.pid)
        os.kill(program.pid, signal.SIGSTOP)
        wait_for(lambda: state(program.pid) == "T", "the stop")
        stopper.write_down(program.pid, began - 10**9)
        [record] = stopper.map.records()
        assert stopper.map.release(record, was_sent=True) == "gone"
        assert state(program.pid) == "T"
        os.kill(program.pid, signal.SIGCONT)
        wait_for(lambda: state(program.pid) != "T", "its going on")
        # One that runs may be about to stop: its record stays for a while.
        stopper.write_down(program.pid, began, boot_ns() + FOREVER_NS)
        [record] = stopper.map.records()
        assert stopper.map.release(record) == "kept"
        stopper.write_down(program.pid, began, boot_ns() - 2 * 10**9)
        [record] = stopper.map.records()
        assert stopper.map.release(record) == "runs"
        assert stopper.map.records() == []
