"""Nobody whom a probe stopped stays stopped: not when the tracer or the guardian is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
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
    wait_for_stop,
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
        assert guard._said() <= boot_ns() + guardian.WORD_NS
        assert Path(f"/proc/{guard.pid}/comm").read_text() == "gpuwarden-guard\n"
        assert os.getsid(guard.pid or 0) == guard.pid
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(guard.pid or 0, number)
        # One may be on its way while the signals come; the next is given by who has had them.
        for _ in range(2):
            wait_for_word(guard, after=guard._said())
        pid = guard.pid
    assert guard._said() == 0
    assert guard.pid is None
    assert not Path(f"/proc/{pid}").exists()


def wait_for_word(guard: Guardian, *, after: int) -> None:
    wait_for(lambda: guard._said() > after, "the word to be given again")


# -------------------------------------------------------------------- whom the guardian continues


def test_the_guardian_continues_whom_the_tracer_forgets_and_then_forbids_stops(
    stopper: StopProbe, bulk: Path
) -> None:
    with guarded(stopper) as guard, loading(bulk) as (program, _):
        with Standstill([program.pid]) as seen:
            began = boot_ns()
            load(program)
            answered(program)
            assert boot_ns() - began >= guardian.LATE_NS
        assert seen.longest[program.pid].seconds < 1
        # The tracer did nothing, so nobody is stopped until it is heard of.
        load(program)
        answered(program)
        assert stopper.outcomes()[STOPPED] == 1
        wait_for(lambda: not stopper.map.records(), "the record to go")
        guard._next_beat = 0
        guard.look()
        wait_for_word(guard, after=boot_ns())
        load(program)
        wait_for_stop(stopper, 2)
        release_all(stopper)
        answered(program)
        assert guard.problem == ""


def release_all(stopper: StopProbe) -> None:
    for record in stopper.map.records():
        stopper.map.release(record)


def test_a_stopped_process_that_is_killed_leaves_no_record(stopper: StopProbe, bulk: Path) -> None:
    with guarded(stopper), loading(bulk) as (program, _):
        load(program)
        wait_for_stop(stopper)
        program.close()
        wait_for(lambda: not stopper.map.records(), "the record to go")


def test_threads_that_load_at_once_make_one_stop(stopper: StopProbe, bulk: Path) -> None:
    with guarded(stopper) as guard, loading(bulk) as (program, _):

        def all_were_there() -> bool:
            done = sum(stopper.outcomes()) >= 4
            guard.look()
            release_all(stopper)
            return done

        with Standstill([program.pid]) as seen:
            for number in range(4):
                program.tell(f"thread load cuModuleLoadData m{number} i")
            program.tell("join")
            wait_for(all_were_there, "four loads")
            wait_for(lambda: not stopper.map.records(), "their going on")
            answers = [program.answer() for _ in range(5)]
        assert answers == [0, 1, 2, 3, 0]
        assert stopper.outcomes()[STOPPED]
        assert seen.longest[program.pid].seconds < 1
        assert stopper.map.records() == [] or state(program.pid) != "T"


_EXECS = """
import ctypes, os, sys, threading
driver = ctypes.CDLL(sys.argv[1])
driver.cuInit(0)
image = ctypes.create_string_buffer(b"\\x7fELF" + bytes(60))
def load():
    while True:
        driver.cuModuleLoadData(ctypes.byref(ctypes.c_void_p()), image)
for _ in range(3):
    threading.Thread(target=load, daemon=True).start()
