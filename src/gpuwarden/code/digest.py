"""The two digests of a module: of its image, and of its code wherever it was built.

The code digest takes what computes and leaves what names and locates. It is SHA-256 over the sorted
SHA-256 of its parts, so that neither their names nor their order matter:

- cubin: the architecture's number, every ``.text.*`` and ``.nv.capmerc.text.*``, and the
  constants: ``.nv.constant1`` and above, ``.nv.global.init``, ``.rodata``. Bank 0 holds a launch's
  parameters. Of a source file's path among the constants (``assert`` writes it) only the last name
  counts. What else is executable or loaded, under whatever name, is in it too.
- PTX: the text without comments, debug information and blanks.
- AMD: ``.text`` and ``.rodata``, where the kernel descriptors are.

Not in it are relocations: which of the same constants an instruction reads.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from gpuwarden.code.cubin import Cubin, sm_of
from gpuwarden.code.elf import SHT_NOBITS, TYPE, Elf
from gpuwarden.errors import Malformed
from gpuwarden.pattern import pattern

BANK, GLOBALS = b".nv.constant", b".nv.global.init"
AMD_PARTS = (b".text", b".rodata")

_EXTENSION = rb"\.(?:cuh?|hpp|hxx|h|cc|cpp|cxx|c|inl|inc|py)"
_ENDING = pattern(_EXTENSION + rb"\x00+")
_SOURCE = pattern(rb"(?:.*[/\\])?([^/\\]+" + _EXTENSION + rb")\x00+", re.S)
_PRINTABLE = bytes(range(0x20, 0x7F))
_TEXT_BYTES = 4
_PATH_BYTES = 4096
"""Of a longer text only so many before its end are taken for a path."""


def sha256(image: bytes | memoryview) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(image).hexdigest()


def cubin_code(parsed: Cubin) -> str:
    """The code digest of a cubin, empty when it has no code. Errors: Malformed."""
    image = parsed.image
    parts, left, sha = [], len(image.data), hashlib.sha256
    for index in (*parsed.codes, *parsed.capsules):
        body = image.body(index)
        left -= len(body)
        if left < 0:
            raise Malformed("cubin: sections that hold the same bytes")
        parts.append(sha(body).digest())
    if left == len(image.data):
        return ""
    for index in parsed.constants:
        body = image.body(index)
        left -= len(body)
        if left < 0:
            raise Malformed("cubin: sections that hold the same bytes")
        parts.append(_constants(image.name(index), body))
    return _over(b"cubin %d\0" % sm_of(image.header), parts)


def _constants(name: bytes, body: memoryview) -> bytes:
    # Banks are different memories: the same bytes in another one are other constants.
    bank = name[len(BANK) :].split(b".", 1)[0] if name.startswith(BANK) else b""
    digest = hashlib.sha256(b"constants %s\0" % bank)
    if name.startswith(GLOBALS):
        data = bytes(body)
        for part in _without_folders(data) if b".c" in data or b".h" in data else [data]:
            digest.update(part)
    else:
        digest.update(body)
    return digest.digest()


def _without_folders(data: bytes) -> Iterator[bytes]:
    """The parts of ``data`` without the folders of source files' paths, in linear time."""
    done = before = 0
    for ending in _ENDING.finditer(data):
        nul = data.index(b"\0", ending.start())
        start = max(before, nul - _PATH_BYTES)
        start += len(data[start:nul].rstrip(_PRINTABLE))
        before = ending.end()
        source = _SOURCE.fullmatch(data, start, before) if nul - start >= _TEXT_BYTES else None
        if source is not None:
            yield data[done:start]
            # The NULs behind it align what follows, so they depend on the path's length.
            yield source[1] + b"\0"
            done = before
    yield data[done:]


def amd_code(image: Elf) -> str:
    """The code digest of an AMD code object, empty when it has no code. Errors: Malformed."""
    parts, has_code, left = [], False, len(image.data)
    for index, name in enumerate(image.names):
        if name.startswith(AMD_PARTS) and image.row(index)[TYPE] != SHT_NOBITS:
            body = image.body(index)
            left -= len(body)
            if left < 0:
                raise Malformed("AMD code object: sections that hold the same bytes")
            has_code = has_code or (name.startswith(AMD_PARTS[0]) and len(body) > 0)
            parts.append(hashlib.sha256(body).digest())
    return _over(b"amdgpu %d\0" % (image.header.flags & 0xFF), parts) if has_code else ""


def _over(kind: bytes, parts: list[bytes]) -> str:
    parts.sort()
    return hashlib.sha256(kind + b"".join(parts)).hexdigest()
