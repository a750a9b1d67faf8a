"""Cubins: NVIDIA's ELF, its architecture, what it was built with, and its kernels.

Layouts as seen in images of CUDA 9 to 13.5; names of attributes as ``cuobjdump -elf`` prints them.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpuwarden.code.bounds import DEFAULT, KERNELS_TOLD, NAME_TOLD, Bounds
from gpuwarden.code.elf import (
    SHF_ALLOC,
    SHF_EXECINSTR,
    SHT_CUDA_SHARED,
    SHT_NOBITS,
    Elf,
    Header,
    string_at,
)
from gpuwarden.code.module import Kernel
from gpuwarden.errors import Malformed
from gpuwarden.pattern import pattern

TEXT, SHARED = b".text.", b".nv.shared."
ATTRIBUTES, COMPAT = b".nv.info", b".nv.compat"
TOOLKIT_NOTE, CUDA_NOTE = b".note.nv.tkinfo", b".note.nv.cuinfo"

NAME_BYTES = 16
"""Enough of a section's name to tell what it is for."""
_BYTES_OF_NAME = np.arange(NAME_BYTES)
ONE, THREE, SIX, SEVEN = (np.uint64((1 << 8 * size) - 1) for size in (1, 3, 6, 7))
# Names as numbers: .nv.constant0.f and .nv.constant0 have a launch's parameters, all other banks
# and .nv.global.init and .rodata have constants.
TEXT_WORD, NV_CONS, NV_GLOB, NV_CAPM, NV_MERC, NV_SHAR, NV_INFO, NV_COMP, NOTE_NV, RODATA = (
    np.uint64(int.from_bytes(name, "little"))
    for name in (
        *(b".text.", b".nv.cons", b".nv.glob", b".nv.capm", b".nv.merc", b".nv.shar"),
        *(b".nv.info", b".nv.comp", b".note.nv", b".rodata"),
    )
)
TANT0_OF_KERNEL, TANT0, AL_INIT, ERC_TEXT, ED = (
    np.uint64(int.from_bytes(name, "little"))
    for name in (b"tant0.", b"tant0", b"al.init", b"erc.text", b"ed.")
)
_Words = npt.NDArray[np.uint64]

NOTE = struct.Struct("<III")
NOTE_LIMIT_BYTES = 64 << 10
# version, then offsets into the strings behind: of the tool's name, its version, its options
TOOLKIT = struct.Struct("<IIIIII")
# version, sm of the virtual architecture, toolkit as major * 10 + minor
CUDA = struct.Struct("<HHH")

# form, attribute, size of a form 4; as one number, and with two numbers behind it
ATTRIBUTE = struct.Struct("<BBH")
PAIR = struct.Struct("<III")
EIFMT_SVAL = 4
EIATTR_REGCOUNT = 0x2F
PAIR_FORM, PAIR_FORM_MASK = EIFMT_SVAL | 8 << 16, 0xFFFF00FF
ATTRIBUTES_LIMIT_BYTES = 8 << 20
PAIRS_AT_ONCE, OTHERS_AT_ONCE = 2048, 64
"""Attributes read together and one by one in turn, so that short runs cost little each."""
REGCOUNT = EIFMT_SVAL | EIATTR_REGCOUNT << 8 | 8 << 16
"""Behind it: the function's symbol, and its registers."""
COMPAT_ARCH_SPECIFIC = b"\x02\x09\x01\x00"
"""Attribute 9 of ``.nv.compat``: 1 for sm_90a, 0 for sm_90."""

ABI_WITH_SM_IN_SECOND_BYTE = 8
EF_CUDA_ACCELERATORS = 0x800
"""Of ABI 7: sm_90a."""

_ARCH_OPTION = pattern(rb"(?:^|\s)-?-arch[= ](?:sm|compute)_(\d{1,4})([af]?)\b")
_TOOL_VERSION = pattern(rb"\bV(\d{1,4}\.\d{1,4}\.\d{1,6})\b")


