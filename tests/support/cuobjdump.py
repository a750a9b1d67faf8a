"""What NVIDIA's own extractor takes out of a file, and a plain count of what lies in it.

cuobjdump looks into the sections that the toolkit uses and nowhere else, gives cubins and PTX
only, and gives up on a file where it meets an architecture that it has forgotten.
"""

from __future__ import annotations

import hashlib
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.support.nvcc import CUDA

CUOBJDUMP = CUDA / "bin/cuobjdump"
_NOTHING_THERE = ("does not contain device code", "No PTX file found", "No ELF file found")

_MAGIC = b"\x50\xed\x55\xba\x01\x00\x10\x00"
_ENTRY = struct.Struct("<HHIQ")
_KINDS = {1: "ptx", 2: "cubin", 8: "lto-ir", 0x80: "tile-ir"}
_CONCATENATED = 0x100
_ELF, _EM_CUDA = b"\x7fELF\x02\x01\x01", b"\xbe\x00"


@dataclass(frozen=True)
class Extracted:
    """SHA-256 of each extracted file, with how many have it; what it said when it gave up."""

    cubins: Counter[str]
    ptx: Counter[str]
    failure: str = ""

    @property
    def modules(self) -> int:
        return self.cubins.total() + self.ptx.total()


def extracted(file: Path, tool: Path = CUOBJDUMP, scratch: Path | None = None) -> Extracted:
    """All cubins and PTX of ``file``, by ``cuobjdump -all -xelf all`` and ``-xptx all``."""
    found: dict[str, Counter[str]] = {}
    failures = []
    for option, ending in (("-xelf", ".cubin"), ("-xptx", ".ptx")):
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            done = subprocess.run(
                [tool, "-all", option, "all", file.absolute()],
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            told = [line.replace(str(file.absolute()), file.name) for line in said]
            if done.returncode and not any(word in done.stderr for word in _NOTHING_THERE):
                failures.append(told[-1] if told else f"it ended with {done.returncode}")
            found[ending] = Counter(
                hashlib.sha256(path.read_bytes()).hexdigest()
                for path in Path(folder).iterdir()
                if path.suffix == ending
            )
    return Extracted(found[".cubin"], found[".ptx"], "; ".join(failures))


def plain_count(data: bytes) -> Counter[str]:
    """Kinds of the entries of all fatbins anywhere in ``data``, and bare cubins between them."""
    kinds: Counter[str] = Counter()
    spans = [(len(data), len(data))]
    at = data.find(_MAGIC)
    while at >= 0:
        (size,) = struct.unpack_from("<Q", data, at + 8)
        entry, end = at + 16, at + 16 + size
        spans.append((at, end))
        while entry + 64 <= min(end, len(data)):
            kind, _, header_bytes, padded_bytes = _ENTRY.unpack_from(data, entry)
            if kind == _CONCATENATED:
                kinds.update(_concatenated(data[entry : entry + header_bytes]))
            else:
                kinds[_KINDS.get(kind, "unknown")] += 1
            entry += header_bytes + padded_bytes
        at = data.find(_MAGIC, at + 8)
    done = 0
    for start, end in sorted(spans):
        kinds["cubin"] += _bare_cubins(data, done, start)
        done = max(done, end)
    return +kinds


def _bare_cubins(data: bytes, start: int, end: int) -> int:
    count, at = 0, data.find(_ELF, start, end)
    while at >= 0:
        count += data[at + 18 : at + 20] == _EM_CUDA
        at = data.find(_ELF, at + 1, end)
    return count


def _concatenated(header: bytes) -> list[str]:
    """Kinds of the images of one stream: each sub-header names its offset, the sum before it."""
    (table_at,) = struct.unpack_from("<I", header, 20)
    count, size = struct.unpack_from("<II", header, table_at)
    kinds: list[str] = []
    at, offset = table_at + 8, 0
    while len(kinds) < count and at < table_at + size:
        kind, version, image_at, image_bytes = _ENTRY.unpack_from(header, at)
        if version == 0x0101 and image_at == offset:
            kinds.append(_KINDS.get(kind, "unknown"))
            offset += image_bytes
            at += 64
        else:
            at += 8
    return kinds
