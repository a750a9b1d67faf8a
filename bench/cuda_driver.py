"""The CUDA driver library by ctypes, with what a small program needs: PTX, fatbins, launches."""

from __future__ import annotations

import ctypes
import json
import struct
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

COUNT = 1 << 16
BLOCK = 256
PTX = """.version 6.4
.target sm_75
.address_size 64
.visible .entry {name}(.param .u64 out, .param .u64 left, .param .u64 right, .param .u32 count)
{{
	.reg .pred %outside;
	.reg .f32 %sum, %a, %b;
	.reg .b32 %block, %width, %thread, %index, %count;
	.reg .b64 %out, %left, %right, %offset;
	mov.u32 %block, %ctaid.x;
	mov.u32 %width, %ntid.x;
	mov.u32 %thread, %tid.x;
	mad.lo.s32 %index, %block, %width, %thread;
	ld.param.u32 %count, [count];
	setp.ge.u32 %outside, %index, %count;
	@%outside bra end;
	ld.param.u64 %out, [out];
	ld.param.u64 %left, [left];
	ld.param.u64 %right, [right];
	cvta.to.global.u64 %out, %out;
	cvta.to.global.u64 %left, %left;
	cvta.to.global.u64 %right, %right;
	mul.wide.u32 %offset, %index, 4;
	add.s64 %out, %out, %offset;
	add.s64 %left, %left, %offset;
	add.s64 %right, %right, %offset;
	ld.global.f32 %a, [%left];
	ld.global.f32 %b, [%right];
	add.f32 %sum, %a, %b;
	st.global.f32 [%out], %sum;
end:
	ret;
}}
"""
CUDART_INTERFACE = bytes.fromhex("6bd5fb6c5bf4e74a8987d93912fd9df9")
CTX_CREATE_BYPASS = bytes.fromhex("0ca50b8c1004929a89a7d0df10e77286")
# Little-endian, as cuda.h and fatbinary.h have them.
FATBIN = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
WRAPPER = struct.Struct("<IIQQ")
LAUNCH_CONFIG = struct.Struct("<7I4xQQI4x")
MAJOR, MINOR = 75, 76
PROLOGUES = ("cuLaunchKernel", "cuModuleLoadData", "cuCtxCreate_v2")
PROLOGUE_BYTES = 16


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


class Failed(Exception):
    """The program cannot go on."""


def text(name: str) -> bytes:
    return PTX.format(name=name).encode() + b"\0"


def fatbin(image: bytes, arch: int) -> bytes:
    """A fatbin of one image, not compressed."""
    kind = 2 if image.startswith(b"\x7fELF") else 1
    padded = image + b"\0" * (-len(image) % 8)
    entry = ENTRY.pack(kind, 0x101, 64, len(padded), 0, 0, 0, 0, arch, 0, 0, 0x11, 0, 0)
    return FATBIN.pack(0xBA55ED50, 1, FATBIN.size, len(entry + padded)) + entry + padded


def wrapped(image: int) -> ctypes.Array[ctypes.c_char]:
    data = WRAPPER.pack(0x466243B1, 1, image, 0)
    return ctypes.create_string_buffer(data, len(data))


class Cuda:
    """The driver library, with a context current and vectors in the GPU's memory."""

    def __init__(self, library: str, folder: Path) -> None:
        self.folder = folder
        try:
            self.library = ctypes.CDLL(library)
        except OSError as error:
            raise Failed(f"{library} cannot be loaded: {error}") from None
        self.need("cuInit", 0)
        version, device = c_int(), c_int()
        self.need("cuDriverGetVersion", byref(version))
        self.need("cuDeviceGet", byref(device), 0)
        self.version, self.device = version.value, device
        name = ctypes.create_string_buffer(128)
        self.need("cuDeviceGetName", name, 128, device)
        major, minor = c_int(), c_int()
        self.need("cuDeviceGetAttribute", byref(major), MAJOR, device)
        self.need("cuDeviceGetAttribute", byref(minor), MINOR, device)
        self.gpu = name.value.decode("utf-8", "replace")
        self.arch = 10 * major.value + minor.value
        self.vectors: list[c_uint64] = []

    def has(self, name: str) -> bool:
        return hasattr(self.library, name)

    def call(self, name: str, *arguments: Any) -> int:
        function = getattr(self.library, name)
        return int(function(*arguments))

    def need(self, name: str, *arguments: Any) -> None:
        result = self.call(name, *arguments)
        if result:
            raise Failed(f"{name} gives {result}")

    def prologues(self) -> dict[str, str]:
        found = {}
        for name in PROLOGUES:
            at = ctypes.cast(getattr(self.library, name), c_void_p).value
            assert at is not None
            found[name] = ctypes.string_at(at, PROLOGUE_BYTES).hex(" ")
        for table, identity in (("CUDART_INTERFACE", CUDART_INTERFACE),):
            at = self.slot(identity, 1)
            found[f"{table}[1]"] = ctypes.string_at(at, PROLOGUE_BYTES).hex(" ") if at else "none"
        return found

    def slot(self, table: bytes, number: int) -> int | None:
        """The address in an export table; None where there is none."""
        out = c_void_p()
        if self.call("cuGetExportTable", byref(out), table) or not out.value:
            return None
        size = c_uint64.from_address(out.value).value
        if size < 8 * (number + 1):
            return None
        return c_uint64.from_address(out.value + 8 * number).value or None

    def keep(self, name: str, image: bytes) -> str:
        path = self.folder / name
        path.write_bytes(image)
        return str(path)

    def fill(self) -> None:
        """Three vectors on the GPU: a sum, and two to add."""
        ones, twos = ((ctypes.c_float * COUNT)(*[value] * COUNT) for value in (1.0, 2.0))
        for values in (None, ones, twos):
            memory = c_uint64()
            self.need("cuMemAlloc_v2", byref(memory), c_size_t(4 * COUNT))
            if values is not None:
                self.need("cuMemcpyHtoD_v2", memory, values, c_size_t(4 * COUNT))
            self.vectors.append(memory)
        self.count = c_uint(COUNT)
        told = [*self.vectors, self.count]
        self.parameters = (c_void_p * 4)(*(ctypes.addressof(each) for each in told))

    def sums_are_right(self) -> bool:
        values = (ctypes.c_float * COUNT)()
        self.need("cuMemcpyDtoH_v2", values, self.vectors[0], c_size_t(4 * COUNT))
        return all(value == 3.0 for value in values)

    def launch(self, how: str, kernel: c_void_p, times: int) -> int:
        """Launches by one of the functions; the first result that is not 0."""
        function = getattr(self.library, how)
        blocks = COUNT // BLOCK
        config = LAUNCH_CONFIG.pack(blocks, 1, 1, BLOCK, 1, 1, 0, 0, 0, 0)
        held = ctypes.create_string_buffer(config, len(config))
        plain = (kernel, blocks, 1, 1, BLOCK, 1, 1, 0, None, self.parameters)
        told = (held, kernel, self.parameters) if "KernelEx" in how else plain
        if "Cooperative" not in how:
            told = (*told, None)
        for _ in range(times):
            result = function(*told)
            if result:
                return int(result)
        return self.call("cuCtxSynchronize")

    def close(self) -> None:
        for memory in self.vectors:
            self.call("cuMemFree_v2", memory)
