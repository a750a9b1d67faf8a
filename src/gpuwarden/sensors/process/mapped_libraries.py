"""GPU driver libraries that a process has mapped, and which build of each."""

from __future__ import annotations

import re

from msgspec import Struct, field

from gpuwarden.errors import Denied, GpuwardenError
from gpuwarden.host import Host
from gpuwarden.model import DriverLibrary
from gpuwarden.pattern import pattern

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
    rb"(/(?:[^\n]{0,4096}/)?(?:" + _NAMES + rb")(?:[-.][^\n/]{0,128})?)$",
    re.M,
)
_ANY_DRIVER = pattern(rb"/(?:" + _NAMES + rb")[-. \n]")
DELETED = " (deleted)"


class MappedLibrary(Struct, frozen=True):
    """One library in a maps file: where its first mapping lies, and the file behind it."""

    start: int
    end: int
    device: tuple[int, int]
    inode: int
    path: str


class LibraryIdentities(Struct):
    """(device, inode) → (build-id, soname), read once a scan."""

    known: dict[tuple[tuple[int, int], int], tuple[str | None, str | None]] = field(
        default_factory=dict
    )


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
        build_id, soname = _identity(host, pid, library, identities)
        found.append(
            DriverLibrary(
                path=library.path.removesuffix(DELETED),
                device=f"{library.device[0]}:{library.device[1]}",
                inode=library.inode,
                build_id=build_id,
                deleted=library.path.endswith(DELETED),
                soname=soname,
            )
        )
    return tuple(found)


def _identity(
    host: Host, pid: int, library: MappedLibrary, identities: LibraryIdentities
) -> tuple[str | None, str | None]:
    from gpuwarden.sensors.elf import read_identity

    key = (library.device, library.inode)
    if key not in identities.known:
        try:
            identity = read_identity(host, _readable(host, pid, library))
            identities.known[key] = (identity.build_id, identity.soname)
        except GpuwardenError:
            return None, None
    return identities.known[key]


def _readable(host: Host, pid: int, library: MappedLibrary) -> str:
    """The mapped file itself if that link may be followed, else its path if it is that file."""
    link = f"/proc/{pid}/map_files/{library.start:x}-{library.end:x}"
    try:
        host.link_target_status(link)
    except GpuwardenError:
        path = f"/proc/{pid}/root{library.path}"
        if host.status(path).inode != library.inode:
            raise Denied(f"{path} is another file than the one mapped") from None
        return path
    return link
