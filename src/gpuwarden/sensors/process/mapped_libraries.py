"""GPU driver libraries that a process has mapped, and which build of each."""

from __future__ import annotations

import re
import stat

from msgspec import Struct, field

from gpuwarden.errors import Denied, GpuwardenError
from gpuwarden.host import FileStatus, Host
from gpuwarden.model import DriverLibrary
from gpuwarden.pattern import pattern
from gpuwarden.sensors.process.executables import writers_of
from gpuwarden.sensors.process.users import UserNames, read_names

# proc_pid_maps(5), lines of files only.
_MAPS_LIMIT_BYTES = 16 << 20
_LIBRARIES_LIMIT = 64
_NAMES = (
    rb"libcuda|libcudart|libnvidia-ml|libnvidia-ptxjitcompiler|libnvidia-opencl|libcudadebugger"
    rb"|libnvcuvid|libnvrtc|libamdhip64|libhsa-runtime64|libamdocl64|librocm_smi64|libamd_smi"
    rb"|libze_loader|libze_intel_gpu|libigdrcl|libOpenCL|libhl-thunk|libHabana|libvulkan"
    rb"|libSynapse|libmusa|libdrm_amdgpu"
)
_DRIVER_LINE = pattern(
    rb"^([0-9a-f]{1,16})-([0-9a-f]{1,16}) [r-][w-][x-][ps] [0-9a-f]{1,16} "
    rb"([0-9a-f]{1,8}):([0-9a-f]{1,8}) (\d{1,20}) +"
    rb"(/(?:[^\n]{0,4096}/|memfd:)?(?:" + _NAMES + rb")(?:[-.][^\n/]{0,128})?)$",
    re.M,
)
_ANY_DRIVER = pattern(rb"[/:](?:" + _NAMES + rb")[-. \n]")
DELETED = " (deleted)"


class MappedLibrary(Struct, frozen=True):
    """One library in a maps file: where its first mapping lies, and the file behind it."""

    start: int
    end: int
    device: tuple[int, int]
    inode: int
    path: str


class _File(Struct, frozen=True):
    """What is read of a library's file itself."""

    build_id: str | None = None
    soname: str | None = None
    device: str | None = None
    writable_by: tuple[int, ...] | None = None


class Groups(Struct):
    """Who is in which group, read when a file is first met that its group can write."""

    names: UserNames | None = None


class LibraryIdentities(Struct):
    """What the file of each (device, inode) is, read once a scan."""

    known: dict[tuple[tuple[int, int], int], _File] = field(default_factory=dict)
    groups: Groups = field(default_factory=Groups)


def altered_by(host: Host, status: FileStatus, groups: Groups) -> tuple[int, ...]:
    """uids other than root that can change a file: its owner and its writers; EVERYBODY is -1."""
    if groups.names is None and status.mode & stat.S_IWGRP:
        groups.names = read_names(host)
    writers = writers_of(status, groups.names or UserNames())
    return tuple(sorted({status.uid, *writers} - {0}))


def parse_driver_libraries(data: bytes) -> list[MappedLibrary]:
    """The driver libraries in the text of /proc/<pid>/maps, each file once, in address order."""
    if _ANY_DRIVER.search(data) is None:
        return []
    found: dict[tuple[tuple[int, int], int], MappedLibrary] = {}
    for start, end, major, minor, inode, path in _DRIVER_LINE.findall(data):
        device = (int(major, 16), int(minor, 16))
        library = MappedLibrary(
            int(start, 16),
            int(end, 16),
            device,
            int(inode),
            path.decode("utf-8", "backslashreplace"),
        )
        found.setdefault((device, library.inode), library)
        if len(found) >= _LIBRARIES_LIMIT:
            break
    return list(found.values())


def read_driver_libraries(
    host: Host, pid: int, identities: LibraryIdentities
) -> tuple[DriverLibrary, ...]:
    """The driver libraries of a process with build-id and soname. Errors: Unavailable, Denied."""
    libraries = parse_driver_libraries(host.read_bytes(f"/proc/{pid}/maps", _MAPS_LIMIT_BYTES))
    found = []
    for library in libraries:
        file = _file(host, pid, library, identities)
        found.append(
            DriverLibrary(
                path=library.path.removesuffix(DELETED),
                device=f"{library.device[0]}:{library.device[1]}",
                inode=library.inode,
                build_id=file.build_id,
                deleted=library.path.endswith(DELETED),
                soname=file.soname,
                file_device=file.device,
                writable_by=file.writable_by,
            )
        )
    return tuple(found)


def _file(host: Host, pid: int, library: MappedLibrary, identities: LibraryIdentities) -> _File:
    from gpuwarden.sensors.elf import read_identity

    key = (library.device, library.inode)
    if key in identities.known:
        return identities.known[key]
    try:
        path, status = _readable(host, pid, library)
    except GpuwardenError:
        return _File()
    device = f"{status.device[0]}:{status.device[1]}"
    writers = altered_by(host, status, identities.groups)
    try:
        identity = read_identity(host, path)
    except GpuwardenError:
        return _File(device=device, writable_by=writers)
    file = _File(identity.build_id, identity.soname, device, writers)
    identities.known[key] = file
    return file


def _readable(host: Host, pid: int, library: MappedLibrary) -> tuple[str, FileStatus]:
    """The mapped file itself if that link may be followed, else its path if it is that file."""
    link = f"/proc/{pid}/map_files/{library.start:x}-{library.end:x}"
    try:
        return link, host.link_target_status(link)
    except GpuwardenError:
        path = f"/proc/{pid}/root{library.path}"
        status = host.status(path)
        if status.inode != library.inode:
            raise Denied(f"{path} is another file than the one mapped") from None
        return path, status
