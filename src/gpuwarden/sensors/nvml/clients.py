"""The processes of one GPU as the driver lists, measures and accounts them; runs in the child."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Set
from ctypes import byref, c_uint, c_void_p, create_string_buffer

import msgspec
from msgspec import Struct, field

from gpuwarden.model import AccountedProcess, ClientKind, Gap, Gpu, GpuClient, UtilisationSample
from gpuwarden.sensors.nvml import errors, lists
from gpuwarden.sensors.nvml.cursor import SampleCursor
from gpuwarden.sensors.nvml.driver import Driver

ACCOUNTED_LIMIT = 4096
# nvmlAccountingStats_t: gpu %, memory %, max memory, ms, start in microseconds, running.
ACCOUNTING = struct.Struct("=IIQQQI20x")
NUMBER_LIMIT = 1 << 53

UTILISATION_UNDER_MIG = "not available while MIG is on"

LISTS: tuple[tuple[ClientKind, str], ...] = (
    ("C", "nvmlDeviceGetComputeRunningProcesses"),
    ("G", "nvmlDeviceGetGraphicsRunningProcesses"),
    ("M", "nvmlDeviceGetMPSComputeRunningProcesses"),
)


class Identity(Struct, frozen=True):
    """What does not change about a GPU, with the reasons for what is not known."""

    uuid: str | None
    pci_address: str | None
    name: str | None
    minor: int | None
    memory_is_numa: bool | None
    unread: dict[str, str]
    error: str | None


class Followed(Struct):
    """What a lasting child keeps of the GPUs from one round to the next."""

    identities: dict[int, Identity] = field(default_factory=dict)
    """By index; left out until it was read without a fault."""
    cursors: dict[str, SampleCursor] = field(default_factory=dict)
    """By the GPU's id, as are ``clients``, by pid and without samples."""
    clients: dict[str, dict[int, GpuClient]] = field(default_factory=dict)
    with_accounting: bool = True
    """Whether this round asks for the accounted processes, which are many."""


