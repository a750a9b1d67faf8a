"""The NVML library's functions, called by name: arguments out, bytes and a return code back.

The only file that imports nvidia-ml-py; runs in the child and nowhere else. Its own wrappers ask
for one version of a function only, decode strictly, and take "no samples" for an error, so its
library handle is used and not them (nvml.h of CUDA 12 and 13).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from ctypes import CDLL, Array, byref, c_char, c_uint, c_ulonglong, c_void_p, create_string_buffer

import pynvml
from msgspec import Struct

from gpuwarden.sensors.nvml import errors, lists

PROCESS_LIMIT = 4096
SAMPLE_LIMIT = 1 << 16
SIZE_RETRIES = 4
TEXT_BYTES = 96

# nvmlPciInfo_t: busIdLegacy[16], five 32-bit numbers, busId[32].
PCI_BYTES, PCI_BUS_ID, PCI_LEGACY_BUS_ID = 128, slice(36, 68), slice(0, 16)
PCI_VERSIONS = (("_v3", PCI_BUS_ID), ("_v2", PCI_LEGACY_BUS_ID))
# nvmlMemory_t: total, free, used. nvmlMemory_v2_t: version, total, reserved, free, used.
MEMORY_V1 = struct.Struct("=QQQ")
MEMORY_V2 = struct.Struct("=I4xQQQQ")
# nvmlTemperature_v1_t: version, sensor, degrees. nvmlDeviceAddressingMode_v1_t: version, value.
TEMPERATURE_V1 = struct.Struct("=IIi")
ADDRESSING_V1 = struct.Struct("=II")
VERSION_SHIFT = 24

LIST_VERSIONS = (("_v3", lists.PROCESS_V2), ("_v2", lists.PROCESS_V2), ("", lists.PROCESS_V1))


class Memory(Struct, frozen=True):
    """A GPU's memory in bytes; ``reserved`` None means that it is counted in ``used``."""

    total: int
    used: int
    reserved: int | None


