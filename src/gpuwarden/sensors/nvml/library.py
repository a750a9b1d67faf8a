"""Where the NVML library may be, and whether it is safe to open (before anything of it runs)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from msgspec import Struct

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.model import LibraryCheck
from gpuwarden.sensors.elf import read_identity

LIBRARY_NAME = "libnvidia-ml.so.1"
MACHINE = os.uname().machine
DIRECTORIES = (
    "/usr/lib64",
    f"/usr/lib/{MACHINE}-linux-gnu",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    f"/run/nvidia/driver/usr/lib/{MACHINE}-linux-gnu",
    "/run/nvidia/driver/usr/lib64",
    "/home/kubernetes/bin/nvidia/lib64",
    "/run/opengl-driver/lib",
    "/usr/lib/wsl/lib",
)
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Candidate(Struct, frozen=True):
    """A library that was found, whether it may be opened, and whose root it lies under."""

    check: LibraryCheck
    from_other_root: bool


def candidates(host: Host, explicit: str | None) -> Iterator[Candidate]:
    """Every NVML library there is, checked: the one named, else ours, else the mounted host's."""
    if explicit is not None:
        yield Candidate(check_library(explicit), from_other_root=False)
        return
    seen: set[str] = set()
    for own in (True, False) if not host.is_local else (True,):
        for directory in DIRECTORIES:
            shown = f"{directory}/{LIBRARY_NAME}"
            try:
                path = shown if own else host.path(shown)
            except GpuwardenError:
                continue
            real = os.path.realpath(path)
            if real not in seen and os.path.lexists(real):
                seen.add(real)
                yield Candidate(check_library(path), from_other_root=not own)


def check_library(path: str) -> LibraryCheck:
    """Whether the file that ``path`` leads to, and each directory above it, is root's alone.

    Links are resolved first and the library is then opened by its resolved path, in which every
    part was checked: nobody but root can put another file there in between.
    """
    if not os.path.isabs(path):
        return LibraryCheck(path=path, accepted=False, reason="its path is not absolute")
    resolved = os.path.realpath(path)
    try:
        file = os.lstat(resolved)
    except OSError as error:
        return LibraryCheck(
            path=path, accepted=False, resolved=resolved, reason=f"{error.strerror}: {resolved}"
        )
    reason = _file_objection(resolved, file) or _directory_objection(resolved)
    build_id = None
    if not reason:
        try:
            identity = read_identity(Host(), resolved)
        except GpuwardenError as error:
            reason = f"it is no readable ELF file: {error}"
        else:
            build_id = identity.build_id
            if not identity.is_elf:
                reason = "it is not an ELF file"
    return LibraryCheck(
        path=path,
        accepted=not reason,
        reason=reason,
        resolved=resolved,
        device=f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}",
        inode=file.st_ino,
        build_id=build_id,
    )


def _file_objection(path: str, status: os.stat_result) -> str:
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is not a regular file"
    return _owner_objection(path, status)


def _directory_objection(path: str) -> str:
    while path != "/":
        path = os.path.dirname(path)
        try:
            status = os.lstat(path)
        except OSError as error:
            return f"{error.strerror}: {path}"
        if not stat.S_ISDIR(status.st_mode):
            return f"{path} is not a directory"
        # A sticky directory such as /tmp is refused as well: anybody may put a file there first.
        objection = _owner_objection(path, status)
        if objection:
            return objection
    return ""


def _owner_objection(path: str, status: os.stat_result) -> str:
    if status.st_uid != 0:
        return f"{path} belongs to uid {status.st_uid}, not to root"
    if status.st_mode & WRITABLE_BY_OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        return f"{path} can be written by others than root (mode {mode:04o})"
    return ""