class Clients:
    """The processes of one GPU and its MIG devices; ``devices`` has the GPU itself first.

    With ``followed``, samples are those since the last round, and ``unlisted`` has the processes
    that were listed then. What could not be read is added to ``gaps``.
    """

    def __init__(
        self,
        driver: Driver,
        devices: list[tuple[Gpu, c_void_p]],
        gaps: list[Gap],
        followed: Followed | None,
    ) -> None:
        self.driver = driver
        self.devices = devices
        self.gaps = gaps
        self.followed = followed
        self.would_help = False
        self.clients: dict[tuple[str, int], GpuClient] = {}
        self.unlisted: list[GpuClient] = []
        (gpu, handle), *migs = devices
        for mig, mig_handle in migs:
            self._list(mig_handle, mig)
        self._list(handle, gpu)
        if not gpu.mig_enabled:
            self._utilisation(handle, gpu)
        elif followed is not None:
            followed.clients.pop(gpu.id, None)

    def _list(self, handle: c_void_p, gpu: Gpu) -> None:
        for kind, function in LISTS:
            found, code = self.driver.processes(handle, function)
            if code == errors.NO_PERMISSION:
                self.would_help = True
            # A GPU without graphics or MPS answers so; without compute it hides its clients.
            tolerated = (errors.NOT_SUPPORTED, errors.FUNCTION_NOT_FOUND) if kind != "C" else ()
            if code not in (errors.SUCCESS, errors.NOT_FOUND, *tolerated):
                self.gaps.append(gap(f"{kind} process list of {gpu.id}", code))
            if found.implausible:
                self.gaps.append(
                    Gap(
                        sensor="nvml",
                        what=f"{kind} process list of {gpu.id}",
                        reason="the driver's entries are scrambled: no process can have such pids",
                        remedy="early 535 drivers do this; upgrade the driver",
                        count=found.implausible,
                    )
                )
            for entry in found.entries:
                self._add(kind, entry, self._owner(entry, gpu))

    def _owner(self, entry: lists.Entry, gpu: Gpu) -> Gpu:
        """The MIG device that an entry of the whole GPU's list belongs to, if one does."""
        if not gpu.mig_enabled:
            return gpu
        for mig, _ in self.devices[1:]:
            same_gpu = entry.gpu_instance_id in (None, mig.gpu_instance_id)
            same_compute = entry.compute_instance_id in (None, mig.compute_instance_id)
            known = (mig.id, entry.pid) in self.clients
            if same_gpu and same_compute and (known or entry.gpu_instance_id is not None):
                return mig
        return gpu

    def _add(self, kind: ClientKind, entry: lists.Entry, gpu: Gpu) -> None:
        key = (gpu.id, entry.pid)
        known = self.clients.get(key)
        unread = {}
        if entry.memory_bytes is None:
            unread["memory_bytes"] = "the driver says N/A"
        if gpu.parent_id or gpu.mig_enabled:
            unread["sm_percent"] = UTILISATION_UNDER_MIG
        if known is None:
            self.clients[key] = GpuClient(
                gpu_id=gpu.id,
                pid=entry.pid,
                kinds=(kind,),
                memory_bytes=entry.memory_bytes,
                gpu_instance_id=_either(entry.gpu_instance_id, gpu.gpu_instance_id),
                compute_instance_id=_either(entry.compute_instance_id, gpu.compute_instance_id),
                unread=unread,
            )
            return
        # A process in two lists has its whole memory in both.
        amounts = [m for m in (known.memory_bytes, entry.memory_bytes) if m is not None]
        if amounts:
            unread.pop("memory_bytes", None)
        self.clients[key] = msgspec.structs.replace(
            known,
            kinds=known.kinds if kind in known.kinds else (*known.kinds, kind),
            memory_bytes=max(amounts) if amounts else None,
            unread=unread,
        )

    def _utilisation(self, handle: c_void_p, gpu: Gpu) -> None:
        mine = {pid: client for (_, pid), client in self.clients.items()}
        before: dict[int, GpuClient] = {}
        if self.followed is not None:
            before = self.followed.clients.pop(gpu.id, before)
            self.followed.clients[gpu.id] = mine
        if not mine and not before:
            return
        samples, garbage, code = self._samples(handle, gpu, mine.keys() | before.keys())
        # NOT_FOUND, and SUCCESS without samples, say that nothing ran of late.
        unreadable = code not in (errors.SUCCESS, errors.NOT_FOUND)
        for pid, client in mine.items():
            reason = ""
            if unreadable:
                reason = errors.meaning(code)
            elif pid in garbage:
                reason = "the driver's samples of it are not plausible"
            self.clients[(gpu.id, pid)] = _with_samples(client, samples.get(pid, ()), reason)
        for pid, client in before.items():
            if pid not in mine:
                self.unlisted.append(_with_samples(client, samples.get(pid, ()), ""))

    def _samples(
        self, handle: c_void_p, gpu: Gpu, pids: Set[int]
    ) -> tuple[dict[int, tuple[UtilisationSample, ...]], set[int], int]:
        if self.followed is None:
            raw, count, code = self.driver.samples(handle)
            return *lists.parse_samples(raw, count, pids, time.time_ns()), code
        cursor = self.followed.cursors.setdefault(gpu.id, SampleCursor())
        now_ns = time.time_ns()
        monotonic_ns = time.monotonic_ns()
        cursor.begin(now_ns, monotonic_ns)
        raw, count, code = self.driver.samples(handle, cursor.since_us)
        samples, garbage = lists.parse_samples(
            raw,
            count,
            pids,
            now_ns,
            since_us=cursor.since_us,
            given_until_us=cursor.given_until_us,
            was_given=cursor.was_given,
            age_limit_ns=cursor.age_limit_ns,
            ahead_limit_ns=cursor.ahead_limit_ns,
        )
        if code in (errors.SUCCESS, errors.NOT_FOUND):
            cursor.gave(samples, monotonic_ns)
        return samples, garbage, code

    def accounted(self) -> Iterable[AccountedProcess]:
        """What the driver's accounting kept, where it is on."""
        gpu, handle = self.devices[0]
        if not gpu.accounting_enabled:
            return
        count = c_uint(ACCOUNTED_LIMIT)
        pids = (c_uint * ACCOUNTED_LIMIT)()
        code = self.driver.call("nvmlDeviceGetAccountingPids", handle, byref(count), pids)
        if code != errors.SUCCESS:
            self.gaps.append(gap(f"accounted processes of {gpu.id}", code))
            return
        for pid in pids[: min(count.value, ACCOUNTED_LIMIT)]:
            buffer = create_string_buffer(ACCOUNTING.size)
            code = self.driver.call("nvmlDeviceGetAccountingStats", handle, c_uint(pid), buffer)
            if code != errors.SUCCESS or not 0 < pid <= lists.PID_LIMIT:
                continue
            sm, _, memory, busy_ms, start_us, running = ACCOUNTING.unpack(buffer.raw)
            yield AccountedProcess(
                gpu_id=gpu.id,
                pid=pid,
                started_at_ns=start_us * 1000 if 0 < start_us < NUMBER_LIMIT else None,
                busy_ms=busy_ms if busy_ms < NUMBER_LIMIT else None,
                sm_percent=sm if sm <= 100 else None,
                memory_max_bytes=memory if memory <= lists.MEMORY_LIMIT_BYTES else None,
                running=bool(running),
            )


def gap(what: str, code: int) -> Gap:
    """What could not be read, with the driver's reason."""
    return Gap(sensor="nvml", what=what, reason=errors.meaning(code), remedy=errors.remedy(code))


def _with_samples(
    client: GpuClient, samples: tuple[UtilisationSample, ...], reason: str
) -> GpuClient:
    if not samples and not reason:
        return client
    return msgspec.structs.replace(
        client,
        samples=samples,
        sm_percent=samples[-1].sm_percent if samples else None,
        unread={**client.unread, "sm_percent": reason} if reason else client.unread,
    )


def _either(first: int | None, second: int | None) -> int | None:
    return second if first is None else first
