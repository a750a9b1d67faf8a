"""Who listens on a unix socket: the kernel's answer, before a word is exchanged."""

from __future__ import annotations

import errno
import socket
import struct

from gpuwarden.errors import Denied, TimedOut, Unavailable

# struct ucred (unix(7), SO_PEERCRED): pid, uid, gid.
_UCRED = struct.Struct("iII")


def connect(path: str, deadline_seconds: float) -> socket.socket:
    """A stream socket connected to ``path``. Errors: Unavailable, TimedOut, Denied."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    channel.settimeout(deadline_seconds)
    try:
        channel.connect(path)
    except OSError as error:
        channel.close()
        if error.errno in (errno.EACCES, errno.EPERM):
            raise Denied(
                f"{path}: permission denied", remedy="run as root, or as a member of its group"
            ) from error
        if isinstance(error, TimeoutError) or error.errno == errno.EAGAIN:
            raise TimedOut(f"{path}: nobody accepts within {deadline_seconds:g} s") from error
        raise Unavailable(f"{path}: {error.strerror or error}") from error
    return channel


def listener_uid(channel: socket.socket) -> int:
    """The uid that made the listening socket at the other end (unix(7), SO_PEERCRED)."""
    raw = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(raw)[1])
