"""The driver's libraries as they are installed: which files a program ought to have loaded.

Looked for where the host's loader looks (ld.so(8): /etc/ld.so.conf and what it includes) and where
drivers put their libraries beside that. Only those directories are listed, never a tree.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator

from msgspec import Struct, field

from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import DRIVER_LIBRARIES, DriverFile, Gap
from gpuwarden.sensors.process.executables import read_namespace
from gpuwarden.sensors.process.mapped_libraries import Groups, altered_by
from gpuwarden.sensors.seen import Seen

SENSOR = "driver_files"
LOADER_CONFIGURATION = "/etc/ld.so.conf"
_MACHINE = os.uname().machine
USUAL_DIRECTORIES = (
    f"/usr/lib/{_MACHINE}-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib/i386-linux-gnu",
    "/usr/local/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    f"/run/nvidia/driver/usr/lib/{_MACHINE}-linux-gnu",
    "/run/nvidia/driver/usr/lib64",
    "/home/kubernetes/bin/nvidia/lib64",
    "/run/opengl-driver/lib",
    "/usr/lib/wsl/lib",
)
FAMILIES = (
    ("/usr/local", "cuda", "compat"),
    ("/opt", "rocm", "lib"),
    ("/usr/lib/wsl/drivers", "", ""),
)
"""(directory, how the names in it begin, what to look at below each)."""

_CONFIGURATION_LIMIT_BYTES = 64 << 10
_CONFIGURATION_FILES_LIMIT = 128
_DIRECTORIES_LIMIT = 256
_NAMES_LIMIT = 65_536
_FILES_LIMIT = 256
_BEGINNINGS = tuple(f"{library}.so" for library in DRIVER_LIBRARIES)
_Identity = tuple[tuple[int, int], int]


class LoaderConfiguration(Struct, frozen=True):
    """What one file of the loader's configuration names."""

    directories: tuple[str, ...]
    includes: tuple[str, ...]
    """Patterns of further files, as written."""


def parse_loader_configuration(data: bytes) -> LoaderConfiguration:
    """The directories and includes in the text of an ld.so.conf; any bytes give a result.

    Source: ldconfig(8) and glibc's ldconfig.c: ``#`` begins a comment, ``DIR=TYPE`` is DIR.
    """
    directories: dict[str, None] = {}
    includes: dict[str, None] = {}
    text = data[:_CONFIGURATION_LIMIT_BYTES].decode("utf-8", "surrogateescape")
    for line in text.split("\n"):
        said = line.partition("#")[0].strip()
        words = said.split()
        if not words or words[0] == "hwcap" or "\0" in said:
            continue
        if words[0] == "include":
            includes.update(dict.fromkeys(words[1:]))
            continue
        for word in said.replace(":", " ").replace(",", " ").split():
            path = word.partition("=")[0].rstrip("/")
            if path.startswith("/"):
                directories[path] = None
    return LoaderConfiguration(
        tuple(directories)[:_DIRECTORIES_LIMIT], tuple(includes)[:_CONFIGURATION_FILES_LIMIT]
    )


def read(host: Host, seen: Seen) -> Iterator[DriverFile | Gap]:
    """One DriverFile a file, links followed.

    Errors: Unavailable where no driver's library is installed, or where the host's own directories
    are not to be seen (in a container, without ``--root``).
    """
    _check_whose_files(host)
    search = _Search(host)
    directories = [*_configured(host), *USUAL_DIRECTORIES, *_families(host)]
    for directory in dict.fromkeys(directories):
        search.look_for_links(directory)
    search.look_through()
    found = sorted(search.found.values(), key=lambda file: file.path)
    if not found:
        raise Unavailable("no library of a GPU driver is installed where the loader looks")
    yield from found[:_FILES_LIMIT]
    if len(found) > _FILES_LIMIT:
        yield Gap(
            sensor=SENSOR,
            what="driver libraries beyond the first ones",
            reason=f"more than {_FILES_LIMIT} are installed",
            count=len(found) - _FILES_LIMIT,
        )


