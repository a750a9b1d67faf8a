"""Nobody whom a probe stopped stays stopped: not when the tracer or the guardian is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuwarden.cuda import guardian
from gpuwarden.cuda.guardian import Guardian
from gpuwarden.errors import Unavailable
from gpuwarden.probes.cuda.stopped import REASONS, StopRecord, boot_ns
from gpuwarden.probes.cuda.stopped_image import WantedImage, read_stopped
from tests.support import cuda_bed, text_pages
from tests.support.cuda_bed import Program
from tests.support.idle import wait_for
from tests.support.probes import ROOT
from tests.support.standstill import Standstill
from tests.support.stopping import StopProbe, file_offset, start_time_ns, state, stop_probe

pytestmark = pytest.mark.real

STOPPED, NOT_ALLOWED, OTHERS, BEFORE = 0, 1, 2, 3


@pytest.fixture
def probe() -> Iterator[StopProbe]:
    with stop_probe() as made:
        made.attach(cuda_bed.bed().library())
        yield made


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "image"
    path.write_bytes(b"\x7fELF" + os.urandom(9_000_000))
    return path


@pytest.fixture
def bpffs(tmp_path: Path) -> Iterator[Path]:
    """A folder in a BPF file system of the test's own."""
    subprocess.run(["mount", "-t", "bpf", "bpf", str(tmp_path)], check=True)
    try:
        (tmp_path / "pins").mkdir(mode=0o700)
        yield tmp_path / "pins"
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@contextmanager
def guarded(probe: StopProbe, directory: Path | str = "/nowhere") -> Iterator[Guardian]:
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
    program.tell("load cuModuleLoadData m i")


def stopped_record(probe: StopProbe, program: Program) -> StopRecord:
    record = wait_for(lambda: probe.map.record(program.pid), "a record")
    wait_for(lambda: state(program.pid) == "T", "the stop")
    assert isinstance(record, StopRecord)
    return record


# -------------------------------------------------------------------- who may be stopped


def test_without_a_guardians_word_nobody_is_stopped(probe: StopProbe, image: Path) -> None:
    with loading(image) as (program, _):
        program.do("load cuModuleLoadData m i")
        probe.allow(boot_ns() - 1)
        program.do("load cuModuleLoadData m i")
    assert probe.outcomes()[NOT_ALLOWED] == 2
    assert sum(probe.outcomes()) == 2
    assert len(REASONS) == 6


def test_the_guardian_gives_its_word_and_takes_it_back(probe: StopProbe) -> None:
    with guarded(probe) as guard:
        assert boot_ns() < guard._said() <= boot_ns() + guardian.WORD_NS
        assert Path(f"/proc/{guard.pid}/comm").read_text() == "gpuwarden-guard\n"
        assert os.getsid(guard.pid or 0) == guard.pid
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(guard.pid or 0, number)
        time.sleep(0.3)
        assert guard._said() > boot_ns()
        pid = guard.pid
    assert guard._said() == 0
    assert guard.pid is None
    assert not Path(f"/proc/{pid}").exists()


