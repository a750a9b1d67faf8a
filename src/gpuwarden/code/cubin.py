"""Cubins: NVIDIA's ELF, its architecture, what it was built with, and its kernels.

Layouts as seen in images of CUDA 9 to 13.5; names of attributes as ``cuobjdump -elf`` prints them.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from gpuwarden.code.bounds import DEFAULT, KERNELS_TOLD, Bounds
from gpuwarden.code.elf import (
    INFO,
    SIZE,
    Elf,
    Header,
    string_at,
)
from gpuwarden.code.module import Kernel
from gpuwarden.errors import Malformed
from gpuwarden.pattern import pattern

TEXT = b".text."
SHARED = b".nv.shared."
INFO_SECTION = b".nv.info"
TOOLKIT_NOTE, CUDA_NOTE, COMPAT = b".note.nv.tkinfo", b".note.nv.cuinfo", b".nv.compat"

NOTE = struct.Struct("<III")
NOTE_LIMIT_BYTES = 64 << 10
# version, then offsets into the strings behind: of the tool's name, its version, its options
TOOLKIT = struct.Struct("<IIIIII")
# version, sm of the virtual architecture, toolkit as major * 10 + minor
CUDA = struct.Struct("<HHH")

ATTRIBUTE = struct.Struct("<BBH")
EIFMT_SVAL = 4
EIATTR_REGCOUNT = 0x2F
# symbol, registers
REGCOUNT = struct.Struct("<BBHII")
REGCOUNT_MARK = struct.pack("<BBH", EIFMT_SVAL, EIATTR_REGCOUNT, 8)
COMPAT_ARCH_SPECIFIC = b"\x02\x09\x01\x00"
"""Attribute 9 of ``.nv.compat``: 1 for sm_90a, 0 for sm_90."""

ABI_WITH_SM_IN_SECOND_BYTE = 8
EF_CUDA_ACCELERATORS = 0x800
"""Of ABI 7: sm_90a."""

_ARCH_OPTION = pattern(rb"(?:^|\s)-?-arch[= ](?:sm|compute)_(\d{1,4})([af]?)\b")
_TOOL_VERSION = pattern(rb"\bV(\d{1,4}\.\d{1,4}\.\d{1,6})\b")


class Built(NamedTuple):
    """What the notes say, which anyone can write."""

    toolkit: str
    options: str


def sm_of(header: Header) -> int:
    """The architecture's number: 90 of sm_90a."""
    if header.abi_version >= ABI_WITH_SM_IN_SECOND_BYTE:
        return header.flags >> 8 & 0xFF
    return header.flags & 0xFF


def arch_of(image: Elf) -> str:
    """``sm_90a``; the suffix where the options, ``.nv.compat`` or the flags tell it."""
    sm = sm_of(image.header)
    arch = _ARCH_OPTION.search(_tool_strings(image)[1])
    if arch is not None and int(arch[1]) == sm:
        return f"sm_{sm}{arch[2].decode()}"
    if image.header.abi_version < ABI_WITH_SM_IN_SECOND_BYTE:
        return f"sm_{sm}a" if image.header.flags & EF_CUDA_ACCELERATORS else f"sm_{sm}"
    compat = _body(image, COMPAT)
    return f"sm_{sm}a" if COMPAT_ARCH_SPECIFIC in compat else f"sm_{sm}"


def built(image: Elf) -> Built:
    """The toolkit and the options of the notes, empty where there are none."""
    tool, options = _tool_strings(image)
    if tool:
        return Built(tool.decode("utf-8", "backslashreplace"), _words(options))
    description = _note(_body(image, CUDA_NOTE))
    if len(description) >= CUDA.size:
        version = CUDA.unpack_from(description)[2]
    else:
        version = image.header.version
    # e_version is 1 in ELF; ptxas before CUDA 13 wrote its own version there.
    return Built(f"CUDA {version // 10}.{version % 10}" if 50 <= version < 1000 else "", "")


def _tool_strings(image: Elf) -> tuple[bytes, bytes]:
    """``ptxas 13.0.88`` and the options, both as they are there."""
    description = _note(_body(image, TOOLKIT_NOTE))
    if len(description) < TOOLKIT.size:
        return b"", b""
    _, _, name_at, version_at, _, options_at = TOOLKIT.unpack_from(description)
    strings = description[TOOLKIT.size :]
    version = _TOOL_VERSION.search(string_at(strings, version_at))
    name = string_at(strings, name_at)
    return (name + b" " + version[1] if version else name), string_at(strings, options_at)


def _words(text: bytes) -> str:
    return b" ".join(text.split()).decode("utf-8", "backslashreplace")


def _body(image: Elf, name: bytes) -> bytes:
    index = image.find(name)
    return b"" if index is None else bytes(image.body(index)[:NOTE_LIMIT_BYTES])


def _note(section: bytes) -> bytes:
    """The description of the section's first note."""
    if len(section) < NOTE.size:
        return b""
    owner_bytes, size, _ = NOTE.unpack_from(section)
    start = NOTE.size + (owner_bytes + 3 & ~3)
    return section[start : start + size]


def instructions(sm: int, code_bytes: int) -> int:
    """How many instructions that many bytes are.

    16 bytes each from sm_70; before, 64 bits each, and one word in four (sm_50), or in eight
    (sm_30), schedules the others.
    """
    if sm >= 70:
        return code_bytes // 16
    words = code_bytes // 8
    return words * 3 // 4 if sm >= 50 else words * 7 // 8 if sm >= 30 else words


def kernels(image: Elf, bounds: Bounds = DEFAULT) -> tuple[int, tuple[Kernel, ...]]:
    """How many kernels there are, and the first of them with their resources. Errors: Malformed."""
    codes = [index for index, name in enumerate(image.names) if name.startswith(TEXT)]
    if len(codes) > bounds.kernels:
        raise Malformed(f"cubin of {len(codes)} kernels")
    told = codes[:KERNELS_TOLD]
    registers = _registers(image) if told else {}
    shared = _shared(image) if told else {}
    sm, rows, names = sm_of(image.header), image.rows, image.names
    found = []
    for index in told:
        row, name = rows[index], names[index][len(TEXT) :]
        count = registers.get(row[INFO] & 0xFFFFFF)
        # Before sm_80 and ABI 8 the section header itself has the count.
        count = row[INFO] >> 24 or None if count is None else count
        found.append(
            Kernel(
                name=name.decode("utf-8", "backslashreplace"),
                registers=count,
                shared_bytes=shared.get(name, 0),
                instructions=instructions(sm, row[SIZE]),
                code_bytes=row[SIZE],
            )
        )
    return len(codes), tuple(found)


def _shared(image: Elf) -> dict[bytes, int]:
    at = len(SHARED)
    return {
        name[at:]: row[SIZE]
        for name, row in zip(image.names, image.rows, strict=True)
        if name.startswith(SHARED)
    }


def _registers(image: Elf) -> dict[int, int]:
    """Registers by the index of the function's symbol."""
    index = image.find(INFO_SECTION)
    if index is None:
        return {}
    section = bytes(image.body(index))
    found: dict[int, int] = {}
    at, end = 0, len(section)
    while at + ATTRIBUTE.size <= end:
        form, _, size = ATTRIBUTE.unpack_from(section, at)
        if section.startswith(REGCOUNT_MARK, at) and at + REGCOUNT.size <= end:
            *_, symbol, count = REGCOUNT.unpack_from(section, at)
            found[symbol] = count
        at += ATTRIBUTE.size + (size if form == EIFMT_SVAL else 0)
    return found
