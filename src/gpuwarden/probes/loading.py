"""One probe object in the kernel: its programs chosen, loaded and attached, all of them or none."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack

from gpuwarden.errors import Denied, GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.probes import btf, cgroup2, layouts
from gpuwarden.probes.layouts import Layouts
from gpuwarden.probes.libbpf import Libbpf
from gpuwarden.probes.settings import Settings
from gpuwarden.probes.ways import Way

KERNEL_TYPES = "/sys/kernel/btf/vmlinux"
TRACEFS = ("/sys/kernel/tracing/events", "/sys/kernel/debug/tracing/events")
NOT_LOADED = "the eBPF probe is not loaded, or no longer"
RIGHTS = (
    "run as root, or with CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN and CAP_SYS_ADMIN, on a kernel that "
    "is not locked down"
)
SAID_LINES = 4

_LIFE = ("process_fork", "process_exec", "process_exit")
_RETURNS = "returned"
_GROUPS = "group_made"
_HOLDERS = "holders"
_BY_CGROUP = "device_access"
_AT_THE_END_OF = {
    "returned": ("openat", "openat2", "open"),
    "descriptor": ("openat", "openat2", "open_by_handle_at", "open", "creat"),
}
"""Program → the system calls that it is attached to the end of: it is loaded once for all."""
_X86_ONLY = ("open", "creat")
MAPS = {
    "records": "records",
    "watched_devices": "watched_devices",
    "counts": "counts",
    "denied_cgroups": "denied_cgroups",
    "counters": "counters",
    "touched_processes": "touched_processes",
    "settings": "settings_map",
}
"""What the loader calls each map, and its name in the object."""


class LoadedObject:
    """Programs and maps in the kernel; all of it goes with the ExitStack it was loaded on."""

    def __init__(self, bpf: Libbpf, way: Way, settings: Settings) -> None:
        self._bpf = bpf
        self._way = way
        self._settings = settings
        self._programs: dict[str, int] = {}
        self.links: dict[str, int] = {}
        """Program → libbpf's pointer to what attached it."""
        self.maps: dict[str, int] = {}
        """Map → descriptor."""

    def load(self, stack: ExitStack, path: str, hooks: tuple[str, ...]) -> None:
        """Loads an object with these hooks, attaching nothing yet. Errors: OSError."""
        bpf = self._bpf
        loaded = bpf.pointer("bpf_object__open_file", path.encode(), None)
        stack.callback(bpf.call, "bpf_object__close", loaded)
        for name in self._wanted(hooks):
            found = bpf.pointer("bpf_object__find_program_by_name", loaded, name.encode())
            bpf.checked("bpf_program__set_autoload", found, True)
            self._programs[name] = found
        ring = bpf.pointer("bpf_object__find_map_by_name", loaded, b"records")
        bpf.checked("bpf_map__set_max_entries", ring, self._settings.ring_bytes)
        bpf.checked("bpf_object__load", loaded)
        for name, in_object in MAPS.items():
            found = bpf.pointer("bpf_object__find_map_by_name", loaded, in_object.encode())
            self.maps[name] = bpf.checked("bpf_map__fd", found)
        stack.callback(self._forget)

    def _wanted(self, hooks: tuple[str, ...]) -> list[str]:
        names = [*_LIFE, _HOLDERS]
        if self._settings.groups:
            names.append(_GROUPS)
        if self._settings.return_values and not self._way.gives_results:
            names.append(_RETURNS)
        # The hooks that events come from are attached last, when all else is there.
        return [*names, *hooks]

    def _forget(self) -> None:
        self.maps.clear()
        self.links.clear()

    def attach(self, stack: ExitStack, host: Host) -> None:
        """Attaches every program. Errors: OSError, Unavailable, Denied."""
        for name, program in self._programs.items():
            for key, link in self._attached(name, program, host):
                stack.callback(self._bpf.call, "bpf_link__destroy", link)
                self.links[key] = link

    def _attached(self, name: str, program: int, host: Host) -> Iterator[tuple[str, int]]:
        if name == _HOLDERS:
            yield name, self._bpf.pointer("bpf_program__attach_iter", program, None)
        elif name == _BY_CGROUP:
            yield name, self._attached_to_root(program, host)
        elif name in _AT_THE_END_OF:
            for call in _AT_THE_END_OF[name]:
                if call in _X86_ONLY and os.uname().machine != "x86_64":
                    continue
                where = (b"syscalls", f"sys_exit_{call}".encode())
                link = self._bpf.pointer("bpf_program__attach_tracepoint", program, *where)
                yield f"{name}_{call}", link
        else:
            yield name, self._bpf.pointer("bpf_program__attach", program)

    def _attached_to_root(self, program: int, host: Host) -> int:
        root = cgroup2.open_root(host)
        try:
            # By a link: it lives beside the programs of runc and systemd and ends with us.
            return self._bpf.pointer("bpf_program__attach_cgroup", program, root)
        except PermissionError as error:
            raise Denied(
                "the cgroup root has another device program, attached for itself alone",
                remedy="detach it (bpftool cgroup tree), or have it attached with its 'multi' flag",
            ) from error
        finally:
            os.close(root)

    def map(self, name: str) -> int:
        """The descriptor of a map. Errors: Unavailable."""
        if name not in self.maps:
            raise Unavailable(NOT_LOADED)
        return self.maps[name]

    def holders_iterator(self) -> int:
        """A new descriptor that gives what the iterator over open files writes. Errors: OSError."""
        if _HOLDERS not in self.links:
            raise Unavailable(NOT_LOADED)
        link = self._bpf.checked("bpf_link__fd", self.links[_HOLDERS])
        return self._bpf.checked("bpf_iter_create", link)

    def put(self, name: str, key: bytes, value: bytes) -> None:
        """Sets an entry of a map. Errors: OSError, Unavailable."""
        self._bpf.checked("bpf_map_update_elem", self.map(name), key, value, 0)

    def delete(self, name: str, key: bytes) -> None:
        """Removes an entry of a map, if it is there."""
        self._bpf.call("bpf_map_delete_elem", self.map(name), key)