sys.stdin.readline()
os.execv("/bin/sleep", ["sleep", "0.3"])
"""


def test_programs_that_exec_while_they_are_stopped_go_on(stopper: StopProbe) -> None:
    library = str(cuda_bed.bed().library())
    with guarded(stopper) as guard:
        argv = [sys.executable, "-c", _EXECS, library]
        programs = [subprocess.Popen(argv, stdin=subprocess.PIPE) for _ in range(12)]
        loading = list(programs)

        def have_ended() -> bool:
            guard.look()
            release_all(stopper)
            # All are stopped again and again before the first one is another program.
            if loading and stopper.outcomes()[STOPPED] > 12:
                stdin = loading.pop().stdin
                assert stdin is not None
                stdin.close()
            return all(program.poll() is not None for program in programs)

        try:
            with Standstill([program.pid for program in programs]) as seen:
                wait_for(have_ended, "the end of all programs")
        finally:
            for program in programs:
                program.kill()
                program.wait()
    assert [program.returncode for program in programs] == [0] * 12
    assert max(one.seconds for one in seen.longest.values()) < 1
    assert stopper.outcomes()[STOPPED] > 12


# -------------------------------------------------------------------- the tracer dies


@contextmanager
def tracing(directory: Path, what: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A tracer with a guardian of its own, and that one's pid."""
    argv = [sys.executable, "-m", "tests.support.stop_tracer"]
    argv += [str(cuda_bed.bed().library()), str(directory), what]
    # Killed, it leaves what it compiled.
    scratch = tempfile.mkdtemp(prefix="gpuwarden-tracer-")
    env = {**os.environ, "TMPDIR": scratch}
    tracer = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    try:
        assert tracer.stdout is not None
        word, _, pid = tracer.stdout.readline().partition(" ")
        assert word == "guarded", tracer.stdout.read()
        yield tracer, int(pid)
    finally:
        tracer.kill()
        tracer.communicate()
        shutil.rmtree(scratch)


def test_when_the_tracer_is_killed_the_guardian_continues_all_and_ends(
    bpffs: Path, bulk: Path
) -> None:
    file = cuda_bed.bed().library()
    offset = file_offset(file, "cuModuleLoadData")
    with tracing(bpffs, "hold") as (tracer, pid), loading(bulk) as (program, _):
        assert text_pages.changed(program.pid, file, [offset]) == [offset]
        assert len(os.listdir(bpffs)) == 1
        loaded = text_pages.bpf_of(tracer.pid)
        assert all(loaded.values())
        load(program)
        wait_for(lambda: state(program.pid) == "T", "the stop")
        with Standstill([program.pid]) as seen:
            tracer.kill()
            tracer.wait()
            answered(program)
            wait_for_end(pid)
        assert seen.longest[program.pid].seconds < 1
        assert os.listdir(bpffs) == []
        assert text_pages.changed(program.pid, file, [offset]) == [] or text_pages.link_holders()
        wait_for(lambda: _have_gone(loaded), "the kernel's letting go")
        load(program)
        answered(program)


def wait_for_end(pid: int) -> None:
    wait_for(lambda: state(pid) in ("", "Z", "X"), f"the end of {pid}")


def _have_gone(loaded: dict[str, set[int]]) -> bool:
    now = text_pages.bpf_ids()
    return all(now[kind].isdisjoint(ids) for kind, ids in loaded.items())


def test_a_tracer_that_stands_still_stops_nobody_for_long(bpffs: Path, bulk: Path) -> None:
    with tracing(bpffs, "release") as (tracer, _), loading(bulk) as (program, _):
        with Standstill([program.pid]) as seen:
            load(program)
            answered(program)
            os.kill(tracer.pid, signal.SIGSTOP)
            wait_for(lambda: state(tracer.pid) == "T", "the tracer's standing still")
            for _ in range(60):
                load(program)
                answered(program)
                time.sleep(0.01)
            os.kill(tracer.pid, signal.SIGCONT)
        assert seen.longest[program.pid].seconds < 1
        # The first, the one that was forgotten, and one for a beat that was still on its way.
        assert seen.longest[program.pid].stretches <= 3


def test_what_both_leave_when_both_are_killed_the_next_one_continues(
    bpffs: Path, bulk: Path
) -> None:
    with tracing(bpffs, "hold") as (tracer, pid), loading(bulk) as (program, _):
        # While its guardian lives, a pin is nobody else's.
        assert guardian.sweep(str(bpffs)) == 0
        assert len(os.listdir(bpffs)) == 1
        load(program)
        wait_for(lambda: state(program.pid) == "T", "the stop")
        # It must not see its guardian's end: it would start another.
        os.kill(tracer.pid, signal.SIGSTOP)
        wait_for(lambda: state(tracer.pid) == "T", "the tracer's standing still")
        os.kill(pid, signal.SIGKILL)
        tracer.kill()
        tracer.wait()
        wait_for_end(pid)
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
            wait_for_stop(stopper)
            os.kill(first or 0, signal.SIGKILL)
            while guard.starts < 2 or state(program.pid) == "T":
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
            pid = guard.pid or 0
            os.kill(pid, signal.SIGKILL)
            wait_for_end(pid)
            guard._next_beat = 0
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
