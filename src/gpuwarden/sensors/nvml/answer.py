"""What one asking of the driver comes to: facts, what was out of sight, and how it failed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from msgspec import Struct, field

from gpuwarden.errors import Denied, GpuwardenError, Malformed, TimedOut, Unavailable
from gpuwarden.model import AccountedProcess, Gap, Gpu, GpuClient
from gpuwarden.sensors.nvml import errors
from gpuwarden.sensors.nvml.kernel import DriverGpu, identify, may_administrate
from gpuwarden.sensors.nvml.library import LIBRARY_NAME, Candidate
from gpuwarden.sensors.nvml.message import Message

NAME = "nvml"


class Answer(Struct):
    """All that one child said to one question, and how it ended."""

    messages: list[Message] = field(default_factory=list)
    complete: bool = False
    timed_out: bool = False
    left_behind: bool = False
    wait_status: int | None = None
    damage: str = ""

    @property
    def refused(self) -> bool:
        """Whether the library or the driver could not be used at all."""
        return any(m.failed_code is not None or m.failed_load is not None for m in self.messages)

    @property
    def failed(self) -> bool:
        """Whether it is not the whole answer."""
        return not self.complete or self.refused

    @property
    def privileges_would_help(self) -> bool:
        """Whether the driver withheld something that it tells administrators."""
        return any(m.privileges_would_help for m in self.messages)


class Told(Struct):
    """The facts of an answer; ``count`` is how many GPUs the driver says there are."""

    driver_version: str | None = None
    cuda_version: str | None = None
    count: int = 0
    gpus: list[Gpu] = field(default_factory=list)
    clients: list[GpuClient] = field(default_factory=list)
    unlisted: list[GpuClient] = field(default_factory=list)
    accounted: list[AccountedProcess] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)


def gather(answer: Answer, known: list[DriverGpu]) -> Told:
    """The answer's facts; ``known`` are the GPUs that the kernel module lists."""
    told = Told()
    for message in answer.messages:
        told.driver_version = message.driver_version or told.driver_version
        told.cuda_version = message.cuda_version or told.cuda_version
        told.count = max(told.count, message.gpu_count or 0)
        told.gpus += message.gpus
        told.clients += message.clients
        told.unlisted += message.unlisted
        told.accounted += message.accounted or ()
        told.gaps += message.gaps
    if answer.complete and told.count > len([g for g in told.gpus if g.parent_id is None]):
        reason = f"the driver counts {told.count}, too many"
        told.gaps.append(Gap(sensor=NAME, what="more GPUs", reason=reason))
    told.gpus, missing = identify(told.gpus, known)
    if not answer.failed:
        told.gaps += [
            Gap(
                sensor=NAME,
                what=f"GPU at {gpu.pci_address}",
                reason="the kernel module has it, and the driver library does not list it: not "
                "passed to this container, excluded, failed, or hidden by the library",
                remedy="run on the host and compare with /proc/driver/nvidia/gpus",
            )
            for gpu in missing
        ]
    return told


def limits(gpus: list[Gpu], chosen: Candidate | None, *, unprivileged: bool) -> Iterator[Gap]:
    """What this asking could not see, whatever was answered."""
    is_cut = any(gpu.mig_enabled for gpu in gpus)
    if is_cut and (unprivileged or not may_administrate()):
        yield Gap(
            sensor=NAME,
            what="processes on MIG devices",
            reason="the driver lists other users' MIG processes to administrators only, so "
            "an empty list does not say that they are idle",
            remedy="run as root (with CAP_SYS_ADMIN in a container)",
        )
    if chosen is not None and chosen.from_other_root:
        yield Gap(
            sensor=NAME,
            what="our own NVML library",
            reason=f"there is none in this container; {chosen.check.resolved} of the "
            "mounted host was opened",
            remedy="let the container runtime inject the driver's utility libraries",
        )


def failure(
    answer: Answer, told: Told, *, deadline_seconds: float, is_loaded: Callable[[], bool]
) -> GpuwardenError | None:
    """How the asking failed: TimedOut, Malformed, Denied, Unavailable; None if it did not."""
    if answer.timed_out:
        done = len({gpu.index for gpu in told.gpus if gpu.parent_id is None})
        place = f"at GPU {done} of {told.count}" if told.count else "while it was starting"
        left = "; its process cannot be killed and was left behind" if answer.left_behind else ""
        return TimedOut(
            f"the NVIDIA driver hung {place} for {deadline_seconds:g} s{left}",
            remedy="look for Xid lines in the kernel log; `nvidia-smi` will hang as well; "
            "drain the node and reset the GPU or reboot",
        )
    if answer.damage:
        return Malformed(answer.damage, remedy="do not trust this driver library; check it")
    for message in answer.messages:
        if message.failed_load is not None:
            return Denied(
                f"the driver library cannot be used: {message.failed_load}",
                remedy="see whether it belongs to this machine's architecture and driver",
            )
        if message.failed_code is not None:
            return _refusal(message.failed_code, is_loaded)
    if answer.complete:
        return None
    status = answer.wait_status
    signalled = status is not None and os.WIFSIGNALED(status)
    how = f"signal {os.WTERMSIG(status)}" if status and signalled else "an early exit"
    return Malformed(
        f"the driver library ended the process that asked it ({how})",
        remedy="check the library against the driver package; it may be damaged or false",
    )


def _refusal(code: int, is_loaded: Callable[[], bool]) -> GpuwardenError:
    text = f"NVML: {errors.meaning(code)}"
    if code == errors.DRIVER_NOT_LOADED and not is_loaded():
        return Unavailable(text, remedy=errors.remedy(code))
    return Denied(text, remedy=errors.remedy(code))


def without_library(found: list[Candidate], *, is_loaded: bool) -> GpuwardenError:
    """Why no library was opened: those that were found were refused, or there is none."""
    if found:
        reasons = "; ".join(candidate.check.reason for candidate in found)
        return Denied(
            f"the NVML library was not opened, since it is not root's alone: {reasons}",
            remedy="compare it with the driver package's file; correct its owner and mode, or "
            "name the right one with --nvml-library",
        )
    if is_loaded:
        return Denied(
            f"the NVIDIA driver is loaded but {LIBRARY_NAME} was not found",
            remedy="install the driver's utility libraries, or name it with --nvml-library",
        )
    return Unavailable("no NVIDIA driver here: no driver library and no kernel module")
