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
from gpuwarden.probes.cuda.stopped import boot_ns
from tests.support import cuda_bed, text_pages
from tests.support.idle import wait_for
from tests.support.probes import ROOT
from tests.support.standstill import Standstill
from tests.support.stopping import (
    StopProbe,
    answered,
    file_offset,
    guarded,
    load,
    loading,
    state,
    stopped_record,
)

pytestmark = pytest.mark.real

STOPPED, NOT_ALLOWED, OTHERS, BEFORE = 0, 1, 2, 3


@pytest.fixture
def bpffs(tmp_path: Path) -> Iterator[Path]:
    """A folder in a BPF file system of the test's own."""
    subprocess.run(["mount", "-t", "bpf", "bpf", str(tmp_path)], check=True)
    try:
        (tmp_path / "pins").mkdir(mode=0o700)
        yield tmp_path / "pins"
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_the_guardian_gives_its_word_and_takes_it_back(stopper: StopProbe) -> None:
    with guarded(stopper) as guard:
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


# -------------------------------------------------------------------- whom the guardian continues


def test_the_guardian_continues_whom_the_tracer_forgets_and_then_forbids_stops(
    stopper: StopProbe, bulk: Path
) -> None:
    with guarded(stopper) as guard, loading(bulk) as (program, _):
        with Standstill([program.pid]) as seen:
            load(program)
            answered(program)
        assert 0.3 < seen.longest[program.pid].seconds < 1
        # The tracer did nothing, so nobody is stopped until it is heard of.
        load(program)
        answered(program)
        assert stopper.outcomes()[STOPPED] == 1
        wait_for(lambda: not stopper.map.records(), "the record to go")
        guard._next_beat = 0
        guard.look()
        wait_for(lambda: guard._said() > boot_ns(), "the word to be given again")
        load(program)
        stopper.map.release(stopped_record(stopper, program))
        answered(program)
        assert guard.problem == ""


def test_a_stopped_process_that_is_killed_leaves_no_record(stopper: StopProbe, bulk: Path) -> None:
    with guarded(stopper), loading(bulk) as (program, _):
        load(program)
        stopped_record(stopper, program)
        program.close()
        wait_for(lambda: not stopper.map.records(), "the record to go")


def test_threads_that_load_at_once_make_one_stop(stopper: StopProbe, bulk: Path) -> None:
    with guarded(stopper) as guard, loading(bulk) as (program, _):
        for number in range(4):
            program.do(f"thread load cuModuleLoadData m{number} i")
        program.tell("join")
        wait_for(lambda: stopper.outcomes()[STOPPED], "a stop")
        with Standstill([program.pid]) as seen:
            while sum(stopper.outcomes()) < 4:
                guard.look()
                for record in stopper.map.records():
                    stopper.map.release(record)
        assert answered(program) == 0
        assert seen.longest[program.pid].seconds < 1
        assert stopper.map.records() == [] or state(program.pid) != "T"


_EXECS = """
import ctypes, os, sys, threading, time
driver = ctypes.CDLL(sys.argv[1])
driver.cuInit(0)
image = ctypes.create_string_buffer(b"\\x7fELF" + bytes(60))
def load():
    while True:
        driver.cuModuleLoadData(ctypes.byref(ctypes.c_void_p()), image)
for _ in range(3):
    threading.Thread(target=load, daemon=True).start()
time.sleep(float(sys.argv[2]))
os.execv("/bin/sleep", ["sleep", "0.3"])
"""