class Cubin:
    """A cubin's sections by what they are for. Errors of the constructor: Malformed.

    ``codes``, ``capsules`` (code that the driver finishes), ``constants`` and ``shared`` are
    indices of sections. Told by name, as the driver does: types and flags can say anything. What
    has a name that no toolkit gives and is executable or loaded all the same is code or a constant
    too, so that nothing can be added to known code beside it.
    """

    __slots__ = ("_notes", "attributes", "capsules", "codes", "constants", "image", "shared")

    def __init__(self, image: Elf) -> None:
        self.image = image
        first, second = _name_words(image)
        bank = second & SIX
        is_constant = (first == NV_CONS) & (bank != TANT0_OF_KERNEL) & (bank != TANT0)
        is_constant |= (first == NV_GLOB) & (second & SEVEN == AL_INIT)
        is_constant |= first & SEVEN == RODATA
        is_code = first & SIX == TEXT_WORD
        odd = ~(is_code | is_constant) & (image.table()["type"] != SHT_NOBITS)
        for word in (NV_CONS, NV_GLOB, NV_CAPM, NV_MERC, NV_SHAR):
            odd &= first != word
        flags = image.table()["flags"]
        is_code |= odd & (flags & SHF_EXECINSTR != 0)
        is_loaded = (flags & SHF_ALLOC != 0) & (image.table()["type"] != SHT_CUDA_SHARED)
        is_constant |= odd & is_loaded & ~is_code
        self.codes = _indices(is_code)
        self.constants = _indices(is_constant)
        self.capsules = _indices((first == NV_CAPM) & (second == ERC_TEXT))
        self.shared = _indices((first == NV_SHAR) & (second & THREE == ED))
        attributes = _indices((first == NV_INFO) & (second & ONE == 0))
        self.attributes = attributes[0] if attributes else None
        notes = reversed(_indices((first == NOTE_NV) | (first == NV_COMP)))
        self._notes = {image.name(index): index for index in notes}

    def note(self, name: bytes) -> bytes:
        """The bytes of a section that is not about a kernel, none when it is not there."""
        index = self._notes.get(name)
        return b"" if index is None else bytes(self.image.body(index)[:NOTE_LIMIT_BYTES])


def _name_words(image: Elf) -> tuple[_Words, _Words]:
    """The first sixteen bytes of each section's name as two numbers. Errors: Malformed.

    Behind a name's end they are whatever is there: what is looked for has its own end.
    """
    starts = image.table()["name"].astype(np.int64)
    last = int(starts.max()) if len(starts) else 0
    if last > len(image.name_bytes):
        raise Malformed("ELF section name: outside the names")
    names = image.name_bytes
    if last + NAME_BYTES > len(names):
        names += bytes(NAME_BYTES)
    strings = np.frombuffer(names, np.uint8)
    words = strings[starts[:, None] + _BYTES_OF_NAME].view("<u8")
    return words[:, 0], words[:, 1]


def _indices(chosen: npt.NDArray[np.bool_]) -> list[int]:
    found: list[int] = chosen.nonzero()[0].tolist()
    return found


class Built(NamedTuple):
    """What the notes say, which anyone can write."""

    toolkit: str
    options: str


def sm_of(header: Header) -> int:
    """The architecture's number: 90 of sm_90a."""
    if header.abi_version >= ABI_WITH_SM_IN_SECOND_BYTE:
        return header.flags >> 8 & 0xFF
    return header.flags & 0xFF


def arch_of(cubin: Cubin) -> str:
    """``sm_90a``; the suffix where the options, ``.nv.compat`` or the flags tell it."""
    header = cubin.image.header
    sm = sm_of(header)
    arch = _ARCH_OPTION.search(_tool_strings(cubin)[1])
    if arch is not None and int(arch[1]) == sm:
        return f"sm_{sm}{arch[2].decode()}"
    if header.abi_version < ABI_WITH_SM_IN_SECOND_BYTE:
        return f"sm_{sm}a" if header.flags & EF_CUDA_ACCELERATORS else f"sm_{sm}"
    return f"sm_{sm}a" if COMPAT_ARCH_SPECIFIC in cubin.note(COMPAT) else f"sm_{sm}"


