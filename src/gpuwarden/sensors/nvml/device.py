"""What NVML says of the system and of each GPU, put into facts; runs in the child."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable
from ctypes import byref, c_uint, c_void_p, create_string_buffer
from typing import TypeVar

import msgspec

from gpuwarden.model import AccountedProcess, ClientKind, Gap, Gpu, GpuClient
from gpuwarden.pattern import pattern
from gpuwarden.sensors.nvml import errors, lists
from gpuwarden.sensors.nvml.driver import Driver
from gpuwarden.sensors.nvml.message import Message
from gpuwarden.sensors.pci import normalise_pci

Kept = TypeVar("Kept")

GPU_LIMIT = 64
MIG_LIMIT = 16
ACCOUNTED_LIMIT = 4096

# nvmlAccountingStats_t: gpu %, memory %, max memory, ms, start in microseconds, running.
ACCOUNTING = struct.Struct("=IIQQQI20x")
NUMBER_LIMIT = 1 << 53

ADDRESSING_ATS = 2
COHERENT_NAME = pattern(r"\bG[HB](?:10|200|300)\b")
"""Superchips whose GPU memory is a NUMA node of the host: pages can stay after exit."""
UTILISATION_UNDER_MIG = "not available while MIG is on"

LISTS: tuple[tuple[ClientKind, str], ...] = (
    ("C", "nvmlDeviceGetComputeRunningProcesses"),
    ("G", "nvmlDeviceGetGraphicsRunningProcesses"),
    ("M", "nvmlDeviceGetMPSComputeRunningProcesses"),
)


def ask(path: str, send: Callable[[Message], None]) -> None:
    """Opens the library at ``path`` and sends what it says, a message for each GPU."""
    try:
        driver = Driver(path)
    except OSError as error:
        reason = str(error).encode("utf-8", "backslashreplace").decode()[:300]
        send(Message(failed_load=reason, privileges_would_help=True))
        return
    code = driver.first(("nvmlInit_v2", "nvmlInit"))
    if code != errors.SUCCESS:
        help_ = code in errors.MAYBE_PERMISSION_CODES
        send(Message(failed_code=code, privileges_would_help=help_))
        return
    count, code = driver.number(("nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"))
    driver_version, _ = driver.text("nvmlSystemGetDriverVersion")
    cuda, _ = driver.number(("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"))
    failed = code if count is None else None
    send(
        Message(
            driver_version=driver_version,
            cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
            gpu_count=count,
            failed_code=failed,
            privileges_would_help=failed in errors.PERMISSION_CODES,
        )
    )
    for index in range(min(count or 0, GPU_LIMIT)):
        send(_Reading(driver, index).message())
    driver.call("nvmlShutdown")
    send(Message(done=True))


class _Reading:
    """One GPU's answer while it is put together."""

    def __init__(self, driver: Driver, index: int) -> None:
        self.driver = driver
        self.index = index
        self.gaps: list[Gap] = []
        self.would_help = False
        self.clients: dict[tuple[str, int], GpuClient] = {}

    def message(self) -> Message:
        handle = c_void_p()
        code = self.driver.first(
            ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"),
            c_uint(self.index),
            byref(handle),
        )
        if code != errors.SUCCESS:
            gpu = Gpu(id=f"nvidia-index-{self.index}", index=self.index, error=errors.meaning(code))
            help_ = code in errors.PERMISSION_CODES
            return Message(gpus=(gpu,), privileges_would_help=help_)
        gpu = self._gpu(handle)
        devices = [gpu]
        if gpu.mig_enabled:
            self.would_help = True
            for mig, mig_handle in self._mig_devices(handle, gpu):
                devices.append(mig)
                self._list(mig_handle, mig, devices)
        self._list(handle, gpu, devices)
        if not gpu.mig_enabled:
            self._utilisation(handle, gpu)
        return Message(
            gpus=tuple(devices),
            clients=tuple(self.clients.values()),
            accounted=tuple(self._accounted(handle, gpu)),
            gaps=tuple(self.gaps),
            privileges_would_help=self.would_help,
        )

    def _gap(self, what: str, code: int) -> None:
        self.gaps.append(
            Gap(
                sensor="nvml",
                what=what,
                reason=errors.meaning(code),
                remedy=errors.remedy(code),
            )
        )

    # ---------------------------------------------------------------- the GPU itself

    def _gpu(self, handle: c_void_p) -> Gpu:
        driver = self.driver
        unread: dict[str, str] = {}
        error: str | None = None

        def keep(field: str, answer: tuple[Kept | None, int]) -> Kept | None:
            nonlocal error
            value, code = answer
            if value is None:
                unread[field] = errors.meaning(code)
                if code in (errors.GPU_IS_LOST, errors.RESET_REQUIRED, errors.UNKNOWN):
                    error = error or errors.meaning(code)
            return value

        uuid = keep("uuid", driver.text("nvmlDeviceGetUUID", handle))
        pci = keep("pci_address", self._pci(handle))
        name = keep("name", driver.text("nvmlDeviceGetName", handle))
        minor = keep("minor", driver.number(("nvmlDeviceGetMinorNumber",), handle))
        mig = self._mig_enabled(handle)
        total, used, reserved = self._memory(handle, unread)
        busy: tuple[int | None, int | None] = (None, None)
        if mig:
            unread["sm_percent"] = unread["memory_busy_percent"] = UTILISATION_UNDER_MIG
        else:
            rates = (c_uint * 2)()
            code = driver.call("nvmlDeviceGetUtilizationRates", handle, rates)
            if code == errors.SUCCESS and max(rates) <= 100:
                busy = (rates[0], rates[1])
            else:
                reason = errors.meaning(code) if code else f"the driver said {max(rates)} %"
                unread["sm_percent"] = unread["memory_busy_percent"] = reason
        power = keep("power_watts", driver.number(("nvmlDeviceGetPowerUsage",), handle))
        accounting, _ = driver.number(("nvmlDeviceGetAccountingMode",), handle)
        return Gpu(
            id=uuid or pci or f"nvidia-index-{self.index}",
            index=self.index,
            minor=minor,
            uuid=uuid,
            name=name,
            pci_address=pci,
            mig_enabled=mig,
            memory_total_bytes=total,
            memory_used_bytes=used,
            memory_reserved_bytes=reserved,
            memory_is_numa=self._numa(handle, name, unread),
            sm_percent=busy[0],
            memory_busy_percent=busy[1],
            temperature_celsius=keep("temperature_celsius", driver.temperature(handle)),
            power_watts=power / 1000 if power is not None else None,
            accounting_enabled=bool(accounting) if accounting is not None else None,
            error=error,
            unread=unread,
        )

    def _pci(self, handle: c_void_p) -> tuple[str | None, int]:
        spelled, code = self.driver.pci_bus_id(handle)
        return (normalise_pci(spelled) if spelled is not None else None), code

    def _memory(
        self, handle: c_void_p, unread: dict[str, str]
    ) -> tuple[int | None, int | None, int | None]:
        memory, code = self.driver.memory(handle)
        limit = lists.MEMORY_LIMIT_BYTES
        if memory is None or max(memory.total, memory.used, memory.reserved or 0) > limit:
            reason = errors.meaning(code) if code else "the driver's figures are not plausible"
            for field in ("memory_total_bytes", "memory_used_bytes", "memory_reserved_bytes"):
                unread[field] = reason
            return None, None, None
        if memory.reserved is None:
            reason = "this driver does not tell its own reserve from the memory in use"
            unread["memory_reserved_bytes"] = reason
        return memory.total, memory.used, memory.reserved

    def _numa(self, handle: c_void_p, name: str | None, unread: dict[str, str]) -> bool | None:
        mode = self.driver.addressing_mode(handle)
        if mode is not None:
            return mode == ADDRESSING_ATS
        if name is None:
            unread["memory_is_numa"] = "neither its addressing mode nor its name is known"
            return None
        return COHERENT_NAME.search(name) is not None

    def _mig_enabled(self, handle: c_void_p) -> bool | None:
        current, pending = c_uint(), c_uint()
        code = self.driver.call("nvmlDeviceGetMigMode", handle, byref(current), byref(pending))
        if code in (errors.NOT_SUPPORTED, errors.FUNCTION_NOT_FOUND):
            return False
        return bool(current.value) if code == errors.SUCCESS else None

    # ---------------------------------------------------------------- MIG

    def _mig_devices(self, handle: c_void_p, whole: Gpu) -> list[tuple[Gpu, c_void_p]]:
        limit, code = self.driver.number(("nvmlDeviceGetMaxMigDeviceCount",), handle)
        if limit is None:
            self._gap(f"MIG devices of GPU {self.index}", code)
        found: list[tuple[Gpu, c_void_p]] = []
        for place in range(min(limit or 0, MIG_LIMIT)):
            mig = c_void_p()
            code = self.driver.call(
                "nvmlDeviceGetMigDeviceHandleByIndex", handle, c_uint(place), byref(mig)
            )
            if code == errors.NOT_FOUND:
                continue
            if code != errors.SUCCESS:
                self._gap(f"MIG device {place} of GPU {self.index}", code)
                continue
            found.append((self._mig_device(mig, whole, place), mig))
        return found

    def _mig_device(self, handle: c_void_p, whole: Gpu, place: int) -> Gpu:
        driver = self.driver
        unread = {"sm_percent": UTILISATION_UNDER_MIG}
        uuid, code = driver.text("nvmlDeviceGetUUID", handle)
        if uuid is None:
            unread["uuid"] = errors.meaning(code)
        name, _ = driver.text("nvmlDeviceGetName", handle)
        gpu_instance, code = driver.number(("nvmlDeviceGetGpuInstanceId",), handle)
        if gpu_instance is None:
            unread["gpu_instance_id"] = errors.meaning(code)
        compute_instance, code = driver.number(("nvmlDeviceGetComputeInstanceId",), handle)
        if compute_instance is None:
            unread["compute_instance_id"] = errors.meaning(code)
        total, used, reserved = self._memory(handle, unread)
        return Gpu(
            id=uuid or f"{whole.id}/mig-{place}",
            index=place,
            minor=whole.minor,
            uuid=uuid,
            name=name or whole.name,
            pci_address=whole.pci_address,
            parent_id=whole.id,
            gpu_instance_id=gpu_instance,
            compute_instance_id=compute_instance,
            memory_total_bytes=total,
            memory_used_bytes=used,
            memory_reserved_bytes=reserved,
            memory_is_numa=whole.memory_is_numa,
            unread=unread,
        )

    # ---------------------------------------------------------------- processes

    def _list(self, handle: c_void_p, gpu: Gpu, devices: list[Gpu]) -> None:
        for kind, function in LISTS:
            found, code = self.driver.processes(handle, function)
            if code == errors.NO_PERMISSION:
                self.would_help = True
            # A GPU without graphics or MPS answers so; without compute it hides its clients.
            tolerated = (errors.NOT_SUPPORTED, errors.FUNCTION_NOT_FOUND) if kind != "C" else ()
            if code not in (errors.SUCCESS, errors.NOT_FOUND, *tolerated):
                self._gap(f"{kind} process list of {gpu.id}", code)
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
                self._add(kind, entry, self._owner(entry, gpu, devices))

    def _owner(self, entry: lists.Entry, gpu: Gpu, devices: list[Gpu]) -> Gpu:
        """The MIG device that an entry of the whole GPU's list belongs to, if one does."""
        if not gpu.mig_enabled:
            return gpu
        for mig in devices[1:]:
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
        if not mine:
            return
        raw, count, code = self.driver.samples(handle)
        samples, garbage = lists.parse_samples(raw, count, mine.keys(), time.time_ns())
        # NOT_FOUND, and SUCCESS without samples, say that nothing ran of late.
        unreadable = code not in (errors.SUCCESS, errors.NOT_FOUND)
        for pid, client in mine.items():
            reason = ""
            if unreadable:
                reason = errors.meaning(code)
            elif pid in garbage:
                reason = "the driver's samples of it are not plausible"
            kept = samples.get(pid, ())
            self.clients[(gpu.id, pid)] = msgspec.structs.replace(
                client,
                samples=kept,
                sm_percent=kept[-1].sm_percent if kept else None,
                unread={**client.unread, "sm_percent": reason} if reason else client.unread,
            )

    def _accounted(self, handle: c_void_p, gpu: Gpu) -> Iterable[AccountedProcess]:
        if not gpu.accounting_enabled:
            return
        count = c_uint(ACCOUNTED_LIMIT)
        pids = (c_uint * ACCOUNTED_LIMIT)()
        code = self.driver.call("nvmlDeviceGetAccountingPids", handle, byref(count), pids)
        if code != errors.SUCCESS:
            self._gap(f"accounted processes of {gpu.id}", code)
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


def _either(first: int | None, second: int | None) -> int | None:
    return second if first is None else first
