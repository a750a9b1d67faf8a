"""AMD GPU code: compressed bundles (CCOB), offload bundles, and the code objects in them.

Layouts: clang's ClangOffloadBundler documentation and OffloadBundler.cpp; e_flags, notes and
metadata: LLVM's AMDGPUUsage.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from gpuwarden.code.bounds import DEFAULT, KERNELS_TOLD, NAME_TOLD, Bounds
from gpuwarden.code.codecs import decompress
from gpuwarden.code.elf import SHT_NOBITS, TYPE, Elf, Header
from gpuwarden.code.module import Codec, Kernel
from gpuwarden.errors import Malformed

COMPRESSED_MAGIC = b"CCOB"
BUNDLE_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"

# magic, version, method; then by version: decompressed bytes and a hash; the blob's bytes first in
# version 2; as version 2 in 64 bits in version 3.
COMPRESSED_HEAD = struct.Struct("<4sHH")
COMPRESSED = {1: struct.Struct("<8xIQ"), 2: struct.Struct("<8xIIQ"), 3: struct.Struct("<8xQQQ")}
METHODS: dict[int, Codec] = {0: "zlib", 1: "zstd"}

BUNDLE_COUNT = struct.Struct("<24xQ")
BUNDLE_ENTRY = struct.Struct("<QQQ")
BUNDLE_ENTRIES = 4096
ID_LIMIT_BYTES = 1024

NOTE = struct.Struct("<III")
NT_AMDGPU_METADATA = 32
NOTE_OWNER = b"AMDGPU\0"
METADATA_LIMIT_BYTES = 64 << 20

# EF_AMDGPU_MACH_AMDGCN_*: the low byte of e_flags.
_GFX = """20 600 21 601 22 700 23 701 24 702 25 703 26 704 28 801 29 802 2a 803 2b 810 2c 900 2d 902
2e 904 2f 906 30 908 31 909 32 90c 33 1010 34 1011 35 1012 36 1030 37 1031 38 1032 39 1033 3a 602
3b 705 3c 805 3d 1035 3e 1034 3f 90a 40 940 41 1100 42 1013 43 1150 44 1103 45 1036 46 1101 47 1102
48 1200 49 1250 4a 1151 4b 941 4c 942 4e 1201 4f 950 51 9-generic 52 10-1-generic 53 10-3-generic
54 11-generic 55 1152 58 1153 59 12-generic 5f 9-4-generic""".split()
GFX = {int(mach, 16): f"gfx{name}" for mach, name in zip(_GFX[::2], _GFX[1::2], strict=True)}
ABI_WITH_FEATURE_STATES = 2
"""EI_ABIVERSION from code object v4 on: 2 off, 3 on, in two bits for each feature."""
FEATURES = (("sramecc", 10), ("xnack", 8))


class Compressed(NamedTuple):
    """The head of a CCOB blob: where its stream is and what it becomes."""

    codec: Codec
    stream_at: int
    """From the blob's beginning."""
    stored_bytes: int | None
    """The whole blob's; version 1 does not tell."""
    bundle_bytes: int


class BundleEntry(NamedTuple):
    """One code object of an offload bundle."""

    target: str
    """``hipv4-amdgcn-amd-amdhsa--gfx90a:xnack-``."""
    start: int
    end: int


def compressed_at(data: memoryview, start: int = 0) -> Compressed | None:
    """The CCOB head there, None where there is none that is known."""
    if start + COMPRESSED_HEAD.size > len(data):
        return None
    magic, version, method = COMPRESSED_HEAD.unpack_from(data, start)
    layout, codec = COMPRESSED.get(version), METHODS.get(method)
    if magic != COMPRESSED_MAGIC or layout is None or codec is None:
        return None
    if start + layout.size > len(data):
        return None
    fields = layout.unpack_from(data, start)
    if version == 1:
        return Compressed(codec, layout.size, None, fields[0])
    if fields[0] <= layout.size:
        return None
    return Compressed(codec, layout.size, *fields[:2])


def bundle_of(blob: memoryview, head: Compressed, bounds: Bounds = DEFAULT) -> memoryview:
    """The bundle in a CCOB blob, behind whose stream there may be other bytes.

    Errors: Malformed, before anything is allocated when the claimed size is over a bound.
    """
    stream = blob[head.stream_at :]
    return memoryview(decompress(head.codec, stream, head.bundle_bytes, bounds))


def is_bundle(data: memoryview, start: int) -> bool:
    """Whether a number of entries follows the magic: programs that read bundles hold it alone."""
    if start + BUNDLE_COUNT.size > len(data):
        return False
    count: int = BUNDLE_COUNT.unpack_from(data, start)[0]
    return count <= BUNDLE_ENTRIES