def built(cubin: Cubin) -> Built:
    """The toolkit and the options of the notes, empty where there are none."""
    tool, options = _tool_strings(cubin)
    if tool:
        return Built(_words(tool), _words(options))
    description = _description(cubin.note(CUDA_NOTE))
    if len(description) >= CUDA.size:
        version = CUDA.unpack_from(description)[2]
    else:
        # 1 in ELF; ptxas before CUDA 13 wrote its own version there.
        version = cubin.image.header.version
    return Built(f"CUDA {version // 10}.{version % 10}" if 50 <= version < 1000 else "", "")


def _tool_strings(cubin: Cubin) -> tuple[bytes, bytes]:
    """``ptxas 13.0.88`` and the options, both as they are there."""
    description = _description(cubin.note(TOOLKIT_NOTE))
    if len(description) < TOOLKIT.size:
        return b"", b""
    _, _, name_at, version_at, _, options_at = TOOLKIT.unpack_from(description)
    strings = description[TOOLKIT.size :]
    version = _TOOL_VERSION.search(string_at(strings, version_at))
    name = string_at(strings, name_at)
    return (name + b" " + version[1] if version else name), string_at(strings, options_at)


def _words(text: bytes) -> str:
    return b" ".join(text.split())[:NAME_TOLD].decode("utf-8", "backslashreplace")


def _description(section: bytes) -> bytes:
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


def kernels(
    cubin: Cubin, bounds: Bounds = DEFAULT, limit: int = KERNELS_TOLD
) -> tuple[int, tuple[Kernel, ...]]:
    """How many kernels there are, and the first with their resources. Errors: Malformed."""
    codes, image = cubin.codes, cubin.image
    if len(codes) > bounds.kernels:
        raise Malformed(f"cubin of {len(codes)} kernels")
    if not codes or not limit:
        return len(codes), ()
    registers, sm = _registers(cubin), sm_of(image.header)
    shared = {name[len(SHARED) :]: size for name, size, _ in _named(image, cubin.shared)}
    found = []
    for whole_name, size, info in _named(image, codes[:limit]):
        name = whole_name.removeprefix(TEXT)
        found.append(
            Kernel(
                name=name[:NAME_TOLD].decode("utf-8", "backslashreplace"),
                # Before sm_80 and ABI 8 the section header itself has the count.
                registers=registers.get(info & 0xFFFFFF) or info >> 24 or None,
                shared_bytes=shared.get(name, 0),
                instructions=instructions(sm, size),
                code_bytes=size,
            )
        )
    return len(codes), tuple(found)


def _named(image: Elf, indices: list[int]) -> list[tuple[bytes, int, int]]:
    """Name, size and info of these sections."""
    if not indices:
        return []
    table, strings = image.table(), image.name_bytes
    names = [string_at(strings, at) for at in table["name"][indices].tolist()]
    sizes, infos = (table[key][indices].tolist() for key in ("size", "info"))
    return list(zip(names, sizes, infos, strict=True))


def _registers(cubin: Cubin) -> dict[int, int]:
    """Registers by the index of the function's symbol."""
    if cubin.attributes is None:
        return {}
    section = bytes(cubin.image.body(cubin.attributes)[:ATTRIBUTES_LIMIT_BYTES])
    found: dict[int, int] = {}
    at, end = 0, len(section)
    while at + ATTRIBUTE.size <= end:
        # Nearly all are of twelve bytes, so runs of these are read without a look at each.
        count = min((end - at) // PAIR.size, PAIRS_AT_ONCE)
        pairs = np.frombuffer(section, "<u4", 3 * count, at).reshape(-1, 3)
        others = ((pairs[:, 0] & PAIR_FORM_MASK) != PAIR_FORM).nonzero()[0]
        run = pairs[: others[0]] if len(others) else pairs
        counts = run[run[:, 0] == REGCOUNT]
        found.update(zip(counts[:, 1].tolist(), counts[:, 2].tolist(), strict=True))
        at += PAIR.size * len(run)
        for _ in range(OTHERS_AT_ONCE):
            if at + ATTRIBUTE.size > end:
                break
            mark, symbol, value = PAIR.unpack_from(
                section[at : at + PAIR.size].ljust(PAIR.size, b"\0")
            )
            if mark == REGCOUNT:
                found[symbol] = value
            at += ATTRIBUTE.size + (mark >> 16 if mark & 0xFF == EIFMT_SVAL else 0)
    return found
