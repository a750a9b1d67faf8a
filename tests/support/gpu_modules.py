"""What is found in bytes, and hand-made bytes of every form to find it in."""

from __future__ import annotations

import random
from collections.abc import Iterator

from gpuwarden.code.describe import describe, describe_broken
from gpuwarden.code.extract import modules_in
from gpuwarden.code.located import Located
from gpuwarden.code.module import Module, Place, Problem
from gpuwarden.errors import Malformed
from tests.support import gpu_images as build

PLACE = Place(target="bytes")
GFX = "hipv4-amdgcn-amd-amdhsa--gfx90a:xnack-"

CUBIN = build.cubin(
    [
        build.KernelImage("first", bytes(range(256)), registers=40, shared_bytes=1024),
        build.KernelImage("second", bytes(range(255, -1, -1)) * 2),
    ],
    suffix="a",
    constants={".nv.constant3": b"constants" * 4, ".nv.global.init": b"/src/a.cu\0\0\0" + b"x" * 9},
)
BUNDLE = build.bundle({"host-x86_64-unknown-linux-gnu-": b"", GFX: build.amd_code_object()})
FATBIN = build.fatbin(
    [
        *(build.EntryImage("cubin", CUBIN, 90, codec) for codec in build.CODEC_FLAGS),
        build.EntryImage("ptx", build.ptx(), 80, "zstd", "source.cu", "-O3"),
        build.EntryImage("lto-ir", b"obfuscated bytes", 80, flags=build.OBFUSCATED),
        build.EntryImage("tile-ir", build.tile_ir(), 100, "zstd"),
        build.EntryImage(0x40, b"of a kind that is not known"),
        build.concat_entry(
            [
                build.EntryImage("cubin", CUBIN, 90),
                build.EntryImage("cubin", build.cubin(sm=75, abi=7), 75),
            ]
        ),
    ]
)
SAMPLES: dict[str, bytes] = {
    "cubin": CUBIN,
    "fatbin": FATBIN,
    "ptx": build.ptx(("one", "two")),
    "tile-ir": build.tile_ir(),
    "program": build.program(
        {
            ".nv_fatbin": FATBIN,
            ".data": b"text" + build.ptx() + b"\0" + CUBIN + b"\1\2" + build.tile_ir() + BUNDLE,
        }
    ),
    "amd code object": build.amd_code_object(),
    "bundle": BUNDLE,
    "CCOB 1": build.compressed_bundle(BUNDLE, version=1),
    "CCOB 2": build.compressed_bundle(BUNDLE, version=2, codec="zlib"),
    "CCOB 3": build.compressed_bundle(BUNDLE, version=3),
    "archive": build.archive(
        {"an object of a long name.o": build.program({"__nv_relfatbin": FATBIN}), "b.cubin": CUBIN}
    ),
}


def found(data: bytes) -> list[Located | Problem]:
    """All that is found in ``data``."""
    return list(modules_in(data, PLACE))


def problems(data: bytes) -> list[Problem]:
    """What could not be read in ``data``."""
    return [one for one in found(data) if isinstance(one, Problem)]


def modules(data: bytes) -> list[Module]:
    """Every module of ``data``, described; what cannot be decompressed is broken."""
    return [_described(one) for one in found(data) if isinstance(one, Located)]


def module(data: bytes) -> Module:
    """The one module of ``data``, in which there is no problem."""
    (one,) = found(data)
    assert isinstance(one, Located), one
    return _described(one)


def _described(located: Located) -> Module:
    try:
        image = located.image()
    except Malformed as error:
        return describe_broken(located, str(error))
    return describe(located, image)


def mutants(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Copies of ``data`` with bytes changed, cut out, doubled, or set to what tries bounds."""
    chance = random.Random(seed)
    telling = [b"\0", b"\xff", b"\x7f", b"\x80", b"\xff" * 4, b"\xff" * 8, b"\0" * 8]
    for _ in range(count):
        mutant = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 4, 16))):
            at = chance.randrange(len(mutant) + 1)
            size = min(chance.choice((1, 2, 4, 8, 64)), len(mutant) - at)
            change = chance.randrange(6)
            if change == 0:
                mutant[at : at + size] = chance.randbytes(size)
            elif change == 1:
                mutant[at : at + size] = chance.choice(telling)
            elif change == 2:
                del mutant[at : at + size]
            elif change == 3:
                mutant[at:at] = mutant[at : at + size]
            elif change == 4 and mutant:
                at = min(at, len(mutant) - 1)
                mutant[at] ^= 1 << chance.randrange(8)
            else:
                other = chance.randrange(len(mutant) + 1)
                mutant[at : at + size] = mutant[other : other + size]
        yield bytes(
            mutant[: chance.randrange(len(mutant) + 1)] if chance.random() < 0.1 else mutant
        )
