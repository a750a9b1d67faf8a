"""What the clocks of this machine say, and whether they can be trusted."""

from __future__ import annotations

import ctypes
import os
import struct
import time

from gpuwarden.evidence.manifest import Clock

BOOT_ID = "/proc/sys/kernel/random/boot_id"
LOCAL_TIME = "/etc/localtime"
_ZONES = "/zoneinfo/"
_ZONE_LIMIT = 64

_TIMEX = struct.Struct("@I4xqqqqi")  # modes, offset, freq, maxerror, esterror, status
_TIMEX_BYTES = 208
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of linux/timex.h
_TIME_ERROR = 5


def read_clock() -> Clock:
    """The clocks now; what could not be read is None with a reason."""
    unread: dict[str, str] = {}
    boot_id = None
    try:
        with open(BOOT_ID, "rb") as file:
            boot_id = file.read(64).decode("ascii", "replace").strip()
    except OSError as error:
        unread["boot_id"] = f"{BOOT_ID}: {error.strerror}"
    zone = None
    try:
        _, found, name = os.readlink(LOCAL_TIME).rpartition(_ZONES)
        zone = name[:_ZONE_LIMIT] if found else None
    except OSError as error:
        unread["time_zone"] = f"{LOCAL_TIME}: {error.strerror}"
    synchronised, max_error_us = _kernel_clock(unread)
    return Clock(
        realtime_ns=time.time_ns(),
        boottime_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        boot_id=boot_id,
        time_zone=None if zone is None else zone.encode(errors="replace").decode(),
        utc_offset_seconds=time.localtime().tm_gmtoff,
        synchronised=synchronised,
        max_error_us=max_error_us,
        unread=unread,
    )


def _kernel_clock(unread: dict[str, str]) -> tuple[bool | None, int | None]:
    """Whether something keeps the clock right, and its error (adjtimex(2), which changes nothing
    with modes 0)."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (OSError, AttributeError) as error:
        unread["synchronised"] = f"adjtimex: {error}"
        return None, None
    if state < 0:
        unread["synchronised"] = f"adjtimex: {os.strerror(ctypes.get_errno())}"
        return None, None
    *_, max_error_us, _, status = _TIMEX.unpack_from(buffer)
    return state != _TIME_ERROR and not status & _UNSYNCHRONISED, max_error_us
