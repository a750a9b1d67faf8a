"""Builders of GPU code images: cubins, fatbins, PTX, AMD's bundles, archives and programs, by hand.

Small and valid as far as our readers go; real ones are built by nvcc in the tests that need them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import lz4.block  # type: ignore[import-untyped]
import lz4.frame  # type: ignore[import-untyped]
import msgspec
import zstandard

FatbinCodec = Literal["none", "zlib", "lz4", "lz4-frame", "zstd"]

CODEC_FLAGS: dict[str, int] = {
    "none": 0,
    "zlib": 0x1000,
    "lz4": 0x2000,
    "lz4-frame": 0x4000,
    "zstd": 0x8000,
}
LINUX_64 = 0x11
OBFUSCATED, ARCH_A, ARCH_F = 0x10000, 0x100000, 0x200000
KINDS = {"ptx": 1, "cubin": 2, "lto-ir": 8, "tile-ir": 0x80, "concat": 0x100}

SHT_PROGBITS, SHT_SYMTAB, SHT_STRTAB, SHT_NOTE, SHT_NOBITS, SHT_DYNSYM = 1, 2, 3, 7, 8, 11


class Section(NamedTuple):
    """A section to write; ``size`` is for NOBITS, which have no bytes."""

    name: str
    body: bytes = b""
    kind: int = SHT_PROGBITS
    info: int = 0
    link: int = 0
    size: int | None = None
    flags: int = 0


class KernelImage(NamedTuple):
    """A kernel to put into a cubin."""

    name: str
    code: bytes
    registers: int = 8
    shared_bytes: int = 0
    parameters: bytes = bytes(0x160)


class EntryImage(NamedTuple):
    """An entry to put into a fatbin."""

    kind: str | int
    image: bytes
    sm: int = 80
    codec: str = "none"
    identifier: str = ""
    options: str = ""
    flags: int = 0


def elf(
    sections: Iterable[Section],
    *,
    machine: int = 62,
    os_abi: int = 0,
    abi_version: int = 0,
    flags: int = 0,
    version: int = 1,
) -> bytes:
    """An ELF64 file of these sections, with names in ``.shstrtab``, its first."""
    listed = [Section(".shstrtab", kind=SHT_STRTAB), *sections]
    names, at = b"\0", {}
    for section in listed:
        at[section.name] = len(names)
        names += section.name.encode() + b"\0"
    listed[0] = Section(".shstrtab", names, SHT_STRTAB)
    body, rows = bytearray(64), [bytes(64)]
    for section in listed:
        body += bytes(-len(body) % 16)
        size = len(section.body) if section.size is None else section.size
        rows.append(
            struct.pack(
                "<IIQQQQIIQQ",
                at[section.name],
                section.kind,
                section.flags,
                0,
                len(body),
                size,
                section.link,
                section.info,
                16,
                24 if section.kind in (SHT_SYMTAB, SHT_DYNSYM) else 0,
            )
        )
        body += section.body
    body += bytes(-len(body) % 8)
    ident = b"\x7fELF\x02\x01\x01" + bytes([os_abi, abi_version]) + bytes(7)
    body[:64] = ident + struct.pack(
        "<HHIQQQIHHHHHH", 2, machine, version, 0, 0, len(body), flags, 64, 0, 0, 64, len(rows), 1
    )
    return bytes(body) + b"".join(rows)


def note(owner: bytes, kind: int, description: bytes) -> bytes:
    """One ELF note."""
    owner += b"\0"
    return (
        struct.pack("<III", len(owner), len(description), kind)
        + owner
        + bytes(-len(owner) % 4)
        + description
        + bytes(-len(description) % 4)
    )


def toolkit_note(version: str = "13.5.37", options: str = "-arch sm_90a -m 64") -> bytes:
    """``.note.nv.tkinfo`` as ptxas writes it."""
    strings = [b"", b"ptxas", f"Cuda compilation tools, V{version}".encode(), b"Build", b""]
    strings[4] = options.encode()
    offsets, blob = [], b""
    for text in strings:
        offsets.append(len(blob))
        blob += text + b"\0"
    return note(b"NVIDIA Corp", 2000, struct.pack("<IIIIII", 2, *offsets) + blob)


def cubin(
    kernels: Sequence[KernelImage] = (KernelImage("kernel", bytes(range(256))),),
    *,
    sm: int = 90,
    suffix: str = "",
    abi: int = 8,
    constants: Mapping[str, bytes] | None = None,
    toolkit: bool = True,
    more: Sequence[Section] = (),
) -> bytes:
    """A cubin of these kernels; ``constants`` are whole sections by name."""
    names = list(more)
    if toolkit:
        options = f"-arch sm_{sm}{suffix} -m 64"
        names.append(Section(".note.nv.tkinfo", toolkit_note(options=options), SHT_NOTE))
    attributes = b"".join(
        struct.pack("<BBHII", 4, 0x2F, 8, symbol, kernel.registers)
        for symbol, kernel in enumerate(kernels, 1)
    )
    names.append(Section(".nv.info", attributes, 0x70000000))
    for symbol, kernel in enumerate(kernels, 1):
        names.append(Section(f".text.{kernel.name}", kernel.code, info=symbol))
        names.append(Section(f".nv.constant0.{kernel.name}", kernel.parameters))
        if kernel.shared_bytes:
            shared = f".nv.shared.{kernel.name}"
            names.append(Section(shared, kind=SHT_NOBITS, size=kernel.shared_bytes))
    names += [Section(name, body) for name, body in (constants or {}).items()]
    flags = sm << 8 | 4 if abi >= 8 else sm | sm << 16 | 0x500 | (0x800 if suffix == "a" else 0)
    os_abi = 0x41 if abi >= 8 else 0x33
    return elf(names, machine=190, os_abi=os_abi, abi_version=abi, flags=flags)


def ptx(
    entries: Sequence[str] = ("kernel",), *, target: str = "sm_80", body: str = "ret;"
) -> bytes:
    """PTX text of these entries."""
    text = f"//\n// Generated by hand\n//\n\n.version 8.0\n.target {target}\n.address_size 64\n"
    for entry in entries:
        text += f"\n.visible .entry {entry}(\n\t.param .u64 {entry}_param_0\n)\n{{\n\t{body}\n}}\n"
    return text.encode()


def compress(codec: str, data: bytes) -> bytes:
    """``data`` as a fatbin's codec stores it."""
    if codec == "zlib":
        return zlib.compress(data)
    if codec == "lz4":
        return bytes(lz4.block.compress(data, store_size=False))
    if codec == "lz4-frame":
        return bytes(lz4.frame.compress(data))
    return zstandard.ZstdCompressor().compress(data) if codec == "zstd" else data


