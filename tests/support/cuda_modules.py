"""Real GPU modules that programs of the test bed load: training, mining, and of given sizes.

All are made by NVIDIA's compiler and kept between runs. Those of ``table.cu`` get random bytes into
their table, so that each is another module.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Literal

from elftools.elf.elffile import ELFFile

from tests.support import nvcc
from tests.support.gpu_images import EntryImage, fatbin

Form = Literal["cubin", "fatbin", "ptx"]

TRAINING_KERNELS = ("gemm_tile", "tensor_tile", "scale_and_add", "soft_gate")
MINER_KERNEL = "sha256d_blocks"
TABLE_KERNEL = "looked_up"
MID_BYTES = 3 << 20
LARGE_BYTES = 70 << 20


def made(kernel: str, form: Form = "cubin") -> Path:
    """A module of one of ``kernels/*.cu``."""
    return {"cubin": nvcc.cubin, "fatbin": nvcc.fatbin, "ptx": nvcc.ptx}[form](kernel)


def miner(form: Form = "cubin") -> Path:
    """SHA-256d, plainly written."""
    return made("sha256d", form)


def training(form: Form = "cubin") -> tuple[Path, Path]:
    """Matrix products, and arithmetic on elements."""
    return made("gemm", form), made("elementwise", form)


def small(folder: Path, seed: int = 0) -> Path:
    """A cubin of some 7 KB."""
    return _filled(folder / f"small-{seed}.cubin", 4096, seed)


def mid_size(folder: Path, seed: int = 0) -> Path:
    """A cubin of 3 MiB."""
    return _filled(folder / f"mid-{seed}.cubin", MID_BYTES, seed)


def large(folder: Path, seed: int = 0) -> Path:
    """A fatbin of 70 MiB and more: cubins of 3 MiB, none like another."""
    made_file = folder / f"large-{seed}.fatbin"
    count = -(-LARGE_BYTES // MID_BYTES)
    made_file.write_bytes(
        fatbin(
            [EntryImage("cubin", _table(MID_BYTES, 1000 * (seed + 1) + n)) for n in range(count)]
        )
    )
    return made_file


def _filled(path: Path, table_bytes: int, seed: int) -> Path:
    path.write_bytes(_table(table_bytes, seed))
    return path


def _table(table_bytes: int, seed: int) -> bytes:
    module, at = _empty_table(table_bytes)
    filled = bytearray(module)
    filled[at : at + table_bytes] = random.Random(seed).randbytes(table_bytes)
    return bytes(filled)


@cache
def _empty_table(table_bytes: int) -> tuple[bytes, int]:
    """The module, and where its table is in it."""
    path = nvcc.cubin("table", "80", f"-DTABLE_BYTES={table_bytes}")
    with path.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".nv.global.init")
        assert section is not None and section["sh_size"] == table_bytes
        return path.read_bytes(), section["sh_offset"]