def _check_whose_files(host: Host) -> None:
    """A container that sees the host's processes still has library directories of its own."""
    if not host.is_local:
        return
    own, init = read_namespace(host, "self", "mnt"), read_namespace(host, 1, "mnt")
    if own is None or init is None or own == init:
        return
    try:
        mine, theirs = host.status("/"), host.status("/proc/1/root/")
        same = (mine.device, mine.inode) == (theirs.device, theirs.inode)
    except GpuwardenError:
        same = False
    if not same:
        raise Unavailable(
            "the host's library directories are not in sight: this root directory is another",
            remedy="mount the host's root directory and give it with --root",
        )


def _configured(host: Host) -> list[str]:
    found: dict[str, None] = {}
    pending = [LOADER_CONFIGURATION]
    read_already: set[str] = set()
    while pending and len(read_already) < _CONFIGURATION_FILES_LIMIT:
        path = pending.pop(0)
        if path in read_already:
            continue
        read_already.add(path)
        try:
            said = parse_loader_configuration(host.read_bytes(path, _CONFIGURATION_LIMIT_BYTES))
        except GpuwardenError:
            continue
        found.update(dict.fromkeys(said.directories))
        for wanted in said.includes:
            pending += _matching(host, os.path.join(os.path.dirname(path), wanted))
    return list(found)[:_DIRECTORIES_LIMIT]


def _names(host: Host, directory: str) -> list[str]:
    try:
        return host.names(directory)[:_NAMES_LIMIT]
    except (GpuwardenError, ValueError):
        return []


def _matching(host: Host, wanted: str) -> list[str]:
    directory, name = os.path.split(wanted)
    return [
        f"{directory}/{found}" for found in sorted(fnmatch.filter(_names(host, directory), name))
    ]


def _families(host: Host) -> list[str]:
    return [
        os.path.join(directory, name, below).rstrip("/")
        for directory, beginning, below in FAMILIES
        for name in sorted(_names(host, directory))[:_DIRECTORIES_LIMIT]
        if name.startswith(beginning)
    ]


class _Search(Struct):
    """The files found so far, by identity, and the directories in which some were."""

    host: Host
    groups: Groups = field(default_factory=Groups)
    found: dict[_Identity, DriverFile] = field(default_factory=dict)
    directories: dict[_Identity, str] = field(default_factory=dict)
    """/lib and /usr/lib are mostly one."""

    def look_for_links(self, directory: str) -> None:
        """Asks for the names that programs load; large directories without them are not listed."""
        for library in DRIVER_LIBRARIES:
            for suffix in (".so.1", ".so"):
                path = f"{directory}/{library}{suffix}"
                try:
                    status = self.host.status(path)
                except (GpuwardenError, ValueError):
                    continue
                if status.is_regular:
                    self.note(directory)
                    self.add(library, path)

    def note(self, directory: str) -> None:
        try:
            status = self.host.status(directory)
        except GpuwardenError:
            return
        self.directories.setdefault((status.device, status.inode), directory)

    def look_through(self) -> None:
        """Lists the driver's directories: another version may lie beside the current one."""
        for directory in list(self.directories.values())[:_DIRECTORIES_LIMIT]:
            for name in _names(self.host, directory):
                if name.startswith(_BEGINNINGS):
                    library, _, version = name.partition(".so")
                    if not version or version.startswith("."):
                        self.add(library, f"{directory}/{name}")

    def add(self, library: str, path: str) -> None:
        try:
            status = self.host.status(path)
            key = (status.device, status.inode)
            if key in self.found or not status.is_regular:
                return
            resolved = self.host.resolved(path)
        except GpuwardenError:
            return
        self.note(os.path.dirname(resolved))
        self.found[key] = DriverFile(
            library=library,
            path=resolved.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"),
            device=f"{status.device[0]}:{status.device[1]}",
            inode=status.inode,
            writable_by=altered_by(self.host, status, self.groups),
        )