def check_needs(settings: Settings, way: Way, path: str) -> None:
    """What loading needs of this machine and of the object. Errors: Unavailable, Malformed."""
    check_kernel_types()
    needs_tracefs = settings.return_values or way.name in ("kprobe", "tracepoint")
    if needs_tracefs and not any(map(os.path.isdir, TRACEFS)):
        what = "return values need" if settings.return_values else f"{way.name} needs"
        raise Unavailable(
            f"{what} tracefs, and it is not mounted",
            remedy="mount -t tracefs tracefs /sys/kernel/tracing",
        )
    check_object(path)


def check_kernel_types() -> None:
    """That this kernel has what a probe is fitted to it with. Errors: Unavailable."""
    if not os.path.exists(KERNEL_TYPES):
        raise Unavailable(
            "this kernel does not describe its types (BTF): the probe cannot be fitted to it",
            remedy="a kernel of 5.8 or later with CONFIG_DEBUG_INFO_BTF",
        )


def check_object(path: str, among: Layouts | None = None) -> None:
    """That an object is there and exchanges what we declare: ``among``, else the device probe's.

    Errors: Unavailable, Malformed.
    """
    try:
        with open(path, "rb") as file:
            structures = btf.structures(file.read())
    except FileNotFoundError as error:
        raise Unavailable(
            "the eBPF probe was not built with this installation",
            remedy="scripts/build_probes in a checkout, or a wheel for this machine",
        ) from error
    layouts.check(structures, among=among)


def explained(bpf: Libbpf, error: OSError) -> GpuwardenError:
    """The reason why an object was not loaded, as an error of ours.

    What libbpf and the verifier said goes into the message where rights are not the cause, and
    into the error's notes in any case.
    """
    message = f"the eBPF probe was not loaded: {error.strerror or error}"
    found: GpuwardenError
    if error.errno in (errno.EPERM, errno.EACCES):
        found = Denied(message, remedy=RIGHTS)
    else:
        said = " / ".join(bpf.said[-SAID_LINES:])
        found = Unavailable(
            f"{message} ({said})" if said else message,
            remedy="a kernel of 5.8 or later with cgroup and BPF support",
        )
    for line in bpf.said:
        found.add_note(line)
    return found
