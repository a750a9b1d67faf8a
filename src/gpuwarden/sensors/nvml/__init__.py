"""The NVIDIA driver's own account of GPUs and their processes, asked in a child with a deadline.

The library is found and checked first; a child without rights opens it and answers in lines, a
line for each GPU, so that one that hangs costs the GPUs after it and not those before.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator

from msgspec import Struct, field

from gpuwarden.errors import Denied, GpuwardenError, Malformed, TimedOut, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import (
    AccountedProcess,
    Gap,
    Gpu,
    GpuClient,
    LibraryCheck,
)
from gpuwarden.sensors.nvml import errors
from gpuwarden.sensors.nvml.child import Child, start_child
from gpuwarden.sensors.nvml.kernel import (
    DriverGpu,
    driver_gpus,
    driver_is_loaded,
    has_mig_instances,
    identify,
    is_this_machine,
    may_administrate,
)
from gpuwarden.sensors.nvml.library import LIBRARY_NAME, Candidate, candidates
from gpuwarden.sensors.nvml.message import LINE_LIMIT_BYTES, Message, encode, parse_message
from gpuwarden.sensors.seen import Seen

NAME = "nvml"
Fact = LibraryCheck | Gpu | GpuClient | AccountedProcess | Gap

READ_BYTES = 1 << 18
ANSWER_LIMIT_BYTES = 64 << 20
LEAST_WAIT_SECONDS = 0.5
"""Given to a child even when the deadline went by while nobody was reading."""
REAP_SECONDS = 0.5


class _Answer(Struct):
    """All that one child said, and how it ended."""

    messages: list[Message] = field(default_factory=list)
    complete: bool = False
    timed_out: bool = False
    left_behind: bool = False
    wait_status: int | None = None
    damage: str = ""

    @property
    def failed(self) -> bool:
        return not self.complete or any(
            m.failed_code is not None or m.failed_load is not None for m in self.messages
        )

    @property
    def privileges_would_help(self) -> bool:
        return any(m.privileges_would_help for m in self.messages)


class NvmlQuery:
    """A question to the driver that is under way; ``read`` waits for the answer."""

    def __init__(self, host: Host, deadline_seconds: float) -> None:
        self.driver_version: str | None = None
        self.cuda_version: str | None = None
        self._host = host
        self._deadline_seconds = deadline_seconds
        self._found: list[Candidate] = []
        self._chosen: Candidate | None = None
        self._failure: GpuwardenError | None = None
        self._child: Child | None = None
        self._unprivileged = os.geteuid() == 0
        self._give_up_at = 0.0

    @property
    def child_pid(self) -> int | None:
        """The child while it lives: it holds the driver's device nodes and is not a holder."""
        return self._child.pid if self._child else None

    def read(self, seen: Seen) -> Iterator[Fact]:
        """What the driver said; ends by the deadline.

        Errors, all after the facts that could be had: Unavailable when there is no driver; Denied
        when the library was refused or the driver refuses; TimedOut when it hung; Malformed when
        it crashed or answered nonsense.
        """
        del seen
        try:
            yield from (found.check for found in self._found)
            if self._failure is not None:
                raise self._failure
            answer = self._collect()
            if self._unprivileged and not answer.timed_out and answer.privileges_would_help:
                self._start(unprivileged=False)
                second = self._collect()
                if answer.failed or not second.failed:
                    answer = second
            yield from self._facts(answer)
        finally:
            self.close()

    def close(self) -> None:
        """Ends the child if it still runs."""
        if self._child is not None:
            self._end(_Answer())

    # ---------------------------------------------------------------- the child

    def _start(self, *, unprivileged: bool) -> None:
        assert self._chosen is not None and self._chosen.check.resolved is not None  # noqa: S101
        path = self._chosen.check.resolved
        self._unprivileged = unprivileged
        self._give_up_at = time.monotonic() + self._deadline_seconds
        self._child = start_child(
            lambda send: _ask(path, send),
            unprivileged=unprivileged,
            cpu_seconds=self._deadline_seconds,
        )

    def _collect(self) -> _Answer:
        answer = _Answer()
        if self._child is None:
            return answer
        give_up_at = max(self._give_up_at, time.monotonic() + LEAST_WAIT_SECONDS)
        poll = select.poll()
        poll.register(self._child.pipe, select.POLLIN)
        pending = b""
        total = 0
        try:
            while not answer.complete:
                left = give_up_at - time.monotonic()
                if left <= 0 or not poll.poll(max(1, int(left * 1000))):
                    answer.timed_out = time.monotonic() >= give_up_at
                    if answer.timed_out:
                        break
                    continue
                chunk = os.read(self._child.pipe, READ_BYTES)
                if not chunk:
                    break
                total += len(chunk)
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    answer.messages.append(parse_message(line))
                    answer.complete = answer.complete or answer.messages[-1].done
                if total > ANSWER_LIMIT_BYTES or len(pending) > LINE_LIMIT_BYTES:
                    raise Malformed("the NVML child's answer does not end")
        except Malformed as error:
            answer.damage = str(error)
        self._end(answer)
        if any(m.failed_code is not None or m.failed_load is not None for m in answer.messages):
            answer.complete = True
        return answer

    def _end(self, answer: _Answer) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        os.close(child.pipe)
        stop_waiting_at = time.monotonic() + REAP_SECONDS
        # One that said it is done gets a moment to leave by itself; its status tells of a crash.
        kill_at = time.monotonic() + (0 if answer.timed_out or answer.damage else 0.1)
        pause = 0.0005
        while True:
            try:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == child.pid:
                answer.wait_status = status
                return
            now = time.monotonic()
            if now >= kill_at:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
                kill_at = stop_waiting_at + 1
            if now >= stop_waiting_at:
                # It sleeps in the kernel and cannot be killed; we do not wait with it.
                answer.left_behind = True
                return
            time.sleep(pause)
            pause = min(pause * 2, 0.02)

    # ---------------------------------------------------------------- its answer

    def _facts(self, answer: _Answer) -> Iterator[Fact]:
        gpus: list[Gpu] = []
        rest: list[Fact] = []
        count = 0
        for message in answer.messages:
            self.driver_version = message.driver_version or self.driver_version
            self.cuda_version = message.cuda_version or self.cuda_version
            count = max(count, message.gpu_count or 0)
            gpus += message.gpus
            rest += [*message.clients, *message.accounted, *message.gaps]
        if answer.complete and count > len([g for g in gpus if g.parent_id is None]):
            rest.append(
                Gap(sensor=NAME, what="more GPUs", reason=f"the driver counts {count}, too many")
            )
        gpus, missing = identify(gpus, driver_gpus(self._host))
        yield from gpus
        yield from rest
        if answer.complete and not answer.failed:
            yield from _unlisted(missing)
        yield from self._limits(gpus)
        self._raise(answer, count, gpus)

    def _limits(self, gpus: list[Gpu]) -> Iterator[Gap]:
        privileged = not self._unprivileged and may_administrate()
        if not privileged and any(gpu.mig_enabled for gpu in gpus):
            yield Gap(
                sensor=NAME,
                what="processes on MIG devices",
                reason="the driver lists other users' MIG processes to administrators only, so "
                "an empty list does not say that they are idle",
                remedy="run as root (with CAP_SYS_ADMIN in a container)",
            )
        if self._chosen is not None and self._chosen.from_other_root:
            yield Gap(
                sensor=NAME,
                what="our own NVML library",
                reason=f"there is none in this container; {self._chosen.check.resolved} of the "
                "mounted host was opened",
                remedy="let the container runtime inject the driver's utility libraries",
            )

    def _raise(self, answer: _Answer, count: int, gpus: list[Gpu]) -> None:
        if answer.timed_out:
            told = len({gpu.index for gpu in gpus if gpu.parent_id is None})
            place = f"at GPU {told} of {count}" if count else "while it was starting"
            left = (
                "; its process cannot be killed and was left behind" if answer.left_behind else ""
            )
            raise TimedOut(
                f"the NVIDIA driver hung {place} for {self._deadline_seconds:g} s{left}",
                remedy="look for Xid lines in the kernel log; `nvidia-smi` will hang as well; "
                "drain the node and reset the GPU or reboot",
            )
        if answer.damage:
            raise Malformed(answer.damage, remedy="do not trust this driver library; check it")
        for message in answer.messages:
            if message.failed_load is not None:
                raise Denied(
                    f"the driver library cannot be used: {message.failed_load}",
                    remedy="see whether it belongs to this machine's architecture and driver",
                )
            if message.failed_code is not None:
                raise self._refusal(message.failed_code)
        if not answer.complete:
            status = answer.wait_status
            signalled = status is not None and os.WIFSIGNALED(status)
            how = f"signal {os.WTERMSIG(status)}" if status and signalled else "an early exit"
            raise Malformed(
                f"the driver library ended the process that asked it ({how})",
                remedy="check the library against the driver package; it may be damaged or false",
            )

    def _refusal(self, code: int) -> GpuwardenError:
        text = f"NVML: {errors.meaning(code)}"
        if code == errors.DRIVER_NOT_LOADED and not driver_is_loaded(self._host):
            return Unavailable(text, remedy=errors.remedy(code))
        return Denied(text, remedy=errors.remedy(code))


