"""Another program's device rules on a control group, attached as runc and systemd attach theirs.

bpf(2) as it is, without libbpf: BPF_PROG_ATTACH with BPF_F_ALLOW_MULTI on the group's directory.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_BPF = 321  # x86-64
_PROG_LOAD, _PROG_ATTACH, _PROG_DETACH = 5, 8, 9
_TYPE_CGROUP_DEVICE, _ATTACH_CGROUP_DEVICE, _ALLOW_MULTI = 15, 6, 2
# r0 = 0; exit: no device at all.
_REFUSE_ALL = struct.pack("<BBhi", 0xB7, 0, 0, 0) + struct.pack("<BBhi", 0x95, 0, 0, 0)


@contextmanager
def refusing(group: str) -> Iterator[None]:
    """Device rules that refuse every device to a control group. Errors: OSError."""
    code = ctypes.create_string_buffer(_REFUSE_ALL)
    licence = ctypes.create_string_buffer(b"GPL")
    load = struct.pack(
        "<IIQQ", _TYPE_CGROUP_DEVICE, 2, ctypes.addressof(code), ctypes.addressof(licence)
    )
    program = _call(_PROG_LOAD, load + bytes(104))
    target = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
    where = struct.pack("<III", target, program, _ATTACH_CGROUP_DEVICE)
    try:
        _call(_PROG_ATTACH, where + struct.pack("<II", _ALLOW_MULTI, 0))
        try:
            yield
        finally:
            _call(_PROG_DETACH, where + bytes(8))
    finally:
        os.close(target)
        os.close(program)


def _call(command: int, attributes: bytes) -> int:
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(_BPF, command, ctypes.byref(buffer), len(attributes))
    if done < 0:
        raise OSError(ctypes.get_errno(), f"bpf({command}): {os.strerror(ctypes.get_errno())}")
    return int(done)
