"""Whether anybody is logged in: systemd-logind's sessions, else the utmp file."""

from __future__ import annotations

import struct

from gpuwarden.errors import Denied, GpuwardenError
from gpuwarden.host import Host
from gpuwarden.pattern import pattern

SESSIONS = "/run/systemd/sessions"
UTMP = "/run/utmp"
# utmp(5): type, pid, line, id, user, host, exit, session, tv, address, unused; 384 bytes on Linux.
_ENTRY = struct.Struct("<hxxi32s4s32s256shhiii4i20x")
_USER_PROCESS = 7
_LIMIT_BYTES = _ENTRY.size * 4096
_SESSIONS_LIMIT = 1024
_LINE = pattern(r"^(CLASS|STATE)=(\S{1,64})$", 8)


def parse_session(text: str) -> bool:
    """Whether a session file of logind is a person's that is not closing (sd-login(3))."""
    fields = dict(_LINE.findall(text))
    return fields.get("CLASS", "user").startswith("user") and fields.get("STATE") != "closing"


def parse_utmp(data: bytes) -> list[int]:
    """The pids of the login processes in a utmp file; a damaged end is left out."""
    whole = len(data) - len(data) % _ENTRY.size
    return [
        entry[1]
        for entry in _ENTRY.iter_unpack(data[:whole])
        if entry[0] == _USER_PROCESS and entry[1] > 0
    ]


def somebody_logged_in(host: Host) -> bool | None:
    """Whether anybody is; None where neither source is there to tell."""
    try:
        names = host.names(SESSIONS)[:_SESSIONS_LIMIT]
    except GpuwardenError:
        return _by_utmp(host)
    unread = False
    for name in names:
        if name.endswith(".ref"):
            continue
        try:
            if parse_session(host.read_text(f"{SESSIONS}/{name}", 8192)):
                return True
        except Denied:
            unread = True
        except GpuwardenError:
            continue  # it has ended meanwhile
    return None if unread else False


def _by_utmp(host: Host) -> bool | None:
    try:
        pids = parse_utmp(host.read_bytes(UTMP, _LIMIT_BYTES))
    except GpuwardenError:
        return None
    # An entry outlives a session that was not ended in order.
    if host.is_live:
        return any(host.answers_signal(pid) for pid in pids)
    # Its pids are those of that host's /proc, if that is here to see.
    try:
        there = set(host.pids())
    except GpuwardenError:
        return None
    return not there.isdisjoint(pids) if there or not pids else None
