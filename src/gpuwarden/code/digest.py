"""The two digests of a module: of its image, and of its code wherever it was built.

The code digest takes what computes and leaves what names and locates. It is SHA-256 over the sorted
SHA-256 of its parts, so that neither their names nor their order matter:

- cubin: the architecture's number, every ``.text.*`` and ``.nv.capmerc.text.*``, and the
  constants: ``.nv.constant1`` and above, ``.nv.global.init``, ``.rodata``. Bank 0 holds a launch's
  parameters. Of a source file's path among the constants (``assert`` writes it) only the last name
  counts.
- PTX: the text without comments, debug information and blanks.
- AMD: ``.text`` and ``.rodata``, where the kernel descriptors are.

Not in it are relocations: which of the same constants an instruction reads.
"""

from __future__ import annotations

import hashlib
import re

from gpuwarden.code import cubin
from gpuwarden.code.elf import SHT_NOBITS, SIZE, TYPE, Elf
from gpuwarden.pattern import pattern

CODE = (b".text", b".nv.capmerc.text")
CONSTANTS = (b".nv.constant", b".nv.global.init", b".rodata")
LAUNCH_PARAMETERS = b".nv.constant0"
AMD_PARTS = (b".text", b".rodata")

_STRING = pattern(rb"[\x20-\x7e]{4,4096}\x00+")
_SOURCE = pattern(rb"(?:.*[/\\])?([^/\\]+\.(?:cuh?|hpp|hxx|h|cc|cpp|cxx|c|inl|inc|py))\x00+", re.S)


def sha256(image: bytes | memoryview) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(image).hexdigest()


def cubin_code(image: Elf) -> str:
    """The code digest of a cubin, empty when it has no code. Errors: Malformed."""
    parts, has_code = [], False
    for index, name in enumerate(image.names):
        if name.startswith(CODE):
            body = image.body(index)
            has_code = has_code or len(body) > 0
            parts.append(hashlib.sha256(body).digest())
        elif name.startswith(CONSTANTS) and not _is_launch_bank(name):
            parts.append(_constants(name, image.body(index)))
    if not has_code:
        return ""
    return _over(b"cubin %d\0" % cubin.sm_of(image.header), parts)


def _is_launch_bank(name: bytes) -> bool:
    return name.startswith(LAUNCH_PARAMETERS) and not name[len(LAUNCH_PARAMETERS) :][:1].isdigit()


def _constants(name: bytes, body: memoryview) -> bytes:
    # Banks are different memories: the same bytes in another one are other constants.
    bank = name[len(b".nv.constant") :].split(b".", 1)[0] if name.startswith(CONSTANTS[0]) else b""
    digest = hashlib.sha256(b"constants %s\0" % bank)
    if name.startswith(CONSTANTS[1]):
        data = bytes(body)
        digest.update(_STRING.sub(_last_name, data) if b".c" in data or b".h" in data else data)
    else:
        digest.update(body)
    return digest.digest()


def _last_name(found: re.Match[bytes]) -> bytes:
    source = _SOURCE.fullmatch(found[0])
    # The NULs behind it align what follows, so they depend on the path's length.
    return source[1] + b"\0" if source else found[0]


def amd_code(image: Elf) -> str:
    """The code digest of an AMD code object, empty when it has no code. Errors: Malformed."""
    parts, has_code = [], False
    for index, name in enumerate(image.names):
        if name.startswith(AMD_PARTS) and image.rows[index][TYPE] != SHT_NOBITS:
            has_code = has_code or (name.startswith(b".text") and image.rows[index][SIZE] > 0)
            parts.append(hashlib.sha256(image.body(index)).digest())
    return _over(b"amdgpu %d\0" % (image.header.flags & 0xFF), parts) if has_code else ""


def _over(kind: bytes, parts: list[bytes]) -> str:
    parts.sort()
    return hashlib.sha256(kind + b"".join(parts)).hexdigest()
