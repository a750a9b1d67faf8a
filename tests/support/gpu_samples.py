"""One file of every form that GPU code is built into, by name; made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.support import nvcc

ALL_CODES = ("sm_80", "sm_90a", "sm_120", "compute_90", "lto_80")


def _object_of_a_program() -> Path:
    return nvcc.host_object("calls", "-rdc=true", *nvcc.gencodes(["sm_80", "lto_90"]))


def _compressed(codec: str) -> Path:
    # cuobjdump 13.5 gives up on some larger texts that its own fatbinary compressed with zlib.
    return nvcc.compressed(codec, nvcc.cubin("gemm"), nvcc.ptx("gemm"))


SAMPLES: dict[str, Callable[[], Path]] = {
    "fatbin": lambda: nvcc.fatbin("gemm", ALL_CODES),
    "fatbin, uncompressed": lambda: nvcc.fatbin("gemm", ALL_CODES, "-no-compress"),
    "fatbin, concatenated": lambda: nvcc.fatbin(
        "branches", ["sm_80", "sm_90", "sm_120"], "-concat"
    ),
    "fatbin, small": lambda: nvcc.fatbin("sha256", ALL_CODES, "-compress-mode=size"),
    "fatbin, fast": lambda: nvcc.fatbin("sha256", ALL_CODES, "-compress-mode=speed"),
    "fatbin with Tile IR": lambda: nvcc.packed(
        nvcc.cubin("gemm"), nvcc.lto_ir("gemm"), nvcc.tile_ir()
    ),
    **{f"fatbin, {codec}": partial(_compressed, codec) for codec in nvcc.CODECS},
    "object": lambda: nvcc.host_object("messages"),
    "object, debug": lambda: nvcc.host_object("branches", "-G"),
    "object, relocatable": _object_of_a_program,
    "library": lambda: nvcc.library(["gemm", "keccak"], *nvcc.gencodes(ALL_CODES)),
    "library, linked": lambda: nvcc.library(["calls", "called"], relocatable=True),
    "library, link-time optimized": lambda: nvcc.library(
        ["calls", "called"], "-dlto", "-arch=sm_90", relocatable=True
    ),
    "library, concatenated": lambda: nvcc.library(
        ["gemm", "elementwise"], "-concat", *nvcc.gencodes(["sm_80", "sm_90", "compute_90"])
    ),
    "program": lambda: nvcc.executable(["elementwise"]),
    "program, linked": lambda: nvcc.executable(["calls", "called"], relocatable=True),
    "archive": lambda: nvcc.archive(
        nvcc.host_object("gemm"), _object_of_a_program(), nvcc.host_object("gemm")
    ),
}
