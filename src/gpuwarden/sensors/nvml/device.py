"""What NVML says of the system and of each GPU, put into facts; runs in the child."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_uint, c_void_p
from typing import TypeVar

from gpuwarden.model import Gap, Gpu
from gpuwarden.pattern import pattern
from gpuwarden.sensors.nvml import errors, lists
from gpuwarden.sensors.nvml.clients import UTILISATION_UNDER_MIG, Clients, Followed, Identity, gap
from gpuwarden.sensors.nvml.driver import Driver
from gpuwarden.sensors.nvml.message import Message
from gpuwarden.sensors.pci import normalise_pci

Kept = TypeVar("Kept")

GPU_LIMIT = 64
MIG_LIMIT = 16

ADDRESSING_ATS = 2
COHERENT_NAME = pattern(r"\bG[HB](?:10|200|300)\b")
"""Superchips whose GPU memory is a NUMA node of the host: pages can stay after exit."""


def begin(path: str) -> tuple[Driver | None, Message]:
    """Opens the library at ``path``: the driver, and what it says of the system.

    Without the driver the message says why it cannot be used.
    """
    try:
        driver = Driver(path)
    except OSError as error:
        reason = str(error).encode("utf-8", "backslashreplace").decode()[:300]
        return None, Message(failed_load=reason, privileges_would_help=True)
    code = driver.first(("nvmlInit_v2", "nvmlInit"))
    if code != errors.SUCCESS:
        help_ = code in errors.MAYBE_PERMISSION_CODES
        return None, Message(failed_code=code, privileges_would_help=help_)
    greeting = greet(driver)
    return (driver if greeting.failed_code is None else None), greeting


def greet(driver: Driver) -> Message:
    """What the driver says of the system, with ``failed_code`` if it cannot count its GPUs."""
    count, code = driver.number(("nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"))
    driver_version, _ = driver.text("nvmlSystemGetDriverVersion")
    cuda, _ = driver.number(("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"))
    failed = code if count is None else None
    return Message(
        driver_version=driver_version,
        cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        gpu_count=count,
        failed_code=failed,
        privileges_would_help=failed in errors.PERMISSION_CODES,
    )


def ask(path: str, send: Callable[[Message], None]) -> None:
    """Opens the library at ``path`` and sends what it says, a message for each GPU."""
    driver, greeting = begin(path)
    send(greeting)
    if driver is not None:
        for index in range(min(greeting.gpu_count or 0, GPU_LIMIT)):
            send(Reading(driver, index).message())
        driver.call("nvmlShutdown")
        send(Message(done=True))


class Reading:
    """One GPU's answer while it is put together; with ``followed``, what is new since the last."""

    def __init__(self, driver: Driver, index: int, followed: Followed | None = None) -> None:
        self.driver = driver
        self.index = index
        self.followed = followed
        self.gaps: list[Gap] = []

    def message(self) -> Message:
        """What the driver says of this GPU now."""
        handle = c_void_p()
        code = self.driver.first(
            ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"),
            c_uint(self.index),
            byref(handle),
        )
        if code != errors.SUCCESS:
            self._forget()
            gpu = Gpu(id=f"nvidia-index-{self.index}", index=self.index, error=errors.meaning(code))
            help_ = code in errors.PERMISSION_CODES
            return Message(gpus=(gpu,), privileges_would_help=help_)
        gpu = self._gpu(handle)
        if gpu.error is not None:
            self._forget()
        devices = [(gpu, handle)]
        if gpu.mig_enabled:
            devices += self._mig_devices(handle, gpu)
        found = Clients(self.driver, devices, self.gaps, self.followed)
        with_accounting = self.followed is None or self.followed.with_accounting
        return Message(
            gpus=tuple(device for device, _ in devices),
            clients=tuple(found.clients.values()),
            unlisted=tuple(found.unlisted),
            accounted=tuple(found.accounted()) if with_accounting else None,
            gaps=tuple(self.gaps),
            privileges_would_help=bool(gpu.mig_enabled) or found.would_help,
        )

    def _forget(self) -> None:
        if self.followed is not None:
            self.followed.identities.pop(self.index, None)

    # ---------------------------------------------------------------- the GPU itself

    def _identity(self, handle: c_void_p) -> Identity:
        known = self.followed.identities.get(self.index) if self.followed is not None else None
        if known is not None:
            return known
        driver = self.driver
        unread = _Unread()
        uuid = unread.keep("uuid", driver.text("nvmlDeviceGetUUID", handle))
        pci = unread.keep("pci_address", self._pci(handle))
        name = unread.keep("name", driver.text("nvmlDeviceGetName", handle))
        minor = unread.keep("minor", driver.number(("nvmlDeviceGetMinorNumber",), handle))
        numa = self._numa(handle, name, unread.reasons)
        found = Identity(uuid, pci, name, minor, numa, unread.reasons, unread.error)
        if self.followed is not None:
            self.followed.identities[self.index] = found
        return found

    def _gpu(self, handle: c_void_p) -> Gpu:
        driver = self.driver
        identity = self._identity(handle)
        reasons = _Unread(dict(identity.unread), identity.error)
        keep, unread = reasons.keep, reasons.reasons
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
        temperature = keep("temperature_celsius", driver.temperature(handle))
        return Gpu(
            id=identity.uuid or identity.pci_address or f"nvidia-index-{self.index}",
            index=self.index,
            minor=identity.minor,
            uuid=identity.uuid,
            name=identity.name,
            pci_address=identity.pci_address,
            mig_enabled=mig,
            memory_total_bytes=total,
            memory_used_bytes=used,
            memory_reserved_bytes=reserved,
            memory_is_numa=identity.memory_is_numa,
            sm_percent=busy[0],
            memory_busy_percent=busy[1],
            temperature_celsius=temperature,
            power_watts=power / 1000 if power is not None else None,
            accounting_enabled=bool(accounting) if accounting is not None else None,
            error=reasons.error,
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
            self.gaps.append(gap(f"MIG devices of GPU {self.index}", code))
        found: list[tuple[Gpu, c_void_p]] = []
        for place in range(min(limit or 0, MIG_LIMIT)):
            mig = c_void_p()
            code = self.driver.call(
                "nvmlDeviceGetMigDeviceHandleByIndex", handle, c_uint(place), byref(mig)
            )
            if code == errors.NOT_FOUND:
                continue
            if code != errors.SUCCESS:
                self.gaps.append(gap(f"MIG device {place} of GPU {self.index}", code))
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


class _Unread:
    """The reasons for what could not be read, and the fault that they show, if any."""

    def __init__(self, reasons: dict[str, str] | None = None, error: str | None = None) -> None:
        self.reasons = {} if reasons is None else reasons
        self.error = error

    def keep(self, field: str, answer: tuple[Kept | None, int]) -> Kept | None:
        value, code = answer
        if value is None:
            self.reasons[field] = errors.meaning(code)
            if code in errors.FAULT_CODES:
                self.error = self.error or errors.meaning(code)
        return value
