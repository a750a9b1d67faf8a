"""NVRTC and nvJitLink, which compile in the process that asks; neither needs a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import cache
from typing import Literal

from tests.support.nvcc import CUDA

Made = Literal["CUBIN", "PTX", "LTOIR"]
# nvJitLinkInputType: CUBIN 1, PTX 2, LTOIR 3.
_INPUTS = {"CUBIN": 1, "PTX": 2, "LTOIR": 3}


def nvrtc(source: bytes, form: Made, *options: str, name: str = "sample.cu") -> bytes:
    """What NVRTC makes of a source text; ``-dlto`` among the options for LTO-IR."""
    library = _library("libnvrtc.so.13")
    program = ctypes.c_void_p()
    _checked(library.nvrtcCreateProgram)(
        ctypes.byref(program), source, name.encode(), 0, None, None
    )
    _checked(library.nvrtcCompileProgram)(program, len(options), _strings(options))
    made = _sized(library, f"nvrtcGet{form}Size", f"nvrtcGet{form}", program)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return made


def nvjitlink(inputs: Iterable[tuple[Made, bytes]], *options: str) -> bytes:
    """The cubin that nvJitLink links of its inputs."""
    library = _library("libnvJitLink.so.13")
    linker = ctypes.c_void_p()
    _checked(_versioned("Create"))(ctypes.byref(linker), len(options), _strings(options))
    for form, data in inputs:
        size = ctypes.c_size_t(len(data))
        _checked(_versioned("AddData"))(linker, _INPUTS[form], data, size, b"sample")
    _checked(_versioned("Complete"))(linker)
    size_call, call = map(_versioned_name, ("GetLinkedCubinSize", "GetLinkedCubin"))
    made = _sized(library, size_call, call, linker)
    _versioned("Destroy")(ctypes.byref(linker))
    return made


@cache
def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(CUDA / "lib" / name))


def _versioned_name(call: str) -> str:
    """nvJitLink's calls carry a header's version; the first of a major one is always there."""
    return f"__nvJitLink{call}_13_0"


def _versioned(call: str) -> ctypes._FuncPointer:
    function: ctypes._FuncPointer = getattr(_library("libnvJitLink.so.13"), _versioned_name(call))
    return function


def _strings(options: tuple[str, ...]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(options))(*(option.encode() for option in options))


def _checked(function: Callable[..., int]) -> Callable[..., None]:
    def call(*arguments: object) -> None:
        result = function(*arguments)
        assert result == 0, f"{getattr(function, '__name__', function)}: {result}"

    return call


def _sized(library: ctypes.CDLL, size_call: str, call: str, handle: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _checked(getattr(library, size_call))(handle, ctypes.byref(size))
    held = ctypes.create_string_buffer(size.value)
    _checked(getattr(library, call))(handle, held)
    return held.raw
