"""What one module is: its digests, its architecture, what built it and its kernels."""

from __future__ import annotations

from collections.abc import Callable

from gpuwarden.code import amdgpu, cubin, digest, ptx, tile_ir
from gpuwarden.code.bounds import DEFAULT, KERNELS_TOLD, Bounds
from gpuwarden.code.elf import MAGIC, Elf
from gpuwarden.code.located import Located
from gpuwarden.code.module import Kernel, Module
from gpuwarden.errors import Malformed

Known = Callable[[str], bool]
"""Whether a digest in hexadecimal is known."""


def describe(
    located: Located,
    image: bytes | memoryview,
    bounds: Bounds = DEFAULT,
    *,
    known: Known | None = None,
    kernels: bool = True,
) -> Module:
    """The module at ``located`` whose decompressed image is ``image``.

    Any bytes are described; what could not be read in them is in ``broken``. A module whose digest
    is ``known`` gets no code digest, which costs as much as the digest. Without ``kernels`` these
    are counted and not told, and a known image is not looked into at all.
    """
    told, broken = _Told(located.arch), ""
    told.limit = KERNELS_TOLD if kernels else 0
    its_digest = digest.sha256(image)
    told.is_known = known is not None and known(its_digest)
    try:
        if told.is_known and not kernels:
            pass
        elif located.kind == "cubin":
            _cubin(told, image, bounds)
        elif located.kind == "ptx":
            _ptx(told, image, bounds)
        elif located.kind == "amdgpu":
            _amdgpu(told, image, bounds)
        elif located.kind == "tile-ir":
            told.toolkit = f"Tile IR {tile_ir.version(image)}".strip()
    except Malformed as error:
        broken = str(error)
    return Module(
        kind=located.kind,
        arch=told.arch,
        digest=its_digest,
        code_digest=told.code,
        stored_bytes=len(located.stored),
        image_bytes=len(image),
        codec=located.codec,
        toolkit=told.toolkit,
        options=located.options or told.options,
        identifier=located.identifier,
        kernel_count=told.count,
        kernels=told.kernels,
        place=located.place,
        broken=broken,
    )


def describe_broken(located: Located, reason: str) -> Module:
    """The module at ``located`` whose image cannot be read; its digest is of the stored bytes."""
    return Module(
        kind=located.kind,
        arch=located.arch,
        digest=digest.sha256(located.stored),
        stored_bytes=len(located.stored),
        image_bytes=located.image_bytes,
        codec=located.codec,
        options=located.options,
        identifier=located.identifier,
        place=located.place,
        broken=reason,
    )


class _Told:
    """What an image tells of itself, filled in as far as it can be read."""

    __slots__ = ("arch", "code", "count", "is_known", "kernels", "limit", "options", "toolkit")

    def __init__(self, arch: str) -> None:
        self.arch, self.code, self.toolkit, self.options = arch, "", "", ""
        self.is_known, self.count, self.limit = False, 0, KERNELS_TOLD
        self.kernels: tuple[Kernel, ...] = ()


def _cubin(told: _Told, image: bytes | memoryview, bounds: Bounds) -> None:
    parsed = cubin.Cubin(Elf(image, bounds))
    if not told.arch[-1:].isalpha():
        told.arch = cubin.arch_of(parsed)
    told.toolkit, told.options = cubin.built(parsed)
    told.count, told.kernels = cubin.kernels(parsed, bounds, told.limit)
    if not told.is_known:
        told.code = digest.cubin_code(parsed)


def _ptx(told: _Told, text: bytes | memoryview, bounds: Bounds) -> None:
    head = ptx.head_of(text)
    if head is None:
        raise Malformed("PTX: no .version and .target at its beginning")
    told.arch = told.arch or f"compute_{head.target}"
    told.toolkit = ptx.toolkit(text)
    told.count, told.kernels = ptx.kernels(text, bounds, told.limit)
    if not told.is_known:
        told.code = ptx.code_digest(text)


def _amdgpu(told: _Told, image: bytes | memoryview, bounds: Bounds) -> None:
    if bytes(image[:4]) != MAGIC:
        return  # LLVM bitcode, to be linked on the device.
    parsed = Elf(image, bounds)
    told.arch = told.arch or amdgpu.arch_of(parsed.header)
    told.count, told.kernels = amdgpu.kernels(parsed, bounds, told.limit)
    if not told.is_known:
        told.code = digest.amd_code(parsed)
