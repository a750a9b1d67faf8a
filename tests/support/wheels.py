"""Wheels and installed packages made for tests, with libraries that hold GPU code."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tests.support.gpu_images import EntryImage, KernelImage, cubin, fatbin, program


def code(seed: int, size: int = 512) -> bytes:
    """Bytes that stand for a kernel's code."""
    return hashlib.shake_128(b"code %d" % seed).digest(size)


def built(seed: int, identifier: str = "kernel", sm: int = 90) -> bytes:
    """A cubin with code of its own; another identifier is the same code built elsewhere."""
    return cubin([KernelImage(identifier, code(seed))], sm=sm)


def library(*images: bytes) -> bytes:
    """A shared library whose fatbin holds these cubins."""
    return program({".nv_fatbin": fatbin(EntryImage("cubin", image, 90) for image in images)})


def metadata(name: str, version: str) -> bytes:
    """The text of METADATA."""
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nText\n".encode()


def record(files: Mapping[str, bytes]) -> bytes:
    """The text of RECORD."""
    lines = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}\n")
    return "".join(lines).encode()


def wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, bytes],
    *,
    recorded: Mapping[str, bytes] | None = None,
    file_name: str = "",
) -> Path:
    """A wheel of these files; ``recorded`` are those in its RECORD, if not the same."""
    stem = name.replace("-", "_")
    path = folder / (file_name or f"{stem}-{version}-py3-none-manylinux_2_28_x86_64.whl")
    information = f"{stem}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr(f"{information}/METADATA", metadata(name, version))
        archive.writestr(f"{information}/RECORD", record(files if recorded is None else recorded))
    return path


def install(site: Path, name: str, version: str, files: Mapping[str, bytes]) -> None:
    """The files of a package below ``site`` with its ``.dist-info``."""
    information = site / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir(parents=True)
    for path, data in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
    (information / "METADATA").write_bytes(metadata(name, version))
    (information / "RECORD").write_bytes(record(files))