def test_a_process_that_its_owner_or_a_debugger_holds_is_not_stopped(
    probe: StopProbe, image: Path
) -> None:
    probe.allow()
    with loading(image) as (program, _):
        tracer = subprocess.Popen(
            [sys.executable, "-c", _SEIZE, str(program.pid)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert tracer.stdout is not None
            assert tracer.stdout.readline() == "0\n"
            program.do("load cuModuleLoadData m i")
        finally:
            tracer.kill()
            tracer.communicate()
        assert probe.outcomes() == [0, 0, 1, 0, 0, 0]
        # No longer traced, it can be stopped.
        load(program)
        assert probe.map.release(stopped_record(probe, program)) == "continued"
        program.answer()


_SEIZE = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(0x4206, ctypes.c_long(int(sys.argv[1])), None, None), flush=True)
time.sleep(60)
"""


# -------------------------------------------------------------------- read and continued


def test_an_image_is_read_whole_and_the_process_goes_on(probe: StopProbe, image: Path) -> None:
    with guarded(probe), loading(image) as (program, address):
        load(program)
        record = stopped_record(probe, program)
        content = image.read_bytes()
        wanted = WantedImage(address, len(content), prefix=content[:64])
        found = read_stopped(probe.map, record.pid, record.start_time_ns, program.pid, wanted)
        program.answer()
        assert found.missed == ""
        assert found.captured_bytes == len(content)
        assert found.descriptor is not None
        assert os.pread(found.descriptor, len(content) + 1, 0) == content
        with pytest.raises(OSError, match="not permitted"):
            os.pwrite(found.descriptor, b"x", 0)
        os.close(found.descriptor)
        assert probe.map.records() == []
        # And it can be stopped again.
        load(program)
        stopped_record(probe, program)
        program.answer()


def test_what_cannot_be_read_is_said_and_the_process_goes_on(probe: StopProbe, image: Path) -> None:
    probe.allow()
    with loading(image) as (program, address):
        for wanted, missed in (
            (WantedImage(8, 4096), "at byte 0: Input/output error"),
            (WantedImage(address, 64, prefix=b"others"), "other bytes"),
            (WantedImage(address, 3, until_nul=True), "its text goes on"),
        ):
            load(program)
            record = stopped_record(probe, program)
            found = read_stopped(probe.map, record.pid, record.start_time_ns, program.pid, wanted)
            program.answer()
            assert missed in found.missed
            if found.descriptor is not None:
                assert found.captured_bytes == 3
                os.close(found.descriptor)
        late = read_stopped(
            probe.map, record.pid, record.start_time_ns, program.pid, WantedImage(address, 64)
        )
        assert late.missed == "the process went on before its memory was read"
        assert probe.map.records() == []


def test_pages_that_nobody_serves_hang_no_reader(probe: StopProbe) -> None:
    probe.allow()
    argv = [sys.executable, "-c", _UNSERVED, str(cuda_bed.bed().library())]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if not said.strip().isdecimal():
                pytest.skip(f"no page faults for user space here: {said}")
            record = wait_for(lambda: probe.map.record(process.pid), "a record")
            wanted = WantedImage(int(said), 4096)
            found = read_stopped(probe.map, record.pid, record.start_time_ns, process.pid, wanted)
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


# -------------------------------------------------------------------- whom the guardian continues


def test_the_guardian_continues_whom_the_tracer_forgets_and_then_forbids_stops(
    probe: StopProbe, image: Path
) -> None:
    with guarded(probe) as guard, loading(image) as (program, _):
        with Standstill([program.pid]) as seen:
            program.do("load cuModuleLoadData m i")
        assert 0.3 < seen.longest[program.pid].seconds < 1
        # The tracer did nothing, so nobody is stopped until it is heard of.
        program.do("load cuModuleLoadData m i")
        assert probe.outcomes()[STOPPED] == 1
        wait_for(lambda: not probe.map.records(), "the record to go")
        guard._next_beat = 0
        guard.look()
        wait_for(lambda: guard._said() > boot_ns(), "the word to be given again")
        load(program)
        probe.map.release(stopped_record(probe, program))
        program.answer()
        assert guard.problem == ""


def test_a_stop_of_the_owners_is_left_to_the_owner(probe: StopProbe, image: Path) -> None:
    probe.allow()
    with loading(image) as (program, _):
        load(program)
        record = stopped_record(probe, program)
        os.kill(program.pid, signal.SIGSTOP)
        assert probe.map.release(record, was_sent=True) == "others"
        assert probe.map.records() == []
        time.sleep(0.1)
        assert state(program.pid) == "T"
        os.kill(program.pid, signal.SIGCONT)
        program.answer()


def test_only_the_process_of_a_record_is_continued(probe: StopProbe, image: Path) -> None:
    with loading(image) as (program, _):
        began = start_time_ns(program.pid)
        os.kill(program.pid, signal.SIGSTOP)
        wait_for(lambda: state(program.pid) == "T", "the stop")
        probe.write_down(program.pid, began - 10**9)
        [record] = probe.map.records()
        assert probe.map.release(record, was_sent=True) == "gone"
        assert state(program.pid) == "T"
        os.kill(program.pid, signal.SIGCONT)
        wait_for(lambda: state(program.pid) != "T", "its going on")
        # One that runs may be about to stop: its record stays for a while.
        probe.write_down(program.pid, began)
        [record] = probe.map.records()
        assert probe.map.release(record) == "kept"
        probe.write_down(program.pid, began, boot_ns() - 2 * 10**9)
        [record] = probe.map.records()
        assert probe.map.release(record) == "runs"
        assert probe.map.records() == []


def test_a_stopped_process_that_is_killed_leaves_no_record(probe: StopProbe, image: Path) -> None:
    with guarded(probe), loading(image) as (program, _):
        load(program)
        stopped_record(probe, program)
        program.close()
        wait_for(lambda: not probe.map.records(), "the record to go")


def test_threads_that_load_at_once_make_one_stop(probe: StopProbe, image: Path) -> None:
    with guarded(probe) as guard, loading(image) as (program, _):
        for number in range(4):
            program.do(f"thread load cuModuleLoadData m{number} i")
        program.tell("join")
        wait_for(lambda: probe.outcomes()[STOPPED], "a stop")
        with Standstill([program.pid]) as seen:
            while sum(probe.outcomes()) < 4:
                guard.look()
                for record in probe.map.records():
                    probe.map.release(record, was_sent=True)
        assert program.answer() == 0
        assert seen.longest[program.pid].seconds < 1
        assert probe.map.records() == [] or state(program.pid) != "T"


# -------------------------------------------------------------------- the tracer dies


@contextmanager
def tracing(directory: Path, what: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A tracer with a guardian of its own, and that one's pid."""
    argv = [sys.executable, "-m", "tests.support.stop_tracer"]
    argv += [str(cuda_bed.bed().library()), str(directory), what]
    tracer = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert tracer.stdout is not None
        word, _, pid = tracer.stdout.readline().partition(" ")
        assert word == "guarded", tracer.stdout.read()
        yield tracer, int(pid)
    finally:
        tracer.kill()
        tracer.communicate()


def test_when_the_tracer_is_killed_the_guardian_continues_all_and_ends(
    bpffs: Path, image: Path
) -> None:
    file = cuda_bed.bed().library()
    offset = file_offset(file, "cuModuleLoadData")
    with tracing(bpffs, "hold") as (tracer, pid), loading(image) as (program, _):
        assert text_pages.changed(program.pid, file, [offset]) == [offset]
        wait_for(lambda: os.listdir(bpffs), "the pin")
        time.sleep(guardian.LOOK_SECONDS)
        loaded = text_pages.bpf_of(tracer.pid)
        assert all(loaded.values())
        load(program)
        wait_for(lambda: state(program.pid) == "T", "the stop")
        with Standstill([program.pid]) as seen:
            tracer.kill()
            tracer.wait()
            program.answer()
            wait_for(lambda: not _is_alive(pid), "the guardian's end")
        assert seen.longest[program.pid].seconds < 1
        assert os.listdir(bpffs) == []
        assert text_pages.changed(program.pid, file, [offset]) == []
        wait_for(lambda: _have_gone(loaded), "the kernel's letting go")
        program.do("load cuModuleLoadData m i")


def _is_alive(pid: int) -> bool:
    return state(pid) not in ("", "Z", "X")


def _have_gone(loaded: dict[str, set[int]]) -> bool:
    now = text_pages.bpf_ids()
    return all(now[kind].isdisjoint(ids) for kind, ids in loaded.items())


def test_a_tracer_that_stands_still_stops_nobody_for_long(bpffs: Path, image: Path) -> None:
    with tracing(bpffs, "release") as (tracer, _), loading(image) as (program, _):
        time.sleep(3 * guardian.LOOK_SECONDS)
        with Standstill([program.pid]) as seen:
            program.do("load cuModuleLoadData m i")
            os.kill(tracer.pid, signal.SIGSTOP)
            until = time.monotonic() + 2
            loads = 0
            while time.monotonic() < until:
                program.do("load cuModuleLoadData m i")
                loads += 1
                time.sleep(0.01)
            os.kill(tracer.pid, signal.SIGCONT)
        assert seen.longest[program.pid].seconds < 1
        # After the one that was forgotten no other was stopped.
        assert loads > 20


def test_what_both_leave_when_both_are_killed_the_next_one_continues(
    bpffs: Path, image: Path
) -> None:
    with tracing(bpffs, "hold") as (tracer, pid), loading(image) as (program, _):
        wait_for(lambda: os.listdir(bpffs), "the pin")
        time.sleep(guardian.LOOK_SECONDS)
        # While its guardian lives, a pin is nobody else's.
        assert guardian.sweep(str(bpffs)) == 0
        assert len(os.listdir(bpffs)) == 1
        load(program)
        wait_for(lambda: state(program.pid) == "T", "the stop")
        os.kill(pid, signal.SIGKILL)
        tracer.kill()
        tracer.wait()
        wait_for(lambda: not _is_alive(pid), "its end")
        assert state(program.pid) == "T"
        assert guardian.sweep(str(bpffs)) == 1
        program.answer()
        assert os.listdir(bpffs) == []


def test_a_guardian_that_is_killed_is_replaced_and_its_stops_are_the_next_ones(
    probe: StopProbe, image: Path, bpffs: Path
) -> None:
    with guarded(probe, bpffs) as guard, loading(image) as (program, _):
        first = guard.pid
        load(program)
        stopped_record(probe, program)
        os.kill(first or 0, signal.SIGKILL)
        with Standstill([program.pid]) as seen:
            while state(program.pid) == "T":
                guard.look()
                time.sleep(0.02)
        assert seen.longest[program.pid].seconds < 1
        program.answer()
        assert guard.pid not in (first, None)
        assert guard.starts == 2
        wait_for(lambda: len(os.listdir(bpffs)) == 1, "the old pin's end")
    assert os.listdir(bpffs) == []


def test_guardians_that_keep_dying_end_the_stops(
    probe: StopProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guardian, "RESTART_LIMIT", 2)
    with guarded(probe) as guard:
        for _ in range(2):
            os.kill(guard.pid or 0, signal.SIGKILL)
            time.sleep(guardian.BEAT_SECONDS)
            guard.look()
        assert guard.problem == "nobody is stopped any more: 2 guardians have died"
        assert guard.fileno() is None
        assert guard._said() == 0


def test_outside_the_hosts_pid_namespace_there_is_no_guardian(
    probe: StopProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guardian, "_FIRST_PID_NAMESPACE", 1)
    guard = Guardian(probe.map.descriptor, probe.stops_until)
    with pytest.raises(Unavailable, match="pid namespace"):
        guard.start()
    assert "nobody is stopped" in guard.problem
    assert guard.fileno() is None
