"""Processes that a step is tried on: started, told apart, given the number of another one."""

from __future__ import annotations

import ctypes
import os
import secrets
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuwarden.finding import Verdict
from gpuwarden.host import Host
from gpuwarden.model import Container, NodeFacts, Process, Snapshot
from gpuwarden.policy import Policy
from gpuwarden.probes.exec_count import ExecCounts
from gpuwarden.respond.identity import read_identity
from gpuwarden.respond.step import Identity, Target
from gpuwarden.sensors.process import details
from gpuwarden.sensors.seen import Seen
from tests.support.containers import cgroup_mounts, wait_until

NO_COUNTS = ExecCounts("/nonexistent")
# struct clone_args (clone3(2)): flags, pidfd, child_tid, parent_tid, exit_signal, stack,
# stack_size, tls, set_tid, set_tid_size, cgroup.
_CLONE_ARGS = struct.Struct("=11Q")
_CLONE3 = 435
_SIGCHLD = 17


def nobody_tells(line: str) -> None:
    """Takes what a step tells while it works."""
    del line


def target_of(
    pid: int,
    *,
    identity: Identity | None = None,
    verdict: Verdict = "cryptominer",
    container: Container | None = None,
    snapshot: Snapshot | None = None,
) -> Target:
    """A target as the command makes it, of a process that is there."""
    host = Host()
    processes = [one for one in details.read(host, Seen(), [pid]) if isinstance(one, Process)]
    process = processes[0] if processes else None
    snapshot = snapshot or Snapshot(taken_at_ns=0, node=NodeFacts(hostname="here"))
    if process is not None:
        snapshot = replace(snapshot, processes=(*snapshot.processes, process))
    return Target(
        verdict=verdict,
        identity=identity or read_identity(host, pid),
        process=process,
        rows=(),
        container=container,
        workload=None,
        gpus=snapshot.gpus,
        snapshot=snapshot,
        policy=Policy(),
    )


@contextmanager
def running(*argv: str, as_argv: Sequence[str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own that is what it will be: its words are ``as_argv``."""
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_for_words(process.pid, as_argv or argv)
        yield process
    finally:
        with suppress(ProcessLookupError):
            # Its session is its own, and it is not yet collected: nobody else's.
            os.killpg(process.pid, 9)
        process.wait()
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()


def words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]


def wait_for_words(pid: int, argv: Sequence[str]) -> None:
    wait_until(lambda: words(pid) == list(argv), f"{argv} running")


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def ticks(pid: int) -> int:
    """Processor time used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[11]) + int(fields[12])


def stands_still(pid: int) -> bool:
    """Whether a process that computes without end computes nothing for a while."""
    before = ticks(pid)
    time.sleep(0.15)
    return ticks(pid) == before


def wait_for_computing(pid: int) -> None:
    """Returns once a process computes; on a busy machine it gets its turn late."""
    before = ticks(pid)
    wait_until(lambda: ticks(pid) > before, f"process {pid} computing")


def wait_for_sleeping(pid: int) -> None:
    """Returns once a process waits for something: it has done all that comes before that."""
    wait_until(lambda: state(pid) == "S", f"process {pid} sleeping")


def wait_for_trap(pid: int, number: int = 15) -> None:
    """Returns once a process ignores or handles a signal, which it does only after its exec."""

    def is_set() -> bool:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        masks = [int(line.split()[1], 16) for line in lines if line[:7] in ("SigIgn:", "SigCgt:")]
        return any(mask >> (number - 1) & 1 for mask in masks)

    wait_until(is_set, f"process {pid} minding signal {number}")


def born_as(pid: int, argv: Sequence[str]) -> int:
    """Starts a process with a number that is free. Errors: OSError."""
    wanted = ctypes.c_int(pid)
    arguments = ctypes.create_string_buffer(
        _CLONE_ARGS.pack(0, 0, 0, 0, _SIGCHLD, 0, 0, 0, ctypes.addressof(wanted), 1, 0)
    )
    # With the lock of the interpreter held, so that the child has it too.
    libc = ctypes.PyDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    number = libc.syscall(ctypes.c_long(_CLONE3), arguments, ctypes.c_long(_CLONE_ARGS.size))
    if number == 0:
        try:
            os.execvp(argv[0], list(argv))
        finally:
            os._exit(127)
    if number < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    wait_for_words(pid, argv)
    return int(number)


def untouched(pid: int, argv: Sequence[str]) -> Callable[[], bool]:
    """Asks whether a process lives, runs and is still what it was; waits while it is at a disk."""

    def asked() -> bool:
        if words(pid) != list(argv):
            return False
        # Of one that has just begun, the kernel reads pages; a frozen one never comes out of it.
        wait_until(lambda: state(pid) != "D", f"process {pid} being on its way")
        return state(pid) in "SR" and words(pid) == list(argv)

    return asked


def children(pid: int) -> list[int]:
    """Those of its first thread."""
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def child_of(pid: int, *argv: str) -> int:
    """Its child with these words, once it has one; it may be that its parent has just forked it."""
    wait_until(lambda: any(_has_words(one, argv) for one in children(pid)), f"{argv} running")
    return next(one for one in children(pid) if _has_words(one, argv))


def _has_words(pid: int, argv: Sequence[str]) -> bool:
    try:
        return words(pid) == list(argv)
    except OSError:
        return False


def freezer_mounts() -> list[tuple[int, Path]]:
    """(version, where) of each hierarchy that can freeze."""
    mounts = cgroup_mounts()
    found = [(1, mounts["freezer"])] if "freezer" in mounts else []
    return found + ([(2, mounts[""])] if "" in mounts else [])


def mount_of(version: int) -> Path:
    """Where the freezer of that version is mounted; a skip where it is not."""
    mounts = [mount for found, mount in freezer_mounts() if found == version]
    if not mounts:
        pytest.skip(f"no freezer of version {version} is mounted here")
    return mounts[0]


@contextmanager
def group_of(mount: Path, *pids: int) -> Iterator[Path]:
    """A group with these processes in it, who leave it in the end."""
    group = mount / f"gpuwarden-test-{secrets.token_hex(4)}"
    group.mkdir()
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield group
    finally:
        for name, word in (("cgroup.freeze", "0"), ("freezer.state", "THAWED")):
            if (group / name).exists():
                (group / name).write_text(word)
        wait_until(lambda: not _moved(group, mount), "the group being empty")
        wait_until(lambda: _removed(group), "the group being let go of")


def _moved(group: Path, mount: Path) -> list[str]:
    """Who was in the group and is not any more, as far as it lives."""
    found = (group / "cgroup.procs").read_text().split()
    for pid in found:
        with suppress(ProcessLookupError):
            (mount / "cgroup.procs").write_text(pid)
    return found


def _removed(group: Path) -> bool:
    """Whether the group is gone; one who has ended may be counted in it a little longer."""
    with suppress(OSError):
        group.rmdir()
    return not group.exists()