class Driver:
    """The loaded library. Errors: OSError when it cannot be loaded."""

    def __init__(self, path: str) -> None:
        self._library = CDLL(path)
        pynvml.nvmlLib = self._library
        self._list_versions: dict[str, int] = {}

    def call(self, name: str, *arguments: object) -> int:
        """The function's return code; FUNCTION_NOT_FOUND when the library lacks it."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return errors.FUNCTION_NOT_FOUND
        return int(function(*arguments))

    def first(self, names: Iterable[str], *arguments: object) -> int:
        """The code of the first of these functions that the library has."""
        code = errors.FUNCTION_NOT_FOUND
        for name in names:
            code = self.call(name, *arguments)
            if code != errors.FUNCTION_NOT_FOUND:
                break
        return code

    def number(self, names: tuple[str, ...], *leading: object) -> tuple[int | None, int]:
        """An unsigned number that the driver writes, and the code."""
        value = c_uint()
        code = self.first(names, *leading, byref(value))
        return (value.value if code == errors.SUCCESS else None), code

    def text(self, name: str, *leading: object) -> tuple[str | None, int]:
        """A text that the driver writes, and the code."""
        buffer = create_string_buffer(TEXT_BYTES)
        code = self.call(name, *leading, buffer, c_uint(TEXT_BYTES))
        return (decode(buffer.raw) if code == errors.SUCCESS else None), code

    def pci_bus_id(self, handle: c_void_p) -> tuple[str | None, int]:
        """The PCI address as the driver spells it, and the code."""
        buffer = create_string_buffer(PCI_BYTES)
        code = errors.FUNCTION_NOT_FOUND
        for version, place in PCI_VERSIONS:
            code = self.call(f"nvmlDeviceGetPciInfo{version}", handle, buffer)
            if code == errors.SUCCESS:
                return decode(buffer.raw[place]), code
            if code != errors.FUNCTION_NOT_FOUND:
                break
        return None, code

    def memory(self, handle: c_void_p) -> tuple[Memory | None, int]:
        """Memory with the driver's reserve apart where the driver can tell, and the code."""
        buffer = create_string_buffer(MEMORY_V2.size)
        struct.pack_into("=I", buffer, 0, MEMORY_V2.size | 2 << VERSION_SHIFT)
        code = self.call("nvmlDeviceGetMemoryInfo_v2", handle, buffer)
        if code == errors.SUCCESS:
            _, total, reserved, _, used = MEMORY_V2.unpack(buffer.raw)
            return Memory(total, used, reserved), code
        code = self.call("nvmlDeviceGetMemoryInfo", handle, buffer)
        if code == errors.SUCCESS:
            total, _, used = MEMORY_V1.unpack_from(buffer.raw)
            return Memory(total, used, None), code
        return None, code

    def addressing_mode(self, handle: c_void_p) -> int | None:
        """How the GPU shares addresses with the CPU (0 not, 1 HMM, 2 ATS), None when not told."""
        buffer = create_string_buffer(ADDRESSING_V1.size)
        ADDRESSING_V1.pack_into(buffer, 0, ADDRESSING_V1.size | 1 << VERSION_SHIFT, 0)
        code = self.call("nvmlDeviceGetAddressingMode", handle, buffer)
        return int(ADDRESSING_V1.unpack(buffer.raw)[1]) if code == errors.SUCCESS else None

    def temperature(self, handle: c_void_p) -> tuple[int | None, int]:
        """Degrees Celsius of the GPU die, and the code."""
        buffer = create_string_buffer(TEMPERATURE_V1.size)
        TEMPERATURE_V1.pack_into(buffer, 0, TEMPERATURE_V1.size | 1 << VERSION_SHIFT, 0, 0)
        code = self.call("nvmlDeviceGetTemperatureV", handle, buffer)
        if code == errors.SUCCESS:
            return int(TEMPERATURE_V1.unpack(buffer.raw)[2]), code
        return self.number(("nvmlDeviceGetTemperature",), handle, c_uint(0))

    def processes(self, handle: c_void_p, function: str) -> tuple[lists.ProcessList, int]:
        """One of the three process lists, from the newest version of it that the driver has."""
        code = errors.FUNCTION_NOT_FOUND
        start = self._list_versions.get(function, 0)
        for at, (suffix, layout) in enumerate(LIST_VERSIONS[start:], start):
            found, code = self._processes(handle, function + suffix, layout)
            if code != errors.FUNCTION_NOT_FOUND:
                self._list_versions[function] = at
                return found, code
        return lists.ProcessList(()), code

    def _processes(
        self, handle: c_void_p, name: str, layout: struct.Struct
    ) -> tuple[lists.ProcessList, int]:
        size = 64
        for _ in range(SIZE_RETRIES):
            # Room for the longest entry known, since an early R535 driver writes longer ones.
            buffer = _filled(size * lists.LONGEST_STRIDE_BYTES)
            count = c_uint(size)
            code = self.call(name, handle, byref(count), buffer)
            if code == errors.SUCCESS and count.value == 0:
                break
            if code == errors.SUCCESS:
                return lists.parse_processes(buffer.raw, min(count.value, size), layout), code
            if code != errors.INSUFFICIENT_SIZE or size >= PROCESS_LIMIT:
                break
            size = min(PROCESS_LIMIT, max(count.value + 16, size * 2))
        return lists.ProcessList(()), code

    def samples(self, handle: c_void_p, since_us: int = 0) -> tuple[bytes, int, int]:
        """The utilisation samples that the driver kept since a time: bytes, how many, code."""
        name = "nvmlDeviceGetProcessUtilization"
        count = c_uint(0)
        since = c_ulonglong(since_us)
        code = self.call(name, handle, None, byref(count), since)
        for _ in range(SIZE_RETRIES):
            if code != errors.INSUFFICIENT_SIZE or not 0 < count.value <= SAMPLE_LIMIT:
                break
            size = min(SAMPLE_LIMIT, count.value + 16)
            buffer = create_string_buffer(size * lists.SAMPLE.size)
            count = c_uint(size)
            code = self.call(name, handle, buffer, byref(count), since)
            if code == errors.SUCCESS:
                return buffer.raw, min(count.value, size), code
        return b"", 0, code


def decode(raw: bytes) -> str:
    """The text before the first NUL; bytes that are not UTF-8 stay visible."""
    return raw.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def _filled(size: int) -> Array[c_char]:
    return (c_char * size).from_buffer_copy(bytes((lists.FILL,)) * size)