def entries(data: memoryview, start: int = 0) -> Iterator[BundleEntry]:
    """The code objects of the bundle at ``start`` that are not empty. Errors: Malformed."""
    if start + BUNDLE_COUNT.size > len(data):
        raise Malformed("offload bundle: cut short")
    (count,) = BUNDLE_COUNT.unpack_from(data, start)
    if count > BUNDLE_ENTRIES:
        raise Malformed(f"offload bundle of {count} entries")
    at = start + BUNDLE_COUNT.size
    for _ in range(count):
        if at + BUNDLE_ENTRY.size > len(data):
            raise Malformed("offload bundle: cut short")
        offset, size, id_bytes = BUNDLE_ENTRY.unpack_from(data, at)
        at += BUNDLE_ENTRY.size
        if id_bytes > ID_LIMIT_BYTES or at + id_bytes > len(data):
            raise Malformed("offload bundle: an entry's name is cut short")
        target = bytes(data[at : at + id_bytes]).decode("utf-8", "backslashreplace")
        at += id_bytes
        if size:
            if start + offset + size > len(data):
                raise Malformed(f"offload bundle: {target} is past the bytes that are there")
            yield BundleEntry(target, start + offset, start + offset + size)


def is_amd(target: str) -> bool:
    """Whether a bundle's entry is AMD code: others are the host's object, or another vendor's."""
    return "amdgcn" in target or "amdgpu" in target or "spirv" in target


def arch_of_target(target: str) -> str:
    """``gfx90a:xnack-`` of a bundle's target."""
    return target.rpartition("--")[2] if "--" in target else target.rpartition("-")[2]


def arch_of(header: Header) -> str:
    """``gfx90a:sramecc+:xnack-`` by e_flags; a feature that may be on or off is not told."""
    arch = GFX.get(header.flags & 0xFF, "")
    if not arch or header.abi_version < ABI_WITH_FEATURE_STATES:
        return arch
    for feature, shift in FEATURES:
        state = header.flags >> shift & 3
        arch += f":{feature}{'-+'[state - 2]}" if state >= 2 else ""
    return arch


class _KernelMetadata(msgspec.Struct):
    name: str = msgspec.field(default="", name=".name")
    registers: int | None = msgspec.field(default=None, name=".vgpr_count")
    shared_bytes: int | None = msgspec.field(default=None, name=".group_segment_fixed_size")


class _Metadata(msgspec.Struct):
    kernels: list[_KernelMetadata] = msgspec.field(default_factory=list, name="amdhsa.kernels")


_metadata = msgspec.msgpack.Decoder(_Metadata)


def kernels(
    image: Elf, bounds: Bounds = DEFAULT, limit: int = KERNELS_TOLD
) -> tuple[int, tuple[Kernel, ...]]:
    """How many kernels there are, and the first with their resources. Errors: Malformed."""
    found = _kernels_noted(image)
    if len(found) > bounds.kernels:
        raise Malformed(f"AMD code object of {len(found)} kernels")
    sizes = _code_sizes(image) if found and limit else {}
    return len(found), tuple(
        Kernel(
            name=kernel.name[:NAME_TOLD],
            registers=kernel.registers,
            shared_bytes=kernel.shared_bytes,
            code_bytes=sizes.get(kernel.name.encode()),
        )
        for kernel in found[:limit]
    )


def _kernels_noted(image: Elf) -> list[_KernelMetadata]:
    index = image.find(b".note")
    if index is None:
        return []
    section = image.body(index)[:METADATA_LIMIT_BYTES]
    at = 0
    while at + NOTE.size <= len(section):
        owner_bytes, size, kind = NOTE.unpack_from(section, at)
        owner = bytes(section[at + NOTE.size : at + NOTE.size + min(owner_bytes, 8)])
        body = at + NOTE.size + (owner_bytes + 3 & ~3)
        if kind == NT_AMDGPU_METADATA and owner == NOTE_OWNER:
            try:
                return _metadata.decode(section[body : body + size]).kernels
            except (msgspec.MsgspecError, RecursionError, ValueError) as error:
                raise Malformed(f"AMD code object: its metadata: {error}") from error
        at = body + (size + 3 & ~3)
    return []


def _code_sizes(image: Elf) -> dict[bytes, int]:
    """Bytes of code by function, from the symbols that are exported, else from all of them."""
    index = image.find(b".dynsym")
    if index is None:
        index = image.find(b".symtab")
    if index is None or image.rows[index][TYPE] == SHT_NOBITS:
        return {}
    strings = image.strings(index)
    sizes: dict[bytes, int] = {}
    for name_at, info, _, _, _, size in image.symbols(index):
        if info & 0xF == 2 and len(sizes) < 1 << 17:
            stop = strings.find(b"\0", name_at, name_at + 4096)
            sizes[strings[name_at:stop] if stop >= 0 else b""] = size
    return sizes