def entry(image: EntryImage) -> bytes:
    """A fatbin's entry: header, identifier, options, payload."""
    kind = image.kind if isinstance(image.kind, int) else KINDS[image.kind]
    data = image.image + b"\0" if kind == 1 else image.image
    stored = compress(image.codec, data)
    extras = b""
    identifier_at = options_at = 0
    if image.identifier:
        identifier_at = 64
        extras += image.identifier.encode() + b"\0"
        extras += bytes(-len(extras) % 8)
    if image.options:
        options_at = 64 + len(extras)
        text = image.options.encode()
        extras += struct.pack("<II", options_at + 8, len(text)) + text
        extras += bytes(-len(extras) % 8)
    is_compressed = image.codec != "none"
    padded = stored + bytes(-len(stored) % 8)
    return (
        struct.pack(
            "<HHIQIIHHIIIQQQ",
            kind,
            0x0101,
            64 + len(extras),
            len(padded),
            len(stored) if is_compressed else 0,
            options_at,
            0,
            8,
            image.sm,
            identifier_at,
            len(image.identifier),
            image.flags | LINUX_64 | CODEC_FLAGS[image.codec],
            0,
            len(data) if is_compressed else 0,
        )
        + extras
        + padded
    )


def concat_entry(images: Sequence[EntryImage], codec: str = "zstd") -> bytes:
    """An entry of one compressed stream with several images, as nvcc -concat writes it."""
    stream, table = b"", b""
    for image in images:
        data = image.image + bytes(-len(image.image) % 8)
        kind = image.kind if isinstance(image.kind, int) else KINDS[image.kind]
        fields = (kind, 0x0101, len(stream), len(data), 0, 0, 0, 8, image.sm, 0, 0)
        table += struct.pack("<HHIQIIHHIIIQQQ", *fields, image.flags | LINUX_64, 0, 0)
        stream += data
    stored = compress(codec, stream)
    extras = struct.pack("<II", len(images), 8 + len(table)) + table
    padded = stored + bytes(-len(stored) % 8)
    fields = (0x100, 0x0101, 64 + len(extras), len(padded), len(stored), 64, 0, 1, 0, 0, 0)
    flags = LINUX_64 | CODEC_FLAGS[codec]
    return struct.pack("<HHIQIIHHIIIQQQ", *fields, flags, 0, len(stream)) + extras + padded


