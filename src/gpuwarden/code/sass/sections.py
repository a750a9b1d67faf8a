"""Where a cubin keeps its code and its constants.

Sums of lengths are held against the image too: sections of a sound cubin do not share bytes, and
one whose sections do could make a reader work without end.
"""

from __future__ import annotations

from msgspec import Struct

from gpuwarden.code import elf
from gpuwarden.code.bounds import DEFAULT, Bounds
from gpuwarden.code.cubin import sm_of
from gpuwarden.errors import Malformed

INSTRUCTION_BYTES = 16
LEAST_CODE_BYTES = 8 * INSTRUCTION_BYTES
LEAST_CONSTANT_BYTES = 4
NAME_CHARACTERS = 4096
CODE = b".text"
CONSTANTS = (b".nv.constant", b".nv.global.init", b".rodata")
PARAMETERS = b".nv.constant0"


class Code(Struct, frozen=True):
    """One kernel's (or device function's) instructions within the image, in bytes."""

    name: str
    offset: int
    size: int


class CubinSections(Struct, frozen=True):
    """The architecture (``sm_90`` is 90) of a cubin, its code, and (offset, size) of constants.

    Constants are those the compiler lays down: banks but for bank 0, which holds the parameters,
    initialised globals, and read-only data.
    """

    arch: int
    code: tuple[Code, ...]
    constants: tuple[tuple[int, int], ...]


def read_sections(image: bytes | memoryview, bounds: Bounds = DEFAULT) -> CubinSections:
    """The sections of a cubin that hold at least eight instructions. Errors: Malformed."""
    file = elf.Elf(image, bounds)
    header, limit = file.header, len(image)
    if header.machine != elf.EM_CUDA:
        raise Malformed(f"cubin: an ELF image for machine {header.machine}")
    code: list[Code] = []
    constants: list[tuple[int, int]] = []
    code_bytes = constant_bytes = 0
    for name, row in zip(file.names, file.rows, strict=False):
        kind, offset, size = row[elf.TYPE], row[elf.OFFSET], row[elf.SIZE]
        # By name, as the driver looks for it, whatever type it is said to have; and what says that
        # it can run.
        has_code = name.startswith(CODE) or row[elf.FLAGS] & elf.SHF_EXECINSTR
        if has_code and kind != elf.SHT_NOBITS:
            if size < LEAST_CODE_BYTES:
                continue
            label = name.removeprefix(CODE + b".")[:NAME_CHARACTERS]
            code.append(Code(label.decode("utf-8", "backslashreplace") or "?", offset, size))
            code_bytes += size
        elif kind != elf.SHT_NOBITS and name.startswith(CONSTANTS):
            if name.startswith(PARAMETERS) or size < LEAST_CONSTANT_BYTES:
                continue
            constants.append((offset, size))
            constant_bytes += size
        else:
            continue
        if offset + size > limit:
            raise Malformed("cubin: a section ends past the image")
        if code_bytes > limit or constant_bytes > limit:
            raise Malformed("cubin: sections that hold the same bytes")
        if len(code) > bounds.kernels:
            raise Malformed(f"cubin: more than {bounds.kernels} kernels")
    return CubinSections(arch=sm_of(header), code=tuple(code), constants=tuple(constants))