def start(host: Host, *, library: str | None = None, deadline_seconds: float = 5.0) -> NvmlQuery:
    """Checks the library and asks the driver in a child; returns at once and never raises.

    ``library`` names the NVML library instead of the usual places. What went wrong is raised by
    ``NvmlQuery.read``, after the facts.
    """
    query = NvmlQuery(host, deadline_seconds)
    try:
        if not is_this_machine(host):
            raise Unavailable("this is a recorded machine, whose driver cannot be asked")
        query._found = list(candidates(host, library))
        query._chosen = next((c for c in query._found if c.check.accepted), None)
        if query._chosen is not None:
            query._start(unprivileged=os.geteuid() == 0 and not has_mig_instances(host))
        else:
            raise _without_library(host, query._found)
    except GpuwardenError as error:
        query._failure = error
    return query


def _without_library(host: Host, found: list[Candidate]) -> GpuwardenError:
    if found:
        reasons = "; ".join(candidate.check.reason for candidate in found)
        return Denied(
            f"the NVML library was not opened, since it is not root's alone: {reasons}",
            remedy="compare it with the driver package's file; correct its owner and mode, or "
            "name the right one with --nvml-library",
        )
    if driver_is_loaded(host):
        return Denied(
            f"the NVIDIA driver is loaded but {LIBRARY_NAME} was not found",
            remedy="install the driver's utility libraries, or name it with --nvml-library",
        )
    return Unavailable("no NVIDIA driver here: no driver library and no kernel module")


def _ask(path: str, send: Callable[[bytes], None]) -> None:
    from gpuwarden.sensors.nvml.device import ask

    try:
        ask(path, lambda message: send(encode(message)))
    except Exception as error:  # noqa: BLE001 - whatever a strange library brings about
        text = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()
        send(encode(Message(failed_load=text[:300])))


def _unlisted(missing: list[DriverGpu]) -> Iterator[Gap]:
    for gpu in missing:
        yield Gap(
            sensor=NAME,
            what=f"GPU at {gpu.pci_address}",
            reason="the kernel module has it, and the driver library does not list it: not passed "
            "to this container, excluded, failed, or hidden by the library",
            remedy="run on the host and compare with /proc/driver/nvidia/gpus",
        )