def fatbin(entries: Iterable[EntryImage | bytes]) -> bytes:
    """A fatbin of these entries, built ones as they are."""
    body = b"".join(one if isinstance(one, bytes) else entry(one) for one in entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def wrapper(version: int = 1, fatbin_address: int = 0, others: int = 0) -> bytes:
    """``__fatBinC_Wrapper_t``."""
    return struct.pack("<IIQQ", 0x466243B1, version, fatbin_address, others)


def program(sections: Mapping[str, bytes]) -> bytes:
    """A host ELF file with these sections."""
    return elf([Section(name, body) for name, body in sections.items()])


class AmdKernel(NamedTuple):
    """A kernel to note in an AMD code object."""

    name: str
    registers: int = 24
    shared_bytes: int = 512
    code_bytes: int = 256


def amd_code_object(
    kernels: Sequence[AmdKernel] = (AmdKernel("kernel"),),
    *,
    mach: int = 0x3F,
    flags: int = 0,
    text: bytes = bytes(range(256)),
    rodata: bytes = bytes(64),
) -> bytes:
    """An AMD code object with metadata and symbols; 0x3f is gfx90a."""
    strings, symbols = b"\0", bytes(24)
    for kernel in kernels:
        symbols += struct.pack("<IBBHQQ", len(strings), 0x12, 3, 4, 0, kernel.code_bytes)
        strings += kernel.name.encode() + b"\0"
    noted = [
        {
            ".name": kernel.name,
            ".vgpr_count": kernel.registers,
            ".group_segment_fixed_size": kernel.shared_bytes,
            ".symbol": f"{kernel.name}.kd",
        }
        for kernel in kernels
    ]
    metadata = msgspec.msgpack.encode({"amdhsa.kernels": noted, "amdhsa.version": [1, 2]})
    return elf(
        [
            Section(".note", note(b"AMDGPU", 32, metadata), SHT_NOTE),
            Section(".dynsym", symbols, SHT_DYNSYM, link=4),
            Section(".dynstr", strings, SHT_STRTAB),
            Section(".rodata", rodata),
            Section(".text", text),
        ],
        machine=224,
        os_abi=0x40,
        abi_version=3,
        flags=mach | flags,
    )


def bundle(images: Mapping[str, bytes]) -> bytes:
    """A clang offload bundle of these images by target."""
    head = 32 + sum(24 + len(target) for target in images)
    table, body = struct.pack("<24sQ", b"__CLANG_OFFLOAD_BUNDLE__", len(images)), b""
    start = head + -head % 64
    for target, image in images.items():
        table += struct.pack("<QQQ", start + len(body), len(image), len(target)) + target.encode()
        body += image + bytes(-len(image) % 64)
    return table + bytes(start - head) + body


def compressed_bundle(data: bytes, *, version: int = 2, codec: str = "zstd") -> bytes:
    """A CCOB blob of a bundle."""
    stored = compress(codec, data)
    head = struct.pack("<4sHH", b"CCOB", version, 1 if codec == "zstd" else 0)
    if version == 1:
        return head + struct.pack("<IQ", len(data), 0) + stored
    layout = "<IIQ" if version == 2 else "<QQQ"
    size = len(head) + struct.calcsize(layout) + len(stored)
    return head + struct.pack(layout, size, len(data), 0) + stored


def archive(members: Mapping[str, bytes], *, style: Literal["gnu", "bsd"] = "gnu") -> bytes:
    """An ar archive; names over 15 bytes as GNU or BSD write them."""
    out, long_names, rows = b"!<arch>\n", b"", []
    for name, body in members.items():
        encoded = name.encode()
        if len(encoded) <= 15 and b" " not in encoded:
            rows.append((encoded + (b"/" if style == "gnu" else b""), body))
        elif style == "gnu":
            rows.append((b"/%d" % len(long_names), body))
            long_names += encoded + b"/\n"
        else:
            rows.append((b"#1/%d" % len(encoded), encoded + body))
    if long_names:
        rows.insert(0, (b"//", long_names))
    for field, body in rows:
        out += b"%-16s%-12d%-6d%-6d%-8d%-10d`\n" % (field, 0, 0, 0, 0o644, len(body))
        out += body + b"\n" * (len(body) & 1)
    return out


def tile_ir(sections: Sequence[tuple[int, bytes]] = ((1, b"strings"),)) -> bytes:
    """Tile IR bytecode of these sections by number, none of them aligned."""
    out = b"\x7fTileIR\0\x0d\x01\0\0"
    for number, body in sections:
        size = len(body)
        out += bytes([number])
        while size > 0x7F:
            out += bytes([size & 0x7F | 0x80])
            size >>= 7
        out += bytes([size]) + body
    return out + b"\0"
