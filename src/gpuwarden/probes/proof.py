"""Whether what was attached is called at all: it is asked for by an open of our own.

The BPF LSM, for one, can be attached to where it is not among the kernel's active security modules;
it then sees nothing, and says nothing of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from gpuwarden.errors import Unavailable
from gpuwarden.probes import tables
from gpuwarden.probes.libbpf import Libbpf
from gpuwarden.probes.loading import LoadedObject
from gpuwarden.probes.settings import Number

DEVICES: dict[Number, str] = {(1, 7): "/dev/full", (1, 5): "/dev/zero"}
"""Of no importance, and there in most containers too."""
_WATCHED = b"\1\0\0\0"


def prove(bpf: Libbpf, loaded: LoadedObject, discard: Callable[[], None]) -> None:
    """Opens a device and looks whether that was seen; ``discard`` empties the ring afterwards.

    For an object that watches nothing yet; leaves no trace in it. Errors: Unavailable, OSError.
    """
    for number in DEVICES:
        loaded.put("watched_devices", tables.device_key(number), _WATCHED)
    for path in DEVICES.values():
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError:
            continue  # an attempt may be seen as well
    seen = tables.counters(bpf, loaded)["hits"]
    for number in DEVICES:
        loaded.delete("watched_devices", tables.device_key(number))
    if not seen:
        raise Unavailable(
            f"it was attached, and an open of {' or '.join(DEVICES.values())} by this program was "
            "not seen",
            remedy="for lsm: have bpf among the kernel's active security modules (lsm=...,bpf)",
        )
    discard()
    loaded.delete("touched_processes", os.getpid().to_bytes(4, "little"))
    for key in list(tables.count_keys(bpf, loaded)):
        loaded.delete("counts", key)
    tables.clear_counters(bpf, loaded)