def test_programs_that_exec_while_they_are_stopped_go_on(stopper: StopProbe) -> None:
    library = str(cuda_bed.bed().library())
    with guarded(stopper) as guard:
        programs = [
            subprocess.Popen([sys.executable, "-c", _EXECS, library, str(0.02 * number)])
            for number in range(12)
        ]
        with Standstill([program.pid for program in programs]) as seen:
            while any(program.poll() is None for program in programs):
                guard.look()
                for record in stopper.map.records():
                    stopper.map.release(record)
                time.sleep(0.001)
    assert [program.returncode for program in programs] == [0] * 12
    assert max(one.seconds for one in seen.longest.values()) < 1
    assert stopper.outcomes()[STOPPED] > 12


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
    bpffs: Path, bulk: Path
) -> None:
    file = cuda_bed.bed().library()
    offset = file_offset(file, "cuModuleLoadData")
    with tracing(bpffs, "hold") as (tracer, pid), loading(bulk) as (program, _):
        assert text_pages.changed(program.pid, file, [offset]) == [offset]
        wait_for(lambda: os.listdir(bpffs), "the pin")
        time.sleep(guardian.LOOK_SECONDS)
        loaded = text_pages.bpf_of(tracer.pid)
        assert all(loaded.values())
        with Standstill([program.pid]) as seen:
            load(program)
            wait_for(lambda: state(program.pid) == "T", "the stop")
            tracer.kill()
            tracer.wait()
            answered(program)
            wait_for(lambda: not _is_alive(pid), "the guardian's end")
        assert seen.longest[program.pid].seconds < 1
        assert os.listdir(bpffs) == []
        assert text_pages.changed(program.pid, file, [offset]) == [] or text_pages.link_holders()
        wait_for(lambda: _have_gone(loaded), "the kernel's letting go")
        load(program)
        answered(program)


def _is_alive(pid: int) -> bool:
    return state(pid) not in ("", "Z", "X")


def _have_gone(loaded: dict[str, set[int]]) -> bool:
    now = text_pages.bpf_ids()
    return all(now[kind].isdisjoint(ids) for kind, ids in loaded.items())


def test_a_tracer_that_stands_still_stops_nobody_for_long(bpffs: Path, bulk: Path) -> None:
    with tracing(bpffs, "release") as (tracer, _), loading(bulk) as (program, _):
        time.sleep(3 * guardian.LOOK_SECONDS)
        with Standstill([program.pid]) as seen:
            load(program)
            answered(program)
            os.kill(tracer.pid, signal.SIGSTOP)
            until = time.monotonic() + 2
            loads = 0
            while time.monotonic() < until:
                load(program)
                answered(program)
                loads += 1
                time.sleep(0.01)
            os.kill(tracer.pid, signal.SIGCONT)
        assert seen.longest[program.pid].seconds < 1
        # After the one that was forgotten no other was stopped.
        assert loads > 20


def test_what_both_leave_when_both_are_killed_the_next_one_continues(
    bpffs: Path, bulk: Path
) -> None:
    with tracing(bpffs, "hold") as (tracer, pid), loading(bulk) as (program, _):
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
        answered(program)
        assert os.listdir(bpffs) == []


def test_a_guardian_that_is_killed_is_replaced_and_its_stops_are_the_next_ones(
    stopper: StopProbe, bulk: Path, bpffs: Path
) -> None:
    with guarded(stopper, bpffs) as guard, loading(bulk) as (program, _):
        first = guard.pid
        with Standstill([program.pid]) as seen:
            load(program)
            stopped_record(stopper, program)
            os.kill(first or 0, signal.SIGKILL)
            while state(program.pid) == "T":
                guard.look()
                time.sleep(0.02)
        assert seen.longest[program.pid].seconds < 1
        answered(program)
        assert guard.pid not in (first, None)
        assert guard.starts == 2
        wait_for(lambda: len(os.listdir(bpffs)) == 1, "the old pin's end")
    assert os.listdir(bpffs) == []


def test_guardians_that_keep_dying_end_the_stops(
    stopper: StopProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guardian, "RESTART_LIMIT", 2)
    with guarded(stopper) as guard:
        for _ in range(2):
            os.kill(guard.pid or 0, signal.SIGKILL)
            time.sleep(guardian.BEAT_SECONDS)
            guard.look()
        assert guard.problem == "nobody is stopped any more: 2 guardians have died"
        assert guard.fileno() is None
        assert guard._said() == 0


def test_outside_the_hosts_pid_namespace_there_is_no_guardian(
    stopper: StopProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guardian, "_FIRST_PID_NAMESPACE", 1)
    guard = Guardian(stopper.map.descriptor, stopper.stops_until)
    with pytest.raises(Unavailable, match="pid namespace"):
        guard.start()
    assert "nobody is stopped" in guard.problem
    assert guard.fileno() is None
