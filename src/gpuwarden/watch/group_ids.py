"""Whether a control group that is known by its number still exists, asked of the kernel by number.

By open_by_handle_at(2): a group's number is its file handle (FILEID_KERNFS of linux/exportfs.h,
kernel 5.5), so nothing is walked, however many groups somebody made. Needs CAP_DAC_READ_SEARCH.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.probes import cgroup2
from gpuwarden.probes.cgroup2 import DENIABLE_CONTROLLERS, GroupKey

_HANDLE = struct.Struct("=IiQ")
_HANDLE_BYTES, _KERNFS_ID = 8, 0xFE


def existing(groups: Iterable[GroupKey]) -> set[GroupKey]:
    """Those of the groups that exist, or of which that cannot be told. Errors: none."""
    wanted = set(groups)
    if not wanted:
        return wanted
    open_by_handle_at = ctypes.CDLL(None, use_errno=True).open_by_handle_at
    with _roots() as roots:
        return {one for one in wanted if not _is_gone(open_by_handle_at, roots, one)}


def _is_gone(call: Callable[..., int], roots: Mapping[int, int], group: GroupKey) -> bool:
    root = roots.get(group.hierarchy)
    if root is None:
        return False
    packed = _HANDLE.pack(_HANDLE_BYTES, _KERNFS_ID, group.id)
    handle = ctypes.create_string_buffer(packed, len(packed))
    opened = call(root, handle, os.O_PATH | os.O_CLOEXEC)
    if opened < 0:
        # The others say that we may not ask, or that this kernel does not know such handles.
        return ctypes.get_errno() == errno.ESTALE
    os.close(opened)
    return False


@contextmanager
def _roots() -> Iterator[dict[int, int]]:
    """Hierarchy → a descriptor in it, as far as each is mounted here."""
    roots: dict[int, int] = {}
    try:
        for hierarchy, directory in _mounted(Host()):
            if hierarchy not in roots:
                try:
                    roots[hierarchy] = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
                except OSError:
                    continue
        yield roots
    finally:
        for descriptor in roots.values():
            os.close(descriptor)


def _mounted(host: Host) -> Iterator[tuple[int, str]]:
    try:
        mounts = cgroup2.parse_mounts(host.read_text("/proc/self/mountinfo"))
        lines = host.read_text("/proc/self/cgroup").splitlines()
    except GpuwardenError:
        return
    for mount in mounts:
        if mount.kind == "cgroup2":
            yield 0, mount.where
    for line in lines:
        number, _, rest = line.partition(":")
        controllers = set(rest.partition(":")[0].split(","))
        if not number.isdigit() or not controllers & set(DENIABLE_CONTROLLERS):
            continue
        for mount in mounts:
            if mount.kind == "cgroup" and controllers <= set(mount.options):
                yield int(number), mount.where
