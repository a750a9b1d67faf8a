"""What is known of one module: a GPU code image, where it was, and its digests."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["cubin", "ptx", "lto-ir", "tile-ir", "amdgpu", "unknown"]
Codec = Literal["none", "zlib", "lz4", "lz4-frame", "zstd"]
FoundBy = Literal["section", "sweep", "whole", "archive"]
"""In the section that toolkits use, by its magic elsewhere, as the whole file, in an ar archive."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A frozen value that encodes as JSON."""


class Kernel(Record, frozen=True, kw_only=True):
    """One kernel (or device function with code of its own) of a module; None: not told there."""

    name: str
    registers: int | None = None
    shared_bytes: int | None = None
    """Static shared memory (LDS on AMD)."""
    instructions: int | None = None
    code_bytes: int | None = None


class Place(Record, frozen=True, kw_only=True):
    """Where a module was: the target, the members down to it, and the bytes there."""

    target: str
    """What was asked for: a path, an image's name, ``pid 123``."""
    members: tuple[str, ...] = ()
    """Outside in: a layer, a file in it, a member of an archive in that."""
    offset: int | None = None
    """Of the stored bytes in the innermost member; in a process, the address."""
    section: str = ""
    found_by: FoundBy = "section"
    mapping: str = ""
    """In a process: the mapped file, or what the kernel calls the region; empty for anonymous."""


class Module(Record, frozen=True, kw_only=True):
    """One GPU code image.

    ``digest`` is the SHA-256 of the decompressed image (of the stored bytes for obfuscated LTO-IR),
    ``code_digest`` one that the same code built elsewhere shares; both in hexadecimal. ``broken``
    says why an image could not be read to its end; when it could not even be decompressed,
    ``digest`` is that of the stored bytes.
    """

    kind: Kind
    arch: str
    """``sm_90a``, ``compute_80``, ``lto_80``, ``gfx90a:sramecc+``; empty when not told."""
    digest: str
    code_digest: str = ""
    stored_bytes: int
    image_bytes: int
    codec: Codec = "none"
    toolkit: str = ""
    """As noted in the module, which anyone can write: ``ptxas 13.0.88``."""
    options: str = ""
    """Compiler options noted in the module or beside it."""
    identifier: str = ""
    """The source's name that the fatbin notes."""
    kernel_count: int = 0
    kernels: tuple[Kernel, ...] = ()
    """At most ``bounds.KERNELS_TOLD`` of them; ``kernel_count`` counts all."""
    place: Place
    broken: str = ""


class Problem(Record, frozen=True, kw_only=True):
    """Something that could not be read, so that nothing unseen is taken for clean."""

    place: Place
    what: str
    reason: str
