"""The guardian: a process whose one job is that nobody whom a probe stopped stays stopped.

It is forked before anything is attached, holds the map of stopped processes (stopped.py), and lives
on when the tracer is killed until nobody is in that map any more. Probes stop processes only until
the moment that the guardian wrote last into ``stops_until``; so without it, or while it hangs, no
process is stopped. It withdraws that word when it had to do the tracer's work, until the tracer
shows that it is back.

The map is pinned in the BPF file system, where one is mounted, under the guardian's own pid: what
tracer and guardian leave when both are killed at once, the next guardian or ``sweep`` continues.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import struct
import time
import warnings
from typing import NoReturn

from gpuwarden.confinement.rights import keep_descriptors, unblock_signals
from gpuwarden.errors import GpuwardenError, Malformed, Unavailable
from gpuwarden.probes import pinning
from gpuwarden.probes.cuda.stopped import StoppedMap, boot_ns
from gpuwarden.probes.libbpf import Libbpf, library
from gpuwarden.sensors.process.stat_lines import parse_stat

LATE_NS = 500_000_000
"""A process that is stopped for so long is continued, whatever the tracer does."""
WORD_NS = 400_000_000
"""For so long after the guardian looked, processes may be stopped."""
LOOK_SECONDS = 0.1
BEAT_SECONDS = 0.05
"""The tracer shows itself at most so often."""
SWEEP_NS = SILENCE_NS = 1_000_000_000
HURRY_SECONDS = 0.02
"""Between two looks while somebody is stopped, or the tracer is gone."""
LINGER_NS = 300_000_000
"""The map must have been empty for so long before the guardian of a dead tracer ends."""
RESTART_LIMIT = 8
"""Guardians that died; beyond, nobody is stopped any more."""
PIN = "stopped_"
NAME = b"gpuwarden-guard"

_WORD = struct.Struct("=Q")
_FIRST = struct.pack("=I", 0)
_BEAT, _DONE = b"b", b"d"
_IGNORED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGPIPE", "SIGTSTP", "SIGUSR1", "SIGUSR2")
_PR_SET_NAME = 15
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of linux/proc_ns.h
_PRIORITY = -10
_STAT_BYTES = 8192


class Guardian:
    """The tracer's side: the guardian started, seen to live, started anew; a context manager."""

    def __init__(
        self, stopped: int, stops_until: int, *, directory: str = pinning.DIRECTORY
    ) -> None:
        """``stopped``, ``stops_until``: descriptors of the two maps, which stay their owner's.

        Errors: Unavailable where there is no libbpf.
        """
        with library() as bpf:
            self._bpf = bpf
        self._maps = (stopped, stops_until)
        self._directory = directory
        self._socket: socket.socket | None = None
        self._next_beat = 0.0
        self._word_ns = self._looked_ns = 0
        self._pidfd: int | None = None
        self.pid: int | None = None
        self.starts = 0
        self.problem = ""
        """Why nobody may be stopped now; empty while a guardian runs."""

    def __enter__(self) -> Guardian:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Forks it. Errors: Unavailable, and then no process is stopped."""
        try:
            if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE:
                raise Unavailable(
                    "this is not the host's pid namespace: who was stopped could not be continued",
                    remedy="run in the host's pid namespace (hostPID)",
                )
            self._start()
        except (OSError, AttributeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            self.problem = f"no guardian, so nobody is stopped: {reason}"
            raise Unavailable(self.problem) from error
        except Unavailable as error:
            self.problem = f"no guardian, so nobody is stopped: {error}"
            raise
        self.problem = ""

    def _start(self) -> None:
        tracer = os.pidfd_open(os.getpid())
        ours, theirs = socket.socketpair()
        try:
            with warnings.catch_warnings():
                # The child uses no lock and no thread of its parent's.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _guard(self._bpf, (*self._maps, theirs.fileno(), tracer), self._directory)
            self._pidfd = os.pidfd_open(pid)
            self._socket, self.pid, self._word_ns = ours, pid, boot_ns()
            self.starts += 1
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(tracer)
            theirs.close()

    def fileno(self) -> int | None:
        """Readable when it has died; another one after each start. None while there is none."""
        return self._pidfd

    def look(self) -> None:
        """Tells it that the tracer works, and starts another if it died; called in each turn."""
        if self._socket is None or self._pidfd is None or time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + BEAT_SECONDS
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(0):
            with contextlib.suppress(OSError):
                self._socket.send(_BEAT, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            now = boot_ns()
            if self._said() > now or now - self._looked_ns >= LATE_NS:
                # After a pause of the tracer's own the guardian waits for just this look.
                self._word_ns = now
            self._looked_ns = now
            late = now - self._word_ns >= SILENCE_NS
            self.problem = "nobody is stopped now: the guardian gives no word" if late else ""
            return
        self._bury()
        # What the dead one was about to continue, and its pin, are the next one's.
        if self.starts < RESTART_LIMIT:
            with contextlib.suppress(Unavailable):
                self.start()
        else:
            self.problem = f"nobody is stopped any more: {self.starts} guardians have died"

    def _said(self) -> int:
        value = ctypes.create_string_buffer(_WORD.size)
        self._bpf.call("bpf_map_lookup_elem", self._maps[1], _FIRST, value)
        until_ns: int = _WORD.unpack(value.raw)[0]
        return until_ns

    def _bury(self) -> None:
        pid, pidfd = self.pid, self._pidfd
        if self._socket is not None:
            self._socket.close()
        if pidfd is not None:
            os.close(pidfd)
        self._socket = self._pidfd = self.pid = None
        _say(self._bpf, self._maps[1], 0)
        if pid is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def stop(self, seconds: float = 2.0) -> None:
        """Stops are over; the guardian continues who is left and ends, which is waited for.

        One that takes longer is left to end by itself.
        """
        if self._socket is None or self._pidfd is None:
            return
        with contextlib.suppress(OSError):
            self._socket.send(_DONE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        self._socket.close()
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if poll.poll(seconds * 1000):
            self._bury()
        else:
            os.close(self._pidfd)
            self._socket = self._pidfd = self.pid = None


def _say(bpf: Libbpf, stops_until: int, until_ns: int) -> None:
    """Until when processes may be stopped. 0: not at all."""
    bpf.call("bpf_map_update_elem", stops_until, _FIRST, _WORD.pack(until_ns), 0)


# -------------------------------------------------------------------- what was left behind


def sweep(directory: str = pinning.DIRECTORY) -> int:
    """Continues whom the dead guardians of earlier tracers left stopped; how many there were.

    A process that was continued by hand since, and stopped again by its owner, cannot be told from
    one that was not: it is continued too. Pins of guardians that live are left alone.
    Errors: Unavailable where something is pinned and there is no libbpf.
    """
    left = [name for name in _pins(directory) if not _lives(name)]
    if not left:
        return 0
    with library() as bpf:
        return _swept(bpf, directory, left)


def _swept(bpf: Libbpf, directory: str, names: list[str]) -> int:
    continued = 0
    for name in names:
        path = os.path.join(directory, name)
        descriptor = bpf.call("bpf_obj_get", path.encode())
        if descriptor >= 0:
            try:
                stops = StoppedMap(bpf, descriptor)
                for record in stops.records():
                    continued += stops.release(record) == "continued"
                if stops.records():
                    continue  # somebody is not settled yet: the next sweep finds it
            finally:
                os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(path)
    return continued


def _pins(directory: str) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if name.startswith(PIN)]
    except OSError:
        return []


def _lives(pin: str) -> bool:
    pid, _, start = pin.removeprefix(PIN).partition("_")
    return pid.isdecimal() and start == str(_start_ticks(pid))


def _start_ticks(pid: str) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = parse_stat(file.read(_STAT_BYTES))
    except (OSError, Malformed):
        return None
    return None if line.state in "ZX" else line.start_time_ticks


# -------------------------------------------------------------------- the guardian itself


def _guard(bpf: Libbpf, descriptors: tuple[int, ...], directory: str) -> NoReturn:
    # Nothing may leave but _exit: no handler, finaliser or buffer of the tracer's.
    try:
        # A group and a session of its own: what ends the agent's does not end it.
        os.setsid()
        gc.disable()
        for name in _IGNORED:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        unblock_signals()
        stopped, stops_until, control, tracer = keep_descriptors(descriptors)
        _make_hard_to_kill()
        _Watch(bpf, StoppedMap(bpf, stopped), stops_until, control, tracer).run(directory)
    except BaseException:  # noqa: BLE001, S110 - the tracer sees its end and starts another
        pass
    finally:
        os._exit(0)


def _make_hard_to_kill() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME, 0, 0, 0)
    for score in (b"-1000", b"-900", b"0"):
        # Less than it has needs CAP_SYS_RESOURCE.
        try:
            with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
                file.write(score)
            break
        except OSError:
            continue
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)


class _Watch:
    """The guardian's loop."""

    def __init__(
        self, bpf: Libbpf, stops: StoppedMap, stops_until: int, control: int, tracer: int
    ) -> None:
        self._bpf = bpf
        self._stops = stops
        self._stops_until = stops_until
        self._control = control
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(tracer, select.POLLIN)
        self._tracer = tracer
        self._alone = False
        self._distrusts = False
        """The tracer left a process stopped too long, and has not been heard of since."""

    def run(self, directory: str) -> None:
        pinned = _pin(self._bpf, self._stops.descriptor, directory)
        empty_since = boot_ns()
        sweep_at = 0
        while True:
            hurried = self._look()
            now = boot_ns()
            if now >= sweep_at:
                sweep(directory)
                sweep_at = now + SWEEP_NS
            if hurried:
                empty_since = now
            elif self._alone and now - empty_since >= LINGER_NS:
                break
            patience = HURRY_SECONDS if hurried or self._alone else LOOK_SECONDS
            self._hear(patience)
        if pinned:
            with contextlib.suppress(OSError):
                os.unlink(pinned)

    def _look(self) -> bool:
        """Continues whom it must; whether anybody is left in the map."""
        records = self._stops.records()
        now = boot_ns()
        for record in records:
            if self._alone:
                self._stops.release(record)
            elif now - record.stopped_at_ns >= LATE_NS:
                # A record alone is no sign of a tracer that hangs: the process may run.
                self._distrusts |= self._stops.release(record) == "continued"
        may_stop = not (self._alone or self._distrusts)
        _say(self._bpf, self._stops_until, now + WORD_NS if may_stop else 0)
        return bool(records)

    def _hear(self, patience: float) -> None:
        if self._alone:
            time.sleep(patience)
            return
        for descriptor, _ in self._poll.poll(patience * 1000):
            if descriptor == self._tracer:
                self._alone = True
                continue
            said = os.read(self._control, 4096)
            self._distrusts = False
            self._alone |= not said or _DONE in said


def _pin(bpf: Libbpf, stopped: int, directory: str) -> str:
    """The path at which the map outlives its holders; empty where that is not possible."""
    path = os.path.join(directory, f"{PIN}{os.getpid()}_{_start_ticks('self')}")
    try:
        pinning.prepare(directory, mount=False)
        bpf.checked("bpf_obj_pin", stopped, path.encode())
    except (OSError, GpuwardenError):
        return ""
    return path
